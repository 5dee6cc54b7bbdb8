"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._functions.arguments import code_of
from .._table import ALGORITHMS, Algorithm
from .._words import check_flags, number
from ._arguments import as_arrays, as_mask, to_rows
from ._gradients import apply


def softmax(
    x: jax.Array,
    axis: int | Sequence[int] = -1,
    where: jax.Array | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> jax.Array:
    """Softmax over one or more dimensions, as jax.nn.softmax.

    y = exp(h - max h) / sum exp(h - max h) with h = x * scale: Milakov and Gimelshein, "Online normalizer
    calculation for softmax", 2018. Sums are computed in float32 (float64 for float64). Elements that are
    masked count for nothing, NaN included, and their y and their gradient are 0. So are those of a row that
    is masked whole.

    Args:
        x: (..., N), N >= 1, of float16, bfloat16 or float32, on the CPU also float64.
        axis: The dimension, or several. Others than the last are moved to the end.
        where: bool, broadcasts to x's shape: the elements that take part.
        scale: A number that x is multiplied by first.
        causal: Also masks the columns after i in row i of each matrix (Q, N), the last two dimensions of x.
        algorithm: As in gander.softmax, without where, scale and causal.
        batch_invariant: As in gander.softmax.

    Returns:
        y, with the shape and dtype of x.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        NotImplementedError: Columns that are sharded over a mesh.

    Examples:
        >>> gander.jax.softmax(jnp.array([[0.0, 0.0], [1.0, -jnp.inf]]))
        Array([[0.5, 0.5],
               [1. , 0. ]], dtype=float32)
    """
    return _softmax(x, axis, where, scale, causal, batch_invariant, algorithm)


def log_softmax(
    x: jax.Array,
    axis: int | Sequence[int] = -1,
    where: jax.Array | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    batch_invariant: bool = False,
) -> jax.Array:
    """The logarithm of softmax over one or more dimensions, as jax.nn.log_softmax.

    y = h - max h - log(sum exp(h - max h)) with h = x * scale. y of a masked element is -inf, and its
    gradient is 0.

    Args:
        x: As in softmax.
        axis: As in softmax.
        where: As in softmax.
        scale: As in softmax.
        causal: As in softmax.
        batch_invariant: As in softmax.

    Returns:
        y, with the shape and dtype of x.

    Raises:
        TypeError, ValueError, NotImplementedError: As softmax.

    Examples:
        >>> gander.jax.log_softmax(jnp.zeros((1, 2)))
        Array([[-0.6931472, -0.6931472]], dtype=float32)
    """
    return _softmax(x, axis, where, scale, causal, batch_invariant, log=True)


def _softmax(
    x: Any,
    axis: Any,
    where: Any,
    scale: Any,
    causal: bool,
    batch_invariant: bool,
    algorithm: Any = "auto",
    log: bool = False,
) -> Any:
    (x,), mask = as_arrays(x=x), as_mask(where)
    code, scale = code_of("algorithm", algorithm, ALGORITHMS), number("scale", scale)
    check_flags(causal=causal, batch_invariant=batch_invariant)
    rows, mask, dimensions, back = to_rows(x, axis, mask)
    if causal and dimensions != [x.ndim - 1]:
        raise ValueError(
            f"causal is set with axis {axis}, expected the last one, -1: it masks columns of rows"
        )
    given = {"x": rows, "batch_invariant": batch_invariant}
    if not log and mask is None and scale == 1 and not causal:
        return back(apply("softmax", given | {"algorithm": code})["y"])
    if code:
        raise NotImplementedError(
            f"algorithm is {algorithm!r} with where, scale or causal, expected 'auto', the only one there; "
            "leave it out"
        )
    given |= {"mask": mask, "scale": scale, "log": log, "causal": causal, "masked_zero": True}
    return back(apply("masked_softmax", given)["y"])


def logsumexp(
    x: jax.Array,
    axis: int | Sequence[int] | None = -1,
    where: jax.Array | None = None,
    *,
    keepdims: bool = False,
    batch_invariant: bool = False,
) -> jax.Array:
    """log(sum exp(x)) over one or more dimensions. The maximum is subtracted first.

    Gradient: dx = dlse * exp(x - lse).

    Args:
        x: As in softmax.
        axis: The dimension, or several. None: all, which is the default of jax.nn.logsumexp.
        where: As in softmax. It is applied by jax.numpy.where, which makes a copy of x.
        keepdims: Keep these dimensions, of size 1.
        batch_invariant: As in softmax.

    Returns:
        x.shape without axis, float32 also for 16-bit x (float64 for float64). A row that is all -inf, or
        masked whole, gives -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: As softmax.

    Examples:
        >>> gander.jax.logsumexp(jnp.zeros((1, 2)))
        Array([0.6931472], dtype=float32)
    """
    (x,), mask = as_arrays(x=x), as_mask(where)
    check_flags(keepdims=keepdims, batch_invariant=batch_invariant)
    if mask is not None:
        x = jnp.where(mask, x, jnp.asarray(-jnp.inf, x.dtype))
    rows, _, dimensions, _ = to_rows(x, axis)
    lse = apply("logsumexp", {"x": rows, "batch_invariant": batch_invariant})["lse"]
    return jnp.expand_dims(lse, dimensions) if keepdims else lse
