"""The functions of gander.jax beside the same in JAX's own operations."""

from typing import NamedTuple

import gander.jax as gj
import jax
import jax.numpy as jnp
import numpy as np
from jax.random import key, normal, split

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}


class Case(NamedTuple):
    ours: object
    formula: object
    shapes: tuple  # of the arguments, which are arrays of normal numbers


def _rmsnorm(x, weight=1, bias=0, residual=0, offset=0.0):
    h = x + residual
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * (weight + offset) + bias


def _layernorm(x, weight=1, bias=0, residual=0):
    h = x + residual
    d = h - h.mean(-1, keepdims=True)
    return d * jax.lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-6) * weight + bias


def _rotated(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


WHERE = jnp.arange(33).reshape(3, 11) % 4 > 0
ANGLES = np.arange(20, dtype=np.float32).reshape(5, 4)


def _tables(x):
    """The same bits in every program: a GPU's cosine differs from that of XLA's constants."""
    return np.cos(ANGLES).astype(x.dtype), np.sin(ANGLES).astype(x.dtype)


TOKENS = np.arange(6, dtype=np.int32).reshape(2, 3)


def _tokens(z):
    log_p = jax.nn.log_softmax(z, -1)
    log_prob = jnp.take_along_axis(log_p, TOKENS[..., None], -1)[..., 0]
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return jnp.where(TOKENS > 1, log_prob, 0), jnp.where(TOKENS > 1, entropy, 0)


PROBABILITIES = np.arange(66, dtype=np.float32).reshape(2, 3, 11) % 7 / 33


def of_probabilities(z, target, weight=1.0, smoothing=0.0):
    """The cross-entropy of each row."""
    target = (1 - smoothing) * target.astype(z.dtype) + smoothing / z.shape[-1]
    return -(weight * target * jax.nn.log_softmax(z, -1)).sum(-1)


ROWS, COLUMNS, HEADS = (2, 3, 11), (11,), (3, 11)
CASES = {
    "softmax": Case(gj.softmax, jax.nn.softmax, (ROWS,)),
    "softmax axis": Case(lambda x: gj.softmax(x, (0, 2)), lambda x: jax.nn.softmax(x, (0, 2)), (ROWS,)),
    "softmax where": Case(
        lambda x: gj.softmax(x, where=WHERE, scale=0.5),
        lambda x: jax.nn.softmax(x * 0.5, where=WHERE),
        (ROWS,),
    ),
    "softmax causal": Case(
        lambda x: gj.softmax(x, causal=True),
        lambda x: jax.nn.softmax(x, where=jnp.tri(3, 11, dtype=bool)),
        (ROWS,),
    ),
    "log_softmax": Case(lambda x: gj.log_softmax(x, 1), lambda x: jax.nn.log_softmax(x, 1), (ROWS,)),
    "logsumexp": Case(
        lambda x: gj.logsumexp(x, (1, 2), keepdims=True),
        lambda x: jax.nn.logsumexp(x, (1, 2), keepdims=True),
        (ROWS,),
    ),
    "logsumexp where": Case(
        lambda x: gj.logsumexp(x, where=WHERE), lambda x: jax.nn.logsumexp(x, -1, where=WHERE), (ROWS,)
    ),
    "token_statistics": Case(
        lambda x: tuple(gj.token_statistics(x, TOKENS, temperature=0.7, where=TOKENS > 1)),
        lambda x: _tokens(x / 0.7),
        (ROWS,),
    ),
    "cross_entropy of probabilities": Case(
        lambda x: gj.cross_entropy(
            x, PROBABILITIES.astype(x.dtype), reduction="none", temperature=0.7, label_smoothing=0.1
        ),
        lambda x: of_probabilities(x / 0.7, PROBABILITIES, smoothing=0.1),
        (ROWS,),
    ),
    "rmsnorm": Case(gj.rmsnorm, _rmsnorm, (ROWS, COLUMNS)),
    "rmsnorm bare": Case(gj.rmsnorm, _rmsnorm, (ROWS,)),
    "rmsnorm heads": Case(
        lambda x, w, b: gj.rmsnorm(x, w, b, weight_offset=1.0),
        lambda x, w, b: _rmsnorm(x, w, b, offset=1.0),
        (ROWS, HEADS, HEADS),
    ),
    "rmsnorm bias of heads": Case(
        lambda x, b: gj.rmsnorm(x, None, b), lambda x, b: _rmsnorm(x, 1, b), (ROWS, HEADS)
    ),
    "rmsnorm prenorm": Case(
        lambda x, w, r: gj.rmsnorm(x, w, residual=r, prenorm=True),
        lambda x, w, r: (_rmsnorm(x, w, residual=r), x + r),
        (ROWS, COLUMNS, ROWS),
    ),
    "rmsnorm residual": Case(
        lambda x, w, r: gj.rmsnorm(x, w, residual=r),
        lambda x, w, r: _rmsnorm(x, w, residual=r),
        (ROWS, COLUMNS, ROWS),
    ),
    "layernorm": Case(gj.layernorm, _layernorm, (ROWS, COLUMNS, COLUMNS)),
    "layernorm bare": Case(gj.layernorm, _layernorm, (ROWS,)),
    "layernorm prenorm": Case(
        lambda x, w, b, r: gj.layernorm(x, w, b, r, prenorm=True),
        lambda x, w, b, r: (_layernorm(x, w, b, r), x + r),
        (ROWS, COLUMNS, COLUMNS, ROWS),
    ),
    "l2norm": Case(gj.l2norm, lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6), (ROWS,)),
    "swiglu": Case(gj.swiglu, lambda g, u: jax.nn.silu(g) * u, (ROWS, ROWS)),
    "geglu": Case(gj.geglu, lambda g, u: jax.nn.gelu(g) * u, (ROWS, ROWS)),
    "geglu exact": Case(
        lambda g, u: gj.geglu(g, u, approximate=False), lambda g, u: jax.nn.gelu(g, False) * u, (ROWS, ROWS)
    ),
    "silu_and_mul": Case(gj.silu_and_mul, lambda x: jax.nn.silu(x[..., :6]) * x[..., 6:], ((2, 3, 12),)),
    "gelu_and_mul": Case(gj.gelu_and_mul, lambda x: jax.nn.gelu(x[..., :6]) * x[..., 6:], ((2, 3, 12),)),
    "rotary": Case(
        lambda q, k: gj.rotary(q, k, *_tables(q)),
        lambda q, k: (_rotated(q, *_tables(q)), _rotated(k, *_tables(k))),
        ((2, 5, 4, 8), (2, 5, 2, 8)),
    ),
    "qk_norm_rotary": Case(
        lambda q, k, v, w: gj.qk_norm_rotary(q, k, v, w, *_tables(q)),
        lambda q, k, v, w: (_rotated(_rmsnorm(q, v), *_tables(q)), _rotated(_rmsnorm(k, w), *_tables(k))),
        ((2, 5, 4, 8), (2, 5, 2, 8), (8,), (8,)),
    ),
}


def arrays(case, dtype="float32", seed=0):
    keys = split(key(seed), len(case.shapes))
    return [normal(k, shape, jnp.float32).astype(dtype) for k, shape in zip(keys, case.shapes, strict=True)]


def value_and_gradients(function, given, seed=7):
    """The results, and the gradients of all arguments for upstream gradients that are the same each time."""
    results, pull = jax.vjp(function, *given)
    leaves, tree = jax.tree.flatten(results)
    keys = split(key(seed), len(leaves))
    upstream = [
        normal(k, leaf.shape, jnp.float32).astype(leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)
    ]
    return leaves, list(pull(jax.tree.unflatten(tree, upstream)))


def cross_entropy(x, target, weight=None, reduction="mean", smoothing=0.0, ignore_index=-100):
    """The formula. A target that is ignored counts for nothing."""
    weight = jnp.ones(x.shape[-1], x.dtype) if weight is None else weight
    logs = jax.nn.log_softmax(x, -1)
    counted = target != ignore_index
    label = jnp.where(counted, target, 0)
    weights = jnp.where(counted, weight[label], 0)
    each = -(1 - smoothing) * weights * jnp.take_along_axis(logs, label[..., None], -1)[..., 0]
    each -= jnp.where(counted, smoothing / x.shape[-1] * (weight * logs).sum(-1), 0)
    return each if reduction == "none" else each.sum() / (weights.sum() if reduction == "mean" else 1)


def close(found, expected, dtype):
    """Asserts that arrays agree, as numbers of the dtype can."""
    for a, b in zip(found, expected, strict=True):
        a, b = a.astype("float32"), jnp.asarray(b).astype("float32")
        size = jnp.maximum(jnp.abs(jnp.where(jnp.isfinite(b), b, 0)).max(initial=0), 1)
        assert a.shape == b.shape
        assert jnp.allclose(a, b, rtol=0, atol=float(TOLERANCE[dtype] * size), equal_nan=True), (a, b)
