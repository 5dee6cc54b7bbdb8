"""What gander._functions asks of the backend that serves torch's tensors.

This module also has a function for each operator of torch.ops.gander (fast.py).
"""
# ruff: noqa: F401 - functions that are imported are asked for too

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from .._native import library
from .._table import TORCH
from . import fast
from .cross_entropy_outputs import cross_entropy_outputs
from .fast import status as fast_path
from .kernels import explained
from .linear_cross_entropy import linear_cross_entropy
from .linear_token_statistics import linear_token_statistics
from .lse_partial import with_lse_partial, with_target_logit
from .tensors import DTYPES, check_targets, scalar, unusable
from .writes import refuse_inference

globals().update({name: fast.operator(name) for name in TORCH})


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def dtype(value: Any, argument: str) -> Any:
    """A dtype or None, also given as NumPy's or by its name, as torch's."""
    if value is None or (isinstance(value, torch.dtype) and value in DTYPES):
        return value
    return getattr(torch, library.dtype_name(value, argument))


def converted(x: Tensor, to: Any) -> Tensor:
    return x.to(dtype(to, "dtype"))


def differs(x: Any, other: Any) -> bool:
    """Whether a dtype is another one than x's."""
    return other != x.dtype


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def is_ours(x: Any, other: Any) -> bool:
    """Whether another argument is of x's library."""
    return hasattr(other, "shape")


def ones_like(x: Any) -> Any:
    return torch.ones_like(detached(x))


def empty(x: Any, shape: tuple, dtype: Any) -> Any:
    """A new tensor on x's device."""
    return x.new_empty(shape, dtype=dtype)


def check_writable(**tensors: Any) -> None:
    """Refuses tensors that torch would not write to."""
    for name, tensor in tensors.items():
        if tensor is not None:
            refuse_inference(name, tensor)


def may_share_memory(x: Any, out: Any) -> bool:
    """Whether writing out may change x. True also for tensors whose addresses are not known: while they are
    traced or transformed."""
    known = type(x) in (Tensor, Parameter) and type(out) is Tensor
    if not known or is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    a, b = x.untyped_storage(), out.untyped_storage()
    return a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()


def rows(x: Any, dims: list[int]) -> Any:
    """x with these dimensions at its end, as one, which copies later."""
    if not x.shape:
        return x.reshape(1)
    if len(dims) == 1:
        return x.movedim(dims[0], -1)
    return x.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))


def turned(x: Any) -> Any:
    """x with the third last and the second last dimension exchanged."""
    return x.transpose(-3, -2)


def unsqueezed(x: Any, dims: list[int]) -> Any:
    """x with new dimensions of size 1, in ascending order."""
    for dim in dims:
        x = x.unsqueeze(dim)
    return x


def moved_back(y: Any, dim: int) -> Any:
    """A result, whose last dimension goes back to dim. It is a copy also where a view would be contiguous: y
    is saved for backward, so the caller may not write to it."""
    return y.movedim(-1, dim).clone(memory_format=torch.contiguous_format)


def cast(x: Any, to: Any) -> tuple[Any, Any]:
    """x, and the dtype of the result. torch casts x first. But the kernels take 16-bit x for a result in
    float32 as it is, because they compute in float32 anyway."""
    to = dtype(to, "dtype")
    if to != torch.float32 or x.dtype not in (torch.float16, torch.bfloat16):
        x = x.to(to)
    return x, to
