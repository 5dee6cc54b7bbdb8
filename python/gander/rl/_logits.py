"""What several packages compute of logits."""

from __future__ import annotations

import torch
from torch import Tensor

import gander

# An ignore_index that no index equals. The functions that are replaced leave no token out, so an index below
# zero is a mistake, and its log-probability NaN.
UNKNOWN = -(2**63)


def log_prob_of(logits: Tensor, index: Tensor, inplace_backward: bool = False) -> Tensor:
    """Log-probabilities of tokens."""
    found: Tensor = gander.token_statistics(
        logits, index, ignore_index=UNKNOWN, inplace_backward=inplace_backward, outputs=("log_prob",)
    ).log_prob
    return found


def entropy_of(logits: Tensor) -> Tensor:
    """Entropies of the distributions of logits, which no token is needed for."""
    index = logits.new_zeros((), dtype=torch.int64).expand(logits.shape[:-1])
    found: Tensor = gander.token_statistics(logits, index, outputs=("entropy",)).entropy
    return found
