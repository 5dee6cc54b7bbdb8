"""gander's public functions. They take PyTorch tensors (_pytorch.py) or any objects with `__dlpack__` (_dlpack.py)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from . import _dlpack, _hook, _library
from ._operators_gen import ALGORITHMS, REDUCTIONS, Algorithm, Reduction

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Array(Protocol):
    """An array of NumPy, CuPy, JAX, ...: what is exported through DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


A = TypeVar("A", bound=Array)

_Tensor: Any = ()  # torch.Tensor as soon as torch is there: isinstance(x, ()) is False
_torch: Any = None  # _pytorch.py
_debug = False

_FAILURES = (
    AttributeError,
    RuntimeError,
)  # what torch raises for a failed op, or for an argument that is no tensor


def use_torch(module: Any) -> None:
    """Called by _pytorch.py when its operators are registered."""
    global _Tensor, _torch
    _Tensor, _torch = sys.modules["torch"].Tensor, module


def _operators_of(x: Any) -> Any:
    """What serves an x that is no torch tensor, or one whose operators nobody has registered yet."""
    return _torch if _hook.meets_tensor(x) else _dlpack.operators


def _detached(x: Any) -> Any:
    if x is None or not (isinstance(x, _Tensor) or _hook.meets_tensor(x)):
        return x
    return x.detach() if x.requires_grad else x


def _number(argument: str, name: Any, names: tuple[str, ...]) -> int:
    """A name as the library takes it."""
    if name not in names:
        *others, last = map(repr, names)
        raise ValueError(f"{argument} is {name!r}, expected {', '.join(others)} or {last}")
    return names.index(name)


def _dtype(ops: Any, value: Any) -> Any:
    """out_dtype as ops take it: PyTorch's operators know PyTorch's dtypes only."""
    if ops is not _torch:
        return value
    torch = sys.modules["torch"]
    return (
        value if isinstance(value, torch.dtype) else getattr(torch, _library.dtype_name(value, "out_dtype"))
    )


def _epsilon(x: Any) -> float:
    """torch's eps=None: the machine epsilon of the dtype that it computes in."""
    return 2.0**-52 if x.dtype.itemsize == 8 else 2.0**-23


def set_debug(enabled: bool) -> None:
    """Makes the cross-entropy functions check every target, and raise IndexError where one is out of range.

    The check waits for the GPU, so it is off by default: a row whose target is out of range then gets a loss and a
    gradient of NaN. Calls inside a torch.compile graph are not checked.
    """
    global _debug
    _debug = bool(enabled)


def _check_targets(x: Any, target: Any, ignore_index: int) -> None:
    if _torch is not None and sys.modules["torch"].compiler.is_compiling():
        return
    classes = x.shape[-1]
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        raise IndexError(
            f"target has the class {int(target[bad][0])}, expected 0 to {classes - 1}, or ignore_index = {ignore_index}"
        )


_THIRD_IN_TORCH = "class weights, which are third in torch, as weight="


def _not_yet(argument: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{argument} is not supported yet; {instead}")


def _check_reals(eps: Any, weight_offset: Any) -> None:
    """Refuses tensors, as torch does: one that requires a gradient would get none."""
    for name, value in ("eps", eps), ("weight_offset", weight_offset):
        if isinstance(value, _Tensor):
            raise TypeError(
                f"{name} is a tensor, expected a number, which has no gradient; pass float({name})"
            )


def _check_rmsnorm(weight: Any, bias: Any, residual: Any, residual_dtype: Any) -> None:
    if isinstance(weight, (int, tuple, list)):
        raise TypeError(
            f"weight is {weight!r}, expected a tensor or None; unlike torch's, rmsnorm(x, weight) has no "
            "normalized_shape: it normalizes the last dimension"
        )
    if bias is not None:
        raise _not_yet("bias", "add it to the result")
    if residual is not None or residual_dtype is not None:
        raise _not_yet("residual", "add it to x before the call")


@overload
def softmax(x: Tensor, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> Tensor: ...
@overload
def softmax(x: A, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> A: ...
def softmax(x: Any, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> Any:
    """Softmax over the last dimension, differentiable: y = exp(x - max x) / sum exp(x - max x).

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU float64 too), any strides. A torch tensor on the
    CPU or a CUDA device, or an object with `__dlpack__`, which gives a result of its own kind and no gradient.
    algorithm: how the GPU goes over the rows, one of gander.algorithms("softmax"); one that cannot serve x raises
    NotImplementedError, which says why and which others can. The gradient takes the same one where that serves it (see
    gander.algorithms("softmax_bwd")), else "auto". CPU tensors have "auto" alone.
    batch_invariant: a row's bits, and those of its gradient, do not depend on how many rows there are; costs speed
    where rows are few. Rows of whole 16-byte vectors have other bits where x is not aligned to 16 bytes.
    Returns y, compact, with the shape and dtype of x; under CUDA autocast float32, as F.softmax does.
    Sums are taken in float32 (float64 for float64). A row of -inf, or with a NaN, gives NaN.
    Raises TypeError (dtype), ValueError (shape, algorithm's name), RuntimeError (device, driver, memory).
    Maximum subtracted first: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    how = 0 if algorithm == "auto" else _number("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        return ops.softmax(x, how, bool(batch_invariant))
    except _FAILURES as error:
        raise ops.explained(error) from None


@overload
def softmax_fwd(x: Tensor, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> Tensor: ...
@overload
def softmax_fwd(x: A, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> A: ...
def softmax_fwd(x: Any, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> Any:
    """softmax(x) without a gradient."""
    return softmax(_detached(x), algorithm=algorithm, batch_invariant=batch_invariant)


@overload
def softmax_bwd(
    dy: Tensor, y: Tensor, *, algorithm: Algorithm = ..., batch_invariant: bool = ...
) -> Tensor: ...
@overload
def softmax_bwd(dy: A, y: Array, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> A: ...
def softmax_bwd(dy: Any, y: Any, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> Any:
    """The gradient of softmax: dx = (dy - sum(dy * y)) * y for each row.

    dy, y: (..., N) of one shape, dtype and device; y is what the forward call returned. Returns dx, like dy.
    algorithm: one of gander.algorithms("softmax_bwd"). It, batch_invariant and errors are those of softmax.
    """
    how = 0 if algorithm == "auto" else _number("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(dy, _Tensor) else _operators_of(dy)
    try:
        return ops.softmax_bwd(dy, y, how, bool(batch_invariant))
    except _FAILURES as error:
        raise ops.explained(error, y=y) from None


@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: None = ...,
    residual: None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: None = ...,
    eps: float | None = ...,
    prenorm: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> Tensor: ...
@overload
def rmsnorm(
    x: A,
    weight: Array | None = ...,
    bias: None = ...,
    residual: None = ...,
    out_dtype: Any = ...,
    residual_dtype: None = ...,
    eps: float | None = ...,
    prenorm: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> A: ...
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
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> Any:
    """RMSNorm over the last dimension, differentiable in x and weight: x / sqrt(mean(x^2) + eps) * weight.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU float64 too), any strides. A torch tensor on the
    CPU or a CUDA device, or an object with `__dlpack__`, which gives a result of its own kind and no gradient.
    weight: (N), of any of these dtypes whatever x is (float64 exactly when x is), or None.
    out_dtype: the dtype of the result, or its name ("float16"); x's by default.
    eps: added to the mean of squares; None is torch's default, the machine epsilon of float32 (float64 for float64).
    weight_offset: added to each weight, as Gemma's norms have it; refused without a weight.
    bias, residual, residual_dtype and prenorm are not supported yet: NotImplementedError.
    algorithm, batch_invariant: as of softmax, with gander.algorithms("rmsnorm") and ("rmsnorm_bwd"); the gradient of
    weight is a sum over rows, and its bits depend on them all.
    Returns a compact tensor of x's shape. Everything is computed in float32 (float64 for float64).
    Raises TypeError (dtype), ValueError (shape, algorithm's name), RuntimeError (device, driver, memory).
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if bias is not None or residual is not None or residual_dtype is not None:
        _check_rmsnorm(weight, bias, residual, residual_dtype)
    if prenorm:
        raise _not_yet("prenorm", "add the residual to x before the call")
    if type(eps) is not float or type(weight_offset) is not float:
        _check_reals(eps, weight_offset)
    how = 0 if algorithm == "auto" else _number("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if out_dtype is not None:
            out_dtype = _dtype(ops, out_dtype)
        if eps is None:
            eps = _epsilon(x)
        return ops.rmsnorm(x, weight, out_dtype, eps, how, bool(batch_invariant), weight_offset)
    except _FAILURES as error:
        raise ops.explained(error, weight=weight) from None


@overload
def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: None = ...,
    residual: None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: None = ...,
    eps: float | None = ...,
    store_rstd: bool = ...,
    weight_offset: float = ...,
    *,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor, Tensor | None]: ...
@overload
def rmsnorm_fwd(
    x: A,
    weight: Array | None = ...,
    bias: None = ...,
    residual: None = ...,
    out_dtype: Any = ...,
    residual_dtype: None = ...,
    eps: float | None = ...,
    store_rstd: bool = ...,
    weight_offset: float = ...,
    *,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[A, A, A | None]: ...
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
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> Any:
    """rmsnorm without a gradient. Returns (out, residual_out, rstd).

    residual_out is x itself. rstd = 1 / sqrt(mean(x^2) + eps), float32 (float64 for float64) of shape x.shape[:-1],
    with store_rstd, else None. Arguments and errors are those of rmsnorm.
    """
    if bias is not None or residual is not None or residual_dtype is not None:
        _check_rmsnorm(weight, bias, residual, residual_dtype)
    if type(eps) is not float or type(weight_offset) is not float:
        _check_reals(eps, weight_offset)
    how = 0 if algorithm == "auto" else _number("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if out_dtype is not None:
            out_dtype = _dtype(ops, out_dtype)
        if eps is None:
            eps = _epsilon(x)
        arguments = _detached(x), _detached(weight), out_dtype, eps, how, bool(batch_invariant), weight_offset
        out, rstd = ops.rmsnorm_fwd(*arguments) if store_rstd else (ops.rmsnorm(*arguments), None)
    except _FAILURES as error:
        raise ops.explained(error, weight=weight) from None
    return out, x, rstd


@overload
def rmsnorm_bwd(
    x: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    dresidual_out: None = ...,
    has_bias: Literal[False] = ...,
    has_residual: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor | None, None, None]: ...
@overload
def rmsnorm_bwd(
    x: A,
    weight: Array | None,
    dout: Array,
    rstd: Array,
    dresidual_out: None = ...,
    has_bias: Literal[False] = ...,
    has_residual: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[A, A | None, None, None]: ...
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
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> Any:
    """The gradient of rmsnorm. Returns (dx, dw, db, dresidual); db and dresidual are None, dw is without a weight.

    With h = x * rstd and g = dout * (weight + weight_offset): dx = (g - h * mean(g * h)) * rstd, dw = sum over rows of
    dout * h.
    x, weight, rstd: as in the forward call; dout: x's shape, any of the dtypes. dx has the dtype of x, dw that of
    weight; dw is accumulated in float32 or wider in a fixed order, so its bits do not change from run to run.
    algorithm: one of gander.algorithms("rmsnorm_bwd"). It, batch_invariant and errors are those of rmsnorm.
    """
    if has_bias:
        raise _not_yet("has_bias", "the gradient of a bias is dout summed over its rows")
    if has_residual or dresidual_out is not None:
        raise _not_yet("dresidual_out", "add it to dx")
    if type(weight_offset) is not float:
        _check_reals(None, weight_offset)
    how = 0 if algorithm == "auto" else _number("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if weight is None:
            dx, dw = ops.rmsnorm_bwd(x, None, dout, rstd, how, bool(batch_invariant), weight_offset), None
        else:
            dx, dw = ops.rmsnorm_bwd_dw(x, weight, dout, rstd, how, bool(batch_invariant), weight_offset)
    except _FAILURES as error:
        raise ops.explained(error, weight=weight, dout=dout, rstd=rstd) from None
    return dx, dw, None, None


@overload
def cross_entropy(
    x: Tensor,
    target: Tensor,
    lse_partial: None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    inplace_backward: bool = ...,
    *,
    one_pass: bool | None = ...,
    batch_invariant: bool = ...,
) -> Tensor: ...
@overload
def cross_entropy(
    x: A,
    target: Array,
    lse_partial: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    inplace_backward: bool = ...,
    *,
    one_pass: bool | None = ...,
    batch_invariant: bool = ...,
) -> A: ...
def cross_entropy(
    x: Any,
    target: Any,
    lse_partial: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    *,
    one_pass: bool | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Cross-entropy of logits against class indices, differentiable in x: weight[t] * (lse(x) - x[t]) for each row.

    x: (M, N) or (..., N), N >= 1 classes, of float16, bfloat16 or float32 (on the CPU float64 too), any strides. A
    torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no gradient).
    target: x.shape[:-1], int32 or int64. Rows whose target is ignore_index count for nothing; a target outside
    [0, N) is never read with and makes that row's loss and gradient NaN, with "mean" those of all rows (see set_debug).
    weight: (N) class weights, float16, bfloat16 or float32, or None.
    reduction: "mean" (over the sum of the counted rows' weights; NaN where no row counts, with gradients of zero, as
    torch has it), "sum" or "none".
    inplace_backward: backward writes the gradient over x, which saves the memory of x once more. x must not be used
    afterwards: autograd refuses a backward pass that still needs it. Ignored inside torch.compile.
    one_pass: True makes the gradient along with the loss, which reads x once and holds as much memory as x until
    backward; False makes it in backward, which reads x again; None chooses by size. Only a mean or a sum on a CUDA
    device has the choice, without inplace_backward and batch_invariant and outside torch.compile.
    batch_invariant: as of softmax, for the loss of each row and for its gradient with "none" or "sum"; a mean's
    depends on all rows.
    lse_partial is not supported yet: NotImplementedError.
    Returns the loss, float32 (float64 for float64): a scalar, or one value per row with "none".
    Raises TypeError (dtype), ValueError (shape, reduction), RuntimeError (device, driver, memory).
    lse is kept as maximum and logarithm of the sum apart for backward: dx = dloss * weight[t] * (softmax(x) - 1[t]).
    """
    if lse_partial is not None:
        raise _not_yet("lse_partial", f"pass whole rows of logits, and {_THIRD_IN_TORCH}")
    number = 1 if reduction == "mean" else _number("reduction", reduction, REDUCTIONS)
    if _debug:
        _check_targets(x, target, ignore_index)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        return ops.cross_entropy(
            x, target, weight, ignore_index, number, bool(batch_invariant), bool(inplace_backward), one_pass
        )
    except _FAILURES as error:
        raise ops.explained(error, target=target, weight=weight) from None


@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    return_lse: Literal[False] = ...,
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    *,
    batch_invariant: bool = ...,
) -> Tensor: ...
@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[False] = ...,
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    return_lse: Literal[False] = ...,
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    *,
    batch_invariant: bool = ...,
) -> A: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
) -> tuple[A, A, A]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
) -> tuple[A, A]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[False] = ...,
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
) -> tuple[A, A]: ...
def cross_entropy_fwd(
    x: Any,
    target: Any,
    target_logit: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_dx: bool = False,
    inplace_backward: bool = False,
    *,
    batch_invariant: bool = False,
) -> Any:
    """The loss of each row, without a gradient. Returns loss, (loss, lse), (loss, dx) or (loss, lse, dx).

    loss and lse (the log-sum-exp of each row): float32 (float64 for float64) of shape x.shape[:-1].
    dx: the gradient of the sum of the losses, made in the same pass over x, with x's shape and dtype; with
    inplace_backward it is written over x, and x itself is returned.
    target_logit is not supported yet: NotImplementedError. Other arguments and errors: cross_entropy.
    """
    if target_logit is not None:
        raise _not_yet("target_logit", f"leave it out, and pass {_THIRD_IN_TORCH}")
    if _debug:
        _check_targets(x, target, ignore_index)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        arguments = _detached(x), target, _detached(weight), ignore_index
        if return_dx and inplace_backward:
            (loss, lse), dx = ops.cross_entropy_fwd_dx_(*arguments, bool(batch_invariant)), x
        elif return_dx:
            loss, lse, dx = ops.cross_entropy_fwd_dx(*arguments, bool(batch_invariant))
        elif return_lse:
            return ops.cross_entropy_fwd_lse(*arguments, bool(batch_invariant))
        else:
            return ops.cross_entropy(*arguments, 0, bool(batch_invariant), False, None)
    except _FAILURES as error:
        raise ops.explained(error, target=target, weight=weight) from None
    return (loss, lse, dx) if return_lse else (loss, dx)


@overload
def cross_entropy_bwd(
    x: Tensor,
    target: Tensor,
    dloss: Tensor,
    lse: Tensor,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    inplace_backward: bool = ...,
) -> Tensor: ...
@overload
def cross_entropy_bwd(
    x: A,
    target: Array,
    dloss: Array,
    lse: Array,
    weight: Array | None = ...,
    ignore_index: int = ...,
    inplace_backward: Literal[False] = ...,
) -> A: ...
def cross_entropy_bwd(
    x: Any,
    target: Any,
    dloss: Any,
    lse: Any,
    weight: Any = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> Any:
    """The gradient of the rows' losses: dx = dloss * weight[t] * (softmax(x) - 1[t]), with x's shape and dtype.

    dloss: x.shape[:-1] of any stride, or a single value for all rows; lse: x.shape[:-1] as cross_entropy_fwd gave it;
    both float32 (float64 for float64). With inplace_backward dx is written over x, and x itself is returned.
    A row's bits never depend on other rows. Other arguments and errors: cross_entropy.
    """
    if _debug:
        _check_targets(x, target, ignore_index)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if inplace_backward:
            ops.cross_entropy_bwd_(_detached(x), target, weight, dloss, lse, ignore_index, 0, False)
            return x
        return ops.cross_entropy_bwd(x, target, weight, dloss, lse, ignore_index, 0, False)
    except _FAILURES as error:
        raise ops.explained(error, target=target, dloss=dloss, lse=lse, weight=weight) from None


@overload
def logsumexp(x: Tensor, *, batch_invariant: bool = ...) -> Tensor: ...
@overload
def logsumexp(x: A, *, batch_invariant: bool = ...) -> A: ...
def logsumexp(x: Any, *, batch_invariant: bool = False) -> Any:
    """log(sum exp(x)) over the last dimension, differentiable: the maximum of a row is subtracted first.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU float64 too), any strides. A torch tensor on the
    CPU or a CUDA device, or an object with `__dlpack__`, which gives a result of its own kind and no gradient.
    batch_invariant: as of softmax, for a row's value and its gradient.
    Returns x.shape[:-1], float32 (float64 for float64), whatever x is. A row of -inf gives -inf; one with +inf or NaN
    gives NaN, where torch.logsumexp gives +inf for +inf.
    Raises TypeError (dtype), ValueError (shape), RuntimeError (device, driver, memory).
    Gradient: dx = dlse * exp(x - lse).
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        return ops.logsumexp(x, bool(batch_invariant))
    except _FAILURES as error:
        raise ops.explained(error) from None
