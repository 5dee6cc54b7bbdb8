"""The ops on objects with `__dlpack__` (NumPy, CuPy, JAX, ...): no torch, no gradients, results of the same kind.

CuPy arrays are served on CuPy's current stream, other CUDA arrays on the legacy default stream; the producer is
told so through `__dlpack__(stream=...)`. Results on a CUDA device are ready in that stream's order.
"""

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_void_p, cast, py_object

from . import _library
from ._library import CrossEntropyOptions, Deleter, DType, Legacy, Managed, RMSNormOptions, SoftmaxOptions

# Names of a DLPack capsule, before and after somebody has taken what is inside.
_NAME, _USED, _LEGACY_NAME = b"dltensor_versioned", b"used_dltensor_versioned", b"dltensor"
_LEGACY_STREAM = 1  # DLPack's number for CUDA's default stream


def _capsule_function(name, result, *arguments):
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule_new = _capsule_function("PyCapsule_New", py_object, c_void_p, c_char_p, c_void_p)
_capsule_is_valid = _capsule_function("PyCapsule_IsValid", c_int, py_object, c_char_p)
_capsule_pointer = _capsule_function("PyCapsule_GetPointer", c_void_p, py_object, c_char_p)
_capsule_set_name = _capsule_function("PyCapsule_SetName", c_int, py_object, c_char_p)


# ---- In ----


def _export(x, name, stream):
    """A DLPack capsule of x, of DLPack 1 where its producer knows that."""
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor or an object with __dlpack__")
    options = {} if stream is None else {"stream": stream}
    try:
        try:
            return x.__dlpack__(max_version=(1, 0), **options)
        except TypeError:
            return x.__dlpack__(**options)
    except (BufferError, TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(x).__name__} that cannot be exported through DLPack: {error}") from None


def _stream(x):
    """The stream of x's library, as a cudaStream_t and as DLPack numbers it; None for host memory."""
    if not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] != _library.CUDA:
        return None, None
    cupy = sys.modules.get("cupy")
    pointer = cupy.cuda.get_current_stream().ptr if cupy is not None and isinstance(x, cupy.ndarray) else 0
    return pointer, pointer or _LEGACY_STREAM


def _call(name, options, like, inputs, *wanted, extra=()):
    """Calls an owning entry point. inputs: arrays by argument name. wanted: whether each output is wanted.

    Returns the outputs, None for those not wanted. The library consumes its inputs whatever comes of the call, so
    nothing here may fail between handing over the first one and the call itself.
    """
    function = getattr(_library.load(), name)
    stream, dlpack_stream = _stream(like)
    capsules = [None if x is None else _export(x, key, dlpack_stream) for key, x in inputs.items()]
    pointers, unowned = [], []
    for capsule in capsules:
        if capsule is None:
            pointers.append(None)
        elif _capsule_is_valid(capsule, _NAME):
            pointers.append(cast(_capsule_pointer(capsule, _NAME), POINTER(Managed)))
        else:  # from before DLPack 1.0: lent without a deleter; the capsule frees it when this function returns
            legacy = cast(_capsule_pointer(capsule, _LEGACY_NAME), POINTER(Legacy)).contents
            unowned.append(Managed(1, 0, None, Deleter(), 0, legacy.tensor))
            pointers.append(ctypes.pointer(unowned[-1]))
    outputs = [POINTER(Managed)() if w else None for w in wanted]
    results = [None if output is None else byref(output) for output in outputs]
    for capsule in capsules:
        if capsule is not None and _capsule_is_valid(capsule, _NAME):
            _capsule_set_name(capsule, _USED)
    _library.check(function(*pointers, *extra, byref(options), stream, *results))
    owned = [None if output is None else _Owned(output) for output in outputs]
    return [None if result is None else _like(like, result) for result in owned]


# ---- Out ----


class _Owned:
    """A tensor of libgander's, which whoever calls `__dlpack__` first takes over."""

    def __init__(self, managed):
        self._managed = managed
        self._capsule = _capsule_new(cast(managed, c_void_p), _NAME, None)

    def _take(self):
        if not _capsule_is_valid(self._capsule, _NAME):
            raise BufferError("this result of gander's has been taken through __dlpack__ before")
        return self._capsule

    def __dlpack_device__(self):
        device = self._managed.contents.tensor.device
        return device.type, device.id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        capsule = self._take()
        if max_version is not None and max_version[0] >= 1:
            return capsule
        legacy = Legacy(self._managed.contents.tensor, None, _free_legacy)
        address = ctypes.addressof(legacy)
        _exported[address] = legacy, self._managed
        _capsule_set_name(capsule, _USED)
        return _capsule_new(address, _LEGACY_NAME, None)

    def __del__(self):
        if _capsule_is_valid(self._capsule, _NAME):
            _capsule_set_name(self._capsule, _USED)
            _delete(self._managed)


def _delete(managed):
    if managed.contents.deleter:
        managed.contents.deleter(cast(managed, c_void_p))


_exported = {}  # what consumers from before DLPack 1.0 hold, by address


@Deleter
def _free_legacy(address):
    _delete(_exported.pop(address)[1])


def _like(x, owned):
    """A result as an array of x's library; as it is where that has no from_dlpack."""
    library = type(x).__module__.partition(".")[0]
    if library in ("numpy", "cupy"):
        from_dlpack = sys.modules[library].from_dlpack
    elif library in ("jax", "jaxlib"):
        from jax.dlpack import from_dlpack
    elif hasattr(x, "__array_namespace__"):
        from_dlpack = x.__array_namespace__().from_dlpack
    else:
        return owned
    try:
        return from_dlpack(owned)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{library} cannot take this result through DLPack: {error}") from None


# ---- The functions behind gander's public ones (_ops.py) ----


def softmax_fwd(x, algorithm, batch_invariant):
    return _call("gander_softmax", SoftmaxOptions(None, algorithm, batch_invariant), x, {"x": x}, True)[0]


def softmax_bwd(dy, y, algorithm, batch_invariant):
    options = SoftmaxOptions(None, algorithm, batch_invariant)
    return _call("gander_softmax_grad", options, dy, {"dy": dy, "y": y}, True)[0]


def rmsnorm_fwd(x, weight, out_dtype, eps, store_rstd, algorithm, batch_invariant):
    dtype = DType() if out_dtype is None else _library.dtype_of(out_dtype, "out_dtype")
    inputs = {"x": x, "weight": weight}
    options = RMSNormOptions(None, eps, algorithm, batch_invariant)
    return _call("gander_rmsnorm", options, x, inputs, True, store_rstd, extra=(dtype,))


def rmsnorm_bwd(x, weight, dout, rstd, algorithm, batch_invariant):
    options = RMSNormOptions(None, 0.0, algorithm, batch_invariant)
    inputs = {"x": x, "weight": weight, "dout": dout, "rstd": rstd}
    return _call("gander_rmsnorm_grad", options, x, inputs, True, weight is not None)


def cross_entropy(x, target, weight, ignore_index, reduction, with_lse=False, with_dx=False, batch_invariant=False):
    """[loss, lse or None, dx or None]"""
    options = CrossEntropyOptions(None, ignore_index, reduction, 0, 0, batch_invariant)
    inputs = {"x": x, "target": target, "weight": weight}
    return _call("gander_cross_entropy", options, x, inputs, True, with_lse, with_dx)


def cross_entropy_bwd(x, target, dloss, lse, weight, ignore_index):
    options = CrossEntropyOptions(None, ignore_index, 0)
    inputs = {"x": x, "target": target, "weight": weight, "dloss": dloss, "lse": lse}
    return _call("gander_cross_entropy_grad", options, x, inputs, True)[0]
