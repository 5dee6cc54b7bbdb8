"""What gander asks of tensors that may be traced, transformed or nested."""

from numbers import Real

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.parameter import UninitializedTensorMixin

from .._words import kind, number, shown

# What the operators compute with: 16 bits and float32, and on the CPU float64.
NARROW = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*NARROW, torch.float64)


def nested(name: str) -> NotImplementedError:
    """The refusal of a nested tensor."""
    return NotImplementedError(
        f"{name} is a nested tensor, expected a dense one; or call gander.nn.functional, which leaves it to "
        "torch"
    )


def unusable(name: str, value, like: str = "") -> Exception | None:
    """The refusal of an argument that no kernel gets to see, or None. like: one that is a tensor."""
    if not isinstance(value, Tensor):
        return TypeError(f"{name} is {kind(value)}, expected a torch.Tensor{like and f' as {like}'}")
    if isinstance(value, UninitializedTensorMixin):
        return TypeError(f"{name} is {kind(value)}, expected one with a shape; materialize it")
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


def dtype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


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
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
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
