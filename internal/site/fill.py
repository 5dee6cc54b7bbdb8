"""Fills in the figures of README.md and docs/ from the table of operators, the library and the records.

A page marks a figure with the expression that makes it, in the names of the package facts:

    On an H100 softmax has <!--= times("softmax_forward", "torch") -->1.6<!--/--> times torch's speed.

    <!--= kernels("softmax") -->
    ...
    <!--/-->

`python internal/site/fill.py` writes what lies between a mark and its end, and the pictures in docs/images.
With --check it writes nothing, and fails if anything differs.
"""

import difflib
import re
import sys
from pathlib import Path

import facts
from marks import MARK

ROOT = Path(__file__).resolve().parents[2]
_PAGES = ("README.md", "docs/**/*.md")


def filled(text: str) -> str:
    """A page with the text of each of its marks made anew."""

    def made(mark: re.Match) -> str:
        is_block = mark["text"].startswith("\n")
        try:
            fact = str(eval(mark["expression"], vars(facts).copy()))
        except Exception as error:
            error.add_note(f"in the mark {mark['start']}")
            raise
        if "\n" in fact and not is_block:
            raise ValueError(f"{mark['start']} makes several lines: its end has to stand on another line")
        if is_block:
            fact = f"\n\n{fact}\n\n" if fact else "\n"
        return mark["start"] + fact + mark["end"]

    return MARK.sub(made, text)


def files() -> dict[Path, str]:
    """Each page and picture, with the content that it should have."""
    pages = [path for pattern in _PAGES for path in sorted(ROOT.glob(pattern))]
    made = {path: filled(path.read_text()) for path in pages}
    return made | {ROOT / "docs/images" / name: svg for name, svg in facts.pictures().items()}


def main(arguments: list[str]) -> int:
    stale = 0
    for path, content in files().items():
        found = path.read_text() if path.exists() else ""
        if found == content:
            continue
        stale += 1
        if "--check" not in arguments:
            path.write_text(content)
        name = str(path.relative_to(ROOT))
        print(f"{name} differs from what its marks make" if arguments else f"wrote {name}")
        if path.suffix == ".md":
            lines = difflib.unified_diff(found.splitlines(), content.splitlines(), name, name, "", "", 0, "")
            print(*lines, sep="\n")
    if stale and arguments:
        print("./build.sh docs writes them anew")
    return stale if arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
