"""Trains a classifier in JAX, with gander's RMSNorm and cross-entropy inside one jax.jit.

    python training_step_jax.py

The same step in JAX's own operations trains beside it, to the same losses.
"""

import math
import sys

import gander.jax
import jax
import jax.numpy as jnp

M, K, N, STEPS, RATE = 512, 64, 10, 30, 1.0  # rows, features, classes

# The class of a row is the largest of random linear functions of it, so that it can be learned.
keys = jax.random.split(jax.random.key(0))
features = jax.random.normal(keys[0], (M, K))
targets = (features @ jax.random.normal(keys[1], (K, N))).argmax(1)


def loss_of_gander(parameters):
    hidden = gander.jax.rmsnorm(features, parameters["scale"])
    return gander.jax.cross_entropy(hidden @ parameters["head"], targets)


def loss_of_jax(parameters):
    squares = jnp.mean(features**2, -1, keepdims=True)
    hidden = features * jax.lax.rsqrt(squares + 1e-6) * parameters["scale"]
    logs = jax.nn.log_softmax(hidden @ parameters["head"])
    return -jnp.take_along_axis(logs, targets[:, None], 1).mean()


def train(loss):
    @jax.jit
    def step(parameters):
        value, gradients = jax.value_and_grad(loss)(parameters)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    parameters = {"scale": jnp.ones(K), "head": jnp.zeros((K, N))}
    for _ in range(STEPS):
        value, parameters = step(parameters)
        yield float(value)


losses = []
for step, pair in enumerate(zip(train(loss_of_gander), train(loss_of_jax), strict=True)):
    losses.append(pair)
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {pair[0]:.4f}, in JAX's own operations {pair[1]:.4f}")

# The head is 0 in the first step, so all classes are equally probable.
(first, _), (last, _) = losses[0], losses[-1]
if not (abs(first - math.log(N)) < 1e-5 and last < first / 3):
    sys.exit(f"wrong: the first loss is {first}, expected {math.log(N)}, and a third of it at the end")
if not all(abs(a - b) < 1e-4 for a, b in losses):
    sys.exit(f"wrong: the losses are {losses}, expected pairs that agree")
