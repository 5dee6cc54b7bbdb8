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


def check_targets(ops: Any, classes: Any, target: Any, ignore_index: int, name: str = "target") -> None:
    """classes: a tensor whose last dimension is that of the classes, or their number. name: of target."""
    shape = (classes,) if isinstance(classes, int) else getattr(classes, "shape", ())
    integer("ignore_index", ignore_index)
    if shape and hasattr(target, "dtype"):  # else the operator refuses it
        ops.check_targets(shape[-1], target, ignore_index, name)


# The defaults of a loss's options. Functions compare with `is`: most calls have no options.
ZERO, ONE = 0.0, 1.0


def loss_options(
    label_smoothing: Any, z_loss: Any, scale: Any, softcap: Any, temperature: Any
) -> dict[str, float]:
    """The options of a row's loss that are not the operators' defaults."""
    if softcap is not None and not number("softcap", softcap, "None or "):
        raise ValueError(f"softcap is {shown(softcap)}, expected more than 0, or None")
    options = {
        "label_smoothing": number("label_smoothing", label_smoothing),
        "z_loss": number("z_loss", z_loss),
        "scale": number("scale", scale),
        "softcap": 0.0 if softcap is None else number("softcap", softcap),
        "temperature": number("temperature", temperature),
    }
    neutral = {"scale": 1.0, "temperature": 1.0}
    return {name: value for name, value in options.items() if value != neutral.get(name, 0.0)}


def refuse_loss_options(options: dict[str, float], where: str) -> None:
    """Refuses options of a loss where there are none yet."""
    for name, value in options.items():
        neutral = {"scale": 1, "softcap": None, "temperature": 1}.get(name, 0)
        raise NotImplementedError(
            f"{name} is {shown(value)}, expected {neutral}: it is not supported {where}; leave it out, or "
            "use cross_entropy"
        )


def refuse_z_loss(options: dict[str, float], weight: str) -> None:
    """Refuses a z-loss in a mean with class weights, by the name of their argument."""
    if "z_loss" in options:
        raise NotImplementedError(
            f"z_loss is {options['z_loss']} with {weight} and reduction 'mean', expected 0: the mean of "
            "losses is over weights, that of z-losses over rows; use reduction 'sum', or leave one out"
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
