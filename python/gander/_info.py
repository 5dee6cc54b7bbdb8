"""What gander is running on, and what a call would run."""

from __future__ import annotations

import ctypes
import json
import math
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _hook, _library, _ops
from ._operators_gen import ALGORITHMS, OPERATORS
from ._operators_gen import Algorithm as _Name

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def info() -> dict[str, Any]:
    """Facts about this installation: what the library was built from and for, and how torch is served.

    Keys: those of gander_build_info (version, abi_version, commit, go, nvcc, architectures, simd), library (its
    path), torch (its version, or None where torch is not imported), fast_path (True where eager calls go past torch's
    dispatcher, else why they do not; None without torch).
    Raises RuntimeError where the library cannot be loaded.
    """
    facts: dict[str, Any] = json.loads(_library.load().gander_build_info())
    torch, pytorch = sys.modules.get("torch"), sys.modules.get(f"{__package__}._pytorch")
    return facts | {
        "library": str(_library.path()),
        "torch": None if torch is None else torch.__version__,
        "fast_path": _hook.failure() if pytorch is None else pytorch.fast_path,
    }


def _constant(function: Any) -> Any:
    """Lets torch.compile call a function while it traces, and take what it returns as a constant."""
    function._dynamo_marked_constant = (
        True  # as torch.compiler.assume_constant_result does, but for its import
    )
    return function


def _check_op(op: str) -> None:
    if not isinstance(op, str):
        what = "None" if op is None else f"a {type(op).__name__}"
        raise TypeError(f"op is {what}, expected an operator's name, such as 'softmax' or 'rmsnorm_bwd'")


def _name(op: str) -> bytes:
    """The C ABI's name of an op of gander's."""
    name = op.replace("_fwd", "_forward").replace("_bwd", "_backward")
    return (f"{name}_forward" if f"{name}_forward" in OPERATORS else name).encode()


def _device(name: str) -> _library.Device | None:
    """A device of this machine; None for one that is meant by its name."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        return None
    torch = sys.modules.get("torch")
    if kind == "cuda" and not index and torch is not None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _library.Device(_library.CUDA if kind == "cuda" else _library.CPU, int(index or 0))


def _rows_of(x: Any, shape: Any, dtype: Any, device: Any) -> tuple[int, int, str, str]:
    """Rows, columns, dtype and device: x's where they are not given."""
    if x is not None:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"x is a {type(x).__name__}, expected a torch.Tensor or an object with __dlpack__"
            )
        shape, dtype = x.shape if shape is None else shape, x.dtype if dtype is None else dtype
        if device is None and isinstance(x, _ops._Tensor):
            device = x.device
        elif device is None:
            kind, index = x.__dlpack_device__()
            device = f"cuda:{index}" if kind == _library.CUDA else "cpu"
    for name, value in ("shape", shape), ("dtype", dtype), ("device", device):
        if value is None:
            raise TypeError(f"{name} is missing, expected x, or shape, dtype and device")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes:
        raise ValueError("x has rank 0, expected rank 1 or more")
    # operator.index gives torch.compile numbers for its symbols.
    rows, columns = map(operator.index, (math.prod(sizes[:-1]), sizes[-1]))
    return rows, columns, _library.dtype_name(dtype, "dtype"), str(device)


class Algorithm(NamedTuple):
    """What `algorithm=` takes: its name, what it does, and which rows it serves."""

    name: str
    what: str
    limits: str

    def __repr__(self) -> str:
        return f"<{self.name}: {self.what}; {self.limits}>"


def algorithms(
    op: str,
    x: Any = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> list[Algorithm]:
    """The algorithms of an op ("softmax", "softmax_bwd", "rmsnorm", "rmsnorm_bwd", ...) on CUDA tensors.

    Names are the same for both directions, limits are not: ask for the backward op too. Those of rmsnorm_bwd are for a
    call with a weight. Row lengths are in bytes; "unaligned" are rows that are not made of whole 16-byte vectors at
    addresses that are multiples of 16. CPU tensors have "auto" alone.
    x, or shape, dtype and device, as of explain: only the algorithms that serve these rows there.
    Raises ValueError for another op.
    """
    _check_op(op)
    if x is None and shape is None and dtype is None and device is None:
        return _algorithms(op)
    return _serving(op, *_rows_of(x, shape, dtype, device))


@_constant
def _algorithms(op: str) -> list[Algorithm]:
    text = ctypes.create_string_buffer(1 << 14)
    _library.check(_library.load().gander_algorithms(_name(op), text, len(text)))
    return [Algorithm(**fields) for fields in json.loads(text.value)]


@_constant
def _serving(op: str, *rows: Any) -> list[Algorithm]:
    def serves(algorithm: Algorithm) -> bool:
        try:
            return bool(_explain(op, *rows, algorithm.name, False))
        except NotImplementedError:
            return False

    _explain(op, *rows, "auto", False)  # what is not for an algorithm to serve is refused
    return [algorithm for algorithm in _algorithms(op) if serves(algorithm)]


def explain(
    op: str,
    x: Any = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    algorithm: _Name = "auto",
    batch_invariant: bool = False,
) -> str:
    """Says in words which algorithm and which kernels a call would run on x, and why.

    op: a name of gander's ("softmax", "softmax_bwd", "rmsnorm", "cross_entropy", ...; "cross_entropy_fwd_dx" is
    the single pass that gives loss and gradient). x: the (..., N) tensor or array; its values are not read.
    shape, dtype, device: in place of x's, or of x. dtype may be a name ("bfloat16"). device: "cpu", "cuda", "cuda:1",
    a torch.device, or the name of a GPU that need not be there: "a100", "h100" or "h200".
    algorithm, batch_invariant: those of the call.
    Raises ValueError for another op, and the errors of the op itself for rows that it does not take. Inside
    torch.compile the answer is made once, while the graph is.
    """
    _check_op(op)
    return _explain(op, *_rows_of(x, shape, dtype, device), algorithm, batch_invariant)


@_constant
def _explain(op: str, m: int, n: int, dtype: str, device: str, algorithm: Any, batch_invariant: bool) -> str:
    name, kind = _name(op), _library.dtype_of(dtype, "dtype")
    how = _ops._number("algorithm", algorithm, ALGORITHMS), bool(batch_invariant)
    text, library, here = ctypes.create_string_buffer(4096), _library.load(), _device(device)
    ask = library.gander_explain_device if here is None else library.gander_explain
    where = device.lower().encode() if here is None else here
    _library.check(ask(name, m, n, kind, where, *how, text, len(text)))
    return text.value.decode()


def warmup(device: torch.device | str = "cuda") -> None:
    """Loads all of gander's kernels for a device now, so that no later call pays for it.

    device: "cpu", "cuda" (the current device where torch is imported, else the first), "cuda:1", or a torch.device.
    Raises ValueError for another device, RuntimeError where it cannot be used.
    """
    found = _device(str(device))
    if found is None:
        raise ValueError(f"device is {str(device)!r}, expected 'cpu', 'cuda' or 'cuda:<index>'")
    _library.check(_library.load().gander_warmup(found))
