"""The types of operators_gen.py, which is generated from the table of operators (internal/operators)."""

from typing import NamedTuple


class Operand(NamedTuple):
    """A tensor that an operator reads or writes. M and N are the rows and columns of its first operand."""

    name: str
    # "rows": (M, N). "columns": (N). "head_columns": (N), or (H, N) for rows of shape (..., H, N). "per_row":
    # M elements, contiguous. "strided": M elements with any stride. "upstream": M elements or 1. "reduced": M
    # elements, or 1 with a reduction. "statistics": shape (M), (2, M) or (2 M + 1). "one": 1 element.
    # "broadcast": broadcasts to the first operand's shape.
    shape: str
    # "float": any float dtype. "wide": float32 or float64. "same": that of the operand `like`. "companion":
    # float64 if the first operand has it, else any other float dtype. "parameter": as companion. "statistic":
    # float64 if the first operand has it, else float32. "index": int32 or int64. "mask": bool, uint8, or as
    # companion.
    dtype: str
    # By default a companion output has the dtype of `like`, or of the first operand without that, and a
    # parameter the dtype of `like`, or that of statistics.
    like: str = ""
    needs: str = ""  # an optional operand that must be given if this one is
    choice: str = ""  # the argument by which callers choose the dtype of an output
    gradient: str = ""  # the operand whose gradient this is
    twin: str = ""  # the output with the same values. It can take this one's place if the dtypes agree.
    stored: str = ""  # the result of forward that is this input of backward, if forward returned it
    read: str = ""  # the flag that makes an output also an input
    output: bool = False
    optional: bool = False


class Option(NamedTuple):
    name: str
    type: str  # "real", "integer", "flag", "reduction" or "algorithm"
    default: float


class Operator(NamedTuple):
    """A function of the C ABI."""

    group: str  # the operators with the same options, for example "softmax"
    owned: str  # the variant that takes ownership of its inputs and returns new outputs
    operands: tuple[Operand, ...]


class Argument(NamedTuple):
    """An argument of an operator of PyTorch."""

    name: str
    # "tensor", "dtype", "option". "extra": an option that only its gradient uses. "demand": asks for a
    # result.
    kind: str
    type: str = ""
    optional: bool = False


class Saved(NamedTuple):
    """A tensor that autograd saves for backward: a result, or an argument if there is no such result."""

    result: str
    argument: str


class TorchOperator(NamedTuple):
    """An operator of PyTorch: an operator of the C ABI that computes one selection of its outputs."""

    operator: str
    schema: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    # The values of options that are not among its arguments.
    fixed: dict[str, float] = {}  # noqa: RUF012 - never written to
    # The arguments that it writes, with the outputs that are stored in them.
    writes: dict[str, str] = {}  # noqa: RUF012 - never written to
    # Its statistics have 2 M + 1 elements: maxima, logarithms of the sums, denominator.
    packed: bool = False
    # The results that it only computes if their argument needs_<result> is set. Else they have no elements.
    on_demand: tuple[str, ...] = ()
    # The operator that computes its gradients.
    backward: str = ""
    # What that reads.
    saved: tuple[Saved, ...] = ()
