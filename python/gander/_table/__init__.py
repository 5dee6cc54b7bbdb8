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
from .types import Argument, Operand, Operator, Option, TorchOperator

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
    "TorchOperator",
    "arguments",
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
