"""torch.nn.functional with gander's operators: softmax, log_softmax, rms_norm, layer_norm and cross_entropy
have torch's signatures and run gander's kernels. Every other name is torch's own function, so that

    import gander.nn.functional as F

replaces `import torch.nn.functional as F`.

What gander does not have, such as gradients of class probabilities, and tensors of other types than
float16, bfloat16, float32 and float64, is computed by torch. For types and devices there is one warning for
each. Second derivatives and forward mode of these functions raise NotImplementedError.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as _torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .._functions import softmax as _softmaxes
from .._functions.arguments import FAILURES, overridden
from .._functions.cross_entropy import cross_entropy as _cross_entropy
from .._functions.layernorm import layernorm
from .._functions.rmsnorm import rmsnorm
from .._torch.kernels import explained
from .._torch.tensors import NARROW, dtype_of, in_shape, stands_for_tensor
from .._words import REFUSALS, check_flags, integer, kind, shortened, shown

__all__ = ["cross_entropy", "layer_norm", "log_softmax", "rms_norm", "softmax"]

_LARGEST = sys.float_info.max
_INDICES = (torch.int32, torch.int64)

# torch's own, also for a program that puts the functions of this module in their places.
_torch_softmax, _torch_rms_norm = _torch.softmax, _torch.rms_norm
_torch_layer_norm, _torch_cross_entropy = _torch.layer_norm, _torch.cross_entropy
_torch_log_softmax = _torch.log_softmax


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})


# ---- What is left to torch ----

_warned: set[tuple[str, str]] = set()


@functools.cache
def _overrides_functions(kind: type) -> bool:
    """Whether a subclass of Tensor handles torch's functions itself, as MaskedTensor does."""
    override = kind.__torch_function__  # type: ignore[attr-defined]
    inherited = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    disabled = torch._C._disabled_torch_function_impl
    return override is not disabled and getattr(override, "__func__", None) is not inherited


def _is_ours(tensor: Any) -> bool:
    """Whether this is a tensor whose functions torch would not hand to anything else."""
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return not tensor.is_nested
    return isinstance(tensor, Tensor) and not tensor.is_nested and not _overrides_functions(kind)


def _unsupported(tensor: Tensor) -> str | None:
    """What gander does not support about a tensor, or None."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "a sparse or quantized tensor"
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        return f"a tensor on {tensor.device.type}"
    if tensor.dtype not in NARROW and (tensor.dtype is not torch.float64 or tensor.is_cuda):
        return f"a {tensor.dtype} tensor on {tensor.device.type}"
    return None


def _warn(function: str, reason: str) -> None:
    if torch.compiler.is_compiling() or (function, reason) in _warned:
        return
    text = f"gander.nn.functional.{function} does not support {reason}; torch's operator computes it"
    warnings.warn(text, stacklevel=4)
    _warned.add((function, reason))


def _serves(function: str, *tensors: Tensor | None) -> bool:
    """Whether gander computes with these tensors. If not, warns about what it does not support."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(_is_ours(tensor) for tensor in given):
        return False
    for tensor in given:
        if (reason := _unsupported(tensor)) is not None:
            _warn(function, reason)
            return False
    return True


_OPTION = (type(None), int, float, str)


def _described(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{name} is {shown(value)}"
    if value.is_nested or value.layout is not torch.strided:
        return f"{name} is {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')}"
    return f"{name} has shape {tuple(value.shape)} of {dtype_of(value)}"


def _by_torch(function: Any, **given: Any) -> Tensor:
    """What torch's function returns. Its refusals rarely name an argument, so they follow what came."""
    try:
        return function(**given)
    except (*FAILURES, IndexError, OverflowError) as error:
        if torch.compiler.is_compiling() or type(error) not in (*REFUSALS, AttributeError, OverflowError):
            raise
        for name, value in given.items():
            optional = value is None and name not in ("input", "target")
            if name in ("input", "target", "weight", "bias") and not (optional or isinstance(value, Tensor)):
                raise TypeError(f"{name} is {kind(value)}, expected a torch.Tensor") from None
            if name == "reduction" and not isinstance(value, str):
                raise TypeError(f"{name} is {shown(value)}, expected 'none', 'mean' or 'sum'") from None
        defaults = inspect.signature(function).parameters
        came = ", ".join(
            _described(name, value)
            for name, value in given.items()
            if name != "_stacklevel"
            and not (isinstance(value, _OPTION) and name in defaults and value == defaults[name].default)
        )
        came += ", expected what torch's function takes"
        if isinstance(error, REFUSALS):
            raise type(error)(f"{came}: {shortened(error)}") from error
        raise TypeError(came) from error


# ---- Softmax ----


def _softmax_over(input: Tensor, dim: int, log: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    function = _softmaxes.log_softmax if log else _softmaxes.softmax
    if input.ndim == 0:
        y = function(input.view(1), dim=dim, dtype=dtype)  # saved for backward, so this copies it
        return y.view(()).clone()
    return function(input, dim=dim, dtype=dtype)


def _softmax_input(input: Tensor, dim: int | None, dtype: torch.dtype | None) -> Tensor | None:
    """What gander's softmax would take, or None for what is left to torch."""
    if type(dim) is not int or not _is_ours(input) or not -max(input.ndim, 1) <= dim < max(input.ndim, 1):
        return None
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return None
    # gander.softmax widens 16-bit tensors without a copy.
    widens = dtype is torch.float32 and input.dtype in (torch.float16, torch.bfloat16)
    x = input if dtype is None or widens else input.to(dtype)
    empty = x.ndim > 0 and x.shape[dim] == 0  # a tensor in torch.jit.trace, which then takes x to have rows
    return None if empty is True or (isinstance(empty, torch.SymBool) and guard_or_false(empty)) else x


def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.nn.functional.softmax. See gander.softmax.

    Args:
        input: Any tensor.
        dim: The dimension. One other than the last is moved to the end and back, which copies.
        _stacklevel: torch's.
        dtype: input is cast to it first.

    Returns:
        A tensor of input's shape.

    Raises:
        TypeError, IndexError, RuntimeError: As torch's.

    Examples:
        >>> gander.nn.functional.softmax(torch.zeros(1, 2), dim=-1)
        tensor([[0.5000, 0.5000]])
    """
    x = _softmax_input(input, dim, dtype)
    if x is not None and _serves("softmax", x):
        return _softmax_over(x, dim, False, dtype)  # type: ignore[arg-type]
    if stands_for_tensor(input):
        return overridden(softmax, locals())
    # torch also says what is wrong with dim, and warns where it chooses one.
    level = integer("_stacklevel", _stacklevel) + 2
    return _by_torch(_torch_softmax, input=input, dim=dim, _stacklevel=level, dtype=dtype)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.nn.functional.log_softmax. See gander.log_softmax.

    Args:
        input: Any tensor.
        dim: The dimension. One other than the last is moved to the end and back, which copies.
        _stacklevel: torch's.
        dtype: input is cast to it first.

    Returns:
        A tensor of input's shape.

    Raises:
        TypeError, IndexError, RuntimeError: As torch's.

    Examples:
        >>> gander.nn.functional.log_softmax(torch.zeros(1, 2), dim=-1)
        tensor([[-0.6931, -0.6931]])
    """
    x = _softmax_input(input, dim, dtype)
    if x is not None and _serves("log_softmax", x):
        return _softmax_over(x, dim, True, dtype)  # type: ignore[arg-type]
    if stands_for_tensor(input):
        return overridden(log_softmax, locals())
    level = integer("_stacklevel", _stacklevel) + 2
    return _by_torch(_torch_log_softmax, input=input, dim=dim, _stacklevel=level, dtype=dtype)


# ---- RMSNorm and LayerNorm ----


def _parameter(x: Tensor, dims: int, parameter: Tensor | None) -> Tensor | None:
    """A weight or bias with `dims` dimensions, of a dtype that goes with x, as a vector."""
    if parameter is None:
        return None
    if (x.dtype is torch.float64) != (parameter.dtype is torch.float64):
        parameter = parameter.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    return parameter if dims == 1 else parameter.flatten()


def _rms_norm_over(x: Tensor, dims: int, weight: Tensor | None, eps: float | None) -> Tensor:
    """RMSNorm over the last `dims` dimensions, whose sizes are those of weight."""
    weight = _parameter(x, dims, weight)
    if dims == 1:
        return rmsnorm(x, weight, eps=eps)
    return in_shape(rmsnorm(x.flatten(x.ndim - dims), weight, eps=eps), x.shape)


def _layer_norm_over(x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last `dims` dimensions, whose sizes are those of weight and bias."""
    weight, bias = _parameter(x, dims, weight), _parameter(x, dims, bias)
    if dims == 1:
        return layernorm(x, weight, bias, eps=eps)
    return in_shape(layernorm(x.flatten(x.ndim - dims), weight, bias, eps=eps), x.shape)


def _fits(input: Tensor, normalized_shape: Any, *parameters: Any) -> bool:
    """Whether the last dimensions of input, and all of the parameters, are those of normalized_shape."""
    if not isinstance(normalized_shape, (list, tuple)) or not _is_ours(input):
        return False
    shape, dims = tuple(normalized_shape), len(normalized_shape)
    try:
        return (
            dims > 0
            and 0 not in shape
            and tuple(input.shape[-dims:]) == shape
            and all(p is None or (_is_ours(p) and tuple(p.shape) == shape) for p in parameters)
        )
    except (RuntimeError, ValueError):  # an array in place of a size has no truth value
        return False


def rms_norm(
    input: Tensor,
    normalized_shape: list[int] | tuple[int, ...] | torch.Size,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """torch.nn.functional.rms_norm. See gander.rmsnorm.

    Args:
        input: Any tensor.
        normalized_shape: The sizes of the last dimensions, over which it is normalized.
        weight: Of that shape, or None.
        eps: Added to the mean of squares. None is the machine epsilon of the dtype that torch computes in,
            which for 16-bit input is float32.

    Returns:
        A tensor of input's shape and dtype.

    Raises:
        TypeError, ValueError, RuntimeError: As torch's.

    Examples:
        >>> gander.nn.functional.rms_norm(torch.tensor([[3.0, 4.0]]), (2,), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    known = eps is None or (type(eps) in (int, float) and 0 <= eps <= _LARGEST)
    if known and _fits(input, normalized_shape, weight) and _serves("rms_norm", input, weight):
        return _rms_norm_over(input, len(normalized_shape), weight, None if eps is None else float(eps))
    if any(map(stands_for_tensor, (input, weight))):
        return overridden(rms_norm, locals())
    return _by_torch(_torch_rms_norm, input=input, normalized_shape=normalized_shape, weight=weight, eps=eps)


def layer_norm(
    input: Tensor,
    normalized_shape: list[int] | tuple[int, ...] | torch.Size,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm. See gander.layernorm.

    Args:
        input: Any tensor.
        normalized_shape: The sizes of the last dimensions, over which it is normalized.
        weight: Of that shape, or None.
        bias: Of that shape, or None.
        eps: Added to the variance.

    Returns:
        A tensor of input's shape and dtype, or float32 under CUDA autocast.

    Raises:
        TypeError, ValueError, RuntimeError: As torch's.

    Examples:
        >>> gander.nn.functional.layer_norm(torch.tensor([[1.0, 3.0]]), (2,), eps=0.0)
        tensor([[-1.,  1.]])
    """
    known = type(eps) in (int, float) and 0 <= eps <= _LARGEST
    if known and _fits(input, normalized_shape, weight, bias) and _serves("layer_norm", input, weight, bias):
        return _layer_norm_over(input, len(normalized_shape), weight, bias, float(eps))
    if any(map(stands_for_tensor, (input, weight, bias))):
        return overridden(layer_norm, locals())
    given = {"normalized_shape": normalized_shape, "weight": weight, "bias": bias, "eps": eps}
    return _by_torch(_torch_layer_norm, input=input, **given)


# ---- Cross-entropy ----


def _reduction(size_average: bool | None, reduce: bool | None) -> str:
    """What torch's old options mean, with torch's warning."""
    for name, value in ("size_average", size_average), ("reduce", reduce):
        if value is not None:
            check_flags(**{name: value})
    if not torch.compiler.is_compiling():
        return torch.nn._reduction.legacy_get_string(size_average, reduce)
    averages, reduces = size_average in (None, True), reduce in (None, True)
    return "none" if not reduces else "mean" if averages else "sum"


def _serves_probabilities(input: Tensor, target: Tensor, ignore_index: int) -> bool:
    """Whether gander computes with class probabilities, which torch tells by their shape."""
    return (
        0 < input.ndim == target.ndim
        and target.is_floating_point()
        and (target.dtype is torch.float64) == (input.dtype is torch.float64)
        and tuple(target.shape) == tuple(input.shape)
        and ignore_index < 0
        and not (target.requires_grad and torch.is_grad_enabled())
    )


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
    """torch.nn.functional.cross_entropy. See gander.cross_entropy.

    A target that is not a class gives NaN, where torch stops. Class probabilities that require a gradient are
    left to torch. (N, C, d1, ...) copies input, and class probabilities.

    Args:
        input: (C), (N, C) or (N, C, d1, ...).
        target: Class indices, of input's shape without C, or class probabilities, of input's shape.
        weight: (C) class weights, or None.
        size_average: torch's deprecated option.
        ignore_index: The target of elements that are ignored.
        reduce: torch's deprecated option.
        reduction: "mean", "sum" or "none".
        label_smoothing: As in gander.cross_entropy.

    Returns:
        The loss, float32 (float64 for float64), where torch's has the dtype of input.

    Raises:
        TypeError, ValueError, RuntimeError: As torch's.

    Examples:
        >>> gander.nn.functional.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        tensor(1.3863)
    """
    if size_average is not None or reduce is not None:
        reduction, size_average, reduce = _reduction(size_average, reduce), None, None
    try:
        if (
            type(label_smoothing) in (float, int)
            and 0.0 <= label_smoothing <= 1.0
            and reduction in ("none", "mean", "sum")
            and _is_ours(input)
            and _is_ours(target)
            and (
                (target.dtype in _INDICES and 0 < input.ndim == target.ndim + 1)
                or _serves_probabilities(input, target, ignore_index)
            )
            and (
                weight is None
                or (_is_ours(weight) and (weight.dtype is torch.float64) == (input.dtype is torch.float64))
            )
        ):
            rows = input.movedim(1, -1) if input.ndim > 2 else input
            soft = target.is_floating_point()
            if rows.shape[-1] != 0 and _serves("cross_entropy", input, target if soft else None, weight):
                return _cross_entropy(
                    rows,
                    target.movedim(1, -1) if soft and target.ndim > 2 else target,
                    weight=weight,
                    ignore_index=ignore_index,
                    reduction=reduction,  # type: ignore[arg-type]
                    label_smoothing=label_smoothing,
                )
    except FAILURES as error:
        if isinstance(reduction, str) and isinstance(label_smoothing, (int, float)):
            raise explained(error, {"x": "input"}, input=input, target=target) from None
        # Else this is Python's error about an array's truth. torch refuses the array.
    if any(map(stands_for_tensor, (input, target, weight))):
        return overridden(cross_entropy, locals())
    given = {"target": target, "weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    return _by_torch(_torch_cross_entropy, input=input, **given, label_smoothing=label_smoothing)
