"""Cross-entropy of rows whose log-sum-exp and target's logit come from different tensors: QuACK's lse_partial
and target_logit."""

import torch

from .._table import MEAN, NONE
from . import operators_gen
from .autograd import apply_with
from .cross_entropy import gradient_of_kept, keep
from .dtensor import dimensions_of_classes, is_dtensor
from .fakes import check_inputs
from .graph_operators import define
from .refusals import refuse_gradients, refuse_outer_gradients, refuse_tangents
from .tensors import NARROW, dtype_of, has_no_values, statistic, unusable

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
    scale = torch.where(column == target, scale, float("nan")).masked_fill(target == ignore_index, 0)
    loss = (scale * (log_sum + (high - logit))).masked_fill(scale == 0, 0)
    return loss, high, log_sum, scale


def _check_kinds(**given):
    for name, value in given.items():
        hint = f"; {_THIRD}" if name in ("lse_partial", "target_logit") else ""
        if (value is not None or name != "weight") and (error := unusable(name, value, hint=hint)):
            raise error


def _check_partial(x, target, lse_partial, weight):
    check_inputs("cross_entropy", {"x": x, "target": target, "weight": weight})
    _check("lse_partial", lse_partial, target, x, f"{tuple(target.shape)} and one dimension more", False)


def _check_logits(x, target, target_logit, weight):
    check_inputs("cross_entropy", {"x": x, "target": target})
    leading = tuple(target.shape)
    _check("target_logit", target_logit, target, x, f"{leading}, or one dimension more", True)
    if weight is not None:
        logits = target_logit
        if logits.ndim == target.ndim:
            logits = x.new_empty(()).expand(*leading, weight.numel() or 1)
        check_inputs("cross_entropy", {"x": logits, "target": target, "weight": weight})


def _check(name, tensor, target, x, shapes, per_row):
    """Refuses a tensor of logits or log-sum-exps that does not fit x."""
    fits = tensor.shape[:-1] == target.shape and tensor.ndim == target.ndim + 1 and tensor.shape[-1] >= 1
    if not fits and not (per_row and tensor.shape == target.shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shapes}; {_THIRD}")
    wide = x.dtype == torch.float64
    if tensor.dtype not in ((torch.float64,) if wide else NARROW):
        expected = "float64" if wide else "float16, bfloat16 or float32"
        raise TypeError(f"{name} has dtype {dtype_of(tensor)}, expected {expected} as x is; convert it")
    if tensor.device != x.device:
        raise RuntimeError(f"{name} is on {tensor.device}, expected {x.device} as x; move one of them")


def _refuse_slices(name, logits):
    """DTensor would choose among the classes of a slice by an index into all."""
    if not is_dtensor(logits):
        return
    if any(placement.is_partial() for placement in logits.placements):
        raise NotImplementedError(f"{name} is a DTensor of partial sums, expected their sum; redistribute it")
    if dimensions_of_classes(logits):
        raise NotImplementedError(
            f"{name} is a DTensor whose classes are sharded, expected all classes of a row on each rank; "
            "redistribute it, or call cross_entropy without lse_partial and target_logit, which takes slices"
        )


def _values(x, partial, target, weight, ignore_index, reduction):
    """The loss, and the statistics that cross_entropy_bwd reads."""
    loss, high, log_sum, scale = _losses(partial, target, x, weight, ignore_index)
    total = scale.sum().view(1)
    if reduction != NONE:
        loss = loss.sum()
    if reduction == MEAN:
        loss = loss / total[0]
    return loss, torch.cat((high.flatten(), log_sum.flatten(), total))


def _forward(ctx, *given):
    *given, inplace_backward = given
    results = _values(*given)
    _keep(ctx, given, results, inplace_backward)
    return results[0]


def _keep(ctx, given, results, inplace_backward=False):
    names = "x", "lse_partial", "target", "weight", "ignore_index", "reduction"
    keep(ctx, dict(zip(names, given, strict=True)) | {"lse": results[1]}, inplace_backward=inplace_backward)


_apply = apply_with("cross_entropy_with_lse_partial", _forward, gradient_of_kept, [0], 7)


# ---- In graphs ----


def _loss_fake(x, lse_partial, target, weight, ignore_index, reduction):
    _check_partial(x, target, lse_partial, weight)
    like = x.new_empty(0, dtype=statistic(x.dtype))
    return like.new_empty(target.shape if reduction == NONE else ()), like.new_empty(2 * target.numel() + 1)


_loss_in_graph = define(
    "cross_entropy_with_lse_partial(Tensor x, Tensor lse_partial, Tensor target, Tensor? weight, "
    "SymInt ignore_index, int reduction) -> (Tensor loss, Tensor lse)",
    _values,
    _loss_fake,
    _keep,
    gradient_of_kept,
)


def _forward_kernel(x, target, target_logit, weight, ignore_index):
    loss, high, log_sum, _ = _losses(x, target, target_logit, weight, ignore_index)
    return loss, high + log_sum


def _forward_fake(x, target, target_logit, weight, ignore_index):
    _check_logits(x, target, target_logit, weight)
    loss = x.new_empty(target.shape, dtype=statistic(x.dtype))
    return loss, torch.empty_like(loss)


_forward_in_graph = define(
    "cross_entropy_with_target_logit(Tensor x, Tensor target, Tensor target_logit, Tensor? weight, "
    "SymInt ignore_index) -> (Tensor loss, Tensor lse)",
    _forward_kernel,
    _forward_fake,
)


def _is_in_graph(**given):
    if not has_no_values(given["x"]):
        return False
    for name, tensor in given.items():
        if is_dtensor(tensor):
            raise NotImplementedError(
                f"{name} is a DTensor in a compiled graph, expected this rank's rows with lse_partial or "
                f"target_logit; pass {name}.to_local()"
            )
    return True


# ---- Calls ----


def with_lse_partial(x, target, lse_partial, weight, ignore_index, reduction, inplace_backward):
    """The loss of rows whose log-sum-exp is that of the rows of lse_partial."""
    _check_kinds(x=x, target=target, lse_partial=lse_partial, weight=weight)
    refuse_gradients("cross_entropy", {"weight": weight})
    if _is_in_graph(x=x, target=target, lse_partial=lse_partial, weight=weight):
        return _loss_in_graph(x, lse_partial.detach(), target, weight, ignore_index, reduction)[0]
    _check_partial(x, target, lse_partial, weight)
    _refuse_slices("x", x)
    refuse_tangents((x,))
    refuse_outer_gradients("cross_entropy with lse_partial", x)
    return _apply(x, lse_partial.detach(), target, weight, ignore_index, reduction, inplace_backward)


def with_target_logit(x, target, target_logit, weight, ignore_index):
    """The loss and the log-sum-exp of each row, without a gradient."""
    _check_kinds(x=x, target=target, target_logit=target_logit, weight=weight)
    with torch.no_grad():
        if _is_in_graph(x=x, target=target, target_logit=target_logit, weight=weight):
            return _forward_in_graph(x, target, target_logit, weight, ignore_index)
        _check_logits(x, target, target_logit, weight)
        if target_logit.ndim > target.ndim:
            _refuse_slices("target_logit", target_logit)
        return _forward_kernel(x, target, target_logit, weight, ignore_index)
