"""The types of operators_gen.py, which is generated from the table of operators (internal/operators)."""

from typing import NamedTuple


class Letter(NamedTuple):
    """What a letter of a form stands for: the first operand's sizes from start to stop, counted from the end,
    or if times is not 0, times their product over `over`, and plus. With any it stands for one size that can
    be any."""

    start: int
    stop: int
    times: int
    over: int
    plus: int
    any: bool = False


class Form(NamedTuple):
    """A shape that an operand may have. It follows from the shape of the operator's first operand."""

    sizes: str  # letters
    # L or S may be other sizes with the same product. Without them, there may be any sizes of 1.
    count: bool
    when: str  # "": always; else a condition of internal/operators/rules.go
    text: str  # follows the sizes in a refusal; {x} is the first operand


class ShapeRule(NamedTuple):
    # "rows": the last dimension has stride 1, the others collapse into one. "contiguous". "regular": a fixed
    # stride between elements. "parts": contiguous, or in two contiguous parts. "broadcast": broadcasts to its
    # form. "heads": the last dimension has stride 1, those before the last three collapse into one. "tables":
    # likewise before the last two, where they are the first operand's or 1s.
    layout: str
    forms: tuple[Form, ...]
    packed: str = ""  # the sizes of the result of an operator that is packed
    rank: int = 1  # the least rank of a first operand


class DTypeRule(NamedTuple):
    """An operand's dtypes, if the first operand is not float64 (narrow) and if it is."""

    narrow: tuple[str, ...]
    wide: tuple[str, ...]
    statistic: bool = (
        False  # by default an output has the dtype of statistics, else that of the first operand
    )
    made: str = ""  # or always this one


class Operand(NamedTuple):
    """A tensor that an operator reads or writes."""

    name: str
    shape: str  # a rule in SHAPES
    dtype: str  # a rule in DTYPES. "same": the dtype of the operand `like`
    like: str = ""  # the operand whose dtype an output has by default, if it is given
    needs: str = ""  # an optional operand that must be given if this one is
    fits: str = ""  # the operand whose shape this one has; without that, it has the first form of its rule
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
    rank: int = 0  # of a flag: the least rank of the first operand with which it can be set


class Operator(NamedTuple):
    """A function of the C ABI."""

    owned: str  # the variant that takes ownership of its inputs and returns new outputs
    operands: tuple[Operand, ...]
    options: tuple[Option, ...]
    # The fields of its option struct: the allocator, optional operands, options, and of `owned` alone the
    # dtypes of outputs.
    fields: tuple[str, ...]


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
    # The values of options that are not among its arguments, also of those that only its gradient has.
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
