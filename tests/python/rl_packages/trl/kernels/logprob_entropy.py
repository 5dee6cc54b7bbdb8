"""What TRL asks of logits, in plain torch."""

import torch


def selective_log_softmax_and_entropy(logits, index, temperature=1.0, row_mask=None):
    logs = torch.log_softmax(logits / temperature, -1)
    log_prob = logs.gather(-1, index[..., None].long())[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    if row_mask is not None:
        log_prob, entropy = (torch.where(row_mask != 0, each, 0) for each in (log_prob, entropy))
    return log_prob, entropy
