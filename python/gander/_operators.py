"""The types of _operators_gen.py, which is generated from the table of operators (internal/operators)."""

from typing import NamedTuple


class Operand(NamedTuple):
    """A tensor that an operator reads or writes. M and N are the rows and columns of the operator's first operand."""

    name: str
    shape: str  # "rows" (M, N), "columns" (N), "per_row" M, "strided" M, "upstream" M or 1, "reduced" M or 1 by the
    # reduction, "statistics" M or (2, M) or 2 M + 1, "one" 1
    dtype: str  # "float"; "same": that of `like`; "companion": any but float64, which goes with float64; "statistic":
    # float32, float64 with float64; "index": int32 or int64
    like: str = ""
    needs: str = ""  # an optional operand that must be there where this one is
    choice: str = ""  # the argument by which callers choose the dtype of an output
    gradient: str = ""  # the operand whose gradient this is
    read: str = ""  # the flag with which an output is read too
    output: bool = False
    optional: bool = False


class Option(NamedTuple):
    name: str
    type: str  # "real", "integer", "flag", "reduction" or "algorithm"
    default: float


class Operator(NamedTuple):
    """A function of the C ABI."""

    group: str  # whose options it has
    owned: str  # the function whose tensors change hands
    operands: tuple[Operand, ...]


class Argument(NamedTuple):
    """What an operator of PyTorch takes."""

    name: str
    kind: str  # "tensor", "dtype", "option", or "extra": an option that concerns its gradient only
    type: str = ""
    optional: bool = False


class TorchOperator(NamedTuple):
    """An operator of PyTorch: one set of results of an operator."""

    operator: str
    schema: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    fixed: dict[str, float] = {}  # noqa: RUF012 - never written to; options that it does not take
    writes: str = ""  # the argument that it writes
    into: str = ""  # the output that is written there
    packed: bool = (
        False  # its statistics are of 2 M + 1 elements: maxima, logarithms of the sums, denominator
    )
    saving: str = (
        ""  # the operator that runs in its place where a gradient is wanted, and returns what backward reads
    )
    backward: tuple[str, ...] = ()  # what makes its gradients: the last one that makes all that are wanted
