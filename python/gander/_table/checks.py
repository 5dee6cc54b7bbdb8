"""Which shapes and dtypes the table's rules allow, and what a refusal says, for those who know them before a
call runs: torch's fake kernels, and JAX's traces. The library says the same of a call that runs.

Sizes may be symbolic, and so may conditions. Comparing equal symbolic sizes adds no guard to a torch graph.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import and_, or_
from typing import Any

from . import ALGORITHMS, ANY, DTYPES, IF_SERVED, REDUCTIONS, SHAPES, Operand, Option, forms, operands, sizes


def listed(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _equal(a: Any, b: Any) -> Any:
    """Whether a shape has these sizes."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and reduce(and_, (n is ANY or m == n for m, n in pairs), True)


def _is(form: Any, shape: tuple, first: tuple) -> Any:
    """Whether a shape is a form."""
    if not form.count:
        return _equal(shape, sizes(form.sizes, first))
    before, counted, after = re.split("([LS]|$)", form.sizes, maxsplit=1)
    start, end = len(sizes(before, first)), len(shape) - len(sizes(after, first))
    if start > end:
        return False
    fixed = _equal(shape[:start] + shape[end:], sizes(before + after, first))
    return fixed & (math.prod(shape[start:end]) == math.prod(sizes(counted, first)))


def _broadcasts(shape: tuple, to: tuple) -> Any:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and reduce(and_, ((m == n) | (m == 1) for m, n in pairs), True)


def _is_table(shape: tuple, sequences: tuple) -> Any:
    """Whether a shape is that of a table, or of one for each sequence. A size of 1 may stand for all."""
    *leading, _, _ = shape if len(shape) > 1 else (*sequences, 0, 0, 0)
    one = reduce(and_, (size == 1 for size in leading), True)
    return (len(leading) in (0, len(sequences))) & (one | _equal(leading, sequences))


def shape_conditions(
    name: str, operand: Operand, shape: tuple, values: Mapping[str, Any]
) -> Iterator[tuple[Any, Callable[[], str]]]:
    """What has to be true of an operand's shape, one condition after the other, and what a refusal says.

    values: the arguments by name, of which the first and that of operand.fits have a shape.
    """
    x = next(iter(operands(name)))
    if operand.name == x:
        rank = SHAPES[operand.shape].rank
        heads, rows = "(..., tokens, heads, columns) of rank 3 or more", "rows (M, N) of rank 1 or more"
        last = "a last dimension of 1 or more"
        yield rank < 2 or len(shape) >= rank, lambda: f"{x} has shape {shape}, expected {heads}; reshape it"
        yield len(shape) > 0, lambda: f"{x} has rank 0, expected {rows}; reshape it to (1, 1)"
        yield shape[-1] >= 1, lambda: f"{x} has shape {shape}, expected {last}; skip the call"
        if operand.shape == "rows":
            return
    yield _fits(name, operand, shape, values), lambda: _refusal(name, operand, shape, values)


def _allowed(name: str, operand: Operand, values: Mapping[str, Any]) -> list[Any]:
    allowed = forms(name, operand, values)
    return allowed[:1] if operand.fits and values.get(operand.fits) is None else allowed


def _fits(name: str, operand: Operand, shape: tuple, values: Mapping[str, Any]) -> Any:
    first, like = tuple(values[next(iter(operands(name)))].shape), values.get(operand.fits)
    layout = SHAPES[operand.shape].layout
    if like is not None:
        return _equal(shape, tuple(like.shape))
    if layout == "broadcast":
        return _broadcasts(shape, first)
    if layout == "tables":
        return _is_table(shape, first[:-3])
    return reduce(or_, (_is(form, shape, first) for form in _allowed(name, operand, values)), False)


def _refusal(name: str, operand: Operand, shape: tuple, values: Mapping[str, Any]) -> str:
    x = next(iter(operands(name)))
    first, like = tuple(values[x].shape), values.get(operand.fits)
    found, expected = f"{operand.name} has shape {shape}", []
    layout = SHAPES[operand.shape].layout
    if like is not None:
        return f"{found}, expected {tuple(like.shape)} as {operand.fits}"
    if layout == "broadcast":
        return f"{found}, expected one that broadcasts to {first}, the shape of {x}"
    if layout == "tables":
        return (
            f"{found}, expected (positions, width), or before that {first[:-3]}, the sequences of {x}, or as "
            "many 1s"
        )
    for form in _allowed(name, operand, values):
        size: Any = sizes(form.sizes, first)
        if form.count and form.sizes in ("", "L", "S"):
            size = math.prod(size)
            found = f"{operand.name} has shape {shape}, which is {math.prod(shape)} elements"
        size = str(size).replace(repr(ANY), ANY)
        expected.append(f"{size}{form.text.replace('{x}', x)}")
    without = f" without a {operand.fits}" if operand.fits else ""
    return f"{found}, expected {', or '.join(expected) or f'{x} of rank 2 or more'}{without}"


def allowed_dtypes(operand: Operand, wide: bool, like: str) -> tuple[str, ...]:
    """The names of the dtypes that an operand may have.

    wide: the first operand is float64. like: the dtype of operand.like, or of the first operand.
    """
    rule = DTYPES[operand.dtype]
    return (like,) if operand.dtype == "same" else rule.wide if wide else rule.narrow


def dtype_refusal(named: str, dtype: str, allowed: tuple[str, ...]) -> str:
    return f"{named} has dtype {dtype}, expected {listed(allowed)}; convert it"


_NAMES: dict[str, tuple[str, ...]] = {"algorithm": ALGORITHMS, "reduction": REDUCTIONS}


def option_refusal(option: Option, value: Any, first: str, rank: int) -> str:
    """What is wrong with an option's value, or "". rank: that of the first operand."""
    names = _NAMES.get(option.type, ())
    code = value & ~IF_SERVED if option.type == "algorithm" and value else value
    if names and value is not None and code not in range(len(names)):
        return f"{option.name} is {value}, expected 0 ({names[0]}) to {len(names) - 1} ({names[-1]})"
    if value and rank < option.rank:
        return (
            f"{option.name} is set for {first} of rank {rank}, expected rank {option.rank} or more; reshape "
            f"it, or leave {option.name} out"
        )
    return ""
