"""Operators on an emulated device, through the planner and the driver, against the CPU.

test_policy runs what the planner chooses for rows of all lengths. test_kernel forces each kernel that reduces
rows, at lengths around what it holds. The others test options. conftest.py counts the kernels that ran.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from emulated import DEVICE, FLOATS, HOST, ROW, SIZES, Layout, call, check

RANDOM = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)
OTHER = {"float16": "float32", "bfloat16": "float16", "float32": "bfloat16"}
# The element types and shapes of operands, where they are not those of x.
DTYPES = dict.fromkeys(("mean", "rstd", "rnorm", "loss", "lse", "dloss", "dlse", "denominator"), "float32")
DTYPES |= {"target": "int64", "mask": "bool", "index": "int32", "row_mask": "int64"}
DTYPES |= {"is_top1": "bool", "predicted": "int64"}
STATISTICS = ("log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "state", "dlog_prob", "dentropy")
DTYPES |= dict.fromkeys(STATISTICS, "float32")
PER_ROW, PER_COLUMN = ("mean", "rstd", "rnorm", "loss", "dloss", "dlse"), ("weight", "bias", "dw", "db")
PER_ROW += ("index", "row_mask", "is_top1", "predicted", *STATISTICS[:4], *STATISTICS[5:])
OPERANDS = {"probabilities": "target"}  # names of inputs that are not those of the operands


class Rows:
    """Makes operands of m rows of n elements."""

    def __init__(self, m, n, dtype):
        self.m, self.n, self.dtype, self._used = m, n, dtype, 0

    def values(self, *shape):
        count = int(np.prod(shape))
        self._used = (self._used + 12345) % (len(RANDOM) - count)
        return RANDOM[self._used : self._used + count].reshape(shape)

    def _shape(self, name):
        if name in PER_ROW:
            return (self.m,)
        if name in PER_COLUMN:
            return (self.n,)
        return {"lse": (2, self.m), "state": (self.m, 3), "denominator": (1,)}.get(name, (self.m, self.n))

    def _input(self, name):
        if name in ("target", "index"):  # some are ignored or out of range
            classes = np.arange(self.m) * 7919 % self.n
            classes[3::7], classes[5::11] = -100, self.n + 3
            return classes
        if name == "row_mask":
            return np.arange(self.m) % 4
        if name == "state":
            return np.stack([np.full(self.m, k) for k in (4.0, np.log(self.n), 0.5)], 1)
        if name == "lse":
            return np.stack([np.full(self.m, 4.0), np.full(self.m, np.log(self.n))])
        values = self.values(*self._shape(name))
        if name in PER_ROW:
            return 0.5 + 0.1 * np.abs(values)
        if name in PER_COLUMN:
            return 1 + 0.5 * values
        small = {"y": np.abs(values) / self.n**0.5, "probabilities": np.abs(values) / self.n}
        return {**small, "mask": values > -1}.get(name, 2 * values)

    def inputs(self, names, **dtypes):
        dtypes = DTYPES | dtypes
        return {
            OPERANDS.get(name, name): (dtypes.get(name, self.dtype), self._input(name))
            for name in names.split()
        }

    def outputs(self, names, **dtypes):
        dtypes = DTYPES | dtypes
        return {name: (dtypes.get(name, self.dtype), self._shape(name)) for name in names.split()}


SMOOTHED = {"label_smoothing": 0.2}
# What calls the kernels of an op: {op: operator, inputs, outputs, options}.
CALLS = {
    "softmax_forward": ("softmax_forward", "x", "y", {}),
    "softmax_backward": ("softmax_backward", "dy y", "dx", {}),
    "masked_softmax_forward": ("masked_softmax_forward", "x mask", "y", {"scale": 0.5}),
    "masked_softmax_backward": ("masked_softmax_backward", "dy y mask", "dx", {"scale": 0.5}),
    "rmsnorm_forward": ("rmsnorm_forward", "x weight", "y rstd", {}),
    "rmsnorm_backward_dx": ("rmsnorm_backward", "x weight dout rstd", "dx", {}),
    "rmsnorm_backward": ("rmsnorm_backward", "x weight dout rstd", "dx dw", {}),
    "rmsnorm_residual_forward": ("rmsnorm_forward", "x weight residual", "y residual_out rstd", {}),
    "rmsnorm_residual_backward": ("rmsnorm_backward", "x weight dout dresidual_out rstd", "dx dw", {}),
    "norm_forward": ("rmsnorm_forward", "x weight bias residual", "y residual_out rstd", {}),
    "norm_backward": ("rmsnorm_backward", "x weight dout rstd", "dx dw db", {"weight_offset": 1.0}),
    "layernorm_forward": ("layernorm_forward", "x weight bias", "y mean rstd", {}),
    "layernorm_backward": ("layernorm_backward", "x weight dout mean rstd", "dx dw db", {}),
    "cross_entropy_forward": ("cross_entropy_forward", "x target weight", "loss lse", {}),
    "cross_entropy_forward_dx": ("cross_entropy_forward", "x target weight", "loss dx", {}),
    "cross_entropy_backward": ("cross_entropy_backward", "x target dloss lse", "dx", {}),
    "general_cross_entropy_forward": ("cross_entropy_forward", "x target weight", "loss lse", SMOOTHED),
    "general_cross_entropy_forward_dx": ("cross_entropy_forward", "x target weight", "loss dx", SMOOTHED),
    "general_cross_entropy_backward": ("cross_entropy_backward", "x target weight dloss lse", "dx", SMOOTHED),
    "token_statistics_forward": (
        "token_statistics_forward",
        "logits index row_mask",
        "log_prob entropy state",
        {},
    ),
    "all_token_statistics_forward": (
        "token_statistics_forward",
        "logits index row_mask",
        "log_prob entropy log_sum_sq_probs mean_logit is_top1 predicted",
        {"temperature": 0.7},
    ),
    "token_statistics_backward": (
        "token_statistics_backward",
        "logits index row_mask state dlog_prob dentropy",
        "dlogits",
        {"softcap": 3.0},
    ),
    "soft_cross_entropy_forward": (
        "soft_cross_entropy_forward",
        "x probabilities weight",
        "loss state",
        SMOOTHED,
    ),
    "soft_cross_entropy_backward": (
        "soft_cross_entropy_backward",
        "x probabilities dloss state",
        "dx",
        {"softcap": 3.0},
    ),
    "glu_forward": ("glu_forward", "gate up", "y", {}),
    "glu_backward": ("glu_backward", "gate up dy", "dgate dup", {}),
}
# Where matrices lie, by the end of a kernel's symbol. Aligned kernels need rows of whole vectors. If matrices
# have different gaps, their rows have different offsets.
LAYOUTS = {
    "": Layout(),
    "_same_offset": Layout(before=1),
    "_unaligned": Layout(gaps=(0, 1, 2), after=(0, 1, 3)),
}


def length(vectors, dtype, suffix):
    """The elements of a row that touches at most so many vectors: an odd number, if rows are not aligned."""
    per_vector = 16 // SIZES[dtype]
    return vectors * per_vector if suffix == "" else (vectors - 1) * per_vector + 1


def run(op, m, n, dtype, suffix, **more):
    operator, inputs, outputs, options = CALLS[op]
    rows = Rows(m, n, dtype)
    return check(
        operator, rows.inputs(inputs), rows.outputs(outputs), layout=LAYOUTS[suffix], **options | more
    )


@pytest.fixture(autouse=True)
def planner(monkeypatch, tmp_path):
    """Sets the row by which the library plans. Before that, it plans by its policy."""
    monkeypatch.chdir(tmp_path)
    ROW.write_text("")
    return ROW.write_text


# At, below and above what kernels hold, and between powers of two. Each type has a third of them.
VECTORS = (
    1,
    8,
    7,
    30,
    64,
    33,
    129,
    190,
    70,
    300,
    257,
    513,
    700,
    1030,
    1024,
    2600,
    2049,
    1500,
    4097,
    8200,
    5000,
)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", CALLS)
def test_policy(op, dtype, suffix):
    for vectors in VECTORS[FLOATS.index(dtype) :: 3]:
        for m in (3, 20 if vectors > 100 else 150):
            run(op, m, length(vectors, dtype, suffix), dtype, suffix)


# ---- Each kernel ----

SOURCES = Path(__file__).resolve().parents[2] / "kernels" / "cuda"
KERNEL = re.compile(r"^KERNEL\((\w+), .*\)(  // dropped where there are clusters)?$", re.MULTILINE)
WITH_CLUSTERS = re.compile(r"\w+(_ring_|_grid_|_clear|_cluster)\w*")  # see Variant.In in kernels/arch.go
KERNELS = sorted(
    name
    for path in SOURCES.glob("*_gen.cu")
    for name, dropped in KERNEL.findall(path.read_text())
    if (not dropped if DEVICE.has_clusters() else not WITH_CLUSTERS.fullmatch(name))
)
REGIMES = {
    "rows": "registers",
    "staged": "shared-memory",
    "loop": "persistent-loop",
    "lanes": "persistent-lanes",
    "ring": "persistent-ring",
    "grid_cooperative": "grid-cooperative",
    "grid_shared_memory": "grid-shared-memory",
    "partial": "two-passes",
}
SYMBOL = re.compile(
    rf"(?P<op>\w+?)_(?P<shape>{'|'.join(REGIMES)})_(?P<dtype>float16|bfloat16|float32)_"
    r"(?P<tile>(?P<threads>\d+)x(?P<vectors>\d+)(x\d+)?)"
    r"(?P<suffix>_same_offset|_unaligned|)(?P<cluster>_cluster|)"
)


def cases(kernel):
    """(rows of the matrix, vectors of a row, CTAs of a cluster) at which a kernel is run."""
    threads, shape = int(kernel["threads"]), kernel["shape"]
    held = threads * int(kernel["vectors"])
    if shape == "grid_cooperative":  # the first goes through all slots twice
        return (150, 131, 1), (5, 8 * held, 1), (20, 5 * held - 1, 1)
    if shape == "grid_shared_memory":  # all of a row in shared memory, or a part of it
        return (2, 9 * held + 8, 1), (3, 60 * held - 100, 1)
    if shape == "partial":
        return (2, 2100, 1), (9, 5000, 1)
    persistent = shape in ("loop", "lanes", "ring")
    few, many = (5, 40) if persistent else (2, 3)
    if threads < 64:
        many = 300 if persistent else 150
    if shape == "loop":  # it takes no fewer rows than the device's lanes process at a time
        few = many
    if kernel["cluster"]:
        return (few, 2 * held - 33, 2), (few, 2 * held + 5, 3), (many, 3 * held, 3)
    shortest = 2 if shape in ("lanes", "ring") else 1  # dw of the shortest rows has another kernel
    lengths = (shortest, held // 2 + 1, held * 2 // 3 + 1, held - 1, held)[0 if held > 8 else 3 :]
    return tuple((few if i % 2 else many, v, 1) for i, v in enumerate(lengths))


@pytest.mark.parametrize("name", [k for k in KERNELS if SYMBOL.fullmatch(k)])
def test_kernel(name, planner):
    kernel = SYMBOL.fullmatch(name)
    op, dtype, suffix, shape = kernel["op"], kernel["dtype"], kernel["suffix"], kernel["shape"]
    regime, layout, options = REGIMES[shape], suffix, {}
    if op == "rmsnorm_backward" and shape in ("rows", "partial"):
        op = "rmsnorm_backward_dx"
    if op.endswith(("cross_entropy_forward", "token_statistics_forward")):
        regime = "stream" if shape == "partial" else regime
        options["batch_invariant"] = (
            suffix == "_unaligned"
        )  # else its only matrix has the same offset as itself
    if op == "norm_backward" and shape == "partial":
        regime = "by-columns"
    if shape == "lanes" and suffix:
        layout = "_same_offset"
    per_sm, stages = {"loop": 1, "grid_shared_memory": 2}.get(shape, 0), 3 if shape == "ring" else 0
    before = DEVICE.launches(name)
    for m, vectors, ctas in cases(kernel):
        in_cluster = "cluster-" if ctas > 1 and shape != "ring" else ""
        planner(
            f"auto - - - {in_cluster}{regime} {kernel['tile']} ctas={ctas} stages={stages} per-sm={per_sm}"
        )
        run(op, m, length(vectors, dtype, suffix), dtype, layout, **options)
    assert DEVICE.launches(name) > before, f"{name} did not run"


# ---- Options ----


@pytest.fixture(params=FLOATS)
def dtype(request):
    return request.param


@pytest.fixture(params=(33, 256, 2600))  # lanes, a CTA, a cluster
def vectors(request):
    return request.param


@pytest.fixture(params=LAYOUTS)
def rows(request, dtype, vectors):
    return Rows(5, length(vectors, dtype, request.param), dtype)


@pytest.mark.parametrize(
    "tile, vectors", [("64x2", 100), ("512x2", 300), ("256x4", 700), ("512x4", 1500), ("512x8", 2300)]
)
def test_softmax_of_unlike_warps(dtype, tile, vectors, planner):
    """Warps whose maxima are far apart, infinite or NaN, in kernels that keep exponentials and in others."""
    planner(f"auto - - - registers {tile}")
    n = length(vectors, dtype, "")
    x = 2 * Rows(9, n, dtype).values(9, n)
    x[0, : n // 2] -= 88
    x[1, n // 3 :] -= 104
    x[2, : n // 2] = -60000
    x[3, n // 2 :] = -np.inf
    x[4, 1:] = -np.inf
    x[5] = -np.inf
    x[6, n // 3] = np.inf
    x[7, -1] = np.nan
    x[8, :-1] = -np.inf
    check("softmax_forward", {"x": (dtype, x)}, {"y": (dtype, x.shape)})


@pytest.mark.parametrize("log, causal, masked_zero", [(0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 1)])
def test_masked_softmax(rows, log, causal, masked_zero):
    options, other = dict(log=log, causal=causal, scale=0.5), OTHER[rows.dtype]
    boolean = rows.values(rows.m, rows.n) > 0.5
    boolean[1] = False  # a row that is masked whole
    additive = np.where(rows.values(1, rows.n) > 1, -np.inf, rows.values(1, rows.n))
    masks = (
        ("bool", boolean),
        (rows.dtype, additive),
        (other, rows.values(rows.m, 1)),
        ("float32", additive[0]),
    )
    for mask in (None, *masks):
        given, y = ({"mask": mask}, other) if mask else ({}, rows.dtype)
        out = rows.outputs("y", y=y)
        check("masked_softmax_forward", rows.inputs("x") | given, out, masked_zero=masked_zero, **options)
        given |= rows.inputs("dy y", y=y)
        if log:
            given["y"] = y, -2 - given["y"][1]
        check("masked_softmax_backward", given, rows.outputs("dx"), **options)


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize("operator", ["softmax_forward", "masked_softmax_forward"])
def test_subnormal_softmax(rows, operator):
    """16-bit elements have the hardware's exponential, which has no subnormal results, in both operators."""
    x = np.full((rows.m, rows.n), -np.inf, np.float32)
    x[:, :12] = -np.array([0, 80, 86, 87, 88, 89, 90, 95, 100, 102, 103, 105])
    exact = np.exp(x.astype(np.float64))
    inputs = {"x": ("float32", x)}
    if operator == "masked_softmax_forward":
        inputs["mask"] = "bool", np.ones(rows.n, bool)
    for device in (HOST, DEVICE):
        y = call(device, operator, inputs, rows.outputs("y"))["y"]
        assert (abs(y - exact / exact.sum(-1, keepdims=True)) <= 1e-6 * exact + 2 * 2.0**-149).all()


@pytest.mark.parametrize("weight_offset, round_normalized", [(0, 0), (1, 0), (0, 1), (-0.5, 1)])
def test_rmsnorm(rows, weight_offset, round_normalized):
    options, other = dict(weight_offset=weight_offset, round_normalized=round_normalized), OTHER[rows.dtype]
    # If a number is rounded to its other neighbor and then multiplied, that is more than a unit.
    options["units"] = 3 if round_normalized else 1
    parameters = "weight" if round_normalized else "weight bias"
    inputs = rows.inputs(f"x residual {parameters}", residual="float32", weight=other)
    check("rmsnorm_forward", inputs, rows.outputs("y rstd residual_out", residual_out=other), **options)
    check("rmsnorm_forward", rows.inputs("x weight"), rows.outputs("y"), **options)
    inputs = rows.inputs("x weight dout rstd", weight=other, dout="float32")
    check("rmsnorm_backward", inputs, rows.outputs("dx dw db", dw=other, db="float32"), **options)
    inputs = rows.inputs("x weight dout dresidual_out rstd", dresidual_out=other)
    check("rmsnorm_backward", inputs, rows.outputs("dx dresidual dw", dresidual=other), **options)


@pytest.mark.parametrize("gelu, tanh", [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("round_activation", [0, 1])
def test_glu(rows, gelu, tanh, round_activation):
    # If a number is rounded to its other neighbor and then multiplied, that is more than a unit.
    options = dict(gelu=gelu, tanh=tanh, round_activation=round_activation, units=1 + round_activation)
    check("glu_forward", rows.inputs("gate up"), rows.outputs("y"), **options)
    check("glu_backward", rows.inputs("gate up dy"), rows.outputs("dgate dup"), **options)


# Sequences, tokens, heads of q and of k, columns, how many are rotated, and options: what the tables have.
ROTARY = [
    (2, 5, 4, 2, 64, 64, dict()),
    (1, 9, 5, 1, 64, 64, dict(per_element=1)),
    (3, 4, 7, 3, 128, 64, dict(interleaved=1)),
    (2, 3, 2, 0, 96, 32, dict(interleaved=1, per_element=1)),
    (1, 2, 9, 9, 40, 6, dict(offset=4)),
    (2, 3, 2, 1, 7, 2, dict(interleaved=1, per_element=1, offset=2)),
]


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("table", ["same", "float32", "float16"])
@pytest.mark.parametrize("round_products", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rotary(dtype, round_products, table, suffix):
    rows, table = Rows(1, 1, dtype), dtype if table == "same" else table
    for sequences, tokens, heads, of_k, columns, rotated, options in ROTARY:
        width, positions = rotated if options.get("per_element") else rotated // 2, tokens + 5
        more = dict(
            units=1 + round_products, layout=LAYOUTS[suffix], round_products=round_products, **options
        )
        for packed in (False, True):
            outer = (sequences * tokens,) if packed else (sequences, tokens)
            lead = (sequences,) if sequences % 2 and not packed else ()
            inputs = {name: (table, rows.values(*lead, positions, width)) for name in ("cos", "sin")}
            if packed:  # the first token is in no sequence, and a sequence's positions are beyond the tables
                ends = np.array([1, 2, 2, sequences * tokens])
                inputs |= {"cu_seqlens": ("int32", ends), "offsets": ("int64", np.array([positions, 0, 1]))}
            elif lead:
                inputs["offsets"] = "int32", np.arange(sequences) % 2
            for backward in (False, True):
                q, k, to_q, to_k = (
                    ["dq_out", "dk_out", "dq", "dk"] if backward else ["q", "k", "q_out", "k_out"]
                )
                shapes = {to_q: (*outer, heads, columns)}
                given = {q: (dtype, rows.values(*shapes[to_q]))}
                if of_k:
                    shapes[to_k] = *outer, of_k, columns
                    given[k] = dtype, rows.values(*shapes[to_k])
                outputs = {name: (dtype, shape) for name, shape in shapes.items()}
                name = "rotary_backward" if backward else "rotary_forward"
                got = check(name, given | inputs, outputs, **more)
                over = dict(zip(shapes, given, strict=True))
                again = check(name, given | inputs, outputs, over=over, **more)
                for output in outputs:
                    assert np.array_equal(got[output], again[output], equal_nan=True)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("weight", [None, "same", "float32", "float16"])
@pytest.mark.parametrize("rounds", [(0, 0), (1, 1), (0, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rotary(dtype, rounds, weight, suffix):
    # Where a number is rounded to its other neighbor, a weight's gradient of more digits would show it.
    rows, other = Rows(1, 1, dtype), dtype if weight in ("same", None) or any(rounds) else weight
    more = dict(layout=LAYOUTS[suffix], round_normalized=rounds[0], round_products=rounds[1], eps=0.01)
    # If a number is rounded to its other neighbor and then multiplied, that is more than a unit.
    more |= dict(units=3 if any(rounds) else 1, weight_offset=0.0 if weight is None else 0.5)
    shapes = *ROTARY, (1, 3, 2, 1, 512, 512, dict()), (1, 2, 1, 1, 257, 130, dict(per_element=1))
    for sequences, tokens, heads, of_k, columns, rotated, options in shapes:
        width, positions = rotated if options.get("per_element") else rotated // 2, tokens + 5
        tables = {name: (other, rows.values(positions, width)) for name in ("cos", "sin")}
        of = {"q": heads, "k": of_k} if of_k else {"q": heads}
        inputs = {name: (dtype, rows.values(sequences, tokens, n, columns)) for name, n in of.items()}
        if weight is not None:
            inputs |= {f"{name}_weight": (other, 1 + rows.values(columns) / 2) for name in of}
        outputs = {f"{name}_out": (dtype, (sequences, tokens, n, columns)) for name, n in of.items()}
        over = {f"{name}_out": name for name in of}
        got = check("qk_norm_rotary_forward", inputs | tables, outputs, **options, **more)
        again = check("qk_norm_rotary_forward", inputs | tables, outputs, over=over, **options, **more)
        # Where an output lies in another way, another kernel may add up a head in another order.
        assert suffix or all(np.array_equal(got[name], again[name]) for name in outputs)

        upstream = {
            f"d{name}_out": (dtype, rows.values(sequences, tokens, n, columns)) for name, n in of.items()
        }
        made = {f"d{name}": (dtype, (sequences, tokens, n, columns)) for name, n in of.items()}
        if weight is not None:
            made |= {f"d{name}_weight": (other, (columns,)) for name in of}
        more |= dict(units=4 if any(rounds) else 2)
        check("qk_norm_rotary_backward", inputs | tables | upstream, made, **options, **more)


def test_rmsnorm_without_weight(rows):
    check("rmsnorm_forward", rows.inputs("x"), rows.outputs("y rstd"))
    check("rmsnorm_backward", rows.inputs("x dout rstd"), rows.outputs("dx"))


def test_layernorm(rows):
    other = OTHER[rows.dtype]
    check("layernorm_forward", rows.inputs("x"), rows.outputs("y"))
    inputs = rows.inputs("x residual weight bias", residual=other, weight="float32")
    check("layernorm_forward", inputs, rows.outputs("y residual_out mean rstd", residual_out=other))
    # The sum is rounded to the type of residual_out, and without it to that which x + residual has in torch.
    for residual, stored in ((rows.dtype, rows.dtype), (other, "float32")):
        inputs = rows.inputs("x residual weight bias", residual=residual)
        outputs = rows.outputs("y residual_out mean rstd", residual_out=stored)
        y = check("layernorm_forward", inputs, outputs)["y"]
        assert np.array_equal(check("layernorm_forward", inputs, rows.outputs("y"))["y"], y)
    check("layernorm_backward", rows.inputs("x dout mean rstd", dout=other), rows.outputs("dx"))
    inputs = rows.inputs("x weight dout dresidual_out mean rstd")
    check("layernorm_backward", inputs, rows.outputs("dx dw db"))


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.parametrize("third", ["", " dresidual_out"])
def test_layernorm_of_close_elements(rows, third):
    """Backward has forward's digits where rounding the saved mean is 3 % of the elements' deviations."""
    m, n = rows.m, rows.n
    x = (1 + np.arange(m)[:, None] / 3 + 1e-6 * rows.values(m, n)).astype(np.float32)
    given = rows.inputs(f"weight dout{third}") | {"x": ("float32", x)}
    forward = {k: given[k] for k in ("x", "weight")}
    outputs = rows.outputs("y mean rstd")
    got = {device: call(device, "layernorm_forward", forward, outputs, eps=0) for device in (HOST, DEVICE)}
    mean = x.astype(np.float64).mean(-1, keepdims=True)
    mean += (x - mean).mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True))
    xhat, (weight, dout) = (x - mean) * rstd, (given[k][1].astype(np.float64) for k in ("weight", "dout"))
    g = dout * weight
    gx = (g * xhat).mean(-1, keepdims=True)
    exact = {"y": xhat * weight, "db": dout.sum(0), "dw": (dout * xhat).sum(0)}
    exact["dx"] = (g - g.mean(-1, keepdims=True) - xhat * gx) * rstd
    if third:
        exact["dx"] += given["dresidual_out"][1]
    size = {"y": abs(exact["y"]), "db": abs(dout).sum(0), "dw": abs(dout * xhat).sum(0)}
    size["dx"] = (abs(g) + abs(g).mean() + abs(xhat * gx)) * rstd
    for device, saved in got.items():
        back = given | {k: ("float32", saved[k]) for k in ("mean", "rstd")}
        saved |= call(device, "layernorm_backward", back, rows.outputs("dx dw db"))
        for name, values in exact.items():
            assert (abs(saved[name] - values) <= 2.0**-21 * (size[name] + size[name].mean())).all(), name


@pytest.mark.parametrize("operator", ["rmsnorm", "layernorm"])
def test_heads(dtype, operator):
    heads, n = 3, 256 // SIZES[dtype]
    rows, matrix, parameter = Rows(7 * heads, n, dtype), (dtype, (7, heads, n)), (dtype, (heads, n))
    x, dout, weight, bias = (
        (dtype, rows.values(*shape)) for _, shape in (matrix, matrix, parameter, parameter)
    )
    check(f"{operator}_forward", {"x": x, "weight": weight, "bias": bias}, {"y": matrix})
    inputs = rows.inputs("mean rstd" if operator == "layernorm" else "rstd")
    inputs |= {"x": x, "weight": weight, "dout": dout}
    check(f"{operator}_backward", inputs, {"dx": matrix, "dw": parameter, "db": parameter})


@pytest.mark.parametrize("m, n", [(1, 1001), (1, 9000), (9, 8), (40, 1001), (17000, 8)])
@pytest.mark.parametrize("reduction", [0, 1, 2])  # none, mean, sum
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.2}, {"label_smoothing": 1}, {"softcap": 3}])
def test_cross_entropy_reductions(dtype, m, n, reduction, more):
    options = {"reduction": reduction, **more}
    rows = Rows(m, n, dtype)
    inputs = rows.inputs("x target weight", weight="float32")
    target = inputs["target"][1]
    target[target >= rows.n] = 0  # such a row would make the sum NaN
    loss = {"loss": ("float32", (m if reduction == 0 else 1,))}
    saved = check("cross_entropy_forward", inputs, loss | rows.outputs("lse denominator"), **options)
    for one_pass in (0, 1) if reduction else (0,):
        outputs = loss | rows.outputs("denominator dx")
        check("cross_entropy_forward", inputs, outputs, one_pass=one_pass, **options)
    inputs |= {"lse": ("float32", saved["lse"]), "dloss": ("float32", rows.values(*loss["loss"][1]))}
    if reduction == 1:
        inputs["denominator"] = "float32", saved["denominator"]
    check("cross_entropy_backward", inputs, rows.outputs("dx"), **options)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [5, 33, 256, 2600])  # parts of warps, CTAs, clusters, two passes
def test_label_smoothing(dtype, vectors, suffix):
    """Ignored rows, targets out of range or of weight 0, logits of -inf, with and without class weights."""
    rows = Rows(9, length(vectors, dtype, suffix), dtype)
    x = rows.values(rows.m, rows.n).copy()
    target = np.arange(rows.m) * 31 % rows.n
    target[3], target[4] = -100, rows.n
    weight = np.abs(rows.values(rows.n)) + 0.5
    weight[[target[1], -1]] = 0
    x[5:7, -1] = -np.inf  # of weight 0
    x[7, rows.n // 2] = -np.inf
    x[8] = 40
    x[8, target[8]] = 90  # nearly certain
    inputs = {"x": (dtype, x), "target": ("int64", target)}
    for more in {}, {"weight": (dtype, weight)}, {"weight": ("float32", weight)}:
        for e in 0.1, 1.0:
            options = {"label_smoothing": e, "layout": LAYOUTS[suffix]}
            made = check("cross_entropy_forward", inputs | more, rows.outputs("loss lse"), **options)
            check("cross_entropy_forward", inputs | more, rows.outputs("loss dx"), **options)
            saved = {"lse": ("float32", made["lse"])} | rows.inputs("dloss")
            check("cross_entropy_backward", inputs | more | saved, rows.outputs("dx"), **options)
            loss = made["loss"]
            assert loss[3] == 0 and np.isnan(loss[4]) and loss[7] == np.inf and loss[1] > 0
            assert np.isfinite(loss[[0, 1, 2, 8]]).all()
            assert (np.isfinite(loss[5:7]) if more else np.isinf(loss[5:7])).all()


EACH_OPTION = (
    {"z_loss": 0.01, "scale": 0.5, "temperature": 0.7},
    {"softcap": 5.0},
    {"label_smoothing": 0.1, "z_loss": 0.01, "scale": 2.0, "softcap": 30.0, "temperature": 1.5},
)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [2, 33, 256, 2600])
@pytest.mark.parametrize("more", EACH_OPTION)
def test_loss_options(dtype, vectors, suffix, more):
    """Ignored rows, targets out of range, all kinds of infinities, several classes with the maximum."""
    rows = Rows(10, length(vectors, dtype, suffix), dtype)
    x, last = rows.values(rows.m, rows.n).copy(), rows.n - 1
    target = 1 + np.arange(rows.m) * 31 % last
    target[1], target[3], target[4] = 0, -100, rows.n
    x[5, :last] = -np.inf
    x[6, target[6]] = np.inf
    x[7] = -np.inf
    x[8] = 40
    x[8, target[8]] = 90  # nearly certain
    x[9, [0, last // 2, last]] = 8
    weight = np.abs(rows.values(rows.n)) + 0.5
    weight[0] = 0
    inputs, options = {"x": (dtype, x), "target": ("int64", target)}, {"layout": LAYOUTS[suffix], **more}
    for extra in {}, {"weight": ("float32", weight)}:
        made = check("cross_entropy_forward", inputs | extra, rows.outputs("loss lse"), **options)
        check("cross_entropy_forward", inputs | extra, rows.outputs("loss dx"), **options)
        saved = {"lse": ("float32", made["lse"])} | rows.inputs("dloss")
        check("cross_entropy_backward", inputs | extra | saved, rows.outputs("dx"), **options)
        loss = made["loss"]
        assert loss[3] == 0 and np.isnan(loss[4]) and np.isfinite(loss[[0, 2, 8, 9]]).all()
        assert (loss[1] == 0) == (bool(extra) and not ("z_loss" in more or "label_smoothing" in more))
        capped = "softcap" in more
        assert np.isfinite(loss[[6, 7]]).all() if capped else np.isnan(loss[[6, 7]]).all()


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [2, 33, 256, 2600])
@pytest.mark.parametrize("more", [{}, {"scale": 0.5, "temperature": 0.7}, {"softcap": 3.0}])
def test_token_statistics(dtype, vectors, suffix, more, planner):
    """Rows that are left out, indices out of range, infinities, several tokens with the maximum."""
    check_token_statistics(dtype, vectors, suffix, more, check)
    if vectors > 2048 and not suffix:
        for plan in (IN_CLUSTERS, SPLIT) if DEVICE.has_clusters() else (SPLIT,):

            def planned(*call, plan=plan, **options):
                planner(f"auto - - - {plan}" if call[0] == "token_statistics_forward" else "")
                return check(*call, **options)

            check_token_statistics(dtype, vectors, suffix, more, planned)


IN_CLUSTERS, SPLIT = "cluster-registers 256x8 ctas=3", "stream 256x4 per-sm=8"


def check_token_statistics(dtype, vectors, suffix, more, check):
    rows = Rows(11, length(vectors, dtype, suffix), dtype)
    x, last = rows.values(rows.m, rows.n).copy(), rows.n - 1
    index, row_mask = 1 + np.arange(rows.m) * 31 % last, np.ones(rows.m)
    row_mask[1], index[3], index[4] = 0, -100, rows.n
    x[[1, 3]] = np.nan
    x[5, :last] = -np.inf
    x[6, index[6]] = np.inf
    x[7] = -np.inf
    x[8] = 40
    x[8, index[8]] = 90  # nearly certain
    x[9, [0, last // 2, last]] = 8
    x[10, last // 3] = np.nan
    inputs = {"logits": (dtype, x), "index": ("int32", index), "row_mask": ("bool", row_mask)}
    options, all_of = {"layout": LAYOUTS[suffix], **more}, CALLS["all_token_statistics_forward"][2]
    made = check("token_statistics_forward", inputs, rows.outputs("log_prob entropy state"), **options)
    check("token_statistics_forward", inputs, rows.outputs(all_of), **options)
    log_prob, entropy = made["log_prob"], made["entropy"]
    assert (log_prob[[1, 3]] == 0).all() and np.isnan(log_prob[[4, 10]]).all() and np.isnan(entropy[10])
    assert np.isfinite(log_prob[[0, 2, 8, 9]]).all() and not (log_prob > 0).any() and not (entropy < 0).any()
    assert np.isfinite(log_prob[[6, 7]]).all() if "softcap" in more else np.isnan(log_prob[[6, 7]]).all()
    saved = {"state": ("float32", made["state"])}
    for upstream in "dlog_prob", "dentropy", "dlog_prob dentropy":
        given = inputs | saved | rows.inputs(upstream)
        dlogits = check("token_statistics_backward", given, rows.outputs("dlogits"), **options)["dlogits"]
        assert (dlogits[[1, 3]] == 0).all() and np.isnan(dlogits[4]).all() == ("dlog_prob" in upstream)
        # In row 4 the index is in another slice, or in none.
        sliced = check("token_statistics_backward", given, rows.outputs("dlogits"), slice=1, **options)
        assert np.isfinite(sliced["dlogits"][4]).all()
        given["index"] = "int32", np.where(np.arange(rows.m) == 4, -2, index)
        sliced = check("token_statistics_backward", given, rows.outputs("dlogits"), slice=1, **options)
        assert np.isnan(sliced["dlogits"][4]).all() == ("dlog_prob" in upstream)
    # The same logits as a slice.
    inputs["index"] = "int64", np.where(index == -100, index, index + 2**40)
    options |= {"first": 2**40, "classes": 2**41}
    found = check("token_statistics_forward", inputs, rows.outputs(f"{all_of} state"), **options)
    assert np.isnan(found["state"][[1, 3]]).all() and (found["predicted"][[1, 3, 10]] == -1).all()
    assert found["predicted"][9] >= 2**40
    np.testing.assert_array_equal(found["log_prob"][[0, 2, 8]], log_prob[[0, 2, 8]])
    if "softcap" not in more:
        assert (found["state"][7, :2] == -np.inf).all()
        assert found["is_top1"][8] and found["predicted"][9] == 2**40


@pytest.mark.parametrize("scale", [1, 0.8, 1.2])
@pytest.mark.parametrize(
    "plan, vectors",
    [
        ("registers 8x4", 20),
        ("registers 32x4", 100),
        ("registers 128x8", 700),
        (IN_CLUSTERS, 5000),
        (SPLIT, 5000),
        ("stream 256x4 per-sm=1", 5000),
    ],
)
def test_token_statistics_of_masked_vocabularies(dtype, plan, vectors, scale, planner):
    """Most logits, or all, have one finite number far below the others."""
    if plan == IN_CLUSTERS and not DEVICE.has_clusters():
        pytest.skip("the device has no clusters")
    planner(f"auto - - - {plan}")
    n = length(vectors, dtype, "")
    masks = (-6e4, -2e3) if dtype == "float16" else (-3.3895e38, -1e30, -1e10, -1e9, -5e7, -1e5)
    few = Rows(4, n, dtype).values(4, n)
    x = np.concatenate([np.full((4, n), mask) for mask in masks])
    x[0::4, :2] = few[0, :2]
    x[1::4, -2:] = few[1, -2:]
    x[2::4, n // 3 : n // 2] = few[2, n // 3 : n // 2]
    index = np.tile([0, n - 2, n // 3, n // 2], len(masks))
    inputs = {"logits": (dtype, x), "index": ("int32", index)}
    every = CALLS["all_token_statistics_forward"][2].replace("mean_logit", "")  # its sum is infinite
    for statistics in "log_prob entropy state", every:
        outputs = Rows(len(x), n, dtype).outputs(statistics)
        found = check("token_statistics_forward", inputs, outputs, scale=scale)
        assert not (found["log_prob"] > 0).any() and not (found["entropy"] < 0).any()
        finite = np.isfinite(found["log_prob"])
        assert finite.all() or (scale > 1 and not np.isfinite(np.float32(scale * masks[0])))


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [2, 33, 256, 2600])
def test_first_of_what_a_cap_makes_equal(dtype, vectors, suffix):
    rows = Rows(3, length(vectors, dtype, suffix), dtype)
    x = np.zeros((rows.m, rows.n))
    x[:, [1, rows.n // 2, rows.n - 1]] = 300, 500, 400
    index = np.array([1, rows.n // 2, rows.n - 1])
    inputs = {"logits": (dtype, x), "index": ("int32", index)}
    outputs = rows.outputs(CALLS["all_token_statistics_forward"][2])
    found = check("token_statistics_forward", inputs, outputs, layout=LAYOUTS[suffix], softcap=2.0)
    assert (found["predicted"] == 1).all() and found["is_top1"].tolist() == [True, False, False]


@pytest.mark.parametrize("op", ["all_token_statistics_forward", "softmax_forward", "layernorm_forward"])
def test_unaligned_rows_have_the_same_bits_wherever_they_begin(dtype, op):
    name, inputs, outputs, options = CALLS[op]
    for rows in Rows(5, 1000, dtype), Rows(40, 4096, dtype):
        given = rows.inputs(inputs)
        layouts = Layout(gaps=(1,), before=0), Layout(before=1), Layout(before=3)
        every = [
            call(DEVICE, name, given, rows.outputs(outputs), layout=layout, batch_invariant=1, **options)
            for layout in layouts
        ]
        for found in every[1:]:
            for result, values in found.items():
                np.testing.assert_array_equal(values, every[0][result], result)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [2, 33, 256, 2600])
@pytest.mark.parametrize("more", [{}, *EACH_OPTION])
def test_soft_cross_entropy(dtype, vectors, suffix, more):
    """Certain rows and targets, all kinds of infinities, several classes with the maximum, other types."""
    rows = Rows(8, length(vectors, dtype, suffix), dtype)
    x, q, last = rows.values(rows.m, rows.n).copy(), np.abs(rows.values(rows.m, rows.n)), rows.n - 1
    q /= q.sum(-1, keepdims=True)
    q[1] = np.arange(rows.n) == last // 2  # one class
    x[1, last // 2] = 30
    x[2, :last], q[2] = -np.inf, np.arange(rows.n) == last  # one class that can be
    x[3, last] = -np.inf  # a class of a probability that cannot be
    x[4, 0] = np.inf
    x[5] = -np.inf
    x[6, [0, last // 2, last]] = 8
    q[7] -= 1 / rows.n  # no probabilities
    weight = np.abs(rows.values(rows.n)) + 0.5
    options = {"layout": LAYOUTS[suffix], **more}
    capped, smoothed = "softcap" in more, "label_smoothing" in more
    for other, extra in (dtype, {}), (OTHER[dtype], {"weight": ("float32", weight)}):
        inputs = {"x": (dtype, x), "target": (other, q)} | extra
        made = check("soft_cross_entropy_forward", inputs, rows.outputs("loss state"), **options)
        loss = made["loss"]
        assert np.isfinite(loss[[0, 1, 6, 7]]).all()
        if capped:
            assert np.isfinite(loss).all()
        else:
            assert np.isnan(loss[[4, 5]]).all() and loss[3] == np.inf
            assert loss[2] == np.inf if smoothed else np.isfinite(loss[2])
        saved = {"state": ("float32", made["state"])} | rows.inputs("dloss")
        check("soft_cross_entropy_backward", inputs | saved, rows.outputs("dx"), **options)


@pytest.mark.parametrize("m", [5, 40])
@pytest.mark.parametrize("vectors", [30, 2600])
def test_soft_cross_entropy_of_all_rows(dtype, vectors, m):
    rows = Rows(m, length(vectors, dtype, ""), dtype)
    inputs, loss = rows.inputs("x probabilities"), {"loss": ("float32", (1,))}
    divisor = {"divisor": ("float32", np.array([3.0]))}
    dloss = {"dloss": ("float32", np.array([0.5]))}
    for reduction, given in (1, {}), (2, {}), (2, divisor):
        outputs = loss | rows.outputs("state")
        made = check("soft_cross_entropy_forward", inputs | given, outputs, reduction=reduction)
        saved = {"state": ("float32", made["state"])} | dloss
        check("soft_cross_entropy_backward", inputs | given | saved, rows.outputs("dx"), reduction=reduction)


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("vectors", (33, 180, 256, 600, 2600))  # kernels that keep exponentials, and others
@pytest.mark.parametrize("more", [{}, *EACH_OPTION[::2]])
def test_one_pass(rows, reduction, more):
    """Backward keeps forward's gradient. For another upstream gradient it computes what forward would."""
    names = "x target" if "z_loss" in more else "x target weight"
    inputs, options = rows.inputs(names), dict(reduction=reduction, one_pass=1, **more)
    x, target = inputs["x"][1].copy(), inputs["target"][1]
    x[0, target[0]] = 20  # of this row backward needs digits that the sum of all exponentials does not have
    inputs["x"] = rows.dtype, x
    outputs = {"loss": ("float32", (1,))} | rows.outputs("lse denominator dx")
    gradients = [{"upstream": ("float32", np.array([v], np.float32))} for v in (0.5, 1 / 3, -1e-45)]
    made = [call(DEVICE, "cross_entropy_forward", inputs | g, outputs, **options) for g in gradients]
    saved = made[0]
    inputs |= gradients[0] | {"lse": ("float32", saved["lse"])}
    if reduction == 1:
        inputs["denominator"] = "float32", saved["denominator"]
    for gradient, expected in zip(gradients, made, strict=True):
        inputs["dloss"] = gradient["upstream"]
        got = call(DEVICE, "cross_entropy_backward", inputs, {"dx": (rows.dtype, saved["dx"])}, **options)
        assert np.array_equal(got["dx"], expected["dx"], equal_nan=True)
        assert np.array_equal(np.signbit(got["dx"]), np.signbit(expected["dx"]))  # of 0 too
    # For an upstream gradient of NaN nothing is made, and nothing taken for made, but all else is the same.
    for bits in (0x7FC00000, 0x7FFFFFFF, 0xFFC01234):
        unknown = {"upstream": ("float32", np.array([bits], np.uint32).view(np.float32))}
        marked = {"dx": (rows.dtype, np.full_like(saved["dx"], 7))}
        forward = {k: v for k, v in inputs.items() if k in ("x", "target", "weight")} | unknown
        got = call(DEVICE, "cross_entropy_forward", forward, outputs | marked, **options)
        assert np.array_equal(got["dx"], marked["dx"][1])
        for name in outputs.keys() - {"dx"}:
            assert np.array_equal(got[name], saved[name], equal_nan=True)
        for dloss, expected in ((unknown["upstream"], None), (gradients[1]["upstream"], made[1])):
            back = inputs | unknown | {"dloss": dloss}
            dx = call(DEVICE, "cross_entropy_backward", back, marked, **options)["dx"]
            if expected is None:
                assert np.isnan(dx.astype(np.float32)).any(axis=-1).sum() >= rows.m - 1  # a row is ignored
            else:
                assert np.array_equal(dx, expected["dx"], equal_nan=True)


def test_gradient_by_ctas_in_turns():
    """A gradient that forward has not made, of more rows than backward has CTAs."""
    rows = Rows(520, 2080, "float32")
    inputs, options = rows.inputs("x target"), dict(reduction=2, one_pass=1)
    inputs["target"][1][5::11] = 0
    half, third = (("float32", np.array([v], np.float32)) for v in (0.5, 1 / 3))
    outputs = {"loss": ("float32", (1,))} | rows.outputs("lse dx")
    saved = call(HOST, "cross_entropy_forward", inputs | {"upstream": half}, outputs, **options)
    inputs |= {"lse": ("float32", saved["lse"]), "upstream": half, "dloss": third}
    check("cross_entropy_backward", inputs, {"dx": ("float32", saved["dx"])}, **options)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_gradient_of_statistics_in_long_chunks(dtype, cap):
    """So many logits that a thread takes several tiles of its chunk, whose length they do not divide."""
    run("token_statistics_backward", 15, length(18000, dtype, ""), dtype, "", softcap=cap)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [1, 5, 33, 180, 256, 2600])  # parts of warps, warps, CTAs, clusters
def test_l2norm(dtype, vectors, suffix):
    """RMSNorm's kernels divide by 1 where they are told to."""
    rows = Rows(9, length(vectors, dtype, suffix), dtype)
    for batch_invariant in 0, 1:
        options = {"layout": LAYOUTS[suffix], "batch_invariant": batch_invariant}
        made = check("l2norm_forward", rows.inputs("x"), rows.outputs("y rnorm"), eps=0.5, **options)
        inputs = rows.inputs("x dy") | {"rnorm": ("float32", made["rnorm"])}
        check("l2norm_backward", inputs, rows.outputs("dx"), **options)


def test_other_losses(rows):
    check("cross_entropy_backward", rows.inputs("x target dloss lse"), rows.outputs("dx"), slice=1)
    inputs = rows.inputs("x target dloss lse")
    inputs["dloss"][1][:] = 0
    inputs["lse"][1][1, 1:] = np.nan  # of whole rows: a target is no class, or there is a NaN in some slice
    inputs["target"][1][1], inputs["target"][1][3:] = rows.n + 9, -100
    dx = call(DEVICE, "cross_entropy_backward", inputs, rows.outputs("dx"), slice=1)["dx"]
    assert np.isnan(dx[1]).all() and (dx[0] == 0).all() and (dx[3:] == 0).all()
    lse = check("logsumexp_forward", rows.inputs("x"), {"lse": ("float32", (rows.m,))})["lse"]
    check("logsumexp_backward", rows.inputs("x dlse") | {"lse": ("float32", lse)}, rows.outputs("dx"))
    for dloss in (1.0, 0.75):
        inputs = rows.inputs("x") | {"dloss": ("float32", np.array([dloss]))}
        check("rescale_gradient", inputs, rows.outputs("y"))


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("vectors", [1, 5, 33, 180, 256, 2600])  # parts of warps, warps, CTAs, clusters
def test_infinite_logits(dtype, vectors, suffix):
    """The log-sum-exp of a row with +inf is +inf, or NaN if it has a NaN as well. A loss is NaN in both."""
    rows = Rows(9, length(vectors, dtype, suffix), dtype)
    x = rows.values(rows.m, rows.n).copy()
    inf, nan = np.inf, np.nan
    for row, values in enumerate(((inf,), (inf, inf), (-inf, inf), (inf, nan), (nan, inf), (-inf,), (nan,))):
        x[row, -len(values) :] = values[: rows.n]
    x[5], x[7] = -inf, inf
    x[8, rows.n // 2] = inf
    top = x.max(-1)  # NaN if there is one
    inputs, outputs = {"x": (dtype, x)}, {"lse": ("float32", (rows.m,))}
    for layout in (LAYOUTS[suffix], Layout(before=1)):
        lse = check("logsumexp_forward", inputs, outputs, layout=layout)["lse"]
        assert np.array_equal(lse[:8], np.where(np.isinf(top) | np.isnan(top), top, lse)[:8], equal_nan=True)
        assert np.isinf(top[:3]).all() and np.isnan(lse[6])
        more = rows.inputs("dlse") | {"lse": ("float32", lse)}
        check("logsumexp_backward", inputs | more, rows.outputs("dx"), layout=layout)
        given = inputs | {"target": ("int64", np.zeros(rows.m, np.int64))}
        for wanted in ("loss", "loss dx"):
            loss = check("cross_entropy_forward", given, rows.outputs(wanted), layout=layout)["loss"]
            assert np.isnan(loss[[0, 1, 2, 3, 4, 6, 7, 8]]).all()


@pytest.mark.parametrize("weighted", [0, 1])
@pytest.mark.parametrize("reduction", [0, 1, 2])  # none, mean, sum
@pytest.mark.parametrize("m", [1, 256, 700])
def test_sharded_cross_entropy(m, reduction, weighted):
    """Of four slices, of which the target is in one, or in none of them that it should be in."""
    rows, classes = Rows(4 * (3 + weighted), m, "float32"), 400
    target = np.arange(m) * 7919 % classes
    parts = rows.values(4, 3 + weighted, m).copy()
    parts[:, 1] = np.abs(parts[:, 1])
    owners = target // 100
    elsewhere = np.arange(4)[:, None] != owners
    parts[:, 2][elsewhere] = np.nan
    parts[:, 2] = np.abs(parts[:, 2])
    if weighted:
        parts[:, 3] = np.where(elsewhere, 0, np.abs(parts[:, 3]))
        parts[:, 3, 5::11] = 0  # these rows count for nothing
    parts[:, 0, 7::13] = 20 * ~elsewhere[:, 7::13]  # these targets are nearly certain
    parts[:, 1, 7::13] = 1e-9
    parts[2, :2], parts[2, 2] = -np.inf, np.nan  # a slice without classes, or all of whose logits are -inf
    target[3::7] = -100
    if reduction == 0:
        target[4::17] = classes
        parts[:, :2, 6::19] = -np.inf
        parts[0, 1, 8::23] = np.nan
    inputs = {"parts": ("float32", parts), "target": ("int64", target)}
    outputs = dict.fromkeys(("max", "log_sum", "weights"), ("float32", (m,)))
    outputs |= {"losses": ("float32", (m,))} if reduction == 0 else {"loss": ("float32", (1,))}
    outputs["denominator"] = "float32", (1,)
    options = dict(classes=classes, mean=reduction == 1, weighted=weighted)
    got = check("sharded_cross_entropy_combine", inputs, outputs, units=4, **options)
    certain = got["log_sum"][7::13]
    assert (certain[np.isfinite(certain)] > 0).all()


@pytest.mark.parametrize("narrow", [0, 1])
@pytest.mark.parametrize("m", [1, 256, 700])
def test_sharded_token_statistics(m, narrow):
    """Of four slices, of which the index is in one, or in none of them that it should be in."""
    each, classes = (4, 400) if narrow else (8, 400)
    rows, row = Rows(4 * each, m, "float32"), np.arange(m)
    index = row * 7919 % classes
    elsewhere = np.arange(4)[:, None] != index // 100
    parts = rows.values(4, each, m).copy()
    state = np.abs(rows.values(4, m, 3)) + np.float32(0.1)
    state[:, 5::11, 0] = 2  # all slices have the maximum
    state[:, 7::13] = np.where(elsewhere[:, 7::13, None], 0, [30, 1e-6, 1e-5])  # nearly certain
    state[2, 3::17] = -np.inf, -np.inf, np.nan  # a slice of -inf alone
    state[:, 6::19] = -np.inf, -np.inf, np.nan  # all are
    state[0, 8::23, 1:] = np.nan  # a NaN
    state[3, 9::29] = np.nan  # left out by another rank
    parts[:, :3] = state.reshape(4, 3, m)
    parts[:, 3] = np.where(elsewhere, np.nan, -np.abs(parts[:, 3]))
    if not narrow:
        parts[:, 4] = -state[:, :, 1]
        predicted = np.arange(4)[:, None] * 100 + row * 31 % 100
        predicted[0, 8::23] = -1
        parts[:, 6:] = predicted.view(np.float32).reshape(4, 2, m)
    index[4::7] = classes
    inputs = {"parts": ("float32", parts), "index": ("int64", index)}
    outputs = dict.fromkeys(("log_prob", "entropy"), ("float32", (m,)))
    outputs |= {"state": ("float32", (m, 3)), "local": ("int64", (m,))}
    if not narrow:
        outputs |= dict.fromkeys(("log_sum_sq_probs", "mean_logit"), ("float32", (m,)))
        outputs |= {"is_top1": ("bool", (m,)), "predicted": ("int64", (m,))}
    options = dict(first=100, classes=classes, narrow=narrow, ignore_index=2)
    for mask in "bool", "int32", None:
        if mask:
            inputs["row_mask"] = mask, row % 9 != 8
        got = check("sharded_token_statistics_combine", inputs, outputs, units=4, **options)
        inputs.pop("row_mask", None)
    if m > 1:
        assert np.isnan(got["log_prob"][4]) and got["local"][4] == -2
        assert np.isnan(got["entropy"][[6, 8, 9]]).all()
        assert 0 < got["entropy"][7] < 1e-4 and got["log_prob"][7] < 0


# (op of CALLS, an output, the input that it overwrites)
IN_PLACE = (
    ("softmax_forward", "y", "x"),
    ("softmax_backward", "dx", "dy"),
    ("softmax_backward", "dx", "y"),
    ("masked_softmax_forward", "y", "x"),
    ("masked_softmax_backward", "dx", "dy"),
    ("rmsnorm_forward", "y", "x"),
    ("norm_forward", "y", "x"),
    ("norm_forward", "residual_out", "residual"),
    ("rmsnorm_backward_dx", "dx", "dout"),
    ("rmsnorm_backward", "dx", "dout"),
    ("layernorm_backward", "dx", "dout"),
    ("cross_entropy_forward_dx", "dx", "x"),
    ("token_statistics_backward", "dlogits", "logits"),
    ("soft_cross_entropy_backward", "dx", "x"),
    ("cross_entropy_backward", "dx", "x"),
)


@pytest.mark.parametrize("suffix", LAYOUTS)
@pytest.mark.parametrize("op, output, over", IN_PLACE)
def test_in_place(op, output, over, dtype, suffix):
    for m, vectors in ((40, 33), (3, 256), (3, 2600), (2, 20000)):
        run(op, m, length(vectors, dtype, suffix), dtype, suffix, over={output: over})


@pytest.mark.parametrize("suffix", LAYOUTS)
def test_layernorm_in_place(dtype, suffix):
    """Sums that are rounded to x's type, and to another one."""
    for m, vectors in ((40, 33), (2, 2600)):
        rows, other = Rows(m, length(vectors, dtype, suffix), dtype), OTHER[dtype]
        for given, stored, over in (
            ({}, dtype, {"y": "x", "residual_out": "residual"}),
            ({"residual": other}, other, {"y": "x", "residual_out": "residual"}),
            ({"residual": other}, dtype, {"residual_out": "x"}),
        ):
            inputs = rows.inputs("x residual weight bias", **given)
            outputs = rows.outputs("y residual_out mean rstd", residual_out=stored)
            check("layernorm_forward", inputs, outputs, layout=LAYOUTS[suffix], over=over)


INVARIANT = (
    *("softmax_forward", "softmax_backward", "rmsnorm_forward", "rmsnorm_backward_dx"),
    *("token_statistics_forward", "all_token_statistics_forward", "token_statistics_backward"),
    *("soft_cross_entropy_forward", "soft_cross_entropy_backward"),
    "rmsnorm_residual_forward",
)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), Layout(gaps=(0, 8, 16))])
@pytest.mark.parametrize("op", INVARIANT)
def test_batch_invariance(op, dtype, layout):
    """A row's bits depend neither on how many rows there are nor on strides, which one row does not have."""
    operator, inputs, outputs, _ = CALLS[op]
    suffix = next((suffix for suffix, known in LAYOUTS.items() if known == layout), "")
    more = dict(layout=layout, batch_invariant=1)
    for vectors in (33, 256, 2600):
        rows = Rows(40, length(vectors, dtype, suffix), dtype)
        given, wanted = rows.inputs(inputs), rows.outputs(outputs)
        several = check(operator, given, wanted, **more)
        wanted = {k: (kind, (1, *shape[1:])) for k, (kind, shape) in wanted.items()}
        for i in range(0, rows.m, 4):
            row = {k: (kind, v[i : i + 1] if len(v) == rows.m else v) for k, (kind, v) in given.items()}
            for name, values in call(DEVICE, operator, row, wanted, **more).items():
                assert np.array_equal(values[0], several[name][i]), f"{name} of row {i} by itself is another"
