"""gander's operators in PyTorch: schemas, kernels, fake kernels, gradients, and rules for vmap, autocast and
DTensor.

Importing this module registers them. The first kernel that runs loads the library. Everything here is made
from the table of operators (_operators_gen.py), so a new operator or option needs no change here.

This module has a function for each operator of torch.ops.gander, with the same name. It takes all of the
operator's arguments by position. If possible, it bypasses torch's dispatcher (_fast.py).
"""

import ctypes
import os
import re
import sys
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_or_false

from . import _cross_entropy, _fakes, _fast, _gradients, _inductor, _library, _ops, _vmap  # noqa: F401
from ._operators_gen import TORCH
from ._schemas import arguments, complete, overloads, registry, untraced
from ._sharding import cross_entropy_of_slices

# ---- Kernels (_torch.c) ----

_BINARY = Path(__file__).with_name("_torch.so")


def _register_kernels() -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(_BINARY))
    kernels.gander_torch_register.restype = ctypes.c_char_p
    kernels.gander_torch_failure.argtypes = [ctypes.POINTER(ctypes.c_char_p)]
    error = kernels.gander_torch_register(os.fsencode(_library.path()))
    if error:
        raise RuntimeError(f"{error.decode()}; expected torch 2.10 or newer, this is {torch.__version__}")
    return kernels


_kernels = _register_kernels()


# What torch says of an argument that is no number of the kind that an operator takes.
_CAST = re.compile(r"Expected a value of type '(\w+)' for argument '(\w+)' .*\n.*\nValue: (.*)")
_NUMBERS = {"float": "a number", "int": "an integer of 64 bits", "bool": "True or False"}


def explained(error: RuntimeError, **arguments) -> Exception:
    """The exception to raise for an error from the dispatcher: one of the right type.

    A kernel can only make torch raise RuntimeError. It keeps the status of its failure, which decides the
    type.
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            return TypeError(
                f"{name} is a {type(value).__name__}, expected a torch.Tensor, like the first argument"
            )
        if value is not None and value.is_nested:
            return nested(name)
    if is_dynamo_compiling():  # which raises the error itself, and could not trace what follows
        return error
    if cast := _CAST.search(str(error)):
        expected, argument, value = cast.groups()
        return TypeError(f"{argument} is {value}, expected {_NUMBERS.get(expected, expected)}")
    message = ctypes.c_char_p()
    status = _kernels.gander_torch_failure(ctypes.byref(message))
    text = (message.value or b"").decode(errors="replace")
    if not status or text not in str(error):
        return error
    if status == _library.STATUS_MEMORY:
        return torch.cuda.OutOfMemoryError(text)
    return _library.exception(status, text)


def nested(name: str) -> NotImplementedError:
    """The refusal of a nested tensor."""
    return NotImplementedError(
        f"{name} is a nested tensor, expected a dense one; or call gander.nn.functional, which leaves it to "
        "torch"
    )


def differ(shape, other) -> bool:
    """Whether two shapes differ. What a traced function cannot know yet, its graph asserts."""
    if not is_compiling():
        return shape != other
    if len(shape) != len(other):
        return True
    for m, n in zip(shape, other, strict=True):
        if guard_or_false(m != n):
            return True
        torch._check(m == n)
    return False


def scalar(name: str, value, x: Tensor) -> Tensor:
    """A new 0-dim tensor on x's device, of the dtype that x's statistics have, from a number or a tensor.

    Nothing synchronizes.
    """
    if x.is_nested:
        raise nested("x")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected (); pass {name}.squeeze()")
        if value.requires_grad:
            raise ValueError(f"{name} requires a gradient, but has none; pass {name}.detach()")
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {str(value.dtype)[6:]}, expected a real number; convert it")
        if value.device != x.device:
            raise RuntimeError(f"{name} is on {value.device}, expected {x.device} as x; move one of them")
        return value.to(dtype, copy=True)
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is {value!r}, expected a number or a 0-dim tensor on the device of x")
    compiling = is_dynamo_compiling()
    if isinstance(value, torch.SymInt) or (
        compiling and isinstance(value, int) and not guard_or_false(abs(value) >= 2**63)
    ):
        return x.new_full((), value, dtype=dtype)
    if isinstance(value, torch.SymFloat) or (compiling and isinstance(value, float)):
        # A graph has a float as an argument only if it takes part in arithmetic, else as a constant.
        return x.detach().new_ones((), dtype=dtype) * value
    return x.new_full((), float(value), dtype=dtype)


# ---- Operators that write over an argument ----


def _increments_version(name):
    """A kernel that increments the versions of the written tensors, as autograd expects. torch does not see
    that our kernels write."""
    overload, after = overloads[name], torch._C._after_ADInplaceOrView_keyset
    positions = [arguments(name).index(argument) for argument in TORCH[name].writes]

    def kernel(keyset, *given):
        torch.autograd.graph.increment_version(
            [given[at] for at in positions if at < len(given) and given[at] is not None]
        )
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keyset & after, *given)

    return kernel


for _name, _operator in TORCH.items():
    if _operator.writes:
        registry.impl(_name, untraced(_increments_version(_name)), "ADInplaceOrView", with_keyset=True)


def _refuses_negated(name):
    """A kernel for calls with negated views, such as the imaginary part of a conjugate. torch's own for all
    operators passes copies, and expects each that is written among the results."""
    overload = overloads[name]
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Negative)
    positions = {arguments(name).index(argument): argument for argument in TORCH[name].writes}

    def kernel(keyset, *given):
        for at, argument in positions.items():
            if at < len(given) and given[at] is not None and given[at].is_neg():
                raise RuntimeError(
                    f"gander: {argument} is a negated view, expected a tensor that can be written; pass "
                    f"{argument}.resolve_neg()"
                )
        given = (value.resolve_neg() if isinstance(value, Tensor) else value for value in given)
        return overload.redispatch(keyset & after, *given)

    return kernel


for _name, _operator in TORCH.items():
    if _operator.writes:
        registry.impl(_name, untraced(_refuses_negated(_name)), "Negative", with_keyset=True)


# ---- Autocast ----

# Operators that run in float32 under CUDA autocast. RMSNorm keeps the dtype of its input, like F.rms_norm in
# torch 2.10 and 2.11 (2.15 registers a cast to float32 for it). Cross-entropy's loss is always float32. CPU
# autocast casts none of these operators.
_IN_FLOAT32 = ("softmax",)

# These return float32 there. They compute in float32 anyway, so their inputs need no cast.
_TO_FLOAT32 = ("layernorm", "layernorm_add", "layernorm_residual", "masked_softmax")


def _in_float32(overload):
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def widened(value):
        half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if half else value

    def kernel(*given):
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*map(widened, given))

    return kernel


def _to_float32(name):
    overload, position = overloads[name], arguments(name).index("out_dtype")
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def kernel(*given):
        given = list(complete(name, given))
        if given[position] is None and given[0].dtype in (torch.float16, torch.bfloat16):
            given[position] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(off):
            return overload(*given)

    return kernel


for _name in _IN_FLOAT32:
    registry.impl(_name, untraced(_in_float32(overloads[_name])), "AutocastCUDA")
for _name in _TO_FLOAT32:
    registry.impl(_name, untraced(_to_float32(_name)), "AutocastCUDA")


# ---- Gradients, and the functions that _ops.py calls ----

_gradients.register(
    {"cross_entropy": _cross_entropy.choose},
    {
        "cross_entropy": cross_entropy_of_slices,
        "cross_entropy_bwd": _inductor.gradient,
    },
)
_fast.start(_BINARY, _gradients.fast_functions(), _cross_entropy.ONE_PASS)
globals().update({name: _fast.call(name) for name in TORCH})


from . import _linear_cross_entropy  # noqa: E402, F401 - registers an operator that calls those above


def __getattr__(name):
    # True, or why the fast path is off. Not a constant, because the first call may turn it off.
    if name == "fast_path":
        return _fast.status()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ops.use_torch(sys.modules[__name__])
