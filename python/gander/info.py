"""Facts about this installation, and about what a call would run."""

from __future__ import annotations

import ctypes
import json
import math
import operator
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _backend
from ._functions.arguments import FAILURES, code_of
from ._native import library
from ._table import ALGORITHMS, OPERATORS
from ._table import Algorithm as _Name
from ._words import check_flags, renamed, shown
from ._words import kind as kind_of

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def info() -> dict[str, Any]:
    """Facts about this installation: what the library was built from and for, and how it works with torch.

    Returns:
        A dict with the keys version, abi_version, commit, go, nvcc, architectures and simd (all from
        gander_build_info); library (its path); torch (its version, or None if torch is not imported); and
        fast_path (True if eager calls bypass torch's dispatcher, else the reason why not; None without
        torch).

    Raises:
        RuntimeError: The library cannot be loaded.

    Examples:
        >>> gander.info()["version"] == gander.__version__
        True
    """
    facts: dict[str, Any] = json.loads(library.load().gander_build_info())
    torch, backend = sys.modules.get("torch"), _backend.torch
    return facts | {
        "library": library.file_of(library.load()),
        "torch": None if torch is None else torch.__version__,
        "fast_path": _backend.failure() if backend is None else backend.fast_path(),
    }


def prefix() -> str:
    """The folder that has include and lib, with what C and C++ need."""
    folder = os.path.dirname(__file__)
    if not os.path.exists(os.path.join(folder, "include", "gander.h")):
        raise RuntimeError(
            f"gander: there is no gander.h in {folder}/include; run ./build.sh build in a checkout, or "
            "reinstall gander-kernels"
        )
    return folder


def get_include() -> str:
    """The folder of gander.h and dlpack.h, for C and C++ compilers.

    `gander.cmake_prefix_path` is the folder in which CMake's find_package(gander) finds the headers and the
    library. Its folder lib/pkgconfig is for pkg-config.

    Returns:
        The folder's path.

    Raises:
        RuntimeError: Nothing has been built in this checkout.

    Examples:
        >>> import os
        >>> sorted(os.listdir(gander.get_include()))
        ['dlpack.h', 'gander.h']
        >>> os.path.dirname(gander.get_include()) == gander.cmake_prefix_path
        True
    """
    return os.path.join(prefix(), "include")


def _constant(function: Any) -> Any:
    """Makes torch.compile call a function while it traces, and use the result as a constant.

    This is what torch.compiler.assume_constant_result does. It is done here without importing torch.
    """
    function._dynamo_marked_constant = True
    return function


def _check_op(op: str) -> None:
    if not isinstance(op, str):
        raise TypeError(f"op is {shown(op)}, expected an operator's name, such as 'softmax' or 'rmsnorm_bwd'")


def _name(op: str) -> bytes:
    """The C ABI's name of one of gander's ops."""
    name = op.replace("_fwd", "_forward").replace("_bwd", "_backward")
    forward = name.endswith("_residual") or f"{name}_forward" in OPERATORS
    return (f"{name}_forward" if forward else name).encode()


def _check(status: int, of_x: tuple[str, ...] = ()) -> None:
    """Raises the library's error, in the caller's words. of_x: arguments that have the value of x."""
    try:
        library.check(status)
    except FAILURES as error:
        names = {name: f"the {name} of x" for name in of_x}
        text = str(error).replace("_backward", "_bwd").replace("_forward_", "_fwd_").replace("_forward", "")
        raise renamed(type(error)(text), names) from None


def _device(name: str) -> library.Device | None:
    """The device of this machine with this name. None for the name of a GPU model, such as "h100"."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        return None
    torch = sys.modules.get("torch")
    if kind == "cuda" and not index and torch is not None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return library.Device(library.CUDA if kind == "cuda" else library.CPU, int(index or 0))


# The sizes, the dtype, the device, and which of these are those of x.
_Rows = tuple[tuple[int, ...], str, str, tuple[str, ...]]


def _rows_of(x: Any, shape: Any, dtype: Any, device: Any) -> _Rows:
    given = {"shape": shape, "dtype": dtype, "device": device}
    facts = {} if x is None else _facts(x)
    of_x = tuple(name for name in facts if given[name] is None)
    given |= {name: facts[name] for name in of_x}
    for name, value in given.items():
        if value is None:
            raise TypeError(f"{name} is None, expected x, or shape, dtype and device")
    shape, dtype, device = given.values()
    try:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if isinstance(shape, bytes) or any(isinstance(size, bool) for size in sizes):
            raise TypeError
        # Inside torch.compile sizes may be symbolic. operator.index makes them numbers.
        sizes = tuple(map(operator.index, sizes))
    except (RuntimeError, TypeError):  # a tensor raises either
        raise TypeError(f"shape is {shown(shape)}, expected integers") from None
    if not sizes:
        raise ValueError(f"{'x has rank 0' if 'shape' in of_x else 'shape is ()'}, expected rank 1 or more")
    rows, columns = math.prod(sizes[:-1]), sizes[-1]
    if min(sizes) < 0 or max(rows, columns) >= 2**63:  # which the library would not see
        raise ValueError(
            f"shape is {shown(shape)}, expected sizes of 0 or more, and fewer than 2^60 elements"
        )
    if not isinstance(device, str) and type(device).__name__ != "device":
        raise TypeError(f"device is {shown(device)}, expected its name, such as 'cpu', or a torch.device")
    dtype = library.dtype_name(dtype, "the dtype of x" if "dtype" in of_x else "dtype")
    return sizes, dtype, str(device), of_x


def _facts(x: Any) -> dict[str, Any]:
    """The shape, the dtype and the device of a tensor or an array."""
    if _backend.is_tensor(x):
        if refusal := _backend.torch.unusable("x", x):
            raise refusal
        device = x.device
    elif all(hasattr(x, name) for name in ("shape", "dtype", "__dlpack_device__")):
        kind, index = x.__dlpack_device__()
        device = f"cuda:{index}" if kind == library.CUDA else "cpu"
    else:
        raise TypeError(f"x is {kind_of(x)}, expected a torch.Tensor or an object with __dlpack__")
    return {"shape": x.shape, "dtype": x.dtype, "device": device}


class Algorithm(NamedTuple):
    """A value of `algorithm=`: its name, what it does, and which rows it supports."""

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
    """The algorithms of an op on CUDA tensors.

    Forward and backward have algorithms of the same names, but with other limits, so ask for the backward op
    too. The limits of rmsnorm_bwd are for a call with a weight. They are row lengths in bytes. A row is
    aligned if it consists of whole 16-byte vectors at addresses that are multiples of 16. CPU tensors only
    have "auto".

    Args:
        op: "softmax", "rmsnorm", "l2norm", "layernorm", "glu", "cross_entropy" or "logsumexp", or with
            "_bwd" its backward. "glu" is swiglu and what has its kernels.
            "cross_entropy_fwd_dx" is the single pass that computes loss and gradient. "rmsnorm_residual" and
            "layernorm_residual", and the same with "_bwd", are the norms with a residual.
        x: The (..., N) tensor or array. Its values are not read.
        shape: Replaces that of x, or with dtype and device x itself. With these or x only the algorithms are
            returned that support these rows there.
        dtype: As shape. It may be a name ("bfloat16").
        device: As shape: "cpu", "cuda", "cuda:1", a torch.device, or the name of a GPU that this machine need
            not have, such as "h100", "b200" or "rtx4090". The message about another name lists them.

    Returns:
        A list of Algorithm(name, what, limits), of which the first is "auto".

    Raises:
        TypeError: op, or what is no tensor.
        ValueError: Another op.

    Examples:
        >>> [algorithm.name for algorithm in gander.algorithms("logsumexp")]
        ['auto']
    """
    _check_op(op)
    if x is None and shape is None and dtype is None and device is None:
        return _algorithms(op)
    return _supporting(op, _rows_of(x, shape, dtype, device))


@_constant
def _algorithms(op: str) -> list[Algorithm]:
    text = ctypes.create_string_buffer(1 << 14)
    _check(library.load().gander_algorithms(_name(op), text, len(text)))
    return [Algorithm(**fields) for fields in json.loads(text.value)]


@_constant
def _supporting(op: str, rows: _Rows) -> list[Algorithm]:
    def supports(algorithm: Algorithm) -> bool:
        try:
            _explain(op, rows, algorithm.name, False)
        except NotImplementedError:
            return False
        return True

    _explain(op, rows, "auto", False)  # raises the error of a call that no algorithm supports
    return [algorithm for algorithm in _algorithms(op) if supports(algorithm)]


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
    """A text that says which algorithm and which kernels a call would run on x, and why.

    Inside torch.compile the text is made only once, when the graph is traced.

    Args:
        op: "softmax", "rmsnorm", "l2norm", "layernorm", "glu", "cross_entropy" or "logsumexp", or with
            "_bwd" its backward. "glu" is swiglu and what has its kernels.
            "cross_entropy_fwd_dx" is the single pass that computes loss and gradient. "rmsnorm_residual" and
            "layernorm_residual", and the same with "_bwd", are the norms with a residual. "rotary",
            "qk_norm_rotary" and "apply_rotary_emb", and their "_bwd", are for shapes as these functions take
            them, with the heads of q and k together, all of whose columns are rotated.
        x: The (..., N) tensor or array. Its values are not read.
        shape: Replaces that of x, or with dtype and device x itself.
        dtype: As shape. It may be a name ("bfloat16").
        device: As shape: "cpu", "cuda", "cuda:1", a torch.device, or the name of a GPU that this machine need
            not have, such as "h100", "b200" or "rtx4090". The message about another name lists them.
        algorithm: That of the call.
        batch_invariant: That of the call.

    Returns:
        The text, of a few lines.

    Raises:
        TypeError, ValueError: Another op, and the op's own errors for rows that it does not support.

    Examples:
        >>> text = gander.explain("softmax", shape=(8192, 4096), dtype="bfloat16", device="h100")
        >>> text.splitlines()[0]
        'auto takes register: a row of 512 vectors fits the registers of 128 threads'
    """
    _check_op(op)
    check_flags(batch_invariant=batch_invariant)
    return _explain(op, _rows_of(x, shape, dtype, device), algorithm, batch_invariant)


@_constant
def _explain(op: str, rows: _Rows, algorithm: Any, batch_invariant: bool) -> str:
    sizes, dtype, device, of_x = rows
    code = code_of("algorithm", algorithm, ALGORITHMS)
    text, loaded, found = ctypes.create_string_buffer(4096), library.load(), _device(device)
    name, kind = device.lower().encode(), library.dtype_of(dtype, "dtype")
    if op.removesuffix("_fwd").removesuffix("_bwd") in _HEADS:
        if algorithm != "auto":
            raise ValueError(f"algorithm is {shown(algorithm)}, expected 'auto': {op} has no others")
        where = (found, None) if found is not None else (library.Device(library.CUDA, 0), name)
        rotary = op.replace("apply_rotary_emb", "rotary")
        status = loaded.gander_explain_heads(
            _name(rotary), *_of_heads(op, sizes), kind, *where, text, len(text)
        )
    else:
        function = loaded.gander_explain_device if found is None else loaded.gander_explain
        call = math.prod(sizes[:-1]), sizes[-1], kind, name if found is None else found, code
        status = function(_name(op), *call, bool(batch_invariant), text, len(text))
    _check(status, of_x)
    return text.value.decode()


# The operators of heads: where their functions have the heads of a token.
_HEADS = {"rotary": -3, "qk_norm_rotary": -3, "apply_rotary_emb": -2}


def _of_heads(op: str, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """The number of tokens, of the heads of each, and of columns."""
    place = _HEADS[op.removesuffix("_fwd").removesuffix("_bwd")]
    if len(sizes) < 3:
        order = "(..., heads, tokens, columns)" if place == -3 else "(..., tokens, heads, columns)"
        raise ValueError(f"shape is {shown(sizes)}, expected {order} for {op}")
    heads = sizes[place]
    others = [size for i, size in enumerate(sizes[:-1], -len(sizes)) if i != place]
    return math.prod(others), heads, sizes[-1]


def warmup(device: torch.device | str = "cuda") -> None:
    """Loads all of gander's kernels for a device now, so that no later call spends time on it.

    Args:
        device: "cpu", "cuda" (the current device if torch is imported, else the first), "cuda:1", or a
            torch.device.

    Raises:
        ValueError: Another device.
        RuntimeError: The device cannot be used.

    Examples:
        >>> gander.warmup("cpu")
    """
    found = _device(str(device))
    if found is None:
        raise ValueError(f"device is {shown(str(device))}, expected 'cpu', 'cuda' or 'cuda:<index>'")
    library.check(library.load().gander_warmup(found))
