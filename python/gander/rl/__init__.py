"""Puts gander into TRL, verl and OpenRLHF, where they compute log-probabilities and entropies of tokens.

An adapter: it uses gander's public functions, and imports theirs when they are asked for.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("gander.rl needs torch, which is not installed: pip install torch") from None

from ._openrlhf import openrlhf
from ._swap import Swap
from ._trl import trl
from ._verl import verl
from ._versions import CHECKED

__all__ = ["CHECKED", "Swap", "openrlhf", "trl", "verl"]

for _public in Swap, openrlhf, trl, verl:
    _public.__module__ = __name__
