"""vmap rules for gander's operators, from the table of operators.

If every result has rows, the batch dimension becomes a dimension of rows, and the operator runs once.
Otherwise the operator runs for each sample. A result that sums over rows (a mean, dw) would mix the samples
of a batch. A batched weight would differ from row to row.
"""

import math

import torch

from .._table import SHAPES, TORCH, arguments, has_rows, is_by_row, operands, reduction, sizes, wanted
from .registry import by_name, overloads, registry, untraced


def _folded(name, values, dims, size):
    """The arguments of a single call whose rows include the batch, or None if its results would differ."""
    operator, of = TORCH[name], operands(name)
    results = (*wanted(name, values), *operator.writes.values())
    if (
        operator.packed
        or reduction(name, values) != "none"
        or not all(is_by_row(of[result]) for result in results)
    ):
        return None
    folded, leading = dict(values), None
    for argument, value in values.items():
        if argument not in of or value is None:
            continue
        operand, dim = of[argument], dims[argument]
        rows, broadcast = has_rows(operand), SHAPES[operand.shape].layout == "broadcast"
        if not is_by_row(operand) or (broadcast and dim is None):
            # An operand of a higher rank than the sample, which the operator refuses, could pass for one of
            # the batch.
            if dim is not None or value.ndim > len(leading):
                return None
            continue
        value = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        if leading is None:  # the first operand decides
            leading = value.shape[:-1]
            if values.get("causal") and len(leading) < 2:  # a sample has no rows, which the operator refuses
                return None
        if broadcast:
            missing = len(leading) + 1 - value.ndim  # between the batch and the sample's dimensions
            if missing < 0:  # the operator refuses it
                return None
            value = value.reshape(size, *[1] * missing, *value.shape[1:])
        if rows and value.ndim < 2:  # a sample has rank 0, which the operator refuses
            return None
        if not rows and not broadcast:
            single = any(form.sizes == "" for form in SHAPES[operand.shape].forms)
            if single and value.numel() == size:  # one value for all rows of a sample
                value = value.reshape(size, *[1] * (len(leading) - 1)).expand(leading)
            if value.numel() != math.prod(sizes(SHAPES[operand.shape].forms[0].sizes, (*leading, 1))):
                return None
        folded[argument] = value
    return tuple(folded.values())


def each_sample(overload, values, dims, size):
    """The results of one call for each sample, stacked."""
    if not size:
        raise ValueError(
            f"gander: vmap of {overload} got a batch of size 0, expected 1 or more; skip the call"
        )
    results = [
        overload(
            *(
                value if dims[name] is None else value.select(dims[name], sample)
                for name, value in values.items()
            )
        )
        for sample in range(size)
    ]
    if isinstance(results[0], tuple):
        return tuple(map(torch.stack, zip(*results, strict=True)))
    return None if results[0] is None else torch.stack(results)


def _rule(name):
    operator, overload, names = TORCH[name], overloads[name], arguments(name)

    def rule(info, in_dims, *given):
        values = by_name(name, given)
        if "inplace_backward" in values:  # a sample's gradient would be written over a part of the batch
            values["inplace_backward"] = False
        dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
        for argument in operator.writes:
            if values[argument] is not None and dims[argument] is None:
                raise ValueError(
                    f"gander: vmap of {name} expected a batch of {argument}: it would write the results of "
                    f"all samples over the same {argument}; batch it too"
                )
        folded = _folded(name, values, dims, info.batch_size)
        if folded is None:
            results = each_sample(overload, values, dims, info.batch_size)
        else:
            results = overload(*folded)
        # A result that was not asked for has no elements, and no batch. Stacked, it still has none.
        dims = tuple(0 if of in wanted(name, values) else None for of in operator.results)
        if len(dims) < 2:
            return results, dims[0] if dims else None
        results = (value if dim == 0 else value.flatten() for value, dim in zip(results, dims, strict=True))
        return tuple(results), dims

    return rule


for _name in TORCH:
    torch.library.register_vmap(f"gander::{_name}", untraced(_rule(_name)), lib=registry)
