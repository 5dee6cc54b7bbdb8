"""Every argument of every public function, made wrong in many ways.

The arguments come from the signatures, and what an argument is comes from the table of operators. A refusal
names the argument as the caller wrote it and says what was expected, in at most 300 characters. Nothing is
written. LEGAL lists the values that are no mistake, each with the reason. With those the call returns.
"""

import contextlib
import inspect
import re
import warnings
from operator import attrgetter

import gander
import gander.nn.functional as F
import numpy as np
import pytest
import torch
from gander import nn
from gander._table import OPERATORS

with contextlib.suppress(ImportError):
    import ml_dtypes  # noqa: F401 - as another test may do: it gives NumPy dtypes that gander refuses

M, N, CLASSES = 4, 8, 6
REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError, RuntimeError)
# Words of Python, and of torch about operators that callers do not know.
FOREIGN = re.compile(
    "object has no attribute|cannot be interpreted|unsupported operand|missing|Internal error|INTERNAL ASSERT"
    "|'NoneType'|not iterable|truth value|int too large|DLPack code|Could not run 'gander|real number, not"
)
LONGEST = 350  # a list of all operators


# ---- The functions ----


def forward(kind, *given, **named):
    """forward() of a module, which is made in each call."""

    def call(**arguments):
        return kind(*given, **named)(**arguments)

    _, *parameters = inspect.signature(kind.forward).parameters.values()
    call.__signature__ = inspect.Signature(parameters)
    return call


PUBLIC = [name for name in gander.__all__ if callable(getattr(gander, name))]
FUNCTIONS = {name: getattr(gander, name) for name in PUBLIC}
FUNCTIONS |= {f"functional.{name}": getattr(F, name) for name in F.__all__}
FUNCTIONS |= {name: getattr(nn, name) for name in nn.__all__ if name != "functional"}
FUNCTIONS |= {
    "RMSNorm.forward": forward(nn.RMSNorm, N),
    "QuackRMSNorm.forward": forward(nn.QuackRMSNorm, N),
    "LayerNorm.forward": forward(nn.LayerNorm, N),
    "Softmax.forward": forward(nn.Softmax, -1),
    "LogSoftmax.forward": forward(nn.LogSoftmax, 0),
    "CrossEntropyLoss.forward": forward(nn.CrossEntropyLoss, reduction="sum"),
    "LinearCrossEntropy.forward": forward(nn.LinearCrossEntropy, N, CLASSES, reduction="sum"),
}
OF_A_HEAD = ("linear_cross_entropy", "linear_token_statistics")
ON_ARRAYS = [name for name in PUBLIC if name not in ("warmup", "set_debug", *OF_A_HEAD)]
TORCH_ONLY = ("lse_partial", "target_logit", "inplace_backward", "keepdim")

# Calls with options too: a refusal must not depend on which kernels a call takes.
OPTIONAL = {
    "softmax": ("mask", "dtype"),
    "log_softmax": ("mask", "dtype"),
    "rmsnorm": ("weight", "bias", "residual", "out"),
    "rmsnorm_fwd": ("weight", "bias", "residual", "out"),
    "layernorm": ("weight", "bias", "residual", "out"),
    "layernorm_fwd": ("weight", "bias", "out"),
    "rmsnorm_bwd": ("dresidual_out",),
    "cross_entropy": ("weight", "lse_partial"),
    "cross_entropy_fwd": ("weight", "target_logit"),
    "token_statistics": ("row_mask",),
    "linear_cross_entropy": ("bias", "weight_ce"),
    "linear_token_statistics": ("bias", "row_mask"),
}
# Arguments that another one goes with.
WITH = {"divisor": ("reduction",), "upstream": ("reduction",), "shape": ("dtype", "device")}
WITH |= dict.fromkeys(("in_features", "out_features", "normalized_shape", "dim"), ("device",))


def parameters(function):
    return inspect.signature(FUNCTIONS[function]).parameters


def arguments(function, argument, options):
    """Valid arguments of a call. options: also some that are optional."""
    linear, constructs = "inear" in function, isinstance(FUNCTIONS[function], type)
    names = [name for name, p in parameters(function).items() if p.default is inspect.Parameter.empty]
    names += ["x"] * (function in ("explain", "algorithms"))
    names += [name for name in WITH.get(argument, ()) if name in parameters(function)]
    names += OPTIONAL[function] if options else ()
    values = {
        **dict.fromkeys(("x", "input", "residual", "out", "dy", "dx", "dout", "dresidual_out")),
        "weight": torch.randn(CLASSES, N) if linear else torch.ones(N),
        "bias": torch.zeros(CLASSES if linear else N),
        "weight_ce": torch.ones(CLASSES),
        "target": torch.arange(M),
        "gate": torch.randn(M, N),
        "up": torch.randn(M, N),
        "logits": torch.randn(M, N),
        "hidden": torch.randn(M, N),
        "index": torch.arange(M),
        "row_mask": torch.ones(M, dtype=torch.bool),
        "rstd": torch.ones(M),
        "mean": torch.zeros(M),
        "lse": torch.zeros(M),
        "dloss": torch.ones(M),
        "loss": torch.zeros(M),
        "mask": torch.ones(M, N, dtype=torch.bool),
        "lse_partial": torch.zeros(M, 2),
        "target_logit": None if function == "cross_entropy_fwd_out" else torch.zeros(M),
        "y": torch.softmax(torch.randn(M, N), -1),
        "op": "softmax",
        "device": "meta" if constructs else "cpu",  # where large parameters take no memory
        "dtype": torch.float32,
        "shape": (M, N),
        "normalized_shape": (N,),
        "reduction": "sum",
        "dim": N,
        "in_features": N,
        "out_features": CLASSES,
        "enabled": False,
        "q": torch.randn(2, 3, M, N),
        "k": torch.randn(2, 1, M, N),
        "q_weight": torch.ones(N),
        "k_weight": torch.ones(N),
        "cos": torch.ones(M, N // 2),
        "sin": torch.ones(M, N // 2),
        "eps": 1e-6,
    }
    if function == "apply_rotary_emb":
        values["x"] = torch.randn(2, M, 3, N)
    given = {name: values[name] for name in names}
    return {
        name: torch.randn(M, N) if value is None and name in ROWS else value for name, value in given.items()
    }


ROWS = ("x", "input", "residual", "out", "dy", "dx", "dout", "dresidual_out")


# ---- What an argument is ----

KIND_OF_OPTION = {
    "real": "number",
    "flag": "flag",
    "integer": "integer",
    "algorithm": "name",
    "reduction": "name",
}
KINDS = {o.name: KIND_OF_OPTION[o.type] for operator in OPERATORS.values() for o in operator.options}
KINDS |= {operand.name: "tensor" for operator in OPERATORS.values() for operand in operator.operands}
KINDS |= dict.fromkeys(("input", "out", "lse_partial", "target_logit", "weight_ce", "hidden"), "tensor")
KINDS |= dict.fromkeys(("divisor", "upstream"), "number or tensor")
KINDS |= dict.fromkeys(("out_dtype", "residual_dtype", "dtype"), "dtype")
KINDS |= dict.fromkeys(("masked", "casting_mode", "approximate", "accumulate", "keep", "op"), "name")
KINDS |= dict.fromkeys(
    ("prenorm", "store_rstd", "return_rstd", "return_mean", "return_lse", "return_dx"), "flag"
)
KINDS |= dict.fromkeys(
    ("has_bias", "has_residual", "inplace_backward", "keepdim", "enabled", "remember"), "flag"
)
KINDS |= dict.fromkeys(("one_pass", "size_average", "reduce", "elementwise_affine"), "flag")
KINDS |= dict.fromkeys(("shape", "normalized_shape"), "shape")
KINDS |= dict.fromkeys(("chunk", "in_features", "out_features"), "size")
KINDS |= {"inplace": "flag", "seqlen_offsets": "integer or tensor", "max_seqlen": "unused"}
KINDS |= {"label_smoothing": "number", "_stacklevel": "integer", "device": "device"}
KINDS |= {"dim": "dim", "axis": "dim", "keepdims": "flag", "outputs": "name"}


def kind_of(function, argument):
    special = {"LayerNorm.bias": "flag", "LinearCrossEntropy.bias": "flag", "QuackRMSNorm.dim": "size"}
    return special.get(f"{function}.{argument}") or KINDS[argument]


# ---- Values ----


def quietly(make):
    """Without torch's warnings about features that are in beta or deprecated."""

    def call(*given):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(*given)

    return call


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, N), torch.randn(2, N)], layout=layout)


VALUES = {
    "None": lambda: None,
    "a string": lambda: "a",
    "an empty string": lambda: "",
    "bytes": lambda: b"a",
    "a list": lambda: [1.5],
    "an empty list": lambda: [],
    "a tuple": lambda: (N,),
    "a dict": lambda: {},
    "an object": object,
    "a type": lambda: int,
    "a function": lambda: len,
    "a float": lambda: 1.5,
    "an int": lambda: 3,
    "0": lambda: 0,
    "-9": lambda: -9,
    "2**31": lambda: 2**31,
    "2**64": lambda: 2**64,
    "10**400": lambda: 10**400,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "a complex": lambda: 1j,
    "True": lambda: True,
    "NumPy's True": lambda: np.True_,
    "a NumPy number": lambda: np.float32(1.5),
    "an array": lambda: np.ones(3, np.float32),
    "an array of rank 0": lambda: np.ones((), np.float32),
    "an array of strings": lambda: np.array(["a", "b"]),
    "a tensor": lambda: torch.ones(3),
    "a tensor of rank 0": lambda: torch.tensor(1.5),
    "a nested tensor": quietly(lambda: nested(torch.jagged)),
    "a nested tensor with strides": quietly(lambda: nested(torch.strided)),
    "a sparse tensor": lambda: torch.randn(M, N).to_sparse(),
    "a CSR tensor": quietly(lambda: torch.randn(M, N).to_sparse_csr()),
    "a quantized tensor": quietly(lambda: torch.quantize_per_tensor(torch.randn(M, N), 0.1, 0, torch.quint8)),
    "float8_e4m3fn": lambda: torch.randn(M, N).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.randn(M, N).to(torch.float8_e5m2),
    "int8": lambda: torch.ones(M, N, dtype=torch.int8),
    "complex": lambda: torch.ones(M, N, dtype=torch.complex64),
    "float64": lambda: torch.ones(M, N, dtype=torch.float64),
    "a meta tensor": lambda: torch.ones(M, N, device="meta"),
    "another shape": lambda: torch.ones(M + 1, N - 1),
    "another rank": lambda: torch.ones(2, 2, 2, 2, 2),
    "no elements": lambda: torch.ones(0),
    "torch.int8": lambda: torch.int8,
    "torch.float8_e4m3fn": lambda: torch.float8_e4m3fn,
    "NumPy's int8": lambda: np.int8,
    "a NumPy dtype": lambda: np.dtype("complex64"),
}
NUMBERS_BUT_0 = ("a float", "an int", "2**31", "2**64", "a NumPy number")
NUMBERS = ("0", *NUMBERS_BUT_0)
INTEGERS = ("an int", "0", "-9", "2**31")

# Values that are no mistake, by the kind of the argument.
LEGAL = {
    "tensor": (),
    "flag": ("True", "NumPy's True"),
    "number": NUMBERS,
    "number or tensor": (*NUMBERS, "-9", "NaN", "infinity", "a tensor of rank 0"),
    "integer": INTEGERS,
    "integer or tensor": INTEGERS,
    "size": ("an int", "2**31"),
    "name": (),
    "dtype": (),
    "device": (),
    "shape": ("a tuple",),
    "dim": ("0",),
}
OF_ROWS = "softmax.x softmax_fwd.x log_softmax.x logsumexp.x rmsnorm.x rmsnorm_fwd.x l2norm.x layernorm.x"
OF_HALVES = "silu_and_mul.x gelu_and_mul.x gelu_tanh_and_mul.x"
# Values that are no mistake in some arguments: why, the values, the arguments. "+" after an argument: only in
# calls with options, and else only in calls without. "torch:" or "numpy:" before it: only there.
LEGAL_HERE = [
    (
        "there is no default, and it is optional",
        ("None",),
        "layernorm_fwd.weight layernorm_fwd.weight+ layernorm_bwd.weight rmsnorm_bwd.weight "
        "rmsnorm_bwd.weight+ fused_add_rmsnorm.weight cross_entropy_fwd_out.target_logit "
        "cross_entropy_fwd_out.lse cross_entropy_fwd_out.dx cross_entropy_fwd_out.weight rotary.k "
        "qk_norm_rotary.q_weight qk_norm_rotary.k_weight",
    ),
    (
        "it is torch's machine epsilon",
        ("None",),
        "rmsnorm.eps rmsnorm.eps+ rmsnorm_fwd.eps rmsnorm_fwd.eps+ fused_add_rmsnorm.eps RMSNorm.eps "
        "QuackRMSNorm.eps functional.rms_norm.eps",
    ),
    (
        "numbers may be negative",
        ("-9",),
        "softmax.scale softmax.scale+ log_softmax.scale log_softmax.scale+ rmsnorm.weight_offset+ "
        "rmsnorm_fwd.weight_offset+ rmsnorm_bwd.weight_offset rmsnorm_bwd.weight_offset+ "
        "fused_add_rmsnorm.weight_offset qk_norm_rotary.weight_offset",
    ),
    (
        "an array of one element is a number beside arrays",
        ("an array of rank 0",),
        "numpy:cross_entropy.divisor numpy:cross_entropy.divisor+ numpy:cross_entropy.upstream "
        "numpy:cross_entropy.upstream+ numpy:cross_entropy_fwd.divisor numpy:cross_entropy_fwd.divisor+",
    ),
    (
        "torch.nn.Linear may have none",
        ("0",),
        "LinearCrossEntropy.in_features LinearCrossEntropy.out_features",
    ),
    ("forward knows the rank", INTEGERS, "Softmax.dim LogSoftmax.dim"),
    (
        "it is one dimension",
        ("an int", "2**31"),
        "explain.shape algorithms.shape RMSNorm.normalized_shape LayerNorm.normalized_shape",
    ),
    (
        "these are rows, and nothing else has to fit",
        ("an array", "a tensor", "float64", "another shape", "another rank"),
        f"{OF_ROWS} explain.x algorithms.x",
    ),
    ("an even number of columns is enough", ("float64", "another rank"), OF_HALVES),
    (
        "nothing else has this dtype",
        ("float64",),
        "torch:token_statistics.logits torch:token_statistics.logits+",
    ),
    ("the result has no memory either", ("a meta tensor",), f"{OF_ROWS} {OF_HALVES}"),
    (
        "torch has it too",
        ("a tensor of rank 0", "an array of rank 0", "a NumPy number"),
        "softmax.x softmax_fwd.x log_softmax.x logsumexp.x",
    ),
    (
        "modules and torch's functions take rows of any rank, and none",
        (
            "a tensor",
            "a tensor of rank 0",
            "float64",
            "a meta tensor",
            "another shape",
            "another rank",
            "no elements",
        ),
        "functional.softmax.input functional.log_softmax.input Softmax.forward.input "
        "LogSoftmax.forward.input",
    ),
    ("they are served as by gander.softmax", ("an array",), "Softmax.forward.input LogSoftmax.forward.input"),
    (
        "targets and a module's parameters go with it",
        ("float64",),
        "torch:cross_entropy.x torch:cross_entropy_fwd.x functional.cross_entropy.input RMSNorm.forward.x "
        "QuackRMSNorm.forward.x LayerNorm.forward.input CrossEntropyLoss.forward.input "
        "functional.rms_norm.input functional.layer_norm.input",
    ),
    (
        "it is cast to dtype first, as in torch",
        ("float8_e4m3fn", "float8_e5m2", "int8", "complex", "float64"),
        "torch:softmax.x+ torch:log_softmax.x+",
    ),
    (
        "it broadcasts",
        ("a tensor of rank 0",),
        "softmax.mask softmax.mask+ log_softmax.mask log_softmax.mask+",
    ),
    (
        "it broadcasts",
        ("an array of rank 0",),
        "numpy:softmax.mask numpy:softmax.mask+ numpy:log_softmax.mask numpy:log_softmax.mask+",
    ),
    ("it is for all rows", ("a tensor of rank 0",), "cross_entropy_bwd.dloss cross_entropy_bwd_out.dloss"),
    (
        "it is for all rows",
        ("an array of rank 0",),
        "numpy:cross_entropy_bwd.dloss numpy:cross_entropy_bwd_out.dloss",
    ),
    ("it has the classes that target may name", ("a tensor",), "torch:cross_entropy_fwd.weight+"),
    (
        "forward knows the number of classes",
        (
            "a tensor",
            "a tensor of rank 0",
            "float64",
            "a meta tensor",
            "another shape",
            "another rank",
            "no elements",
        ),
        "CrossEntropyLoss.weight LinearCrossEntropy.weight_ce",
    ),
    (
        "torch computes with it",
        ("a nested tensor", "a meta tensor"),
        "functional.rms_norm.input functional.layer_norm.input",
    ),
    ("torch computes with it", ("complex",), "functional.rms_norm.input"),
    (
        "torch takes them for class probabilities",
        ("a sparse tensor", "a CSR tensor", "float64"),
        "functional.cross_entropy.target",
    ),
    (
        "torch computes with it",
        ("-9", "NaN", "infinity", "True", "NumPy's True", "a tensor of rank 0"),
        "functional.rms_norm.eps functional.layer_norm.eps",
    ),
    (
        "torch computes with it",
        ("-9", "NaN", "True", "NumPy's True"),
        "functional.cross_entropy.label_smoothing",
    ),
]
# Values that are a mistake in some arguments, although LEGAL has them, or they are the default.
REFUSED_HERE = [
    ("the tables have no such positions", ("an int", "-9", "2**31"), "apply_rotary_emb.seqlen_offsets"),
    ("the call then needs shape, dtype and device", ("None",), "explain.x"),
    ("without a weight", NUMBERS_BUT_0, "rmsnorm.weight_offset rmsnorm_fwd.weight_offset"),
    (
        "not 0 to 1",
        NUMBERS_BUT_0,
        "CrossEntropyLoss.label_smoothing cross_entropy.label_smoothing cross_entropy.label_smoothing+ "
        "cross_entropy_fwd.label_smoothing cross_entropy_fwd.label_smoothing+ "
        "cross_entropy_bwd.label_smoothing linear_cross_entropy.label_smoothing "
        "linear_cross_entropy.label_smoothing+ LinearCrossEntropy.label_smoothing",
    ),
    (
        "a factor of logits is from 1e-18 to 1e18",
        ("0", "2**64"),
        " ".join(
            f"{function}.{option} {function}.{option}+"
            for function in (
                *("cross_entropy", "cross_entropy_fwd", "cross_entropy_bwd", "linear_cross_entropy"),
                *("CrossEntropyLoss", "LinearCrossEntropy", "token_statistics", "linear_token_statistics"),
            )
            for option in ("scale", "softcap", "temperature")
        ),
    ),
    (
        "not with lse_partial or target_logit",
        NUMBERS_BUT_0,
        "torch:cross_entropy.z_loss+ torch:cross_entropy.scale+ torch:cross_entropy.softcap+ "
        "torch:cross_entropy.temperature+ torch:cross_entropy_fwd.z_loss+ torch:cross_entropy_fwd.scale+ "
        "torch:cross_entropy_fwd.softcap+ torch:cross_entropy_fwd.temperature+",
    ),
    (
        "not of a mean with class weights",
        NUMBERS_BUT_0,
        "numpy:cross_entropy.z_loss+ torch:linear_cross_entropy.z_loss+",
    ),
    ("torch refuses it", NUMBERS_BUT_0, "functional.cross_entropy.label_smoothing"),
    ("it needs all classes", ("True", "NumPy's True"), "torch:cross_entropy_fwd.return_dx+"),
    (
        "arrays have no such option",
        ("True", "NumPy's True"),
        "numpy:cross_entropy.inplace_backward numpy:cross_entropy.inplace_backward+ "
        "numpy:token_statistics.inplace_backward numpy:token_statistics.inplace_backward+ "
        "numpy:cross_entropy_bwd.inplace_backward numpy:swiglu.inplace_backward numpy:geglu.inplace_backward "
        "numpy:silu_and_mul.inplace_backward numpy:gelu_and_mul.inplace_backward "
        "numpy:gelu_tanh_and_mul.inplace_backward",
    ),
]


def listed(table, library, function, argument, options):
    """The values that a table has for an argument, with the reasons."""
    key = f"{function}.{argument}{'+' if options else ''}"
    keys = {key, f"{library}:{key}"}
    return {
        value: reason
        for reason, values, names in table
        if not keys.isdisjoint(names.split())
        for value in values
    }


def legal(library, function, argument, options):
    values = dict.fromkeys(LEGAL[kind_of(function, argument)], "legal in arguments of this kind")
    if parameters(function)[argument].default is None:
        values["None"] = "the default"
    values |= listed(LEGAL_HERE, library, function, argument, options)
    refused = listed(REFUSED_HERE, library, function, argument, options)
    return {value: reason for value, reason in values.items() if value not in refused}


# ---- The tests ----


def snapshot(given):
    """The elements of arrays and plain tensors."""
    dense = {
        name: value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        for name, value in given.items()
        if (isinstance(value, np.ndarray) and value.dtype.kind in "fib")
        or (type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu")
    }
    return {
        name: value.clone() for name, value in dense.items() if not value.is_nested and not value.is_quantized
    }


def is_written(before, given):
    after = snapshot(given)
    return any(not before[name].equal(after[name]) for name in before)


def named(name):
    """A member of gander by its name, or None."""
    try:
        return attrgetter(name)(gander)
    except AttributeError:
        return None


def complaint(error, names):
    """What is wrong with a refusal of one of these arguments."""
    text, wrong = str(error), []
    if not isinstance(error, REFUSALS):
        wrong.append(f"is a {type(error).__name__}")
    if not re.search(rf"(?<!\w)({'|'.join(names)})(?!\w)", text):
        wrong.append("does not name the argument")
    if not re.search(r"\bexpected\b", text):
        wrong.append("does not say what was expected")
    if len(text) > LONGEST:
        wrong.append(f"has {len(text)} characters")
    if found := FOREIGN.search(text):
        wrong.append(f"has the words {found[0]!r}")
    for name in re.findall(r"(?<![\w.])gander\.([\w.]*\w)", text):
        if not callable(named(name)):
            wrong.append(f"advises to call gander.{name}, which is no function")
    return f"{', '.join(wrong)}: {text[:LONGEST]}" if wrong else ""


def may_name(function, argument, value, given):
    """The arguments that a refusal may name: if x is another one than the rest goes with, also the rest."""
    others = ("float64", "an array", "an array of rank 0", "of another library")
    if value not in others or argument not in ("x", "dy", "gate", "q"):
        return [argument]
    return [argument, *(name for name in given if kind_of(function, name) == "tensor")]


def as_arrays(given):
    """Valid arguments of a call on NumPy arrays."""
    return {
        name: value.numpy() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
        if name not in ("lse_partial", "target_logit") or value is None
    }


CASES = [
    (library, function, argument, options)
    for library, functions in (("torch", FUNCTIONS), ("numpy", ON_ARRAYS))
    for function in functions
    for argument in parameters(function)
    if kind_of(function, argument) != "unused"
    for options in ((False, True) if function in OPTIONAL else (False,))
]


@pytest.mark.parametrize(("library", "function", "argument", "options"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments(library, function, argument, options):
    fine, refused, problems = legal(library, function, argument, options), 0, []
    for value, make in VALUES.items():
        given = arguments(function, argument, options)
        if library == "numpy":
            given = as_arrays(given)
        given[argument] = make()
        before = snapshot(given)
        try:
            FUNCTIONS[function](**given)
        except Exception as error:
            refused += 1
            if value in fine:
                problems.append(f"{value} is refused, but {fine[value]}: {str(error)[:LONGEST]}")
            elif text := complaint(error, may_name(function, argument, value, given)):
                problems.append(f"{value}: the refusal {text}")
            elif is_written(before, given):
                problems.append(f"{value} is refused, but something was written")
        else:
            if value not in fine:
                problems.append(f"{value} is not refused")
        finally:
            gander.set_debug(False)
    assert not problems, "\n".join(problems)
    assert refused >= 8


VARIANTS = {
    "int8": lambda x: x.to(torch.int8),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "quantized": quietly(lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)),
    "meta": lambda x: x.to("meta"),
    "of another library": lambda x: x.numpy(),
    "of one dimension more": lambda x: x[None],
    "expanded": lambda x: x[:1].expand_as(x),
    "of a leaf": lambda x: x.clone().requires_grad_(),
}
ALWAYS_REFUSED = ("int8", "float8", "complex", "sparse", "quantized")
CAST = ("functional.softmax.input", "functional.log_softmax.input", "softmax.x", "log_softmax.x")
OPERANDS = [
    (function, argument)
    for function in FUNCTIONS
    for argument in parameters(function)
    if kind_of(function, argument) == "tensor" and not isinstance(FUNCTIONS[function], type)
    if not function.startswith(("functional", "explain", "algorithms"))
]


@pytest.mark.parametrize(("function", "argument"), OPERANDS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_tensors_of_the_right_shape(function, argument):
    problems = []
    for variant, make in VARIANTS.items():
        for options in (False, True) if function in OPTIONAL else (False,):
            given = arguments(function, argument, options)
            right = (
                arguments(function, argument, True)[argument] if function in OPTIONAL else given.get(argument)
            )
            if right is None:
                continue
            if variant == "of a leaf" and not right.is_floating_point():
                continue
            given[argument] = make(right)
            before = snapshot(given)
            try:
                FUNCTIONS[function](**given)
            except Exception as error:
                if text := complaint(error, may_name(function, argument, variant, given)):
                    problems.append(f"{variant}: the refusal {text}")
                elif is_written(before, given):
                    problems.append(f"{variant} is refused, but something was written")
            else:
                if variant in ALWAYS_REFUSED and not (options and f"{function}.{argument}" in CAST):
                    problems.append(f"{variant} is not refused")
    assert not problems, "\n".join(problems)


# ---- Under transforms and compilers ----

X, WEIGHT, TARGET = torch.randn(M, N), torch.ones(N), torch.arange(M)
TRACED = {
    "rmsnorm.weight": lambda x: gander.rmsnorm(x, torch.ones(5)),
    "layernorm.weight": lambda x: gander.layernorm(x, [1.0]),
    "rmsnorm.eps": lambda x: gander.rmsnorm(x, WEIGHT, eps="a"),
    "layernorm.eps": lambda x: gander.layernorm(x, WEIGHT, eps=-1.0),
    "rmsnorm.out_dtype": lambda x: gander.rmsnorm(x, WEIGHT, out_dtype=torch.float64),
    "layernorm.out_dtype": lambda x: gander.layernorm(x, WEIGHT, out_dtype=torch.int8),
    "rmsnorm.residual_dtype": lambda x: gander.rmsnorm(x, residual_dtype=torch.float64, prenorm=True),
    "rmsnorm.prenorm": lambda x: gander.rmsnorm(x, WEIGHT, prenorm="a"),
    "rmsnorm.casting_mode": lambda x: gander.rmsnorm(x, WEIGHT, casting_mode="a"),
    "layernorm.residual": lambda x: gander.layernorm(x, WEIGHT, residual=torch.ones(3)),
    "softmax.dim": lambda x: gander.softmax(x, dim=7),
    "softmax.scale": lambda x: gander.softmax(x, scale="a"),
    "softmax.mask": lambda x: gander.softmax(x, mask=torch.ones(3)),
    "softmax.algorithm": lambda x: gander.softmax(x, algorithm="a"),
    "softmax.batch_invariant": lambda x: gander.softmax(x, batch_invariant="a"),
    "logsumexp.keepdim": lambda x: gander.logsumexp(x, keepdim="a"),
    "cross_entropy.target": lambda x: gander.cross_entropy(x, torch.ones(M)),
    "cross_entropy.reduction": lambda x: gander.cross_entropy(x, TARGET, reduction="a"),
    "cross_entropy.ignore_index": lambda x: gander.cross_entropy(x, TARGET, ignore_index="a"),
    "cross_entropy.divisor": lambda x: gander.cross_entropy(x, TARGET, reduction="sum", divisor="a"),
    "linear_cross_entropy.weight": lambda x: gander.linear_cross_entropy(x, torch.ones(5, 3), TARGET),
    "linear_cross_entropy.chunk": lambda x: gander.linear_cross_entropy(x, torch.ones(5, N), TARGET, chunk=0),
    "linear_token_statistics.index": lambda x: gander.linear_token_statistics(
        x, torch.ones(5, N), TARGET[:3]
    ),
    "linear_token_statistics.keep": lambda x: gander.linear_token_statistics(
        x, torch.ones(5, N), TARGET, keep="a"
    ),
    "CrossEntropyLoss.forward.target": lambda x: nn.CrossEntropyLoss()(x, TARGET[:3]),
}
# Dynamo cannot trace what makes "input" of the functions' "x".
EAGER = {"LayerNorm.forward.input": lambda x: nn.LayerNorm(N, elementwise_affine=False)(x.int())}


@pytest.mark.parametrize("case", [*TRACED, *EAGER])
def test_words_under_vmap(case):
    with pytest.raises(REFUSALS) as caught:
        torch.vmap((TRACED | EAGER)[case])(torch.randn(3, M, N))
    assert not complaint(caught.value, [case.rpartition(".")[2]])


@pytest.mark.parametrize("case", TRACED)
def test_words_in_compiled_functions(case):
    """Dynamo's own sentences surround them."""
    argument = case.rpartition(".")[2]
    with pytest.raises(Exception, match=rf"\b{argument} (is|has) .*, expected") as caught:
        torch.compile(TRACED[case], fullgraph=True, backend="eager")(X)
    assert "Internal" not in type(caught.value).__name__
