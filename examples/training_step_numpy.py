"""Trains a classifier with RMSNorm and cross-entropy on NumPy arrays, without torch.

    python training_step_numpy.py

Arrays have no autograd. So the forward functions return what their gradients read, and the loop calls the
backward functions in reverse order. They take arrays of CuPy and JAX too.
"""

import math
import sys

import gander
import numpy as np

M, K, N, STEPS, RATE = 512, 64, 10, 30, 1.0  # rows, features, classes
random = np.random.default_rng(0)

# The class of a row is the largest of random linear functions of it, so that it can be learned.
features = random.standard_normal((M, K), dtype=np.float32)
targets = (features @ random.standard_normal((K, N), dtype=np.float32)).argmax(1)

scale = np.ones(K, np.float32)
head = np.zeros((K, N), np.float32)
dloss = np.array(1 / M, np.float32)  # of each row: their mean is the loss

losses = []
for step in range(STEPS):
    hidden, _, rstd = gander.rmsnorm_fwd(features, scale, store_rstd=True)
    logits = hidden @ head
    row_losses, lse = gander.cross_entropy_fwd(logits, targets, return_lse=True)

    dlogits = gander.cross_entropy_bwd(logits, targets, dloss, lse)
    _, dscale, _, _ = gander.rmsnorm_bwd(features, scale, dlogits @ head.T, rstd)
    head -= RATE * hidden.T @ dlogits
    scale -= RATE * dscale

    losses.append(row_losses.mean())
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {losses[-1]:.4f}")

# The head is 0 in the first step, so all classes are equally probable.
if not (abs(losses[0] - math.log(N)) < 1e-5 and losses[-1] < losses[0] / 3):
    sys.exit(f"wrong: the first loss is {losses[0]}, expected {math.log(N)}, and a third of it at the end")
