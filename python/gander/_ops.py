"""gander's public functions. They take PyTorch tensors (_pytorch.py) or any objects with `__dlpack__` (_dlpack.py)."""

from . import _dlpack
from ._library import how as _how

_Tensor = ()  # torch.Tensor as soon as torch is there: isinstance(x, ()) is False
_torch = None
_debug = False

_FAILURES = (AttributeError, RuntimeError)  # what torch raises for a failed op, or for an argument that is no tensor
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def use_torch(module) -> None:
    """Called by _pytorch.py when its operators are registered."""
    global _Tensor, _torch
    _Tensor, _torch = module.Tensor, module


def set_debug(enabled: bool) -> None:
    """Makes the cross-entropy functions check every target, and raise IndexError where one is out of range.

    The check waits for the GPU, so it is off by default: a row whose target is out of range then gets a loss and a
    gradient of NaN. Calls inside a torch.compile graph are not checked.
    """
    global _debug
    _debug = bool(enabled)


def _check_targets(x, target, ignore_index) -> None:
    if _torch is not None and _torch.is_compiling():
        return
    classes = x.shape[-1]
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        raise IndexError(
            f"target has the class {int(target[bad][0])}, expected 0 to {classes - 1}, or ignore_index = {ignore_index}"
        )


def _not_yet(argument: str, instead: str):
    return NotImplementedError(f"{argument} is not supported yet; {instead}")


def _check_rmsnorm(bias, residual, residual_dtype, weight_offset) -> None:
    if bias is not None:
        raise _not_yet("bias", "add it to the result")
    if residual is not None or residual_dtype is not None:
        raise _not_yet("residual", "add it to x before the call")
    if weight_offset:
        raise _not_yet("weight_offset", "add it to weight before the call")


def softmax(x, *, algorithm="auto", batch_invariant=False):
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
    if isinstance(x, _Tensor):
        try:
            if algorithm == "auto" and not batch_invariant:
                return _torch.softmax(x)
            return _torch.softmax_by(x, *_how(algorithm, batch_invariant))
        except _FAILURES as error:
            raise _torch.explained(error) from None
    return _dlpack.softmax_fwd(x, *_how(algorithm, batch_invariant))


def softmax_fwd(x, *, algorithm="auto", batch_invariant=False):
    """softmax(x) without a gradient."""
    if isinstance(x, _Tensor):
        try:
            if algorithm == "auto" and not batch_invariant:
                return _torch.softmax_fwd(x)
            return _torch.softmax_fwd_by(x, *_how(algorithm, batch_invariant))
        except _FAILURES as error:
            raise _torch.explained(error) from None
    return _dlpack.softmax_fwd(x, *_how(algorithm, batch_invariant))


def softmax_bwd(dy, y, *, algorithm="auto", batch_invariant=False):
    """The gradient of softmax: dx = (dy - sum(dy * y)) * y for each row.

    dy, y: (..., N) of one shape, dtype and device; y is what the forward call returned. Returns dx, like dy.
    algorithm: one of gander.algorithms("softmax_bwd"). It, batch_invariant and errors are those of softmax.
    """
    if isinstance(dy, _Tensor):
        try:
            if algorithm == "auto" and not batch_invariant:
                return _torch.softmax_bwd(dy, y)
            return _torch.softmax_bwd_by(dy, y, *_how(algorithm, batch_invariant))
        except _FAILURES as error:
            raise _torch.explained(error, y=y) from None
    return _dlpack.softmax_bwd(dy, y, *_how(algorithm, batch_invariant))


def rmsnorm(
    x,
    weight=None,
    bias=None,
    residual=None,
    out_dtype=None,
    residual_dtype=None,
    eps=1e-6,
    prenorm=False,
    weight_offset=0.0,
    *,
    algorithm="auto",
    batch_invariant=False,
):
    """RMSNorm over the last dimension, differentiable in x and weight: x / sqrt(mean(x^2) + eps) * weight.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU float64 too), any strides. A torch tensor on the
    CPU or a CUDA device, or an object with `__dlpack__`, which gives a result of its own kind and no gradient.
    weight: (N), of any of these dtypes whatever x is (float64 exactly when x is), or None.
    out_dtype: the dtype of the result, x's by default. eps: added to the mean of squares.
    bias, residual, residual_dtype, prenorm and weight_offset are not supported yet: NotImplementedError.
    algorithm, batch_invariant: as of softmax, with gander.algorithms("rmsnorm") and ("rmsnorm_bwd"); the gradient of
    weight is a sum over rows, and its bits depend on them all.
    Returns a compact tensor of x's shape. Everything is computed in float32 (float64 for float64).
    Raises TypeError (dtype), ValueError (shape, algorithm's name), RuntimeError (device, driver, memory).
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if bias is not None or residual is not None or residual_dtype is not None or weight_offset:
        _check_rmsnorm(bias, residual, residual_dtype, weight_offset)
    if prenorm:
        raise _not_yet("prenorm", "add the residual to x before the call")
    if isinstance(x, _Tensor):
        try:
            if algorithm == "auto" and not batch_invariant:
                return _torch.rmsnorm(x, weight, out_dtype, eps)
            return _torch.rmsnorm_by(x, weight, out_dtype, eps, *_how(algorithm, batch_invariant))
        except _FAILURES as error:
            raise _torch.explained(error, weight=weight) from None
    return _dlpack.rmsnorm_fwd(x, weight, out_dtype, eps, False, *_how(algorithm, batch_invariant))[0]


def rmsnorm_fwd(
    x,
    weight=None,
    bias=None,
    residual=None,
    out_dtype=None,
    residual_dtype=None,
    eps=1e-6,
    store_rstd=False,
    weight_offset=0.0,
    *,
    algorithm="auto",
    batch_invariant=False,
):
    """rmsnorm without a gradient. Returns (out, residual_out, rstd).

    residual_out is x itself. rstd = 1 / sqrt(mean(x^2) + eps), float32 (float64 for float64) of shape x.shape[:-1],
    with store_rstd, else None. Arguments and errors are those of rmsnorm.
    """
    _check_rmsnorm(bias, residual, residual_dtype, weight_offset)
    if isinstance(x, _Tensor):
        try:
            if algorithm == "auto" and not batch_invariant:
                out, rstd = _torch.rmsnorm_fwd(x, weight, out_dtype, eps, store_rstd)
            else:
                how = _how(algorithm, batch_invariant)
                out, rstd = _torch.rmsnorm_fwd_by(x, weight, out_dtype, eps, store_rstd, *how)
        except _FAILURES as error:
            raise _torch.explained(error, weight=weight) from None
    else:
        how = _how(algorithm, batch_invariant)
        out, rstd = _dlpack.rmsnorm_fwd(x, weight, out_dtype, eps, store_rstd, *how)
    return out, x, rstd


def rmsnorm_bwd(
    x,
    weight,
    dout,
    rstd,
    dresidual_out=None,
    has_bias=False,
    has_residual=False,
    weight_offset=0.0,
    *,
    algorithm="auto",
    batch_invariant=False,
):
    """The gradient of rmsnorm. Returns (dx, dw, db, dresidual); db and dresidual are None, dw is without a weight.

    With h = x * rstd and g = dout * weight: dx = (g - h * mean(g * h)) * rstd, dw = sum over rows of dout * h.
    x, weight, rstd: as in the forward call; dout: x's shape, any of the dtypes. dx has the dtype of x, dw that of
    weight; dw is accumulated in float32 or wider in a fixed order, so its bits do not change from run to run.
    algorithm: one of gander.algorithms("rmsnorm_bwd"). It, batch_invariant and errors are those of rmsnorm.
    """
    if has_bias:
        raise _not_yet("has_bias", "the gradient of a bias is dout summed over its rows")
    if has_residual or dresidual_out is not None:
        raise _not_yet("dresidual_out", "add it to dx")
    _check_rmsnorm(None, None, None, weight_offset)
    if isinstance(x, _Tensor):
        try:
            if algorithm == "auto" and not batch_invariant:
                dx, dw = _torch.rmsnorm_bwd(x, weight, dout, rstd)
            else:
                dx, dw = _torch.rmsnorm_bwd_by(x, weight, dout, rstd, *_how(algorithm, batch_invariant))
        except _FAILURES as error:
            raise _torch.explained(error, weight=weight, dout=dout, rstd=rstd) from None
    else:
        dx, dw = _dlpack.rmsnorm_bwd(x, weight, dout, rstd, *_how(algorithm, batch_invariant))
    return dx, dw, None, None


def cross_entropy(
    x,
    target,
    lse_partial=None,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    inplace_backward=False,
    *,
    one_pass=None,
    batch_invariant=False,
):
    """Cross-entropy of logits against class indices, differentiable in x: weight[t] * (lse(x) - x[t]) for each row.

    x: (M, N) or (..., N), N >= 1 classes, of float16, bfloat16 or float32 (on the CPU float64 too), any strides. A
    torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no gradient).
    target: x.shape[:-1], int32 or int64. Rows whose target is ignore_index count for nothing; a target outside
    [0, N) is never read with and makes that row's loss and gradient NaN (see set_debug).
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
        raise _not_yet("lse_partial", "pass whole rows of logits")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    if _debug:
        _check_targets(x, target, ignore_index)
    if isinstance(x, _Tensor):
        try:
            if not batch_invariant:
                return _torch.cross_entropy(
                    x, target, weight, ignore_index, _REDUCTIONS[reduction], inplace_backward, one_pass
                )
            return _torch.cross_entropy_invariant(
                x, target, weight, ignore_index, _REDUCTIONS[reduction], inplace_backward
            )
        except _FAILURES as error:
            raise _torch.explained(error, target=target, weight=weight) from None
    return _dlpack.cross_entropy(
        x, target, weight, ignore_index, _REDUCTIONS[reduction], batch_invariant=bool(batch_invariant)
    )[0]


def cross_entropy_fwd(
    x,
    target,
    target_logit=None,
    weight=None,
    ignore_index=-100,
    return_lse=False,
    return_dx=False,
    inplace_backward=False,
    *,
    batch_invariant=False,
):
    """The loss of each row, without a gradient. Returns loss, (loss, lse), (loss, dx) or (loss, lse, dx).

    loss and lse (the log-sum-exp of each row): float32 (float64 for float64) of shape x.shape[:-1].
    dx: the gradient of the sum of the losses, made in the same pass over x, with x's shape and dtype; with
    inplace_backward it is written over x, and x itself is returned.
    target_logit is not supported yet: NotImplementedError. Other arguments and errors: cross_entropy.
    """
    if target_logit is not None:
        raise _not_yet("target_logit", "leave it out")
    if _debug:
        _check_targets(x, target, ignore_index)
    if isinstance(x, _Tensor):
        try:
            forward = _torch.cross_entropy_fwd_invariant if batch_invariant else _torch.cross_entropy_fwd
            loss, lse, dx = forward(x, target, weight, ignore_index, return_lse, return_dx, inplace_backward)
        except _FAILURES as error:
            raise _torch.explained(error, target=target, weight=weight) from None
    else:
        if return_dx and inplace_backward:
            raise _not_yet("inplace_backward", "it is for torch tensors only")
        loss, lse, dx = _dlpack.cross_entropy(
            x, target, weight, ignore_index, 0, return_lse, return_dx, bool(batch_invariant)
        )
    extra = (lse,) * bool(return_lse) + (dx,) * bool(return_dx)
    return (loss, *extra) if extra else loss


def cross_entropy_bwd(x, target, dloss, lse, weight=None, ignore_index=-100, inplace_backward=False):
    """The gradient of the rows' losses: dx = dloss * weight[t] * (softmax(x) - 1[t]), with x's shape and dtype.

    dloss: x.shape[:-1] of any stride, or a single value for all rows; lse: x.shape[:-1] as cross_entropy_fwd gave it;
    both float32 (float64 for float64). With inplace_backward dx is written over x, and x itself is returned.
    A row's bits never depend on other rows. Other arguments and errors: cross_entropy.
    """
    if _debug:
        _check_targets(x, target, ignore_index)
    if isinstance(x, _Tensor):
        try:
            return _torch.cross_entropy_bwd(x, target, dloss, lse, weight, ignore_index, inplace_backward)
        except _FAILURES as error:
            raise _torch.explained(error, target=target, dloss=dloss, lse=lse, weight=weight) from None
    if inplace_backward:
        raise _not_yet("inplace_backward", "it is for torch tensors only")
    return _dlpack.cross_entropy_bwd(x, target, dloss, lse, weight, ignore_index)
