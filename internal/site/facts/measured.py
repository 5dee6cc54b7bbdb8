"""Figures of the records, by operator."""

import functools
import statistics
import textwrap

from gander_bench import models, records, report, sections

from . import ROOT

# The records from which each kind of figure is taken.
GRID = "h100-8a2845d"  # throughput over the row lengths, beside the peers
NORMS = "h200-9bdc7ab"  # the norms with their options
IN_PLACE = "h200-116c1f8"  # fused_add_rmsnorm, beside flashinfer
STEP = "h200-636b39f-step"
GLU = "h100-b4895ea-glu"  # gated linear units
LINEAR = "h200-5bb0dad"
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


_OPERATORS = ("softmax", "rmsnorm", "cross_entropy")


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


def first_call_ms() -> str:
    """The median time of a function's first call on a new shape, in ms."""
    results = report.of(records_of(GRID), "load")[-1]["results"]["gander"]
    return f"{statistics.median(ms for op in _OPERATORS for ms in results[op]['new']):.1f}"


def speed(
    op: str, file: str = GRID, section: str = "throughput", dtype: str = "bfloat16", unit: str = "TB/s"
) -> str:
    """A table of the throughput by shape, or of the time (unit "us"), beside the limit and the peers."""
    points = points_of(op, file, section, dtype=dtype)
    names = [name for name in PEERS if any(name in p["results"] for p in points)]
    lines = [
        f"| rows | {unit} | of the limit | " + " | ".join(f"over {PEERS[name]}" for name in names) + " |",
        "|---|--:|--:|" + "--:|" * len(names),
    ]
    for p in points:
        mine = p["results"]["gander"]
        figure = f"{mine['tbps']:.2f}" if unit == "TB/s" else f"{mine['us']:.1f}"
        others = [f"{r[0]:.2f}" if (r := ratios([p], name)) else "-" for name in names]
        lines.append(line_of(f"{p['m']} x {p['n']}", figure, f"{mine['ratio']:.2f}", *others))
    return "\n".join([*lines, "", measured_where(points[0], file)])


def line_of(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def measured_where(point: dict, file: str) -> str:
    return f"*{CARDS[point['environment']['device']]}, {point['dtype']}. bench/results/{file}.jsonl*"


# By mode of the record what backward() is called on.
_STEPS = {"backward": "loss", "a quarter": "loss / 4", "scaled": "scaled"}


def steps(file: str = STEP) -> str:
    """A table of cross-entropy as training calls it: time and memory by provider, for several gradients."""
    points = {p["mode"]: p for p in report.of(records_of(file), "step", op="cross_entropy")}
    if missing := [mode for mode in _STEPS if mode not in points]:
        raise LookupError(f"{file}.jsonl has no step with {missing}")
    first = points["backward"]
    columns = [f"{each}, us" for each in _STEPS.values()]
    lines = [line_of("", *columns, "MiB"), "|---|--:|--:|--:|--:|"]
    for name, label in _VARIANTS.items():
        each = [points[mode]["results"].get(name, {}).get("us") for mode in _STEPS]
        if None not in each:
            memory = first["results"][name]["peak MiB"]
            lines.append(line_of(label, *(f"{us:.0f}" for us in each), f"{memory:.0f}"))
    shape = f"*Loss and gradient of {first['m']} x {first['n']} logits. MiB: memory besides the logits.* "
    return "\n".join([*lines, "", textwrap.fill(shape + measured_where(first, file), 110)])


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
    lines = ["| | over the products | MiB |", "|---|--:|--:|"]
    for name, label in _CHUNKS.items():
        figures = point["results"].get(name, {})
        if "us" in figures:
            times_as_long = figures["us"] / point["limit"]["us"]
            lines.append(line_of(label, f"{times_as_long:.2f}", f"{figures['peak MiB']:.0f}"))
    what = f"Loss and gradients of {point['m']} rows and {point['n']} classes, {sections.HIDDEN} hidden"
    what += " columns: time over that of the three matrix products alone, and memory besides the gradients."
    return "\n".join([*lines, "", textwrap.fill(f"*{what}* " + measured_where(point, file), 110)])


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


def summary() -> str:
    """README's table: forward and backward over torch and over QuACK."""
    rows = [
        ("[softmax](docs/operators/softmax.md)", "softmax_forward", "softmax_backward"),
        ("[RMSNorm](docs/operators/rmsnorm.md)", "rmsnorm_forward", "rmsnorm_backward"),
        (
            "[cross-entropy](docs/operators/cross_entropy.md); loss and gradient",
            "cross_entropy_forward",
            "cross_entropy_loss_gradient",
        ),
    ]
    lines = [
        "| operator | forward / torch | forward / QuACK | backward / torch | backward / QuACK |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, *ops in rows:
        cells = [times(op, over) for op in ops for over in ("torch", "quack")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
