"""Calls of operators on arrays."""

from typing import Any

from .._native import library
from .._table import OPERATORS, TORCH, demand
from .._words import integer
from .capsules import run, run_into


def _value(option, value):
    """An option's value for its field."""
    return float(value) if option.type == "real" else integer(option.name, int(value or 0))


def only_torch(argument: str) -> NotImplementedError:
    return NotImplementedError(
        f"{argument} is supported for torch tensors only; leave it out, or pass torch.from_dlpack(x) as x, "
        f"expected with {argument}"
    )


def call(name: str, given: dict[str, Any]) -> Any:
    """Runs an operator of TORCH on arguments by name. A result that is not asked for is None."""
    torch_operator = TORCH[name]
    operator = OPERATORS[torch_operator.operator]
    if given.get("inplace_backward") or torch_operator.writes == {"x": "dx"}:
        raise only_torch("inplace_backward")
    # An option that has a fixed value may also be an argument for the gradient, which arrays do not have.
    chosen = given | torch_operator.fixed
    options = {option.name: _value(option, chosen[option.name]) for option in operator.options}
    if torch_operator.writes:
        written = {output: given[argument] for argument, output in torch_operator.writes.items()}
        return run_into(torch_operator.operator, given, written, options)
    wanted = [result for result in torch_operator.results if given.get(demand(result), True)]
    for operand in operator.operands:
        if operand.name in wanted and operand.choice and given.get(operand.choice) is not None:
            options[operand.choice] = library.dtype_of(given[operand.choice], operand.choice)
    results = dict(zip(wanted, run(operator, given, options, wanted), strict=True))
    returned = tuple(results.get(result) for result in torch_operator.results)
    return returned if len(returned) > 1 else returned[0]
