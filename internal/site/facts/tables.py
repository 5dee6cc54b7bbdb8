"""Tables in Markdown, and the line below a table that says where its figures come from."""

import textwrap
from collections.abc import Iterable, Sequence

_RULES = {"l": "---", "r": "--:"}


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "", align: str = "lr") -> str:
    """align: l or r for each column. Its last letter holds for all further columns."""
    rules = [_RULES[letter] for letter in align.ljust(len(columns), align[-1])[: len(columns)]]
    lines = [_line(columns), f"|{'|'.join(rules)}|", *map(_line, rows)]
    if note:
        lines += ["", textwrap.fill(f"*{note}*", 110, break_on_hyphens=False)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def named(*files: str) -> str:
    """Where records lie."""
    return ", ".join(f"bench/results/{file}.jsonl" for file in files)
