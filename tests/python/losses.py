"""Cross-entropy with options, by torch's operators."""

import torch.nn.functional as F

OPTIONS = [
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 0.01},
    {"scale": 0.25, "temperature": 0.6},
    {"softcap": 4.0},
    {"label_smoothing": 0.2, "z_loss": 0.1, "scale": 1.5, "softcap": 30.0, "temperature": 2.0},
]


def cross_entropy(
    x,
    target,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    scale=1.0,
    softcap=None,
    temperature=1.0,
):
    z = x if scale == 1 else x * scale
    z = z if softcap is None else softcap * (z / softcap).tanh()
    z = z if temperature == 1 else z / temperature
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(z, target, weight, **options)
    if not z_loss:
        return loss
    counts = target != ignore_index
    squares = z_loss * z.logsumexp(-1).where(counts, 0) ** 2
    if reduction == "none":
        return loss + squares
    return loss + squares.sum() / (counts.sum() if reduction == "mean" else 1)
