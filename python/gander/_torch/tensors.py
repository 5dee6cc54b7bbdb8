"""What gander asks of tensors that may be traced, transformed or nested."""

from numbers import Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .. import _debug
from .._words import kind, number, shown

# What the operators compute with: 16 bits and float32, and on the CPU float64.
NARROW = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*NARROW, torch.float64)

_DISABLED = torch._C._disabled_torch_function_impl


def overrides(x) -> bool:
    """Whether x handles torch's functions itself: a torch.fx.Proxy, or a subclass with `__torch_function__`.

    dynamo asks at the operators instead.
    """
    if is_dynamo_compiling():
        return False
    own = getattr(type(x), "__torch_function__", _DISABLED)
    return own is not _DISABLED and torch._C._is_torch_function_enabled()


def stands_for_tensor(x) -> bool:
    """Whether x is no tensor, and handles torch's functions itself, as a torch.fx.Proxy does."""
    return not isinstance(x, Tensor) and overrides(x)


def nested(name: str) -> NotImplementedError:
    """The refusal of a nested tensor."""
    return NotImplementedError(
        f"{name} is a nested tensor, expected a dense one; pass each tensor of {name}.unbind()"
    )


def unusable(name: str, value, like: str = "", hint: str = "") -> Exception | None:
    """The refusal of an argument that no kernel gets to see, or None. like: one that is a tensor."""
    if not isinstance(value, Tensor):
        return TypeError(f"{name} is {kind(value)}, expected a torch.Tensor{like and f' as {like}'}{hint}")
    if value.is_nested:
        return nested(name)
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return NotImplementedError(f"{name} has layout {layout}, expected strided; pass {name}.to_dense()")
    if value.is_quantized:
        return TypeError(
            f"{name} is quantized to {dtype_of(value)}, expected a dtype without a scale; pass "
            f"{name}.dequantize()"
        )
    if value.device.type not in ("cpu", "cuda", "meta"):
        return RuntimeError(f"{name} is on {value.device}, expected the CPU or a CUDA device; move it there")
    return None


def statistic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a loss and of statistics of x, by x's dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_no_values(x: Tensor) -> bool:
    """Whether a call with x is recorded: it is compiled, or x is fake or on meta."""
    return is_compiling() or x.is_meta or (type(x) is not Tensor and is_fake(x))


def dtype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


_unsafe_view = torch.ops.aten._unsafe_view.default


def in_shape(y: Tensor, shape) -> Tensor:
    """A new, contiguous result in another shape, as a tensor that is no view.

    An in-place operation on a view has another history than torch's result would have: FSDP2 loses its hook
    there. y must not be saved for backward, because the version of the returned tensor is its own.
    torch.jit.trace would keep the sizes of this call, except of a view.
    """
    return y.view(shape) if torch.jit.is_tracing() else _unsafe_view(y, shape)


def differ(shape, other) -> bool:
    """Whether two shapes differ. What a traced function cannot know yet, its graph asserts."""
    if not is_compiling():
        return shape != other
    if len(shape) != len(other):
        return True
    for m, n in zip(shape, other, strict=True):
        if guard_or_false(m != n):
            return True
        torch._check(m == n)
    return False


def scalar(name: str, value, x: Tensor) -> Tensor:
    """A new 0-dim tensor on x's device, of the dtype that x's statistics have, from a number or a tensor.

    Nothing synchronizes.
    """
    if (refusal := unusable("x", x)) or (isinstance(value, Tensor) and (refusal := unusable(name, value))):
        raise refusal
    dtype = statistic(x.dtype)
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected (); pass {name}.squeeze()")
        if value.requires_grad:
            raise ValueError(f"{name} requires a gradient, but has none, expected a constant; detach it")
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {dtype_of(value)}, expected a real number; convert it")
        if value.device != x.device:
            raise RuntimeError(f"{name} is on {value.device}, expected {x.device} as x; move one of them")
        return value.to(dtype, copy=True)
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is {shown(value)}, expected a number or a 0-dim tensor on the device of x")
    compiling = is_dynamo_compiling()
    if isinstance(value, torch.SymInt) or (
        compiling and isinstance(value, int) and not guard_or_false(abs(value) >= 2**63)
    ):
        return x.new_full((), value, dtype=dtype)
    if isinstance(value, torch.SymFloat) or (compiling and isinstance(value, float)):
        # A graph has a float as an argument only if it takes part in arithmetic, else as a constant.
        return x.detach().new_ones((), dtype=dtype) * value
    return x.new_full((), number(name, value), dtype=dtype)


def check_targets(classes: int, target, ignore_index: int, name: str = "target") -> None:
    """Raises IndexError if an element of target is neither a class nor ignore_index. Targets that are traced
    or transformed have no values yet."""
    if isinstance(target, Tensor):
        if is_compiling() or target.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(target):
            return
        if hasattr(target, "full_tensor"):  # all ranks see all targets, and refuse them together
            target = target.full_tensor()
        if target.dtype == torch.uint8:  # to which torch would convert the numbers that it is compared with
            target = target.long()
    _debug.check_targets(classes, target, ignore_index, name)
