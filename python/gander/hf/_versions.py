"""Which versions of other packages gander.hf was checked with."""

from __future__ import annotations

import importlib.metadata
import re

# Package: the oldest and the newest version. `./build.sh test hf` runs the newest, requirements-hf.txt locks
# it, and tests/hf compares the two.
CHECKED = {
    "transformers": ("5.20.2", "5.24.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "peft": ("0.21.2", "0.21.2"),
}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def require() -> list[str]:
    """Refuses a transformers that is missing or too old. Returns what a report says of newer packages.

    A newer one is not refused: what is replaced is proven by running it, whatever its version.
    """
    oldest = CHECKED["transformers"][0]
    how = "pip install 'gander-kernels[hf]'"
    notes = []
    for package, (_, newest) in CHECKED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "transformers":
                raise ImportError(f"gander.hf needs transformers, which is not installed: {how}") from None
            continue
        if package == "transformers" and _numbers(version) < _numbers(oldest):
            raise ImportError(f"transformers is {version}, expected {oldest} or newer: {how}")
        if _numbers(version) > _numbers(newest):
            notes.append(f"{package} {version} is newer than {newest}, the newest that was checked")
    return notes
