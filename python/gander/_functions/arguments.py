"""Checks of arguments, and their types, that several of the public functions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeVar

from .. import _backend
from .._table import ALGORITHMS
from .._words import integer, kind, number, shown


class Array(Protocol):
    """An array of NumPy, CuPy, JAX or another library that exports arrays through DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


A = TypeVar("A", bound=Array)

# What a backend raises: torch if an operator fails, or Python about an argument that is no tensor.
FAILURES = (AttributeError, RuntimeError, TypeError, ValueError)


AUTO = ALGORITHMS[0]  # Functions compare with `is`: an array's == has no truth value.


_signature = cache(inspect.signature)


def overridden(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Leaves a call to the argument that handles functions itself (`__torch_function__`).

    function: the public function. given: its arguments as the caller gave them, among other names. Those that
    have their defaults are left out, so that traced graphs hold what was written.
    """
    required, options = [], {}
    for name, parameter in _signature(function).parameters.items():
        value, default = given[name], parameter.default
        if default is parameter.empty:
            required.append(value)
        elif type(value) is not type(default) or value != default:
            options[name] = value
    return _backend.hand_over(function, (*required, *options.values()), *required, **options)


def code_of(argument: str, name: Any, names: tuple[str, ...], none: str = "") -> int:
    """The number by which the library knows a name."""
    if not isinstance(name, str) or name not in names:
        *others, last = map(repr, names)
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{argument} is {shown(name)}, expected {none}{listed}")
    return names.index(name)


def check_targets(ops: Any, classes: Any, target: Any, ignore_index: int) -> None:
    """classes: a tensor whose last dimension is that of the classes, or their number."""
    shape = (classes,) if isinstance(classes, int) else getattr(classes, "shape", ())
    integer("ignore_index", ignore_index)
    if shape and hasattr(target, "dtype"):  # else the operator refuses it
        ops.check_targets(shape[-1], target, ignore_index)


def refuse_label_smoothing(value: Any, where: str) -> None:
    """Refuses label smoothing where there is none yet."""
    if number("label_smoothing", value):
        raise NotImplementedError(
            f"label_smoothing is {shown(value)}, expected 0: it is not supported {where}; leave it out, or "
            "use cross_entropy"
        )


def check_out(ops: Any, name: str, x: Any, out: Any, out_dtype: Any = None) -> None:
    """Refuses an out that a function cannot write its result to, which has x's shape."""
    if not ops.is_ours(x, out):
        raise TypeError(f"{name} is {kind(out)}, expected {kind(x)} as x")
    if out.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(out.shape)}, expected {tuple(x.shape)} as x")
    if out_dtype is not None and ops.differs(out, out_dtype):
        raise TypeError(
            f"{name} has dtype {out.dtype}, expected out_dtype = {out_dtype}; leave one of them out"
        )
