"""RMSNorm, LayerNorm and L2 normalization."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from .._functions.arguments import code_of
from .._functions.norms import CastingMode, rounds
from .._table import ALGORITHMS, Algorithm
from .._words import check_flags, number
from ._arguments import as_arrays, dtype_name
from ._gradients import apply


@overload
def rmsnorm(
    x: jax.Array,
    weight: jax.Array | None = ...,
    bias: jax.Array | None = ...,
    residual: jax.Array | None = ...,
    *,
    eps: float = ...,
    weight_offset: float = ...,
    prenorm: Literal[False] = ...,
    out_dtype: Any = ...,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> jax.Array: ...
@overload
def rmsnorm(
    x: jax.Array,
    weight: jax.Array | None = ...,
    bias: jax.Array | None = ...,
    residual: jax.Array | None = ...,
    *,
    eps: float = ...,
    weight_offset: float = ...,
    prenorm: Literal[True],
    out_dtype: Any = ...,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[jax.Array, jax.Array]: ...
def rmsnorm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    prenorm: bool = False,
    out_dtype: Any = None,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """RMSNorm over the last dimension.

    y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias with h = x + residual. Zhang and Sennrich,
    "Root Mean Square Layer Normalization", 2019. Everything is computed in float32 (float64 for float64), and
    h is not rounded. Gradients have the dtypes of their arrays.

    Args:
        x: (..., N), N >= 1, of float16, bfloat16 or float32, on the CPU also float64.
        weight: (N), of any of these dtypes, not only x's, or None. float64 if and only if x is. Or (H, N) for
            x of shape (..., H, N): that of each head.
        bias: As weight.
        residual: x's shape, any of these dtypes, or None.
        eps: Added to the mean of squares.
        weight_offset: Added to each weight, as in Gemma's norms. Refused without a weight.
        prenorm: Return (y, h).
        out_dtype: The dtype of y. By default that of x.
        casting_mode: As in gander.rmsnorm.
        algorithm: As in gander.rmsnorm.
        batch_invariant: As in gander.softmax.

    Returns:
        y, with x's shape. With prenorm (y, h): h has the dtype of residual, and is x without one.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        NotImplementedError: Columns, or a weight, that are sharded over a mesh.

    Examples:
        >>> gander.jax.rmsnorm(jnp.array([[3.0, 4.0]]), jnp.ones(2), eps=0.0)
        Array([[0.84852815, 1.1313709 ]], dtype=float32)
    """
    options = {
        "algorithm": code_of("algorithm", algorithm, ALGORITHMS),
        "weight_offset": number("weight_offset", weight_offset),
        "round_normalized": rounds(casting_mode),
    }
    return _norm("rmsnorm", x, weight, bias, residual, eps, prenorm, out_dtype, batch_invariant, options)


@overload
def layernorm(
    x: jax.Array,
    weight: jax.Array | None = ...,
    bias: jax.Array | None = ...,
    residual: jax.Array | None = ...,
    *,
    eps: float = ...,
    prenorm: Literal[False] = ...,
    out_dtype: Any = ...,
    batch_invariant: bool = ...,
) -> jax.Array: ...
@overload
def layernorm(
    x: jax.Array,
    weight: jax.Array | None = ...,
    bias: jax.Array | None = ...,
    residual: jax.Array | None = ...,
    *,
    eps: float = ...,
    prenorm: Literal[True],
    out_dtype: Any = ...,
    batch_invariant: bool = ...,
) -> tuple[jax.Array, jax.Array]: ...
def layernorm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    prenorm: bool = False,
    out_dtype: Any = None,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """LayerNorm over the last dimension.

    y = (h - mean h) / sqrt(var h + eps) * weight + bias with h = x + residual. Ba, Kiros and Hinton, "Layer
    Normalization", 2016. var is the mean of the squared distances from the mean, which is subtracted first. h
    is rounded to the dtype that it is returned in.

    Args:
        x: As in rmsnorm.
        weight: As in rmsnorm.
        bias: As in rmsnorm.
        residual: As in rmsnorm.
        eps: Added to the variance.
        prenorm: Return (y, h).
        out_dtype: As in rmsnorm.
        batch_invariant: As in gander.softmax.

    Returns:
        y, or (y, h). h has x's dtype, or float32 if residual has another one.

    Raises:
        TypeError, ValueError, NotImplementedError: As rmsnorm.

    Examples:
        >>> gander.jax.layernorm(jnp.array([[1.0, 3.0]]), eps=0.0)
        Array([[-1.,  1.]], dtype=float32)
    """
    return _norm("layernorm", x, weight, bias, residual, eps, prenorm, out_dtype, batch_invariant, {})


def _norm(
    name: str,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    eps: Any,
    prenorm: bool,
    out_dtype: Any,
    batch_invariant: bool,
    options: dict[str, Any],
) -> Any:
    x, weight, bias, residual = as_arrays(x=x, weight=weight, bias=bias, residual=residual)
    check_flags(prenorm=prenorm, batch_invariant=batch_invariant)
    if weight is None and bias is not None and bias.ndim == 2 and not options.get("weight_offset"):
        weight = jnp.ones_like(bias)  # a bias for each head needs a weight for each
    adds = prenorm and residual is not None
    # h in the dtype that x + residual has. Only RMSNorm's rows are not rounded to it.
    dtype = None
    if residual is not None and (name == "layernorm" or not prenorm):
        dtype = x.dtype.name if residual.dtype == x.dtype else "float32"
    given = options | {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "eps": number("eps", eps),
        "batch_invariant": batch_invariant,
        "out_dtype": dtype_name("out_dtype", out_dtype),
        "residual_dtype": dtype,
        "needs_residual_out": adds,
    }
    results = apply(name, given)
    return (results["y"], results.get("residual_out", x)) if prenorm else results["y"]


def l2norm(x: jax.Array, *, eps: float = 1e-6, batch_invariant: bool = False) -> jax.Array:
    """L2 normalization over the last dimension: rows of length 1.

    y = x / sqrt(sum(x^2) + eps), computed in float32 (float64 for float64) and rounded once.

    Args:
        x: As in rmsnorm.
        eps: Added to the sum of squares. With 0 a row of zeros becomes NaN.
        batch_invariant: As in gander.softmax.

    Returns:
        y, with the shape and dtype of x.

    Raises:
        TypeError, ValueError, NotImplementedError: As rmsnorm.

    Examples:
        >>> gander.jax.l2norm(jnp.array([[3.0, 4.0]])).round(3)
        Array([[0.6, 0.8]], dtype=float32)
    """
    (x,) = as_arrays(x=x)
    check_flags(batch_invariant=batch_invariant)
    return apply("l2norm", {"x": x, "eps": number("eps", eps), "batch_invariant": batch_invariant})["y"]
