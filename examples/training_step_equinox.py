"""Trains a classifier with Equinox, whose layers LayerNorm and RMSNorm are gander's.

    python training_step_equinox.py

The same model with Equinox's own layers trains beside it, to the same losses. Those take one row, and
jax.vmap makes them take many. gander's take rows of any leading dimensions.
"""

import math
import sys

import equinox as eqx
import gander.jax
import jax
import jax.numpy as jnp

M, K, H, N, STEPS, RATE = 512, 64, 128, 10, 30, 0.5  # rows, features, hidden features, classes


class RMSNorm(eqx.Module):
    weight: jax.Array
    eps: float = eqx.field(static=True)

    def __init__(self, size, eps=1e-5):
        self.weight, self.eps = jnp.ones(size), eps

    def __call__(self, x):
        return gander.jax.rmsnorm(x, self.weight, eps=self.eps)


class LayerNorm(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    eps: float = eqx.field(static=True)

    def __init__(self, size, eps=1e-5):
        self.weight, self.bias, self.eps = jnp.ones(size), jnp.zeros(size), eps

    def __call__(self, x):
        return gander.jax.layernorm(x, self.weight, self.bias, eps=self.eps)


class Classifier(eqx.Module):
    first: eqx.Module
    hidden: eqx.nn.Linear
    second: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, layer_norm, rms_norm, key):
        keys = jax.random.split(key)
        self.first, self.hidden = layer_norm(K), eqx.nn.Linear(K, H, key=keys[0])
        self.second, self.head = rms_norm(H), eqx.nn.Linear(H, N, key=keys[1])

    def __call__(self, x, of_rows):
        hidden = jax.nn.gelu(jax.vmap(self.hidden)(of_rows(self.first)(x)))
        return jax.vmap(self.head)(of_rows(self.second)(hidden))


# The class of a row is the largest of random linear functions of it, so that it can be learned.
keys = jax.random.split(jax.random.key(0))
features = jax.random.normal(keys[0], (M, K))
targets = (features @ jax.random.normal(keys[1], (K, N))).argmax(1)


def loss_of_gander(model):
    return gander.jax.cross_entropy(model(features, lambda layer: layer), targets)


def loss_of_equinox(model):
    logs = jax.nn.log_softmax(model(features, jax.vmap))
    return -jnp.take_along_axis(logs, targets[:, None], 1).mean()


def train(loss, *norms):
    @eqx.filter_jit
    def step(model):
        value, gradients = eqx.filter_value_and_grad(loss)(model)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * g, gradients))

    model = Classifier(*norms, jax.random.key(1))
    for _ in range(STEPS):
        value, model = step(model)
        yield float(value)


losses = []
own = train(loss_of_equinox, eqx.nn.LayerNorm, eqx.nn.RMSNorm)
for step, pair in enumerate(zip(train(loss_of_gander, LayerNorm, RMSNorm), own, strict=True)):
    losses.append(pair)
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {pair[0]:.4f}, with Equinox's own layers {pair[1]:.4f}")

(first, _), (last, _) = losses[0], losses[-1]
if not (abs(first - math.log(N)) < 1 and last < first / 3):
    sys.exit(f"wrong: the first loss is {first}, expected about {math.log(N)}, and a third of it at the end")
if not all(abs(a - b) < 1e-3 for a, b in losses):
    sys.exit(f"wrong: the losses are {losses}, expected pairs that agree")
