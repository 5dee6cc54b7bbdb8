"""softmax, log_softmax and logsumexp."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

from .._backend import BACKENDS, Backend, backend_of
from .._table import ALGORITHMS, Algorithm
from .._words import check_flags, number, shown
from .arguments import AUTO, FAILURES, A, Array, code_of, overridden

Masked = Literal["nan", "zero"]


_MASKED: tuple[Masked, ...] = ("nan", "zero")

# Defaults that are compared by `is`, which is fast. What is equal, but not the same object, takes longer.
_NAN, _LAST = _MASKED[0], -1


def _chosen(dim: Any, axis: Any) -> tuple[Any, str]:
    """The dimension, and its name: NumPy's callers name it axis."""
    if axis is None:
        return dim, "dim"
    if dim is not _LAST and dim != axis:
        raise TypeError(
            f"axis is {shown(axis)} and dim is {shown(dim)}, expected one of them; leave axis out"
        )
    return axis, "axis"


def _to_last(ops: Any, x: Any, dim: Any, name: str) -> Any:
    """x with dimension dim at the end, which copies later unless it is there already."""
    if dim is _LAST and x.shape:
        return x
    if type(dim) is not int and (isinstance(dim, bool) or not isinstance(dim, Integral)):
        raise TypeError(f"{name} is {shown(dim)}, expected an int")
    rank = max(len(x.shape), 1)
    if not -rank <= dim < rank:
        raise IndexError(
            f"{name} is {shown(dim)}, expected {-rank} to {rank - 1} for x of rank {len(x.shape)}"
        )
    if x.shape and dim % rank == rank - 1:
        return x
    return ops.rows(x, [dim])


def softmax(
    x: A,
    *,
    dim: int = -1,
    dtype: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
    masked: Masked = "nan",
    algorithm: Algorithm = "auto",
    batch_invariant: bool = False,
    axis: int | None = None,
) -> A:
    """Softmax over one dimension, differentiable.

    y = exp(h - max h) / sum exp(h - max h) with h = x * scale + mask. The maximum is subtracted first:
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. Sums are computed in float32
    (float64 for float64). A row that is all -inf, or of which an element is NaN or +inf, is NaN. Masked
    elements count for nothing, NaN included: their y is 0, and so is their gradient.

    Args:
        x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
            tensor on the CPU or a CUDA device, or an object with `__dlpack__`, for which the result is an
            array of the same library, without a gradient.
        dim: The dimension. One other than the last is moved to the end and back, which copies.
        dtype: The dtype of the result; by default that of x. As in torch, x is cast to it first. A widening
            cast is done by the kernel, without a copy. Other casts need a torch tensor.
        scale: A number that x is multiplied by first, 1 by default. h is not rounded to x's dtype.
        mask: A tensor that broadcasts to x's shape, without a gradient. bool or uint8: only elements where it
            is not 0 take part, as in scaled_dot_product_attention. float16, bfloat16 or float32 (float64 if
            and only if x is): it is added, and -inf masks. It is read as it is if its last stride is 1 or 0
            and its other dimensions, broadcast to those of x, collapse into three or fewer. Otherwise it is
            copied.
        causal: Also masks the columns after i in row i of each matrix (Q, N), the last two dimensions of x.
        masked: What a row becomes that is masked whole: "nan" as in torch, or "zero".
        algorithm: Which kind of GPU kernel runs, one of gander.algorithms("softmax"). Backward uses the same
            if it supports these rows (see gander.algorithms("softmax_bwd")), else "auto". CPU tensors, and
            calls with a scale, a mask, causal or a wider dtype, only have "auto".
        batch_invariant: The bits of a row's result and of its gradient do not depend on the number of rows.
            This is slower if there are few rows. Rows of whole 16-byte vectors have other bits if x is not
            aligned to 16 bytes.
        axis: dim, by NumPy's name.

    Returns:
        y, contiguous, with the shape of x, and its dtype unless dtype is given. Under CUDA autocast it is
        float32, like that of torch.nn.functional.softmax.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape, or an option.
        IndexError: dim.
        NotImplementedError: A nested or sparse tensor, or an algorithm that does not support x. The message
            says why, and which others do.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.softmax(torch.tensor([[0.0, 0.0], [1.0, -torch.inf]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    code = 0 if algorithm is AUTO else code_of("algorithm", algorithm, ALGORITHMS)
    if type(batch_invariant) is not bool:
        check_flags(batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(softmax, locals())
    plain = (
        dtype is None
        and mask is None
        and scale is None
        and causal is False
        and masked is _NAN
        and dim is _LAST
        and axis is None
    )
    try:
        if plain:
            return ops.softmax(x, algorithm=code, batch_invariant=batch_invariant)
        check_flags(causal=causal)
        where = _chosen(dim, axis)
        return _with_options(ops, x, where, dtype, scale, mask, causal, masked, batch_invariant, code)
    except FAILURES as error:
        # Looked at here, so that other calls take no longer for it.
        if plain and getattr(x, "ndim", None) == 0 and hasattr(x, "reshape"):
            return softmax(x.reshape(1), algorithm=algorithm, batch_invariant=batch_invariant).reshape(())
        raise ops.explained(error, x=x, mask=mask) from None


def _with_options(
    ops: Backend,
    x: Any,
    where: tuple[Any, str],
    dtype: Any,
    scale: Any,
    mask: Any,
    causal: Any,
    masked: Any,
    batch_invariant: bool,
    algorithm: int = 0,
    *,
    log: bool = False,
) -> Any:
    """softmax or log_softmax with arguments that may be options. where: the dimension, and its name."""
    dim, name = where
    zero = masked is not _NAN and code_of("masked", masked, _MASKED)
    if scale is not None and type(scale) is not float:
        scale = number("scale", scale, "None or ")
    narrow, out_dtype = (x, None) if dtype is None else ops.cast(x, dtype)
    rows = _to_last(ops, narrow, dim, name)
    moved = rows is not narrow
    if not log:  # without options there is a kernel for each algorithm
        given = {
            "a scale": scale not in (None, 1),
            "a mask": mask is not None,
            "causal": causal,
            "a wider dtype": dtype is not None and ops.differs(narrow, out_dtype),
        }
        if not any(given.values()):
            y = ops.softmax(rows, algorithm=algorithm, batch_invariant=batch_invariant)
            y = _moved_back(ops, y, x, dim) if moved else y
            return y if dtype is None else ops.converted(y, dtype)  # autocast may widen it
        if algorithm:
            option = next(name for name, value in given.items() if value)
            raise NotImplementedError(
                f"algorithm is {ALGORITHMS[algorithm]!r} with {option}, expected 'auto', the only one there; "
                "leave it out"
            )
    if moved and causal:
        raise ValueError(
            f"causal is set with {name} {dim}, expected the last one, -1: it masks columns of rows"
        )
    if moved and mask is not None:
        if mask.ndim > x.ndim:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(x.shape)}, the "
                "shape of x"
            )
        mask = ops.rows(mask[(None,) * (x.ndim - mask.ndim)], [dim])
    y = ops.masked_softmax(
        rows,
        mask,
        out_dtype=out_dtype,
        scale=1.0 if scale is None else scale,
        log=log,
        causal=causal,
        masked_zero=bool(zero),
        batch_invariant=batch_invariant,
    )
    return _moved_back(ops, y, x, dim) if moved else y


def _moved_back(ops: Any, y: Any, x: Any, dim: Any) -> Any:
    """A result with its last dimension at dim. Arrays without dimensions were given one."""
    return ops.moved_back(y, dim) if y.ndim == x.ndim else y.reshape(x.shape)


def log_softmax(
    x: A,
    dim: int = -1,
    dtype: Any = None,
    *,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
    masked: Masked = "nan",
    batch_invariant: bool = False,
    axis: int | None = None,
) -> A:
    """The logarithm of softmax, differentiable.

    y = h - max h - log(sum exp(h - max h)) with h = x * scale + mask. Gradient: dx = scale * (dy - exp(y) *
    sum(dy)). The gradient of masked elements is 0, and sum(dy) leaves them out, where torch's operator would
    add theirs.

    Args:
        x: As in softmax.
        dim: As in softmax.
        dtype: As in softmax.
        scale: As in softmax.
        mask: As in softmax.
        causal: As in softmax.
        masked: As in softmax. y of a masked element is -inf, and so is that of a row that is masked whole
            with "zero".
        batch_invariant: As in softmax.
        axis: dim, by NumPy's name.

    Returns:
        y, as softmax returns it.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: As softmax.

    Examples:
        >>> gander.log_softmax(torch.zeros(1, 2))
        tensor([[-0.6931, -0.6931]])
    """
    if type(causal) is not bool or type(batch_invariant) is not bool:
        check_flags(causal=causal, batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(log_softmax, locals())
    try:
        where = _chosen(dim, axis)
        return _with_options(ops, x, where, dtype, scale, mask, causal, masked, batch_invariant, log=True)
    except FAILURES as error:
        raise ops.explained(error, x=x, mask=mask) from None


def softmax_fwd(x: A, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> A:
    """softmax(x) over the last dimension, without a gradient.

    Args:
        x: As in softmax.
        algorithm: As in softmax.
        batch_invariant: As in softmax.

    Returns:
        y, contiguous, with the shape and dtype of x.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As softmax.

    Examples:
        >>> gander.softmax_fwd(torch.zeros(1, 2, requires_grad=True))
        tensor([[0.5000, 0.5000]])
    """
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(softmax_fwd, locals())
    return softmax(ops.detached(x), algorithm=algorithm, batch_invariant=batch_invariant)


def softmax_bwd(dy: A, y: Array, *, algorithm: Algorithm = "auto", batch_invariant: bool = False) -> A:
    """The gradient of softmax: dx = (dy - sum(dy * y)) * y for each row.

    Args:
        dy: (..., N), the gradient of y.
        y: The result of the forward call, of the shape, dtype and device of dy.
        algorithm: One of gander.algorithms("softmax_bwd").
        batch_invariant: As in softmax.

    Returns:
        dx, with the shape and dtype of dy.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As softmax.

    Examples:
        >>> gander.softmax_bwd(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
        tensor([[ 0.2500, -0.2500]])
    """
    code = 0 if algorithm is AUTO else code_of("algorithm", algorithm, ALGORITHMS)
    if type(batch_invariant) is not bool:
        check_flags(batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(dy)) or backend_of(dy)
    if ops is None:
        return overridden(softmax_bwd, locals())
    try:
        return ops.softmax_bwd(dy, y, algorithm=code, batch_invariant=batch_invariant)
    except FAILURES as error:
        raise ops.explained(error, dy=dy, y=y) from None


def logsumexp(
    x: A,
    dim: int | tuple[int, ...] = -1,
    keepdim: bool = False,
    *,
    batch_invariant: bool = False,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
) -> A:
    """log(sum exp(x)) over one or more dimensions, differentiable. The maximum is subtracted first.

    Gradient: dx = dlse * exp(x - lse).

    Args:
        x: (..., N), N >= 1, of float16, bfloat16 or float32 (on the CPU also float64), any strides. A torch
            tensor on the CPU or a CUDA device, or an object with `__dlpack__`, for which the result is an
            array of the same library, without a gradient.
        dim: The dimension, or several. Others than the last are moved to the end, which copies.
        keepdim: Keep these dimensions, of size 1.
        batch_invariant: As in softmax, for the value of a row and its gradient.
        axis: dim, by NumPy's name.
        keepdims: keepdim, by NumPy's name.

    Returns:
        x.shape without dim, float32 also for 16-bit x (float64 for float64). A row that is all -inf gives
        -inf, a row with +inf gives +inf, and a row with a NaN gives NaN, as in torch.logsumexp.

    Raises:
        TypeError: A dtype, or an argument of another type.
        ValueError: A shape.
        IndexError: dim.
        NotImplementedError: A nested or sparse tensor.
        RuntimeError: The device, the driver, or memory.

    Examples:
        >>> gander.logsumexp(torch.zeros(1, 2))
        tensor([0.6931])
    """
    if type(batch_invariant) is not bool:
        check_flags(batch_invariant=batch_invariant)
    ops = BACKENDS.get(type(x)) or backend_of(x)
    if ops is None:
        return overridden(logsumexp, locals())
    try:
        if keepdim is False and dim is _LAST and axis is None and keepdims is False and getattr(x, "ndim", 1):
            return ops.logsumexp(x, batch_invariant=batch_invariant)
        check_flags(keepdim=keepdim, keepdims=keepdims)
        dim, name = _chosen(dim, axis)
        if isinstance(dim, (tuple, list)) and len(dim) > 1:
            rank = x.ndim
            whole = [d for d in dim if isinstance(d, Integral) and not isinstance(d, bool)]
            dims = sorted({int(d) % rank for d in whole if -rank <= d < rank})
            if len(dims) != len(dim):
                expected = f"different dimensions of x of rank {rank}, ints of {-rank} to {rank - 1}"
                raise (IndexError if len(whole) == len(dim) else TypeError)(
                    f"{name} is {shown(dim)}, expected {expected}"
                )
            rows = ops.rows(x, dims)
        else:
            one = dim[0] if isinstance(dim, (tuple, list)) and dim else dim
            rows, dims = _to_last(ops, x, one, name), [one % max(len(x.shape), 1)]
        if not x.shape:
            rows, dims = x.reshape(1), []
        if keepdim or keepdims:  # here, because a result that is a view of lse would differ
            rows = ops.unsqueezed(rows, dims)
        return ops.logsumexp(rows, batch_invariant=batch_invariant)
    except FAILURES as error:
        raise ops.explained(error, x=x) from None
