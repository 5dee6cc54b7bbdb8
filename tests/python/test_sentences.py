"""What an operator refuses is said once, in Go. Python passes the sentence on, and fake tensors say the same.

Every operand of every operator gets wrong shapes and dtypes, from the table, first in a call of the C ABI.
"""

import inspect

import gander
import pytest
import torch
import valid
from gander._native import library
from gander._table import REDUCTIONS, TORCH, tensors

# The functions that callers use, with the operator that each calls.
PUBLIC = {
    "softmax": "softmax",
    "softmax_bwd": "softmax_bwd",
    "rmsnorm": "rmsnorm",
    "rmsnorm_bwd": "rmsnorm_bwd",
    "swiglu": "glu",
    "silu_and_mul": "packed_glu",
    "l2norm": "l2norm",
    "layernorm": "layernorm",
    "layernorm_bwd": "layernorm_bwd",
    "cross_entropy": "cross_entropy",
    "cross_entropy_fwd": "cross_entropy_fwd",
    "cross_entropy_bwd": "cross_entropy_bwd",
    "token_statistics": "token_statistics",
    "logsumexp": "logsumexp",
}


def wrong_shapes(tensor):
    """Shapes of another rank and of other sizes. Some operands may have some of them."""
    shape = tuple(tensor.shape)
    yield ()
    yield (2, *shape)
    yield (1, *shape)
    yield shape[1:] if shape else (2,)
    for dim in range(len(shape)):
        yield (*shape[:dim], shape[dim] + 1, *shape[dim + 1 :])
    yield (0,)


def wrong_values(tensor):
    for shape in wrong_shapes(tensor):
        yield f"shape {shape}", tensor.new_ones(shape)
    for dtype in (torch.int16, torch.float64, torch.complex64, torch.bool):
        if dtype != tensor.dtype:
            yield str(dtype), tensor.to(dtype)


# Operands of which the operator refuses more than the table's rules. Fakes leave that to the library.
OWN = {("sharded_cross_entropy_combine", "parts")}
OWN |= {(name, "x") for name in ("packed_glu", "packed_glu_bwd", "packed_glu_bwd_")}
OWN |= {(name, at) for name in TORCH if "rotary" in name for at in ("offsets", "cu_seqlens")}

CASES = [(name, argument) for name in TORCH for argument in tensors(name)]
REQUIRED = [
    (name, argument.name)
    for name, operator in TORCH.items()
    for argument in operator.arguments
    if argument.kind == "tensor" and not argument.optional
]


def refusal(function, *given, **named):
    """The type and the words of a refusal, or None."""
    try:
        function(*given, **named)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return type(error), str(error)
    return None


def refusal_of_c(name, values):
    """The same of the C ABI."""
    status, sentence = valid.call_c(name, values)
    return (type(library.exception(status, sentence)), sentence) if status else None


@pytest.mark.parametrize("name", TORCH)
def test_valid_calls_are_valid(name):
    values = valid.call(name)
    assert valid.call_c(name, values) == (0, "")
    getattr(torch.ops.gander, name)(*valid.call(name).values())


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_bad_argument(name, argument):
    """Through torch.ops, which can only raise RuntimeError, and as a fake tensor."""
    operator, good, refused = getattr(torch.ops.gander, name), valid.call(name), 0
    for what, bad in wrong_values(good[argument]):
        values = good | {argument: bad}
        expected = refusal_of_c(name, values)
        assert refusal(operator, *values.values()) == (expected and (RuntimeError, expected[1])), what
        metas = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in values.values()]
        got = refusal(operator, *metas)
        assert got == expected or (got is None and (name, argument) in OWN), what
        refused += expected is not None
    assert refused >= 5


@pytest.mark.parametrize(("name", "argument"), REQUIRED)
def test_a_missing_argument(name, argument):
    values = valid.call(name) | {argument: None}
    status, sentence = valid.call_c(name, values)
    if not status:  # the operator of PyTorch is a case of the operator in which it is required
        sentence = f"{TORCH[name].operator}: {argument} is NULL, expected a tensor"
    assert sentence.endswith(f": {argument} is NULL, expected a tensor")
    if argument != next(iter(values)):  # torch chooses the kernel by it
        got = refusal(getattr(torch.ops.gander, name), *values.values())
        assert got == (RuntimeError, sentence.replace(" is NULL", " is None"))


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
@pytest.mark.parametrize("function", PUBLIC)
def test_through_public_functions(function, kind):
    """They raise the right type. With arrays they call the C functions that make the results."""
    name, parameters = PUBLIC[function], inspect.signature(getattr(gander, function)).parameters
    values = valid.call(name) | {"divisor": None, "upstream": None}
    if "reduction" in values:
        default = parameters["reduction"].default if "reduction" in parameters else "none"
        values["reduction"] = REDUCTIONS.index(default)
    given = {a: values[a] for a in tensors(name) if a in parameters and values[a] is not None}
    for argument, tensor in given.items():
        for what, bad in wrong_values(tensor):
            expected = refusal_of_c(name, values | {argument: bad})
            named = given | {argument: bad}
            if kind == "arrays":
                named = {a: value.numpy() for a, value in named.items()}
            got = refusal(getattr(gander, function), **named)
            if function in ("softmax", "logsumexp") and what == "shape ()":  # which torch takes
                assert got is None
                continue
            if kind == "arrays" and got and expected:  # their names are shorter
                got, expected = ((error, words.partition(": ")[2]) for error, words in (got, expected))
            assert got == expected, (argument, what)
