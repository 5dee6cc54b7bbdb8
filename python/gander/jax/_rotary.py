"""Rotary position embeddings of queries and keys, also of their heads after RMSNorm."""

from __future__ import annotations

from typing import Any

import jax

from .._functions.arguments import code_of
from .._functions.norms import CastingMode, rounds
from .._functions.rotary import QK_MODES, QKCastingMode
from .._words import check_flags, number
from ._arguments import as_arrays
from ._gradients import apply


def rotary(
    q: jax.Array,
    k: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    interleaved: bool = False,
    casting_mode: CastingMode | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Rotary position embeddings of queries and keys.

    Each pair (a, b) of elements of a head becomes (a cos - b sin, b cos + a sin): Su et al., "RoFormer:
    Enhanced Transformer with Rotary Position Embedding", 2021. It is computed in float32 (float64 for
    float64), and rounded once. Backward keeps cos and sin alone. The pairs are those of the first R <= D
    columns: i and i + R / 2. The other columns are copied.

    Args:
        q: (..., S, H, D): S tokens of H heads, as in jax.nn.dot_product_attention, and unlike gander.rotary.
            float16, bfloat16 or float32, on the CPU also float64.
        k: The same with any number of heads, or None.
        cos: (..., S, R) with the leading dimensions of q or 1s in their place: a number for each element. Or
            (S, R / 2): a number for each pair. float32, float16 or bfloat16, float64 beside float64. It has
            no gradient.
        sin: Of the shape and dtype of cos.
        interleaved: The pairs are elements 2 i and 2 i + 1.
        casting_mode: As in gander.rotary.

    Returns:
        q and k (None without one), rotated.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or casting_mode.
        NotImplementedError: A gradient of cos or sin, or tokens or columns that are sharded over a mesh.

    Examples:
        >>> q = jnp.array([1.0, 2.0]).reshape(1, 1, 1, 2)
        >>> gander.jax.rotary(q, None, jnp.array([[0.0]]), jnp.array([[1.0]]))[0].ravel()
        Array([-2.,  1.], dtype=float32)
    """
    return _rotated("rotary", q, k, cos, sin, interleaved, {"round_products": rounds(casting_mode)})


def qk_norm_rotary(
    q: jax.Array,
    k: jax.Array | None,
    q_weight: jax.Array | None,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    casting_mode: QKCastingMode | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """RMSNorm of each head of queries and keys, and rotary of the results, in one pass.

    Args:
        q: (..., S, H, D) with D <= 512, else as in rotary.
        k: The same with any number of heads, or None.
        q_weight: (D,) of float32, float16 or bfloat16, float64 beside float64; or None for ones.
        k_weight: Likewise.
        cos: As in rotary.
        sin: As in rotary.
        eps: Added to the mean of squares.
        weight_offset: Added to both weights, which then have to be there.
        interleaved: As in rotary.
        casting_mode: As in gander.qk_norm_rotary.

    Returns:
        q and k (None without one).

    Raises:
        TypeError, ValueError, NotImplementedError: As rotary.

    Examples:
        >>> q, one = jnp.array([3.0, 4.0]).reshape(1, 1, 1, 2), jnp.ones((1, 1))
        >>> gander.jax.qk_norm_rotary(q, None, None, None, one, 0 * one, eps=0.0)[0].ravel()
        Array([0.84852815, 1.1313709 ], dtype=float32)
    """
    mode = None if casting_mode is None else code_of("casting_mode", casting_mode, QK_MODES, "None or ")
    q_weight, k_weight = as_arrays(q_weight=q_weight, k_weight=k_weight)
    options = {
        "q_weight": q_weight,
        "k_weight": k_weight,
        "eps": number("eps", eps),
        "weight_offset": number("weight_offset", weight_offset),
        "round_normalized": mode == 0,
        "round_products": mode is not None,
    }
    return _rotated("qk_norm_rotary", q, k, cos, sin, interleaved, options)


def _rotated(
    name: str, q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    q, k, cos, sin = as_arrays(q=q, k=k, cos=cos, sin=sin)
    check_flags(interleaved=interleaved)
    given = {"q": q, "k": k, "cos": cos, "sin": sin, "interleaved": interleaved, "needs_k_out": k is not None}
    results = apply(name, given | options | {"per_element": cos.ndim != 2})
    return results["q_out"], results.get("k_out")
