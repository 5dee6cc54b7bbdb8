"""What gander._functions asks of the backend that serves arrays: a function for each operator, with the
arguments of that of torch.ops.gander, and without a gradient."""

from numbers import Real
from operator import index, ne
from typing import Any

from .. import _debug
from .._native import library
from .._native.library import DType
from .._table import OPERATORS, OPTIONS, TORCH
from .capsules import module_of, not_an_array, run, run_into

differ = ne


def _number(option, value):
    """An option's value for its field. Refuses integers of more than 64 bits, which ctypes would truncate."""
    try:
        if isinstance(value, str):  # float() would parse it
            raise TypeError
        if option.type == "real":
            return float(value)
        number = int(bool(value)) if option.type == "flag" else index(value)
    except TypeError:
        expected = "a number" if option.type == "real" else "an integer"
        raise TypeError(f"{option.name} is {value!r}, expected {expected}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{option.name} is {number}, expected 64 bits at most")
    return number


def _function(torch_operator):
    """A function with the arguments and results of one of gander's PyTorch operators."""
    operator = OPERATORS[torch_operator.operator]
    options = OPTIONS[operator.group]

    def call(*arguments):
        given = {}
        for argument, value in zip(torch_operator.arguments, arguments, strict=True):
            if argument.kind != "extra":  # only the gradient, which arrays do not have, uses those
                given[argument.name] = value
            elif value and argument.name == "inplace_backward":
                _refuse_in_place()
        inputs = [given.get(operand.name) for operand in operator.operands if not operand.output]
        choices = [operand.choice for operand in operator.operands if operand.choice]
        dtypes = [
            DType() if given.get(name) is None else library.dtype_of(given[name], name) for name in choices
        ]
        given |= torch_operator.fixed
        values = {
            option.name: _number(option, given[option.name]) for option in options if option.name in given
        }
        struct = library.options(operator.group, **values)
        if torch_operator.writes:
            written = {output: given.get(argument) for argument, output in torch_operator.writes.items()}
            return run_into(torch_operator.operator, given, written, struct)
        results = run(operator, inputs, dtypes, struct, torch_operator.results)
        return results if len(results) > 1 else results[0]

    return call


def only_torch(argument: str) -> NotImplementedError:
    return NotImplementedError(
        f"{argument} is supported for torch tensors only; leave it out, or pass torch.from_dlpack(x) as x"
    )


def _refuse_in_place(*_: Any) -> None:
    raise only_torch("inplace_backward")


def with_lse_partial(*_: Any) -> None:
    raise only_torch("lse_partial")


def with_target_logit(*_: Any) -> None:
    raise only_torch("target_logit")


def explained(error: Exception, **arguments: Any) -> Exception:
    """The exception to raise for an error: one that names an argument that is no array."""
    for name, value in arguments.items():
        if value is not None and not hasattr(value, "__dlpack__"):
            return not_an_array(name, value)
    return error


def scalar(name: str, value: Any, x: Any) -> Any:
    """An array of one element, of the dtype that x's statistics have, from a number or an array."""
    module = module_of(x)
    if hasattr(value, "__dlpack__") and module is None:
        return value
    if isinstance(value, bool) or not (isinstance(value, Real) or hasattr(value, "__dlpack__")):
        raise TypeError(f"{name} is {value!r}, expected a number or an array of one element")
    if module is None:
        message = f"{name} is {value!r}, expected an array of one element where x is not NumPy's or CuPy's"
        raise explained(TypeError(message), x=x)
    return module.asarray(value, "float64" if str(x.dtype) == "float64" else "float32")


def detached(x: Any) -> Any:
    return x


def dtype(value: Any, argument: str) -> Any:
    return value


def converted(x: Any, to: Any) -> Any:
    return x  # cast() leaves only results that already have this dtype


def differs(x: Any, other: Any, argument: str) -> bool:
    """Whether a dtype is another one than x's."""
    return library.dtype_name(other, argument) != library.dtype_name(x.dtype, "x")


def is_ours(x: Any, other: Any) -> bool:
    """Whether another argument is of x's library."""
    return hasattr(other, "shape") and module_of(other) is module_of(x)


def check_residual(x: Any, residual: Any) -> None:
    """Refuses what is no residual of x."""
    if residual.shape != x.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} as x; expand it"
        )


def ones_like(x: Any) -> Any:
    """None for an array of a library that gander does not know."""
    module = module_of(x)
    return None if module is None else module.ones_like(x)


def empty(x: Any, shape: tuple, dtype: Any) -> Any:
    """A new array of x's library."""
    return module_of(x).empty(shape, dtype)


def may_share_memory(x: Any, out: Any) -> bool:
    """Whether writing out may change x."""
    module = module_of(x)
    return module is None or bool(module.may_share_memory(x, out))


def rows(x: Any, dim: int, function: str) -> Any:
    """Refuses a dimension other than the last."""
    raise NotImplementedError(
        f"{function}: dim is {dim}, expected the last one, -1, for arrays other than torch tensors; move "
        "it to the end"
    )


def cast(x: Any, to: Any) -> tuple[Any, Any]:
    """x, and the dtype of the result, to which the kernels can convert."""
    name, given = library.dtype_name(to, "dtype"), library.dtype_name(x.dtype, "x")
    if name != given and not (name == "float32" and given in ("float16", "bfloat16")):
        or_wider = " or float32" if given in ("float16", "bfloat16") else ""
        raise NotImplementedError(
            f"dtype is {name} for x of {given}, expected {given}{or_wider}; cast x first"
        )
    return x, to


def check_targets(classes: int, target: Any, ignore_index: int) -> None:
    """Raises IndexError if an element of target is neither a class nor ignore_index."""
    _debug.check_targets(classes, target, ignore_index)


def is_compiled() -> bool:
    return False


for _name, _torch_operator in TORCH.items():
    _over_logits = _torch_operator.writes == {"x": "dx"}
    if not _torch_operator.packed:  # those are only for autograd
        globals()[_name] = _refuse_in_place if _over_logits else _function(_torch_operator)
