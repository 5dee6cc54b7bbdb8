"""What the modules' constructors and forwards refuse."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .._functions.arguments import code_of, loss_options
from .._functions.cross_entropy_rows import cross_entropy_fwd
from .._table import REDUCTIONS
from .._torch.tensors import DTYPES, dtype_of, nested, unusable
from .._words import check_flags, integer, kind, number, shortened, shown

NAMES = {"x": "input"}  # what callers of modules call an argument of functions


def check_weight(weight: Any, name: str = "weight") -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} is {kind(weight)}, expected a torch.Tensor or None")
    if refusal := unusable(name, weight):
        raise refusal
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype_of(weight)}, expected float16, bfloat16, float32 or float64; convert it"
        )


def check_factory(device: Any, dtype: Any, **flags: Any) -> None:
    """Refuses arguments with which torch's constructors would make no parameter."""
    check_flags(**flags)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else shown(dtype)
        raise TypeError(
            f"dtype is {name}, expected torch.float16, torch.bfloat16, torch.float32 or torch.float64"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise type(error)(
            f"device is {shown(device)}, expected a device that torch has here: {shortened(error)}"
        ) from None


def check_shape(shape: Any) -> None:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    expected = "one or more integers of 1 or more"
    if not sizes or not all(
        isinstance(size, Integral) and not isinstance(size, bool) and 1 <= size < 2**63 for size in sizes
    ):
        raise ValueError(f"normalized_shape is {shown(shape)}, expected {expected}")


def check_eps(eps: Any, or_none: str = "") -> None:
    if not 0 <= number("eps", eps, or_none) < math.inf:
        raise ValueError(f"eps is {eps}, expected {or_none}a finite number of 0 or more")


def check_loss_options(**options: Any) -> None:
    """Refuses options of a row's loss that the operator refuses, by a call without rows."""
    if loss_options(**options):
        rows = torch.empty(0, 1, device="cpu")
        cross_entropy_fwd(rows, torch.empty(0, dtype=torch.int64, device="cpu"), **options)


def check_loss(reduction: Any, ignore_index: Any) -> None:
    code_of("reduction", reduction, REDUCTIONS)
    integer("ignore_index", ignore_index)


def check_size(name: str, size: Any) -> None:
    if integer(name, size) < 0:
        raise ValueError(f"{name} is {size}, expected 0 or more")


def check_nested(name: str, x: Any) -> None:
    if isinstance(x, Tensor) and x.is_nested:  # whose shape cannot be asked for
        raise nested(name)


def check_rows(name: str, x: Any, shape: tuple[int, ...]) -> None:
    check_nested(name, x)
    if tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected last dimensions {shape}: normalized_shape"
        )


OURS = ("remember", "_memories")  # attributes that torch's modules do not have


def scriptable(module: nn.Module, ours: type[nn.Module], theirs: type[nn.Module]) -> nn.Module:
    """What torch.jit.script compiles in place of a module of ours: torch's own, which shares its parameters,
    buffers and hooks. A subclass with a forward of its own stays what it is."""
    if type(module).forward is not ours.forward:
        return module
    twin = theirs.__new__(theirs)
    twin.__dict__.update((name, value) for name, value in vars(module).items() if name not in OURS)
    return twin
