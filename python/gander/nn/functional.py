"""torch.nn.functional with gander's operators: softmax, rms_norm and cross_entropy have torch's signatures
and run gander's kernels. Every other name is torch's own function, so that

    import gander.nn.functional as F

replaces `import torch.nn.functional as F`.

What gander does not have, such as label smoothing, class probabilities, and tensors of other types than
float16, bfloat16, float32 and float64, is computed by torch. For tensors there is one warning for each kind.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as _torch
from torch import Tensor

from .. import _ops

__all__ = ["cross_entropy", "rms_norm", "softmax"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDICES = (torch.int32, torch.int64)


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})


# ---- What is left to torch ----

_warned: set[tuple[str, str]] = set()


def _reason(*tensors: Tensor | None) -> str | None:
    """Why gander cannot compute with these tensors, or None. The first has the rows."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            return f"a {type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return "a sparse or quantized tensor"
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            return f"a tensor on {tensor.device.type}"
        if tensor.dtype not in _DTYPES and (tensor.dtype is not torch.float64 or tensor.is_cuda):
            return f"a {tensor.dtype} tensor on {tensor.device.type}"
    first = tensors[0]
    return "an empty tensor" if first is not None and first.numel() == 0 else None


def _warn(function: str, reason: str) -> None:
    if (function, reason) in _warned:
        return
    _warned.add((function, reason))
    text = f"gander.nn.functional.{function} does not support {reason}; torch's operator computes it"
    warnings.warn(text, stacklevel=3)


# ---- Softmax ----


def _softmax_over(input: Tensor, dim: int) -> Tensor:
    if input.ndim == 0:
        return _ops.softmax(input.view(1)).view(())
    if dim in (-1, input.ndim - 1):
        return _ops.softmax(input)
    return _ops.softmax(input.movedim(dim, -1)).movedim(-1, dim).contiguous()


def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.nn.functional.softmax. input is cast to dtype first, if one is given.

    A dimension other than the last is moved to the end and back, which copies. See gander.softmax.
    """
    if dim is not None:  # otherwise torch warns that it chooses a dimension
        x = input.to(dtype) if dtype is not None and isinstance(input, Tensor) else input
        reason = _reason(x)
        if reason is None and -max(x.ndim, 1) <= dim < max(x.ndim, 1):
            return _softmax_over(x, dim)
        if reason is not None:
            _warn("softmax", reason)
    return _torch.softmax(input, dim, _stacklevel + 1, dtype)  # also says what is wrong with dim


# ---- RMSNorm ----


def _rms_norm_over(x: Tensor, dims: int, weight: Tensor | None, eps: float | None) -> Tensor:
    """RMSNorm over the last `dims` dimensions, whose sizes are those of weight."""
    if weight is not None and (x.dtype is torch.float64) != (weight.dtype is torch.float64):
        weight = weight.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    if dims == 1:
        return _ops.rmsnorm(x, weight, eps=eps)
    weight = None if weight is None else weight.flatten()
    return _ops.rmsnorm(x.flatten(x.ndim - dims), weight, eps=eps).view(x.shape)


def rms_norm(
    input: Tensor,
    normalized_shape: list[int] | tuple[int, ...] | torch.Size,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """torch.nn.functional.rms_norm: normalizes over the last len(normalized_shape) dimensions.

    eps=None is the machine epsilon of the dtype that torch computes in, which for 16-bit input is float32.
    The result has the dtype of input. See gander.rmsnorm.
    """
    shape, dims = tuple(normalized_shape), len(normalized_shape)
    reason = _reason(input, weight)
    if reason is None:
        fits = dims > 0 and tuple(input.shape[-dims:]) == shape
        if fits and (weight is None or tuple(weight.shape) == shape):
            return _rms_norm_over(input, dims, weight, eps)
    else:
        _warn("rms_norm", reason)
    return _torch.rms_norm(input, normalized_shape, weight, eps)  # also says what is wrong with the shapes


# ---- Cross-entropy ----


def _weighs(weight: Tensor | None, rows: Tensor) -> bool:
    """Whether there is a weight for each class, in float64 if and only if the rows are."""
    if weight is None:
        return True
    wide = weight.dtype is torch.float64
    return weight.shape == rows.shape[-1:] and wide == (rows.dtype is torch.float64)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy. input: (C), (N, C) or (N, C, d1, ...).

    With class indices the loss is float32 (float64 for float64), where torch's has the dtype of input. A
    target that is not a class gives NaN, where torch stops. Label smoothing and class probabilities are
    computed by torch. (N, C, d1, ...) copies input. See gander.cross_entropy.
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    probabilities = isinstance(target, Tensor) and target.is_floating_point()
    if not probabilities and label_smoothing == 0.0:
        reason = _reason(input, weight)
        if reason is None and (not isinstance(target, Tensor) or target.dtype not in _INDICES):
            reason = f"a target of {getattr(target, 'dtype', type(target).__name__)}"
        if reason is None and input.ndim >= 1 and reduction in ("none", "mean", "sum"):
            rows = input.movedim(1, -1) if input.ndim > 2 else input
            if rows.shape[:-1] == target.shape and _weighs(weight, rows):
                return _ops.cross_entropy(
                    rows,
                    target,
                    weight=weight,
                    ignore_index=ignore_index,
                    reduction=reduction,  # type: ignore[arg-type]
                )
        if reason is not None:
            _warn("cross_entropy", reason)
    return _torch.cross_entropy(
        input, target, weight, None, ignore_index, None, reduction, label_smoothing
    )  # also says what is wrong with the shapes
