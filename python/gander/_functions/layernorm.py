"""LayerNorm."""

from __future__ import annotations

from typing import Any, Literal, overload

from .._backend import BACKENDS, Backend, backend_of
from .._words import check_flags, number
from .arguments import FAILURES, A, Array, check_out, overridden
from .norms import explained, out_of_statistic, out_of_sum, plan_sum, refuse_shape, weight_for


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
    x: A,
    weight: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    *,
    batch_invariant: bool = False,
    out: A | None = None,
) -> A | tuple[A, A]:
    """LayerNorm over the last dimension, differentiable.

    y = (h - mean h) / sqrt(var h + eps) * weight + bias with h = x + residual. Ba, Kiros and Hinton, "Layer
    Normalization", 2016. var is the mean of the squared distances from the mean, which is subtracted first.
    y is that of h rounded to residual_dtype, whether or not it is returned; without one, to the dtype that
    x + residual has in torch. Under CUDA autocast y is float32 by default, like that of
    torch.nn.functional.layer_norm.

    Args:
        x: As in rmsnorm.
        weight: As in rmsnorm.
        bias: As in rmsnorm.
        residual: As in rmsnorm.
        out_dtype: As in rmsnorm.
        residual_dtype: The dtype of h, and of residual_out. By default that of x + residual in torch. Another
            one than that makes h a tensor in memory without prenorm too.
        eps: Added to the variance. torch's default is 1e-5.
        prenorm: Return (y, residual_out).
        batch_invariant: As in softmax.
        out: As in rmsnorm.

    Returns:
        y, or (y, residual_out), as in rmsnorm.

    Raises:
        TypeError, ValueError, RuntimeError: As rmsnorm.

    Examples:
        >>> gander.layernorm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    if type(eps) is not float:
        eps = number("eps", eps)
    if type(prenorm) is not bool or type(batch_invariant) is not bool:
        check_flags(prenorm=prenorm, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(layernorm, locals())
    if isinstance(weight, (list, tuple, int)):  # an error that is raised later, a graph cannot explain
        refuse_shape("layernorm", weight)
    try:
        direct = residual is None and residual_dtype is None and prenorm is False and out is None
        if direct and (weight is not None or bias is None):
            return ops.layernorm(
                x,
                weight,
                bias,
                out_dtype=None if out_dtype is None else ops.dtype(out_dtype, "out_dtype"),
                eps=eps,
                batch_invariant=batch_invariant,
            )[0]
        y, residual_out, _, _ = _layernorm(
            ops, x, weight, bias, out, eps, batch_invariant, residual, out_dtype, residual_dtype, prenorm
        )
    except FAILURES as error:
        raise explained(ops, error, x, weight, bias, residual, out) from None
    return (y, residual_out) if prenorm else y


def _layernorm(
    ops: Backend,
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    eps: float,
    batch_invariant: bool,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    prenorm: bool = False,
    *,
    statistics: bool = False,
) -> Any:
    """(y, residual_out, mean, rstd), the last three on demand. residual_out may be x, if it is the same."""
    if weight is None and bias is not None:
        weight = weight_for(ops, x, bias)
    out_dtype = None if out_dtype is None else ops.dtype(out_dtype, "out_dtype")
    adds = False
    if residual is not None or residual_dtype is not None:
        residual_dtype, adds = plan_sum(ops, x, residual, residual_dtype, prenorm, layer=True)
    if out is None:
        y, h, mean, rstd = ops.layernorm(
            x,
            weight,
            bias,
            residual,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            eps=eps,
            batch_invariant=batch_invariant,
            needs_residual_out=adds,
            needs_mean=statistics,
            needs_rstd=statistics,
        )
        return y, h if adds else x, mean, rstd
    check_out(ops, "out", x, out, out_dtype)
    adds = adds or (prenorm and ops.may_share_memory(x, out))  # residual_out cannot be x if x is written
    h = out_of_sum(ops, x, residual, residual_dtype) if adds else None
    mean, rstd = (out_of_statistic(ops, x) if statistics else None for _ in range(2))
    ops.layernorm_out(
        x,
        weight,
        bias,
        residual,
        out,
        residual_out=h,
        mean=mean,
        rstd=rstd,
        eps=eps,
        batch_invariant=batch_invariant,
    )
    return out, h if adds else x, mean, rstd


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
    x: A,
    weight: Array | None,
    bias: Array | None = None,
    eps: float = 1e-6,
    return_rstd: bool = False,
    return_mean: bool = False,
    *,
    batch_invariant: bool = False,
    out: A | None = None,
) -> A | tuple[A, ...]:
    """layernorm without a gradient, with what its gradient reads.

    Args:
        x: As in layernorm.
        weight: As in layernorm.
        bias: As in layernorm.
        eps: As in layernorm.
        return_rstd: Also return 1 / sqrt(var x + eps).
        return_mean: Also return mean x.
        batch_invariant: As in softmax.
        out: As in rmsnorm.

    Returns:
        out, (out, rstd), (out, mean) or (out, rstd, mean). Both statistics are float32 (float64 for float64)
        of shape x.shape[:-1].

    Raises:
        TypeError, ValueError, RuntimeError: As rmsnorm.

    Examples:
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> gander.layernorm_fwd(x, None, eps=0.0, return_rstd=True, return_mean=True)
        (tensor([[-1.,  1.]]), tensor([1.]), tensor([2.]))
    """
    if type(eps) is not float:
        eps = number("eps", eps)
    if type(return_rstd) is not bool or type(return_mean) is not bool or type(batch_invariant) is not bool:
        check_flags(return_rstd=return_rstd, return_mean=return_mean, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(layernorm_fwd, locals())
    try:
        weight = None if weight is None else ops.detached(weight)
        bias = None if bias is None else ops.detached(bias)
        statistics = return_rstd or return_mean
        y, _, mean, rstd = _layernorm(
            ops, ops.detached(x), weight, bias, out, eps, batch_invariant, statistics=statistics
        )
    except FAILURES as error:
        refuse_shape("layernorm_fwd", weight)
        raise explained(ops, error, x, weight, bias, residual=None, out=out) from None
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
    """The gradient of layernorm.

    With h = (x - mean) * rstd and g = dout * weight: dx = (g - mean(g) - h * mean(g * h)) * rstd, where
    mean(...) is over the row, dw is the sum of dout * h over the rows, and db the sum of dout.

    Args:
        x: As in the forward call, or its residual_out if there was a residual.
        weight: As in the forward call.
        dout: x's shape, any of the dtypes: the gradient of y.
        rstd: As in the forward call.
        mean: As in the forward call.
        has_bias: Also compute db.
        batch_invariant: As in softmax, for dx.

    Returns:
        (dx, dw, db), with the dtypes, and None, as in rmsnorm_bwd.

    Raises:
        TypeError, ValueError, RuntimeError: As rmsnorm.

    Examples:
        >>> x, dout = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0]])
        >>> _, dw, db = gander.layernorm_bwd(x, torch.ones(2), dout, torch.ones(1), torch.tensor([2.0]))
        >>> dw, db
        (tensor([-1.,  0.]), tensor([1., 0.]))
    """
    if type(has_bias) is not bool or type(batch_invariant) is not bool:
        check_flags(has_bias=has_bias, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(layernorm_bwd, locals())
    try:
        dx, _, dw, db = ops.layernorm_bwd(
            x,
            weight,
            dout,
            None,
            mean,
            rstd,
            needs_dw=weight is not None,
            needs_db=has_bias,
            batch_invariant=batch_invariant,
        )
    except FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "mean": mean}
        raise ops.explained(error, **given) from None
    # Through the dispatcher a result that was not asked for is a tensor without elements.
    return dx, None if weight is None else dw, db if has_bias else None
