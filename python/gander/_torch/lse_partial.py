"""Cross-entropy of rows whose log-sum-exp and target's logit come from different tensors: QuACK's lse_partial
and target_logit."""

import torch

from .._table import MEAN, NONE
from .._words import integer
from . import operators_gen
from .autograd import apply_of, function, refuse_outer_gradients, refuse_tangents
from .cross_entropy import is_batched, may_write_saved, write_over
from .fakes import check_inputs
from .sharding import dimensions_of_classes, is_dtensor
from .tensors import NARROW, dtype_of, unusable

_THIRD = "class weights, which are third in torch, are weight="


def _losses(x, target, logits, weight, ignore_index):
    """For each row its loss, the maximum and the logarithm of the sum of x, and the weight of its target.

    logits: (..., K), of which target chooses one, or one logit for each row.
    """
    _, lse = operators_gen.cross_entropy(x, target, ignore_index=ignore_index, reduction=NONE, needs_lse=True)
    high, log_sum = lse[:-1].view(2, *target.shape)
    target = target.long()
    by_class = logits.ndim > target.ndim
    classes = logits.shape[-1] if by_class else None if weight is None else len(weight)
    column = target.clamp(0, None if classes is None else classes - 1)
    logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) if by_class else logits
    scale = torch.ones_like(high) if weight is None else weight[column].to(high.dtype)
    scale = torch.where(column == target, scale, float("nan")).masked_fill_(target == ignore_index, 0)
    loss = (scale * (log_sum + (high - logit))).masked_fill_(scale == 0, 0)
    return loss, high, log_sum, scale


def _check(name, tensor, target, x, more, per_row):
    """Refuses a tensor of logits or log-sum-exps that does not fit x."""
    if target is None:
        raise ValueError("target is None, expected a tensor")
    if refusal := unusable(name, tensor):
        raise refusal
    fits = tensor.shape[:-1] == target.shape and tensor.ndim == target.ndim + 1 and tensor.shape[-1] >= 1
    if not fits and not (per_row and tensor.shape == target.shape):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}{more}; {_THIRD}"
        )
    wide = x.dtype == torch.float64
    if tensor.dtype not in ((torch.float64,) if wide else NARROW):
        expected = "float64" if wide else "float16, bfloat16 or float32"
        raise TypeError(f"{name} has dtype {dtype_of(tensor)}, expected {expected} as x is; convert it")
    if tensor.device != x.device:
        raise RuntimeError(f"{name} is on {tensor.device}, expected {x.device} as x; move one of them")


def _refuse_slices(name, logits):
    """DTensor would choose among the classes of a slice by an index into all."""
    if is_dtensor(logits) and dimensions_of_classes(logits):
        raise NotImplementedError(
            f"{name} is a DTensor whose classes are sharded, expected all classes of a row on each rank; "
            "redistribute it, or call cross_entropy without lse_partial and target_logit, which takes slices"
        )


@torch.compiler.disable
def with_target_logit(x, target, target_logit, weight, ignore_index):
    """The loss and the log-sum-exp of each row, without a gradient."""
    integer("ignore_index", ignore_index)
    check_inputs("cross_entropy", {"x": x, "target": target})
    _check("target_logit", target_logit, target, x, ", or one dimension more", True)
    leading = tuple(target.shape)
    if target_logit.ndim > target.ndim:
        _refuse_slices("target_logit", target_logit)
    if weight is not None:
        logits = target_logit
        if logits.ndim == target.ndim:
            logits = x.new_empty(()).expand(*leading, weight.numel() or 1)
        check_inputs("cross_entropy", {"x": logits, "target": target, "weight": weight})
    with torch.no_grad():
        loss, high, log_sum, _ = _losses(x, target, target_logit, weight, ignore_index)
        return loss, high + log_sum


def _forward(ctx, x, partial, target, weight, ignore_index, reduction, inplace_backward):
    loss, high, log_sum, scale = _losses(partial, target, x, weight, ignore_index)
    total = scale.sum().view(1)
    if reduction != NONE:
        loss = loss.sum()
    if reduction == MEAN:
        loss /= total[0]
    ctx.save_for_backward(x, target, torch.cat((high.flatten(), log_sum.flatten(), total)), weight)
    ctx.set_materialize_grads(False)
    ctx.options = {"ignore_index": ignore_index, "reduction": reduction}
    ctx.inplace_backward = inplace_backward and may_write_saved()
    return loss


def _backward(ctx, dloss):
    dx = None
    if dloss is not None:
        x, target, lse, weight = ctx.saved_tensors
        arguments = {"target": target, "weight": weight, "dloss": dloss, "lse": lse} | ctx.options
        if ctx.inplace_backward and not is_batched(dloss):
            dx = write_over(x, **arguments)
        else:
            dx = operators_gen.cross_entropy_bwd(x, **arguments)
    return dx, *[None] * 6


_apply = apply_of(function("cross_entropy_with_lse_partial", _forward, _backward))


@torch.compiler.disable
def with_lse_partial(x, target, lse_partial, weight, ignore_index, reduction, inplace_backward):
    """The loss of rows whose log-sum-exp is that of the rows of lse_partial."""
    integer("ignore_index", ignore_index)
    check_inputs("cross_entropy", {"x": x, "target": target, "weight": weight})
    _check("lse_partial", lse_partial, target, x, " and one dimension more", False)
    _refuse_slices("x", x)
    refuse_tangents((x,))
    refuse_outer_gradients("cross_entropy with lse_partial", x)
    return _apply(x, lse_partial.detach(), target, weight, ignore_index, reduction, inplace_backward)
