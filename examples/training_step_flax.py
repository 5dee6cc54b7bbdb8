"""Trains a classifier with Flax, whose layers LayerNorm and RMSNorm are gander's.

    python training_step_flax.py

The same model with Flax's own layers trains beside it, to the same losses.
"""

import math
import sys

import gander.jax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

M, K, H, N, STEPS, RATE = 512, 64, 128, 10, 30, 0.5  # rows, features, hidden features, classes


class RMSNorm(nnx.Module):
    """As nnx.RMSNorm, by gander.jax.rmsnorm."""

    def __init__(self, num_features, *, epsilon=1e-6, rngs=None):
        self.scale = nnx.Param(jnp.ones(num_features))
        self.epsilon = epsilon

    def __call__(self, x):
        return gander.jax.rmsnorm(x, self.scale[...], eps=self.epsilon)


class LayerNorm(nnx.Module):
    """As nnx.LayerNorm, by gander.jax.layernorm."""

    def __init__(self, num_features, *, epsilon=1e-6, rngs=None):
        self.scale, self.bias = nnx.Param(jnp.ones(num_features)), nnx.Param(jnp.zeros(num_features))
        self.epsilon = epsilon

    def __call__(self, x):
        return gander.jax.layernorm(x, self.scale[...], self.bias[...], eps=self.epsilon)


class Classifier(nnx.Module):
    def __init__(self, layer_norm, rms_norm, rngs):
        self.hidden, self.head = nnx.Linear(K, H, rngs=rngs), nnx.Linear(H, N, rngs=rngs)
        self.first, self.second = layer_norm(K, rngs=rngs), rms_norm(H, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(jax.nn.gelu(self.hidden(self.first(x)))))


# The class of a row is the largest of random linear functions of it, so that it can be learned.
keys = jax.random.split(jax.random.key(0))
features = jax.random.normal(keys[0], (M, K))
targets = (features @ jax.random.normal(keys[1], (K, N))).argmax(1)


def loss_of_gander(model):
    return gander.jax.cross_entropy(model(features), targets)


def loss_of_flax(model):
    return optax.softmax_cross_entropy_with_integer_labels(model(features), targets).mean()


def train(loss, *norms):
    model = Classifier(*norms, nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    for _ in range(STEPS):
        yield float(step(model, optimizer))


losses = []
own = train(loss_of_flax, nnx.LayerNorm, nnx.RMSNorm)
for step, pair in enumerate(zip(train(loss_of_gander, LayerNorm, RMSNorm), own, strict=True)):
    losses.append(pair)
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {pair[0]:.4f}, with Flax's own layers {pair[1]:.4f}")

(first, _), (last, _) = losses[0], losses[-1]
if not (abs(first - math.log(N)) < 1 and last < first / 3):
    sys.exit(f"wrong: the first loss is {first}, expected about {math.log(N)}, and a third of it at the end")
if not all(abs(a - b) < 1e-3 for a, b in losses):
    sys.exit(f"wrong: the losses are {losses}, expected pairs that agree")
