"""OpenRLHF's log-probabilities and entropies of logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._logits import entropy_of, log_prob_of
from ._swap import Replacement, Swap
from ._versions import find


def openrlhf() -> Swap:
    """Computes OpenRLHF's log-probabilities and entropies of tokens by gander's `token_statistics`.

    It replaces `log_probs_from_logits` and `compute_entropy`, which `Actor` calls, in this process, in all
    threads, whether the actor was imported before or after.

    Returns:
        What undoes it: `with gander.rl.openrlhf(): ...`, or `swap = gander.rl.openrlhf()` and `swap.undo()`.

    Raises:
        ImportError: OpenRLHF is not installed.
        NotImplementedError: The source of OpenRLHF's functions is not the one that was checked.
    """
    return Swap("openrlhf", _find)


def _find() -> list[Replacement]:
    module = find("openrlhf.models.utils")
    return [
        Replacement(module.log_probs_from_logits, _log_prob()),
        Replacement(module.compute_entropy, _entropy()),
    ]


def _log_prob() -> Any:
    def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        if temperature != 1.0:
            logits.div_(temperature)  # as OpenRLHF does: its callers read them afterwards
        return log_prob_of(logits, labels)

    return log_probs_from_logits


def _entropy() -> Any:
    def compute_entropy(logits: Tensor) -> Tensor:
        return entropy_of(logits)

    return compute_entropy
