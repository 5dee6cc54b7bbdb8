"""Rotary position embeddings: of queries and keys as models have them, and as flash-attention has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .._backend import BACKENDS, backend_of
from .._words import check_flags, integer, number
from .arguments import FAILURES, A, Array, code_of, overridden
from .norms import CastingMode, rounds


def rotary(
    q: A,
    k: A | None,
    cos: Array,
    sin: Array,
    interleaved: bool = False,
    inplace: bool = False,
    casting_mode: CastingMode | None = None,
) -> tuple[A, A | None]:
    """Rotary position embeddings of queries and keys, differentiable in both, in one launch.

    Each pair (a, b) of elements of a head becomes (a cos - b sin, b cos + a sin): Su et al., "RoFormer:
    Enhanced Transformer with Rotary Position Embedding", 2021. It is computed in float32 (float64 for
    float64), and rounded once. Backward keeps cos and sin alone. The pairs are those of the first R <= D
    columns: i and i + R / 2. The other columns are copied.

    Args:
        q: (..., H, S, D): heads of S tokens, of float16, bfloat16 or float32 (on the CPU also float64). A
            transposed view, as models have it, is not copied if its last stride is 1. A torch tensor on the
            CPU or a CUDA device, or an object with `__dlpack__`, for which results are arrays of the same
            library, without a gradient.
        k: The same with any number of heads, or None.
        cos: (..., S, R) with the leading dimensions of q or 1s in their place, as transformers has it: a
            number for each element. Or (S, R / 2): a number for each pair. float32, float16 or bfloat16,
            float64 beside float64. Rows after the first S are not used.
        sin: Of the shape and dtype of cos.
        interleaved: The pairs are elements 2 i and 2 i + 1.
        inplace: Writes the results over q and k, and returns these. Not where they need a gradient.
        casting_mode: "llama" rounds both products to q's dtype before they are added, as transformers does:
            the results have its bits if cos and sin have q's dtype. Gradients are rounded likewise.

    Returns:
        q and k (None without one), rotated. In memory a token's heads lie side by side, as in a transposed
        view of (..., S, H, D).

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, casting_mode, or with inplace tensors whose elements share memory.
        NotImplementedError: A nested or sparse tensor, inplace with a gradient, or a gradient of cos or sin.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> q = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
        >>> gander.rotary(q, None, torch.tensor([[0.0]]), torch.tensor([[1.0]]))[0].flatten()
        tensor([-2.,  1.])
    """
    if type(interleaved) is not bool or type(inplace) is not bool:
        check_flags(interleaved=interleaved, inplace=inplace)
    ops = BACKENDS.get(type(q)) or backend_of(q)
    if ops is None:
        return overridden(rotary, locals())
    options = dict(interleaved=interleaved, round_products=rounds(casting_mode))
    call = ops.rotary_ if inplace else ops.rotary
    try:
        return _rotated(ops, call, (q, k), (), (cos, sin), inplace, options)
    except FAILURES as error:
        raise ops.explained(error, q=q, k=k, cos=cos, sin=sin) from None


QKCastingMode = Literal["llama", "gemma"]


def qk_norm_rotary(
    q: A,
    k: A | None,
    q_weight: Array | None,
    k_weight: Array | None,
    cos: Array,
    sin: Array,
    eps: float,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    inplace: bool = False,
    casting_mode: QKCastingMode | None = None,
) -> tuple[A, A | None]:
    """RMSNorm of each head of queries and keys, and rotary of the results, in one pass, differentiable.

    rotary of x * rstd * (weight + weight_offset) with rstd = 1 / sqrt(mean(x^2) + eps) for each head x (Zhang
    and Sennrich, "Root Mean Square Layer Normalization", 2019). It is computed in float32 (float64 for
    float64), and rounded once. Backward keeps q, k and the weights, and computes rstd again.

    Args:
        q: (..., H, S, D) with D <= 512, else as in rotary.
        k: The same with any number of heads, or None.
        q_weight: (D,) of float32, float16 or bfloat16, float64 beside float64; or None for ones.
        k_weight: Likewise.
        cos: As in rotary.
        sin: As in rotary.
        eps: Added to the mean of squares.
        weight_offset: Added to both weights, which then have to be there. 1 for Gemma's norms.
        interleaved: As in rotary.
        inplace: As in rotary.
        casting_mode: Rounds to q's dtype as transformers does: "llama" the normalized head, then its product
            with the weight, then the products of rotary; "gemma" the normalized head times the weight, and
            the products of rotary. So gradients are rounded.

    Returns:
        q and k (None without one), as rotary returns them.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, an option, or with inplace tensors whose elements share memory.
        NotImplementedError: A nested or sparse tensor, inplace with a gradient, or a gradient of cos or sin.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> q, one = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.ones(1, 1)
        >>> gander.qk_norm_rotary(q, None, None, None, one, 0 * one, eps=0.0)[0].flatten()
        tensor([0.8485, 1.1314])
    """
    if type(interleaved) is not bool or type(inplace) is not bool:
        check_flags(interleaved=interleaved, inplace=inplace)
    ops = BACKENDS.get(type(q)) or backend_of(q)
    if ops is None:
        return overridden(qk_norm_rotary, locals())
    mode = None if casting_mode is None else code_of("casting_mode", casting_mode, QK_MODES, "None or ")
    options = dict(
        eps=number("eps", eps),
        weight_offset=number("weight_offset", weight_offset),
        interleaved=interleaved,
        round_normalized=mode == 0,
        round_products=mode is not None,
    )
    call = ops.qk_norm_rotary_ if inplace else ops.qk_norm_rotary
    try:
        return _rotated(ops, call, (q, k), (q_weight, k_weight), (cos, sin), inplace, options)
    except FAILURES as error:
        raise ops.explained(error, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin) from None


QK_MODES: tuple[QKCastingMode, ...] = ("llama", "gemma")


def apply_rotary_emb(
    x: A,
    cos: Array,
    sin: Array,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Array | None = None,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
) -> A:
    """rotary of one tensor, with the name and the arguments that flash-attention and QuACK have.

    Args:
        x: (B, S, H, D), or with cu_seqlens (tokens, H, D), else as rotary's q.
        cos: (T, R / 2): a number for each pair, for T positions. Else as in rotary.
        sin: Of the shape and dtype of cos.
        interleaved: As in rotary.
        inplace: As in rotary.
        seqlen_offsets: Added to the positions: an integer, or for each sequence one, (B,) of int32 or int64.
        cu_seqlens: The first token of each sequence, and the end of the last: (sequences + 1,) of int32 or
            int64. Tokens before and after them are copied.
        max_seqlen: Not used. Other libraries need it for their launch.

    Returns:
        x, rotated: contiguous, or with inplace x itself. A token whose position is not in the tables becomes
        NaN: what seqlen_offsets and cu_seqlens hold is not known before the kernel reads it.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or with inplace a tensor whose elements share memory.
        NotImplementedError: A nested or sparse tensor, inplace with a gradient, or a gradient of cos or sin.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> table = torch.tensor([[1.0], [0.0]])
        >>> gander.apply_rotary_emb(torch.ones(1, 2, 1, 2), table, 1 - table).flatten()
        tensor([ 1.,  1., -1.,  1.])
    """
    if type(interleaved) is not bool or type(inplace) is not bool:
        check_flags(interleaved=interleaved, inplace=inplace)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(apply_rotary_emb, locals())
    given: dict[str, Any] = dict(cu_seqlens=cu_seqlens, interleaved=interleaved)
    if hasattr(type(seqlen_offsets), "__dlpack__"):
        given["offsets"] = seqlen_offsets
    elif seqlen_offsets is not None:
        given["offset"] = integer("seqlen_offsets", seqlen_offsets)
    names = {"q": "x", "offsets": "seqlen_offsets", "offset": "seqlen_offsets"}
    tensors = dict(x=x, cos=cos, sin=sin, seqlen_offsets=given.get("offsets"), cu_seqlens=cu_seqlens)
    try:
        if inplace:
            ops.rotary_(x, None, cos, sin, **given)
            return x
        return ops.rotary(x, None, cos, sin, **given)[0]
    except FAILURES as error:
        raise ops.explained(error, names, **tensors) from None


def _rotated(
    ops: Any,
    call: Callable[..., Any],
    heads: tuple[Any, Any],
    weights: tuple[Any, ...],
    tables: tuple[Any, Any],
    inplace: bool,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """q and k by an operator, for which tokens come before heads."""
    _check_heads(*heads)
    q, k = (x if x is None else ops.turned(x) for x in heads)
    options["per_element"] = len(getattr(tables[0], "shape", ())) != 2
    if inplace:
        call(q, k, *weights, *tables, **options)
        return heads
    results = call(q, k, *weights, *tables, **options, needs_k_out=k is not None)
    return ops.turned(results[0]), None if k is None else ops.turned(results[1])


def _check_heads(q: Any, k: Any) -> None:
    """Refuses shapes that the operator, which has tokens before heads, would name in another order."""
    shape = tuple(q.shape)
    if len(shape) < 3:
        raise ValueError(
            f"q has shape {shape}, expected (..., heads, tokens, columns) of rank 3 or more; reshape it"
        )
    if k is None:
        return
    found = tuple(k.shape)
    if len(found) != len(shape) or found[:-3] != shape[:-3] or found[-2:] != shape[-2:]:
        expected = ", ".join(map(str, (*shape[:-3], "any", *shape[-2:])))
        raise ValueError(f"k has shape {found}, expected ({expected}), with any number of heads, as q")
