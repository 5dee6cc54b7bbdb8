"""The same bits in a rollout, where tokens come one at a time, and in training, where they come as a batch.

    python same_bits.py

A product of matrices may add up in another order where there are other numbers of rows. So the head is
applied to tiles of a fixed number of rows. gander's functions take batch_invariant=True. It runs on a GPU if
torch has one, else on the CPU.
"""

import sys

import gander
import torch

M, K, N, TILE = 100, 256, 4000, 16  # tokens, hidden features, vocabulary, rows of a product
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)


def in_tiles(hidden, head):
    """hidden @ head.T, as products of TILE rows each. The last one is filled up with zeros."""
    filled = torch.nn.functional.pad(hidden, (0, 0, 0, -len(hidden) % TILE))
    return torch.cat([tile @ head.T for tile in filled.split(TILE)])[: len(hidden)]


def log_probs(hidden, tokens, product):
    """The tokens' log-probabilities and entropies, from what a model's last layer returns."""
    normalized = gander.rmsnorm(hidden, scale, batch_invariant=True)
    logits = product(normalized, head)
    return gander.token_statistics(logits, tokens, temperature=0.8, batch_invariant=True)


scale = torch.rand(K, device=device, dtype=dtype) + 0.5
head = torch.randn(N, K, device=device, dtype=dtype) / K**0.5
hidden = torch.randn(M, K, device=device, dtype=dtype)
tokens = torch.randint(N, (M,), device=device)


def differing(product):
    """In how many rows the batch has other bits than the tokens one at a time."""
    batch = log_probs(hidden, tokens, product)
    single = [log_probs(hidden[i : i + 1], tokens[i : i + 1], product) for i in range(M)]
    rollout = [torch.cat(column) for column in zip(*single, strict=True)]
    differ = [batch_column != column for batch_column, column in zip(batch, rollout, strict=True)]
    return int(torch.stack(differ).any(0).sum())


tiled, plain = differing(in_tiles), differing(lambda hidden, head: hidden @ head.T)
print(f"of {M} rows on {device} have other bits: {tiled} by products of {TILE} rows, {plain} by one product")
if tiled:
    sys.exit("wrong: the same rows have other bits in a batch")
