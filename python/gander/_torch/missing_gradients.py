"""Gradients of results that the loss does not use, where autograd has to make them.

An operator's backward makes such a gradient itself if it saves rows, which have its shape. Backward of an
operator of heads may save none, and q's heads are not as many as k's. So autograd makes zeros.
"""

from .._table import SHAPES, TORCH, arguments, demand, operands, tensors, upstream


def are_made(name: str) -> bool:
    """Whether autograd makes the gradients of an operator's results that are missing."""
    of = operands(TORCH[name].backward)
    heads = upstream(TORCH[name].backward).values()
    return len(heads) > 1 and SHAPES[of[next(iter(heads))].shape].layout == "heads"


def partners(name: str, inputs: list[str]) -> dict[int, tuple[list[int], int]]:
    """The upstream gradients that not all gradients need, which are left out where none of those is wanted.

    By the index of their result: the indices of the inputs whose gradients need it, and among the operator's
    options that of what asks for the result.
    """
    found: dict[int, tuple[list[int], int]] = {}
    if not are_made(name):
        return found
    of, options = operands(TORCH[name].backward), arguments(name)[len(tensors(name)) :]
    for result, argument in upstream(TORCH[name].backward).items():
        needed_by = [operand.gradient for operand in of.values() if argument in _needed(of, operand)]
        if needed_by:
            asked = options.index(demand(result))
            found[TORCH[name].results.index(result)] = [*map(inputs.index, needed_by)], asked
    return found


def _needed(of: dict, operand) -> set[str]:
    """The operands without which an output cannot be computed."""
    found, left = set(), [operand.needs] if operand.output else []
    for name in left:
        if name and name not in found:
            found.add(name)
            left.append(of[name].needs)
    return found
