"""The fast path past torch's dispatcher: calls that take it, and checks of what it relies on (_fast.c).

For an eager call on plain tensors, with no mode or transform active, the dispatcher costs host time and adds
nothing. A function of _fast.c takes the tensors of such a call straight from Python. For any other call, and
for one that fails, it returns None. The call then goes through the dispatcher, which serves or refuses it.

The fast path relies on parts of torch that are not public. When torch is imported, this file checks that the
symbols are there, and the size and the meaning of the thread's dispatch state. Answers can be checked only by
the first call, because they need the library, which an import must not load. The fast path is off, and
gander.info() says why, if a check fails, if torch's version is outside of those that are tested, or if
GANDER_FAST_PATH is 0.
"""

import ctypes
import mmap
import os
import re
import struct

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ._operators_gen import TORCH
from ._schemas import complete, differentiable, operands, overloads, tensors

# The releases of torch that the checks run: the oldest that gander takes, 2.11, and the newest, which is the
# one in requirements.in. `./build.sh test-torch` reads this line.
TESTED = ("2.10.0", "2.11.0", "2.15.0")

_STATE = "_ZN3c104impl26raw_local_dispatch_key_setE"

_functions: dict = {}  # of _fast.c, by operator
_off: str | None = None  # why the fast path is off
_checked = _checking = False


def status() -> bool | str:
    """True, or why the fast path is off."""
    if not _off:
        _check()
    return _off or True


def call(name: str):
    """A function that calls an operator with all its arguments, past the dispatcher if possible."""
    overload = overloads[name]
    if name not in _functions:
        return overload

    def first(*arguments):
        nonlocal fast
        if name not in _functions or _hooks():
            return None
        results = _functions[name](*arguments)
        if results is None or not _check():
            return None
        fast = _functions[name]
        return results

    fast = first

    def call(*arguments):
        if not is_dynamo_compiling() and (results := fast(*arguments)) is not None:
            return results
        return overload(*arguments)

    return call


# ---- When torch is imported ----


def start(binary, functions: dict, most: int) -> None:
    """Finds the functions of _fast.c.

    functions: for each operator that the fast path differentiates its autograd.Function, whose forward is set
    here.
    most: the elements of a CUDA tensor from which cross-entropy computes its gradient in another way.
    """
    global _off
    try:
        _off = _untested() or _find(ctypes.PyDLL(str(binary)), functions, most)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        _off = f"torch {torch.__version__} lacks what it relies on: {error}"
    if _off:
        _functions.clear()


def _untested():
    if os.environ.get("GANDER_FAST_PATH") == "0":
        return "GANDER_FAST_PATH is 0"

    def minor(version):
        return tuple(map(int, re.findall(r"\d+", version)[:2]))

    if not minor(TESTED[0]) <= minor(torch.__version__) <= minor(TESTED[-1]):
        return f"torch is {torch.__version__}, and {TESTED[0]} to {TESTED[-1]} are tested"
    return None


def _find(library, functions, most):
    """Fills _functions. Returns what is missing, or None."""
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
    _hooks()
    given = {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "None": None,
        "False": False,
        "True": True,
        "RuntimeError": RuntimeError,
        "is_neg": Tensor.is_neg,
        "is_cow": torch._C._is_cow_tensor,
        "contiguous": Tensor.contiguous,
        "empty_strided_cpu": _empty_on("cpu"),
        "empty_strided_cuda": _empty_on("cuda"),
        "forward_ad": vars(forward_ad),
        "exchange": Tensor.__dlpack_c_exchange_api__,
        "most": most,
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
    """The dispatch states other than zero in which the fast path is taken.

    They are those of inference mode and of a backward pass, for which autograd's engine excludes the key of
    named tensors. None if what _fast.c reads is not what torch says of the thread's state.
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
    in_backward = (
        () if named is None else (torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(named)),)
    )
    functional = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize)
    guards = (torch.inference_mode(), *in_backward, functional)
    with torch.inference_mode(False):
        if words() != [0, 0]:
            return None
        rest, states = of_torch(), []
        for guard in guards:
            with guard:
                states.append(words())
                if states[-1] != [a ^ b for a, b in zip(of_torch(), rest, strict=True)] or not any(
                    states[-1]
                ):
                    return None
    return states[0] + (states[1] if in_backward else states[0])


def _empty_on(device):
    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    from torch._C._dynamo import guards

    return getattr(guards, f"_empty_strided_{device}", empty)  # inductor's, in two thirds of the time


# ---- At the first call ----

_SHAPES = {"rows": (2, 8), "columns": (8,), "per_row": (2,), "strided": (2,), "statistics": (5,)}


def _example(name):
    """Arguments of a call on two rows of eight."""

    def tensor(operand):
        shape = torch.Size(_SHAPES.get(operand.shape, ()))
        if operand.dtype == "index":
            return torch.arange(shape.numel(), device="cpu")
        return (torch.arange(shape.numel(), dtype=torch.float32, device="cpu") % 5 / 3 + 0.5).reshape(shape)

    return complete(name, tuple(tensor(operands(name)[argument]) for argument in tensors(name)))


def _answers(name, function, leaves):
    """What a function returns, and the gradients of its arguments `leaves`, or None if it returns None."""
    arguments = _example(name)
    for argument, tensor in zip(tensors(name), arguments, strict=False):
        tensor.requires_grad_(argument in leaves)
    results = function(*arguments)
    if results is None:
        return None
    results = [results] if isinstance(results, Tensor) else [*results]
    if leaves:  # from backward() itself: no hook and no compiled autograd has a part in this
        gradients = results[0].grad_fn.apply(torch.ones_like(results[0]))
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def _same(a, b):
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def _hooks():
    """Hooks on saved tensors, which must not see the tensors of a check."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _differs():
    """The operator whose function does not give the dispatcher's bits; "" if there is none; None if one
    declines."""
    with torch.inference_mode(False), torch.enable_grad():
        for name, function in _functions.items():
            single = len(TORCH[name].results) == 1  # the others leave gradients to the dispatcher
            for leaves in {(), tuple(differentiable(name)) if single else ()}:
                answers = _answers(name, function, leaves)
                if answers is None:
                    return None
                expected = _answers(name, overloads[name], leaves)
                if len(answers) != len(expected) or not all(map(_same, answers, expected)):
                    return name
    return ""


def _check() -> bool:
    """Whether every function gives the dispatcher's bits. Also False if that cannot be found out at this
    moment."""
    global _checked, _checking, _off
    if not (_checked or _off or _checking or _hooks()):
        _checking = True
        try:
            name = _differs()
            _checked = name == ""
            if name:
                _off = f"torch {torch.__version__} gives another answer through its dispatcher: {name}"
                _functions.clear()
        finally:
            _checking = False
    return _checked
