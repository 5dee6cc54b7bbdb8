"""gander.jax's handlers for CUDA, called as XLA calls them, on the emulated device.

The frame of a call and XLA's functions are made here: python/gander/jax/c/xla.h has the declarations.
"""

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from pathlib import Path

import gander
import numpy as np
import pytest
from emulated import DEVICE, HOST, ROW, Tensor, call
from gander._native import library as abi

KINDS = {"float16": 10, "float32": 11}  # XLA's numbers
EXECUTE, SCALAR, TEXT, F64, S64 = 3, 3, 4, 12, 5


def struct(name, *fields):
    return type(name, (Structure,), {"_fields_": [("size", c_size_t), ("extension", c_void_p), *fields]})


Version = struct("Version", ("major", c_int), ("minor", c_int))
Buffer = struct("Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))
Buffers = struct("Buffers", ("count", c_int64), ("types", POINTER(c_int)), ("buffers", POINTER(c_void_p)))
Attributes = struct(
    "Attributes",
    ("count", c_int64),
    ("types", POINTER(c_int)),
    ("names", POINTER(c_void_p)),
    ("values", POINTER(c_void_p)),
)
ErrorCreate = struct("ErrorCreate", ("message", c_char_p), ("code", c_int))
Stream = struct("Stream", ("context", c_void_p), ("stream", c_void_p))
Allocate = struct(
    "Allocate", ("context", c_void_p), ("bytes", c_size_t), ("alignment", c_size_t), ("data", c_void_p)
)
Free = struct("Free", ("context", c_void_p), ("bytes", c_size_t), ("data", c_void_p))
Ordinal = struct("Ordinal", ("context", c_void_p), ("ordinal", c_int32))
FUNCTIONS = [  # of XLA, in the order of its struct
    "error_create",
    "error_get_message",
    "error_destroy",
    "handler_register",
    "stream_get",
    "type_register",
    "context_get",
    "state_set",
    "state_get",
    "memory_allocate",
    "memory_free",
    "pool_schedule",
    "pool_count",
    "future_create",
    "future_set_available",
    "future_set_error",
    "run_id_get",
    "ordinal_get",
]
Api = struct("Api", ("version", Version), ("internal", c_void_p), *((name, c_void_p) for name in FUNCTIONS))
Frame = struct(
    "Frame",
    ("api", POINTER(Api)),
    ("context", c_void_p),
    ("stage", c_int),
    ("arguments", Buffers),
    ("results", Buffers),
    ("attributes", Attributes),
)


class Span(Structure):
    _fields_ = [("start", c_char_p), ("length", c_size_t)]


class Scalar(Structure):
    _fields_ = [("dtype", c_int), ("value", c_void_p)]


REFUSAL = 99


class Xla:
    """XLA's functions: what they were asked for, and the errors that were made."""

    def __init__(self, has_memory=True):
        self.messages, self.taken, self.given_back, self.memory = [], [], [], []
        self.api = Api(size=ctypes.sizeof(Api))
        self._functions = []

        def add(name, kind, function):
            self._functions.append(CFUNCTYPE(c_void_p, POINTER(kind))(function))
            setattr(self.api, name, ctypes.cast(self._functions[-1], c_void_p))

        def error_create(args):
            self.messages.append((args[0].code, args[0].message.decode()))
            return len(self.messages)

        def stream_get(args):
            args[0].stream = None

        def ordinal_get(args):
            args[0].ordinal = 0

        def memory_allocate(args):
            if not has_memory or args[0].alignment > 16:  # XLA promises no more
                return REFUSAL
            self.memory.append(DEVICE.allocate(args[0].bytes))
            args[0].data = self.memory[-1].ctypes.data
            self.taken.append(args[0].data)

        def memory_free(args):
            self.given_back.append(args[0].data)

        add("error_create", ErrorCreate, error_create)
        add("error_destroy", ErrorCreate, lambda args: None)
        add("stream_get", Stream, stream_get)
        add("ordinal_get", Ordinal, ordinal_get)
        add("memory_allocate", Allocate, memory_allocate)
        add("memory_free", Free, memory_free)


HANDLERS = ctypes.CDLL(str(Path(gander.__file__).parent / "jax/libgander_jax.so"))
HANDLERS.gander_jax_open.restype = c_char_p
HANDLERS.gander_jax_handler.restype = CFUNCTYPE(c_void_p, POINTER(Frame))
HANDLERS.gander_jax_handler.argtypes = [c_char_p, ctypes.c_bool]
assert HANDLERS.gander_jax_open(str(abi.path()).encode()) is None


def buffers(tensors):
    made = [
        Buffer(
            ctypes.sizeof(Buffer),
            None,
            KINDS[t.dtype],
            t.dl.data,
            t.dl.ndim,
            ctypes.cast(t.dl.shape, POINTER(c_int64)),
        )
        for t in tensors
    ]
    pointers = (c_void_p * len(made))(*(ctypes.addressof(b) for b in made))
    kept = made, pointers
    return Buffers(
        ctypes.sizeof(Buffers), None, len(made), (c_int * len(made))(*[1] * len(made)), pointers
    ), kept


def attributes(given):
    names, values, types, kept = [], [], [], []
    for name, value in given.items():
        names.append(Span(name.encode(), len(name)))
        if isinstance(value, str):
            values.append(Span(value.encode(), len(value)))
            types.append(TEXT)
        else:
            number = (c_double if isinstance(value, float) else c_int64)(value)
            kept.append(number)
            values.append(Scalar(F64 if isinstance(value, float) else S64, ctypes.addressof(number)))
            types.append(SCALAR)
    pointers = [(c_void_p * len(given))(*map(ctypes.addressof, some)) for some in (names, values)]
    kept += [names, values]
    return Attributes(
        ctypes.sizeof(Attributes), None, len(given), (c_int * len(given))(*types), *pointers
    ), kept


def handle(xla, operator, inputs, outputs, **options):
    """Runs a handler for CUDA. Returns the error that it made, or None, and the outputs' values."""
    given, made = ({n: Tensor(DEVICE, *v) for n, v in side.items()} for side in (inputs, outputs))
    (arguments, *kept), (results, *more) = buffers(given.values()), buffers(made.values())
    named = {"arguments": " ".join(given), "results": " ".join(made)}
    attrs, others = attributes(named | options)
    frame = Frame(
        ctypes.sizeof(Frame), None, ctypes.pointer(xla.api), None, EXECUTE, arguments, results, attrs
    )
    error = HANDLERS.gander_jax_handler(operator.encode(), True)(ctypes.byref(frame))
    del kept, more, others
    assert all(tensor.marked() for tensor in made.values())
    return error, {name: tensor.values() for name, tensor in made.items()}


@pytest.fixture(autouse=True)
def planned(tmp_path, monkeypatch):
    """By the library's own rows."""
    monkeypatch.chdir(tmp_path)
    ROW.write_text("")
    yield
    DEVICE.free()


def rows(m, n):
    return np.random.default_rng(0).standard_normal((m, n), dtype=np.float32)


@pytest.mark.parametrize("dtype", KINDS)
def test_handler(dtype):
    xla = Xla()
    inputs = {"x": (dtype, rows(3, 100)), "weight": ("float32", rows(1, 100)[0])}
    outputs = {"y": (dtype, (3, 100)), "rstd": ("float32", (3,))}
    error, found = handle(xla, "rmsnorm_forward", inputs, outputs, eps=0.5)
    assert error is None, xla.messages
    expected = call(HOST, "rmsnorm_forward", inputs, outputs, eps=0.5)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-3, atol=2e-3)


def test_scratch_is_given_back():
    """Memory from XLA's allocator, for the time of the call."""
    xla = Xla()
    inputs = {"x": ("float32", rows(64, 64)), "weight": ("float32", rows(1, 64)[0])}
    inputs |= {"dout": ("float32", rows(64, 64)), "rstd": ("float32", np.ones(64, np.float32))}
    outputs = {"dx": ("float32", (64, 64)), "dw": ("float32", (64,))}
    error, found = handle(xla, "rmsnorm_backward", inputs, outputs)
    assert error is None, xla.messages
    assert len(xla.taken) == 1 and xla.taken == xla.given_back
    expected = call(HOST, "rmsnorm_backward", inputs, outputs)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-3)
    poor = Xla(has_memory=False)
    error, _ = handle(poor, "rmsnorm_backward", inputs, outputs)
    assert error == REFUSAL and not poor.messages  # XLA's words reach the caller


def test_refusal():
    xla = Xla()
    error, _ = handle(xla, "softmax_forward", {"x": ("float32", rows(2, 8))}, {"y": ("float16", (2, 8))})
    assert error == 1
    ((code, message),) = xla.messages
    assert code == 3 and message.startswith("softmax_forward: y has dtype float16, expected float32")
