"""Fake kernels: the shapes, dtypes and devices of the operators' results, from the table of operators.

They refuse what the real kernels refuse, with the same type of exception. Sizes may be symbolic. Comparing
equal symbolic sizes adds no guard. A condition on sizes that are only known at run time becomes an assertion
in the graph.
"""

import math

import torch

from ._operators_gen import ALGORITHMS, IF_SERVED, REDUCTIONS, TORCH
from ._schemas import arguments, complete, operands, registry, untraced

_INDEX = (torch.int32, torch.int64)
_NARROW = (torch.float16, torch.bfloat16, torch.float32)


def _listed(dtypes):
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


class _Call:
    """One call of an operator. It checks the operands and makes the results."""

    def __init__(self, name, values):
        self.operator, self.operands, self.values = TORCH[name], operands(name), values
        self.name = next(iter(self.operands))
        self.first = values[self.name]
        self.leading, self.rows, self.columns = (), 1, 1  # known once the first operand is checked

    def fail(self, kind, message):
        raise kind(f"{self.operator.operator}: {message}")

    def check(self, condition, message):
        """Refuses a shape. The condition may be symbolic, so the message is a function."""
        torch._check_value(condition, lambda: f"{self.operator.operator}: {message()}")

    def option(self, name):
        return self.values.get(name, self.operator.fixed.get(name, 0))

    def dtypes(self, operand):
        """The dtypes that an operand may have."""
        if operand.dtype == "same" and operand.like in self.values:
            return (self.values[operand.like].dtype,)
        wide = self.first.dtype == torch.float64
        return {
            "float": (*_NARROW, torch.float64),
            "wide": (torch.float32, torch.float64),
            "companion": (torch.float64,) if wide else _NARROW,
            "parameter": (torch.float64,) if wide else _NARROW,
            "statistic": (torch.float64,) if wide else (torch.float32,),
            "index": _INDEX,
            "mask": (torch.bool, torch.uint8, *((torch.float64,) if wide else _NARROW)),
        }[operand.dtype]

    def default(self, operand):
        """The dtype of a result that the caller does not choose."""
        like = self.values.get(operand.like)
        if like is not None:
            return like.dtype
        if operand.dtype in ("statistic", "parameter") and self.first.dtype != torch.float64:
            return torch.float32
        return self.first.dtype

    def check_dtype(self, name, dtype, allowed):
        if dtype not in allowed:
            self.fail(
                TypeError, f"{name} has dtype {_listed([dtype])}, expected {_listed(allowed)}; convert it"
            )

    def check_input(self, operand, tensor):
        name, device = operand.name, tensor.device
        if device != self.first.device:
            expected = f"{self.first.device} as {self.name}"
            self.fail(RuntimeError, f"{name} is on {device}, expected {expected}; move one of them")
        self.check_dtype(name, tensor.dtype, self.dtypes(operand))
        if tensor.dtype == torch.float64 and device.type == "cuda":
            self.fail(
                NotImplementedError,
                f"{name} has dtype float64 on {device}, expected {_listed(_NARROW)} there; convert it, or "
                "move the operands to host memory, where float64 is served",
            )
        getattr(self, f"check_{operand.shape}")(name, tensor)
        if name in self.operator.writes:
            self.check_separate(name, tensor)

    def check_rows(self, name, tensor):
        shape = tuple(tensor.shape)
        if not shape:
            self.fail(
                ValueError, f"{name} has rank 0, expected rows (M, N) of rank 1 or more; reshape it to (1, 1)"
            )
        self.check(
            shape[-1] >= 1,
            lambda: f"{name} has shape {shape}, expected a last dimension of 1 or more; skip the call",
        )
        if tensor is self.first:
            self.leading, self.columns = shape[:-1], shape[-1]
            self.rows = math.prod(self.leading)
        self.check(
            (shape[-1] == self.columns) & (math.prod(shape[:-1]) == self.rows),
            lambda: f"{name} has shape {shape}, expected {self.rows} rows of {self.columns} as {self.name}",
        )

    def check_columns(self, name, tensor):
        if tensor.ndim != 1:
            expected = f"rank 1: (N) with N = {self.columns} columns"
            self.fail(ValueError, f"{name} has rank {tensor.ndim}, expected {expected}")
        self.check_count(name, tensor, tensor.numel() == self.columns, f"{self.columns}: one for each column")

    def check_head_columns(self, name, tensor):
        shape, rows, weight = tuple(tensor.shape), tuple(self.first.shape), self.values["weight"]
        if len(shape) != 2:
            self.check_columns(name, tensor)
        else:
            self.check(
                len(rows) > 1 and (shape[0] == rows[-2]) & (shape[1] == rows[-1]),
                lambda: (
                    f"{name} has shape {shape}, expected (N) or (H, N) for {self.name} of shape (..., H, N), "
                    f"which is {rows}"
                ),
            )
        heads = shape[0] if len(shape) == 2 else 1
        if weight is None:
            self.check(
                heads == 1,
                lambda: (
                    f"{name} has {heads} rows, one for each head, without a weight, expected shape (N); pass "
                    "a weight of ones"
                ),
            )
            return
        self.check(
            tensor.numel() == weight.numel(),
            lambda: (
                f"{name} has {tensor.numel()} elements and weight {weight.numel()}, expected the same shape; "
                "expand one of them"
            ),
        )

    def check_count(self, name, tensor, condition, expected):
        self.check(
            condition,
            lambda: (
                f"{name} has shape {tuple(tensor.shape)}, which is {tensor.numel()} elements, expected "
                f"{expected} of {self.name}"
            ),
        )

    def check_per_row(self, name, tensor):
        self.check_count(name, tensor, tensor.numel() == self.rows, f"{self.rows}: one for each row")

    def check_reduced(self, name, tensor):  # an output that the caller allocates, never of a reduction
        self.check_per_row(name, tensor)

    def check_strided(self, name, tensor):
        same = tensor.ndim == len(self.leading)
        for size, expected in zip(tensor.shape, self.leading, strict=False):
            same = same & (size == expected)
        self.check(
            same,
            lambda: (
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(self.leading)}, the leading "
                f"dimensions of {self.name}"
            ),
        )

    def check_one(self, name, tensor):
        self.check(
            tensor.numel() == 1,
            lambda: f"{name} has shape {tuple(tensor.shape)}, expected one element for all rows",
        )

    def check_upstream(self, name, tensor):
        count, expected = tensor.numel(), "a single element for all rows"
        fits = count == 1
        shared = any(operand.read and self.option(operand.read) for operand in self.operands.values())
        if tensor.ndim and not shared:
            fits, expected = fits | (count == self.rows), f"{self.rows} or {expected}"
        self.check_count(name, tensor, fits, expected)

    def check_statistics(self, name, tensor):
        count, packed = tensor.numel(), 2 * self.rows + 1
        fits, expected = count == packed, f"{packed}: maxima, logarithms and denominator for the rows"
        if REDUCTIONS[self.option("reduction")] != "mean":
            in_parts = (count == 2 * self.rows) & (tensor.shape[0] == 2) if tensor.ndim > 1 else False
            fits, expected = fits | (count == self.rows) | in_parts, f"{self.rows}: one for each row"
        self.check_count(name, tensor, fits, expected)

    def check_broadcast(self, name, tensor):
        shape = tuple(self.first.shape)
        fits = tensor.ndim <= len(shape)
        for size, expected in zip(reversed(tensor.shape), reversed(shape), strict=False):
            fits = fits & ((size == expected) | (size == 1))
        self.check(
            fits,
            lambda: (
                f"{name} has shape {tuple(tensor.shape)}, expected one that broadcasts to {shape}, the shape "
                f"of {self.name}"
            ),
        )

    def check_separate(self, name, tensor):
        """Refuses tensors with elements that may share memory, like check_separate in _torch.c."""
        strides = tensor.stride()
        for i, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
            inner = (j for j, other in enumerate(strides) if j != i and other <= stride)
            if stride <= sum((tensor.shape[j] - 1) * strides[j] for j in inner) and size > 1:
                self.fail(
                    ValueError,
                    f"{name} has strides {tuple(strides)}, expected elements that do not share memory, "
                    "because results are written to them; pass a contiguous copy",
                )

    def check_option(self, argument, value):
        if argument.name == "causal" and value and self.first.ndim < 2:
            self.fail(
                ValueError,
                f"causal is set for {self.name} of rank {self.first.ndim}, expected rank 2 or more: "
                "(..., Q, N); reshape it, or leave causal out",
            )
        if argument.type == "algorithm" and value & ~IF_SERVED not in range(len(ALGORITHMS)):
            expected = f"0 ({ALGORITHMS[0]}) to {len(ALGORITHMS) - 1} ({ALGORITHMS[-1]})"
        elif argument.type == "reduction" and value not in range(len(REDUCTIONS)):
            expected = ", ".join(f"{name} ({code})" for code, name in enumerate(REDUCTIONS))
        else:
            return
        self.fail(ValueError, f"{argument.name} is {value}, expected {expected}")

    def result(self, operand):
        dtype = self.values.get(operand.choice) or self.default(operand)
        self.check_dtype(operand.name, dtype, self.dtypes(operand))
        like = self.values.get(operand.like)
        shapes = {
            "rows": self.first.shape,
            "columns": (self.columns,),
            "head_columns": (self.columns,) if like is None else like.shape,
            "one": (),
            "reduced": () if self.option("reduction") else self.leading,
            "statistics": (2 * self.rows + 1,) if self.operator.packed else self.leading,
        }
        return self.first.new_empty(shapes.get(operand.shape, self.leading), dtype=dtype)


def check_plain(name, value, hint=""):
    """Refuses what is not a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor{hint}")
    if value.is_nested:
        kind, instead = "nested", "pad it, or pass its rows in turn"
    elif value.layout != torch.strided:
        kind, instead = str(value.layout)[6:], f"pass {name}.to_dense()"
    elif value.is_quantized:
        kind, instead = "quantized", f"pass {name}.dequantize()"
    else:
        return
    raise NotImplementedError(f"{name} is a {kind} tensor, expected a dense one; {instead}")


def check_inputs(name, values):
    """Refuses the tensors that the fake kernel would refuse. values: by argument."""
    call, of = _Call(name, values), operands(name)
    for argument, value in values.items():
        if value is not None:
            call.check_input(of[argument], value)


def _fake(name):
    """The fake kernel of an operator."""
    operator, of = TORCH[name], operands(name)

    def fake(*given):
        values = complete(name, given)
        call = _Call(name, dict(zip(arguments(name), values, strict=True)))
        for argument, value in zip(operator.arguments, values, strict=True):
            if argument.kind == "option":
                call.check_option(argument, value)
            elif argument.kind == "tensor" and value is not None:
                call.check_input(of[argument.name], value)
        results = tuple(call.result(of[result]) for result in operator.results)
        return results[0] if len(results) == 1 else results or None

    return fake


for _operator in TORCH:
    torch.library.register_fake(f"gander::{_operator}", untraced(_fake(_operator)), lib=registry)
