"""What gander._functions asks of the backend that serves torch's tensors.

This module also has a function for each operator of torch.ops.gander (operators_gen.py).
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from .. import _debug
from .._native import library
from . import fast
from .kernels import explained
from .linear_cross_entropy import linear_cross_entropy
from .operators_gen import *  # noqa: F403
from .tensors import differ, nested, scalar

__all__ = [
    "cast",
    "check_targets",
    "converted",
    "detached",
    "differ",
    "differs",
    "dtype",
    "empty",
    "explained",
    "fast_path",
    "is_ours",
    "linear_cross_entropy",
    "may_share_memory",
    "nested",
    "ones_like",
    "rows",
    "scalar",
    "with_lse_partial",
    "with_target_logit",
]


def fast_path() -> bool | str:
    """True, or why the fast path is off. The first call may turn it off."""
    return fast.status()


def with_lse_partial(*arguments: Any) -> Tensor:
    from . import lse_partial  # it imports dynamo, which takes as long as torch

    return lse_partial.with_lse_partial(*arguments)


def with_target_logit(*arguments: Any) -> tuple[Tensor, Tensor]:
    from . import lse_partial

    return lse_partial.with_target_logit(*arguments)


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def dtype(value: Any, argument: str) -> Any:
    """A dtype or None, also given as NumPy's or by its name, as torch's."""
    if value is None or isinstance(value, torch.dtype):
        return value
    return getattr(torch, library.dtype_name(value, argument))


def converted(x: Tensor, to: Any) -> Tensor:
    return x.to(dtype(to, "dtype"))


def differs(x: Any, other: Any, argument: str) -> bool:
    """Whether a dtype is another one than x's."""
    return dtype(other, argument) != x.dtype


def is_ours(x: Any, other: Any) -> bool:
    """Whether another argument is of x's library."""
    return hasattr(other, "shape")


def check_residual(x: Any, residual: Any) -> None:
    """Refuses what is no residual of x."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual is a {type(residual).__name__}, expected a torch.Tensor, like x")
    if residual.is_nested:
        raise nested("residual")
    if differ(residual.shape, x.shape):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} as x; expand it"
        )


def ones_like(x: Any) -> Any:
    return torch.ones_like(detached(x))


def empty(x: Any, shape: tuple, dtype: Any) -> Any:
    """A new tensor on x's device."""
    return x.new_empty(shape, dtype=dtype)


def may_share_memory(x: Any, out: Any) -> bool:
    """Whether writing out may change x. True also for tensors whose addresses are not known: while they are
    traced or transformed."""
    known = type(x) in (Tensor, Parameter) and type(out) is Tensor
    if not known or is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    a, b = x.untyped_storage(), out.untyped_storage()
    return a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()


def rows(x: Any, dim: int, function: str) -> Any:
    """x with dimension dim at the end, which copies later."""
    return x.movedim(dim, -1)


def cast(x: Any, to: Any) -> tuple[Any, Any]:
    """x, and the dtype of the result. torch casts x first. But the kernels take 16-bit x for a result in
    float32 as it is, because they compute in float32 anyway."""
    to = dtype(to, "dtype")
    if to != torch.float32 or x.dtype not in (torch.float16, torch.bfloat16):
        x = x.to(to)
    return x, to


def check_targets(classes: int, target: Any, ignore_index: int) -> None:
    """Raises IndexError if an element of target is neither a class nor ignore_index. Targets that are traced
    or transformed have no values yet."""
    if isinstance(target, Tensor):
        if is_compiling() or target.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(target):
            return
        if hasattr(target, "full_tensor"):  # all ranks see all targets, and refuse them together
            target = target.full_tensor()
    _debug.check_targets(classes, target, ignore_index)


def is_compiled() -> bool:
    """Whether errors are raised by the tracer, which then names its own arguments."""
    return is_compiling()
