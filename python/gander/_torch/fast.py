"""The fast path, which bypasses torch's dispatcher, and the checks of what it relies on (c/fast.c).

For an eager call on plain tensors, with no mode or transform active, the dispatcher only costs host time. For
such a call a function of c/fast.c takes the tensors directly from Python. Any other call, or one that fails,
goes through the dispatcher, which runs it or raises its error.

The public functions call these functions, and so do the overloads of torch.ops.gander, because the code that
Inductor makes calls those. torch.compile sees the operators behind them.

The fast path relies on parts of torch that are not public. When torch is imported, this file checks that the
symbols exist, the size and the meaning of the thread's dispatch state, and where a Python object contains its
tensor. Results can only be checked in an operator's first call, because they need the library, which an
import must not load. The fast path is off, and gander.info() says why, if a check fails, if torch's version
is not in the tested range, or if GANDER_FAST_PATH is 0. Functions that were right before a check fails stay
in use.
"""

import ctypes
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _imports
from .._table import (
    ANY,
    DTYPES,
    SHAPES,
    TORCH,
    arguments,
    demand,
    differentiable,
    forms,
    operands,
    sizes,
    tensors,
    upstream,
)
from . import operators_gen
from .registry import by_name, defaults, overloads, untraced

# The releases of torch that are tested: the oldest that gander supports, 2.11, and the newest, which is the
# one in requirements.in. `./build.sh test-torch` reads this line.
TESTED = ("2.10.0", "2.11.0", "2.15.0")

_STATE = "_ZN3c104impl26raw_local_dispatch_key_setE"

# By operator: its function in c/fast.c, which returns None for a result that is not asked for, unless it asks
# the dispatcher, whose operators return an empty tensor for that; the function of torch.ops, which returns
# all results; the function that returns None instead of asking the dispatcher; and what calls the dispatcher.
_operators: dict[str, Callable[..., Any]] = {}
_wholes: dict[str, Callable[..., Any]] = {}
_functions: dict[str, Callable[..., Any]] = {}
dispatch: dict[str, Callable[..., Any]] = {}
_library: ctypes.PyDLL
_may_bypass: Callable[[], bool]  # whether nothing is active that the dispatcher serves, from c/fast.c
_off: str | None = None  # why the fast path is off
_checked: set = set()  # the operators whose functions return the dispatcher's bits
_checking = False


def status() -> bool | str:
    """True, or why the fast path is off, or why it could not be checked now."""
    if not _off and _check(*_functions):
        return True
    return _off or "not checked: a mode, a transform or hooks on saved tensors are active"


def operator(name: str) -> Callable[..., Any]:
    """An operator's function, which bypasses the dispatcher if possible. Takes arguments in any form."""
    return _operators.get(name) or getattr(operators_gen, name)


def _first(name: str) -> Callable[..., Any]:
    """What an operator's function calls until it has been checked. Takes all arguments."""
    writes = bool(TORCH[name].writes)

    def first(*given):
        function = _functions.get(name)
        if function is None or saved_tensors_hooks():
            return None
        # If the check fails, the dispatcher runs the operator again. One that writes over its arguments must
        # not run twice, so its check comes first, unless a mode or a transform would see it.
        if writes and not (_may_bypass() and _check(name)):
            return None
        results = function(*given)
        if results is None or not _check(name):
            return None
        _library.gander_fast_checked(name.encode())
        return results

    return untraced(first)


# ---- When torch is imported ----


def start(binary, functions: dict, one_pass: int) -> None:
    """Loads the functions of c/fast.c.

    functions: the autograd.Functions of the operators that the fast path can differentiate. Their forward is
    set here.
    one_pass: for CUDA tensors of this many elements or more, the dispatcher's kernel computes cross-entropy's
    gradient in one pass with the loss. The fast path leaves these calls to the dispatcher.
    """
    global _off
    dispatch.update({name: overload._op for name, overload in overloads.items()})
    try:
        _off = _untested() or _find(ctypes.PyDLL(str(binary)), functions, one_pass)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        _off = f"torch {torch.__version__} lacks what it relies on: {error}"
    if _off:
        _functions.clear()
        _operators.clear()
    for name in _operators:
        overloads[name]._op = _wholes[name]
    _imports.after_import("torch._dynamo", _teach_dynamo)


def _teach_dynamo() -> None:
    """Lets torch.compile see the operators behind the functions of c/fast.c."""
    for name, function in _operators.items():
        traced = getattr(operators_gen, name)
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)


def _untested():
    if os.environ.get("GANDER_FAST_PATH") == "0":
        return "GANDER_FAST_PATH is 0"

    def minor(version):
        return tuple(map(int, re.findall(r"\d+", version)[:2]))

    if not minor(TESTED[0]) <= minor(torch.__version__) <= minor(TESTED[-1]):
        return f"torch is {torch.__version__}, and {TESTED[0]} to {TESTED[-1]} are tested"
    return None


def _find(library, functions, one_pass):
    """Fills _functions. Returns what is missing, or None."""
    global _library, _may_bypass
    _library, _may_bypass = library, library.gander_torch_may_bypass
    _may_bypass.restype = ctypes.c_bool
    library.gander_torch_dispatch_state.restype = ctypes.c_bool
    library.gander_fast_functions.restype = ctypes.c_char_p
    library.gander_fast_functions.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.py_object]
    if _symbol_size(_STATE) != 16:
        return f"torch {torch.__version__} has another dispatch state"
    states = _states(library.gander_torch_dispatch_state)
    if states is None:
        return (
            f"torch {torch.__version__} has another dispatch state, or a mode was active when it was imported"
        )
    saved_tensors_hooks()
    given = {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "None": None,
        "False": False,
        "True": True,
        "RuntimeError": RuntimeError,
        "forward_ad": vars(forward_ad),
        "increment_version": torch._C._increment_version,
        "one_pass": one_pass,
        "tensor_offset": _tensor_offset(),
        **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")},
        "Ellipsis": ...,
        **{
            name: (
                functions[name].apply if name in functions else None,
                dispatch[name],
                _first(name),
                tuple(map(sys.intern, arguments(name))),
                defaults[name],
            )
            for name in TORCH
        },
    }
    found: dict = {}
    missing = library.gander_fast_functions(given, (ctypes.c_uint64 * 4)(*states), found)
    if missing:
        return f"torch {torch.__version__} lacks {missing.decode()}"
    forward = found.pop("forward")
    _functions.update({name: functions[0] for name, functions in found.items()})
    _operators.update({name: functions[1] for name, functions in found.items()})
    _wholes.update({name: functions[2] for name, functions in found.items()})
    for function in functions.values():
        function.forward = forward
    return None


def _symbol_size(name):
    """The size of a symbol of libc10 in its ELF symbol table, or None."""
    with open("/proc/self/maps") as maps:
        path = next((line.split(maxsplit=5)[5].strip() for line in maps if "/libc10.so" in line), "libc10.so")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        (start,), (width, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * width) for i in range(count)]
        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind == 11:  # SHT_DYNSYM, whose names are in section `link`
                names, length = sections[link][4:6]
                wanted = elf.find(b"\0" + name.encode() + b"\0", names, names + length) + 1 - names
                for symbol in struct.iter_unpack("<IBBHQQ", elf[offset : offset + size]):
                    if symbol[0] == wanted:
                        return symbol[5]
    return None


def _states(read):
    """The nonzero dispatch states in which the fast path is taken: inference mode and a backward pass.

    In a backward pass autograd's engine excludes the key of named tensors. Returns None if the state that
    c/fast.c reads is not the one that torch reports.
    """

    def of_torch():
        included, excluded = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )
        return [included.raw_repr(), excluded.raw_repr()]

    def words():
        state = (ctypes.c_uint64 * 2)()
        return list(state) if read(state) else None

    named = torch._C._parse_dispatch_key("Named")  # newer releases have no named tensors
    key = None if named is None else torch._C.DispatchKeySet(named)
    in_backward = () if key is None else (torch._C._ExcludeDispatchKeyGuard(key),)
    functional = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize)
    guards = (torch.inference_mode(), *in_backward, functional)
    with torch.inference_mode(False):
        if words() != [0, 0]:
            return None
        rest, states = of_torch(), []
        for guard in guards:
            with guard:
                states.append(words())
                expected = [a ^ b for a, b in zip(of_torch(), rest, strict=True)]
                if states[-1] != expected or not any(states[-1]):
                    return None
    return states[0] + (states[1] if in_backward else states[0])


def _tensor_offset():
    """Where an object of torch.Tensor contains the at::Tensor, which is a pointer to what it shares."""
    tensors = torch.empty(1, device="cpu"), torch.nn.Parameter(torch.empty(2, 3, device="cpu"))
    for offset in range(object.__basicsize__, Tensor.__basicsize__, 8):
        if all(ctypes.c_void_p.from_address(id(t) + offset).value == t._cdata for t in tensors):
            return offset
    raise RuntimeError("the address of a tensor in its Python object")


# ---- At the first call of an operator ----


# Operands that an example goes without: a mean refuses a divisor, and no position may be beyond its tables.
_LEFT_OUT = ("divisor", "offsets", "cu_seqlens")


def _example(name):
    """Arguments of a call on three rows of eight elements, or on three heads of each of three tokens."""
    options = by_name(name, (None,) * len(tensors(name)))
    rank = SHAPES[next(iter(operands(name).values())).shape].rank
    first = (3, 3, 8)[-max(rank, 2) :]

    def tensor(operand):
        named = sizes(forms(name, operand, options)[0].sizes, first)
        shape = torch.Size(3 if size is ANY else size for size in named)
        if operand.dtype == "index":
            return torch.arange(shape.numel(), device="cpu")
        if operand.dtype == "row_mask":
            return torch.ones(shape, dtype=torch.bool, device="cpu")
        if made := DTYPES[operand.dtype].made:
            return torch.zeros(shape, dtype=getattr(torch, made), device="cpu")
        return (torch.arange(shape.numel(), dtype=torch.float32, device="cpu") % 5 / 3 + 0.5).reshape(shape)

    inputs = (
        None if argument in _LEFT_OUT else tensor(operands(name)[argument]) for argument in tensors(name)
    )
    every = dict.fromkeys(map(demand, TORCH[name].on_demand), True)
    return tuple((by_name(name, tuple(inputs)) | every).values())


def _results(name, function, leaves):
    """A function's results or what it writes, then the gradients of its arguments `leaves`.

    None if the function left the call to the dispatcher.
    """
    given = _example(name)
    for argument, tensor in zip(tensors(name), given, strict=False):
        if tensor is not None:
            tensor.requires_grad_(argument in leaves)
    results = function(*given)
    if results is None and function is not dispatch[name]:
        return None
    if TORCH[name].writes:
        by_name = dict(zip(tensors(name), given, strict=False))
        return [by_name[argument] for argument in TORCH[name].writes]
    results = [results] if isinstance(results, Tensor) else [*results]
    if leaves:  # calls the backward node directly, so hooks and compiled autograd are not involved
        heads = upstream(TORCH[name].backward)
        ones = [
            torch.ones_like(tensor) if result in heads else None
            for result, tensor in zip(TORCH[name].results, results, strict=True)
        ]
        gradients = results[0].grad_fn.apply(*ones)
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def _same(a, b):
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def saved_tensors_hooks():
    """The active hooks on saved tensors, if any. They must not see the tensors of a check."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _differs(names):
    """The first of these operators whose function does not return the same bits as the dispatcher, or "".

    None if a function returned None, so that there is nothing to compare.
    """
    with torch.inference_mode(False), torch.enable_grad():
        for name in names:
            for leaves in {(), tuple(differentiable(name))}:
                results = _results(name, _functions[name], leaves)
                if results is None:
                    return None
                expected = _results(name, dispatch[name], leaves)
                if len(results) != len(expected) or not all(map(_same, results, expected)):
                    return name
    return ""


def _check(*names: str) -> bool:
    """Whether the functions of these operators return the dispatcher's bits. Also False if that cannot be
    checked now."""
    global _checking, _off
    if _checked.issuperset(names):
        return True
    if not (_off or _checking or saved_tensors_hooks()):
        _checking = True
        try:
            name = _differs([name for name in names if name not in _checked])
            if name == "":
                _checked.update(names)
            elif name:
                _off = f"torch {torch.__version__} returns another result through its dispatcher: {name}"
                _functions.clear()
        finally:
            _checking = False
    return _checked.issuperset(names)
