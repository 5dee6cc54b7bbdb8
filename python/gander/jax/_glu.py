"""Gated linear units: swiglu and geglu, and the same of one array with both halves."""

from __future__ import annotations

import jax

from .._functions.norms import CastingMode, rounds
from .._words import check_flags
from ._arguments import as_arrays
from ._gradients import apply


def swiglu(gate: jax.Array, up: jax.Array, *, casting_mode: CastingMode | None = None) -> jax.Array:
    """SwiGLU, jax.nn.silu(gate) * up.

    y = gate * sigmoid(gate) * up for each element: Shazeer, "GLU Variants Improve Transformer", 2020. It is
    computed in float32 (float64 for float64), and rounded once. Backward keeps gate and up alone.

    Args:
        gate: (..., N), N >= 1, of float16, bfloat16 or float32, on the CPU also float64.
        up: What the activation multiplies, of gate's shape and dtype.
        casting_mode: As in gander.swiglu.

    Returns:
        y, with the shape and dtype of gate.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or casting_mode.
        NotImplementedError: Columns that are sharded over a mesh.

    Examples:
        >>> gander.jax.swiglu(jnp.array([0.0, 1.0]), jnp.array([3.0, 3.0])).round(3)
        Array([0.   , 2.193], dtype=float32)
    """
    gate, up = as_arrays(gate=gate, up=up)
    return apply("glu", {"gate": gate, "up": up, "round_activation": rounds(casting_mode)})["y"]


def geglu(
    gate: jax.Array, up: jax.Array, approximate: bool = True, *, casting_mode: CastingMode | None = None
) -> jax.Array:
    """GEGLU, jax.nn.gelu(gate, approximate) * up.

    y = gate * P(gate) * up for each element, where P is the normal distribution, or approximately (1 +
    tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) / 2: Hendrycks and Gimpel, "Gaussian Error Linear Units",
    2016. It is computed and rounded as in swiglu.

    Args:
        gate: As in swiglu.
        up: As in swiglu.
        approximate: By the hyperbolic tangent, as in jax.nn.gelu, whose default is True too. gander.geglu's
            default is the normal distribution.
        casting_mode: As in swiglu, of gelu(gate).

    Returns:
        y, with the shape and dtype of gate.

    Raises:
        TypeError, ValueError, NotImplementedError: As swiglu.

    Examples:
        >>> gander.jax.geglu(jnp.array([0.0, 1.0]), jnp.array([3.0, 3.0]), approximate=False).round(2)
        Array([0.  , 2.52], dtype=float32)
    """
    gate, up = as_arrays(gate=gate, up=up)
    check_flags(approximate=approximate)
    given = {"gate": gate, "up": up, "gelu": True, "tanh": approximate}
    return apply("glu", given | {"round_activation": rounds(casting_mode)})["y"]


def silu_and_mul(x: jax.Array, *, casting_mode: CastingMode | None = None) -> jax.Array:
    """swiglu of the two halves of each row: silu(x[..., :N / 2]) * x[..., N / 2:].

    Args:
        x: (..., N), N even, else as swiglu's gate. The halves are not copied.
        casting_mode: As in swiglu.

    Returns:
        y, (..., N / 2), of x's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: As swiglu.

    Examples:
        >>> gander.jax.silu_and_mul(jnp.array([0.0, 1.0, 3.0, 3.0])).round(3)
        Array([0.   , 2.193], dtype=float32)
    """
    (x,) = as_arrays(x=x)
    return apply("packed_glu", {"x": x, "round_activation": rounds(casting_mode)})["y"]


def gelu_and_mul(
    x: jax.Array, approximate: bool = True, *, casting_mode: CastingMode | None = None
) -> jax.Array:
    """geglu of the two halves of each row: gelu(x[..., :N / 2]) * x[..., N / 2:].

    Args:
        x: As in silu_and_mul.
        approximate: As in geglu.
        casting_mode: As in geglu.

    Returns:
        y, (..., N / 2), of x's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: As swiglu.

    Examples:
        >>> gander.jax.gelu_and_mul(jnp.array([0.0, 1.0, 3.0, 3.0]), approximate=False).round(2)
        Array([0.  , 2.52], dtype=float32)
    """
    (x,) = as_arrays(x=x)
    check_flags(approximate=approximate)
    given = {"x": x, "gelu": True, "tanh": approximate}
    return apply("packed_glu", given | {"round_activation": rounds(casting_mode)})["y"]
