"""Class probabilities as targets."""

from __future__ import annotations

from typing import Any

from .._words import shown


def has_probabilities(ops: Any, x: Any, target: Any) -> bool:
    """Whether target has a number for each class, not the class of each row."""
    return ops.is_floating(target) and target.ndim == x.ndim


def refuse_probabilities(ops: Any, x: Any, target: Any) -> None:
    """Refuses class probabilities where only cross_entropy takes them."""
    if has_probabilities(ops, x, target):
        raise NotImplementedError(
            "target has class probabilities, expected class indices, int32 or int64; use cross_entropy"
        )


def check_ignored(ignore_index: int) -> None:
    """Refuses an ignore_index that names a class."""
    if ignore_index >= 0:
        raise ValueError(
            f"ignore_index is {ignore_index} with class probabilities in target, expected a negative number: "
            "no class is ignored; leave it out, or use probabilities of 0"
        )


def of_probabilities(
    ops: Any,
    x: Any,
    target: Any,
    weight: Any,
    divisor: Any,
    lse_partial: Any,
    outputs: Any,
    ignore_index: int,
    reduction: int,
    **options: Any,
) -> Any:
    """The loss of class probabilities, from cross_entropy's arguments."""
    if lse_partial is not None:
        refuse_probabilities(ops, x, target)
    if outputs is not None:
        raise NotImplementedError(
            f"outputs is {shown(outputs)} with class probabilities in target, expected None; leave it out"
        )
    check_ignored(ignore_index)
    return ops.soft_cross_entropy(x, target, weight, divisor, reduction=reduction, **options)[0]
