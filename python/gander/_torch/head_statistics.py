"""The operator of linear_token_statistics, and its gradient: without the logits of all rows.

Forward computes the logits of a chunk of rows, and their statistics. Backward computes the logits again, and
lets the kernel write their gradient over them. If the gradient of weight is wanted it divides the logits by
columns, not by rows: then each row of that gradient comes from one matrix product, and the gradient of hidden
is added up, in float32.
"""

from functools import partial

import torch

from .._table import demand
from . import operators_gen
from .autograd import apply_with, refuse_constant
from .cross_entropy import is_first_backward
from .eager import is_plain
from .graph_operators import define
from .linear_chunks import Sum, chunks_of, new_gradient, once, product, widened
from .tensors import statistic
from .token_statistics import HEADS, MAPS, RESULTS, STATISTICS, maps_of

# Tiles of columns begin at a multiple of so many elements, for vectors of 16 bytes and for the products.
_COLUMNS = 64
_ELSEWHERE = -(2**63)  # an ignore_index that no index equals which counts from a tile's first column

DIFFERENTIABLE = (0, 1, 3)


# ---- Forward ----


def _compute(x, weight, index, bias, row_mask, ignore_index, chunk, keeps, makes, batch_invariant, *more):
    """The statistics, the state of the rows, their logits and the gradient of x. Those that are not wanted
    have no elements.

    x: (M, K). weight: (V, K). keeps: the logits. makes: the gradient of x for an upstream gradient of 1 of
    each log-probability, in float32 (float64 for float64).
    """
    options = dict(zip(MAPS, more, strict=False)) | {"batch_invariant": batch_invariant}
    needs = dict(zip(map(demand, RESULTS), more[len(MAPS) :], strict=True))
    (rows, _), classes = x.shape, weight.shape[0]
    made = x.new_empty(x.shape if makes else 0, dtype=statistic(x.dtype))
    with torch.autocast(x.device.type, enabled=False):  # an operator may run under it
        held = x.new_empty(rows if keeps else min(chunk, rows), classes)
        parts = []
        for part, logits in chunks_of(x, weight, bias, held):
            mask = None if row_mask is None else row_mask[part]
            given = {"index": index[part], "row_mask": mask, "ignore_index": ignore_index, **options}
            parts.append(operators_gen.token_statistics(logits, **given, **needs))
            if makes:
                state = parts[-1][-1]
                ones = state.new_ones(len(logits))
                operators_gen.token_statistics_bwd_(logits, **given, state=state, dlog_prob=ones)
                operands, how = widened(logits, weight, made.dtype)
                made[part] = torch.mm(*operands, **how)
    results = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return *results, held if keeps else x.new_empty(0), made


def _fake(x, weight, index, bias, row_mask, ignore_index, chunk, keeps, makes, batch_invariant, *more):
    empty, needs = x.new_empty, more[len(MAPS) :]
    wide = statistic(x.dtype)
    dtypes = *(wide,) * HEADS, torch.bool, torch.int64, wide
    shapes = *(index.shape,) * len(STATISTICS), (*index.shape, 3)
    each = zip(shapes, dtypes, needs, strict=True)
    return (
        *(empty(shape if need else 0, dtype=dtype) for shape, dtype, need in each),
        empty((x.shape[0], weight.shape[0]) if keeps else 0),
        empty(x.shape if makes else 0, dtype=wide),
    )


# ---- Backward ----


def _differentiate(x, weight, index, bias, row_mask, state, logits, dlog_prob, dentropy, *more, over=False):
    """dx, dweight and dbias. Those that are not needed have no elements. Of the upstream gradients one may be
    None, of which nothing is needed. logits: those that forward kept, or no elements. over: they may be
    written over. The classes may be a slice of all: an index outside of weight's classes adds nothing."""
    ignore_index, chunk, batch_invariant, *maps, needs_dx, needs_dw, needs_db = more
    (rows, _), classes = x.shape, weight.shape[0]
    options = dict(zip(MAPS, maps, strict=True)) | {"batch_invariant": batch_invariant}
    options |= {"ignore_index": _ELSEWHERE, "slice": True}
    index, counts = index.long(), _counts(index, row_mask, ignore_index)
    if not classes:
        return tuple(gradient.zero_() for gradient in _fake_gradients(x, weight, index, bias, *more))
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
                tile = product(buffer[: size[0], : size[1]], x[part], weight[columns], own)
            local = (index[part] - columns.start).clamp_(min=-1)
            given = {"index": local, "row_mask": counts[part], "state": state[part]}
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


def _outside(index, weight):
    return (index < 0) | (index >= weight.shape[0])


def _counts(index, row_mask, ignore_index):
    counts = index.long() != ignore_index
    return counts if row_mask is None else counts & (row_mask != 0)


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
    f"bool batch_invariant, {''.join(f'float {name}, ' for name in MAPS)}"
    "bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    _differentiate,
    _fake_gradients,
)


# ---- The operator, and its gradient ----


def _keep(ctx, inputs, results):
    x, weight, index, bias, row_mask, ignore_index, chunk, _, ctx.makes, batch_invariant, *more = inputs
    *_, state, logits, made = results
    ctx.save_for_backward(x, weight, index, bias, row_mask, state, logits, made)
    ctx.options = ignore_index, chunk, batch_invariant, *more[: len(MAPS)]
    ctx.asked = more[len(MAPS) + 2 : len(MAPS) + HEADS]
    ctx.outside, ctx.sum_over = None, None
    ctx.set_materialize_grads(False)


def keep_slice(ctx, tensors, chunk, outputs, options, left_out, outside, sum_over):
    """Keeps what `gradient` takes, of a weight that has a slice of the classes.

    tensors: x, weight, the index counted from the slice, bias, None, the rows' state, and the logits or no
    elements. left_out, outside: the indices of rows that do not count, and of those that no slice has.
    sum_over: what adds up the gradient of x over all slices, or None.
    """
    ctx.save_for_backward(*tensors, tensors[0].new_empty(0))
    ctx.options = left_out, chunk, options.get("batch_invariant", False), *maps_of(options)
    ctx.asked = [name in outputs for name in RESULTS[2:HEADS]]
    ctx.makes, ctx.outside, ctx.sum_over = False, outside, sum_over
    ctx.set_materialize_grads(False)


def gradient(ctx, *upstream, eager=False):
    """The gradients of x, weight and bias."""
    dlog_prob, dentropy, *others = upstream
    for name, value, asked in zip(RESULTS[2:HEADS], others, ctx.asked, strict=True):
        if asked and value is not None:
            dentropy = refuse_constant("linear_token_statistics", name, value, dentropy)
    *inputs, logits, made = ctx.saved_tensors
    x, weight, index, bias, row_mask, state = inputs
    needs = [ctx.needs_input_grad[at] for at in DIFFERENTIABLE]
    given = [value for value in (dlog_prob, dentropy) if value is not None]
    sources = [source for source in (x, weight, bias) if source is not None]
    with torch.no_grad():
        if dlog_prob is not None:  # no tile of the logits knows that an index is in none
            outside = _outside(index, weight) if ctx.outside is None else index == ctx.outside
            dlog_prob = dlog_prob.masked_fill(outside, float("nan"))
        if ctx.makes:
            counts = _counts(index, row_mask, ctx.options[0])
            gradients = _scaled(made, counts, dlog_prob, dentropy, x.dtype), None, None
            return once(gradients, needs, sources, given[0])
        if state.ndim == 1:  # it was not needed, because no result that was asked for has a gradient
            return once(_refused(inputs, dentropy, ctx.options[0]), needs, sources, given[0])
        compute = _gradients
        is_eager = eager and all(map(is_plain, given))
        if is_eager and logits.numel() and is_first_backward(ctx):
            compute = partial(_differentiate, over=True)
            logits = logits.data  # whose version autograd does not compare in a later backward pass
        elif getattr(ctx, "returned", False):  # a backward pass has written over the logits
            logits = logits.new_empty(0)
        gradients = compute(*inputs, logits, dlog_prob, dentropy, *ctx.options, *needs)
        if ctx.sum_over is not None and needs[0]:
            gradients = ctx.sum_over(gradients[0], is_eager), *gradients[1:]
    return once(gradients, needs, sources, given[0])


def _refused(inputs, refused, ignore_index):
    """Gradients that are NaN where rows with a NaN take part. refused: 0 or NaN of each row."""
    x, weight, index, bias, row_mask, _ = inputs
    refused = torch.where(_counts(index, row_mask, ignore_index), refused, 0).to(x.dtype)
    others = (None if t is None else refused.sum().expand(t.shape).contiguous() for t in (weight, bias))
    return refused[:, None].expand(x.shape).contiguous(), *others


def _scaled(made, counts, dlog_prob, refused, dtype):
    """The gradient of x, from that for an upstream gradient of 1. A row that does not count has none,
    whatever its upstream gradient is, nor has one with an upstream gradient of 0. refused: None, or NaN for
    rows with a gradient of another result, elsewhere 0."""
    factors = dlog_prob if refused is None else refused if dlog_prob is None else dlog_prob + refused
    has_gradient = counts & (factors != 0)
    return torch.where(has_gradient[:, None], made * factors[:, None], 0).to(dtype)


run = define(
    "linear_token_statistics(Tensor x, Tensor weight, Tensor index, Tensor? bias, Tensor? row_mask, "
    "SymInt ignore_index, SymInt chunk, bool keeps_logits, bool makes_dx, bool batch_invariant, "
    f"{', '.join(f'float {name}' for name in MAPS)}, "
    f"{', '.join(f'bool {demand(name)}' for name in RESULTS)}) -> "
    f"({', '.join(f'Tensor {name}' for name in RESULTS)}, Tensor logits, Tensor made)",
    _compute,
    _fake,
    _keep,
    gradient,
    DIFFERENTIABLE,
    heads=HEADS,
)


def _forward(ctx, *inputs):
    results = run(*inputs)
    _keep(ctx, inputs, results)
    return results[: len(STATISTICS)]


apply = apply_with(
    "linear_token_statistics",
    _forward,
    lambda ctx, *upstream: gradient(ctx, *upstream, eager=True),
    DIFFERENTIABLE,
    10 + len(MAPS) + len(RESULTS),
    heads=HEADS,
)
