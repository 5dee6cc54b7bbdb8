"""gander.set_debug."""

from typing import Any

from ._words import check_flags

enabled = False


def set_debug(value: bool) -> None:
    """Makes the cross-entropy functions check every target and raise IndexError if one is out of range.

    The check waits for the GPU, and gathers the targets of a DTensor, so it is off by default. Without it a
    row whose target is out of range gets a loss and a gradient of NaN. Calls inside a torch.compile graph are
    not checked.
    """
    global enabled
    check_flags(value=value)
    enabled = bool(value)


def check_targets(classes: int, target: Any, ignore_index: int) -> None:
    """Raises IndexError if an element of target is neither a class nor ignore_index."""
    bad = (target < 0) | (target >= classes)
    if target.dtype.itemsize == 8 or -(2**31) <= ignore_index < 2**31:  # else it has no int32
        bad &= target != ignore_index
    if bool(bad.any()):
        raise IndexError(
            f"target has the class {int(target[bad][0])}, expected 0 to {classes - 1}, "
            f"or ignore_index = {ignore_index}"
        )
