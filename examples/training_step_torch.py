"""Trains a classifier with RMSNorm and cross-entropy in PyTorch.

    python training_step_torch.py

It runs on a GPU if torch has one, else on the CPU.
"""

import math
import sys

import gander
import torch

M, K, N, STEPS = 512, 64, 10, 30  # rows, features, classes
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# The class of a row is the largest of random linear functions of it, so that it can be learned.
features = torch.randn(M, K, device=device)
targets = (features @ torch.randn(K, N, device=device)).argmax(1)

scale = torch.ones(K, device=device, requires_grad=True)
head = torch.zeros(K, N, device=device, requires_grad=True)
optimizer = torch.optim.SGD([scale, head], lr=1.0)

print(f"training on {device}")
losses = []
for step in range(STEPS):
    optimizer.zero_grad()
    logits = gander.rmsnorm(features, scale) @ head
    # On a GPU, with 2^22 logits or more, its forward pass also makes their gradient: backward() does not read
    # them again.
    loss = gander.cross_entropy(logits, targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {losses[-1]:.4f}")

# The head is 0 in the first step, so all classes are equally probable.
if not (abs(losses[0] - math.log(N)) < 1e-5 and losses[-1] < losses[0] / 3):
    sys.exit(f"wrong: the first loss is {losses[0]}, expected {math.log(N)}, and a third of it at the end")
