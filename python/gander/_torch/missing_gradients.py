"""Gradients of results that the loss does not use, of an operator of q's and k's heads.

Most operators' backward takes zeros for such a gradient, in the shape of rows that it saves. Heads are apart:
the gradients of q need nothing of k, nor those of k anything of q. So one alone is computed, and the other's
inputs have no gradient, as torch's operators would leave them. An operator computes that of q, or of both.
For k alone k's operands take the places of q's.
"""

from collections.abc import Callable

from .._table import SHAPES, TORCH, arguments, demand, differentiable, operands, tensors, upstream


def _is_of_heads(name: str) -> bool:
    of = operands(TORCH[name].backward)
    heads = upstream(TORCH[name].backward).values()
    return len(heads) > 1 and SHAPES[of[next(iter(heads))].shape].layout == "heads"


def partners(name: str, inputs: list[str]) -> dict[int, tuple[list[int], int]]:
    """The upstream gradients that not all gradients need, which are left out where none of those is wanted.

    By the index of their result: the indices of the inputs whose gradients need it, and among the operator's
    options that of what asks for the result.
    """
    found: dict[int, tuple[list[int], int]] = {}
    if not _is_of_heads(name):
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


class _OfPartner:
    """The context of a backward pass with k's operands in the places of q's, and none in k's."""

    def __init__(self, ctx, saved: dict[int, int], inputs: dict[int, int]):
        self.options = ctx.options
        self.saved_tensors = _moved(ctx.saved_tensors, saved, None)
        self.needs_input_grad = _moved(ctx.needs_input_grad, inputs, False)


def _moved(values, places: dict[int, int], nothing) -> tuple:
    """values with those of `places` in the places that they lead to, and nothing in their own."""
    moved = list(values)
    for old, new in places.items():
        moved[old], moved[new] = nothing, values[old]
    return tuple(moved)


def of_each(name: str, inputs: list[str], backward: Callable) -> Callable:
    """backward(ctx, *gradients) of an operator, which without the gradient of q's result computes that of k's
    as if it were q's."""
    if not _is_of_heads(name):
        return backward
    ((second, (places, _)),) = partners(name, inputs).items()
    own = [at for at, argument in enumerate(inputs) if argument in differentiable(name) and at not in places]
    to_first = dict(zip(sorted(places), own, strict=True))
    saved = [of.argument for of in TORCH[name].saved]
    of_saved = {
        saved.index(inputs[old]): saved.index(inputs[new])
        for old, new in to_first.items()
        if inputs[old] in saved
    }

    def of_one(ctx, *gradients):
        if gradients[0] is not None or len(gradients) <= second or gradients[second] is None:
            return backward(ctx, *gradients)
        if not any(ctx.needs_input_grad[place] for place in places):
            return (None,) * len(inputs)
        found = backward(_OfPartner(ctx, of_saved, to_first), gradients[second])
        return _moved(found, {new: old for old, new in to_first.items()}, None)

    return of_one
