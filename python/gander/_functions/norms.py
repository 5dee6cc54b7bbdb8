"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from .._backend import BACKENDS, Backend, backend_of
from .._table import ALGORITHMS, Algorithm
from .arguments import FAILURES, A, Array, check_constants, check_out, code_of, renamed

CastingMode = Literal["llama"]

# An exception in a local variable keeps the caller's tensors alive, until Python looks for cycles: its
# traceback holds the frame, and the frame holds it. So functions raise exceptions where they make them.


def _epsilon(x: Any) -> float:
    """What eps=None means in torch: the machine epsilon of the dtype that it computes in."""
    return 2.0**-52 if x.dtype.itemsize == 8 else 2.0**-23


def _rounds(casting_mode: Any) -> bool:
    """The operators' option round_normalized."""
    if casting_mode not in (None, "llama"):
        raise ValueError(f"casting_mode is {casting_mode!r}, expected None or 'llama'")
    return casting_mode is not None


def _refuse_shape(name: str, weight: Any) -> None:
    """Refuses torch's normalized_shape in place of a norm's weight."""
    if not isinstance(weight, (int, tuple, list)):
        return
    raise TypeError(
        f"weight is {weight!r}, expected a tensor or None; unlike torch's, {name}(x, weight) has no "
        "normalized_shape: it normalizes the last dimension"
    ) from None


def _checked_weight(
    ops: Backend, name: str, x: Any, weight: Any, bias: Any = None, weight_offset: float = 0
) -> Any:
    """The weight to pass to a norm. A bias for each head needs a weight for each head."""
    _refuse_shape(name, weight)
    if weight is None and bias is not None and not weight_offset:
        if len(bias.shape) == 2 and bias.shape == x.shape[-2:]:
            return ops.ones_like(bias)
    return weight


def _adds(ops: Backend, x: Any, residual: Any, residual_dtype: Any) -> bool:
    """Whether residual_out is something else than x."""
    if residual is None:
        return residual_dtype is not None and ops.differs(x, residual_dtype, "residual_dtype")
    return True


def _dtype_of_sum(ops: Backend, x: Any, residual: Any) -> Any:
    """The dtype of x + residual in torch."""
    return ops.dtype("float32", "residual_dtype") if ops.differs(x, residual.dtype, "residual") else x.dtype


def _saved_dtype(
    ops: Backend, x: Any, residual: Any, residual_dtype: Any, prenorm: bool, layer: bool = False
) -> Any:
    """The dtype in which backward reads x + residual. layer: for LayerNorm, whose y is that of this sum."""
    if layer and not prenorm:
        residual_dtype = None  # else the result would be another where a gradient is wanted
    if residual is not None and residual_dtype is None and (layer or not prenorm):
        # The digits that a narrower sum lost would be missing in the gradient.
        return _dtype_of_sum(ops, x, residual)
    return residual_dtype


def _write(ops: Backend, operator: Callable[..., Any], names: dict[str, str], **arguments: Any) -> None:
    """Calls an operator that writes over operands. names: what callers call some of its arguments."""
    try:
        operator(**arguments)
    except (TypeError, ValueError, *FAILURES) as error:
        if ops.is_compiled():
            raise
        given = {name: arguments[name] for name in ("x", "weight", "bias", "residual") if name in arguments}
        raise renamed(ops.explained(error, **given), names) from None


def _out_of_sum(
    ops: Backend, x: Any, residual: Any, residual_dtype: Any, out: Any, out_dtype: Any, layer: bool
) -> Any:
    """A new array for residual_out of a norm that writes to `out`, or None if x has the same numbers."""
    residual_dtype = ops.dtype(residual_dtype, "residual_dtype")
    check_out(ops, "out", x, out, ops.dtype(out_dtype, "out_dtype"))
    if not _adds(ops, x, residual, residual_dtype) and not ops.may_share_memory(x, out):
        return None
    if residual_dtype is None and layer and residual is not None:
        residual_dtype = _dtype_of_sum(ops, x, residual)
    return ops.empty(x, tuple(x.shape), residual_dtype or (x if residual is None else residual).dtype)


def _out_of_statistic(ops: Backend, x: Any) -> Any:
    """A new array for mean or rstd."""
    wide = ops.dtype("float64" if x.dtype.itemsize == 8 else "float32", "out_dtype")
    return ops.empty(x, tuple(x.shape[:-1]), wide)


# ---- RMSNorm ----


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
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float | None = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """RMSNorm over the last dimension, differentiable: y = h / sqrt(mean(h^2) + eps) * weight + bias with
    h = x + residual.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
    tensor on the CPU or a CUDA device, or an object with `__dlpack__`. For the latter the result is an array
    of the same library, without a gradient.
    weight, bias: (N), each of any of these dtypes, not only x's, or None. float64 if and only if x is. Or
    (H, N) for x of shape (..., H, N): those of each head.
    residual: x's shape, any of these dtypes, or None. The sum h is not rounded.
    out_dtype: the dtype of the result, or its name ("float16"). By default that of x.
    residual_dtype: the dtype of residual_out. By default that of residual, or of x without one. (layernorm's
    is that of x + residual in torch.)
    eps: added to the mean of squares. None is torch's default: the machine epsilon of float32 (of float64 for
    float64).
    prenorm: return (y, residual_out). residual_out is h in residual_dtype. Without a residual it is x itself
    if it has that dtype.
    weight_offset: added to each weight, as in Gemma's norms. Refused without a weight.
    casting_mode: "llama" rounds the normalized row to x's dtype before the weight is applied, as Llama's norm
    in transformers does. The gradient of weight is that of the rounded row. None rounds once, in the end.
    out: a tensor of x's shape, to which y is written, and which is returned. It decides y's dtype, and may be
    x. Refused if a gradient is wanted. An array of NumPy or CuPy has to be writable.
    algorithm, batch_invariant: as in softmax, with gander.algorithms("rmsnorm") and ("rmsnorm_bwd"). With a
    bias, a residual, a weight for each head, weight_offset, casting_mode, out or another residual_dtype than
    x's there is only "auto". The gradients of weight and bias are sums over rows, so their bits depend on all
    of them.
    Returns y, a contiguous tensor of x's shape. Everything is computed in float32 (float64 for float64).
    Gradients have the dtypes of their tensors. With a residual, backward reads h as residual_out has it, or
    without prenorm in the wider dtype of x and residual, unless residual_dtype is given.
    Raises TypeError (dtype), ValueError (shape, algorithm), RuntimeError (device, driver, memory).
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        check_constants(eps=eps, weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else code_of("algorithm", algorithm, ALGORITHMS)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        if eps is None:
            eps = _epsilon(x)
        if bias is None and residual is None and not prenorm and out is None and casting_mode is None:
            if out_dtype is not None:
                out_dtype = ops.dtype(out_dtype, "out_dtype")
            return ops.rmsnorm(
                x,
                weight,
                out_dtype=out_dtype,
                eps=eps,
                algorithm=code,
                batch_invariant=bool(batch_invariant),
                weight_offset=weight_offset,
            )[0]
        y, residual_out, _ = _rmsnorm(
            ops,
            x,
            weight,
            bias,
            residual,
            out,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            prenorm=prenorm,
            eps=eps,
            algorithm=code,
            batch_invariant=bool(batch_invariant),
            weight_offset=weight_offset,
            round_normalized=_rounds(casting_mode),
        )
    except FAILURES as error:
        _refuse_shape("rmsnorm", weight)
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None
    return (y, residual_out) if prenorm else y


def _rmsnorm(
    ops: Backend,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    out: Any,
    *,
    out_dtype: Any,
    residual_dtype: Any,
    prenorm: bool,
    needs_rstd: bool = False,
    **options: Any,
) -> Any:
    """(y, residual_out, rstd), the last two on demand. residual_out is x if it has the same numbers."""
    weight = _checked_weight(ops, "rmsnorm", x, weight, bias, options["weight_offset"])
    if out is not None:
        h = _out_of_sum(ops, x, residual, residual_dtype, out, out_dtype, False) if prenorm else None
        if not prenorm:
            _adds(ops, x, residual, ops.dtype(residual_dtype, "residual_dtype"))
            check_out(ops, "out", x, out, ops.dtype(out_dtype, "out_dtype"))
        rstd = _out_of_statistic(ops, x) if needs_rstd else None
        operands = {"x": x, "weight": weight, "bias": bias, "residual": residual, "y": out}
        _write(ops, ops.rmsnorm_out, {"y": "out"}, **operands, residual_out=h, rstd=rstd, **options)
        return out, x if h is None else h, rstd
    residual_dtype = ops.dtype(residual_dtype, "residual_dtype")
    adds = _adds(ops, x, residual, residual_dtype) and prenorm
    y, h, rstd = ops.rmsnorm(
        x,
        weight,
        bias,
        residual,
        out_dtype=ops.dtype(out_dtype, "out_dtype"),
        residual_dtype=_saved_dtype(ops, x, residual, residual_dtype, prenorm),
        needs_residual_out=adds,
        needs_rstd=needs_rstd,
        **options,
    )
    return y, h if adds else x, rstd


def fused_add_rmsnorm(
    x: Array,
    residual: Array,
    weight: Array | None,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    *,
    batch_invariant: bool = False,
) -> None:
    """In place, as inference servers call it: residual becomes x + residual, and x its RMSNorm.

    x, residual: (..., N) of the same shape, each of float16, bfloat16 or float32 (on the CPU also float64).
    The sum is rounded to residual's dtype, but the norm is that of the sum before. A torch tensor, or a
    writable array of NumPy or CuPy. A tensor that requires a gradient is refused.
    weight, eps, weight_offset, batch_invariant and errors are those of rmsnorm.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        check_constants(eps=eps, weight_offset=weight_offset)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        _checked_weight(ops, "fused_add_rmsnorm", x, weight)
        if residual is None:
            raise TypeError("residual is None, expected a tensor, to which x is added; or call rmsnorm")
        _adds(ops, x, residual, None)
        _write(
            ops,
            ops.fused_add_rmsnorm_,
            {"y": "x", "residual_out": "residual"},
            x=x,
            weight=weight,
            residual=residual,
            eps=_epsilon(x) if eps is None else eps,
            batch_invariant=bool(batch_invariant),
            weight_offset=weight_offset,
        )
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, residual=residual) from None


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
    """rmsnorm without a gradient. Returns (out, residual_out, rstd).

    residual_out is as with prenorm. rstd is 1 / sqrt(mean(h^2) + eps), float32 (float64 for float64) of shape
    x.shape[:-1], or None without store_rstd. Arguments and errors are those of rmsnorm.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        check_constants(eps=eps, weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else code_of("algorithm", algorithm, ALGORITHMS)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        y, residual_out, rstd = _rmsnorm(
            ops,
            rows := ops.detached(x),
            ops.detached(weight),
            ops.detached(bias),
            ops.detached(residual),
            out,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            prenorm=True,
            needs_rstd=bool(store_rstd),
            eps=_epsilon(x) if eps is None else eps,
            algorithm=code,
            batch_invariant=bool(batch_invariant),
            weight_offset=weight_offset,
            round_normalized=_rounds(casting_mode),
        )
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None
    return y, x if residual_out is rows else residual_out, rstd


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
    """The gradient of rmsnorm. Returns (dx, dw, db, dresidual).

    With h = x * rstd and g = dout * (weight + weight_offset): dx = (g - h * mean(g * h)) * rstd +
    dresidual_out, dw is the sum of dout * h over the rows, and db the sum of dout.
    x: forward's residual_out if there was a residual, else its x. weight, rstd: as in the forward call. dout,
    dresidual_out: x's shape, any of the dtypes. dresidual_out is the gradient of residual_out, or None.
    dx has the dtype of x, and dw and db that of weight. Without a weight dw is None, and db is float32
    (float64 for float64). db is None without has_bias. The sums are accumulated in float32 or wider in a
    fixed order, so their bits do not change from run to run.
    dresidual has dx's numbers. It has the dtype of dresidual_out, and is dx itself if that is x's. Without
    dresidual_out it is dx if has_residual, else None.
    algorithm: one of gander.algorithms("rmsnorm_bwd"), with the same exceptions as in rmsnorm. casting_mode,
    batch_invariant and errors are as there. casting_mode="llama" rounds to the dtype of x.
    """
    if type(weight_offset) is not float:
        check_constants(weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else code_of("algorithm", algorithm, ALGORITHMS)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        dx, dresidual, dw, db = ops.rmsnorm_bwd(
            x,
            weight,
            dout,
            dresidual_out,
            rstd,
            **_gradients(ops, x, weight, dresidual_out, has_bias),
            algorithm=code,
            batch_invariant=bool(batch_invariant),
            weight_offset=weight_offset,
            round_normalized=_rounds(casting_mode),
        )
    except FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "dresidual_out": dresidual_out}
        raise ops.explained(error, **given) from None
    if dresidual is None and has_residual:
        dresidual = dx
    return dx, dw, db, dresidual


def _gradients(ops: Backend, x: Any, weight: Any, dresidual_out: Any, has_bias: bool) -> dict[str, Any]:
    """Which gradients of a norm are wanted. dresidual is dx if dresidual_out has the dtype of x."""
    converts = dresidual_out is not None and ops.differs(x, dresidual_out.dtype, "dresidual_out")
    return {
        "residual_dtype": dresidual_out.dtype if converts else None,
        "needs_dresidual": converts,
        "needs_dw": weight is not None,
        "needs_db": bool(has_bias),
    }


# ---- LayerNorm ----


@overload
def layernorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float = ...,
    prenorm: Literal[False] = ...,
    *,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> A: ...
@overload
def layernorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float = ...,
    *,
    prenorm: Literal[True],
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
def layernorm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    *,
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """LayerNorm over the last dimension, differentiable: y = (h - mean h) / sqrt(var h + eps) * weight + bias
    with h = x + residual.

    var is the mean of the squared distances from the mean, which is subtracted first. eps is added to it;
    torch's default is 1e-5, and eps is a number. h is rounded to residual_dtype, which by default is the
    dtype of x + residual in torch, and always without prenorm. Under CUDA autocast y is float32 by default,
    like that of F.layer_norm. The other arguments, results and errors are those of rmsnorm.
    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    if type(eps) is not float:
        check_constants(eps=eps)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        y, residual_out, _, _ = _layernorm(
            ops,
            x,
            weight,
            bias,
            residual,
            out,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            prenorm=prenorm,
            eps=eps,
            batch_invariant=bool(batch_invariant),
        )
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None
    return (y, residual_out) if prenorm else y


def _layernorm(
    ops: Backend,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    out: Any,
    *,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    prenorm: bool = False,
    needs_statistics: bool = False,
    **options: Any,
) -> Any:
    """(y, residual_out, mean, rstd), of which the last three are computed on demand. residual_out is x if it
    would have the same numbers."""
    weight = _checked_weight(ops, "layernorm", x, weight, bias)
    if out is not None:
        h = _out_of_sum(ops, x, residual, residual_dtype, out, out_dtype, True) if prenorm else None
        if not prenorm:
            _adds(ops, x, residual, ops.dtype(residual_dtype, "residual_dtype"))
            check_out(ops, "out", x, out, ops.dtype(out_dtype, "out_dtype"))
        mean, rstd = (_out_of_statistic(ops, x) if needs_statistics else None for _ in range(2))
        operands = {"x": x, "weight": weight, "bias": bias, "residual": residual, "y": out}
        results = {"residual_out": h, "mean": mean, "rstd": rstd}
        _write(ops, ops.layernorm_out, {"y": "out"}, **operands, **results, **options)
        return out, x if h is None else h, mean, rstd
    if residual is None and not prenorm:
        adds = False
    else:
        residual_dtype = ops.dtype(residual_dtype, "residual_dtype")
        adds = _adds(ops, x, residual, residual_dtype) and prenorm
        residual_dtype = _saved_dtype(ops, x, residual, residual_dtype, prenorm, True)
    y, h, mean, rstd = ops.layernorm(
        x,
        weight,
        bias,
        residual,
        out_dtype=None if out_dtype is None else ops.dtype(out_dtype, "out_dtype"),
        residual_dtype=residual_dtype,
        needs_residual_out=adds,
        needs_mean=needs_statistics,
        needs_rstd=needs_statistics,
        **options,
    )
    return y, h if adds else x, mean, rstd


@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[False] = ...,
    return_mean: Literal[False] = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> A: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[False] = ...,
    return_mean: Literal[True],
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[True],
    return_mean: Literal[False] = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[True],
    return_mean: Literal[True],
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A, A]: ...
def layernorm_fwd(
    x: Any,
    weight: Any,
    bias: Any = None,
    eps: float = 1e-6,
    return_rstd: bool = False,
    return_mean: bool = False,
    *,
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """layernorm without a gradient. Returns out, (out, rstd), (out, mean) or (out, rstd, mean).

    rstd: 1 / sqrt(var x + eps). Both statistics are float32 (float64 for float64) of shape x.shape[:-1].
    Arguments and errors are those of layernorm.
    """
    if type(eps) is not float:
        check_constants(eps=eps)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        y, _, mean, rstd = _layernorm(
            ops,
            ops.detached(x),
            ops.detached(weight),
            ops.detached(bias),
            None,
            out,
            needs_statistics=bool(return_rstd or return_mean),
            eps=eps,
            batch_invariant=bool(batch_invariant),
        )
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, out=out) from None
    if not (return_rstd or return_mean):
        return y
    return (y, *[rstd] * bool(return_rstd), *[mean] * bool(return_mean))


def layernorm_bwd(
    x: A,
    weight: Array | None,
    dout: Array,
    rstd: Array,
    mean: Array,
    has_bias: bool = True,
    *,
    batch_invariant: bool = False,
) -> tuple[A, A | None, A | None]:
    """The gradient of layernorm. Returns (dx, dw, db).

    With h = (x - mean) * rstd and g = dout * weight: dx = (g - mean(g) - h * mean(g * h)) * rstd, where
    mean(...) is over the row, dw is the sum of dout * h over the rows, and db the sum of dout.
    x, weight, rstd, mean: as in the forward call, or x its residual_out if there was a residual. dout: x's
    shape, any of the dtypes. Dtypes, the cases of None and errors are those of rmsnorm_bwd.
    """
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        dx, _, dw, db = ops.layernorm_bwd(
            x,
            weight,
            dout,
            None,
            mean,
            rstd,
            **_gradients(ops, x, weight, None, has_bias),
            batch_invariant=bool(batch_invariant),
        )
    except FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "mean": mean}
        raise ops.explained(error, **given) from None
    return dx, dw, db
