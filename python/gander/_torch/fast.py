"""The fast path, which bypasses torch's dispatcher, and the checks of what it relies on (c/fast.c).

For an eager call on plain tensors, with no mode or transform active, the dispatcher only costs host time. For
such a call a function of c/fast.c takes the tensors directly from Python. For any other call, or if the call
fails, it returns None. The call then goes through the dispatcher, which runs it or raises its error.

The overloads of torch.ops.gander take that way too, because the code that Inductor makes calls them.

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
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._table import TORCH, arguments, demand, differentiable, operands, tensors, upstream
from .registry import complete, overloads, untraced

# The releases of torch that are tested: the oldest that gander supports, 2.11, and the newest, which is the
# one in requirements.in. `./build.sh test-torch` reads this line.
TESTED = ("2.10.0", "2.11.0", "2.15.0")

_STATE = "_ZN3c104impl26raw_local_dispatch_key_setE"

_functions: dict = {}  # the functions of c/fast.c, by operator
fast: Any = SimpleNamespace()  # for each operator, what to try first: it returns None for the dispatcher
dispatch: Any = SimpleNamespace()  # what calls the dispatcher, since torch.ops has functions of this file
_may_bypass: Callable[[], bool]  # whether nothing is active that the dispatcher serves, from c/fast.c
_off: str | None = None  # why the fast path is off
_checked: set = set()  # the operators whose functions return the dispatcher's bits
_checking = False


def status() -> bool | str:
    """True, or why the fast path is off, or why it could not be checked now."""
    if not _off and _check(*_functions):
        return True
    return _off or "not checked: a mode, a transform or hooks on saved tensors are active"


def _first(name: str, use):
    """What to call until an operator's function has been checked, which is then passed to `use`."""
    writes = bool(TORCH[name].writes)

    def first(*arguments):
        function = _functions.get(name)
        if function is None or saved_tensors_hooks():
            return None
        # If the check fails, the dispatcher runs the operator again. One that writes over its arguments must
        # not run twice, so its check comes first, unless a mode or a transform would see it.
        if writes and not (_may_bypass() and _check(name)):
            return None
        results = function(*arguments)
        if results is None or not _check(name):
            return None
        use(function)
        return results

    return first


def _bypass(name: str):
    """What torch.ops calls instead of the dispatcher, with the arguments in any form.

    A result that is not asked for is a tensor without elements, as the schema says. c/fast.c makes it if it
    gets an argument more.
    """
    through, names, void = getattr(dispatch, name), tuple(arguments(name)), not TORCH[name].results
    rest = [names[i:] for i in range(len(names) + 1)]

    def use(function):
        nonlocal direct
        direct = function

    direct = _first(name, use)

    def bypass(*given, **named):
        if not named:
            results = direct(*(given if len(given) == len(names) else complete(name, given)), True)
        elif len(given) < len(rest) and tuple(named) == rest[len(given)]:  # as Inductor calls it
            results = direct(*given, *named.values(), True)
        else:
            results = None
        if results is None:
            return through(*given, **named)
        return None if void else results

    return untraced(bypass)


# ---- When torch is imported ----


def start(binary, functions: dict, one_pass: int) -> None:
    """Loads the functions of c/fast.c.

    functions: the autograd.Functions of the operators that the fast path can differentiate. Their forward is
    set here.
    one_pass: for CUDA tensors of this many elements or more, the dispatcher's kernel computes cross-entropy's
    gradient in one pass with the loss. The fast path leaves these calls to the dispatcher.
    """
    global _off
    try:
        _off = _untested() or _find(ctypes.PyDLL(str(binary)), functions, one_pass)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        _off = f"torch {torch.__version__} lacks what it relies on: {error}"
    if _off:
        _functions.clear()
    for name, overload in overloads.items():
        setattr(dispatch, name, overload._op if name in _functions else overload)
        setattr(fast, name, _first(name, partial(setattr, fast, name)) if name in _functions else _decline)
    for name in _functions:
        overloads[name]._op = _bypass(name)


def _decline(*arguments):
    return None


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
    global _may_bypass
    _may_bypass = library.gander_torch_may_bypass
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
        **{name: function.apply for name, function in functions.items()},
    }
    missing = library.gander_fast_functions(given, (ctypes.c_uint64 * 4)(*states), _functions)
    if missing:
        return f"torch {torch.__version__} lacks {missing.decode()}"
    forward = _functions.pop("forward")
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
    in_backward = ()
    if named is not None:
        in_backward = (torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(named)),)
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

_SHAPES = {
    "rows": (3, 8),
    "columns": (8,),
    "head_columns": (8,),
    "per_row": (3,),
    "strided": (3,),
    "reduced": (3,),
    "statistics": (7,),
    "broadcast": (8,),
}


def _example(name):
    """Arguments of a call on three rows of eight elements."""

    def tensor(operand):
        shape = torch.Size(_SHAPES.get(operand.shape, ()))
        if operand.dtype == "index":
            return torch.arange(shape.numel(), device="cpu")
        return (torch.arange(shape.numel(), dtype=torch.float32, device="cpu") % 5 / 3 + 0.5).reshape(shape)

    inputs = (
        None if argument == "divisor" else tensor(operands(name)[argument])  # a mean refuses a divisor
        for argument in tensors(name)
    )
    every = dict.fromkeys(map(demand, TORCH[name].on_demand), True)
    defaults = zip(arguments(name), complete(name, tuple(inputs)), strict=True)
    return tuple(every.get(argument, value) for argument, value in defaults)


def _results(name, function, leaves):
    """A function's results or what it writes, then the gradients of its arguments `leaves`.

    None if the function left the call to the dispatcher.
    """
    given = _example(name)
    for argument, tensor in zip(tensors(name), given, strict=False):
        if tensor is not None:
            tensor.requires_grad_(argument in leaves)
    results = function(*given)
    if results is None and function is not getattr(dispatch, name):
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
                expected = _results(name, getattr(dispatch, name), leaves)
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
