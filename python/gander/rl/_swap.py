"""Other functions in the place of a package's own, wherever modules hold them, until that is undone.

A name may be looked up in the module that made it, or in one that has imported it from there. So all modules
are searched, which makes the order of imports irrelevant. Undoing searches them again: a module that was
imported meanwhile has imported the replacement.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """One object for another: where modules hold it, or as an attribute of a class."""

    old: Any
    new: Any
    owner: type | None = None


def _exchange(old: Any, new: Any, owner: type | None) -> Iterator[str]:
    """Puts new where old is held, and names these places."""
    holders = {f"{owner.__module__}.{owner.__name__}": owner} if owner else dict(sys.modules)
    for path, holder in holders.items():
        for name, held in list(getattr(holder, "__dict__", {}).items()):
            if held is old:
                setattr(holder, name, new)
                yield f"{path}.{name}"


class _Standing:
    """The replacements in a package that are in place, and how many `Swap`s want them there."""

    def __init__(self, replacements: list[Replacement]) -> None:
        self.replacements, self.users = replacements, 0
        self.places = tuple(place for each in replacements for place in _exchange(*each))


_standing: dict[str, _Standing] = {}
_lock = threading.Lock()


class Swap:
    """Functions of gander in the place of a package's own, in this process: from the call that returns this
    to `undo`, or to the end of the `with` block.

    Of several of one package the last one that is undone restores what was there.

    Attributes:
        package: The package.
        places: The names under which its functions were held.
    """

    package: str
    places: tuple[str, ...]

    def __init__(self, package: str, find: Callable[[], list[Replacement]]) -> None:
        with _lock:
            if package not in _standing:
                _standing[package] = _Standing(find())  # find refuses before anything changes
            standing = _standing[package]
            standing.users += 1
        self.package, self.places, self._undone = package, standing.places, False

    def undo(self) -> None:
        """Puts the package's own functions back. A second call does nothing."""
        with _lock:
            if self._undone:
                return
            self._undone, standing = True, _standing[self.package]
            standing.users -= 1
            if not standing.users:
                for old, new, owner in _standing.pop(self.package).replacements:
                    for _ in _exchange(new, old, owner):
                        pass

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<gander in {', '.join(self.places)}{': undone' if self._undone else ''}>"
