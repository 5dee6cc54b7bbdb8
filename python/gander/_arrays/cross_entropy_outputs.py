"""Cross-entropy of arrays with more than the loss: the z-loss, the log-sum-exp and the predicted classes."""

from typing import Any

from .._table import MEAN, NONE
from .._words import kind
from .capsules import indices, module_of
from .operators_gen import cross_entropy, token_statistics

_OF_TOKENS = ("ignore_index", "batch_invariant", "scale", "softcap", "temperature")


def cross_entropy_outputs(
    names: tuple[str, ...], x: Any, target: Any, weight: Any, divisor: Any, **given: Any
) -> dict[str, Any]:
    """By name, what gander.cross_entropy returns with these outputs, and maybe more.

    There are no gradients, so the loss and the predicted classes are two calls.
    """
    loss, lse = cross_entropy(x, target, weight, divisor, **given, needs_lse=True)
    found = {"loss": loss}
    if "lse" in names or "z_loss" in names:
        module = _module(lse)
        target = indices(target)
        lse = module.where(target == given["ignore_index"], module.zeros_like(lse), lse)
        z_loss = _z_loss(module, lse, target, x.shape[-1], divisor, **given)
        found |= {"lse": lse, "z_loss": module.asarray(z_loss, dtype=lse.dtype)}
    if "predicted" in names or "is_top1" in names:
        options = {name: value for name, value in given.items() if name in _OF_TOKENS}
        *_, found["is_top1"], found["predicted"], _ = token_statistics(
            x, target, **options, needs_is_top1=True, needs_predicted=True
        )
    return found


def _z_loss(
    module: Any,
    lse: Any,
    target: Any,
    classes: int,
    divisor: Any,
    *,
    ignore_index: int,
    reduction: int,
    z_loss: float = 0.0,
    **_: Any,
) -> Any:
    """The z-loss's part of the loss."""
    if not z_loss:  # of an lse that is infinite too
        return module.zeros(lse.shape if reduction == NONE else ())
    squares = z_loss * lse * lse
    if reduction == NONE:
        return squares
    if reduction == MEAN:
        is_class = (target >= 0) & (target < classes)
        counts = module.where(is_class, module.ones_like(lse), module.nan)
        divisor = module.where(target == ignore_index, 0, counts).sum()
    return squares.sum() if divisor is None else squares.sum() / divisor


def _module(x: Any) -> Any:
    """What computes with arrays like x."""
    if (module := module_of(x)) is not None:
        return module
    if not hasattr(x, "__array_namespace__"):
        raise NotImplementedError(
            f"outputs has 'lse' or 'z_loss' for {kind(x)}, expected an array with __array_namespace__; leave "
            "them out, or use cross_entropy_fwd with return_lse"
        )
    return x.__array_namespace__()
