"""Fake kernels: the shapes, dtypes and devices of the operators' results, from the table of operators.

They know the table's rules for shapes and dtypes, and refuse operands that are against them, with the same
type of exception as the real kernels. What else an operator refuses the library says at run time. Sizes may
be symbolic. Comparing equal symbolic sizes adds no guard. A condition on sizes that are only known at run
time becomes an assertion in the graph.
"""

import math
import re
import sys
from functools import reduce
from operator import and_, or_

import torch

from .._table import (
    ALGORITHMS,
    ANY,
    DTYPES,
    IF_SERVED,
    OPERATORS,
    REDUCTIONS,
    SHAPES,
    TORCH,
    arguments,
    demand,
    forms,
    made_sizes,
    operands,
    sizes,
    tensors,
)
from .registry import by_name, registry, untraced
from .tensors import statistic

_NAMES = {"algorithm": ALGORITHMS, "reduction": REDUCTIONS}

# A program that AOTInductor of torch 2.10 packages gives operators other dtypes than those of the graph, and
# reads their results as the graph's: https://github.com/pytorch/pytorch/issues/169157.
_PACKAGES_DTYPES = torch.__version__ >= "2.11"


def _is_for_aot_inductor():
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and virtualized.V.aot_compilation


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _listed(names):
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _equal(a, b):
    """Whether a shape has these sizes. The answer may be symbolic."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and reduce(and_, (n is ANY or m == n for m, n in pairs), True)


def _is(form, shape, first):
    """Whether a shape is a form."""
    if not form.count:
        return _equal(shape, sizes(form.sizes, first))
    before, counted, after = re.fullmatch("([^LS]*)([LS]?)([^LS]*)", form.sizes).groups()
    start, end = len(sizes(before, first)), len(shape) - len(sizes(after, first))
    if start > end:
        return False
    fixed = _equal(shape[:start] + shape[end:], sizes(before + after, first))
    return fixed & (math.prod(shape[start:end]) == math.prod(sizes(counted, first)))


def _broadcasts(shape, to):
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and reduce(and_, ((m == n) | (m == 1) for m, n in pairs), True)


def _is_table(shape, sequences):
    """Whether a shape is that of a table, or of one for each sequence. A size of 1 may stand for all."""
    *leading, _, _ = shape if len(shape) > 1 else (*sequences, 0, 0, 0)
    one = reduce(and_, (size == 1 for size in leading), True)
    return (len(leading) in (0, len(sequences))) & (one | _equal(leading, sequences))


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
                f"{name} has dtype float64 on {device}, expected {_listed(DTYPES['companion'].narrow)} "
                "there; convert it, or move the operands to host memory, where float64 is served",
            )
        if name != self.x:
            self.check_shape(operand, shape)
        elif len(shape) < SHAPES[operand.shape].rank > 1:
            expected = "(..., tokens, heads, columns) of rank 3 or more"
            self.fail(ValueError, f"{name} has shape {shape}, expected {expected}; reshape it")
        elif not shape:
            expected = "rows (M, N) of rank 1 or more"
            self.fail(ValueError, f"{name} has rank 0, expected {expected}; reshape it to (1, 1)")
        else:
            expected = "a last dimension of 1 or more"
            self.check(
                shape[-1] >= 1, lambda: f"{name} has shape {shape}, expected {expected}; skip the call"
            )
            if operand.shape != "rows":
                self.check_shape(operand, shape)
        if name in self.operator.writes:
            self.check_written(name, tensor)

    def check_dtype(self, operand, dtype, choice=None):
        rule = DTYPES[operand.dtype]
        allowed = rule.wide if self.first.dtype == torch.float64 else rule.narrow
        if operand.dtype == "same":
            like = self.values[operand.like]  # a gradient of what is not there has no elements
            allowed = [_name((self.first if like is None else like).dtype)]
        if _name(dtype) not in allowed:
            found = f"{choice or operand.name} has dtype {_name(dtype)}"
            self.fail(TypeError, f"{found}, expected {_listed(allowed)}; convert it")

    def check_shape(self, operand, shape):
        first, like = tuple(self.first.shape), self.values.get(operand.fits)
        allowed, without = forms(self.name, operand, self.values), ""
        if operand.fits and like is None:
            allowed, without = allowed[:1], f" without a {operand.fits}"

        def message():
            found, expected = f"{operand.name} has shape {shape}", []
            if like is not None:
                return f"{found}, expected {tuple(like.shape)} as {operand.fits}"
            if layout == "broadcast":
                return f"{found}, expected one that broadcasts to {first}, the shape of {self.x}"
            if layout == "tables":
                return (
                    f"{found}, expected (positions, width), or before that {first[:-3]}, the sequences of "
                    f"{self.x}, or as many 1s"
                )
            for form in allowed:
                size = sizes(form.sizes, first)
                if form.count and form.sizes in ("", "L", "S"):
                    size = math.prod(size)
                    found = f"{operand.name} has shape {shape}, which is {math.prod(shape)} elements"
                size = str(size).replace(repr(ANY), ANY)
                expected.append(f"{size}{form.text.replace('{x}', self.x)}")
            expected = ", or ".join(expected) or f"{self.x} of rank 2 or more"
            return f"{found}, expected {expected}{without}"

        layout = SHAPES[operand.shape].layout
        if like is not None:
            fits = _equal(shape, like.shape)
        elif layout == "broadcast":
            fits = _broadcasts(shape, first)
        elif layout == "tables":
            fits = _is_table(shape, first[:-3])
        else:
            fits = reduce(or_, (_is(form, shape, first) for form in allowed), False)
        self.check(fits, message)

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
        names = _NAMES.get(option.type, ())
        code = value & ~IF_SERVED if option.type == "algorithm" else value
        if names and code not in range(len(names)):
            expected = f"0 ({names[0]}) to {len(names) - 1} ({names[-1]})"
            self.fail(ValueError, f"{option.name} is {value}, expected {expected}")
        if value and self.first.ndim < option.rank:
            self.fail(
                ValueError,
                f"{option.name} is set for {self.x} of rank {self.first.ndim}, expected rank {option.rank} "
                f"or more; reshape it, or leave {option.name} out",
            )

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
        return statistic(self.first.dtype) if DTYPES[operand.dtype].statistic else self.first.dtype

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
