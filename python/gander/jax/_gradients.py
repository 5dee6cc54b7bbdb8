"""Calls of operators with gradients, from the table of operators.

A call that is differentiated also asks for what backward reads, and backward calls the gradient operator for
those gradients that are wanted. Arguments and operators that have no gradient refuse to be differentiated:
JAX would take a missing gradient for zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from .._table import (
    IF_SERVED,
    TORCH,
    arguments,
    demand,
    demanded_for_backward,
    differentiable,
    operands,
    upstream,
)
from ._calls import Call, new
from ._running import run
from ._sharding import alike


def apply(name: str, values: Mapping[str, Any], **forms: str) -> dict[str, Any]:
    """Calls an operator of TORCH on arguments by name. Returns the results that it computes, by name.

    forms: the letters of results that are wanted in another form than the table's first.
    """
    call, arrays = new(name, values, **forms)
    return dict(zip(call.results(), _apply(call, alike(arrays)), strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(call: Call, arrays: list[Any]) -> tuple[Any, ...]:
    return run(call, *arrays)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needs:
    """The arguments whose gradients are wanted: a residual that is no array."""

    arguments: frozenset[str]


def _forward(call: Call, primals: list[Any]) -> tuple[Any, Any]:
    values = call.values([primal.value for primal in primals])
    needs = frozenset(name for name, primal in zip(call.given, primals, strict=True) if primal.perturbed)
    _refuse(call, needs, values)
    operator = TORCH[call.name]
    asked = {
        demand(result): True
        for result, argument in demanded_for_backward(call.name).items()
        if result in operator.on_demand and (not argument or values[argument] is not None)
    }
    more = call._replace(options=tuple((name, asked.get(name, value)) for name, value in call.options))
    # Not run() itself, so that a second derivative is refused in words.
    results = dict(zip(more.results(), _apply(more, [primal.value for primal in primals]), strict=True))
    known = values | results
    read = [known[saved.result if saved.result in results else saved.argument] for saved in operator.saved]
    # A gradient that backward does not compute from an argument still has its shape and dtype.
    like = {name: jnp.zeros((0,), values[name].dtype) for name in needs}
    return tuple(results[result] for result in call.results()), (read, like, _Needs(needs))


def _refuse(call: Call, needs: frozenset[str], values: dict[str, Any]) -> None:
    if not TORCH[call.name].backward:
        raise NotImplementedError(
            f"gander: {call.operator} has no gradient: second derivatives are not supported; use JAX's "
            "operations where a gradient is differentiated"
        )
    for name in sorted(needs.difference(differentiable(call.name))):
        raise NotImplementedError(
            f"gander: a gradient of {name} is wanted, but {call.operator} has none for it, expected a "
            f"constant; pass jax.lax.stop_gradient({name})"
        )


def _backward(call: Call, residuals: Any, gradients: tuple[Any, ...]) -> tuple[list[Any]]:
    read, like, needs = residuals
    forward, name = TORCH[call.name], TORCH[call.name].backward
    backward, of = TORCH[name], operands(name)
    heads = upstream(name)
    came = dict(zip(call.results(), gradients, strict=True))
    if all(isinstance(gradient, SymbolicZero) for gradient in came.values()):
        return ([None] * len(call.given),)
    for result, gradient in came.items():
        if result not in heads and not isinstance(gradient, SymbolicZero) and gradient.dtype != float0:
            raise NotImplementedError(
                f"gander: a gradient through {result} of {call.operator} is wanted, but it has none; pass it "
                "through jax.lax.stop_gradient"
            )
    values: dict[str, Any] = {}
    for result, argument in heads.items():
        gradient = came.get(result)
        if isinstance(gradient, SymbolicZero):
            gradient = None if of[argument].optional else jnp.zeros(gradient.shape, gradient.dtype)
        values[argument] = gradient
    taken = [saved.result or saved.argument for saved in forward.saved]
    names = [argument for argument in arguments(name) if argument in of and argument not in heads.values()]
    values |= zip(names, read, strict=True)
    assert len(names) == len(taken)
    fixed = {key: bool(value) for key, value in forward.fixed.items() if key in arguments(name)}
    values |= dict(call.options) | fixed
    if values.get("algorithm"):  # forward's, if it supports these rows in backward too
        values["algorithm"] |= IF_SERVED
    results = {}
    for result in backward.results:
        source = of[result].gradient
        wanted = source in needs.arguments and not (of[result].needs and values.get(of[result].needs) is None)
        results[result] = source if wanted else None
        values[demand(result)] = wanted
        if of[result].choice and source in like:
            values[of[result].choice] = str(like[source].dtype)
    made = apply(name, values)
    by_argument = {source: made[result] for result, source in results.items() if source and result in made}
    return ([by_argument.get(argument) for argument in call.given],)


_apply.defvjp(_forward, _backward, symbolic_zeros=True)
