"""What `gander_bench jax` compares: programs of gander.jax, and formulas that XLA fuses."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import gander.jax
import jax
import jax.numpy as jnp

from .cases import EPS

# ---- The formulas, in float32 as models have them, with results of x's dtype ----


def _wide(*arrays):
    return [array.astype(jnp.float32) for array in arrays]


def _softmax(x):
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def _rmsnorm(x, weight):
    h, w = _wide(x, weight)
    return (h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + EPS) * w).astype(x.dtype)


def _layernorm(x, weight, bias):
    h, w, b = _wide(x, weight, bias)
    d = h - h.mean(-1, keepdims=True)
    return (d * jax.lax.rsqrt((d * d).mean(-1, keepdims=True) + EPS) * w + b).astype(x.dtype)


def _cross_entropy(x, target):
    """As optax has it."""
    h = x.astype(jnp.float32)
    picked = jnp.take_along_axis(h, target[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(h, -1) - picked).mean()


# ---- Programs ----


def _with_backward(function):
    """The result, and the gradients of all arguments for an upstream gradient, which comes first."""

    def program(dy, *given):
        y, pull = jax.vjp(function, *given)
        return y, *pull(dy)

    return program


class Program(NamedTuple):
    """A function of each contestant's, and what is made of it. Inputs are rows (M, N), columns (N) or targets
    (M)."""

    functions: dict[str, Callable]  # by contestant
    make: Callable[[Callable], Callable]
    inputs: tuple[str, ...]

    def of(self, contestant: str) -> Callable:
        return jax.jit(self.make(self.functions[contestant]))


CONTESTANTS = ("gander", "xla")
_FUNCTIONS = {
    "softmax": ((gander.jax.softmax, _softmax), ("rows",)),
    "rmsnorm": ((lambda x, w: gander.jax.rmsnorm(x, w, eps=EPS), _rmsnorm), ("rows", "columns")),
    "layernorm": (
        (lambda x, w, b: gander.jax.layernorm(x, w, b, eps=EPS), _layernorm),
        ("rows", "columns", "columns"),
    ),
}
PROGRAMS = {
    f"{name}_{way}": Program(dict(zip(CONTESTANTS, both, strict=True)), make, upstream + inputs)
    for name, (both, inputs) in _FUNCTIONS.items()
    for way, make, upstream in (
        ("forward", lambda function: function, ()),
        ("forward_backward", _with_backward, ("rows",)),
    )
} | {
    "cross_entropy_mean_gradient": Program(
        {"gander": gander.jax.cross_entropy, "xla": _cross_entropy},
        jax.value_and_grad,
        ("rows", "targets"),
    )
}


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    """Numbers of float32 that are rounded: those made in bfloat16 have 8 bits of randomness."""
    return jax.random.normal(key, shape).astype(dtype)


def inputs_of(op: str, dtype: str, m: int, n: int) -> list[jax.Array]:
    def made(kind, key):
        if kind == "targets":
            return jax.random.randint(key, (m,), 0, n)
        return _normal(key, (m, n) if kind == "rows" else (n,), dtype)

    kinds = PROGRAMS[op].inputs
    return [made(*pair) for pair in zip(kinds, jax.random.split(jax.random.key(0), len(kinds)), strict=True)]


@jax.jit
def _off(got, want):
    def relative(a, b):
        a, b = _wide(a, b)
        return jnp.sqrt(((a - b) ** 2).sum() / (b**2).sum())

    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return jnp.stack([relative(*pair) for pair in leaves]).max()  # of a NaN it is NaN


def off(got, want) -> float:
    """How far results are from others, relative to their size: of the result that is further off."""
    return float(_off(got, want))
