"""What gander is running on, and what a call would run."""

import ctypes
import json
import sys
from typing import NamedTuple

from . import _hook, _library, _ops
from ._operators_gen import ALGORITHMS

__version__ = "0.1.0"

_PHASES = {"": "_forward", "_fwd": "_forward", "_bwd": "_backward"}


def info() -> dict:
    """Facts about this installation: what the library was built from and for, and how torch is served.

    Keys: those of gander_build_info (version, abi_version, commit, go, nvcc, architectures, simd), library (its
    path), torch (its version, or None where torch is not imported), fast_path (True where eager calls go past torch's
    dispatcher, else why they do not; None without torch).
    Raises RuntimeError where the library cannot be loaded.
    """
    facts = json.loads(_library.load().gander_build_info())
    torch, pytorch = sys.modules.get("torch"), sys.modules.get(f"{__package__}._pytorch")
    return facts | {
        "library": str(_library.path()),
        "torch": None if torch is None else torch.__version__,
        "fast_path": _hook.failure() if pytorch is None else pytorch.fast_path,
    }


def _name(op: str) -> bytes:
    """The C ABI's name of an op of gander's."""
    base, _, phase = op.rpartition("_")
    name = base + _PHASES["_" + phase] if "_" + phase in _PHASES else op
    if name in ("softmax", "rmsnorm", "cross_entropy"):
        name += "_forward"
    return name.encode()


class Algorithm(NamedTuple):
    """What `algorithm=` takes: its name, what it does, and which rows it serves."""

    name: str
    what: str
    limits: str

    def __repr__(self):
        return f"<{self.name}: {self.what}; {self.limits}>"


def algorithms(op: str) -> list[Algorithm]:
    """The algorithms of an op ("softmax", "softmax_bwd", "rmsnorm", "rmsnorm_bwd", ...) on CUDA tensors.

    Names are the same for both directions, limits are not: ask for the backward op too. Those of rmsnorm_bwd are for a
    call with a weight. Row lengths are in bytes; "unaligned" are rows that are not made of whole 16-byte vectors at
    addresses that are multiples of 16. CPU tensors have "auto" alone. Raises ValueError for another op.
    """
    text = ctypes.create_string_buffer(1 << 14)
    _library.check(_library.load().gander_algorithms(_name(op), text, len(text)))
    return [Algorithm(**fields) for fields in json.loads(text.value)]


def explain(op: str, x, *, algorithm: str = "auto", batch_invariant: bool = False) -> str:
    """Says in words which algorithm and which kernels a call would run on x, and why.

    op: a name of gander's ("softmax", "softmax_bwd", "rmsnorm", "cross_entropy", ...; "cross_entropy_forward_dx" is
    the single pass that gives loss and gradient). x: the (..., N) tensor or array; its values are not read.
    algorithm, batch_invariant: those of the call.
    Raises ValueError for another op, and the errors of the op itself for an x that it does not take.
    """
    if len(x.shape) == 0:
        raise ValueError("x has rank 0, expected rank 1 or more")
    *leading, n = x.shape
    m = 1
    for size in leading:
        m *= size
    kind, index = x.__dlpack_device__()
    dtype, device = _library.dtype_of(x.dtype, "x"), _library.Device(int(kind), index)
    how = _ops._number("algorithm", algorithm, ALGORITHMS), bool(batch_invariant)
    text = ctypes.create_string_buffer(4096)
    _library.check(_library.load().gander_explain(_name(op), m, n, dtype, device, *how, text, len(text)))
    return text.value.decode()


def warmup(device="cuda") -> None:
    """Loads all of gander's kernels for a device now, so that no later call pays for it.

    device: "cpu", "cuda" (the current device where torch is imported, else the first), "cuda:1", or a torch.device.
    Raises ValueError for another device, RuntimeError where it cannot be used.
    """
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device is {str(device)!r}, expected 'cpu', 'cuda' or 'cuda:<index>'")
    torch = sys.modules.get("torch")
    if kind == "cuda" and not index and torch is not None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    code = _library.CUDA if kind == "cuda" else _library.CPU
    _library.check(_library.load().gander_warmup(_library.Device(code, int(index or 0))))
