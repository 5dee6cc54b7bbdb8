"""The operators of gander, and questions about them.

operators_gen.py is generated from the table of operators (internal/operators), types.py has its types. This
package imports nothing else.
"""

import math
from collections.abc import Mapping
from typing import Any

from .operators_gen import (  # noqa: F401 - others import the table from here
    ABI_VERSION,
    ALGORITHMS,
    DTYPES,
    FLAGS,
    IF_SERVED,
    LETTERS,
    MEAN,
    NONE,
    OPERATORS,
    OPTIONS_MAGIC,
    REDUCTIONS,
    SHAPES,
    STATUSES,
    SUM,
    TORCH,
    Algorithm,
    Reduction,
)
from .types import Form, Operand, Operator, Option  # noqa: F401

# The options of a row's loss, and their defaults.
LOSS_OPTIONS = {o.name: o.default for o in OPERATORS["cross_entropy_forward"].options if o.type == "real"}


def operands(name: str) -> dict[str, Operand]:
    """The operands of a PyTorch operator, by name."""
    return {operand.name: operand for operand in OPERATORS[TORCH[name].operator].operands}


def arguments(name: str) -> list[str]:
    return [argument.name for argument in TORCH[name].arguments]


def tensors(name: str) -> list[str]:
    """The arguments that are tensors. They come first."""
    return [argument.name for argument in TORCH[name].arguments if argument.kind == "tensor"]


def is_by_row(operand: Operand) -> bool:
    """Whether an operand has an element, or a row, for each row: it may have, if a call reduces rows."""
    return SHAPES[operand.shape].forms[0].sizes.startswith("L")


def has_rows(operand: Operand) -> bool:
    return SHAPES[operand.shape].layout == "rows"


ANY = "any"  # in place of a size that can be any


def sizes(letters: str, first: tuple) -> tuple:
    """The sizes that the letters of a form stand for. first: the shape of the first operand."""
    made = []
    for name in letters:
        letter, rank = LETTERS[name], len(first)
        part = first[max(rank - letter.start, 0) : max(rank - letter.stop, 0)]
        if letter.any:
            made.append(ANY)
            continue
        made += part if letter.times == 0 else [letter.times * math.prod(part) // letter.over + letter.plus]
    return tuple(made)


def forms(name: str, operand: Operand, values: Mapping[str, Any]) -> list[Form]:
    """The shapes that an operand of a PyTorch operator may have in a call. values: its arguments by name."""
    given = TORCH[name].fixed | values
    reduction, first = given.get("reduction", NONE), given.get(next(iter(operands(name))))
    unmet = {
        "unreduced": reduction != NONE,
        "summed": reduction == NONE,
        "undivided": reduction == MEAN,
        "headed": first is not None and first.ndim < 2,
        "unread": any(given.get(other.read) for other in operands(name).values() if other.read),
        **{condition: bool(given.get(flag)) != on for condition, (flag, on) in FLAGS.items()},
    }
    return [form for form in SHAPES[operand.shape].forms if not unmet.get(form.when)]


def made_sizes(name: str, operand: Operand, values: Mapping[str, Any]) -> str:
    """The letters of the form of a new tensor."""
    packed = TORCH[name].packed and SHAPES[operand.shape].packed
    return packed or forms(name, operand, values)[0].sizes


def gradients_of(name: str) -> list[str]:
    """For each result of an operator the operand whose gradient it is, or "" if it is no gradient."""
    return [operands(name)[result].gradient for result in TORCH[name].results]


def differentiable(name: str) -> list[str]:
    """The arguments for which an operator has a gradient."""
    gradients = gradients_of(TORCH[name].backward) if TORCH[name].backward else []
    return [argument for argument in tensors(name) if argument in gradients]


def demand(result: str) -> str:
    """The argument that asks for a result."""
    return f"needs_{result}"


def wanted(name: str, values: Mapping[str, Any]) -> list[str]:
    """The results that a call computes. The others have no elements. values: its arguments by name."""
    return [result for result in TORCH[name].results if values.get(demand(result), True)]


def reduction(name: str, values: Mapping[str, Any]) -> Reduction:
    """How a call reduces the losses of rows: "none" also if it has none. values: its arguments by name."""
    return REDUCTIONS[(TORCH[name].fixed | values).get("reduction", NONE)]


def demanded_for_backward(name: str) -> dict[str, str]:
    """The results that autograd demands for backward, each with the argument that must be given, or ""."""
    of = operands(name)
    return {
        saved.result: of[saved.result].like if saved.argument else ""
        for saved in TORCH[name].saved
        if saved.result
    }


def upstream(gradient_op: str) -> dict[str, str]:
    """The arguments of a gradient operator that are gradients of forward's results, by result."""
    of = operands(gradient_op)
    inputs = (of[name] for name in tensors(gradient_op) if not of[name].output)
    return {operand.gradient: operand.name for operand in inputs if operand.gradient}


def read(gradient_op: str) -> list[str]:
    """The tensors that a gradient operator reads, without the upstream gradients."""
    return [argument for argument in tensors(gradient_op) if argument not in upstream(gradient_op).values()]


def takes_dtypes(name: str) -> bool:
    """Whether an operator's gradient operator lets callers choose the dtypes of the gradients."""
    return any(argument.kind == "dtype" for argument in TORCH[TORCH[name].backward].arguments)
