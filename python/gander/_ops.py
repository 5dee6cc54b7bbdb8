"""gander's public functions. They take PyTorch tensors (served by _pytorch.py) or any other objects with
`__dlpack__` (served by _dlpack.py)."""

from __future__ import annotations

import re
import sys
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from . import _dlpack, _hook, _library
from ._operators_gen import ALGORITHMS, REDUCTIONS, Algorithm, Reduction

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Array(Protocol):
    """An array of NumPy, CuPy, JAX or another library that exports arrays through DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


A = TypeVar("A", bound=Array)
CastingMode = Literal["llama"]

Masked = Literal["nan", "zero"]
_MASKED: tuple[Masked, ...] = ("nan", "zero")

_Tensor: Any = ()  # torch.Tensor once torch is imported; until then isinstance(x, ()) is False
_torch: Any = None  # the module _pytorch once torch is imported
_debug = False

# What torch raises if an operator fails, or if an argument is not a tensor.
_FAILURES = (AttributeError, RuntimeError)


def use_torch(module: Any) -> None:
    """Called by _pytorch.py when its operators are registered."""
    global _Tensor, _torch
    _Tensor, _torch = sys.modules["torch"].Tensor, module


def _operators_of(x: Any) -> Any:
    """The module that serves x, if x is not a torch tensor or the operators are not registered yet."""
    return _torch if _hook.is_late_tensor(x) else _dlpack.operators


def _detached(x: Any) -> Any:
    if x is None or not (isinstance(x, _Tensor) or _hook.is_late_tensor(x)):
        return x
    return x.detach() if x.requires_grad else x


def _code(argument: str, name: Any, names: tuple[str, ...]) -> int:
    """The number by which the library knows a name."""
    if name not in names:
        *others, last = map(repr, names)
        raise ValueError(f"{argument} is {name!r}, expected {', '.join(others)} or {last}")
    return names.index(name)


def _dtype(ops: Any, value: Any, argument: str = "out_dtype") -> Any:
    """A dtype or None in the form that ops accepts. PyTorch's operators accept only PyTorch's dtypes."""
    if value is None or ops is not _torch:
        return value
    torch = sys.modules["torch"]
    if isinstance(value, torch.dtype):
        return value
    return getattr(torch, _library.dtype_name(value, argument))


def _check_chunks(chunk: Any, accumulate: Any) -> None:
    """Refuses the options of linear_cross_entropy's chunks."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk is {chunk!r}, expected a number of rows of 1 or more, or None")
    if accumulate not in (None, "float32"):
        raise ValueError(f"accumulate is {accumulate!r}, expected 'float32' or None")


def _of_sum(divisor: Any, upstream: Any, reduction: Any) -> None:
    """Refuses what needs another reduction."""
    if divisor is not None and reduction != "sum":
        raise ValueError(f"divisor is given with reduction {reduction!r}, expected 'sum', which it divides")
    if upstream is not None and reduction == "none":
        raise ValueError(
            "upstream is given with reduction 'none', expected 'sum' or 'mean': it is one number"
        )


def _epsilon(x: Any) -> float:
    """What eps=None means in torch: the machine epsilon of the dtype that it computes in."""
    return 2.0**-52 if x.dtype.itemsize == 8 else 2.0**-23


def set_debug(enabled: bool) -> None:
    """Makes the cross-entropy functions check every target and raise IndexError if one is out of range.

    The check waits for the GPU, and gathers the targets of a DTensor, so it is off by default. Without it a
    row whose target is out of range gets a loss and a gradient of NaN. Calls inside a torch.compile graph are
    not checked.
    """
    global _debug
    _debug = bool(enabled)


def _check_targets(classes: Any, target: Any, ignore_index: int) -> None:
    """classes: a tensor whose last dimension is that of the classes, or their number."""
    shape = (classes,) if isinstance(classes, int) else getattr(classes, "shape", ())
    if not shape or not hasattr(target, "dtype"):
        return  # the operator refuses it
    if isinstance(target, _Tensor):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or target.is_meta:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(target):  # of vmap, for example
            return
    classes = shape[-1]
    if hasattr(target, "full_tensor"):  # of a DTensor all ranks see all targets, and refuse them together
        target = target.full_tensor()
    bad = (target < 0) | (target >= classes)
    if target.dtype.itemsize == 8 or -(2**31) <= ignore_index < 2**31:  # else it has no int32
        bad &= target != ignore_index
    if bool(bad.any()):
        raise IndexError(
            f"target has the class {int(target[bad][0])}, expected 0 to {classes - 1}, "
            f"or ignore_index = {ignore_index}"
        )


def _partial_of(ops: Any, argument: str) -> Any:
    if ops is not _torch:
        raise _dlpack.only_torch(argument)
    from . import _partial

    return _partial


def _rounds(casting_mode: Any) -> bool:
    """The operators' option round_normalized."""
    if casting_mode not in (None, "llama"):
        raise ValueError(f"casting_mode is {casting_mode!r}, expected None or 'llama'")
    return casting_mode is not None


def _check_constants(**numbers: Any) -> None:
    """Refuses what is no constant. A tensor that requires a gradient would silently get none. A number that
    depends on a size that an exported program leaves open would silently stay what it was in the export."""
    for name, value in numbers.items():
        if type(value) is float:
            continue
        if isinstance(value, _Tensor):
            raise TypeError(
                f"{name} is a tensor, expected a number, which has no gradient; pass float({name})"
            )
        if type(value).__name__ in ("SymFloat", "SymInt"):
            raise NotImplementedError(
                f"{name} is {value}, expected a number that does not depend on a dynamic size; export with "
                "that size fixed" + (", or multiply x instead" if name == "scale" else "")
            )


def _library_of(ops: Any, x: Any) -> Any:
    """The module torch, numpy or cupy whose array x is, also as a subclass. None for another library's."""
    return sys.modules["torch"] if ops is _torch else _dlpack.module_of(x)


# An exception in a local variable keeps the caller's tensors alive, until Python looks for cycles: its
# traceback holds the frame, and the frame holds it. So functions raise exceptions where they make them.


def _refuse_shape(name: str, weight: Any) -> None:
    """Refuses torch's normalized_shape in place of a norm's weight."""
    if not isinstance(weight, (int, tuple, list)):
        return
    raise TypeError(
        f"weight is {weight!r}, expected a tensor or None; unlike torch's, {name}(x, weight) has no "
        "normalized_shape: it normalizes the last dimension"
    ) from None


def _checked_weight(
    ops: Any, name: str, x: Any, weight: Any, bias: Any = None, weight_offset: float = 0
) -> Any:
    """The weight to pass to a norm. A bias for each head needs a weight for each head."""
    _refuse_shape(name, weight)
    if weight is None and bias is not None and len(bias.shape) == 2:
        if bias.shape != x.shape[-2:]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, expected (N) or (H, N) for x of shape (..., H, N), "
                f"which is {tuple(x.shape)}"
            )
        if weight_offset:
            raise ValueError(
                f"weight_offset is {weight_offset} without a weight, expected 0; pass the weight or drop "
                "weight_offset"
            )
        library = _library_of(ops, bias)
        if library is not None:
            return library.ones_like(_detached(bias))
    return weight


def _differs(ops: Any, x: Any, other: Any, argument: str) -> bool:
    """Whether a dtype is another one than x's."""
    if ops is _torch:
        return other != x.dtype
    return _library.dtype_name(other, argument) != _library.dtype_name(x.dtype, "x")


def _adds(ops: Any, x: Any, residual: Any, residual_dtype: Any) -> bool:
    """Whether residual_out is something else than x."""
    if residual is None:
        return residual_dtype is not None and _differs(ops, x, residual_dtype, "residual_dtype")
    if ops is _torch and not isinstance(residual, _Tensor):
        raise TypeError(f"residual is a {type(residual).__name__}, expected a torch.Tensor, like x")
    if ops is _torch and residual.is_nested:
        raise ops.nested("residual")
    if ops.differ(residual.shape, x.shape):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} as x; expand it"
        )
    return True


def _dtype_of_sum(ops: Any, x: Any, residual: Any) -> Any:
    """The dtype of x + residual in torch."""
    return _dtype(ops, "float32") if _differs(ops, x, residual.dtype, "residual") else x.dtype


def _check_out(ops: Any, name: str, x: Any, out: Any, out_dtype: Any = None) -> None:
    """Refuses an out that a function cannot write its result to, which has x's shape."""
    if not hasattr(out, "shape") or (ops is not _torch and _library_of(ops, out) is not _library_of(ops, x)):
        raise TypeError(f"{name} is a {type(out).__name__}, expected a {type(x).__name__} as x")
    if out.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(out.shape)}, expected {tuple(x.shape)} as x")
    if out_dtype is not None and _differs(ops, out, out_dtype, "out_dtype"):
        raise TypeError(
            f"{name} has dtype {out.dtype}, expected out_dtype = {out_dtype}; leave one of them out"
        )


def _may_share_memory(ops: Any, x: Any, out: Any) -> bool:
    """Whether writing out may change x. True also for tensors whose addresses are not known: while they are
    traced or transformed."""
    library = _library_of(ops, x)
    if ops is not _torch:
        return library is None or bool(library.may_share_memory(x, out))
    known = type(x) in (_Tensor, library.nn.Parameter) and type(out) is _Tensor
    if not known or library.compiler.is_compiling() or library._C._are_functorch_transforms_active():
        return True
    a, b = x.untyped_storage(), out.untyped_storage()
    return a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()


def _empty(ops: Any, x: Any, shape: tuple, dtype: Any) -> Any:
    """A new array of x's library, on x's device."""
    if ops is _torch:
        return x.new_empty(shape, dtype=dtype)
    return _library_of(ops, x).empty(shape, dtype)


def _norm(
    ops: Any,
    name: str,
    operands: tuple,
    out_dtype: Any,
    residual_dtype: Any,
    prenorm: bool,
    options: tuple,
) -> Any:
    """The result of a norm, or (result, residual_out) with prenorm. operands: x, weight, bias and residual.
    options: what the operators take after the dtypes."""
    x, weight, bias, residual = operands
    out_dtype = _dtype(ops, out_dtype)
    residual_dtype = _dtype(ops, residual_dtype, "residual_dtype")
    adds = _adds(ops, x, residual, residual_dtype)
    if name == "layernorm" and not prenorm:
        residual_dtype = None  # else the result would be another where a gradient is wanted
    kept = residual is not None and (prenorm or ops is _torch)
    if kept and residual_dtype is None and (name == "layernorm" or not prenorm):
        # The digits that a narrower sum lost would be missing in the gradient.
        residual_dtype = _dtype_of_sum(ops, x, residual)
    if adds and prenorm:
        return getattr(ops, f"{name}_add")(*operands, out_dtype, residual_dtype, *options)
    if residual is not None:
        return getattr(ops, f"{name}_residual")(*operands, out_dtype, residual_dtype, *options)
    if name == "layernorm":
        y = ops.layernorm(x, weight, bias, out_dtype, *options)
    elif bias is None and not options[-1]:  # round_normalized
        y = ops.rmsnorm(x, weight, out_dtype, *options[:-1])
    else:
        y = ops.rmsnorm_bias(x, weight, bias, out_dtype, *options)
    return (y, x) if prenorm else y


def _write(ops: Any, name: str, given: dict, rest: tuple, names: dict[str, str]) -> None:
    """Calls an operator that writes over operands. given: the caller's, by their names there. names: what the
    operator calls some of them, with those names."""
    try:
        getattr(ops, name)(*given.values(), *rest)
    except (TypeError, ValueError, *_FAILURES) as error:
        if ops is _torch and sys.modules["torch"].compiler.is_compiling():
            raise
        raise _renamed(ops.explained(error, **given), names) from None


def _renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The same error about the caller's operands."""
    operand = rf"(?<!['\w])({'|'.join(names)})(?!['\w])"
    return type(error)(re.sub(operand, lambda found: names[found[0]], str(error)))


def _norm_into(
    ops: Any,
    name: str,
    operands: tuple,
    out: Any,
    dtypes: tuple,
    wanted: set[str],
    options: tuple,
) -> tuple:
    """(out, residual_out, mean, rstd) of a norm that writes its result to `out`.

    operands: x, weight, bias and residual. dtypes: out_dtype and residual_dtype. wanted: which of the other
    results to compute. residual_out is x if it would have the same numbers.
    """
    x, _, _, residual = operands
    out_dtype, residual_dtype = _dtype(ops, dtypes[0]), _dtype(ops, dtypes[1], "residual_dtype")
    _check_out(ops, "out", x, out, out_dtype)
    shape, residual_out = tuple(x.shape), None
    adds = _adds(ops, x, residual, residual_dtype)
    if "residual_out" in wanted and (adds or _may_share_memory(ops, x, out)):
        if residual_dtype is None and name == "layernorm" and residual is not None:
            residual_dtype = _dtype_of_sum(ops, x, residual)
        residual_out = _empty(ops, x, shape, residual_dtype or (x if residual is None else residual).dtype)
    wide = _dtype(ops, "float64" if x.dtype.itemsize == 8 else "float32")
    mean, rstd = (_empty(ops, x, shape[:-1], wide) if given in wanted else None for given in ("mean", "rstd"))
    statistics = (mean, rstd) if name == "layernorm" else (rstd,)
    given = dict(zip(("x", "weight", "bias", "residual", "out"), (*operands, out), strict=True))
    _write(ops, f"{name}_out", given, (residual_out, *statistics, *options), {"y": "out"})
    return out, x if residual_out is None else residual_out, mean, rstd


def _norm_bwd(ops: Any, name: str, operands: tuple, has_bias: bool, options: tuple) -> Any:
    """The gradients (dx, dresidual, dw, db) of a norm. operands: x, weight, dout, dresidual_out, statistics.

    dresidual has the dtype of dresidual_out. It is None if that is x's. dw and db are None without weight and
    bias.
    """
    x, weight, dresidual_out = operands[0], operands[1], operands[3]
    dtypes = [None]
    converts = dresidual_out is not None and _differs(ops, x, dresidual_out.dtype, "dresidual_out")
    if converts:
        dtypes.append(dresidual_out.dtype)
    if has_bias:
        dtypes.append(None)
    wanted = {"dresidual": converts, "dw": weight is not None, "db": has_bias}
    operator = "_".join([f"{name}_add_bwd", *(result for result in wanted if wanted[result])])
    answer = getattr(ops, operator)(*operands, *dtypes, *options)
    results = iter(answer if any(wanted.values()) else (answer,))
    return next(results), *(next(results) if given else None for given in wanted.values())


def _to_last(ops: Any, x: Any, dim: Any, function: str) -> Any:
    """x with dimension dim at the end, which copies later unless it is there already."""
    if type(dim) is not int and (isinstance(dim, bool) or not isinstance(dim, Integral)):
        raise TypeError(f"dim is {dim!r}, expected an int")
    rank = max(len(x.shape), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dim is {dim}, expected {-rank} to {rank - 1} for x of rank {len(x.shape)}")
    if dim % rank == rank - 1:
        return x
    if ops is not _torch:
        raise NotImplementedError(
            f"{function}: dim is {dim}, expected the last one, -1, for arrays other than torch tensors; move "
            "it to the end"
        )
    return x.movedim(dim, -1)


def _cast(ops: Any, x: Any, dtype: Any) -> tuple[Any, Any]:
    """x, and the dtype of the result. torch casts x first. But the kernels take 16-bit x for a result in
    float32 as it is, because they compute in float32 anyway."""
    dtype = _dtype(ops, dtype, "dtype")
    if ops is _torch:
        torch = sys.modules["torch"]
        if dtype != torch.float32 or x.dtype not in (torch.float16, torch.bfloat16):
            x = x.to(dtype)
        return x, dtype
    name, given = _library.dtype_name(dtype, "dtype"), _library.dtype_name(x.dtype, "x")
    if name != given and not (name == "float32" and given in ("float16", "bfloat16")):
        or_wider = " or float32" if given in ("float16", "bfloat16") else ""
        raise NotImplementedError(
            f"dtype is {name} for x of {given}, expected {given}{or_wider}; cast x first"
        )
    return x, dtype


def _masked_softmax(
    ops: Any,
    x: Any,
    dim: Any,
    dtype: Any,
    scale: Any,
    mask: Any,
    causal: Any,
    masked: Any,
    log: bool,
    batch_invariant: bool,
) -> Any:
    """softmax or log_softmax with options."""
    name = "log_softmax" if log else "softmax"
    zero = _code("masked", masked, _MASKED)
    rows = _to_last(ops, x, dim, name)
    moved = rows is not x
    if moved and causal:
        raise ValueError(f"causal is set with dim {dim}, expected the last one, -1: it masks columns of rows")
    if moved and mask is not None:
        if mask.ndim > x.ndim:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(x.shape)}"
            )
        mask = mask[(None,) * (x.ndim - mask.ndim)].movedim(dim, -1)
    out_dtype = None
    if dtype is not None:
        rows, out_dtype = _cast(ops, rows, dtype)
    options = 1.0 if scale is None else scale, log, bool(causal), bool(zero), bool(batch_invariant)
    y = ops.masked_softmax(rows, mask, out_dtype, *options)
    return y.movedim(-1, dim).contiguous() if moved else y


@overload
def softmax(
    x: Tensor,
    *,
    dim: int = ...,
    dtype: dtype | str | None = ...,
    scale: float | None = ...,
    mask: Tensor | None = ...,
    causal: bool = ...,
    masked: Masked = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> Tensor: ...
@overload
def softmax(
    x: A,
    *,
    dim: int = ...,
    dtype: Any = ...,
    scale: float | None = ...,
    mask: Array | None = ...,
    causal: bool = ...,
    masked: Masked = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> A: ...
def softmax(
    x: Any,
    *,
    dim: int = -1,
    dtype: Any = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    masked: Masked = "nan",
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> Any:
    """Softmax over one dimension, differentiable: y = exp(h - max h) / sum exp(h - max h) with
    h = x * scale + mask.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
    tensor on the CPU or a CUDA device, or an object with `__dlpack__`. For the latter the result is an array
    of the same library, without a gradient.
    dim: the dimension. One other than the last is moved to the end and back, which copies. Torch tensors
    only.
    dtype: the dtype of the result; by default that of x. As in torch, x is cast to it first. A widening cast
    is done by the kernel, without a copy. Other casts need a torch tensor.
    scale: a number that x is multiplied by first, 1 by default. h is not rounded to x's dtype.
    mask: a tensor that broadcasts to x's shape, without a gradient. bool or uint8: only elements where it is
    not 0 take part, as in scaled_dot_product_attention. float16, bfloat16 or float32 (float64 if and only if
    x is): it is added, and -inf masks. It is read as it is if its last stride is 1 or 0 and its other
    dimensions, broadcast to those of x, collapse into three or fewer. Otherwise it is copied.
    causal: also masks the columns after i in row i of each matrix (Q, N), the last two dimensions of x.
    masked: what a row becomes that is masked whole: "nan" as in torch, or "zero".
    Masked elements count for nothing, NaN included. Their y is 0, and so is their gradient. A row of which an
    element that takes part is NaN or +inf is NaN.
    algorithm: which kind of GPU kernel runs, one of gander.algorithms("softmax"). An algorithm that does not
    support x raises NotImplementedError, which says why and which others do. Backward uses the same algorithm
    if it supports these rows (see gander.algorithms("softmax_bwd")), else "auto". CPU tensors, and calls with
    a scale, a mask, causal or a wider dtype, only have "auto".
    batch_invariant: the bits of a row's result and of its gradient do not depend on the number of rows. This
    is slower if there are few rows. Rows of whole 16-byte vectors have other bits if x is not aligned to 16
    bytes.
    Returns y, contiguous, with the shape and dtype of x. Under CUDA autocast it is float32, like F.softmax.
    Sums are computed in float32 (float64 for float64). A row that is all -inf or has a NaN gives NaN.
    Raises TypeError (dtype), ValueError (shape, option), IndexError (dim), RuntimeError (device, driver,
    memory).
    Subtracts the maximum first: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    code = 0 if algorithm == "auto" else _code("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if dim == -1 and dtype is None and mask is None and not causal and scale is None and masked == "nan":
            return ops.softmax(x, code, bool(batch_invariant))
        return _softmax(ops, x, dim, dtype, scale, mask, causal, masked, code, batch_invariant)
    except _FAILURES as error:
        raise ops.explained(error, x=x, mask=mask) from None


def _softmax(
    ops: Any,
    x: Any,
    dim: Any,
    dtype: Any,
    scale: Any,
    mask: Any,
    causal: Any,
    masked: Any,
    code: int,
    batch_invariant: bool,
) -> Any:
    """softmax with arguments that may be options: if they are none, by the kernels without."""
    _check_constants(scale=scale)
    narrow = x if dtype is None else _cast(ops, x, dtype)[0]
    widens = dtype is not None and _differs(ops, narrow, _dtype(ops, dtype, "dtype"), "dtype")
    given = {
        "a scale": scale not in (None, 1),
        "a mask": mask is not None,
        "causal": causal,
        "a wider dtype": widens,
    }
    if not any(given.values()):
        _code("masked", masked, _MASKED)
        rows = _to_last(ops, narrow, dim, "softmax")
        y = ops.softmax(rows, code, bool(batch_invariant))
        if rows is not narrow:
            y = y.movedim(-1, dim).contiguous()
        return y if dtype is None or ops is not _torch else y.to(_dtype(ops, dtype))  # autocast may widen it
    if code:
        option = next(name for name, value in given.items() if value)
        raise NotImplementedError(
            f"algorithm is {ALGORITHMS[code]!r} with {option}, expected 'auto', the only one there; leave it "
            "out"
        )
    return _masked_softmax(ops, x, dim, dtype, scale, mask, causal, masked, False, batch_invariant)


@overload
def log_softmax(
    x: Tensor,
    dim: int = ...,
    dtype: dtype | str | None = ...,
    *,
    scale: float | None = ...,
    mask: Tensor | None = ...,
    causal: bool = ...,
    masked: Masked = ...,
    batch_invariant: bool = ...,
) -> Tensor: ...
@overload
def log_softmax(
    x: A,
    dim: int = ...,
    dtype: Any = ...,
    *,
    scale: float | None = ...,
    mask: Array | None = ...,
    causal: bool = ...,
    masked: Masked = ...,
    batch_invariant: bool = ...,
) -> A: ...
def log_softmax(
    x: Any,
    dim: int = -1,
    dtype: Any = None,
    *,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    masked: Masked = "nan",
    batch_invariant: bool = False,
) -> Any:
    """The logarithm of softmax, differentiable: y = h - max h - log(sum exp(h - max h)) with
    h = x * scale + mask.

    y of a masked element is -inf, and so is that of a row that is masked whole with masked="zero". The
    gradient of masked elements is 0, and sum(dy) leaves them out, where torch's operator would add theirs.
    Arguments, results and errors are otherwise those of softmax.
    Gradient: dx = scale * (dy - exp(y) * sum(dy)).
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        _check_constants(scale=scale)
        return _masked_softmax(ops, x, dim, dtype, scale, mask, causal, masked, True, batch_invariant)
    except _FAILURES as error:
        raise ops.explained(error, x=x, mask=mask) from None


@overload
def softmax_fwd(x: Tensor, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> Tensor: ...
@overload
def softmax_fwd(x: A, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> A: ...
def softmax_fwd(x: Any, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> Any:
    """softmax(x) without a gradient."""
    return softmax(_detached(x), algorithm=algorithm, batch_invariant=batch_invariant)


@overload
def softmax_bwd(
    dy: Tensor, y: Tensor, *, algorithm: Algorithm = ..., batch_invariant: bool = ...
) -> Tensor: ...
@overload
def softmax_bwd(dy: A, y: Array, *, algorithm: Algorithm = ..., batch_invariant: bool = ...) -> A: ...
def softmax_bwd(dy: Any, y: Any, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> Any:
    """The gradient of softmax: dx = (dy - sum(dy * y)) * y for each row.

    dy, y: (..., N) of the same shape, dtype and device. y is the result of the forward call.
    Returns dx, with the shape and dtype of dy.
    algorithm: one of gander.algorithms("softmax_bwd"). algorithm, batch_invariant and errors are otherwise as
    in softmax.
    """
    code = 0 if algorithm == "auto" else _code("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(dy, _Tensor) else _operators_of(dy)
    try:
        return ops.softmax_bwd(dy, y, code, bool(batch_invariant))
    except _FAILURES as error:
        raise ops.explained(error, dy=dy, y=y) from None


@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    residual: Tensor | None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: dtype | str | None = ...,
    eps: float | None = ...,
    prenorm: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    residual: Tensor | None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: dtype | str | None = ...,
    eps: float | None = ...,
    *,
    prenorm: Literal[True],
    weight_offset: float = ...,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rmsnorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float | None = ...,
    prenorm: Literal[False] = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> A: ...
@overload
def rmsnorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float | None = ...,
    *,
    prenorm: Literal[True],
    weight_offset: float = ...,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
def rmsnorm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float | None = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """RMSNorm over the last dimension, differentiable: y = h / sqrt(mean(h^2) + eps) * weight + bias with
    h = x + residual.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
    tensor on the CPU or a CUDA device, or an object with `__dlpack__`. For the latter the result is an array
    of the same library, without a gradient.
    weight, bias: (N), each of any of these dtypes, not only x's, or None. float64 if and only if x is. Or
    (H, N) for x of shape (..., H, N): those of each head.
    residual: x's shape, any of these dtypes, or None. The sum h is not rounded.
    out_dtype: the dtype of the result, or its name ("float16"). By default that of x.
    residual_dtype: the dtype of residual_out. By default that of residual, or of x without one. (layernorm's
    is that of x + residual in torch.)
    eps: added to the mean of squares. None is torch's default: the machine epsilon of float32 (of float64 for
    float64).
    prenorm: return (y, residual_out). residual_out is h in residual_dtype. Without a residual it is x itself
    if it has that dtype.
    weight_offset: added to each weight, as in Gemma's norms. Refused without a weight.
    casting_mode: "llama" rounds the normalized row to x's dtype before the weight is applied, as Llama's norm
    in transformers does. The gradient of weight is that of the rounded row. None rounds once, in the end.
    out: a tensor of x's shape, to which y is written, and which is returned. It decides y's dtype, and may be
    x. Refused if a gradient is wanted. An array of NumPy or CuPy has to be writable.
    algorithm, batch_invariant: as in softmax, with gander.algorithms("rmsnorm") and ("rmsnorm_bwd"). With a
    bias, a residual, a weight for each head, weight_offset, casting_mode, out or another residual_dtype than
    x's there is only "auto". The gradients of weight and bias are sums over rows, so their bits depend on all
    of them.
    Returns y, a contiguous tensor of x's shape. Everything is computed in float32 (float64 for float64).
    Gradients have the dtypes of their tensors. With a residual, backward reads h as residual_out has it, or
    without prenorm in the wider dtype of x and residual, unless residual_dtype is given.
    Raises TypeError (dtype), ValueError (shape, algorithm), RuntimeError (device, driver, memory).
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        _check_constants(eps=eps, weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else _code("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if eps is None:
            eps = _epsilon(x)
        options = eps, code, bool(batch_invariant), weight_offset
        special = bias is not None or residual is not None or prenorm
        if special or out is not None or casting_mode is not None:
            weight = _checked_weight(ops, "rmsnorm", x, weight, bias, weight_offset)
            options = *options, _rounds(casting_mode)
            operands = x, weight, bias, residual
            if out is not None:
                wanted = {"residual_out"} if prenorm else set()
                dtypes = out_dtype, residual_dtype
                answer = _norm_into(ops, "rmsnorm", operands, out, dtypes, wanted, options)
                return answer[:2] if prenorm else out
            return _norm(ops, "rmsnorm", operands, out_dtype, residual_dtype, prenorm, options)
        if out_dtype is not None:
            out_dtype = _dtype(ops, out_dtype)
        return ops.rmsnorm(x, weight, out_dtype, *options)
    except _FAILURES as error:
        _refuse_shape("rmsnorm", weight)
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None


@overload
def fused_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None = ...,
    weight_offset: float = ...,
    *,
    batch_invariant: bool = ...,
) -> None: ...
@overload
def fused_add_rmsnorm(
    x: Array,
    residual: Array,
    weight: Array | None,
    eps: float | None = ...,
    weight_offset: float = ...,
    *,
    batch_invariant: bool = ...,
) -> None: ...
def fused_add_rmsnorm(
    x: Any,
    residual: Any,
    weight: Any,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    *,
    batch_invariant: bool = False,
) -> None:
    """In place, as inference servers call it: residual becomes x + residual, and x its RMSNorm.

    x, residual: (..., N) of the same shape, each of float16, bfloat16 or float32 (on the CPU also float64).
    The sum is rounded to residual's dtype, but the norm is that of the sum before. A torch tensor, or a
    writable array of NumPy or CuPy. A tensor that requires a gradient is refused.
    weight, eps, weight_offset, batch_invariant and errors are those of rmsnorm.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        _check_constants(eps=eps, weight_offset=weight_offset)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        _checked_weight(ops, "fused_add_rmsnorm", x, weight)
        if residual is None:
            raise TypeError("residual is None, expected a tensor, to which x is added; or call rmsnorm")
        _adds(ops, x, residual, None)
        if eps is None:
            eps = _epsilon(x)
        given = {"x": x, "weight": weight, "residual": residual}
        options = eps, bool(batch_invariant), weight_offset, False
        _write(ops, "fused_add_rmsnorm_", given, options, {"y": "x", "residual_out": "residual"})
    except _FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, residual=residual) from None


@overload
def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    residual: Tensor | None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: dtype | str | None = ...,
    eps: float | None = ...,
    store_rstd: bool = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor | None]: ...
@overload
def rmsnorm_fwd(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float | None = ...,
    store_rstd: bool = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A, A | None]: ...
def rmsnorm_fwd(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float | None = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """rmsnorm without a gradient. Returns (out, residual_out, rstd).

    residual_out is as with prenorm. rstd is 1 / sqrt(mean(h^2) + eps), float32 (float64 for float64) of shape
    x.shape[:-1], or None without store_rstd. Arguments and errors are those of rmsnorm.
    """
    if type(eps) is not float or type(weight_offset) is not float:
        _check_constants(eps=eps, weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else _code("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        weight = _checked_weight(ops, "rmsnorm", x, weight, bias, weight_offset)
        if out_dtype is not None:
            out_dtype = _dtype(ops, out_dtype)
        if residual_dtype is not None:
            residual_dtype = _dtype(ops, residual_dtype, "residual_dtype")
        if eps is None:
            eps = _epsilon(x)
        rounds = _rounds(casting_mode)
        options = eps, code, bool(batch_invariant), weight_offset, rounds
        operands = _detached(x), _detached(weight)
        if out is not None:
            operands = *operands, _detached(bias), _detached(residual)
            wanted = {"residual_out", "rstd"} if store_rstd else {"residual_out"}
            dtypes = out_dtype, residual_dtype
            _, h, _, rstd = _norm_into(ops, "rmsnorm", operands, out, dtypes, wanted, options)
            return out, x if h is operands[0] else h, rstd
        if _adds(ops, x, residual, residual_dtype):
            operator = ops.rmsnorm_add_fwd if store_rstd else ops.rmsnorm_add
            more = _detached(bias), _detached(residual), out_dtype, residual_dtype
            out, residual_out, *rest = operator(*operands, *more, *options)
            return out, residual_out, rest[0] if store_rstd else None
        if bias is not None or rounds:
            operator = ops.rmsnorm_bias_fwd if store_rstd else ops.rmsnorm_bias
            answer = operator(*operands, _detached(bias), out_dtype, *options)
        else:
            operator = ops.rmsnorm_fwd if store_rstd else ops.rmsnorm
            answer = operator(*operands, out_dtype, *options[:-1])
    except _FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None
    out, rstd = answer if store_rstd else (answer, None)
    return out, x, rstd


@overload
def rmsnorm_bwd(
    x: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    dresidual_out: Tensor | None = ...,
    has_bias: bool = ...,
    has_residual: bool = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...
@overload
def rmsnorm_bwd(
    x: A,
    weight: Array | None,
    dout: Array,
    rstd: Array,
    dresidual_out: Array | None = ...,
    has_bias: bool = ...,
    has_residual: bool = ...,
    weight_offset: float = ...,
    *,
    casting_mode: CastingMode | None = ...,
    algorithm: Algorithm = ...,
    batch_invariant: bool = ...,
) -> tuple[A, A | None, A | None, A | None]: ...
def rmsnorm_bwd(
    x: Any,
    weight: Any,
    dout: Any,
    rstd: Any,
    dresidual_out: Any = None,
    has_bias: bool = False,
    has_residual: bool = False,
    weight_offset: float = 0.0,
    *,
    casting_mode: CastingMode | None = None,
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
) -> Any:
    """The gradient of rmsnorm. Returns (dx, dw, db, dresidual).

    With h = x * rstd and g = dout * (weight + weight_offset): dx = (g - h * mean(g * h)) * rstd +
    dresidual_out, dw is the sum of dout * h over the rows, and db the sum of dout.
    x: forward's residual_out if there was a residual, else its x. weight, rstd: as in the forward call. dout,
    dresidual_out: x's shape, any of the dtypes. dresidual_out is the gradient of residual_out, or None.
    dx has the dtype of x, and dw and db that of weight. Without a weight dw is None, and db is float32
    (float64 for float64). db is None without has_bias. The sums are accumulated in float32 or wider in a
    fixed order, so their bits do not change from run to run.
    dresidual has dx's numbers. It has the dtype of dresidual_out, and is dx itself if that is x's. Without
    dresidual_out it is dx if has_residual, else None.
    algorithm: one of gander.algorithms("rmsnorm_bwd"), with the same exceptions as in rmsnorm. casting_mode,
    batch_invariant and errors are as there. casting_mode="llama" rounds to the dtype of x.
    """
    if type(weight_offset) is not float:
        _check_constants(weight_offset=weight_offset)
    code = 0 if algorithm == "auto" else _code("algorithm", algorithm, ALGORITHMS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    dresidual = db = dw = None
    try:
        options, rounds = (code, bool(batch_invariant), weight_offset), _rounds(casting_mode)
        if has_bias or dresidual_out is not None or rounds:
            operands = x, weight, dout, dresidual_out, rstd
            dx, dresidual, dw, db = _norm_bwd(ops, "rmsnorm", operands, has_bias, (*options, rounds))
        elif weight is None:
            dx = ops.rmsnorm_bwd(x, None, dout, rstd, *options)
        else:
            dx, dw = ops.rmsnorm_bwd_dw(x, weight, dout, rstd, *options)
    except _FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "dresidual_out": dresidual_out}
        raise ops.explained(error, **given) from None
    return dx, dw, db, dx if dresidual is None and has_residual else dresidual


@overload
def layernorm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    residual: Tensor | None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: dtype | str | None = ...,
    eps: float = ...,
    prenorm: Literal[False] = ...,
    *,
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def layernorm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    residual: Tensor | None = ...,
    out_dtype: dtype | str | None = ...,
    residual_dtype: dtype | str | None = ...,
    eps: float = ...,
    *,
    prenorm: Literal[True],
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layernorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float = ...,
    prenorm: Literal[False] = ...,
    *,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> A: ...
@overload
def layernorm(
    x: A,
    weight: Array | None = ...,
    bias: Array | None = ...,
    residual: Array | None = ...,
    out_dtype: Any = ...,
    residual_dtype: Any = ...,
    eps: float = ...,
    *,
    prenorm: Literal[True],
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
def layernorm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    *,
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """LayerNorm over the last dimension, differentiable: y = (h - mean h) / sqrt(var h + eps) * weight + bias
    with h = x + residual.

    var is the mean of the squared distances from the mean, which is subtracted first. eps is added to it;
    torch's default is 1e-5, and eps is a number. h is rounded to residual_dtype, which by default is the
    dtype of x + residual in torch, and always without prenorm. Under CUDA autocast y is float32 by default,
    like that of F.layer_norm. The other arguments, results and errors are those of rmsnorm.
    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    if type(eps) is not float:
        _check_constants(eps=eps)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        weight = _checked_weight(ops, "layernorm", x, weight, bias)
        operands, options = (x, weight, bias, residual), (eps, bool(batch_invariant))
        if out is not None:
            wanted = {"residual_out"} if prenorm else set()
            dtypes = out_dtype, residual_dtype
            answer = _norm_into(ops, "layernorm", operands, out, dtypes, wanted, options)
            return answer[:2] if prenorm else out
        return _norm(ops, "layernorm", operands, out_dtype, residual_dtype, prenorm, options)
    except _FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, residual=residual, out=out) from None


@overload
def layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[False] = ...,
    return_mean: Literal[False] = ...,
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[False] = ...,
    return_mean: Literal[True],
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[True],
    return_mean: Literal[False] = ...,
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[True],
    return_mean: Literal[True],
    batch_invariant: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[False] = ...,
    return_mean: Literal[False] = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> A: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[False] = ...,
    return_mean: Literal[True],
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[True],
    return_mean: Literal[False] = ...,
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A]: ...
@overload
def layernorm_fwd(
    x: A,
    weight: Array | None,
    bias: Array | None = ...,
    eps: float = ...,
    *,
    return_rstd: Literal[True],
    return_mean: Literal[True],
    batch_invariant: bool = ...,
    out: A | None = ...,
) -> tuple[A, A, A]: ...
def layernorm_fwd(
    x: Any,
    weight: Any,
    bias: Any = None,
    eps: float = 1e-6,
    return_rstd: bool = False,
    return_mean: bool = False,
    *,
    batch_invariant: bool = False,
    out: Any = None,
) -> Any:
    """layernorm without a gradient. Returns out, (out, rstd), (out, mean) or (out, rstd, mean).

    rstd: 1 / sqrt(var x + eps). Both statistics are float32 (float64 for float64) of shape x.shape[:-1].
    Arguments and errors are those of layernorm.
    """
    if not (return_rstd or return_mean):
        operands = _detached(x), _detached(weight), _detached(bias)
        return layernorm(*operands, eps=eps, batch_invariant=batch_invariant, out=out)
    if type(eps) is not float:
        _check_constants(eps=eps)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        weight = _checked_weight(ops, "layernorm_fwd", x, weight, bias)
        operands = _detached(x), _detached(weight), _detached(bias)
        options = eps, bool(batch_invariant)
        if out is None:
            y, mean, rstd = ops.layernorm_fwd(*operands, None, *options)
        else:
            wanted, operands = {"mean", "rstd"}, (*operands, None)
            y, _, mean, rstd = _norm_into(ops, "layernorm", operands, out, (None, None), wanted, options)
    except _FAILURES as error:
        raise ops.explained(error, x=x, weight=weight, bias=bias, out=out) from None
    return (y, *[rstd] * bool(return_rstd), *[mean] * bool(return_mean))


@overload
def layernorm_bwd(
    x: Tensor,
    weight: Tensor | None,
    dout: Tensor,
    rstd: Tensor,
    mean: Tensor,
    has_bias: bool = ...,
    *,
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
@overload
def layernorm_bwd(
    x: A,
    weight: Array | None,
    dout: Array,
    rstd: Array,
    mean: Array,
    has_bias: bool = ...,
    *,
    batch_invariant: bool = ...,
) -> tuple[A, A | None, A | None]: ...
def layernorm_bwd(
    x: Any,
    weight: Any,
    dout: Any,
    rstd: Any,
    mean: Any,
    has_bias: bool = True,
    *,
    batch_invariant: bool = False,
) -> Any:
    """The gradient of layernorm. Returns (dx, dw, db).

    With h = (x - mean) * rstd and g = dout * weight: dx = (g - mean(g) - h * mean(g * h)) * rstd, where
    mean(...) is over the row, dw is the sum of dout * h over the rows, and db the sum of dout.
    x, weight, rstd, mean: as in the forward call, or x its residual_out if there was a residual. dout: x's
    shape, any of the dtypes. Dtypes, the cases of None and errors are those of rmsnorm_bwd.
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        operands = x, weight, dout, None, mean, rstd
        dx, _, dw, db = _norm_bwd(ops, "layernorm", operands, has_bias, (bool(batch_invariant),))
    except _FAILURES as error:
        given = {"x": x, "weight": weight, "dout": dout, "rstd": rstd, "mean": mean}
        raise ops.explained(error, **given) from None
    return dx, dw, db


@overload
def cross_entropy(
    x: Tensor,
    target: Tensor,
    lse_partial: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    inplace_backward: bool = ...,
    *,
    one_pass: bool | None = ...,
    batch_invariant: bool = ...,
    divisor: float | Tensor | None = ...,
    upstream: float | Tensor | None = ...,
) -> Tensor: ...
@overload
def cross_entropy(
    x: A,
    target: Array,
    lse_partial: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    inplace_backward: bool = ...,
    *,
    one_pass: bool | None = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
    upstream: float | Array | None = ...,
) -> A: ...
def cross_entropy(
    x: Any,
    target: Any,
    lse_partial: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    inplace_backward: bool = False,
    *,
    one_pass: bool | None = None,
    batch_invariant: bool = False,
    divisor: Any = None,
    upstream: Any = None,
) -> Any:
    """Cross-entropy of logits and class indices, differentiable in x.

    The loss of a row is weight[t] * (lse(x) - x[t]), where t is its target and lse(x) its log-sum-exp.
    x: (M, N) or (..., N), N >= 1 classes, of float16, bfloat16 or float32 (on the CPU also float64), any
    strides. A torch tensor on the CPU or a CUDA device, or an object with `__dlpack__` (no gradient).
    target: x.shape[:-1], int32 or int64. Rows whose target is ignore_index are ignored. Another target that
    is not in [0, N) is never used as an index. It makes the loss and the gradient of its row NaN, and with
    "mean" those of all rows (see set_debug).
    weight: (N) class weights, float16, bfloat16 or float32 (float64 for float64), or None.
    reduction: "mean", "sum" or "none". The mean is over the sum of the weights of the rows that are not
    ignored. If all are ignored it is NaN and the gradients are zero, as in torch.
    inplace_backward: backward writes the gradient over x, which saves a tensor of the size of x. x must not
    be used afterwards: autograd refuses a backward pass that still needs it. Ignored inside torch.compile,
    and under hooks on saved tensors, where autograd does not see that x was written. Torch tensors only.
    one_pass: True computes the gradient together with the loss. This reads x once, and keeps a tensor of the
    size of x until backward. False computes it in backward, which reads x again. None chooses by size, and
    inside torch.compile False, because Inductor writes the gradient over x. It applies only to a mean or a
    sum on a CUDA device, without inplace_backward and batch_invariant. Inside torch.compile it also takes
    Inductor, outside of activation checkpoints, with donated buffers (torch's default).
    batch_invariant: as in softmax, for the loss of each row, and for its gradient with "none" or "sum". The
    gradient of a mean depends on all rows.
    divisor: what loss and gradient are divided by, with reduction "sum": a number, or a 0-dim tensor of any
    real dtype on x's device, which is read there, without synchronization. For a sum over all tokens of a
    step, whose number only the training loop knows.
    upstream: the gradient of the loss that backward is expected to bring, a number or such a tensor: 1/4 for
    `(loss / 4).backward()`, a GradScaler's scale. The single pass makes the gradient for it (for 1 by
    default). backward compares the two on the device, and computes the gradient again if they differ. So
    upstream changes the time, never the result. A tensor is copied when the loss is computed, except inside
    torch.compile: there autograd refuses a backward pass after it was written to.
    lse_partial: (..., K), of any of these dtypes, not only x's: parts of the log-sum-exp of each row, such as
    the log-sum-exps of slices of x. The log-sum-exp of a row of lse_partial is taken for that of the row of
    x, which forward then only reads at the target. It gets no gradient: that of x is complete. Torch tensors
    only. one_pass, upstream and batch_invariant do not apply. torch.compile breaks its graph at such a call.
    Returns the loss, float32 (float64 for float64): a scalar, or one value for each row with "none".
    Raises TypeError (dtype), ValueError (shape, reduction), RuntimeError (device, driver, memory).
    Gradient: dx = dloss * weight[t] * (softmax(x) - 1[t]). For accuracy, the maximum and the logarithm of the
    sum are saved for it as two numbers, not as lse.
    """
    code = 1 if reduction == "mean" else _code("reduction", reduction, REDUCTIONS)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    if divisor is not None or upstream is not None:
        _of_sum(divisor, upstream, reduction)
        divisor = None if divisor is None else ops.scalar("divisor", divisor, x)
        upstream = None if upstream is None else ops.scalar("upstream", upstream, x)
    try:
        if _debug:
            _check_targets(x, target, ignore_index)
        if lse_partial is not None:
            loss = _partial_of(ops, "lse_partial").with_lse_partial(
                x, target, lse_partial, weight, ignore_index, code, bool(inplace_backward)
            )
            return loss if divisor is None else loss / divisor
        return ops.cross_entropy(
            x,
            target,
            weight,
            divisor,
            upstream,
            ignore_index,
            code,
            bool(batch_invariant),
            bool(inplace_backward),
            one_pass,
        )
    except _FAILURES as error:
        raise ops.explained(error, x=x, target=target, weight=weight) from None


@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    return_lse: Literal[False] = ...,
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    *,
    batch_invariant: bool = ...,
    divisor: float | Tensor | None = ...,
) -> Tensor: ...
@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    target_logit: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[False] = ...,
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    return_lse: Literal[False] = ...,
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    *,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
) -> A: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
) -> tuple[A, A, A]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[True],
    return_dx: Literal[False] = ...,
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
) -> tuple[A, A]: ...
@overload
def cross_entropy_fwd(
    x: A,
    target: Array,
    target_logit: None = ...,
    weight: Array | None = ...,
    ignore_index: int = ...,
    *,
    return_lse: Literal[False] = ...,
    return_dx: Literal[True],
    inplace_backward: bool = ...,
    batch_invariant: bool = ...,
    divisor: float | Array | None = ...,
) -> tuple[A, A]: ...
def cross_entropy_fwd(
    x: Any,
    target: Any,
    target_logit: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_dx: bool = False,
    inplace_backward: bool = False,
    *,
    batch_invariant: bool = False,
    divisor: Any = None,
) -> Any:
    """The loss of each row, without a gradient. Returns loss, (loss, lse), (loss, dx) or (loss, lse, dx).

    loss and lse (the log-sum-exp of each row): float32 (float64 for float64) of shape x.shape[:-1].
    dx: the gradient of the sum of the losses, computed in the same pass over x, with x's shape and dtype.
    With inplace_backward it is written over x, and x itself is returned.
    divisor: as in cross_entropy, for the loss of each row and for dx.
    target_logit: the logits of the targets, in place of those in x, with x.shape[:-1]; or (..., K), of which
    target chooses one. x then only gives the log-sum-exp, and weight has an element for each class that
    target may name. With x.shape[:-1] and without weight any target >= 0 is a class. Refused with return_dx.
    Torch tensors only, for which torch.compile breaks its graph.
    Other arguments and errors are those of cross_entropy.
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    if divisor is not None:
        divisor = ops.scalar("divisor", divisor, x)
    if target_logit is not None:
        if return_dx:
            raise NotImplementedError(
                "return_dx is set with target_logit, expected one of them; cross_entropy_bwd takes the lse"
            )
        try:
            loss, lse = _partial_of(ops, "target_logit").with_target_logit(
                _detached(x), target, _detached(target_logit), _detached(weight), ignore_index
            )
        except _FAILURES as error:
            raise ops.explained(error, x=x, target=target, weight=weight) from None
        if divisor is not None:
            loss = loss / divisor
        return (loss, lse) if return_lse else loss
    try:
        if _debug:
            _check_targets(x, target, ignore_index)
        operands, options = (_detached(x), target, _detached(weight), divisor), (bool(batch_invariant),)
        if return_dx and inplace_backward:
            (loss, lse), dx = ops.cross_entropy_fwd_dx_(*operands, None, ignore_index, *options), x
        elif return_dx:
            loss, lse, dx = ops.cross_entropy_fwd_dx(*operands, None, ignore_index, *options)
        elif return_lse:
            return ops.cross_entropy_fwd_lse(*operands, ignore_index, *options)
        else:
            return ops.cross_entropy(*operands, None, ignore_index, 0, *options, False, None)
    except _FAILURES as error:
        raise ops.explained(error, x=x, target=target, weight=weight) from None
    return (loss, lse, dx) if return_lse else (loss, dx)


@overload
def cross_entropy_bwd(
    x: Tensor,
    target: Tensor,
    dloss: Tensor,
    lse: Tensor,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    inplace_backward: bool = ...,
) -> Tensor: ...
@overload
def cross_entropy_bwd(
    x: A,
    target: Array,
    dloss: Array,
    lse: Array,
    weight: Array | None = ...,
    ignore_index: int = ...,
    inplace_backward: Literal[False] = ...,
) -> A: ...
def cross_entropy_bwd(
    x: Any,
    target: Any,
    dloss: Any,
    lse: Any,
    weight: Any = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> Any:
    """The gradient of the rows' losses: dx = dloss * weight[t] * (softmax(x) - 1[t]), with x's shape and
    dtype.

    dloss: x.shape[:-1] with any strides, or a single value for all rows. lse: x.shape[:-1], as returned by
    cross_entropy_fwd. Both are float32 (float64 for float64).
    With inplace_backward dx is written over x, and x itself is returned.
    The bits of a row never depend on other rows. Other arguments and errors are those of cross_entropy.
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if _debug:
            _check_targets(x, target, ignore_index)
        if inplace_backward:
            ops.cross_entropy_bwd_(_detached(x), target, weight, dloss, lse, None, ignore_index, 0, False)
            return x
        return ops.cross_entropy_bwd(x, target, weight, dloss, lse, None, ignore_index, 0, False)
    except _FAILURES as error:
        raise ops.explained(error, x=x, target=target, dloss=dloss, lse=lse, weight=weight) from None


def cross_entropy_fwd_out(
    x: Any,
    target: Any,
    target_logit: Any,
    loss: Any,
    lse: Any,
    dx: Any,
    weight: Any,
    ignore_index: int = -100,
) -> None:
    """cross_entropy_fwd that writes its results to loss, lse and dx, of which the last two may be None.

    loss, lse: x.shape[:-1], float32 (float64 for float64), contiguous. dx: x's shape and dtype. It may be x.
    Torch tensors, or writable arrays of NumPy or CuPy. Other arguments and errors are those of
    cross_entropy_fwd.
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        for name, statistic in ("loss", loss), ("lse", lse):
            if statistic is not None and statistic.shape != x.shape[:-1]:
                raise ValueError(
                    f"{name} has shape {tuple(statistic.shape)}, expected {tuple(x.shape[:-1])}, the leading "
                    "dimensions of x"
                )
        if target_logit is not None:
            if loss is None:
                raise ValueError("loss is None, expected a tensor")
            results = cross_entropy_fwd(
                x, target, target_logit, weight, ignore_index, return_lse=True, return_dx=dx is not None
            )
            writes = [out.copy_ for out in (loss, lse) if out is not None]  # all, before the first writes
            for write, result in zip(writes, results, strict=False):
                write(result)
            return
        if dx is not None:
            _check_out(ops, "dx", x, dx)
        if _debug:
            _check_targets(x, target, ignore_index)
        arguments = _detached(x), target, _detached(weight), loss, lse, dx
        ops.cross_entropy_fwd_out(*arguments, ignore_index, False)
    except _FAILURES as error:
        given = {"x": x, "target": target, "weight": weight, "loss": loss, "lse": lse, "dx": dx}
        raise ops.explained(error, **given) from None


def cross_entropy_bwd_out(
    x: Any,
    target: Any,
    dloss: Any,
    lse: Any,
    dx: Any,
    weight: Any = None,
    ignore_index: int = -100,
) -> None:
    """cross_entropy_bwd that writes its result to dx, of x's shape and dtype. dx may be x.

    Torch tensors, or writable arrays of NumPy or CuPy. Other arguments and errors are those of
    cross_entropy_bwd.
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        _check_out(ops, "dx", x, dx)
        if _debug:
            _check_targets(x, target, ignore_index)
        ops.cross_entropy_bwd_out(_detached(x), target, weight, dloss, lse, dx, ignore_index, False)
    except _FAILURES as error:
        given = {"x": x, "target": target, "dloss": dloss, "lse": lse, "weight": weight, "dx": dx}
        raise ops.explained(error, **given) from None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    weight_ce: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    upstream: float | Tensor | None = None,
    chunk: int | None = None,
    *,
    accumulate: Literal["float32"] | None = None,
) -> Tensor:
    """cross_entropy(x @ weight.T + bias, target), which never holds all logits. Differentiable in x, weight
    and bias. Torch tensors only.

    x: (..., K), of float16, bfloat16 or float32 (on the CPU also float64). weight: (V, K) and bias: (V) or
    None, of x's dtype. Under autocast all three are cast, as in torch.nn.functional.linear.
    target, ignore_index, reduction, divisor: as in cross_entropy. weight_ce: (V), its class weights.
    chunk: the rows whose logits are held at a time. None takes a quarter of all rows. More chunks need less
    memory, and more time to add up the gradient of weight.
    accumulate: "float32" adds up the gradient of weight over the chunks in float32, in a tensor of its own.
    By default each sum is rounded to weight's dtype. The gradient of bias is always added in float32.
    upstream: the gradient of the loss that backward is expected to bring, as in cross_entropy. It is 1 by
    default, and if its size is not within 2**-64 to 2**64. forward makes the gradients for it, with torch's
    matrix products. Gradients of bfloat16 and float32 are multiplied in backward if another one comes, which
    rounds once more. Gradients of float16 would have underflowed: they are made again, and so are those of a
    second backward pass. Without upstream, gradients of float16 are made in backward, and with reduction
    "none" all are. With upstream, float16's backward waits for the device to see whether they have to be.

    Ignored rows take part in the matrix products. Inside torch.func's transforms all logits are held.
    Returns the loss as cross_entropy does.
    Raises TypeError (dtype), ValueError (shape, reduction, chunk), RuntimeError (device, driver, memory).
    """
    if not (isinstance(x, _Tensor) or _hook.is_late_tensor(x)):
        raise TypeError(f"x is a {type(x).__name__}, expected a torch.Tensor")
    code = _code("reduction", reduction, REDUCTIONS)
    _of_sum(divisor, upstream, reduction)
    _check_chunks(chunk, accumulate)
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    if _debug and hasattr(weight, "shape"):
        _check_targets(weight.shape[0], target, ignore_index)
    try:
        loss: Tensor = ops._linear_cross_entropy.linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            weight_ce,
            ignore_index,
            code,
            divisor,
            upstream,
            chunk,
            accumulate is not None,
        )
    except _FAILURES as error:
        raise ops.explained(error) from None
    return loss


@overload
def logsumexp(
    x: Tensor, dim: int | tuple[int, ...] = ..., keepdim: bool = ..., *, batch_invariant: bool = ...
) -> Tensor: ...
@overload
def logsumexp(x: A, dim: int = ..., keepdim: Literal[False] = ..., *, batch_invariant: bool = ...) -> A: ...
def logsumexp(x: Any, dim: Any = -1, keepdim: bool = False, *, batch_invariant: bool = False) -> Any:
    """log(sum exp(x)) over one or more dimensions, differentiable. The maximum is subtracted first.

    x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
    tensor on the CPU or a CUDA device, or an object with `__dlpack__`. For the latter the result is an array
    of the same library, without a gradient.
    dim: the dimension, or several. Others than the last are moved to the end, which copies. Torch tensors
    only.
    keepdim: keep these dimensions, of size 1. Torch tensors only.
    batch_invariant: as in softmax, for the value of a row and its gradient.
    Returns x.shape without dim, float32 also for 16-bit x (float64 for float64). A row that is all -inf gives
    -inf. A row with +inf or NaN gives NaN, while torch.logsumexp gives +inf for +inf.
    Raises TypeError (dtype), ValueError (shape), IndexError (dim), RuntimeError (device, driver, memory).
    Gradient: dx = dlse * exp(x - lse).
    """
    ops = _torch if isinstance(x, _Tensor) else _operators_of(x)
    try:
        if dim == -1 and not keepdim:
            return ops.logsumexp(x, bool(batch_invariant))
        if keepdim and ops is not _torch:
            raise NotImplementedError("keepdim is supported for torch tensors only; reshape the result")
        if isinstance(dim, (tuple, list)) and len(dim) > 1:
            if ops is not _torch:
                raise NotImplementedError(f"dim is {dim}, expected one for arrays; reshape x")
            rank = x.ndim
            whole = [d for d in dim if isinstance(d, Integral) and not isinstance(d, bool)]
            dims = sorted({int(d) % rank for d in whole if -rank <= d < rank})
            if len(dims) != len(dim):
                raise (IndexError if len(whole) == len(dim) else TypeError)(
                    f"dim is {dim}, expected different dimensions of x of rank {rank}, ints of {-rank} to "
                    f"{rank - 1}"
                )
            rows = x.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))
        else:
            one = dim[0] if isinstance(dim, (tuple, list)) and dim else dim
            rows, dims = _to_last(ops, x, one, "logsumexp"), [one % max(len(x.shape), 1)]
        lse = ops.logsumexp(rows, bool(batch_invariant))
        for d in dims if keepdim else ():
            lse = lse.unsqueeze(d)
        return lse
    except _FAILURES as error:
        raise ops.explained(error, x=x) from None
