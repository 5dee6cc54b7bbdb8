"""Calls an operator through the C ABI on tensors of the CPU and of the emulated device, and compares.

Device memory is memory of the host. An allocation ends at a page that faults. So a kernel that reads or
writes beyond a tensor at its end fails. All bytes of an output's allocation outside of it must keep a mark.
"""

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gander._native import library as abi
from gander._table import OPERATORS

ROW = Path("row")  # in the working directory: a row by which the library plans (GANDER_TUNE)
MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
MARK = 0xFF  # NaN in all float types
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24}
FLOATS = tuple(DIGITS)


def encoded(values, dtype):
    """The values in a dtype. NumPy has no bfloat16: those are the high halves of float32."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decoded(values, dtype):
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class Layout(NamedTuple):
    """Where matrices lie: for each of a call, the elements between its rows, and those after the last.

    before: the elements before each. By default so many that it ends at the end of a page.
    """

    gaps: tuple[int, ...] = (0,)
    after: tuple[int, ...] = (0,)
    before: int | None = None


class Tensor:
    """values: an array, or the shape of an output."""

    def __init__(self, device, dtype, values, gap=0, after=0, before=None):
        shape = getattr(values, "shape", values)
        *outer, n = shape
        size = SIZES[dtype]
        step = n + gap
        count = int(np.prod(outer)) * step - gap + after
        # Allocations begin at multiples of 16 bytes.
        offset = -count % (16 // size) if before is None else before
        self.memory, self.dtype = device.allocate((offset + count) * size), dtype
        kind = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
        strides = [int(np.prod(outer[i + 1 :])) * step for i in range(len(outer))] + [1]
        self.array = np.ndarray(shape, kind, self.memory, offset * size, [s * size for s in strides])
        if values is not shape:
            self.array[...] = encoded(values, dtype)
        self._shape, self._strides = ((ctypes.c_int64 * len(shape))(*list) for list in (shape, strides))
        address = self.memory.ctypes.data + offset * size
        where, what = abi.Device(device.kind, 0), abi.DType(*abi.DTYPES[dtype], 1)
        self.dl = abi.Tensor(address, where, len(shape), what, self._shape, self._strides, 0)
        own = np.zeros(self.memory.shape, bool)
        np.ndarray((*shape, size), bool, own, offset * size, [*(s * size for s in strides), 1])[...] = True
        self._around = ~own

    def values(self):
        return decoded(self.array, self.dtype)

    def marked(self):
        """Whether all bytes around the elements still have their mark."""
        return bool((self.memory[self._around] == MARK).all())


class Host:
    kind = abi.CPU

    def allocate(self, size):
        memory = np.full(size + 16, MARK, np.uint8)
        return memory[-memory.ctypes.data % 16 :][:size]

    def free(self):
        pass


class Device:
    kind = abi.CUDA

    def __init__(self):
        self.driver, self.allocated = ctypes.CDLL("libcuda.so.1"), []

    def allocate(self, size):
        pointer = ctypes.c_uint64()
        assert self.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(size, 1))) == 0
        self.allocated.append(pointer)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer.value))

    def free(self):
        while self.allocated:
            self.driver.cuMemFree_v2(self.allocated.pop())

    def has_clusters(self):
        major = ctypes.c_int()
        assert self.driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, 0) == 0
        return major.value >= 9

    def launches(self, kernel):
        return self.driver.emulated_launches(kernel.encode())


HOST, DEVICE = Host(), Device()


def call(device, name, inputs, outputs, over=None, layout=Layout(), **options):  # noqa: B008
    """Runs an operator and returns the values of its outputs.

    inputs and outputs: {operand: (dtype, values)}. An output may have a shape instead of values.
    over: {output: the input that it overwrites}
    """
    operator, over, tensors, matrices = OPERATORS[name], over or {}, {}, 0
    for operand in operator.operands:
        given = (outputs if operand.output else inputs).get(operand.name)
        if operand.name in over:
            tensors[operand.name] = tensors[over[operand.name]]
        elif given is not None:
            place = {}
            if operand.shape in ("rows", "heads", "other_heads"):
                gap, after = (lengths[matrices % len(lengths)] for lengths in layout[:2])
                place = dict(gap=gap, after=after, before=layout.before)
                matrices += 1
            tensors[operand.name] = Tensor(device, *given, **place)
    before = {k: tensors[k].memory.copy() for k in inputs if k not in over.values()}
    given = {operand: tensor.dl for operand, tensor in tensors.items()}
    abi.check(abi.call(f"gander_{name}", **given, **options))
    for operand, memory in before.items():
        assert np.array_equal(tensors[operand].memory, memory), f"{name} has written to {operand}"
    for operand in outputs:
        assert tensors[operand].marked(), f"{name} has written outside of {operand}"
    values = {operand: tensors[operand].values() for operand in outputs}
    device.free()
    return values


def compare(what, dtype, got, expected, units):
    """Allows some units in the last place of the dtype, and a few of float32 for the largest element."""
    if dtype not in DIGITS:
        assert np.array_equal(got, expected), f"{what}: {got}, expected {expected}"
        return
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(expected), np.abs(expected), 0)
        unit = 2.0 ** (np.floor(np.log2(np.maximum(size, 2.0**-14))) + 1 - DIGITS[dtype])
        allowed = units * unit + 2.0**-20 * size.max(initial=0)
        good = (np.abs(got - expected) <= allowed) | (got == expected) | np.isnan(got) & np.isnan(expected)
    if not good.all():
        at = tuple(np.argwhere(~good)[0])
        raise AssertionError(
            f"{what}: {(~good).sum()} of {good.size} elements differ, the first at {tuple(map(int, at))}: "
            f"{got[at]}, expected {expected[at]}"
        )


def check(name, inputs, outputs, units=1, **more):
    """Calls an operator on both devices and compares. Returns what it has computed on the emulated one."""
    expected, got = (call(device, name, inputs, outputs, **more) for device in (HOST, DEVICE))
    for operand, (dtype, _) in outputs.items():
        compare(f"{operand} of {name}", dtype, got[operand], expected[operand], units)
    return got
