"""Figures of the records, by operator."""

import functools
import statistics

from gander_bench import load, models, records, report, sections

from . import ROOT
from .tables import named, table_of

# The records from which each kind of figure is taken.
GRID = "h100-8a2845d"  # throughput over the row lengths, beside the peers
NORMS = "h200-9bdc7ab"  # the norms with their options
IN_PLACE = "h200-116c1f8"  # fused_add_rmsnorm, beside flashinfer
STEP = "h200-636b39f-step"
GLU = "h100-a9cf1e1a-glu"  # gated linear units
JAX = "h100-a9cf1e1a-jax"
LINEAR = "h200-5bb0dad"
TOKENS, HEAD = "h200-c2af27a8-tokens", "h200-c2af27a8-head"
OUTPUTS = "h200-c2af27a8-linear"  # a head that returns more than its loss
RANKS = "h200-c2af27a8-sharded"  # classes divided among GPUs
INVARIANT = "h200-c2af27a8-invariant"  # statistics of tokens with batch_invariant=True
MODELS = {"softmax": "h200-727a294", "rmsnorm": "h200-9bdc7ab", "cross_entropy": "h200-1ed7d17"}

CARDS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
PEERS = {
    "flashinfer": "flashinfer",
    "quack": "QuACK",
    "liger": "Liger",
    "liger-cutedsl": "Liger's CuTe",
    "cudnn": "cuDNN",
    "torch": "torch",
}


@functools.cache
def records_of(file: str) -> list[dict]:
    return report.latest(records.read(ROOT / "bench/results" / f"{file}.jsonl"))


def points_of(op: str, file: str, section: str, **wanted) -> list[dict]:
    found = report.of(records_of(file), section, op=op, **wanted)
    if not found:
        raise LookupError(f"{file}.jsonl has no point of {op} in section {section} with {wanted}")
    runs = models.by_case(found, section)
    return [median_of(each) if "run" in each[0] else each[-1] for each in runs.values()]


def median_of(runs: list[dict]) -> dict:
    """One record of a point that several runs measured: the medians of what each provider has in them."""
    results: dict[str, dict] = {}
    for name in report.unique(name for run in runs for name in run["results"]):
        figures = {field: models.median(runs, name, field) for field in ("us", "tbps", "ratio")}
        results[name] = {field: figure for field, figure in figures.items() if figure is not None}
    limits = [run["limit"] for run in runs if "limit" in run]
    limit = {field: models.median_of(each.get(field) for each in limits) for field in ("us", "tbps")}
    return runs[-1] | {"results": results, "limit": limit}


def ratios(points: list[dict], over: str) -> list[float]:
    """How many times as fast as another one gander is at each point that both have."""
    pairs = [(p["results"].get(over, {}).get("us"), p["results"]["gander"]["us"]) for p in points]
    return [other / mine for other, mine in pairs if other]


def geomean(points: list[dict], over: str) -> float | None:
    found = ratios(points, over)
    return statistics.geometric_mean(found) if found else None


def card(file: str = GRID) -> str:
    """The GPU of a file of records."""
    return CARDS[records_of(file)[-1]["environment"]["device"]]


def measured_with(file: str = GRID) -> str:
    """On what a file of records was measured."""
    environment = report.newest(records_of(file))["environment"]
    versions = {name: version for r in records_of(file) for name, version in r["versions"].items()}
    peers = ", ".join(f"{PEERS[name]} {versions[name]}" for name in versions if name in PEERS)
    return f"{environment['device']}, driver {environment['driver']}, CUDA {environment['cuda']}, {peers}"


def times(op: str, over: str, file: str = GRID, section: str = "throughput", **wanted) -> str:
    """The geometric mean of how many times as fast as another one gander is."""
    mean = geomean(points_of(op, file, section, **wanted), over)
    if mean is None:
        raise LookupError(f"{file}.jsonl has no {over} for {op} in section {section}")
    return f"{mean:.2f}" if mean < 2 else f"{mean:.1f}"


def cases_at_the_limit(least: float = 0.95) -> str:
    """How many points of the grid reach a share of the limit, of how many."""
    shares = [p["results"]["gander"]["ratio"] for p in report.of(records_of(GRID), "throughput")]
    return f"{sum(share >= least for share in shares)} of {len(shares)}"


def first_call() -> str:
    """The milliseconds of a call on a shape that the process has not seen, the median over all functions."""
    results = report.of(records_of(GRID), "load")[-1]["results"]["gander"]
    return f"{statistics.median(ms for function in load.FUNCTIONS for ms in results[function]['new']):.2f}"


def speed(
    op: str, file: str = GRID, section: str = "throughput", dtype: str = "bfloat16", unit: str = "TB/s"
) -> str:
    """A table of the throughput by shape, or of the time (unit "us"), beside the limit and the peers."""
    points = points_of(op, file, section, dtype=dtype)
    names = [name for name in PEERS if any(name in p["results"] for p in points)]
    rows = []
    for p in points:
        mine = p["results"]["gander"]
        figure = f"{mine['tbps']:.2f}" if unit == "TB/s" else f"{mine['us']:.1f}"
        others = [f"{r[0]:.2f}" if (r := ratios([p], name)) else "-" for name in names]
        rows.append([f"{p['m']} x {p['n']}", figure, f"{mine['ratio']:.2f}", *others])
    columns = ["rows", unit, "of the limit", *(f"over {PEERS[name]}" for name in names)]
    return table_of(columns, rows, f"{card(file)}, {dtype}. {named(file)}")


def beside_xla(file: str = JAX) -> str:
    """A table of how many times as fast as programs that XLA fuses gander.jax is."""
    found, rows = report.of(records_of(file), "jax"), []
    for op in report.unique(r["op"] for r in found):
        mine = [r for r in found if r["op"] == op]
        speeds = [
            (speed, f"{r['m']} x {r['n']}")
            for r in mine
            if (speed := report.times_as_fast(r, "xla")) is not None
        ]
        worst, where = min(speeds)
        mean = statistics.geometric_mean(speed for speed, _ in speeds)
        rows.append([report.TITLES[op], str(len(speeds)), f"{mean:.2f}", f"{worst:.2f}", where])
    note = f"{card(file)}, {found[-1]['dtype']}, jax {found[-1]['versions']['jax']}. {named(file)}"
    return table_of(["program", "shapes", "times XLA's speed", "least", "at"], rows, note)


_STEPS = ("backward", "a quarter", "scaled")


def steps(file: str = STEP) -> str:
    """A table of cross-entropy as training calls it: time and memory by provider, for several gradients."""
    points = {p["mode"]: p for p in report.of(records_of(file), "step", op="cross_entropy")}
    if missing := [mode for mode in _STEPS if mode not in points]:
        raise LookupError(f"{file}.jsonl has no step with {missing}")
    results = [points[mode]["results"] for mode in _STEPS]
    names = [name for name in _VARIANTS if all("us" in each.get(name, {}) for each in results)]
    rows = [
        [f"`{report.STEP_TITLES[mode]}`, us", *(f"{each[name]['us']:.0f}" for name in names)]
        for mode, each in zip(_STEPS, results, strict=True)
    ]
    rows.append(["memory, MiB", *(f"{results[0][name]['peak MiB']:.0f}" for name in names)])
    first = points[_STEPS[0]]
    note = f"Loss and gradient of {first['m']} x {first['n']} logits, memory besides the logits. "
    note += f"{card(file)}, {first['dtype']}. {named(file)}"
    return table_of(["", *(_VARIANTS[name] for name in names)], rows, note)


_VARIANTS = {
    "gander": "gander",
    "gander-upstream": "with `upstream`",
    "gander-remember": "with `remember`",
    "gander-two-passes": "with `one_pass=False`",
    "quack": "QuACK",
    "liger": "Liger",
    "torch": "torch",
}


def linear(file: str = LINEAR) -> str:
    """A table of linear_cross_entropy and its gradients: time over the matrix products', and memory."""
    (point,) = points_of("linear_cross_entropy", file, "linear")
    rows = []
    for name, label in _CHUNKS.items():
        figures = point["results"].get(name, {})
        if "us" in figures:
            times_as_long = figures["us"] / point["limit"]["us"]
            rows.append([label, f"{times_as_long:.2f}", f"{figures['peak MiB']:.0f}"])
    note = f"Loss and gradients of {point['m']} rows and {point['n']} classes, {sections.HIDDEN} hidden"
    note += " columns: time over that of the three matrix products alone, and memory besides the gradients. "
    note += f"{card(file)}, {point['dtype']}. {named(file)}"
    return table_of(["", "over the products", "MiB"], rows, note)


_CHUNKS = {
    "gander-1-chunks": "gander, all rows at once",
    "gander-2-chunks": "gander, halves",
    "gander": "gander, quarters (the default)",
    "gander-8-chunks": "gander, eighths",
    "gander-float32": 'gander, quarters, `accumulate="float32"`',
    "quack": "QuACK",
    "liger": "Liger",
    "torch.compile": "torch.compile",
    "torch": "torch",
}


def outputs_of_linear(file: str = OUTPUTS) -> str:
    """How many times as long the linear loss takes with what it returns on request."""
    (point,) = points_of("linear_cross_entropy", file, "linear")
    with_outputs, alone = (point["results"][name]["us"] for name in ("gander-outputs", "gander"))
    return f"{with_outputs / alone:.2f}"


def ranks(file: str = RANKS) -> str:
    """A table of classes divided among ranks, with their gradient: time and memory of each contestant."""
    rows = []
    for op, label in report.OF_SLICES.items():
        for p in points_of(op, file, "sharded"):
            cells = [f"{p['limit']['us']:.0f}"]
            for name in _OF_RANKS:
                figures = p["results"].get(name)
                cells += [f"{figures['us']:.0f}", f"{figures['peak MiB']:.0f}"] if figures else ["", ""]
            rows.append([label, f"{p['m']} x {p['ranks'] * p['n']}", *cells])
    columns = ["", "tokens x classes", "two reads and a write: us"]
    columns += (f"{label}: {unit}" for label in _OF_RANKS.values() for unit in ("us", "MiB"))
    first = points_of("cross_entropy", file, "sharded")[0]
    versions = ", ".join(f"{PEERS[name]} {first['versions'][name]}" for name in ("torch", "liger"))
    note = f"Forward and backward on {first['ranks']} GPUs that begin together, each with as many of the "
    note += "classes: their time, the host ahead as in a CUDA graph, and memory besides the gradient. "
    note += f"{card(file)}, {first['dtype']}, {versions}. {named(file)}"
    return table_of(columns, rows, note, align="llr")


_OF_RANKS = {"gander-sharded": "gander", "torch": "`loss_parallel`", "liger": "Liger"}


def tokens(dtype: str = "bfloat16", file: str = TOKENS) -> str:
    """A table of log_prob and entropy by shape, without and with their gradient."""
    rows = []
    for forward in points_of("token_statistics_forward", file, "tokens", dtype=dtype):
        m, n = forward["m"], forward["n"]
        both = forward, *points_of("token_statistics_gradient", file, "tokens", dtype=dtype, m=m, n=n)
        rows.append([f"{m} x {n}", *(cell for point in both for cell in _beside_trl(point))])
    columns = ["rows", *_BESIDE_TRL, *(f"with gradient: {name}" for name in _BESIDE_TRL)]
    return table_of(columns, rows, f"{card(file)}, {dtype}. {named(file)}")


def tokens_by_option(m: int = 8192, n: int = 151936, file: str = TOKENS) -> str:
    """A table of statistics of tokens by option, without and with the gradient of log_prob and entropy."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        for option, label in _OF_TOKENS.items():
            cells = []
            for which in ("forward", "gradient"):
                op = f"token_statistics_{option}{which}"
                found = report.of(records_of(file), "tokens", op=op, dtype=dtype, m=m, n=n)
                cells += _beside_trl(found[-1])[:2] if found else ["", ""]
            rows.append([dtype, label, *cells])
    columns = ["dtype", "", *_BESIDE_TRL[:2], *(f"with gradient: {name}" for name in _BESIDE_TRL[:2])]
    return table_of(columns, rows, f"{card(file)}, {m} x {n}. {named(file)}", align="llr")


def _beside_trl(point: dict) -> list[str]:
    mine = point["results"]["gander"]
    over = ratios([point], "trl")
    return [f"{mine['us']:.1f}", f"{mine['ratio']:.2f}", f"{over[0]:.2f}" if over else ""]


_BESIDE_TRL = ("us", "of the limit", "over TRL")
_OF_TOKENS = {
    "": "log_prob, entropy",
    "temperature_": "with a temperature",
    "softcap_": "with a softcap",
    "masked_": "half of the rows masked",
    "all_": "all outputs",
}


def heads(file: str = HEAD) -> str:
    """A table of a head's log_prob and entropy with gradients: time and memory of each contestant."""
    points = {p["mode"]: p for p in report.of(records_of(file), "head")}
    trained, first = points["trained"]["results"], points["trained"]
    rows = []
    for name, label in _HEADS.items():
        cells = []
        for mode in _HEAD_MODES:
            figures = points[mode]["results"][name]
            cells += [f"{figures['us'] / 1000:.1f}", f"{figures['peak MiB']:.0f}"]
        cells[2:2] = (f"{trained[name][off] / trained['torch'][off]:.2f}" for off in ("dx off", "dw off"))
        rows.append([label, *cells])
    for which, label in (("again", "the products, logits made again"), ("kept", "the products, logits kept")):
        each = [f"{points[mode]['matmuls'][which]['us'] / 1000:.1f}" for mode in _HEAD_MODES]
        rows.append([f"{label}, alone", each[0], "", "", "", each[1], "", each[2], ""])
    columns = [
        "",
        "trained: ms",
        "MiB",
        "error of dhidden",
        "of dW",
        "frozen: ms",
        "MiB",
        "frozen, log_prob alone: ms",
        "MiB",
    ]
    versions = first["versions"]
    others = ", ".join(f"{_HEADS[name]} {versions[name]}" for name in ("torch", "trl", "verl", "liger"))
    note = f"Log-probabilities and entropies of {first['m']} tokens with gradients, {sections.HIDDEN} hidden "
    note += f"columns, {first['n']} words: time, memory besides the gradients, and errors of gradients over "
    note += f"torch's. {card(file)}, {first['dtype']}, {others}. {named(file)}"
    return table_of(columns, rows, note)


_HEAD_MODES = ("trained", "frozen", "frozen, log_prob")
_HEADS = {
    "gander": "gander",
    "gander-kept": '`keep="logits"`',
    "liger": "Liger",
    "trl": "TRL",
    "verl": "verl",
    "torch": "torch",
}


def summary() -> str:
    """README's table: forward and backward over torch and over QuACK."""
    operators = [
        ("[softmax](docs/operators/softmax.md)", "softmax_forward", "softmax_backward"),
        ("[RMSNorm](docs/operators/rmsnorm.md)", "rmsnorm_forward", "rmsnorm_backward"),
        (
            "[cross-entropy](docs/operators/cross_entropy.md); loss and gradient",
            "cross_entropy_forward",
            "cross_entropy_loss_gradient",
        ),
    ]
    rows = [
        [name, *(times(op, over) for op in ops for over in ("torch", "quack"))] for name, *ops in operators
    ]
    columns = ["forward / torch", "forward / QuACK", "backward / torch", "backward / QuACK"]
    return table_of(["operator", *columns], rows)
