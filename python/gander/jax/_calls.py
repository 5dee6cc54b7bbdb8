"""One call of an operator in a program of XLA. What it takes and gives follows from the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._table import (
    DTYPES,
    OPERATORS,
    TORCH,
    Operand,
    arguments,
    made_sizes,
    operands,
    sizes,
    tensors,
    wanted,
)
from .._table.checks import allowed_dtypes, dtype_refusal, option_refusal, shape_conditions
from ._library import target


class Call(NamedTuple):
    """What a call is, apart from its arrays. Programs are cached by it."""

    name: str  # of TORCH
    given: tuple[str, ...]  # the arguments that are arrays, in the order of the table
    options: tuple[tuple[str, Any], ...]  # the other arguments
    forms: tuple[tuple[str, str], ...] = ()  # results in another form than the table's first, by its letters

    @property
    def operator(self) -> str:
        return TORCH[self.name].operator

    @property
    def first(self) -> str:
        return next(iter(operands(self.name)))

    def values(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """All arguments by name."""
        absent = dict.fromkeys(arguments(self.name))
        return absent | dict(self.options) | dict(zip(self.given, arrays, strict=True))

    def results(self) -> list[str]:
        """The results that the call computes, and after them the outputs that it writes over arguments."""
        return [*wanted(self.name, dict(self.options)), *TORCH[self.name].writes.values()]


def new(name: str, values: Mapping[str, Any], **forms: str) -> tuple[Call, list[Any]]:
    """A call, and its arrays. values: arguments by name. Options that are not given have their defaults.

    It refuses what the table refuses, so that what comes after can rely on shapes.
    """
    given = {tensor: values[tensor] for tensor in tensors(name) if values.get(tensor) is not None}
    defaults = {option.name: option.default for option in OPERATORS[TORCH[name].operator].options}
    options = tuple(
        (argument.name, values.get(argument.name, defaults.get(argument.name)))
        for argument in TORCH[name].arguments
        if argument.kind != "tensor"
    )
    call = Call(name, tuple(given), options, tuple(forms.items()))
    _check(call, call.values([*given.values()]))
    return call, [*given.values()]


def _check(call: Call, values: dict[str, Any]) -> None:
    of, first = operands(call.name), values[call.first]
    for name in call.given:
        array = values[name]
        _check_dtype(call, of[name], name, str(array.dtype), values)
        for fits, message in shape_conditions(call.name, of[name], tuple(array.shape), values):
            if not fits:
                raise ValueError(f"{call.operator}: {message()}")
    for option in OPERATORS[call.operator].options:
        if refusal := option_refusal(option, values.get(option.name), call.first, first.ndim):
            raise ValueError(f"{call.operator}: {refusal}")
    for result in call.results():
        _check_dtype(
            call, of[result], of[result].choice or result, dtype_of(call, of[result], values), values
        )


def _check_dtype(call: Call, operand: Operand, named: str, dtype: str, values: dict[str, Any]) -> None:
    first, like = values[call.first], values.get(operand.like)
    like = str((first if like is None else like).dtype)
    allowed = allowed_dtypes(operand, str(first.dtype) == "float64", like)
    if dtype not in allowed:
        raise TypeError(f"{call.operator}: {dtype_refusal(named, dtype, allowed)}")


def dtype_of(call: Call, result: Operand, values: dict[str, Any]) -> str:
    """The name of a result's dtype."""
    if chosen := values.get(result.choice):
        return str(chosen)
    like, first = values.get(result.like), str(values[call.first].dtype)
    if like is not None:
        return str(like.dtype)
    if made := DTYPES[result.dtype].made:
        return made
    if DTYPES[result.dtype].statistic:
        return "float64" if first == "float64" else "float32"
    return first


def _shape_of(call: Call, result: Operand, values: dict[str, Any]) -> tuple:
    if (like := values.get(result.fits)) is not None:
        return tuple(like.shape)
    letters = dict(call.forms).get(result.name) or made_sizes(call.name, result, values)
    return sizes(letters, tuple(values[call.first].shape))


def shapes(call: Call, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The results of a call. Inside shard_map they vary where the arrays do."""
    of, values, varies = operands(call.name), call.values(arrays), {}
    if (kind := jax.typeof(arrays[0])).manual_axis_type.varying:
        varies = dict(
            manual_axis_type=kind.manual_axis_type,
            sharding=NamedSharding(kind.sharding.mesh, PartitionSpec()),
        )
    return [
        jax.ShapeDtypeStruct(
            _shape_of(call, of[result], values), jnp.dtype(dtype_of(call, of[result], values)), **varies
        )
        for result in call.results()
    ]


def launch(call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Calls the operator on whole arrays, or on what one device has of them."""
    values = call.values(arrays) | TORCH[call.name].fixed
    attributes: dict[str, Any] = {"arguments": " ".join(call.given), "results": " ".join(call.results())}
    for option in OPERATORS[call.operator].options:
        if (value := values[option.name]) != option.default:
            attributes[option.name] = np.float64(value) if option.type == "real" else np.int64(value)
    aliases = {
        call.given.index(argument): call.results().index(output)
        for argument, output in TORCH[call.name].writes.items()
    }
    function = jax.ffi.ffi_call(
        target(call.operator), shapes(call, arrays), input_output_aliases=aliases, vmap_method=None
    )
    return tuple(function(*arrays, **attributes))
