"""Checks of arguments, and which dimensions of an array are rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._words import kind, shown


def as_arrays(**given: Any) -> list[Any]:
    """Arguments as arrays of JAX, or None."""
    return [value if value is None else _as_array(name, value) for name, value in given.items()]


def _as_array(name: str, value: Any) -> jax.Array:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(
            f"{name} is {kind(value)}, expected an array of JAX or NumPy; pass jnp.asarray({name})"
        )
    return jnp.asarray(value)


def as_mask(where: Any) -> Any:
    """where as an array of bool, or None."""
    (mask,) = as_arrays(where=where)
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"where has dtype {mask.dtype}, expected bool; pass where != 0")
    return mask


def dtype_name(name: str, value: Any) -> str | None:
    """The name of a dtype, or None."""
    if value is None:
        return None
    try:
        return jnp.dtype(value).name
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}, expected a dtype or None") from None


def _dimensions(axis: Any, rank: int) -> list[int]:
    """The dimensions that axis names, in order. None names all."""
    if axis is None:
        return [*range(rank)]
    dimensions = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    for dimension in dimensions:
        if isinstance(dimension, bool) or not isinstance(dimension, Integral):
            raise TypeError(f"axis is {shown(axis)}, expected an int, or a tuple of ints")
        if not -rank <= dimension < rank:
            raise ValueError(f"axis is {shown(axis)}, expected {-rank} to {rank - 1} for x of rank {rank}")
    found = sorted({int(dimension) % rank for dimension in dimensions})
    if not found or len(found) < len(dimensions):
        raise ValueError(f"axis is {shown(axis)}, expected one dimension or more, each once")
    return found


def to_rows(x: Any, axis: Any, where: Any = None) -> tuple[Any, Any, list[int], Callable[[Any], Any]]:
    """x and where with the dimensions of axis as the last one, these, and what moves a result back."""
    dimensions = _dimensions(axis, x.ndim)
    if dimensions == [x.ndim - 1]:
        return x, where, dimensions, lambda y: y
    ends, taken = range(-len(dimensions), 0), tuple(x.shape[dimension] for dimension in dimensions)

    def moved(array: Any) -> Any:
        array = jnp.moveaxis(array, dimensions, ends)
        return array.reshape(*array.shape[: x.ndim - len(dimensions)], math.prod(taken))

    if where is not None:
        if where.ndim > x.ndim:
            raise ValueError(
                f"where has shape {where.shape}, expected one that broadcasts to {x.shape}, as x"
            )
        shape = [1] * (x.ndim - where.ndim) + list(where.shape)
        for dimension in dimensions:
            shape[dimension] = x.shape[dimension]
        where = moved(jnp.broadcast_to(where, shape))

    def back(y: Any) -> Any:
        return jnp.moveaxis(y.reshape(*y.shape[:-1], *taken), ends, dimensions)

    return moved(x), where, dimensions, back
