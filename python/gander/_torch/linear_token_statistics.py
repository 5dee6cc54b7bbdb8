"""Statistics of the tokens whose logits are hidden @ weight.T + bias, without the logits of all rows.

Forward computes the logits of a chunk of rows, and their statistics. Backward computes the logits again, and
lets the kernel write their gradient over them. If the gradient of weight is wanted it divides the logits by
columns, not by rows: then each row of that gradient comes from one matrix product, and the gradient of hidden
is added up, in float32.
"""

import math
from functools import partial

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing

from .._table import TORCH, demand
from . import operators_gen
from .autograd import apply_with, refuse_constant
from .cross_entropy import is_first_backward
from .dtensor import is_dtensor
from .eager import is_plain
from .graph_operators import define
from .linear_chunks import Sum, new_gradient, once
from .linear_operands import autocast, check_dtype, check_operands
from .refusals import refuse_tangents
from .tensors import DTYPES, dtype_of, in_shape, statistic

# By default the logits of so many parts of the rows are held one after the other, of parts of the columns
# where those of weight's gradient are made. With the sum of hidden's gradient, 8192 rows of 151936 bfloat16
# logits and 4096 hidden columns then take less than 700 MiB, 600 MiB where weight is trained.
_PARTS, _PARTS_OF_COLUMNS = 4, 6
_ROWS = 512  # of a part, a multiple of so many: products of 1366 or 1664 rows take 5 to 10 % longer
# Tiles of columns begin at a multiple of so many elements, for vectors of 16 bytes and for the products.
_COLUMNS = 64
_ELSEWHERE = -(2**63)  # an ignore_index that no index equals which counts from a tile's first column

_RESULTS = TORCH["token_statistics"].results  # log_prob and entropy, which have gradients, come first
_STATISTICS = _RESULTS[:-1]  # without the state
_MAPS = ("scale", "softcap", "temperature")  # options that map logits
_HEADS = 4  # results of floating-point numbers
_DIFFERENTIABLE = (0, 1, 3)


# ---- Forward ----


def _compute(x, weight, index, bias, row_mask, ignore_index, chunk, keeps, makes, batch_invariant, *more):
    """The statistics, the state of the rows, their logits and the gradient of x. Those that are not wanted
    have no elements.

    x: (M, K). weight: (V, K). keeps: the logits. makes: the gradient of x for an upstream gradient of 1 of
    each log-probability, in float32 (float64 for float64).
    """
    options = dict(zip(_MAPS, more, strict=False)) | {"batch_invariant": batch_invariant}
    needs = dict(zip(map(demand, _RESULTS), more[len(_MAPS) :], strict=True))
    (rows, _), classes = x.shape, weight.shape[0]
    made = x.new_empty(x.shape if makes else 0, dtype=statistic(x.dtype))
    with torch.autocast(x.device.type, enabled=False):  # an operator may run under it
        held = x.new_empty(rows if keeps else min(chunk, rows), classes)
        parts = []
        for first in range(0, max(rows, 1), len(held) or 1):
            part = slice(first, min(first + len(held), rows))
            logits = _product(held[: part.stop - first], x[part], weight, bias)
            mask = None if row_mask is None else row_mask[part]
            given = {"index": index[part], "row_mask": mask, "ignore_index": ignore_index, **options}
            parts.append(operators_gen.token_statistics(logits, **given, **needs))
            if makes:
                state = parts[-1][-1]
                ones = state.new_ones(len(logits))
                operators_gen.token_statistics_bwd_(logits, **given, state=state, dlog_prob=ones)
                made[part] = _wide_product(logits, weight, made.dtype)
    results = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return *results, held if keeps else x.new_empty(0), made


def _fake(x, weight, index, bias, row_mask, ignore_index, chunk, keeps, makes, batch_invariant, *more):
    empty, needs = x.new_empty, more[len(_MAPS) :]
    wide = statistic(x.dtype)
    dtypes = *(wide,) * _HEADS, torch.bool, torch.int64, wide
    shapes = *(index.shape,) * len(_STATISTICS), (*index.shape, 3)
    each = zip(shapes, dtypes, needs, strict=True)
    return (
        *(empty(shape if need else 0, dtype=dtype) for shape, dtype, need in each),
        empty((x.shape[0], weight.shape[0]) if keeps else 0),
        empty(x.shape if makes else 0, dtype=wide),
    )


def _product(out, x, weight, bias):
    """x @ weight.T + bias, in out."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _wide_product(a, b, dtype):
    """a @ b with a result of this dtype."""
    if a.dtype == dtype or a.is_cuda:  # torch's products with a wider result are for GPUs
        return torch.mm(a, b, **({} if a.dtype == dtype else {"out_dtype": dtype}))
    return torch.mm(a.to(dtype), b.to(dtype))


# ---- Backward ----


def _differentiate(x, weight, index, bias, row_mask, state, logits, dlog_prob, dentropy, *more, over=False):
    """dx, dweight and dbias. Those that are not needed have no elements. Of the upstream gradients one may be
    None, of which nothing is needed. logits: those that forward kept, or no elements. over: they may be
    written over."""
    ignore_index, chunk, batch_invariant, *maps, needs_dx, needs_dw, needs_db = more
    (rows, _), classes = x.shape, weight.shape[0]
    options = dict(zip(_MAPS, maps, strict=True)) | {"batch_invariant": batch_invariant}
    options |= {"ignore_index": _ELSEWHERE, "slice": True}
    index = index.long()
    counts = index != ignore_index
    if row_mask is not None:
        counts &= row_mask != 0
    if dlog_prob is not None:  # no tile knows that an index is in none
        dlog_prob = dlog_prob.masked_fill((index < 0) | (index >= classes), float("nan"))
    kept = bool(logits.numel())
    by_columns = needs_dw or needs_db
    tiles = _tiles(rows, classes, rows if over and kept else chunk, by_columns)
    total, dx = Sum(x, len(tiles) > 1), new_gradient(x, needs_dx and not by_columns)
    dw, db = new_gradient(weight, needs_dw), new_gradient(x if bias is None else bias, needs_db)
    buffer = None
    with torch.autocast(x.device.type, enabled=False):
        for part, columns in tiles:
            if kept:
                tile = logits[part, columns]
            else:
                size = part.stop - part.start, columns.stop - columns.start
                buffer = x.new_empty(size) if buffer is None else buffer  # the first tile is the largest
                own = None if bias is None else bias[columns]
                tile = _product(buffer[: size[0], : size[1]], x[part], weight[columns], own)
            given = {"index": index[part] - columns.start, "row_mask": counts[part], "state": state[part]}
            given |= {"dlog_prob": _rows(dlog_prob, part), "dentropy": _rows(dentropy, part)} | options
            if kept and not over:
                tile = operators_gen.token_statistics_bwd(tile, **given)
            else:
                operators_gen.token_statistics_bwd_(tile, **given)
            if needs_dx and by_columns:
                total.add_product(tile.t(), weight[columns])
            elif needs_dx:
                torch.mm(tile, weight, out=dx[part])
            if needs_dw:
                torch.mm(tile.t(), x, out=dw[columns])
            if needs_db:
                db[columns] = tile.sum(0, dtype=statistic(x.dtype))
    return total.result() if needs_dx and by_columns else dx, dw, db


def _tiles(rows, classes, chunk, by_columns):
    """Rows and columns of the tiles of logits that are held one after the other. They have about as many
    elements as this number of rows."""
    if not by_columns:
        return [(slice(at, min(at + chunk, rows)), slice(0, classes)) for at in range(0, rows, chunk)]
    width = -(-classes // max(1, -(-rows // chunk)))
    width = -(-width // _COLUMNS) * _COLUMNS
    return [(slice(0, rows), slice(at, min(at + width, classes))) for at in range(0, classes, width)]


def _rows(tensor, part):
    return None if tensor is None else tensor[part]


def _fake_gradients(x, weight, index, bias, *others):
    bias = x if bias is None else bias
    return tuple(map(new_gradient, (x, weight, bias), others[-3:]))


_gradients = define(
    "linear_token_statistics_bwd(Tensor x, Tensor weight, Tensor index, Tensor? bias, Tensor? row_mask, "
    "Tensor state, Tensor logits, Tensor? dlog_prob, Tensor? dentropy, SymInt ignore_index, SymInt chunk, "
    f"bool batch_invariant, {''.join(f'float {name}, ' for name in _MAPS)}"
    "bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    _differentiate,
    _fake_gradients,
)


# ---- The operator, and its gradient ----


def _keep(ctx, inputs, results):
    x, weight, index, bias, row_mask, ignore_index, chunk, _, ctx.makes, batch_invariant, *more = inputs
    *_, state, logits, made = results
    ctx.save_for_backward(x, weight, index, bias, row_mask, state, logits, made)
    ctx.options = ignore_index, chunk, batch_invariant, *more[: len(_MAPS)]
    ctx.asked = more[len(_MAPS) + 2 : len(_MAPS) + _HEADS]
    ctx.set_materialize_grads(False)


def _gradient(ctx, *upstream, eager=False):
    dlog_prob, dentropy, *others = upstream
    for name, value, asked in zip(_RESULTS[2:_HEADS], others, ctx.asked, strict=True):
        if asked and value is not None:
            dentropy = refuse_constant("linear_token_statistics", name, value, dentropy)
    *inputs, logits, made = ctx.saved_tensors
    x, weight, _, bias, *_ = inputs
    needs = [ctx.needs_input_grad[at] for at in _DIFFERENTIABLE]
    given = [value for value in (dlog_prob, dentropy) if value is not None]
    sources = [source for source in (x, weight, bias) if source is not None]
    with torch.no_grad():
        if ctx.makes:
            gradients = _scaled(made, dlog_prob, dentropy, x.dtype), None, None
            return once(gradients, needs, sources, given[0])
        compute = _gradients
        if eager and logits.numel() and all(map(is_plain, given)) and is_first_backward(ctx):
            compute = partial(_differentiate, over=True)
            logits = logits.data  # whose version autograd does not compare in a later backward pass
        elif getattr(ctx, "returned", False):  # a backward pass has written over the logits
            logits = logits.new_empty(0)
        gradients = compute(*inputs, logits, dlog_prob, dentropy, *ctx.options, *needs)
    return once(gradients, needs, sources, given[0])


def _scaled(made, dlog_prob, refused, dtype):
    """The gradient of x, from that for an upstream gradient of 1. A row with an upstream gradient of 0 has
    none. refused: None, or NaN for rows with a gradient of another result, elsewhere 0."""
    factors = dlog_prob if refused is None else refused if dlog_prob is None else dlog_prob + refused
    factors = factors[:, None]
    return torch.where(factors == 0, 0, made * factors).to(dtype)


_run = define(
    "linear_token_statistics(Tensor x, Tensor weight, Tensor index, Tensor? bias, Tensor? row_mask, "
    "SymInt ignore_index, SymInt chunk, bool keeps_logits, bool makes_dx, bool batch_invariant, "
    f"{', '.join(f'float {name}' for name in _MAPS)}, "
    f"{', '.join(f'bool {demand(name)}' for name in _RESULTS)}) -> "
    f"({', '.join(f'Tensor {name}' for name in _RESULTS)}, Tensor logits, Tensor made)",
    _compute,
    _fake,
    _keep,
    _gradient,
    _DIFFERENTIABLE,
    heads=_HEADS,
)


def _forward(ctx, *inputs):
    results = _run(*inputs)
    _keep(ctx, inputs, results)
    return results[: len(_STATISTICS)]


_apply = apply_with(
    "linear_token_statistics",
    _forward,
    lambda ctx, *upstream: _gradient(ctx, *upstream, eager=True),
    _DIFFERENTIABLE,
    10 + len(_MAPS) + len(_RESULTS),
    heads=_HEADS,
)


# ---- Calls ----


def linear_token_statistics(
    hidden, weight, index, bias, row_mask, ignore_index, chunk, keeps, batch_invariant, more, names
):
    """gander.linear_token_statistics, which has its documentation. Returns what token_statistics returns."""
    for argument, value in ("weight", weight), ("bias", bias):
        if is_dtensor(value):
            raise NotImplementedError(
                f"{argument} is a DTensor, expected a plain tensor; pass {argument}.full_tensor(), or "
                "compute the statistics in a module whose parameters FSDP2 gathers"
            )
    check_operands("hidden", hidden, weight, {"index": index, "row_mask": row_mask}, {"bias": bias})
    if forward_ad._current_level >= 0:
        refuse_tangents((hidden, weight, bias))
    hidden, weight, bias = autocast(hidden, weight, bias)
    check_dtype("hidden", hidden)
    weight, bias = _cast("weight", weight, hidden), _cast("bias", bias, hidden)
    shape, rows = index.shape, hidden.reshape(math.prod(index.shape), hidden.shape[-1])
    labels = (index.long() if index.dtype == torch.uint8 else index).reshape(-1)
    mask = None if row_mask is None else row_mask.reshape(-1)
    needs = dict.fromkeys(map(demand, _STATISTICS), False) | {demand(name): True for name in names}
    maps = more.get("scale", 1.0), more.get("softcap", 0.0), more.get("temperature", 1.0)
    # Transforms need operators that they can differentiate, and logits on meta take no memory.
    if torch._C._are_functorch_transforms_active() or hidden.is_meta:
        logits = torch.nn.functional.linear(rows, weight, bias)
        options = dict(zip(_MAPS, maps, strict=True)) | {"batch_invariant": batch_invariant}
        options |= {"ignore_index": ignore_index, **needs}
        results = operators_gen.token_statistics(logits, labels, mask, **options)[:-1]
    else:
        # torch.jit.trace compares its graph with one that is traced without gradients: both keep the state.
        differentiates = (
            torch.is_grad_enabled() and not is_tracing() and not set(names).isdisjoint(_RESULTS[:2])
        )
        wanted = [differentiates and t is not None and t.requires_grad for t in (rows, weight, bias)]
        if chunk is None:
            chunk = _chunk(rows.shape[0], by_columns=any(wanted[1:]))
        makes = wanted[0] and not any(wanted[1:]) and "entropy" not in names and not keeps
        options = ignore_index, chunk, keeps and any(wanted), makes, batch_invariant, *maps
        options = *options, *needs.values(), any(wanted) or is_tracing()
        run = _apply if any(wanted) and not is_compiling() else _run
        results = run(rows, weight, labels, bias, mask, *options)[: len(_STATISTICS)]
    if len(shape) == 1:
        return results
    each = zip(results, needs.values(), strict=True)
    return [in_shape(result, shape) if need else result for result, need in each]


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
