"""libgander: its path, its structs and functions, and the Python exceptions for its statuses.

Option structs and prototypes of the operators are made from the table of operators (gander._table). The
library is loaded by the first call that needs it. So importing gander is cheap, and a process may fork before
its first call.
"""

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from .._table import ABI_VERSION, OPERATORS, OPTIONS_MAGIC, STATUSES
from .._words import shown

CPU, CUDA = 1, 2  # DLPack's device types

_SERVED = ("float16", "bfloat16", "float32", "float64")

# DLPack's (type code, bits) of each element type, by the name that NumPy and torch use.
DTYPES = {
    "bool": (6, 8),
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    **{f"complex{bits}": (5, bits) for bits in (64, 128)},
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


Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class Legacy(ctypes.Structure):
    """DLManagedTensor, the unversioned struct from before DLPack 1.0."""

    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", Deleter)]


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", Deleter),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


_EXPLAIN = [c_char_p, c_int64, c_int64, DType]
PROTOTYPES = {
    "gander_last_error": (c_char_p, []),
    "gander_abi_version": (c_int32, []),
    "gander_build_info": (c_char_p, []),
    "gander_warmup": (c_int32, [Device]),
    "gander_explain": (c_int32, [*_EXPLAIN, Device, c_int32, c_int32, c_char_p, c_size_t]),
    "gander_explain_device": (c_int32, [*_EXPLAIN, c_char_p, c_int32, c_int32, c_char_p, c_size_t]),
    "gander_explain_heads": (
        c_int32,
        [c_char_p, c_int64, c_int64, c_int64, DType, Device, c_char_p, c_char_p, c_size_t],
    ),
    "gander_algorithms": (c_int32, [c_char_p, c_char_p, c_size_t]),
}


SONAME = f"libgander.so.{ABI_VERSION}"


def path() -> Path:
    """The path of the library to load: GANDER_LIBRARY, or this package's."""
    return Path(os.environ.get("GANDER_LIBRARY") or Path(__file__).parents[1] / "lib" / SONAME)


def _open() -> ctypes.CDLL:
    """The libgander that the process has, such as that of a C++ extension. If it has none, that of path().

    Two of them would be two Go runtimes, which both want the process's signals and threads. dlopen finds a
    loaded library by its SONAME, but not by the path of another copy. c/kernels.c in gander._torch does the
    same.
    """
    try:
        return ctypes.CDLL(SONAME, os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return ctypes.CDLL(str(path()))


@functools.cache
def load() -> ctypes.CDLL:
    """The library. The first call loads it."""
    try:
        library = _open()
    except OSError as error:
        raise RuntimeError(
            f"gander: cannot load its library: {error}; reinstall gander-kernels, run ./build.sh build in a "
            "checkout, or set GANDER_LIBRARY"
        ) from None
    if library.gander_abi_version() != ABI_VERSION:  # checked first: another version may lack functions
        raise RuntimeError(
            f"gander: {path()} has ABI version {library.gander_abi_version()}, expected {ABI_VERSION}; "
            "reinstall gander-kernels"
        )
    for name, (result, arguments) in PROTOTYPES.items():
        function = _symbol(library, name)
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library


def _symbol(library: ctypes.CDLL, name: str) -> Any:
    """A new object for a function of the library."""
    try:
        return library[name]
    except AttributeError:
        raise RuntimeError(
            f"gander: {file_of(library)} has no {name}, expected libgander in this package's version; "
            "install that, or call gander before the process loads another one"
        ) from None


class _Place(ctypes.Structure):
    """Dl_info of dladdr."""

    _fields_ = [("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p)]


def file_of(library: ctypes.CDLL) -> str:
    """The path of the file that a library was loaded from."""
    place = _Place()
    ctypes.CDLL(None).dladdr(ctypes.cast(library.gander_abi_version, c_void_p), ctypes.byref(place))
    return os.fsdecode(place.file)


class _Function(NamedTuple):
    """A C function of an operator."""

    call: Any  # with the types of its parameters
    options: type[ctypes.Structure]
    defaults: dict[str, float]  # of options: operands and dtypes have NULL
    before: list[str]  # the operands that are parameters before the option struct
    after: list[str]  # and after it


@functools.cache
def _function(name: str) -> _Function:
    """The function that borrows its tensors, or that owns its inputs and returns new outputs."""
    operator = OPERATORS.get(name.removeprefix("gander_"))
    owns = operator is None
    if operator is None:
        operator = next(o for o in OPERATORS.values() if o.owned == name)
    tensor = POINTER(Managed) if owns else POINTER(Tensor)
    kinds: dict[str, Any] = {"allocator": c_void_p}
    for operand in operator.operands:
        kinds[operand.name] = POINTER(tensor) if owns and operand.output else tensor
        if owns and operand.choice:
            kinds[operand.choice] = POINTER(DType)
    kinds |= {option.name: c_double if option.type == "real" else c_int64 for option in operator.options}
    fields = [("size", c_uint32), ("magic", c_uint32)]
    fields += [(field, kinds[field]) for field in operator.fields if field in kinds]
    # Without a __dict__ a name that is no field is an error.
    struct = type("Options", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    required = [operand for operand in operator.operands if not operand.optional]
    after = [operand.name for operand in required if owns and operand.output]
    before = [operand.name for operand in required if operand.name not in after]
    function = _symbol(load(), name)  # which no other thread uses yet
    function.restype = c_int32
    function.argtypes = [*map(kinds.get, before), POINTER(struct), c_void_p, *map(kinds.get, after)]
    defaults = {option.name: option.default for option in operator.options}
    return _Function(function, struct, defaults, before, after)


def options(name: str, **fields: Any) -> ctypes.Structure:
    """The option struct of a function. A field that is None or not given has its default."""
    struct, values = _function(name).options, dict(_function(name).defaults)
    for field, value in fields.items():
        if value is not None:
            values[field] = ctypes.pointer(value) if isinstance(value, ctypes.Structure) else value
    return struct(size=ctypes.sizeof(struct), magic=OPTIONS_MAGIC, **values)


def call(name: str, stream: int | None = None, **given: Any) -> int:
    """Calls a function of an operator and returns the status.

    given: operands, dtypes and options by name. None, or none, if an optional one is absent.
    """
    function = _function(name)
    before, after = ([given.pop(o) for o in operands] for operands in (function.before, function.after))
    return function.call(*before, options(name, **given), stream, *after)


# The exceptions for statuses. Those that are not listed raise RuntimeError.
_EXCEPTIONS = {
    "null": ValueError,
    "shape": ValueError,
    "dtype": TypeError,
    "layout": ValueError,
    "alignment": ValueError,
    "overlap": ValueError,
    "option": ValueError,
    "unsupported": NotImplementedError,
}
STATUS_MEMORY = STATUSES.index("memory")


def exception(status: int, message: str) -> Exception:
    """The exception of a failed call."""
    name = STATUSES[status] if status < len(STATUSES) else ""
    return _EXCEPTIONS.get(name, RuntimeError)(message.replace(" is NULL", " is None"))


def check(status: int) -> None:
    """Raises the calling thread's last error if a call failed."""
    if status:
        raise exception(status, load().gander_last_error().decode(errors="replace"))


def name_of(dtype: Any) -> str:
    """The name of a dtype of NumPy, torch, CuPy or JAX, or of one given by its name. "" if it is none."""
    if isinstance(dtype, str):
        name: Any = dtype
    elif isinstance(dtype, type) or "dtype" in type(dtype).__name__.lower():
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype
    else:
        return ""
    return str(name).rpartition(".")[2]


def serves(dtype: Any) -> bool:
    """Whether the operators take a dtype."""
    return name_of(dtype) in _SERVED


def dtype_name(dtype: Any, argument: str) -> str:
    """The name of a dtype that the operators take."""
    name = name_of(dtype)
    if not serves(dtype):
        found = name[:40] or shown(dtype)
        raise TypeError(f"{argument} is {found}, expected {', '.join(_SERVED[:-1])} or {_SERVED[-1]}")
    return name


def dtype_of(dtype: Any, argument: str) -> DType:
    """DLPack's description of a dtype."""
    return DType(*DTYPES[dtype_name(dtype, argument)], 1)
