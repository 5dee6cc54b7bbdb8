"""Measurements that are in the checkout, by the names of their files."""

from collections.abc import Iterable
from pathlib import Path

from .records import read
from .report import WHOLE_MODELS, latest, newest, of, unique


class Missing(LookupError):
    """A file of measurements lacks what was asked for."""


def stored(path: Path | str, section: str, contestants: Iterable[str], **wanted) -> list[dict]:
    """The last measurement of each point of a section.

    Args:
        path: The file of JSON lines.
        contestants: Who must have figures there, at one of the points at least.
        wanted: What else the points have, such as op="softmax_forward", dtype="bfloat16" or model="small".

    Raises:
        Missing: There is no such file, it has no such point, or a contestant has no figures.
    """
    path = Path(path)
    if not path.is_file():
        raise Missing(f"there is no file {path}: name one of bench/results that has section {section!r}")
    what = ", ".join([f"section {section!r}", *(f"{name} {value!r}" for name, value in wanted.items())])
    found = [
        r for r in latest(read(path)) if all(r.get(k) == v for k, v in {**wanted, "section": section}.items())
    ]
    if not found:
        raise Missing(f"{path} has no {what}: name another file of bench/results")
    there = having_figures(found)
    if lacking := [name for name in contestants if name not in there]:
        raise Missing(
            f"{path} lacks {', '.join(lacking)} in {what}, where it has {', '.join(there)}: name a file that "
            "has all of them, or measure them into one"
        )
    return found


def having_figures(records: list[dict]) -> list[str]:
    """The contestants that have a time at one of the points, not only a reason why there is none."""
    return unique(
        name for r in records for name, figures in r["results"].items() if {"us", "ms"} & figures.keys()
    )


def with_contestant(records: list[dict], others: list[dict], contestant: str) -> list[dict]:
    """The records, each with the figures that a contestant has at the same point of another run. For
    pictures: a ratio of two contestants is only meant within one run.

    Raises:
        Missing: The other run lacks the contestant at one of the points.
    """

    def point(record):
        return tuple(record.get(name) for name in ("section", "op", "dtype", "m", "n"))

    figures = {point(r): r["results"][contestant] for r in others if contestant in r["results"]}
    if lacking := [point(r) for r in records if point(r) not in figures]:
        raise Missing(f"the other run lacks {contestant} at {lacking[0]} and {len(lacking) - 1} more points")
    return [r | {"results": r["results"] | {contestant: figures[point(r)]}} for r in records]


def whole_models(folder: Path | str) -> tuple[str, list[dict]] | None:
    """The newest file of a folder in which whole models were trained on a GPU, and these records; None where
    there is no such file."""
    found = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        if "train" not in path.name:
            continue
        trained = [r for r in of(latest(read(path)), "train") if r["on"] == "cuda"]
        if records := [r for r in trained if r["model"] in WHOLE_MODELS]:
            found.append((path.stem, records))
    return max(found, key=lambda each: newest(each[1])["date"], default=None)
