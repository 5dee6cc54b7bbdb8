"""Which versions of jax gander.jax was checked with."""

from __future__ import annotations

import importlib.metadata
import re

# The oldest and the newest. requirements-jax.txt locks the one for Python 3.11 and the other for 3.12, and
# `./build.sh test jax` runs both.
CHECKED = ("0.10.2", "0.12.0.1")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def require() -> None:
    """Refuses a jax that is missing or too old. A newer one is not refused: XLA serves handlers of the API's
    version for a year or more, and refuses them by itself after that."""
    how = "pip install 'gander-kernels[jax]'"
    try:
        version = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"gander.jax needs jax, which is not installed: {how}") from None
    if _numbers(version) < _numbers(CHECKED[0]):
        raise ImportError(f"jax is {version}, expected {CHECKED[0]} or newer for gander.jax: {how}")
