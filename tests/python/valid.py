"""A valid call of every operator of torch.ops.gander, and of the C function behind it, from the table."""

import ctypes

import torch
from gander._native import library
from gander._table import (
    ANY,
    DTYPES,
    OPERATORS,
    REDUCTIONS,
    TORCH,
    arguments,
    demand,
    forms,
    made_sizes,
    operands,
    sizes,
)
from gander._torch.registry import complete

FIRST = (2, 3, 4)  # the shape of the first operand
SUM = REDUCTIONS.index("sum")  # with it, every operand may be given


def options(name):
    """The arguments that are no tensors. Every result is asked for, the others have their default values."""
    tensors = [argument for argument in TORCH[name].arguments if argument.kind == "tensor"]
    values = dict(zip(arguments(name), complete(name, (None,) * len(tensors)), strict=True))
    values |= {demand(result): True for result in TORCH[name].on_demand}
    values |= {"reduction": SUM} if "reduction" in values else {}
    return {argument: values[argument] for argument in list(values)[len(tensors) :]}


def tensor(operand, letters, first=FIRST, wide=False):
    """A tensor for an operand. letters: its sizes. first: the shape of the first operand. wide: whether that
    is float64."""
    rule = DTYPES["companion" if operand.dtype == "same" else operand.dtype]
    dtypes = rule.wide if wide else rule.narrow
    dtype = getattr(torch, "float32" if "float32" in dtypes else dtypes[-1])
    any_size = 1 if operand.shape == "sequences" else 2  # heads, positions, half of four columns
    return torch.ones([any_size if size is ANY else size for size in sizes(letters, first)], dtype=dtype)


def call(name):
    """The arguments of a valid call, by name."""
    of, others = operands(name), options(name)
    given = [argument.name for argument in TORCH[name].arguments if argument.kind == "tensor"]
    return {
        argument: tensor(of[argument], forms(name, of[argument], others)[0].sizes) for argument in given
    } | others


def described(value):
    """A tensor's memory as a DLTensor."""
    if value is None:
        return None
    numbers = ctypes.c_int64 * max(value.ndim, 1)
    dtype = library.DType(*library.DTYPES[str(value.dtype).removeprefix("torch.")], 1)
    shape, strides = numbers(*value.shape), numbers(*value.stride())
    return ctypes.pointer(
        library.Tensor(value.data_ptr(), library.Device(library.CPU, 0), value.ndim, dtype, shape, strides, 0)
    )


def call_c(name, values):
    """Calls the C function that the kernel of an operator calls. Returns its status and its message."""
    operator, of = TORCH[name], operands(name)
    chosen = values | operator.fixed
    given = {option.name: chosen.get(option.name) for option in OPERATORS[operator.operator].options}
    first = values[next(iter(of))]
    shape = FIRST if first is None or not first.ndim else tuple(first.shape)
    wide = first is not None and first.dtype == torch.float64
    made = {o: tensor(of[o], made_sizes(name, of[o], values), shape, wide) for o in operator.results}
    for output in made:
        like = values.get(of[output].fits)
        if like is not None and ANY in sizes(made_sizes(name, of[output], values), shape):
            made[output] = made[output].new_ones(like.shape)
    made |= {output: values[argument] for argument, output in operator.writes.items()}
    given |= {operand: described((made | values).get(operand)) for operand in of}
    status = library.call(f"gander_{operator.operator}", **given)
    return status, library.load().gander_last_error().decode() if status else ""
