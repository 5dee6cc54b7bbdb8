"""What gander._functions asks of the backend that serves arrays: the operators (operators_gen.py), and what
they need to know of arrays."""

from numbers import Real
from typing import Any

from .. import _backend, _debug
from .._native import library
from .._words import kind, number, renamed, shortened, shown
from .calls import only_torch
from .capsules import indices, module_of, not_an_array
from .cross_entropy_outputs import cross_entropy_outputs  # noqa: F401 - asked for by gander._functions
from .operators_gen import *  # noqa: F403


def with_lse_partial(*_: Any) -> None:
    raise only_torch("lse_partial")


def with_target_logit(*_: Any) -> None:
    raise only_torch("target_logit")


def explained(error: Exception, names: dict[str, str] | None = None, **arguments: Any) -> Exception:
    """The exception to raise for an error: one that names an argument that is no array.

    The first argument decides on the backend, so it may be None.
    """
    for index, (name, value) in enumerate(arguments.items()):
        if not hasattr(value, "__dlpack__") and (value is not None or not index):
            return not_an_array(name, value)
        if _backend.is_tensor(value) and (refusal := _backend.torch.unusable(name, value)):
            return refusal
    return renamed(error, names)


def scalar(name: str, value: Any, x: Any) -> Any:
    """An array of one element, of the dtype that x's statistics have, from a number or an array."""
    module = module_of(x)
    if hasattr(value, "__dlpack__") and module is None:
        return value
    if isinstance(value, bool) or not (isinstance(value, Real) or hasattr(value, "__dlpack__")):
        raise TypeError(f"{name} is {shown(value)}, expected a number or an array of one element")
    if module is None:
        message = (
            f"{name} is {shown(value)}, expected an array of one element where x is not NumPy's or CuPy's"
        )
        raise explained(TypeError(message), x=x)
    if isinstance(value, Real):
        value = number(name, value)
    try:
        return module.asarray(value, "float64" if str(x.dtype) == "float64" else "float32")
    except (RuntimeError, TypeError, ValueError) as error:
        message = f"{name} is {kind(value)}, expected a number or an array of one element: {shortened(error)}"
        raise explained(TypeError(message), **{"x": x, name: value}) from None


def detached(x: Any) -> Any:
    return x


def dtype(value: Any, argument: str) -> Any:
    return None if value is None else library.dtype_name(value, argument)


def converted(x: Any, to: Any) -> Any:
    return x  # cast() leaves only results that already have this dtype


def differs(x: Any, other: Any) -> bool:
    """Whether a dtype is another one than x's."""
    return library.name_of(other) != library.name_of(x.dtype)


def is_floating(x: Any) -> bool:
    """Whether an argument is an array of floating numbers."""
    return library.serves(getattr(x, "dtype", None))


def is_ours(x: Any, other: Any) -> bool:
    """Whether another argument is of x's library."""
    return hasattr(other, "shape") and module_of(other) is module_of(x)


def ones_like(x: Any) -> Any:
    """None for an array of a library that gander does not know."""
    module = module_of(x)
    return None if module is None else module.ones_like(x)


def empty(x: Any, shape: tuple, dtype: Any) -> Any:
    """A new array of x's library. A dtype that gander does not serve is that of residual, the only one of a
    caller's that is not checked before."""
    try:
        if library.serves(dtype):
            return module_of(x).empty(shape, dtype if hasattr(dtype, "kind") else library.name_of(dtype))
    except TypeError:
        pass  # NumPy has no bfloat16 before some module has given it one
    raise TypeError(
        f"residual_dtype is {library.name_of(dtype)}, which by default is that of residual, expected a "
        "dtype of the library of x; pass another residual_dtype"
    )


def may_share_memory(x: Any, out: Any) -> bool:
    """Whether writing out may change x."""
    module = module_of(x)
    return module is None or bool(module.may_share_memory(x, out))


def _permuted(x: Any, order: list[int]) -> Any:
    if _backend.is_tensor(x):  # beside arrays
        return x.permute(order)
    if hasattr(x, "transpose"):  # NumPy, CuPy and JAX
        return x.transpose(order)
    if not hasattr(x, "__array_namespace__"):
        raise NotImplementedError(
            f"dimensions of {kind(x)} would have to be moved, expected an array with transpose or "
            "__array_namespace__; move them yourself, so that dim is the last one, -1"
        )
    return x.__array_namespace__().permute_dims(x, tuple(order))


def rows(x: Any, dims: list[int]) -> Any:
    """x with these dimensions at its end, as one."""
    if not x.shape:
        return x.reshape(1)
    last = [dim % x.ndim for dim in dims]
    kept = [dim for dim in range(x.ndim) if dim not in last]
    moved = _permuted(x, [*kept, *last])
    return moved if len(last) == 1 else moved.reshape((*moved.shape[: len(kept)], -1))


def moved_back(y: Any, dim: int) -> Any:
    """A result, whose last dimension goes back to dim."""
    order = [*range(y.ndim - 1)]
    order.insert(dim % y.ndim, y.ndim - 1)
    moved, module = _permuted(y, order), module_of(y)
    return moved if module is None else module.ascontiguousarray(moved)


def turned(x: Any) -> Any:
    """x with the third last and the second last dimension exchanged."""
    *order, tokens, heads, columns = range(x.ndim)
    return _permuted(x, [*order, heads, tokens, columns])


def unsqueezed(x: Any, dims: list[int]) -> Any:
    """x with new dimensions of size 1, in ascending order."""
    shape = list(x.shape)
    for dim in dims:
        shape.insert(dim, 1)
    return x.reshape(shape)


def cast(x: Any, to: Any) -> tuple[Any, Any]:
    """x, and the dtype of the result, to which the kernels can convert."""
    name, given = library.dtype_name(to, "dtype"), library.name_of(x.dtype)
    if name != given and not (name == "float32" and given in ("float16", "bfloat16")):
        or_wider = " or float32" if given in ("float16", "bfloat16") else ""
        raise NotImplementedError(
            f"dtype is {name} for x of {given}, expected {given}{or_wider}; cast x first"
        )
    return x, to


def check_targets(classes: int, target: Any, ignore_index: int, name: str = "target") -> None:
    """Raises IndexError if an element of target is neither a class nor ignore_index."""
    _debug.check_targets(classes, indices(target), ignore_index, name)
