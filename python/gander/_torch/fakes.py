"""Fake kernels: the shapes, dtypes and devices of the operators' results, from the table of operators.

They know the table's rules for shapes and dtypes, and refuse operands that are against them, with the same
type of exception as the real kernels. What else an operator refuses the library says at run time. Sizes may
be symbolic. Comparing equal symbolic sizes adds no guard. A condition on sizes that are only known at run
time becomes an assertion in the graph.
"""

import sys

import torch

from .._table import (
    DTYPES,
    OPERATORS,
    TORCH,
    arguments,
    demand,
    made_sizes,
    operands,
    sizes,
    tensors,
)
from .._table.checks import allowed_dtypes, dtype_refusal, listed, option_refusal, shape_conditions
from .registry import by_name, registry, untraced
from .tensors import statistic

# A program that AOTInductor of torch 2.10 packages gives operators other dtypes than those of the graph, and
# reads their results as the graph's: https://github.com/pytorch/pytorch/issues/169157.
_PACKAGES_DTYPES = torch.__version__ >= "2.11"


def _is_for_aot_inductor():
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and virtualized.V.aot_compilation


def _name(dtype):
    return str(dtype).removeprefix("torch.")


class _Call:
    """One call of an operator. It checks the operands and makes the results."""

    def __init__(self, name, values):
        self.name, self.operator, self.operands, self.values = name, TORCH[name], operands(name), values
        self.x = next(iter(self.operands))
        self.first = values[self.x]

    def fail(self, kind, message):
        raise kind(f"{self.operator.operator}: {message}")

    def check(self, condition, message):
        """Refuses a shape. The condition may be symbolic, so the message is a function."""
        torch._check_value(condition, lambda: f"{self.operator.operator}: {message()}")

    def check_operand(self, operand, tensor):
        name, device, shape = operand.name, tensor.device, tuple(tensor.shape)
        if device != self.first.device:
            expected = f"{self.first.device} as {self.x}"
            self.fail(RuntimeError, f"{name} is on {device}, expected {expected}; move one of them")
        if operand.dtype != "index" or tensor.dtype != torch.uint8:  # which the kernels convert
            self.check_dtype(operand, tensor.dtype)
        if tensor.dtype == torch.float64 and device.type == "cuda":
            self.fail(
                NotImplementedError,
                f"{name} has dtype float64 on {device}, expected {listed(DTYPES['companion'].narrow)} "
                "there; convert it, or move the operands to host memory, where float64 is served",
            )
        for condition, message in shape_conditions(self.name, operand, shape, self.values):
            self.check(condition, message)
        if name in self.operator.writes:
            self.check_written(name, tensor)

    def check_dtype(self, operand, dtype, choice=None):
        like = self.values.get(operand.like)  # a gradient of what is not there has no elements
        like = (self.first if like is None else like).dtype
        allowed = allowed_dtypes(operand, self.first.dtype == torch.float64, _name(like))
        if _name(dtype) not in allowed:
            self.fail(TypeError, dtype_refusal(choice or operand.name, _name(dtype), allowed))

    def check_written(self, name, tensor):
        """Refuses tensors with elements that may share memory, like shares_memory in c/kernels.c."""
        strides = tensor.stride()
        for i, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
            inner = (j for j, other in enumerate(strides) if j != i and other <= stride)
            if stride <= sum((tensor.shape[j] - 1) * strides[j] for j in inner) and size > 1:
                self.fail(
                    ValueError,
                    f"{name} has strides {tuple(strides)}, expected elements that do not share memory, "
                    "because results are written to them; pass a contiguous copy",
                )

    def check_option(self, option, value):
        if refusal := option_refusal(option, value, self.x, self.first.ndim):
            self.fail(ValueError, refusal)

    def check_choice(self, name, dtype):
        if not _PACKAGES_DTYPES and _is_for_aot_inductor():
            self.fail(
                NotImplementedError,
                f"{name} is {_name(dtype)}, expected None, because AOTInductor of torch {torch.__version__} "
                "passes operators another dtype; leave it out, or use torch 2.11 or newer",
            )

    def dtype_of(self, operand):
        if chosen := self.values.get(operand.choice):
            self.check_choice(operand.choice, chosen)
            return chosen
        like = self.values.get(operand.like)
        if like is not None:
            return like.dtype
        rule = DTYPES[operand.dtype]
        if rule.made:
            return getattr(torch, rule.made)
        return statistic(self.first.dtype) if rule.statistic else self.first.dtype

    def result(self, operand):
        dtype, like = self.dtype_of(operand), self.values.get(operand.fits)
        self.check_dtype(operand, dtype, self.values.get(operand.choice) and operand.choice)
        if operand.name in self.operator.on_demand:
            if not self.values[demand(operand.name)]:
                return self.first.new_empty(0, dtype=dtype)
            if operand.needs and self.values.get(operand.needs) is None:
                self.fail(ValueError, f"{operand.name} is given without a {operand.needs}, expected None")
        shape = sizes(made_sizes(self.name, operand, self.values), tuple(self.first.shape))
        return self.first.new_empty(shape if like is None else like.shape, dtype=dtype)


def check_inputs(name, values):
    """Refuses the tensors that the fake kernel would refuse. values: by argument."""
    if torch.jit.is_tracing():  # sizes are tensors there, and the operators that are traced refuse
        return
    call, of = _Call(name, values), operands(name)
    for argument, value in values.items():
        if value is not None:
            call.check_operand(of[argument], value)


def _fake(name):
    """The fake kernel of an operator."""
    operator, of, names = TORCH[name], operands(name), arguments(name)
    options = [option for option in OPERATORS[operator.operator].options if option.name in names]

    def fake(*given):
        values = by_name(name, given)
        call = _Call(name, values)
        for argument in tensors(name):
            if values[argument] is not None:
                call.check_operand(of[argument], values[argument])
        for option in options:
            call.check_option(option, values[option.name])
        results = tuple(call.result(of[result]) for result in operator.results)
        return results[0] if len(results) == 1 else results or None

    return fake


for _operator in TORCH:
    torch.library.register_fake(f"gander::{_operator}", untraced(_fake(_operator)), lib=registry)
