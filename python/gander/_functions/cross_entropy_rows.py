"""gander.cross_entropy_fwd and gander.cross_entropy_bwd: the losses of rows, and their gradient by hand."""

from __future__ import annotations

from typing import Any, Literal, overload

from .. import _debug
from .._backend import BACKENDS, backend_of
from .._table import NONE
from .._words import check_flags, integer
from .arguments import (
    FAILURES,
    ONE,
    ZERO,
    A,
    Array,
    check_targets,
    loss_options,
    overridden,
    refuse_loss_options,
)
from .probabilities import refuse_probabilities


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
        target: Class indices, as in cross_entropy.
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
        refuse_probabilities(ops, x, target)
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
        target: Class indices, as in cross_entropy.
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
        refuse_probabilities(ops, x, target)
        raise ops.explained(error, x=x, target=target, dloss=dloss, lse=lse, weight=weight) from None
