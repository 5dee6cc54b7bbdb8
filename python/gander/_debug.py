"""gander.set_debug."""

from typing import Any

from ._words import check_flags

is_enabled = False


def set_debug(enabled: bool) -> None:
    """Makes cross-entropy and token_statistics check every target, or index.

    The check waits for the GPU, and gathers the targets of a DTensor, so it is off by default. Without it a
    row whose target is out of range gets a loss and a gradient of NaN. Calls inside a torch.compile graph are
    not checked.

    Args:
        enabled: Whether a target that is neither a class nor ignore_index raises IndexError.

    Raises:
        TypeError: enabled is neither True nor False.

    Examples:
        >>> gander.set_debug(True)
        >>> gander.cross_entropy(torch.zeros(1, 2), torch.tensor([2]))
        Traceback (most recent call last):
        IndexError: target has the class 2, expected 0 to 1, or ignore_index = -100
        >>> gander.set_debug(False)
    """
    global is_enabled
    check_flags(enabled=enabled)
    is_enabled = bool(enabled)


def check_targets(classes: int, target: Any, ignore_index: int, name: str = "target") -> None:
    """Raises IndexError if an element of target, the argument `name`, is neither a class nor ignore_index."""
    bad = (target < 0) | (target >= classes)
    if target.dtype.itemsize == 8 or -(2**31) <= ignore_index < 2**31:  # else it has no int32
        bad &= target != ignore_index
    if bool(bad.any()):
        raise IndexError(
            f"{name} has the class {int(target[bad][0])}, expected 0 to {classes - 1}, "
            f"or ignore_index = {ignore_index}"
        )
