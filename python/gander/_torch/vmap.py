"""vmap rules for gander's operators, from the table of operators.

If every result has rows, the batch dimension becomes a dimension of rows, and the operator runs once.
Otherwise the operator runs for each sample. A result that sums over rows (a mean, dw) would mix the samples
of a batch. A batched weight would differ from row to row.
"""

import torch

from .._table import REDUCTIONS, SHAPES, TORCH, arguments, demand, has_rows, is_by_row, operands
from .registry import complete, overloads, registry, untraced


def _folded(name, values, dims, size):
    """The arguments of a single call whose rows include the batch, or None if its results would differ."""
    operator, of = TORCH[name], operands(name)
    reduction = values.get("reduction", operator.fixed.get("reduction", 0))
    results = (*_wanted(operator, values), *operator.writes.values())
    if operator.packed or REDUCTIONS[reduction] != "none" or not all(is_by_row(of[name]) for name in results):
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
            if value.numel() != leading.numel():
                return None
        folded[argument] = value
    return tuple(folded.values())


def _wanted(operator, values):
    """The results that a call computes. Others have no elements, so no batch either."""
    return [result for result in operator.results if values.get(demand(result), True)]


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


def _dims(operator, values):
    """Where the results of a call have the batch."""
    wanted = _wanted(operator, values)
    dims = tuple(0 if result in wanted else None for result in operator.results)
    return dims[0] if len(dims) == 1 else dims or None


def _rule(name):
    operator, overload, names = TORCH[name], overloads[name], arguments(name)

    def rule(info, in_dims, *given):
        values = dict(zip(names, complete(name, given), strict=True))
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
        dims = _dims(operator, values)
        if isinstance(dims, tuple):  # stacked, one without elements still has none
            results = tuple(
                value if dim == 0 else value.flatten() for value, dim in zip(results, dims, strict=True)
            )
        return results, dims

    return rule


for _name in TORCH:
    torch.library.register_vmap(f"gander::{_name}", untraced(_rule(_name)), lib=registry)
