"""RMSNorm."""

from __future__ import annotations

from typing import Any, Literal, overload

from .._backend import BACKENDS, Backend, backend_of
from .._table import ALGORITHMS, Algorithm
from .._words import check_flags, number
from .arguments import AUTO, FAILURES, A, Array, check_out, code_of, overridden
from .norms import (
    CastingMode,
    epsilon,
    explained,
    out_of_statistic,
    out_of_sum,
    plan_sum,
    refuse_shape,
    rounds,
    weight_for,
)


@overload
def rmsnorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float | None = ...,
    prenorm: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> A: ...
@overload
def rmsnorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float | None = ...,
    *,
    prenorm: Literal[True],
    weight_offset: float = ...,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
def rmsnorm(
    x: A,
    weight: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float | None = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    out: A | None = None,
) -> A | tuple[A, A]:
    """RMSNorm over the last dimension, differentiable.

    y = h / sqrt(mean(h^2) + eps) * weight + bias with h = x + residual. Zhang and Sennrich, "Root Mean Square
    Layer Normalization", 2019. Everything is computed in float32 (float64 for float64), and h is not rounded.
    Gradients have the dtypes of their tensors. With a residual, backward reads h as residual_out has it, or
    without prenorm in the wider dtype of x and residual, unless residual_dtype is given. The gradients of
    weight and bias are sums over rows, so their bits depend on all of them.

    Args:
        x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
            tensor on the CPU or a CUDA device, or an object with `__dlpack__`, for which the result is an
            array of the same library, without a gradient.
        weight: (N), of any of these dtypes, not only x's, or None. float64 if and only if x is. Or (H, N) for
            x of shape (..., H, N): that of each head.
        bias: As weight.
        residual: x's shape, any of these dtypes, or None.
        out_dtype: The dtype of the result, or its name ("float16"). By default that of x.
        residual_dtype: The dtype of residual_out. By default that of residual, or of x without one.
            (layernorm's is that of x + residual in torch.)
        eps: Added to the mean of squares. None is torch's default: the machine epsilon of float32 (of float64
            for float64).
        prenorm: Return (y, residual_out).
        weight_offset: Added to each weight, as in Gemma's norms. Refused without a weight.
        casting_mode: "llama" rounds the normalized row to x's dtype before the weight is applied, as Llama's
            norm in transformers does. The gradient of weight is that of the rounded row. None rounds once, in
            the end.
        algorithm: As in softmax, with gander.algorithms("rmsnorm") and ("rmsnorm_bwd"). With a bias, a
            residual, a weight for each head, weight_offset, casting_mode, out or another residual_dtype than
            x's there is only "auto".
        batch_invariant: As in softmax.
        out: A tensor of x's shape, to which y is written, and which is returned. It decides y's dtype, and
            may be x. Refused if a gradient is wanted. An array of NumPy or CuPy has to be writable.

    Returns:
        y, a contiguous tensor of x's shape. With prenorm (y, residual_out): residual_out is h in
        residual_dtype, or x itself without a residual, if it has that dtype.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        NotImplementedError: A nested or sparse tensor, or an algorithm that does not support x.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    if eps is not None and type(eps) is not float:
        eps = number("eps", eps, "None or ")
    if type(weight_offset) is not float:
        weight_offset = number("weight_offset", weight_offset)
    code = 0 if algorithm is AUTO else code_of("algorithm", algorithm, ALGORITHMS)
    if type(batch_invariant) is not bool:
        check_flags(batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(rmsnorm, locals())
    if isinstance(weight, (list, tuple, int)):  # an error that is raised later, a graph cannot explain
        refuse_shape("rmsnorm", weight)
    try:
        if eps is None:
            eps = epsilon(x)
        direct = residual is None and residual_dtype is None and prenorm is False and out is None
        if direct and (weight is not None or bias is None):
            return ops.rmsnorm(
                x,
                weight,
                bias,
                out_dtype=None if out_dtype is None else ops.dtype(out_dtype, "out_dtype"),
                eps=eps,
                algorithm=code,
                batch_invariant=batch_invariant,
                weight_offset=weight_offset,
                round_normalized=rounds(casting_mode),
            )[0]
        check_flags(prenorm=prenorm)
        options = eps, code, batch_invariant, weight_offset, casting_mode
        y, residual_out, _ = _rmsnorm(
            ops, x, weight, bias, residual, out, out_dtype, residual_dtype, options, prenorm=prenorm
        )
    except FAILURES as error:
        raise explained(ops, error, x, weight, bias, residual, out, weight_offset) from None
    return (y, residual_out) if prenorm else y


def _rmsnorm(
    ops: Backend,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    out: Any,
    out_dtype: Any,
    residual_dtype: Any,
    options: tuple[float, int, bool, float, CastingMode | None],
    *,
    prenorm: bool = True,
    needs_rstd: bool = False,
) -> Any:
    """(y, residual_out, rstd), the last two on demand. residual_out is x if it has the same numbers."""
    eps, algorithm, batch_invariant, weight_offset, casting_mode = options
    if weight is None and bias is not None:
        weight = weight_for(ops, x, bias, weight_offset)
    round_normalized = rounds(casting_mode)
    out_dtype = None if out_dtype is None else ops.dtype(out_dtype, "out_dtype")
    adds = False
    if residual is not None or residual_dtype is not None:
        residual_dtype, adds = plan_sum(ops, x, residual, residual_dtype, prenorm)
    if out is None:
        y, h, rstd = ops.rmsnorm(
            x,
            weight,
            bias,
            residual,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            eps=eps,
            algorithm=algorithm,
            batch_invariant=batch_invariant,
            weight_offset=weight_offset,
            round_normalized=round_normalized,
            needs_residual_out=adds,
            needs_rstd=needs_rstd,
        )
        return y, h if adds else x, rstd
    check_out(ops, "out", x, out, out_dtype)
    adds = adds or (prenorm and ops.may_share_memory(x, out))  # residual_out cannot be x if x is written
    h = out_of_sum(ops, x, residual, residual_dtype) if adds else None
    rstd = out_of_statistic(ops, x) if needs_rstd else None
    ops.rmsnorm_out(
        x,
        weight,
        bias,
        residual,
        out,
        residual_out=h,
        rstd=rstd,
        eps=eps,
        algorithm=algorithm,
        batch_invariant=batch_invariant,
        weight_offset=weight_offset,
        round_normalized=round_normalized,
    )
    return out, h if adds else x, rstd


def rmsnorm_fwd(
    x: A,
    weight: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float | None = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    out: A | None = None,
) -> tuple[A, A, A | None]:
    """rmsnorm without a gradient, with what its gradient reads.

    Args:
        x: As in rmsnorm.
        weight: As in rmsnorm.
        bias: As in rmsnorm.
        residual: As in rmsnorm.
        out_dtype: As in rmsnorm.
        residual_dtype: As in rmsnorm.
        eps: As in rmsnorm.
        store_rstd: Also return rstd.
        weight_offset: As in rmsnorm.
        casting_mode: As in rmsnorm.
        algorithm: As in rmsnorm.
        batch_invariant: As in softmax.
        out: As in rmsnorm.

    Returns:
        (out, residual_out, rstd). residual_out is as with prenorm. rstd is 1 / sqrt(mean(h^2) + eps), float32
        (float64 for float64) of shape x.shape[:-1], or None without store_rstd.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As rmsnorm.

    Examples:
        >>> out, residual_out, rstd = gander.rmsnorm_fwd(torch.ones(1, 2), eps=0.0, store_rstd=True)
        >>> out, rstd
        (tensor([[1., 1.]]), tensor([1.]))
    """
    if eps is not None and type(eps) is not float:
        eps = number("eps", eps, "None or ")
    if type(weight_offset) is not float:
        weight_offset = number("weight_offset", weight_offset)
    code = 0 if algorithm is AUTO else code_of("algorithm", algorithm, ALGORITHMS)
    if type(store_rstd) is not bool or type(batch_invariant) is not bool:
        check_flags(store_rstd=store_rstd, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(rmsnorm_fwd, locals())
    try:
        rows = ops.detached(x)
        weight = None if weight is None else ops.detached(weight)
        bias = None if bias is None else ops.detached(bias)
        residual = None if residual is None else ops.detached(residual)
        options = epsilon(x) if eps is None else eps, code, batch_invariant, weight_offset, casting_mode
        y, residual_out, rstd = _rmsnorm(
            ops, rows, weight, bias, residual, out, out_dtype, residual_dtype, options, needs_rstd=store_rstd
        )
    except FAILURES as error:
        refuse_shape("rmsnorm_fwd", weight)
        raise explained(ops, error, x, weight, bias, residual, out, weight_offset) from None
    return y, x if residual_out is rows else residual_out, rstd if store_rstd else None


def rmsnorm_bwd(
    x: A,
    weight: Array | None,
    dout: Array,
    rstd: Array,
    dresidual_out: Array | None = None,
    has_bias: bool = False,
    has_residual: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> tuple[A, A | None, A | None, A | None]:
    """The gradient of rmsnorm.

    With h = x * rstd and g = dout * (weight + weight_offset): dx = (g - h * mean(g * h)) * rstd +
    dresidual_out, dw is the sum of dout * h over the rows, and db the sum of dout. The sums are accumulated
    in float32 or wider in a fixed order, so their bits do not change from run to run.

    Args:
        x: Forward's residual_out if there was a residual, else its x.
        weight: As in the forward call.
        dout: x's shape, any of the dtypes: the gradient of y.
        rstd: As in the forward call.
        dresidual_out: As dout: the gradient of residual_out, or None.
        has_bias: Also compute db.
        has_residual: Return dx as dresidual where there is no dresidual_out.
        weight_offset: As in the forward call.
        casting_mode: As in the forward call. "llama" rounds to the dtype of x.
        algorithm: One of gander.algorithms("rmsnorm_bwd"), with the same exceptions as in rmsnorm.
        batch_invariant: As in softmax, for dx.

    Returns:
        (dx, dw, db, dresidual). dx has the dtype of x, and dw and db that of weight. Without a weight dw is
        None, and db is float32 (float64 for float64). db is None without has_bias. dresidual has dx's numbers
        and the dtype of dresidual_out, and is dx itself if that is x's. Without dresidual_out it is dx if
        has_residual, else None.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As rmsnorm.

    Examples:
        >>> x = torch.tensor([[1.0, -1.0]])
        >>> gander.rmsnorm_bwd(x, torch.ones(2), torch.tensor([[1.0, 0.0]]), torch.ones(1))[:2]
        (tensor([[0.5000, 0.5000]]), tensor([1., 0.]))
    """
    if type(weight_offset) is not float:
        weight_offset = number("weight_offset", weight_offset)
    code = 0 if algorithm is AUTO else code_of("algorithm", algorithm, ALGORITHMS)
    if type(has_bias) is not bool or type(has_residual) is not bool or type(batch_invariant) is not bool:
        check_flags(has_bias=has_bias, has_residual=has_residual, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(rmsnorm_bwd, locals())
    try:
        converts = dresidual_out is not None and ops.differs(x, dresidual_out.dtype)
        converts = converts and "float" in str(dresidual_out.dtype)  # else the operator refuses dresidual_out
        dx, dresidual, dw, db = ops.rmsnorm_bwd(
            x,
            weight,
            dout,
            dresidual_out,
            rstd,
            residual_dtype=dresidual_out.dtype if converts else None,
            needs_dresidual=converts,
            needs_dw=weight is not None,
            needs_db=has_bias,
            algorithm=code,
            batch_invariant=batch_invariant,
            weight_offset=weight_offset,
            round_normalized=rounds(casting_mode),
        )
    except FAILURES as error:
        names = {"residual_dtype": "dresidual_out"}
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "dresidual_out": dresidual_out}
        raise ops.explained(error, names, **given) from None
    if not converts:  # it is dx, if it is there
        dresidual = dx if has_residual else None
    # Through the dispatcher a result that was not asked for is a tensor without elements.
    return dx, None if weight is None else dw, db if has_bias else None, dresidual
