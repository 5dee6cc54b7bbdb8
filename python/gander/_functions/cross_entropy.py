"""Cross-entropy, also of a linear layer's result."""

from __future__ import annotations

from typing import Any, Literal, overload

from .. import _debug
from .._backend import BACKENDS, backend_of
from .._table import MEAN, NONE, REDUCTIONS, Reduction
from .._words import check_flags, integer
from .arguments import (
    FAILURES,
    ONE,
    ZERO,
    A,
    Array,
    check_targets,
    code_of,
    loss_options,
    overridden,
    refuse_loss_options,
)

_MEAN = REDUCTIONS[MEAN]  # compared by identity, like AUTO


def check_sum(divisor: Any, upstream: Any, reduction: Any) -> None:
    """Refuses what needs another reduction."""
    if divisor is not None and reduction != "sum":
        raise ValueError(f"divisor is given with reduction {reduction!r}, expected 'sum', which it divides")
    if upstream is not None and reduction == "none":
        raise ValueError(
            "upstream is given with reduction 'none', expected 'sum' or 'mean': it is one number"
        )


def cross_entropy(
    x: A,
    target: Array,
    lse_partial: Array | None = None,
    weight: Array | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    *,
    one_pass: bool | None = None,
    batch_invariant: bool = False,
    divisor: float | Array | None = None,
    upstream: float | Array | None = None,
    label_smoothing: float = ZERO,
    z_loss: float = ZERO,
    scale: float = ONE,
    softcap: float | None = None,
    temperature: float = ONE,
) -> A:
    """Cross-entropy of logits and class indices, differentiable in x.

    The loss of a row is weight[t] * (lse(x) - x[t]), where t is its target and lse(x) its log-sum-exp.
    Gradient: dx = dloss * weight[t] * (softmax(x) - 1[t]). For accuracy, the maximum and the logarithm of the
    sum are saved for it as two numbers, not as lse.

    With e = label_smoothing the loss of a row is (1 - e) * weight[t] * (lse - x[t]) + e / N * sum(weight *
    (lse - x)). Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016.
    z_loss: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022. softcap: Gemma Team,
    "Gemma 2: Improving Open Language Models at a Practical Size", 2024.

    Args:
        x: (M, N) or (..., N), N >= 1 classes, of float16, bfloat16 or float32 (on the CPU also float64), any
            strides. A torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no gradient).
        target: x.shape[:-1], uint8, int32 or int64 (uint8 is copied to int64). Rows whose target is
            ignore_index are ignored. Another target that is not in [0, N) is never used as an index. It makes
            the loss and the gradient of its row NaN, and with "mean" those of all rows (see set_debug).
        lse_partial: (..., K), of any of these dtypes, not only x's: parts of the log-sum-exp of each row,
            such as the log-sum-exps of slices of x. The log-sum-exp of a row of lse_partial is taken for that
            of the row of x, which forward then only reads at the target. It gets no gradient: that of x is
            complete. Torch tensors only. one_pass, upstream and batch_invariant do not apply.
        weight: (N) class weights, float16, bfloat16 or float32 (float64 for float64), or None.
        ignore_index: The target of rows that are ignored.
        reduction: "mean", "sum" or "none". The mean is over the sum of the weights of the rows that are not
            ignored. If all are ignored it is NaN and the gradients are zero, as in torch.
        inplace_backward: Backward writes the gradient over x, which saves a tensor of the size of x. x must
            not be used afterwards: autograd refuses a backward pass that still needs it. Ignored inside
            torch.compile, under hooks on saved tensors, where autograd does not see that x was written, and
            where x is expanded.
            Torch tensors only.
        one_pass: True computes the gradient together with the loss. This reads x once, and keeps a tensor of
            the size of x until backward. False computes it in backward, which reads x again. None chooses by
            size, and inside torch.compile False, because Inductor writes the gradient over x. It applies only
            to a mean or a sum on a CUDA device, without inplace_backward and batch_invariant. Inside
            torch.compile it also takes Inductor, outside of activation checkpoints, with donated buffers
            (torch's default).
        batch_invariant: As in softmax, for the loss of each row, and for its gradient with "none" or "sum".
            The gradient of a mean depends on all rows.
        divisor: What loss and gradient are divided by, with reduction "sum": a number, or a 0-dim tensor of
            any real dtype on x's device, which is read there, without synchronization. For a sum over all
            tokens of a step, whose number only the training loop knows.
        upstream: The gradient of the loss that backward is expected to bring, a number or such a tensor: 1/4
            for `(loss / 4).backward()`, a GradScaler's scale. The single pass makes the gradient for it (for
            1 by default). Backward compares the two on the device, and computes the gradient again if they
            differ. So upstream changes the time, never the result. A tensor is copied when the loss is
            computed, except inside torch.compile: there autograd refuses a backward pass after it was written
            to.
        label_smoothing: The share of a row's loss that all classes have alike, 0 to 1, as in torch. A row
            whose target has weight 0 then counts. A logit of -inf makes the loss +inf, unless its class has
            weight 0 (where torch's is NaN). Not with lse_partial.
        z_loss: The factor of lse^2 that is added to the loss of a row that is not ignored, at least 0. A row
            whose target has weight 0 then counts. The mean is over rows, so it takes no weight. Not with
            lse_partial.
        scale: x is first mapped to z = softcap * tanh(scale * x / softcap) / temperature, without a softcap
            to z = scale * x / temperature. All of this is then of z, but dx is the gradient of x. More than
            0. Not with lse_partial.
        softcap: See scale. More than 0, or None.
        temperature: See scale. More than 0.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or one value for each row with "none".

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        IndexError: A target, under set_debug(True).
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        tensor(1.3863)
    """
    code = MEAN if reduction is _MEAN else code_of("reduction", reduction, REDUCTIONS)
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(inplace_backward) is not bool or type(batch_invariant) is not bool:
        check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    if one_pass is not None:
        check_flags(one_pass=one_pass)
    options: dict[str, Any] = {}
    if not (label_smoothing is z_loss is ZERO and scale is temperature is ONE and softcap is None):
        options = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy, locals())
    if divisor is not None or upstream is not None:
        check_sum(divisor, upstream, reduction)
        divisor = None if divisor is None else ops.scalar("divisor", divisor, x)
        upstream = None if upstream is None else ops.scalar("upstream", upstream, x)
    try:
        if _debug.is_enabled:
            check_targets(ops, x, target, ignore_index)
        if lse_partial is not None:
            refuse_loss_options(options, "with lse_partial")
            loss = ops.with_lse_partial(x, target, lse_partial, weight, ignore_index, code, inplace_backward)
            return loss if divisor is None else loss / divisor
        return ops.cross_entropy(
            x,
            target,
            weight,
            divisor,
            upstream,
            ignore_index=ignore_index,
            reduction=code,
            batch_invariant=batch_invariant,
            inplace_backward=inplace_backward,
            one_pass=one_pass,
            **options,
        )[0]
    except FAILURES as error:
        given = {"x": x, "target": target, "weight": weight, "lse_partial": lse_partial}
        raise ops.explained(error, **given) from None


@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: Array | None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[False] = ...,
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
) -> A: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: Array | None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
) -> tuple[A, A]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: Array | None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[False] = ...,
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
) -> tuple[A, A]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: Array | None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
) -> tuple[A, A, A]: ...
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: Array | None = None,
    weight: Array | None = None,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_dx: bool = False,
    inplace_backward: bool = False,
    *,
    batch_invariant: bool = False,
    divisor: float | Array | None = None,
    label_smoothing: float = ZERO,
    z_loss: float = ZERO,
    scale: float = ONE,
    softcap: float | None = None,
    temperature: float = ONE,
) -> A | tuple[A, ...]:
    """The loss of each row, without a gradient.

    Args:
        x: As in cross_entropy.
        target: As in cross_entropy.
        target_logit: The logits of the targets, in place of those in x, with x.shape[:-1]; or (..., K), of
            which target chooses one. x then only gives the log-sum-exp, and weight has an element for each
            class that target may name. With x.shape[:-1] and without weight any target >= 0 is a class.
            Refused with return_dx. Torch tensors only.
        weight: As in cross_entropy.
        ignore_index: As in cross_entropy.
        return_lse: Also return the log-sum-exp of each row.
        return_dx: Also return the gradient of the sum of the losses, computed in the same pass over x.
        inplace_backward: Write dx over x, and return x itself.
        batch_invariant: As in softmax.
        divisor: As in cross_entropy, for the loss of each row and for dx.
        label_smoothing: As in cross_entropy. Not with target_logit.
        z_loss: As in cross_entropy, likewise.
        scale: As in cross_entropy, likewise. lse is that of z.
        softcap: As in cross_entropy, likewise.
        temperature: As in cross_entropy, likewise.

    Returns:
        loss, (loss, lse), (loss, dx) or (loss, lse, dx). loss and lse: float32 (float64 for float64) of shape
        x.shape[:-1]. dx: x's shape and dtype.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: As cross_entropy.

    Examples:
        >>> gander.cross_entropy_fwd(torch.zeros(1, 2), torch.tensor([0]), return_dx=True)
        (tensor([0.6931]), tensor([[-0.5000,  0.5000]]))
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(return_lse) is not bool or type(return_dx) is not bool:
        check_flags(return_lse=return_lse, return_dx=return_dx)
    if type(inplace_backward) is not bool or type(batch_invariant) is not bool:
        check_flags(inplace_backward=inplace_backward, batch_invariant=batch_invariant)
    options: dict[str, Any] = {}
    if not (label_smoothing is z_loss is ZERO and scale is temperature is ONE and softcap is None):
        options = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_fwd, locals())
    if divisor is not None:
        divisor = ops.scalar("divisor", divisor, x)
    try:
        if target_logit is not None:
            if return_dx:
                raise NotImplementedError(
                    "return_dx is set with target_logit, expected one of them; cross_entropy_bwd takes the "
                    "lse"
                )
            refuse_loss_options(options, "with target_logit")
            loss, lse = ops.with_target_logit(
                ops.detached(x), target, ops.detached(target_logit), ops.detached(weight), ignore_index
            )
            if divisor is not None:
                loss = loss / divisor
            return (loss, lse) if return_lse else loss
        if _debug.is_enabled:
            check_targets(ops, x, target, ignore_index)
        given = None if weight is None else ops.detached(weight)
        if return_dx and inplace_backward:
            loss, lse = ops.cross_entropy_fwd_dx_(
                ops.detached(x),
                target,
                given,
                divisor,
                ignore_index=ignore_index,
                batch_invariant=batch_invariant,
                **options,
            )
            dx = x
        else:
            loss, lse, dx = ops.cross_entropy_fwd(
                ops.detached(x),
                target,
                given,
                divisor,
                ignore_index=ignore_index,
                batch_invariant=batch_invariant,
                needs_lse=return_lse,
                needs_dx=return_dx,
                **options,
            )
    except FAILURES as error:
        given = {"x": x, "target": target, "weight": weight, "target_logit": target_logit}
        raise ops.explained(error, **given) from None
    results = (loss, *[lse] * bool(return_lse), *[dx] * bool(return_dx))
    return results if len(results) > 1 else loss


def cross_entropy_bwd(
    x: A,
    target: Array,
    dloss: Array,
    lse: Array,
    weight: Array | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    *,
    label_smoothing: float = ZERO,
    z_loss: float = ZERO,
    scale: float = ONE,
    softcap: float | None = None,
    temperature: float = ONE,
) -> A:
    """The gradient of the rows' losses: dx = dloss * weight[t] * (softmax(x) - 1[t]).

    With e = label_smoothing it is dloss * ((1 - e) * weight[t] * (softmax(x) - 1[t]) + e / N * (sum(weight) *
    softmax(x) - weight)).

    The bits of a row never depend on other rows.

    Args:
        x: As in cross_entropy.
        target: As in cross_entropy.
        dloss: x.shape[:-1] with any strides, or a single value for all rows, float32 (float64 for float64).
        lse: x.shape[:-1], as returned by cross_entropy_fwd, of the dtype of dloss. Or (2, M), or 2 M + 1
            elements: the rows' maxima, the logarithms of their sums of exp(x - max), and the denominator of a
            mean, as the operators save them.
        weight: As in cross_entropy.
        ignore_index: As in cross_entropy.
        inplace_backward: Write dx over x, and return x itself.
        label_smoothing: As in the forward call.
        z_loss: As in the forward call.
        scale: As in the forward call.
        softcap: As in the forward call.
        temperature: As in the forward call.

    Returns:
        dx, with x's shape and dtype.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: As cross_entropy.

    Examples:
        >>> x, target = torch.zeros(1, 2), torch.tensor([0])
        >>> _, lse = gander.cross_entropy_fwd(x, target, return_lse=True)
        >>> gander.cross_entropy_bwd(x, target, torch.ones(1), lse)
        tensor([[-0.5000,  0.5000]])
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    if type(inplace_backward) is not bool:
        check_flags(inplace_backward=inplace_backward)
    options: dict[str, Any] = {}
    if not (label_smoothing is z_loss is ZERO and scale is temperature is ONE and softcap is None):
        options = loss_options(label_smoothing, z_loss, scale, softcap, temperature)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_bwd, locals())
    try:
        if _debug.is_enabled:
            check_targets(ops, x, target, ignore_index)
        options |= {"ignore_index": ignore_index, "reduction": NONE}
        if inplace_backward:
            ops.cross_entropy_bwd_(ops.detached(x), target, weight, dloss, lse, **options)
            return x
        return ops.cross_entropy_bwd(x, target, weight, dloss, lse, **options)
    except FAILURES as error:
        raise ops.explained(error, x=x, target=target, dloss=dloss, lse=lse, weight=weight) from None
