"""What verl asks of logits, in plain torch."""

import torch

FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = False


def logprobs_from_logits(logits, labels, inplace_backward=True):
    return logprobs_from_logits_v2(logits, labels)


def logprobs_from_logits_flash_attn(logits, labels, inplace_backward=True):
    raise ImportError


def logprobs_from_logits_v2(logits, labels):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def entropy_from_logits(logits):
    logs = torch.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)


def entropy_from_logits_with_chunking(logits, chunk_size=2048):
    return torch.cat([entropy_from_logits(part) for part in logits.split(chunk_size)])
