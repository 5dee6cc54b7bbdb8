"""vmap of a call: the batch becomes a leading dimension of the rows, if every result has its rows apart.

A result that sums over rows (dw) would mix the batch. A weight of a batch would differ from row to row, and a
batch of weights (B, N) could pass for the weights of heads (H, N). Such calls run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._table import SHAPES, operands
from ._calls import Call

_HEADS = "heads", "other_heads"  # rules of operands whose sequences lie before tokens and heads

_PER_SEQUENCE = "sequences", "boundaries"  # of operands whose elements count the sequences


def _before(call: Call, name: str, shape: tuple, first: tuple) -> int | None:
    """How many dimensions of an operand, or of a result, lie before those of the rows. None: it has no rows.

    first: the shape of the first operand.
    """
    operand = operands(call.name)[name]
    letters = dict(call.forms).get(name) or SHAPES[operand.shape].forms[0].sizes
    if operand.shape in _HEADS:
        return 0
    if "L" not in letters:
        return None
    if SHAPES[operand.shape].layout == "parts" and len(shape) == len(first):
        return 1  # maxima and sums come before the rows
    return letters.index("L")


def folded(call: Call, size: int, batched: Sequence[bool], arrays: Sequence[Any]) -> list[Any] | None:
    """The arrays of a single call that computes the whole batch, or None if its results would differ.

    What is batched has the batch in its first dimension.
    """
    of = operands(call.name)
    samples = [tuple(a.shape[1:] if b else a.shape) for a, b in zip(arrays, batched, strict=True)]
    first = samples[0]
    if any(_before(call, result, first, first) is None for result in call.results()):
        return None
    if any(of[name].shape in _PER_SEQUENCE for name in call.given):
        return None
    given = []
    for name, array, is_batched, shape in zip(call.given, arrays, batched, samples, strict=True):
        layout, before = SHAPES[of[name].shape].layout, _before(call, name, shape, first)
        if layout == "broadcast" and is_batched:
            array = array.reshape(size, *[1] * (len(first) - len(shape)), *shape)
        elif layout == "broadcast" or (before is None and not is_batched):
            if layout == "tables" and len(shape) > 2:  # a table for each sequence of a sample
                return None
        elif before is None:
            return None
        else:
            array = array if is_batched else jnp.broadcast_to(array, (size, *shape))
            if not before and layout == "regular" and len(shape) < len(first) - 1:  # one for all rows
                if math.prod(shape) != 1:
                    return None
                array = array.reshape(size, *[1] * (len(first) - 1))
                array = jnp.broadcast_to(array, (size, *first[:-1]))
            array = jnp.moveaxis(array, 0, before)
        given.append(array)
    return given


def moved_back(call: Call, results: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the single call, with the batch first."""
    letters = dict(call.forms)
    before = (letters[name].index("L") if name in letters else 0 for name in call.results())
    return tuple(jnp.moveaxis(result, at, 0) for result, at in zip(results, before, strict=True))
