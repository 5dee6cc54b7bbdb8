"""Cross-entropy with more than the loss: the z-loss, the log-sum-exp and the predicted classes of rows.

The operator gander::cross_entropy_outputs reads the logits once. The kernel for statistics of tokens finds
the predicted class beside the log-probability of the target, from which the loss is made here. Label
smoothing takes the logits' mean too. That kernel rounds the mean together with what all logits of a row have
in common, where cross-entropy's kernels add up distances from the maximum. So with smoothing those compute
the loss, and the predicted class costs another read.
"""

import torch

from .._table import LOSS_OPTIONS, MEAN, NONE
from . import inductor, operators_gen
from .cross_entropy import gradient, keep, kept, loss_values
from .dtensor import is_dtensor
from .eager import is_eager, is_plain
from .fakes import check_inputs
from .graph_operators import define
from .refusals import refuse_gradients
from .tensors import statistic
from .token_statistics import MAPS

_NAMES = ("x", "target", "weight", "divisor", "ignore_index", "reduction", *LOSS_OPTIONS, "batch_invariant")


# ---- The operator ----


def _check(given):
    """Refuses what cross_entropy refuses, in its words: not all of it reaches the kernel for tokens."""
    x, target = given["x"], given["target"]
    check_inputs("cross_entropy", {name: given[name] for name in ("x", "target", "weight", "divisor")})
    options = {name: given[name] for name in LOSS_OPTIONS}
    if target is None or options != LOSS_OPTIONS:
        none = None if target is None else target.new_empty(0)
        operators_gen.cross_entropy_fwd(x.new_empty(0, x.shape[-1]), none, **options)


def _of_statistics(given):
    """The losses of rows, their weights in a mean, and the statistics that backward reads, in two parts; then
    the predicted classes, and whether they are the targets. In one read."""
    x, ignore_index = given["x"], given["ignore_index"]
    options = {name: given[name] for name in (*MAPS, "batch_invariant")}
    log_prob, *_, is_top1, predicted, state = operators_gen.token_statistics(
        x,
        given["target"],
        ignore_index=ignore_index,
        **options,
        needs_log_prob=True,
        needs_is_top1=True,
        needs_predicted=True,
        needs_state=True,
    )
    high, log_sum, _ = state.unbind(-1)
    target = given["target"].long()
    column = target.clamp(0, x.shape[-1] - 1)
    own = torch.ones_like(log_prob) if given["weight"] is None else given["weight"][column].to(log_prob.dtype)
    own = torch.where(column == target, own, torch.nan).masked_fill(target == ignore_index, 0)
    losses = (own * (0 - log_prob)).masked_fill(own == 0, 0)  # 0 - 0 is not -0
    if given["z_loss"]:
        losses = losses + given["z_loss"] * (high + log_sum).square()
    return losses, own, (high, log_sum), predicted, is_top1


def _reduced(losses, own, parts, given):
    """The loss, and the statistics as cross_entropy returns them."""
    total, loss = own.sum(dtype=torch.float64), losses
    if given["reduction"] != NONE:
        loss = losses.sum(dtype=torch.float64)
    if given["reduction"] == MEAN:
        loss = loss / total
    elif given["divisor"] is not None:
        loss = loss / given["divisor"]
    statistics = torch.cat((*(part.flatten() for part in parts), total.view(1).to(own.dtype)))
    return loss.to(own.dtype), statistics


def _compute(*arguments):
    """The loss, the log-sum-exps of rows, and the statistics that backward reads; then the predicted classes
    and whether they are the targets, or tensors without elements."""
    *values, _, predicts = arguments
    given = dict(zip(_NAMES, values, strict=True))
    x, target = given["x"], given["target"]
    _check(given)
    if predicts and not given["label_smoothing"]:
        *rows, predicted, is_top1 = _of_statistics(given)
        loss, statistics = _reduced(*rows, given)
    else:
        loss, statistics = operators_gen.cross_entropy(**given, needs_lse=True)
        options = {name: given[name] for name in (*MAPS, "ignore_index")}
        predicted, is_top1 = x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.bool)
        if predicts:
            *_, is_top1, predicted, _ = operators_gen.token_statistics(
                x, target, **options, needs_is_top1=True, needs_predicted=True
            )
    high, log_sum = statistics[:-1].view(2, *target.shape)
    lse = (high + log_sum).masked_fill(target.long() == given["ignore_index"], 0)
    return loss, lse, statistics, predicted, is_top1


def _fake(*arguments):
    *values, _, predicts = arguments
    given = dict(zip(_NAMES, values, strict=True))
    x, target = given["x"], given["target"]
    check_inputs("cross_entropy", {name: given[name] for name in ("x", "target", "weight", "divisor")})
    dtype, rows = statistic(x.dtype), target.shape if predicts else (0,)
    return (
        x.new_empty(target.shape if given["reduction"] == NONE else (), dtype=dtype),
        x.new_empty(target.shape, dtype=dtype),
        x.new_empty(2 * target.numel() + 1, dtype=dtype),
        x.new_empty(rows, dtype=torch.int64),
        x.new_empty(rows, dtype=torch.bool),
    )


# ---- Its gradient ----


def _keep(ctx, arguments, results):
    *values, inplace_backward, _ = arguments
    given = dict(zip(_NAMES, values, strict=True)) | {"lse": results[2]}
    keep(ctx, given, inplace_backward=inplace_backward and is_eager(given["x"]))


def _of_lse(given, dlse):
    """The gradient of the rows' log-sum-exps, as of losses whose targets are in other slices of the classes.

    Rows that are ignored have none. Logits of rows whose upstream gradient is 0 are not read: a graph may
    bring zeros for an lse that nobody has used.
    """
    ignored = (given["target"].long() == given["ignore_index"]) | (dlse == 0)
    return operators_gen.cross_entropy_bwd(
        given["x"],
        torch.where(ignored, -1, -2),
        None,
        dlse,
        given["lse"],
        ignore_index=-1,
        reduction=NONE,
        **{name: given[name] for name in (*MAPS, "batch_invariant")},
        slice=True,
    )


def _gradient(ctx, dloss, dlse):
    given = kept(ctx, dloss)
    if dlse is None:
        return gradient(ctx, given)
    if dloss is None:
        return _of_lse(given, dlse)
    dx = inductor.gradient_with_lse(given, dlse)
    if dx is not None:
        return dx
    dx = _of_lse(given, dlse)  # first, because the gradient of the loss may be written over the logits
    # In place, so that no third tensor of their size is held. A batch cannot be added to what has none.
    add = dx.add_ if is_plain(dloss) else dx.add
    return add(gradient(ctx, given))


_run = define(
    "cross_entropy_outputs(Tensor x, Tensor target, Tensor? weight, Tensor? divisor, SymInt ignore_index, "
    f"int reduction, {''.join(f'float {name}, ' for name in LOSS_OPTIONS)}"
    "bool batch_invariant, bool inplace_backward, bool predicts) "
    "-> (Tensor loss, Tensor lse, Tensor statistics, Tensor predicted, Tensor is_top1)",
    _compute,
    _fake,
    _keep,
    _gradient,
    heads=2,
)


# ---- Calls ----


def cross_entropy_outputs(
    names,
    x,
    target,
    weight,
    divisor,
    *,
    ignore_index,
    reduction,
    batch_invariant,
    inplace_backward,
    **options,
):
    """By name, what gander.cross_entropy returns with these outputs, and maybe more."""
    if is_dtensor(x):
        raise NotImplementedError(
            "x is a DTensor with outputs, expected this rank's rows; pass x.to_local(), and reduce what it "
            "returns over the ranks"
        )
    refuse_gradients("cross_entropy", {"weight": weight})
    values = loss_values(options)
    predicts = "predicted" in names or "is_top1" in names
    loss, lse, statistics, predicted, is_top1 = _run(
        x,
        target,
        weight,
        divisor,
        ignore_index,
        reduction,
        *values,
        batch_invariant,
        inplace_backward,
        predicts,
    )
    found = {"loss": loss, "lse": lse, "predicted": predicted, "is_top1": is_top1}
    if "z_loss" in names:
        factor = options.get("z_loss", 0.0)
        found["z_loss"] = z_loss_of(loss, lse, factor, reduction, divisor, statistics[-1])
    return found


def z_loss_of(loss, lse, factor, reduction, divisor, count):
    """The z-loss's part of the loss. count: the number of rows that count, by which a mean divides: one with
    class weights has no z-loss."""
    if not factor:  # of an lse that is infinite too
        return torch.zeros_like(loss)
    squares = factor * lse.square()
    if reduction == NONE:
        return squares
    if reduction == MEAN:
        divisor = count
    return squares.sum() if divisor is None else squares.sum() / divisor
