"""What `apply` has done to a model, as data and as a table."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

Kind = Literal["norm", "rotary", "qk_norm", "mlp", "loss"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Modules of one class that were replaced in one way, or left for one reason.

    Args:
        kind: "norm", "rotary", "qk_norm", "mlp" or "loss".
        module: The name of their class.
        detail: What stands in their place, or why they were left.
        names: Their names in the model. "" is the model itself.
    """

    kind: Kind
    module: str
    detail: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was replaced and what was left. str() makes a table of it.

    Args:
        replaced: Entries of what now runs on gander.
        left: Entries of what is as it was.
        notes: Sentences about the packages, such as a version that was not checked.
    """

    replaced: tuple[Entry, ...]
    left: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("replaced", "", "by", "where")] + [_row(entry) for entry in self.replaced]
        if self.left:
            rows += [("left", "", "because", "where")] + [_row(entry) for entry in self.left]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
        return "\n".join([*lines, *self.notes])


def _row(entry: Entry) -> tuple[str, str, str, str]:
    # A star stands for the number of a layer.
    where = {re.sub(r"\b\d+\b", "*", name): None for name in entry.names}
    return f"{len(entry.names):4} {entry.kind}", entry.module, entry.detail, ", ".join(where)


class Draft:
    """A report that is being written: collects modules under their class and detail."""

    def __init__(self) -> None:
        self._entries: dict[tuple[bool, Kind, str, str], list[str]] = {}

    def replaced(self, kind: Kind, module: object, name: str, detail: str) -> None:
        self._entries.setdefault((True, kind, type(module).__name__, detail), []).append(name)

    def left(self, kind: Kind, module: object, name: str, detail: str) -> None:
        self._entries.setdefault((False, kind, type(module).__name__, detail), []).append(name)

    def report(self, notes: list[str]) -> Report:
        entries = {True: [], False: []}  # type: dict[bool, list[Entry]]
        for (done, kind, module, detail), names in self._entries.items():
            entries[done].append(Entry(kind, module, detail, tuple(names)))
        return Report(tuple(entries[True]), tuple(entries[False]), tuple(notes))
