"""vmap rules for gander's operators, from the table of operators.

If every result has rows, the batch dimension becomes a dimension of rows, and the operator runs once.
Otherwise the operator runs for each sample. A result that sums over rows (a mean, dw) would mix the samples
of a batch. A batched weight would differ from row to row.
"""

import torch

from ._operators_gen import REDUCTIONS, TORCH
from ._schemas import arguments, complete, operands, overloads, registry, untraced

# Shapes with an element for each row, if there is no reduction.
_BY_ROW = {"rows", "per_row", "reduced", "statistics"}


def _folded(name, values, dims, size):
    """The arguments of a single call whose rows include the batch, or None if its results would differ."""
    operator, of = TORCH[name], operands(name)
    reduction = values.get("reduction", operator.fixed.get("reduction", 0))
    shapes = {of[result].shape for result in (*operator.results, *operator.writes.values())}
    if operator.packed or REDUCTIONS[reduction] != "none" or not shapes <= _BY_ROW:
        return None
    folded, leading = dict(values), None
    for argument, value in values.items():
        if argument not in of or value is None:
            continue
        shape, dim = of[argument].shape, dims[argument]
        if shape in ("columns", "head_columns", "one") or (shape == "broadcast" and dim is None):
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
        if shape == "broadcast":
            missing = len(leading) + 1 - value.ndim  # between the batch and the sample's dimensions
            if missing < 0:  # the operator refuses it
                return None
            value = value.reshape(size, *[1] * missing, *value.shape[1:])
        if shape == "rows" and value.ndim < 2:  # a sample has rank 0, which the operator refuses
            return None
        if shape == "upstream" and value.numel() == size:  # one value for all rows of a sample
            value = value.reshape(size, *[1] * (len(leading) - 1)).expand(leading)
        if shape in ("upstream", "statistics") and value.numel() != leading.numel():
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
        values = dict(zip(names, complete(name, given), strict=True))
        if "inplace_backward" in values:  # a sample's gradient would be written over a part of the batch
            values["inplace_backward"] = False
        dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
        for argument in operator.writes:
            if values[argument] is not None and dims[argument] is None:
                raise ValueError(
                    f"gander: vmap of {name} would write the results of all samples over the same "
                    f"{argument}; batch it too"
                )
        folded = _folded(name, values, dims, info.batch_size)
        if folded is None:
            results = each_sample(overload, values, dims, info.batch_size)
        else:
            results = overload(*folded)
        return results, None if results is None else (0,) * len(results) if isinstance(results, tuple) else 0

    return rule


for _name in TORCH:
    torch.library.register_vmap(f"gander::{_name}", untraced(_rule(_name)), lib=registry)
