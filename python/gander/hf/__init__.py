"""Puts gander into a Hugging Face model: its RMSNorms, its rotary embeddings, the activations of its MLPs and
experts, and its loss.

`apply(model)` changes this one instance and nothing else. `undo(model)` takes it back. An adapter: it uses
gander's public functions, and neither gander nor this package imports transformers before a call needs it.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("gander.hf needs torch, which is not installed: pip install torch") from None

from ._apply import apply, patched, undo
from ._report import Entry, Report
from ._versions import CHECKED

__all__ = ["CHECKED", "Entry", "Report", "apply", "patched", "undo"]

for _public in apply, patched, undo, Entry, Report:  # a pickle must survive a move
    _public.__module__ = __name__
