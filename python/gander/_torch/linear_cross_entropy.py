"""Cross-entropy of x @ weight.T + bias, which holds the logits of one chunk of rows at a time.

The operator gander::linear_cross_entropy computes the losses of a chunk, lets the loss kernel write their
gradient over the logits, and multiplies that into dx and dw. So forward already makes the gradients, for the
upstream gradient that is expected. If backward brings another one, they are scaled, or made again. What else
a caller asks for of the rows, the kernel for statistics of tokens finds in a chunk's logits before that.
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing

from .._table import LOSS_OPTIONS, MEAN, NONE
from . import operators_gen
from .autograd import apply_with, refuse_constant
from .cross_entropy import is_first_backward, loss_values
from .cross_entropy_outputs import cross_entropy_outputs, z_loss_of
from .dtensor import is_dtensor
from .eager import is_batched, is_traced
from .graph_operators import define
from .linear_chunks import Products, is_same, new_gradient, once, rescale, to_make, weights_of_rows
from .linear_operands import autocast, check_dtype, check_operands
from .refusals import refuse_tangents
from .tensors import NARROW, dtype_of, in_shape, scalar, statistic
from .token_statistics import MAPS

_PARTS = 4  # by default the logits of a quarter of the rows are held at a time
# Gradients are made for an upstream gradient whose size lies between these. Made for another, such as 0, they
# could not be scaled to the one that comes.
_SMALLEST, _LARGEST = 2.0**-64, 2.0**64


# ---- The operator ----


def _compute(
    x, weight, target, bias, weight_ce, divisor, upstream, ignore_index, reduction, chunk, wide, *more
):
    """The loss, the log-sum-exps of rows, the gradients dx, dw and db, the predicted classes and whether they
    are the targets. Those that are not needed have no elements.

    x: (M, K). weight: (V, K). wide: dw is accumulated in float32. upstream: the gradient of the loss: one
    element, or with reduction none one for each row.
    """
    with torch.autocast(x.device.type, enabled=False):  # backward may run under it
        options = dict(zip(LOSS_OPTIONS, more, strict=False))
        *needs, predicts = more[len(LOSS_OPTIONS) :]
        if reduction == MEAN:
            divisor = weights_of_rows(target, weight_ce, weight.shape[0], ignore_index, x.dtype).sum()
        products = Products(x, weight, bias, needs, chunk, wide)
        losses = [x.new_empty(0, dtype=statistic(x.dtype))]
        rows = [(losses[0], x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.bool))]
        for part, logits in products.chunks():
            if predicts:
                rows.append(_of_rows(logits, target[part], ignore_index, options))
            given = {"target": target[part], "weight": weight_ce, "ignore_index": ignore_index, **options}
            if not any(needs):
                loss, _ = operators_gen.cross_entropy(logits, **given, divisor=divisor, reduction=NONE)
            elif reduction == NONE:
                loss, lse = operators_gen.cross_entropy(logits, **given, reduction=NONE, needs_lse=True)
                given |= {"dloss": upstream[part], "lse": lse, "reduction": NONE}
                operators_gen.cross_entropy_bwd_(logits, **given)
            else:
                loss, _ = operators_gen.cross_entropy_fwd_dx_(
                    logits, **given, divisor=divisor, upstream=upstream
                )
            losses.append(loss)
            products.add(part, logits)
        loss = torch.cat(losses)
        if reduction != NONE:
            loss = loss.sum()
            if not x.shape[0] and divisor is not None:
                loss /= divisor
        lse, predicted, is_top1 = map(torch.cat, zip(*rows, strict=True))
        return loss, lse, *products.gradients(), predicted, is_top1


def _of_rows(logits, target, ignore_index, options):
    """The log-sum-exps of rows, their predicted classes, and whether they are the targets."""
    needs = {"needs_is_top1": True, "needs_predicted": True, "needs_state": True}
    given = needs | {"ignore_index": ignore_index} | {name: options[name] for name in MAPS}
    *_, is_top1, predicted, state = operators_gen.token_statistics(logits, target, **given)
    return (state[:, 0] + state[:, 1]).masked_fill(target == ignore_index, 0), predicted, is_top1


def _fake(x, weight, target, bias, weight_ce, divisor, upstream, ignore_index, reduction, chunk, wide, *more):
    loss = x.new_empty(target.shape if reduction == NONE else (), dtype=statistic(x.dtype))
    *needs, predicts = more[len(LOSS_OPTIONS) :]
    gradients = map(new_gradient, (x, weight, x if bias is None else bias), needs)
    rows = target.shape if predicts else (0,)
    predictions = x.new_empty(rows, dtype=torch.int64), x.new_empty(rows, dtype=torch.bool)
    return loss, loss.new_empty(rows), *gradients, *predictions


# ---- Its gradient ----


_TENSORS, _DIFFERENTIABLE = 7, (0, 1, 3)


def _keep(ctx, inputs, results):
    ctx.save_for_backward(*inputs[:_TENSORS], *results[2:5])
    *ctx.options, needs_dx, needs_dw, needs_db, _ = inputs[_TENSORS:]
    ctx.made = [needs_dx, needs_dw, needs_db]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable()  # none of the results: to differentiate those gradients raises an error


def _needs(ctx):
    """Which of dx, dw and db autograd needs."""
    return [ctx.needs_input_grad[at] for at in _DIFFERENTIABLE]


def _of_loss(ctx, dloss, dlse):
    """The upstream gradient of the loss. That of the log-sum-exps is refused, in a graph by NaN."""
    if dlse is None or not dlse.numel():
        return dloss
    refused = refuse_constant("linear_cross_entropy", "lse or z_loss", dlse, None)
    _, reduction, *_ = ctx.options
    refused = refused if reduction == NONE else refused.sum()
    return refused if dloss is None else dloss + refused


def _again(inputs, dloss, options, needs):
    """dx, dw and db for this upstream gradient."""
    return _run(*inputs, dloss, *options, *needs, False)[2:5]


def _gradients_in_graph(ctx, saved, dloss, has_made=True):
    """dx, dw and db, or None for one that is not needed, as a graph computes them. Graphs can neither write
    over saved gradients nor choose. has_made: whether those that forward made may be used."""
    (*inputs, upstream), needs = saved[:_TENSORS], _needs(ctx)
    with torch.no_grad():
        if has_made and all(has or not need for has, need in zip(ctx.made, needs, strict=True)):
            gradients, factor = saved[_TENSORS:], dloss if upstream is None else dloss / upstream
            gradients = [
                (gradient.to(factor.dtype) * factor).to(gradient.dtype) if need else None
                for gradient, need in zip(gradients, needs, strict=True)
            ]
        else:
            gradients = _again(inputs, dloss, ctx.options, needs)
    return once(gradients, needs, [inputs[at] for at in _DIFFERENTIABLE], dloss)


_run = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? weight_ce, "
    "Tensor? divisor, Tensor? upstream, SymInt ignore_index, SymInt reduction, SymInt chunk, bool wide, "
    f"{''.join(f'float {name}, ' for name in LOSS_OPTIONS)}"
    "bool needs_dx, bool needs_dw, bool needs_db, bool predicts) -> (Tensor loss, Tensor lse, Tensor dx, "
    "Tensor dw, Tensor db, Tensor predicted, Tensor is_top1)",
    _compute,
    _fake,
    _keep,
    lambda ctx, *upstream: _gradients_in_graph(ctx, ctx.saved_tensors, _of_loss(ctx, *upstream)),
    _DIFFERENTIABLE,
    heads=2,
)


def _expected(upstream, x):
    """The upstream gradient to make gradients for: the expected one, or 1 if they could not be scaled."""
    tensor = scalar("upstream", upstream, x)
    if isinstance(upstream, (int, float)) and not is_compiling():  # a graph may know it only when it runs
        return tensor if _SMALLEST <= abs(upstream) <= _LARGEST else torch.ones_like(tensor)
    if not torch.is_grad_enabled():  # makes none
        return tensor
    size = tensor.abs()
    return torch.where((size >= _SMALLEST) & (size <= _LARGEST), tensor, 1.0)


def _forward(ctx, *inputs):
    *inputs, predicts = inputs
    made = to_make(inputs[0], inputs[_TENSORS - 1], inputs[_TENSORS + 1], _needs(ctx))
    inputs = *inputs, *made, predicts
    loss, lse, *_, predicted, is_top1 = results = _run(*inputs)
    _keep(ctx, inputs, results)
    ctx.returned = False
    return loss, lse, predicted, is_top1


def _eager_gradients(ctx, dloss, dlse):
    dloss = _of_loss(ctx, dloss, dlse)
    saved, needs = ctx.saved_tensors, _needs(ctx)
    *inputs, upstream = saved[:_TENSORS]
    # Hooks on saved tensors may change strides.
    x, made = inputs[0], [gradient.contiguous() for gradient in saved[_TENSORS:]]
    if is_traced(dloss):
        # What was returned may be that of another dloss. A graph cannot wait to see whether it is.
        has_made = not (ctx.returned or x.dtype == torch.float16)
        return _gradients_in_graph(ctx, saved, dloss, has_made)
    if is_batched(dloss):
        raise NotImplementedError(
            "gander: linear_cross_entropy has no batched gradients; call backward for each"
        )
    keep = any(ctx.made) and is_first_backward(ctx)
    if keep and x.dtype == torch.float16:
        keep = ctx.returned = is_same(dloss, 1.0 if upstream is None else upstream)
    elif keep:
        rescale([gradient for gradient, has in zip(made, ctx.made, strict=True) if has], dloss, upstream)
    if not keep:
        with torch.no_grad():
            made = _again(inputs, dloss, ctx.options, needs)
    # autograd may add to what is returned. Through .data that does not increment the version of a saved
    # tensor, for which a later backward pass would be refused.
    return once([gradient.data for gradient in made], needs, [inputs[at] for at in _DIFFERENTIABLE], dloss)


_apply = apply_with(
    "linear_cross_entropy",
    _forward,
    _eager_gradients,
    _DIFFERENTIABLE,
    _TENSORS + 5 + len(LOSS_OPTIONS),
    heads=2,
)


# ---- Calls ----


def _check(x, weight, target, bias, weight_ce):
    check_operands("x", x, weight, {"target": target}, {"bias": bias, "weight_ce": weight_ce})
    if weight_ce is not None and weight_ce.requires_grad:
        raise NotImplementedError(
            "weight_ce requires a gradient, but has none, expected a constant; detach it"
        )


def _check_dtypes(x, weight, bias, weight_ce):
    check_dtype("x", x)
    for name, value in ("weight", weight), ("bias", bias):
        if value is not None and value.dtype != x.dtype:
            raise TypeError(
                f"{name} has dtype {dtype_of(value)}, expected {dtype_of(x)} as x; convert one of "
                "them, or use autocast"
            )
    wide = x.dtype == torch.float64
    if weight_ce is not None and weight_ce.dtype not in ((torch.float64,) if wide else NARROW):
        expected = "float64 as x" if wide else "float16, bfloat16 or float32"
        raise TypeError(f"weight_ce has dtype {dtype_of(weight_ce)}, expected {expected}; convert it")


def linear_cross_entropy(
    x, weight, target, bias, weight_ce, ignore_index, reduction, divisor, upstream, chunk, wide, more, names
) -> dict[str, Tensor]:
    """gander.linear_cross_entropy, which has its documentation, by name. names: of what is asked for."""
    _check(x, weight, target, bias, weight_ce)
    if forward_ad._current_level >= 0:
        refuse_tangents((x, weight, bias))
    slices = None
    predicts = names != ("loss",)
    if is_dtensor(weight):  # of torch.distributed, which takes long to import
        if predicts:
            raise NotImplementedError(
                "weight is a DTensor with outputs, expected a plain tensor; leave outputs out, and take what "
                "else is wanted from gander.linear_token_statistics"
            )
        from . import sharded_heads
        from . import sharded_linear_cross_entropy as sharded

        others = {"target": target, "weight_ce": weight_ce, "divisor": divisor, "upstream": upstream}
        slices, *parts = sharded_heads.parts("linear_cross_entropy", "x", x, weight, bias, others)
        x, weight, bias, target, weight_ce, divisor, upstream = parts
    x, weight, bias = autocast(x, weight, bias)
    _check_dtypes(x, weight, bias, weight_ce)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    labels = target.reshape(-1)
    if labels.dtype == torch.uint8:
        labels = labels.long()
    if divisor is not None:
        divisor = scalar("divisor", divisor, x)
    if upstream is not None:
        upstream = _expected(upstream, x)
    if chunk is None:
        chunk = max(1, -(-rows.shape[0] // _PARTS))
    options = ignore_index, reduction, chunk, wide, *loss_values(more)
    if slices is not None:
        loss = sharded.loss(
            slices,
            (rows, weight, labels, bias, weight_ce, divisor, upstream),
            ignore_index,
            reduction,
            chunk,
            wide,
            more,
        )
        return {"loss": slices.whole(loss.view(target.shape) if reduction == NONE else loss)}
    # Transforms need operators that they can differentiate, and logits on meta take no memory.
    if torch._C._are_functorch_transforms_active() or x.is_meta:
        logits = torch.nn.functional.linear(rows, weight, bias)
        given = {"ignore_index": ignore_index, "reduction": reduction, "one_pass": False, **more}
        if predicts:
            del given["one_pass"]
            given |= {"batch_invariant": False, "inplace_backward": False}
            found = cross_entropy_outputs(names, logits, labels, weight_ce, divisor, **given)
            return {name: _in_shape(found[name], target) for name in names}
        loss, _ = operators_gen.cross_entropy(logits, labels, weight_ce, divisor, **given)
        return {"loss": _in_shape(loss, target)}
    if torch.is_grad_enabled() and not (is_compiling() or is_tracing()):
        given = rows, weight, labels, bias, weight_ce, divisor, upstream, *options, predicts
        loss, lse, predicted, is_top1 = _apply(*given)
    else:
        # torch.jit.trace compares its graph with one that is traced without gradients.
        makes = torch.is_grad_enabled() and not is_tracing()
        needs = [makes and tensor is not None and tensor.requires_grad for tensor in (rows, weight, bias)]
        made = to_make(rows, upstream, reduction, needs, compiling=True)
        given = rows, weight, labels, bias, weight_ce, divisor, upstream, *options, *made, predicts
        loss, lse, *_, predicted, is_top1 = _run(*given)
    found = {"loss": loss}
    if predicts:
        found |= {"lse": lse, "predicted": predicted, "is_top1": is_top1}
    if "z_loss" in names:
        count = weights_of_rows(labels, None, weight.shape[0], ignore_index, x.dtype).sum()
        found["z_loss"] = z_loss_of(loss, lse, more.get("z_loss", 0.0), reduction, divisor, count)
    return {name: _in_shape(value, target) for name, value in found.items()}


def _in_shape(value, target):
    """What there is of each row, in the shape of target."""
    return in_shape(value, target.shape) if value.ndim and target.ndim != 1 else value
