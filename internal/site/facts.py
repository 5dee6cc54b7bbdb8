"""What pages may state: facts of the table of operators, of the library, and of the records of bench/results.

fill.py evaluates the marks of a page with these names. Each function returns Markdown.
"""

import functools
import io
import re
import statistics
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("python", "bench", "tests/python")]

import gander  # noqa: E402
import tolerance  # noqa: E402
from gander import _table  # noqa: E402
from gander_bench import models, plots, records, report, sections  # noqa: E402

# The records from which each kind of figure is taken.
GRID = "h100-8a2845d"  # throughput over the row lengths, beside the peers
NORMS = "h200-9bdc7ab"  # the norms with their options
IN_PLACE = "h200-116c1f8"  # fused_add_rmsnorm
STEP = "h200-636b39f-step"
LINEAR = "h200-5bb0dad"
MODELS = {"softmax": "h200-727a294", "rmsnorm": "h200-9bdc7ab", "cross_entropy": "h200-1ed7d17"}

_CARDS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
_PEERS = {
    "flashinfer": "flashinfer",
    "quack": "QuACK",
    "liger": "Liger",
    "liger-cutedsl": "Liger's CuTe",
    "cudnn": "cuDNN",
    "torch": "torch",
}


# ---- Records ----


@functools.cache
def _read(file: str) -> list[dict]:
    return report.latest(records.read(_ROOT / "bench/results" / f"{file}.jsonl"))


def _points(op: str, file: str, section: str, **wanted) -> list[dict]:
    found = report.of(_read(file), section, op=op, **wanted)
    if not found:
        raise LookupError(f"{file}.jsonl has no point of {op} in section {section} with {wanted}")
    runs = models.by_case(found, section)
    return [_median(each) if "run" in each[0] else each[-1] for each in runs.values()]


def _median(runs: list[dict]) -> dict:
    """One record of a point that several runs measured: the medians of what each provider has in them."""
    results: dict[str, dict] = {}
    for name in report.unique(name for run in runs for name in run["results"]):
        figures = {field: models.median(runs, name, field) for field in ("us", "tbps", "ratio")}
        results[name] = {field: figure for field, figure in figures.items() if figure is not None}
    limits = [run["limit"] for run in runs if "limit" in run]
    limit = {field: models.median_of(each.get(field) for each in limits) for field in ("us", "tbps")}
    return runs[-1] | {"results": results, "limit": limit}


def _ratios(points: list[dict], over: str) -> list[float]:
    """How many times as fast as another one gander is at each point that both have."""
    pairs = [(p["results"].get(over, {}).get("us"), p["results"]["gander"]["us"]) for p in points]
    return [other / mine for other, mine in pairs if other]


def _geomean(points: list[dict], over: str) -> float | None:
    ratios = _ratios(points, over)
    return statistics.geometric_mean(ratios) if ratios else None


def card(file: str = GRID) -> str:
    """The GPU of a file of records."""
    return _CARDS[_read(file)[-1]["environment"]["device"]]


def measured_with(file: str = GRID) -> str:
    """On what a file of records was measured."""
    newest = report.newest(_read(file))
    versions, environment = newest["versions"], newest["environment"]
    peers = ", ".join(f"{_PEERS[name]} {versions[name]}" for name in versions if name in _PEERS)
    return f"{environment['device']}, driver {environment['driver']}, CUDA {environment['cuda']}, {peers}"


def times(op: str, over: str, file: str = GRID, section: str = "throughput", **wanted) -> str:
    """The geometric mean of how many times as fast as another one gander is."""
    mean = _geomean(_points(op, file, section, **wanted), over)
    if mean is None:
        raise LookupError(f"{file}.jsonl has no {over} for {op} in section {section}")
    return f"{mean:.2f}" if mean < 2 else f"{mean:.1f}"


def cases_at_the_limit(least: float = 0.95) -> str:
    """How many points of the grid reach a share of the limit, of how many."""
    shares = [p["results"]["gander"]["ratio"] for p in report.of(_read(GRID), "throughput")]
    return f"{sum(share >= least for share in shares)} of {len(shares)}"


def speed(
    op: str, file: str = GRID, section: str = "throughput", dtype: str = "bfloat16", unit: str = "TB/s"
) -> str:
    """A table of the throughput by shape, or of the time (unit "us"), beside the limit and the peers."""
    points = _points(op, file, section, dtype=dtype)
    names = [name for name in _PEERS if any(name in p["results"] for p in points)]
    lines = [
        f"| rows | {unit} | of the limit | " + " | ".join(f"over {_PEERS[name]}" for name in names) + " |",
        "|---|--:|--:|" + "--:|" * len(names),
    ]
    for p in points:
        mine = p["results"]["gander"]
        figure = f"{mine['tbps']:.2f}" if unit == "TB/s" else f"{mine['us']:.1f}"
        others = [f"{r[0]:.2f}" if (r := _ratios([p], name)) else "-" for name in names]
        lines.append(_row(f"{p['m']} x {p['n']}", figure, f"{mine['ratio']:.2f}", *others))
    return "\n".join([*lines, "", _measured_where(points[0], file)])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _measured_where(point: dict, file: str) -> str:
    return f"*{_CARDS[point['environment']['device']]}, {point['dtype']}. bench/results/{file}.jsonl*"


# By mode of the record what backward() is called on.
_STEPS = {"backward": "loss", "a quarter": "loss / 4", "scaled": "scaled"}


def steps(file: str = STEP) -> str:
    """A table of cross-entropy as training calls it: time and memory by provider, for several gradients."""
    points = {p["mode"]: p for p in report.of(_read(file), "step", op="cross_entropy")}
    if missing := [mode for mode in _STEPS if mode not in points]:
        raise LookupError(f"{file}.jsonl has no step with {missing}")
    first = points["backward"]
    columns = [f"{each}, us" for each in _STEPS.values()]
    lines = [_row("", *columns, "MiB"), "|---|--:|--:|--:|--:|"]
    for name, label in _VARIANTS.items():
        each = [points[mode]["results"].get(name, {}).get("us") for mode in _STEPS]
        if None not in each:
            memory = first["results"][name]["peak MiB"]
            lines.append(_row(label, *(f"{us:.0f}" for us in each), f"{memory:.0f}"))
    shape = f"*Loss and gradient of {first['m']} x {first['n']} logits. MiB: memory besides the logits.* "
    return "\n".join([*lines, "", textwrap.fill(shape + _measured_where(first, file), 110)])


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
    (point,) = _points("linear_cross_entropy", file, "linear")
    lines = ["| | over the products | MiB |", "|---|--:|--:|"]
    for name, label in _CHUNKS.items():
        figures = point["results"].get(name, {})
        if "us" in figures:
            times_as_long = figures["us"] / point["limit"]["us"]
            lines.append(_row(label, f"{times_as_long:.2f}", f"{figures['peak MiB']:.0f}"))
    what = f"Loss and gradients of {point['m']} rows and {point['n']} classes, {sections.HIDDEN} hidden"
    what += " columns: time over that of the three matrix products alone, and memory besides the gradients."
    return "\n".join([*lines, "", textwrap.fill(f"*{what}* " + _measured_where(point, file), 110)])


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
            "[cross-entropy](docs/operators/cross_entropy.md)",
            "cross_entropy_forward",
            "cross_entropy_loss_gradient",
        ),
    ]
    lines = [
        "| operator | forward / torch | forward / QuACK | with gradient / torch | with gradient / QuACK |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, *ops in rows:
        cells = [times(op, over) for op in ops for over in ("torch", "quack")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- The table of operators ----

_LETTERS = {"L": "...", "N": "N", "H": "H", "R": "R", "S": "2 M + 1"}


def _shape(rule: str) -> str:
    """The shapes that a rule allows."""
    shapes = []
    for form in _table.SHAPES[rule].forms:
        sizes = [_LETTERS.get(letter, letter) for letter in form.sizes]
        shapes.append(f"({', '.join(sizes)}{',' if len(sizes) == 1 and sizes[0] != '...' else ''})")
    return " or ".join(dict.fromkeys(shapes))


def _dtypes(operand: _table.Operand, first: str) -> str:
    """The dtypes of an operand, which depend on whether the first one is float64."""
    if operand.dtype == "same":
        return f"that of {operand.like}"
    rule = _table.DTYPES[operand.dtype]
    wide = [name for name in rule.wide if name not in rule.narrow]
    narrow = ", ".join(rule.narrow).replace("float64", "float64 on the CPU")
    return narrow + (f"; {', '.join(wide)} if {first} is" if wide else "")


def operands(op: str) -> str:
    """A table of an operator's operands."""
    lines = ["| operand | shape | dtypes | |", "|---|---|---|---|"]
    of = _table.OPERATORS[op].operands
    for operand in of:
        kind = "result" if operand.output else "input"
        kind = f"optional {kind}" if operand.optional else kind
        lines.append(_row(operand.name, _shape(operand.shape), _dtypes(operand, of[0].name), kind))
    return "\n".join(lines)


def options(op: str) -> str:
    """A table of an operator's options, with their defaults."""
    lines = ["| option | type | default |", "|---|---|---|"]
    for option in _table.OPERATORS[op].options:
        default = {"flag": lambda v: str(bool(v)).lower(), "reduction": lambda v: _table.REDUCTIONS[int(v)]}
        default["algorithm"] = lambda v: _table.ALGORITHMS[int(v)]
        shown = default.get(option.type, lambda v: f"{v:g}")(option.default)
        lines.append(_row(option.name, _TYPES.get(option.type, "name"), shown))
    return "\n".join(lines)


_TYPES = {"flag": "bool", "real": "float", "integer": "int"}


def choices(names: tuple[str, ...]) -> str:
    """The values that an argument may have."""
    return ", ".join(f'`"{name}"`' for name in names)


@functools.cache
def _go_structs() -> dict[str, str]:
    """Go's structs by their names in lower case."""
    text = "".join(path.read_text() for path in sorted((_ROOT / "ops").glob("*_gen.go")))
    return {name.lower(): name for name in re.findall(r"^type ([A-Z]\w+) struct", text, re.MULTILINE)}


def names(*ops: str) -> str:
    """Where operators are in PyTorch, in C and in Go."""
    lines = ["| torch.ops.gander | C | Go |", "|---|---|---|"]
    for op in ops:
        owned = _table.OPERATORS[op].owned
        torch = [f"`{name}`" for name, each in _table.TORCH.items() if each.operator == op]
        go = _go_structs()[op.replace("_", "")]
        c = [f"`gander_{op}`"] + ([f"`{owned}`"] if owned else [])
        lines.append(_row("<br>".join(torch), "<br>".join(c), f"`ops.{go}`"))
    return "\n".join(lines)


# ---- The library ----

_PLACES = {  # of internal/policy's regimes: where a row lies, and who shares it
    "registers": "registers of one CTA, or of a part of it",
    "cluster-registers": "registers of a cluster of CTAs",
    "shared-memory": "shared memory of one CTA",
    "cluster-shared-memory": "shared memory of a cluster of CTAs",
    "persistent-loop": "registers of a part of a warp, which loads its next row meanwhile",
    "persistent-lanes": "registers of a part of a warp, which keeps its sums of dw there too",
    "persistent-ring": "a ring in shared memory: CTAs or clusters load their next rows meanwhile",
    "grid-cooperative": "rings in shared memory of all SMs, which share every row",
    "grid-shared-memory": "shared memory of all SMs, which share a few rows",
    "stream": "nowhere: it is read once and not kept",
    "two-passes": "nowhere: it is read twice, in chunks",
    "by-columns": "nowhere: sums of rows first, then dx and dw by columns",
    "elementwise": "nowhere: its statistics are known, and elements are independent",
}


def kernels(op: str, device: str = "h100", dtype: str = "bfloat16") -> str:
    """A table of which kernels serve which rows, for many rows and for few."""
    has_algorithms = len(gander.algorithms(op)) > 1
    lines = ["| M | N | algorithm | where a row lies |", "|--:|--:|---|---|"]
    if not has_algorithms:
        lines = ["| M | N | where a row lies |", "|--:|--:|---|"]
    for m in (32768, 4):
        found: list[list] = []
        for exponent in range(4, 23):
            n = 1 << exponent
            if m * n > 1 << 31:
                break
            text = gander.explain(op, shape=(m, n), dtype=dtype, device=device)
            policy = re.search(r"^policy: .*", text, re.MULTILINE)
            regime = next(word for word in policy[0].split() if word in _PLACES)
            algorithm = re.match(r"auto takes (\w+)", text)
            key = algorithm[1] if algorithm else "auto", _PLACES[regime]
            if found and found[-1][2] == key:
                found[-1][1] = n
            else:
                found.append([n, n, key])
        for i, (first, last, (algorithm, place)) in enumerate(found):
            lengths = f"to {last}" if i == 0 else f"{first}" if first == last else f"{first} to {last}"
            lines.append(_row(f"{m}", lengths, *([algorithm] if has_algorithms else []), place))
    where = f"{device.upper()}, {dtype}, rows of powers of two whose operands are aligned to 16 bytes"
    return "\n".join([*lines, "", f"*{where}. From gander.explain.*"])


def algorithms(op: str = "softmax") -> str:
    """A table of the names of algorithms, and what each does."""
    lines = ["| name | what it does |", "|---|---|"]
    lines += [_row(f"`{each.name}`", each.what) for each in gander.algorithms(op)]
    return "\n".join(lines)


def refusal(call: str, *before: str) -> str:
    """A call that is refused, and what it says. before: the assignments that it needs."""
    import numpy
    import torch

    names = {"gander": gander, "torch": torch, "np": numpy}
    for line in before:
        exec(line, names)
    try:
        eval(call, names)
    except Exception as error:
        said = textwrap.fill(f"{type(error).__name__}: {error}", 72, break_long_words=False)
        typed = "".join(f">>> {line}\n" for line in (*before, call))
        return f"```pycon\n{typed}{said}\n```"
    raise ValueError(f"{call} is not refused")


def accuracy(reference: str) -> str:
    """The bounds of the tests of accuracy, beside the operator of torch that they are derived from."""
    text = (
        f"The tests compare with float64. The root mean square error is at most {tolerance.RMS:g} times that "
        f"of {reference}. The largest error is at most {tolerance.MAXIMUM:g} times its largest, or one unit "
        "in the last place."
    )
    return textwrap.fill(text, 110, break_on_hyphens=False)


def accuracy_of_linear() -> str:
    """The bounds of linear_cross_entropy's gradients by the number of chunks."""
    lines = ["| chunks | dx | dw |", "|--:|--:|--:|"]
    lines += [_row(f"{n}", f"{tolerance.RMS:g}", f"{most:g}") for n, most in tolerance.LINEAR_DW.items()]
    return "\n".join(lines)


def torch_releases() -> str:
    """The releases of torch that the tests run with."""
    from gander._torch import fast

    return ", ".join(fast.TESTED)


# ---- Sources ----

_LANGUAGES = {".c": "c", ".h": "c", ".cpp": "cpp", ".go": "go", ".py": "python"}


def source(path: str, section: str = "") -> str:
    """A program that the tests run, or what lies between two comments in it that name the section:
    [docs: NAME and docs: NAME]."""
    text = (_ROOT / path).read_text()
    if section:
        found = re.search(rf"^.*\[docs: {section}\b.*\n(.*?)^.*\bdocs: {section}\].*$", text, re.M | re.S)
        if not found:
            raise LookupError(f"{path} has no section {section}")
        text = textwrap.dedent(found[1])
    language = _LANGUAGES[Path(path).suffix]
    return f"```{language}\n{text.strip()}\n```\n\n*{path}*"


# ---- Pictures ----


def pictures() -> dict[str, str]:
    """By file name the pictures of docs/images that come from records."""
    return {
        f"{name}.svg": _svg([p for op in ops for p in _points(op, file, section, dtype="bfloat16")])
        for name, (file, section, *ops) in _PICTURES.items()
    }


_PICTURES = {
    "softmax": (GRID, "throughput", "softmax_forward", "softmax_backward"),
    "rmsnorm": (GRID, "throughput", "rmsnorm_forward", "rmsnorm_backward"),
    "rmsnorm_residual": (NORMS, "norms", "rmsnorm_residual_forward", "rmsnorm_residual_backward"),
    "layernorm": (NORMS, "norms", "layernorm_forward", "layernorm_backward"),
    "cross_entropy": (GRID, "throughput", "cross_entropy_forward", "cross_entropy_loss_gradient"),
}


def _svg(points: list[dict]) -> str:
    file = io.BytesIO()
    plots.draw_throughput([p | {"section": "throughput"} for p in points], file)
    return file.getvalue().decode()
