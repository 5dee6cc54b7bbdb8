"""Calls of operators on arrays."""

from typing import Any

from .._native import library
from .._native.library import DType
from .._table import OPERATORS, OPTIONS, TORCH, demand
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
    # Arrays have no gradient, so there is no use for the options of gradients.
    extra = [argument.name for argument in torch_operator.arguments if argument.kind == "extra"]
    chosen = {name: value for name, value in given.items() if name not in extra} | torch_operator.fixed
    options = [option for option in OPTIONS[operator.group] if option.name in chosen]
    values = {option.name: _value(option, chosen[option.name]) for option in options}
    struct = library.options(operator.group, **values)
    if torch_operator.writes:
        written = {output: given[argument] for argument, output in torch_operator.writes.items()}
        return run_into(torch_operator.operator, given, written, struct)
    wanted = [result for result in torch_operator.results if given.get(demand(result), True)]
    dtypes = []
    for operand in operator.operands:
        if operand.choice:
            dtype = given.get(operand.choice) if operand.name in wanted else None
            dtypes.append(DType() if dtype is None else library.dtype_of(dtype, operand.choice))
    inputs = [given.get(operand.name) for operand in operator.operands if not operand.output]
    results = dict(zip(wanted, run(operator, inputs, dtypes, struct, wanted), strict=True))
    returned = tuple(results.get(result) for result in torch_operator.results)
    return returned if len(returned) > 1 else returned[0]
