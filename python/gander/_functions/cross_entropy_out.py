"""Cross-entropy that writes its results to tensors of the caller's."""

from __future__ import annotations

from .. import _debug
from .._backend import BACKENDS, backend_of
from .._words import integer
from .arguments import FAILURES, Array, check_out, check_targets, overridden
from .cross_entropy_rows import cross_entropy_fwd
from .probabilities import refuse_probabilities


def cross_entropy_fwd_out(
    x: Array,
    target: Array,
    target_logit: Array | None,
    loss: Array,
    lse: Array | None,
    dx: Array | None,
    weight: Array | None,
    ignore_index: int = -100,
) -> None:
    """cross_entropy_fwd that writes its results to loss, lse and dx.

    Args:
        x: As in cross_entropy.
        target: Class indices, as in cross_entropy.
        target_logit: As in cross_entropy_fwd, or None.
        loss: x.shape[:-1], float32 (float64 for float64), contiguous. A torch tensor, or a writable array of
            NumPy or CuPy.
        lse: As loss, or None.
        dx: x's shape and dtype, or None. It may be x.
        weight: As in cross_entropy, or None.
        ignore_index: As in cross_entropy.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: As cross_entropy.

    Examples:
        >>> loss = torch.empty(1)
        >>> gander.cross_entropy_fwd_out(torch.zeros(1, 2), torch.tensor([0]), None, loss, None, None, None)
        >>> loss
        tensor([0.6931])
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_fwd_out, locals())
    try:
        for name, statistic in ("loss", loss), ("lse", lse):
            if statistic is not None and statistic.shape != x.shape[:-1]:
                raise ValueError(
                    f"{name} has shape {tuple(statistic.shape)}, expected {tuple(x.shape[:-1])}, the leading "
                    "dimensions of x"
                )
        if target_logit is not None:
            if loss is None:
                raise ValueError("loss is None, expected a tensor")
            if dx is not None:
                raise NotImplementedError(
                    "dx is given with target_logit, expected None; cross_entropy_bwd takes the lse"
                )
            results = cross_entropy_fwd(x, target, target_logit, weight, ignore_index, return_lse=True)
            outputs = {"loss": loss} if lse is None else {"loss": loss, "lse": lse}
            for (name, out), result in zip(outputs.items(), results, strict=False):  # before the first write
                check_out(ops, name, result, out, result.dtype)
            ops.check_writable(**outputs)
            for out, result in zip(outputs.values(), results, strict=False):
                out.copy_(result)
            return
        if dx is not None:
            check_out(ops, "dx", x, dx)
        if _debug.is_enabled:
            check_targets(ops, x, target, ignore_index)
        operands = ops.detached(x), target, ops.detached(weight)
        ops.cross_entropy_fwd_out(*operands, loss=loss, lse=lse, dx=dx, ignore_index=ignore_index)
    except FAILURES as error:
        refuse_probabilities(ops, x, target)
        given = {"x": x, "target": target, "target_logit": target_logit, "weight": weight}
        given |= {"loss": loss, "lse": lse, "dx": dx}
        raise ops.explained(error, **given) from None


def cross_entropy_bwd_out(
    x: Array,
    target: Array,
    dloss: Array,
    lse: Array,
    dx: Array,
    weight: Array | None = None,
    ignore_index: int = -100,
) -> None:
    """cross_entropy_bwd that writes its result to dx.

    Args:
        x: As in cross_entropy.
        target: Class indices, as in cross_entropy.
        dloss: As in cross_entropy_bwd.
        lse: As in cross_entropy_bwd.
        dx: x's shape and dtype. It may be x. A torch tensor, or a writable array of NumPy or CuPy.
        weight: As in cross_entropy.
        ignore_index: As in cross_entropy.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: As cross_entropy.

    Examples:
        >>> x, target = torch.zeros(1, 2), torch.tensor([0])
        >>> _, lse = gander.cross_entropy_fwd(x, target, return_lse=True)
        >>> gander.cross_entropy_bwd_out(x, target, torch.ones(1), lse, x)
        >>> x
        tensor([[-0.5000,  0.5000]])
    """
    if type(ignore_index) is not int:
        ignore_index = integer("ignore_index", ignore_index)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(cross_entropy_bwd_out, locals())
    try:
        check_out(ops, "dx", x, dx)
        if _debug.is_enabled:
            check_targets(ops, x, target, ignore_index)
        ops.cross_entropy_bwd_out(
            ops.detached(x), target, weight, dloss, lse, dx=dx, ignore_index=ignore_index
        )
    except FAILURES as error:
        refuse_probabilities(ops, x, target)
        given = {"x": x, "target": target, "dloss": dloss, "lse": lse, "weight": weight, "dx": dx}
        raise ops.explained(error, **given) from None
