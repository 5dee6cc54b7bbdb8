"""torch.ops.gander: registers the operators' schemas."""

import torch
from torch._C._dynamo import eval_frame

from .._table import TORCH, arguments

registry = torch.library.Library("gander", "FRAGMENT")
for _operator in TORCH.values():
    registry.define(_operator.schema)

overloads = {name: getattr(torch.ops.gander, name).default for name in TORCH}
# The default of each argument, ... for a required one.
defaults = {
    name: tuple(
        argument.default_value if argument.has_default_value() else ...
        for argument in overload._schema.arguments
    )
    for name, overload in overloads.items()
}


def complete(name: str, given: tuple) -> tuple:
    """All arguments of a call. The dispatcher omits trailing arguments that have their default values."""
    return given + defaults[name][len(given) :]


def by_name(name: str, given: tuple) -> dict:
    """All arguments of a call, by name."""
    return dict(zip(arguments(name), complete(name, given), strict=True))


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
