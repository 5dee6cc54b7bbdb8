"""What OpenRLHF's actor asks of logits, in plain torch."""

import torch


def log_probs_from_logits(logits, labels, temperature=1.0):
    if temperature != 1.0:
        logits.div_(temperature)
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


@torch.compile(backend="eager")
def compute_entropy(logits):
    logs = torch.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)
