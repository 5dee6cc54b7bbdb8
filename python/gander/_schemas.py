"""torch.ops.gander: registers the operators' schemas, and answers questions about operators from their table
(_operators_gen.py)."""

import torch
from torch._C._dynamo import eval_frame

from ._operators_gen import OPERATORS, TORCH

registry = torch.library.Library("gander", "FRAGMENT")
for _operator in TORCH.values():
    registry.define(_operator.schema)

overloads = {name: getattr(torch.ops.gander, name).default for name in TORCH}
_defaults = {
    name: tuple(
        argument.default_value for argument in overload._schema.arguments if argument.has_default_value()
    )
    for name, overload in overloads.items()
}


def complete(name: str, given: tuple) -> tuple:
    """All arguments of a call. The dispatcher omits trailing arguments that have their default values."""
    missing = len(TORCH[name].arguments) - len(given)
    return given + _defaults[name][-missing:] if missing else given


def operands(name: str) -> dict:
    """An operator's operands by name."""
    return {operand.name: operand for operand in OPERATORS[TORCH[name].operator].operands}


def arguments(name: str) -> list[str]:
    return [argument.name for argument in TORCH[name].arguments]


def tensors(name: str) -> list[str]:
    """The arguments that are tensors. They come first."""
    return [argument.name for argument in TORCH[name].arguments if argument.kind == "tensor"]


def gradients_of(name: str) -> list[str]:
    """For each result of an operator the operand whose gradient it is, or "" if it is no gradient."""
    return [operands(name)[result].gradient for result in TORCH[name].results]


def differentiable(name: str) -> list[str]:
    """The arguments for which an operator has a gradient."""
    gradients = {gradient for gradient_op in TORCH[name].backward for gradient in gradients_of(gradient_op)}
    return [argument for argument in tensors(name) if argument in gradients]


def upstream(gradient_op: str) -> dict[str, str]:
    """The arguments of a gradient operator that are gradients of forward's results, by result."""
    of = operands(gradient_op)
    inputs = (of[name] for name in tensors(gradient_op) if not of[name].output)
    return {operand.gradient: operand.name for operand in inputs if operand.gradient}


def read(name: str) -> list[str]:
    """The tensors that backward of an operator reads: the arguments of its gradient operators without the
    upstream gradients."""
    first = TORCH[name].backward[0]
    return [argument for argument in tensors(first) if argument not in upstream(first).values()]


def takes_dtypes(name: str) -> bool:
    """Whether an operator's gradient operators let callers choose the dtypes of the gradients."""
    return any(argument.kind == "dtype" for argument in TORCH[TORCH[name].backward[0]].arguments)


def untraced(function):
    """Makes dynamo skip a function and the functions that it calls.

    torch's dispatcher and its autograd engine call our kernels as Python functions. When a compiled function
    falls back to eager execution, dynamo would compile those calls too. Its fake tensors have no tangents, so
    the compiled check for tangents would never find one. torch._disable_dynamo has the same effect, but costs
    host time in every call.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
