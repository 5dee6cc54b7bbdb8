"""Results by name: named tuples of what `outputs` asks for."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Generator, Sequence
from typing import Any

from .._words import shown

# By their name and their fields.
_kinds: dict[tuple[str, tuple[str, ...]], Any] = {}


def _make(title: str, outputs: tuple[str, ...]) -> None:
    """Adds a named tuple."""
    if (title, outputs) in _kinds:
        return

    class Outputs(namedtuple(title, outputs)):  # type: ignore[misc]
        __slots__ = ()

        def __new__(cls, *values: Any) -> Any:
            if len(values) == 1 and isinstance(values[0], Generator):  # torch, from a subclass of its tensors
                values = tuple(values[0])
            return super().__new__(cls, *values)

        def __reduce__(self) -> Any:  # a pickle finds no class by its name
            return named_tuple, (title, outputs, tuple(self))

    Outputs.__name__ = Outputs.__qualname__ = title
    _kinds[title, outputs] = Outputs


# torch.compile calls it while it traces, and finds the class in the dictionary.
_make._dynamo_marked_constant = True  # type: ignore[attr-defined]


def named_tuple(title: str, outputs: tuple[str, ...], values: Sequence[Any]) -> Any:
    _make(title, outputs)
    return _kinds[title, outputs](*values)


def check_outputs(outputs: Any, known: tuple[str, ...], none: str = "") -> tuple[str, ...]:
    """The names of results that a caller asks for, in that order."""
    names = tuple(outputs) if isinstance(outputs, (list, tuple)) else ()
    are_known = all(isinstance(name, str) and name in known for name in names)
    if not names or not are_known or len(set(names)) < len(names):
        listed = ", ".join(map(repr, known))
        raise ValueError(
            f"outputs is {shown(outputs)}, expected {none}a tuple of different names out of {listed}"
        )
    return names
