"""DLPack capsules of arrays (NumPy, CuPy, JAX, ...): into libgander, and out of it.

Results are arrays of the same library as the first argument. CuPy arrays are processed on CuPy's current
stream, and other CUDA arrays on the legacy default stream. The producer gets this stream through
`__dlpack__(stream=...)`. Results on a CUDA device are ready in the order of that stream.
"""

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int, c_void_p, cast, py_object

from .._native import library
from .._native.library import Deleter, Legacy, Managed
from .._table import OPERATORS, SHAPES
from .._words import kind, shortened

# Names of DLPack capsules. A consumer renames a capsule when it takes ownership of the tensor.
_NAME, _USED, _LEGACY_NAME = b"dltensor_versioned", b"used_dltensor_versioned", b"dltensor"
_LEGACY_STREAM = 1  # DLPack's number for CUDA's legacy default stream


def _capsule_function(name, result, *arguments):
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule_new = _capsule_function("PyCapsule_New", py_object, c_void_p, c_char_p, c_void_p)
_capsule_is_valid = _capsule_function("PyCapsule_IsValid", c_int, py_object, c_char_p)
_capsule_pointer = _capsule_function("PyCapsule_GetPointer", c_void_p, py_object, c_char_p)
_capsule_set_name = _capsule_function("PyCapsule_SetName", c_int, py_object, c_char_p)


# ---- Inputs ----


def not_an_array(name, value):
    return TypeError(f"{name} is {kind(value)}, expected a torch.Tensor or an object with __dlpack__")


def _export(x, name, stream):
    """A DLPack capsule of x, versioned (DLPack 1) if x's library supports that."""
    if not hasattr(x, "__dlpack__"):
        raise not_an_array(name, x)
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, expected one without a mask, which would be lost; pass "
            f"{name}.filled(...)"
        )
    options = {} if stream is None else {"stream": stream}
    try:
        try:
            return x.__dlpack__(max_version=(1, 0), **options)
        except TypeError:
            return x.__dlpack__(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is {kind(x)} that cannot be exported through DLPack: {shortened(error)}; expected an "
            "array that can"
        ) from None


def _imported(x, name, stream):
    """The tensor of x, without a deleter: it belongs to its capsule, which is kept as an attribute."""
    try:
        capsule = _export(x, name, stream)
    except TypeError:
        if not _is_bfloat16(x):
            raise
        managed = _imported(x.view("uint16"), name, stream)
        managed.tensor.dtype = library.DType(*library.DTYPES["bfloat16"], 1)
        return managed
    if _capsule_is_valid(capsule, _NAME):
        found = cast(_capsule_pointer(capsule, _NAME), POINTER(Managed)).contents
        managed = Managed(found.major, found.minor, None, Deleter(), found.flags, found.tensor)
    elif _capsule_is_valid(capsule, _LEGACY_NAME):
        found = cast(_capsule_pointer(capsule, _LEGACY_NAME), POINTER(Legacy)).contents
        managed = Managed(1, 0, None, Deleter(), 0, found.tensor)
    else:
        raise TypeError(
            f"{name} is {kind(x)} whose __dlpack__ returns {kind(capsule)}, expected a new DLPack capsule"
        )
    managed.capsule = capsule
    return managed


def _is_numpys(x):
    return module_of(x) is sys.modules.get("numpy", x)


def _is_bfloat16(x):
    """Whether x is NumPy's array of ml_dtypes' bfloat16: DLPack has the type, but NumPy exports none."""
    return _is_numpys(x) and str(x.dtype) == "bfloat16"


def _bfloat16_of(x):
    """The dtype bfloat16 of arrays of x's library, if that is NumPy and some module has given it one."""
    if _is_bfloat16(x):
        return x.dtype
    return getattr(sys.modules.get("ml_dtypes"), "bfloat16", None) if _is_numpys(x) else None


def _stride(sizes, strides):
    """The stride if these dimensions collapse into one, else None."""
    stride, count = 1, 1
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if count == 1:
                stride = step
            elif step != stride * count:
                return None
            count *= size
    return stride


def _is_supported(tensor, layout):
    """Whether the library supports the strides of an operand of this layout (see gander._table.ShapeRule)."""
    rank = tensor.ndim
    sizes = tensor.shape[:rank]
    if not tensor.strides or 0 in sizes:
        return True
    strides = tensor.strides[:rank]
    if layout == "rows":
        return _stride(sizes[-1:], strides[-1:]) == 1 and _stride(sizes[:-1], strides[:-1]) is not None
    if layout in ("heads", "tables"):
        outer = sizes[: -3 if layout == "heads" else -2], strides[: -3 if layout == "heads" else -2]
        return _stride(sizes[-1:], strides[-1:]) == 1 and _stride(*outer) is not None
    if layout == "broadcast":  # the library knows the shape that it is for
        return _stride(sizes[-1:], strides[-1:]) in (0, 1)
    stride = _stride(sizes, strides)
    return stride is not None if layout == "regular" else stride == 1


def indices(x):
    """Class indices in a dtype that the library takes: a copy of those in uint8, as in torch."""
    if str(getattr(x, "dtype", "")) != "uint8" or not hasattr(x, "astype"):
        return x
    return x.astype("int32" if module_of(x) is None else "int64")  # JAX has no int64 by default


def _input(x, operand, stream):
    """The tensor of x, or of a contiguous copy if the library does not support the strides of x."""
    if x is None:
        return None
    if operand.dtype == "index":
        x = indices(x)
    managed, module = _imported(x, operand.name, stream), module_of(x)
    # For arrays of other libraries libgander's error says what to do.
    if module is None or _is_supported(managed.tensor, SHAPES[operand.shape].layout):
        return managed
    return _imported(module.ascontiguousarray(x), operand.name, stream)


def _stream(x):
    """The stream to use for x, as a cudaStream_t and as DLPack's number. (None, None) for host memory."""
    if not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] != library.CUDA:
        return None, None
    cupy = sys.modules.get("cupy")
    pointer = cupy.cuda.get_current_stream().ptr if cupy is not None and isinstance(x, cupy.ndarray) else 0
    return pointer, pointer or _LEGACY_STREAM


def run(operator, given, options, results):
    """Calls the operator's function that returns new outputs. Returns those named in `results`.

    The library takes ownership of inputs that have a deleter. These have none.

    given: inputs by name. options: dtypes of outputs too.
    """
    like = given[operator.operands[0].name]
    stream, dlpack_stream = _stream(like)
    inputs = [operand for operand in operator.operands if not operand.output]
    tensors = {operand.name: _input(given.get(operand.name), operand, dlpack_stream) for operand in inputs}
    outputs = {name: POINTER(Managed)() for name in results}
    slots = {name: ctypes.pointer(output) for name, output in outputs.items()}
    library.check(library.call(operator.owned, stream, **tensors, **slots, **options))
    owned = [_Owned(output) for output in outputs.values()]
    return tuple(_like(like, output) for output in owned)


_READ_ONLY = 1  # DLPack's flag


def run_into(name, inputs, written, options):
    """Calls the operator's function that borrows its tensors.

    inputs: by operand. written: the arrays to write, by output. They may be inputs.
    """
    operator = OPERATORS[name]
    stream, dlpack_stream = _stream(inputs[operator.operands[0].name])
    tensors = {}
    for operand in operator.operands:
        x = (written if operand.output else inputs).get(operand.name)
        if x is not None and any(x is array for array in written.values()):
            managed = _imported(x, operand.name, dlpack_stream)
            _check_writable(x, operand.name, managed)
        else:
            managed = _input(x, operand, dlpack_stream)
        tensors[operand.name] = None if managed is None else managed.tensor
    library.check(library.call(f"gander_{name}", stream, **tensors, **options))


def module_of(x):
    """The module numpy or cupy whose array x is, also as a subclass. None for another library's."""
    roots = (cls.__module__.partition(".")[0] for cls in type(x).__mro__)
    return next((sys.modules[root] for root in roots if root in ("numpy", "cupy")), None)


def _check_writable(x, name, managed):
    """Refuses an array that may not be written. Libraries other than these have immutable arrays."""
    if module_of(x) is None:
        raise TypeError(f"{name} is {kind(x)}, expected an array of NumPy or CuPy, because it is written")
    if managed.flags & _READ_ONLY:
        raise ValueError(f"{name} is read-only, expected an array that can be written; pass a copy")


# ---- Outputs ----


class _Owned:
    """A tensor allocated by libgander. The first caller of `__dlpack__` becomes its owner."""

    def __init__(self, managed):
        self._managed = managed
        self._capsule = _capsule_new(cast(managed, c_void_p), _NAME, None)

    def is_bfloat16(self):
        dtype = self._managed.contents.tensor.dtype
        return (dtype.code, dtype.bits) == library.DTYPES["bfloat16"]

    def as_uint16(self):
        """The same bits, of a type that NumPy takes."""
        self._managed.contents.tensor.dtype = library.DType(*library.DTYPES["uint16"], 1)
        return self

    def __dlpack_device__(self):
        device = self._managed.contents.tensor.device
        return device.type, device.id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if not _capsule_is_valid(self._capsule, _NAME):
            raise BufferError("this result of gander's was already consumed through __dlpack__")
        if max_version is not None and max_version[0] >= 1:
            return self._capsule
        legacy = Legacy(self._managed.contents.tensor, None, _free_legacy)
        address = ctypes.addressof(legacy)
        _exported[address] = legacy, self._managed
        _capsule_set_name(self._capsule, _USED)
        return _capsule_new(address, _LEGACY_NAME, None)

    def __del__(self):
        if _capsule_is_valid(self._capsule, _NAME):
            _capsule_set_name(self._capsule, _USED)
            _delete(self._managed)


def _delete(managed):
    if managed.contents.deleter:
        managed.contents.deleter(cast(managed, c_void_p))


_exported = {}  # legacy tensors that are held by consumers from before DLPack 1.0, by address


@Deleter
def _free_legacy(address):
    _delete(_exported.pop(address)[1])


def _like(x, owned):
    """A result as an array of x's library, or unchanged if that has no from_dlpack."""
    name = type(x).__module__.partition(".")[0]
    if (module := module_of(x)) is not None:
        from_dlpack = module.from_dlpack
    elif name in ("jax", "jaxlib"):
        from jax.dlpack import from_dlpack
    elif hasattr(x, "__array_namespace__"):
        from_dlpack = x.__array_namespace__().from_dlpack
    else:
        return owned
    try:
        if owned.is_bfloat16() and (bfloat16 := _bfloat16_of(x)) is not None:
            return from_dlpack(owned.as_uint16()).view(bfloat16)
        return from_dlpack(owned)
    except (BufferError, RuntimeError, TypeError) as error:
        hint = "; import ml_dtypes, which gives it bfloat16" if name == "numpy" else ""
        raise TypeError(f"{name} cannot take this result through DLPack: {error}{hint}") from None
