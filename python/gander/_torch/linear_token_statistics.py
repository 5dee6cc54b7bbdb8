"""Statistics of the tokens whose logits are hidden @ weight.T + bias.

On one device (head_statistics.py), or of tokens that are divided among ranks
(sharded_linear_token_statistics.py).
"""

import math

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing

from .._table import demand
from . import operators_gen
from .dtensor import is_dtensor
from .head_statistics import apply, run
from .linear_operands import autocast, check_dtype, check_operands
from .refusals import refuse_tangents
from .tensors import DTYPES, dtype_of, in_shape
from .token_statistics import MAPS, RESULTS, STATISTICS, maps_of

# By default the logits of so many parts of the rows are held one after the other, of parts of the columns
# where those of weight's gradient are made. With the sum of hidden's gradient, 8192 rows of 151936 bfloat16
# logits and 4096 hidden columns then take less than 700 MiB, 600 MiB where weight is trained.
_PARTS, _PARTS_OF_COLUMNS = 4, 6
_ROWS = 512  # of a part, a multiple of so many: products of 1366 or 1664 rows take 5 to 10 % longer


def linear_token_statistics(
    hidden,
    weight,
    index,
    bias,
    row_mask,
    ignore_index,
    chunk,
    keeps,
    batch_invariant,
    more,
    names,
    group=None,
    sizes=(),
    allreduce_dgrad=False,
):
    """gander.linear_token_statistics, which has its documentation. Returns what token_statistics returns.

    group, sizes, allreduce_dgrad: those of gander.distributed.linear_token_statistics, of which weight and
    bias are this rank's slices.
    """
    of_rows = {"index": index, "row_mask": row_mask}
    check_operands("hidden", hidden, weight, of_rows, {"bias": bias}, group is not None)
    if forward_ad._current_level >= 0:
        refuse_tangents((hidden, weight, bias))
    slices = None
    if is_dtensor(weight):  # of torch.distributed, which takes long to import
        from .sharded_heads import parts

        given = "linear_token_statistics", "hidden", hidden, weight, bias, of_rows
        slices, hidden, weight, bias, index, row_mask = parts(*given)
        group, sizes = slices.group, slices.sizes
    hidden, weight, bias = autocast(hidden, weight, bias)
    check_dtype("hidden", hidden)
    weight, bias = _cast("weight", weight, hidden), _cast("bias", bias, hidden)
    shape, rows = index.shape, hidden.reshape(math.prod(index.shape), hidden.shape[-1])
    labels = (index.long() if index.dtype == torch.uint8 else index).reshape(-1)
    mask = None if row_mask is None else row_mask.reshape(-1)
    needs = dict.fromkeys(map(demand, STATISTICS), False) | {demand(name): True for name in names}
    # torch.jit.trace compares its graph with one that is traced without gradients: both keep the state.
    differentiates = torch.is_grad_enabled() and not is_tracing() and not set(names).isdisjoint(RESULTS[:2])
    wanted = [differentiates and t is not None and t.requires_grad for t in (rows, weight, bias)]
    if chunk is None:
        chunk = _chunk(rows.shape[0], by_columns=any(wanted[1:]))
    if group is not None:
        from .sharded_linear_token_statistics import of_slices

        options = more | ({"batch_invariant": True} if batch_invariant else {})
        tensors = rows, weight, labels, bias, mask
        how = allreduce_dgrad, chunk, keeps and any(wanted), sizes, ignore_index, group
        results = of_slices(tensors, *how, names, options)
    # Transforms need operators that they can differentiate, and logits on meta take no memory.
    elif torch._C._are_functorch_transforms_active() or hidden.is_meta:
        logits = torch.nn.functional.linear(rows, weight, bias)
        options = dict(zip(MAPS, maps_of(more), strict=True)) | {"batch_invariant": batch_invariant}
        options |= {"ignore_index": ignore_index, **needs}
        results = operators_gen.token_statistics(logits, labels, mask, **options)[:-1]
    else:
        makes = wanted[0] and not any(wanted[1:]) and "entropy" not in names and not keeps
        options = ignore_index, chunk, keeps and any(wanted), makes, batch_invariant, *maps_of(more)
        options = *options, *needs.values(), any(wanted) or is_tracing()
        run_or_apply = apply if any(wanted) and not is_compiling() else run
        results = run_or_apply(rows, weight, labels, bias, mask, *options)[: len(STATISTICS)]
    if len(shape) != 1:
        each = zip(results, needs.values(), strict=True)
        results = [in_shape(result, shape) if need else result for result, need in each]
    if slices is None:
        return results
    each = zip(results, needs.values(), strict=True)
    return [slices.whole(result) if need else result for result, need in each]


def _chunk(rows, by_columns):
    """The rows whose logits are held at a time, where nobody says how many."""
    if by_columns:
        return max(1, -(-rows // _PARTS_OF_COLUMNS))
    return -(-rows // (_PARTS * _ROWS)) * _ROWS or 1


def _cast(name, value, hidden):
    """A weight or bias in hidden's dtype."""
    if value is None or value.dtype == hidden.dtype:
        return value
    if value.dtype not in DTYPES or (value.dtype == torch.float64) != (hidden.dtype == torch.float64):
        raise TypeError(
            f"{name} has dtype {dtype_of(value)}, expected {dtype_of(hidden)} as hidden; convert one of them"
        )
    return value.to(hidden.dtype)
