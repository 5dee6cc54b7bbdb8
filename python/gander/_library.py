"""libgander: where it is, its structs and functions, and what its statuses become in Python.

The library is loaded by the first call that needs it, so that importing gander stays cheap and a process that
forks before its first call is unharmed.
"""

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

ABI_VERSION = 1
# gander_algorithm, and what is added to one where another may take its place.
ALGORITHMS = ("auto", "warp", "block", "register", "medium", "extreme", "cluster", "arbitrary", "splitk")
IF_SERVED = 0x100
CPU, CUDA = 1, 2  # DLPack's device types

# DLPack's (type code, bits) of each element type, by the name that NumPy and torch use.
DTYPES = {
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
}


class Device(ctypes.Structure):
    _fields_ = [("type", c_int32), ("id", c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Legacy(ctypes.Structure):
    """DLManagedTensor, from before DLPack 1.0."""


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""


Deleter = ctypes.CFUNCTYPE(None, c_void_p)
Legacy._fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", Deleter)]
Managed._fields_ = [
    ("major", c_uint32),
    ("minor", c_uint32),
    ("context", c_void_p),
    ("deleter", Deleter),
    ("flags", c_uint64),
    ("tensor", Tensor),
]

Allocate = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t)


class Allocator(ctypes.Structure):
    _fields_ = [("context", c_void_p), ("allocate", Allocate)]


class _Options(ctypes.Structure):
    def __init__(self, allocator=None, *fields):
        super().__init__(ctypes.sizeof(self), None if allocator is None else ctypes.pointer(allocator), *fields)


_HOW = [("algorithm", c_int32), ("batch_invariant", c_int32)]


class SoftmaxOptions(_Options):
    _fields_ = [("size", c_size_t), ("allocator", POINTER(Allocator)), *_HOW]


class RMSNormOptions(_Options):
    _fields_ = [("size", c_size_t), ("allocator", POINTER(Allocator)), ("eps", c_double), *_HOW]


class CrossEntropyOptions(_Options):
    _fields_ = [
        ("size", c_size_t),
        ("allocator", POINTER(Allocator)),
        ("ignore_index", c_int64),
        ("reduction", c_int32),
        ("one_pass", c_int32),
        *_HOW,
    ]


_TENSOR, _MANAGED, _OUT = POINTER(Tensor), POINTER(Managed), POINTER(POINTER(Managed))


def _op(options, borrowed, owned, grad_owned, *extra):
    """The prototypes of one op: forward and backward, borrowed (how many tensors each) and owned (inputs, outputs)."""
    tail = [POINTER(options), c_void_p]
    (inputs, outputs), (grad_inputs, grad_outputs) = owned, grad_owned
    return (
        [_TENSOR] * borrowed[0] + tail,
        [_TENSOR] * borrowed[1] + tail,
        [_MANAGED] * inputs + list(extra) + tail + [_OUT] * outputs,
        [_MANAGED] * grad_inputs + tail + [_OUT] * grad_outputs,
    )


_OPS = {
    "softmax": _op(SoftmaxOptions, (2, 3), (1, 1), (2, 1)),
    "rmsnorm": _op(RMSNormOptions, (4, 6), (2, 2), (4, 2), DType),
    "cross_entropy": _op(CrossEntropyOptions, (7, 7), (3, 3), (5, 1)),
}

_PROTOTYPES = {
    "gander_last_error": (c_char_p, []),
    "gander_version": (c_char_p, []),
    "gander_abi_version": (c_int32, []),
    "gander_build_info": (c_char_p, []),
    "gander_set_num_threads": (c_int32, [c_int32]),
    "gander_warmup": (c_int32, [Device]),
    "gander_explain": (c_int32, [c_char_p, c_int64, c_int64, DType, Device, c_int32, c_int32, c_char_p, c_size_t]),
    "gander_algorithms": (c_int32, [c_char_p, c_char_p, c_size_t]),
} | {
    f"gander_{op}{suffix}": (c_int32, arguments)
    for op, prototypes in _OPS.items()
    for suffix, arguments in zip(("_forward", "_backward", "", "_grad"), prototypes, strict=True)
}


def path() -> Path:
    """Where the library is: GANDER_LIBRARY, or libgander.so beside this file."""
    return Path(os.environ.get("GANDER_LIBRARY") or Path(__file__).with_name("libgander.so"))


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded at the first call."""
    try:
        library = ctypes.CDLL(str(path()))
    except OSError as error:
        raise RuntimeError(
            f"gander: cannot load its library: {error}; reinstall gander-kernels, run ./build.sh build in a checkout, "
            "or set GANDER_LIBRARY"
        ) from None
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.gander_abi_version() != ABI_VERSION:
        raise RuntimeError(
            f"gander: {path()} has ABI version {library.gander_abi_version()}, expected {ABI_VERSION}; "
            "reinstall gander-kernels"
        )
    return library


# By gander_status (gander.h); 0 is success.
_EXCEPTIONS = (
    None,
    ValueError,  # NULL
    ValueError,  # SHAPE
    TypeError,  # DTYPE
    RuntimeError,  # DEVICE
    ValueError,  # LAYOUT
    ValueError,  # ALIGNMENT
    ValueError,  # OVERLAP
    ValueError,  # OPTION
    RuntimeError,  # VERSION
    NotImplementedError,  # UNSUPPORTED
    RuntimeError,  # MEMORY
    RuntimeError,  # CUDA
    RuntimeError,  # FORK
    RuntimeError,  # INTERNAL
)
STATUS_MEMORY = 11


def exception(status: int, message: str) -> Exception:
    """The exception of a failed call."""
    kind = _EXCEPTIONS[status] if status < len(_EXCEPTIONS) else RuntimeError
    return kind(message)


def check(status: int) -> None:
    """Raises the calling thread's last error where a call failed."""
    if status:
        raise exception(status, load().gander_last_error().decode(errors="replace"))


def how(algorithm: str, batch_invariant: bool) -> tuple[int, bool]:
    """The fields that options and raw ops have at their end."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, expected {', '.join(map(repr, ALGORITHMS[:-1]))} or 'splitk'")
    return ALGORITHMS.index(algorithm), bool(batch_invariant)


def dtype_name(dtype) -> str:
    """The plain name of a NumPy, torch, CuPy or JAX dtype, or of one given by name."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return (name or str(dtype)).rpartition(".")[2]


def dtype_of(dtype, argument: str) -> DType:
    """DLPack's description of a dtype."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise TypeError(f"{argument} is {name}, expected float16, bfloat16, float32 or float64")
    return DType(*DTYPES[name], 1)
