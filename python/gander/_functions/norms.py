"""RMSNorm and LayerNorm."""

from __future__ import annotations

import re
from typing import Any, Literal

from .. import _backend
from .._backend import BACKENDS, backend_of
from .._table import ALGORITHMS, Algorithm
from .arguments import FAILURES, check_constants, check_out, code_of

CastingMode = Literal["llama"]


def _epsilon(x: Any) -> float:
    """What eps=None means in torch: the machine epsilon of the dtype that it computes in."""
    return 2.0**-52 if x.dtype.itemsize == 8 else 2.0**-23


def _rounds(casting_mode: Any) -> bool:
    """The operators' option round_normalized."""
    if casting_mode not in (None, "llama"):
        raise ValueError(f"casting_mode is {casting_mode!r}, expected None or 'llama'")
    return casting_mode is not None


# An exception in a local variable keeps the caller's tensors alive, until Python looks for cycles: its
# traceback holds the frame, and the frame holds it. So functions raise exceptions where they make them.
def _refuse_shape(name: str, weight: Any) -> None:
    """Refuses torch's normalized_shape in place of a norm's weight."""
    if not isinstance(weight, (int, tuple, list)):
        return
    raise TypeError(
        f"weight is {weight!r}, expected a tensor or None; unlike torch's, {name}(x, weight) has no "
        "normalized_shape: it normalizes the last dimension"
    ) from None


def _checked_weight(
    ops: Any, name: str, x: Any, weight: Any, bias: Any = None, weight_offset: float = 0
) -> Any:
    """The weight to pass to a norm. A bias for each head needs a weight for each head."""
    _refuse_shape(name, weight)
    if weight is None and bias is not None and len(bias.shape) == 2:
        if bias.shape != x.shape[-2:]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, expected (N) or (H, N) for x of shape (..., H, N), "
                f"which is {tuple(x.shape)}"
            )
        if weight_offset:
            raise ValueError(
                f"weight_offset is {weight_offset} without a weight, expected 0; pass the weight or drop "
                "weight_offset"
            )
        return ops.ones_like(bias)
    return weight


def _adds(ops: Any, x: Any, residual: Any, residual_dtype: Any) -> bool:
    """Whether residual_out is something else than x."""
    if residual is None:
        return residual_dtype is not None and ops.differs(x, residual_dtype, "residual_dtype")
    ops.check_residual(x, residual)
    return True


def _dtype_of_sum(ops: Any, x: Any, residual: Any) -> Any:
    """The dtype of x + residual in torch."""
    return ops.dtype("float32", "out_dtype") if ops.differs(x, residual.dtype, "residual") else x.dtype


def _norm(
    ops: Any,
    name: str,
    operands: tuple,
    out_dtype: Any,
    residual_dtype: Any,
    prenorm: bool,
    options: tuple,
) -> Any:
    """The result of a norm, or (result, residual_out) with prenorm. operands: x, weight, bias and residual.
    options: what the operators take after the dtypes."""
    x, weight, bias, residual = operands
    out_dtype = ops.dtype(out_dtype, "out_dtype")
    residual_dtype = ops.dtype(residual_dtype, "residual_dtype")
    adds = _adds(ops, x, residual, residual_dtype)
    if name == "layernorm" and not prenorm:
        residual_dtype = None  # else the result would be another where a gradient is wanted
    kept = residual is not None and (prenorm or ops is _backend.torch)
    if kept and residual_dtype is None and (name == "layernorm" or not prenorm):
        # The digits that a narrower sum lost would be missing in the gradient.
        residual_dtype = _dtype_of_sum(ops, x, residual)
    if adds and prenorm:
        return getattr(ops, f"{name}_add")(*operands, out_dtype, residual_dtype, *options)
    if residual is not None:
        return getattr(ops, f"{name}_residual")(*operands, out_dtype, residual_dtype, *options)
    if name == "layernorm":
        y = ops.layernorm(x, weight, bias, out_dtype, *options)
    elif bias is None and not options[-1]:  # round_normalized
        y = ops.rmsnorm(x, weight, out_dtype, *options[:-1])
    else:
        y = ops.rmsnorm_bias(x, weight, bias, out_dtype, *options)
    return (y, x) if prenorm else y


def _write(ops: Any, name: str, given: dict, rest: tuple, names: dict[str, str]) -> None:
    """Calls an operator that writes over operands. given: the caller's, by their names there. names: what the
    operator calls some of them, with those names."""
    try:
        getattr(ops, name)(*given.values(), *rest)
    except (TypeError, ValueError, *FAILURES) as error:
        if ops.is_compiled():
            raise
        raise _renamed(ops.explained(error, **given), names) from None


def _renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The same error about the caller's operands."""
    operand = rf"(?<!['\w])({'|'.join(names)})(?!['\w])"
    return type(error)(re.sub(operand, lambda found: names[found[0]], str(error)))


def _norm_into(
    ops: Any,
    name: str,
    operands: tuple,
    out: Any,
    dtypes: tuple,
    wanted: set[str],
    options: tuple,
) -> tuple:
    """(out, residual_out, mean, rstd) of a norm that writes its result to `out`.

    operands: x, weight, bias and residual. dtypes: out_dtype and residual_dtype. wanted: which of the other
    results to compute. residual_out is x if it would have the same numbers.
    """
    x, _, _, residual = operands
    out_dtype, residual_dtype = ops.dtype(dtypes[0], "out_dtype"), ops.dtype(dtypes[1], "residual_dtype")
    check_out(ops, "out", x, out, out_dtype)
    shape, residual_out = tuple(x.shape), None
    adds = _adds(ops, x, residual, residual_dtype)
    if "residual_out" in wanted and (adds or ops.may_share_memory(x, out)):
        if residual_dtype is None and name == "layernorm" and residual is not None:
            residual_dtype = _dtype_of_sum(ops, x, residual)
        residual_out = ops.empty(x, shape, residual_dtype or (x if residual is None else residual).dtype)
    wide = ops.dtype("float64" if x.dtype.itemsize == 8 else "float32", "out_dtype")
    mean, rstd = (ops.empty(x, shape[:-1], wide) if given in wanted else None for given in ("mean", "rstd"))
    statistics = (mean, rstd) if name == "layernorm" else (rstd,)
    given = dict(zip(("x", "weight", "bias", "residual", "out"), (*operands, out), strict=True))
    _write(ops, f"{name}_out", given, (residual_out, *statistics, *options), {"y": "out"})
    return out, x if residual_out is None else residual_out, mean, rstd


def _norm_bwd(ops: Any, name: str, operands: tuple, has_bias: bool, options: tuple) -> Any:
    """The gradients (dx, dresidual, dw, db) of a norm. operands: x, weight, dout, dresidual_out, statistics.

    dresidual has the dtype of dresidual_out. It is None if that is x's. dw and db are None without weight and
    bias.
    """
    x, weight, dresidual_out = operands[0], operands[1], operands[3]
    dtypes = [None]
    converts = dresidual_out is not None and ops.differs(x, dresidual_out.dtype, "dresidual_out")
    if converts:
        dtypes.append(dresidual_out.dtype)
    if has_bias:
        dtypes.append(None)
    wanted = {"dresidual": converts, "dw": weight is not None, "db": has_bias}
    operator = "_".join([f"{name}_add_bwd", *(result for result in wanted if wanted[result])])
    answer = getattr(ops, operator)(*operands, *dtypes, *options)
    results = iter(answer if any(wanted.values()) else (answer,))
    return next(results), *(next(results) if given else None for given in wanted.values())


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
        options = eps, code, bool(batch_invariant), weight_offset
        special = bias is not None or residual is not None or prenorm
        if special or out is not None or casting_mode is not None:
            weight = _checked_weight(ops, "rmsnorm", x, weight, bias, weight_offset)
            options = *options, _rounds(casting_mode)
            operands = x, weight, bias, residual
            if out is not None:
                wanted = {"residual_out"} if prenorm else set()
                dtypes = out_dtype, residual_dtype
                answer = _norm_into(ops, "rmsnorm", operands, out, dtypes, wanted, options)
                return answer[:2] if prenorm else out
            return _norm(ops, "rmsnorm", operands, out_dtype, residual_dtype, prenorm, options)
        if out_dtype is not None:
            out_dtype = ops.dtype(out_dtype, "out_dtype")
        return ops.rmsnorm(x, weight, out_dtype, *options)
    except FAILURES as error:
        _refuse_shape("rmsnorm", weight)
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None


def fused_add_rmsnorm(
    x: Any,
    residual: Any,
    weight: Any,
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
        if eps is None:
            eps = _epsilon(x)
        given = {"x": x, "weight": weight, "residual": residual}
        options = eps, bool(batch_invariant), weight_offset, False
        _write(ops, "fused_add_rmsnorm_", given, options, {"y": "x", "residual_out": "residual"})
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, residual=residual) from None


def rmsnorm_fwd(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float | None = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """rmsnorm without a gradient. Returns (out, residual_out, rstd).

    residual_out is as with prenorm. rstd is 1 / sqrt(mean(h^2) + eps), float32 (float64 for float64) of shape
    x.shape[:-1], or None without store_rstd. Arguments and errors are those of rmsnorm.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        check_constants(eps=eps, weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else code_of("algorithm", algorithm, ALGORITHMS)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        weight = _checked_weight(ops, "rmsnorm", x, weight, bias, weight_offset)
        if out_dtype is not None:
            out_dtype = ops.dtype(out_dtype, "out_dtype")
        if residual_dtype is not None:
            residual_dtype = ops.dtype(residual_dtype, "residual_dtype")
        if eps is None:
            eps = _epsilon(x)
        rounds = _rounds(casting_mode)
        options = eps, code, bool(batch_invariant), weight_offset, rounds
        operands = ops.detached(x), ops.detached(weight)
        if out is not None:
            operands = *operands, ops.detached(bias), ops.detached(residual)
            wanted = {"residual_out", "rstd"} if store_rstd else {"residual_out"}
            dtypes = out_dtype, residual_dtype
            _, h, _, rstd = _norm_into(ops, "rmsnorm", operands, out, dtypes, wanted, options)
            return out, x if h is operands[0] else h, rstd
        if _adds(ops, x, residual, residual_dtype):
            operator = ops.rmsnorm_add_fwd if store_rstd else ops.rmsnorm_add
            more = ops.detached(bias), ops.detached(residual), out_dtype, residual_dtype
            out, residual_out, *rest = operator(*operands, *more, *options)
            return out, residual_out, rest[0] if store_rstd else None
        if bias is not None or rounds:
            operator = ops.rmsnorm_bias_fwd if store_rstd else ops.rmsnorm_bias
            answer = operator(*operands, ops.detached(bias), out_dtype, *options)
        else:
            operator = ops.rmsnorm_fwd if store_rstd else ops.rmsnorm
            answer = operator(*operands, out_dtype, *options[:-1])
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None
    out, rstd = answer if store_rstd else (answer, None)
    return out, x, rstd


def rmsnorm_bwd(
    x: Any,
    weight: Any,
    dout: Any,
    rstd: Any,
    dresidual_out: Any = None,
    has_bias: bool = False,
    has_residual: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> Any:
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
    dresidual = db = dw = None
    try:
        options, rounds = (code, bool(batch_invariant), weight_offset), _rounds(casting_mode)
        if has_bias or dresidual_out is not None or rounds:
            operands = x, weight, dout, dresidual_out, rstd
            dx, dresidual, dw, db = _norm_bwd(ops, "rmsnorm", operands, has_bias, (*options, rounds))
        elif weight is None:
            dx = ops.rmsnorm_bwd(x, None, dout, rstd, *options)
        else:
            dx, dw = ops.rmsnorm_bwd_dw(x, weight, dout, rstd, *options)
    except FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "dresidual_out": dresidual_out}
        raise ops.explained(error, **given) from None
    return dx, dw, db, dx if dresidual is None and has_residual else dresidual


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
        weight = _checked_weight(ops, "layernorm", x, weight, bias)
        operands, options = (x, weight, bias, residual), (eps, bool(batch_invariant))
        if out is not None:
            wanted = {"residual_out"} if prenorm else set()
            dtypes = out_dtype, residual_dtype
            answer = _norm_into(ops, "layernorm", operands, out, dtypes, wanted, options)
            return answer[:2] if prenorm else out
        return _norm(ops, "layernorm", operands, out_dtype, residual_dtype, prenorm, options)
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None


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
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if not (return_rstd or return_mean):
        operands = ops.detached(x), ops.detached(weight), ops.detached(bias)
        return layernorm(*operands, eps=eps, batch_invariant=batch_invariant, out=out)
    if type(eps) is not float:
        check_constants(eps=eps)
    try:
        weight = _checked_weight(ops, "layernorm_fwd", x, weight, bias)
        operands = ops.detached(x), ops.detached(weight), ops.detached(bias)
        options = eps, bool(batch_invariant)
        if out is None:
            y, mean, rstd = ops.layernorm_fwd(*operands, None, *options)
        else:
            wanted, operands = {"mean", "rstd"}, (*operands, None)
            y, _, mean, rstd = _norm_into(ops, "layernorm", operands, out, (None, None), wanted, options)
    except FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, out=out) from None
    return (y, *[rstd] * bool(return_rstd), *[mean] * bool(return_mean))


def layernorm_bwd(
    x: Any,
    weight: Any,
    dout: Any,
    rstd: Any,
    mean: Any,
    has_bias: bool = True,
    *,
    batch_invariant: bool = False,
) -> Any:
    """The gradient of layernorm. Returns (dx, dw, db).

    With h = (x - mean) * rstd and g = dout * weight: dx = (g - mean(g) - h * mean(g * h)) * rstd, where
    mean(...) is over the row, dw is the sum of dout * h over the rows, and db the sum of dout.
    x, weight, rstd, mean: as in the forward call, or x its residual_out if there was a residual. dout: x's
    shape, any of the dtypes. Dtypes, the cases of None and errors are those of rmsnorm_bwd.
    """
    ops = BACKENDS.get(type(x)) or backend_of(x)
    try:
        operands = x, weight, dout, None, mean, rstd
        dx, _, dw, db = _norm_bwd(ops, "layernorm", operands, has_bias, (bool(batch_invariant),))
    except FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "mean": mean}
        raise ops.explained(error, **given) from None
    return dx, dw, db
