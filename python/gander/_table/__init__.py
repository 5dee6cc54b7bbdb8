"""The operators of gander, and questions about them.

operators_gen.py is generated from the table of operators (internal/operators), types.py has its types. This
package imports nothing else.
"""

from .operators_gen import (
    ALGORITHMS,
    IF_SERVED,
    MEAN,
    NONE,
    OPERATORS,
    OPTIONS,
    REDUCTIONS,
    STATUSES,
    SUM,
    TORCH,
    Algorithm,
    Reduction,
)
from .types import Argument, Operand, Operator, Option, Saved, TorchOperator

__all__ = [
    "ALGORITHMS",
    "IF_SERVED",
    "MEAN",
    "NONE",
    "OPERATORS",
    "OPTIONS",
    "REDUCTIONS",
    "STATUSES",
    "SUM",
    "TORCH",
    "Algorithm",
    "Argument",
    "Operand",
    "Operator",
    "Option",
    "Reduction",
    "Saved",
    "TorchOperator",
    "arguments",
    "demand",
    "demanded_for_backward",
    "differentiable",
    "gradients_of",
    "operands",
    "read",
    "takes_dtypes",
    "tensors",
    "upstream",
]


def operands(name: str) -> dict[str, Operand]:
    """The operands of a PyTorch operator, by name."""
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
    gradients = gradients_of(TORCH[name].backward) if TORCH[name].backward else []
    return [argument for argument in tensors(name) if argument in gradients]


def demand(result: str) -> str:
    """The argument that asks for a result."""
    return f"needs_{result}"


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
