"""What pages may state: facts of the table of operators, of the library, and of the records of bench/results.

fill.py evaluates the marks of a page with these names. Each function returns Markdown.
"""

import functools
import io
import math
import re
import statistics
import sys
import textwrap
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "python"), str(_ROOT / "bench")]

import gander  # noqa: E402
from gander import _table  # noqa: E402
from gander_bench import plots, records, report  # noqa: E402

# The records from which each kind of figure is taken.
GRID = "h100-8a2845d"  # throughput over the row lengths, beside the peers
NORMS = "h200-9bdc7ab"  # the norms with their options
LINEAR = "h200-9bdc7ab"
MODELS = {"softmax": "h200-727a294", "rmsnorm": "h200-9bdc7ab", "cross_entropy": "h200-1ed7d17"}

_CARDS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
_PEERS = {"quack": "QuACK", "liger": "Liger", "cudnn": "cuDNN", "torch": "torch"}


# ---- Records ----

_OPERATORS = ("softmax", "rmsnorm", "cross_entropy")


@functools.cache
def _read(file: str) -> list[dict]:
    return report.latest(records.read(_ROOT / "bench/results" / f"{file}.jsonl"))


def _points(op: str, file: str, section: str, **wanted) -> list[dict]:
    found = report.of(_read(file), section, op=op, **wanted)
    if not found:
        raise LookupError(f"{file}.jsonl has no point of {op} in section {section} with {wanted}")
    return found


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
    environment = report.newest(_read(file))["environment"]
    versions = {name: version for r in _read(file) for name, version in r["versions"].items()}
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


def first_call_ms() -> str:
    """The median time of a function's first call on a new shape, in ms."""
    results = report.of(_read(GRID), "load")[-1]["results"]["gander"]
    return f"{statistics.median(ms for op in _OPERATORS for ms in results[op]['new']):.1f}"


def speed(op: str, file: str = GRID, section: str = "throughput", dtype: str = "bfloat16") -> str:
    """A table of the throughput by shape, beside the limit and the peers."""
    points = _points(op, file, section, dtype=dtype)
    names = [name for name in _PEERS if any(name in p["results"] for p in points)]
    lines = [
        "| rows | TB/s | of the limit | " + " | ".join(f"over {_PEERS[name]}" for name in names) + " |",
        "|---|--:|--:|" + "--:|" * len(names),
    ]
    for p in points:
        mine = p["results"]["gander"]
        others = [f"{r[0]:.2f}" if (r := _ratios([p], name)) else "" for name in names]
        cells = [f"{p['m']} x {p['n']}", f"{mine['tbps']:.2f}", f"{mine['ratio']:.2f}", *others]
        lines.append("| " + " | ".join(cells) + " |")
    where = f"{_CARDS[points[0]['environment']['device']]}, {dtype}. bench/results/{file}.jsonl"
    return "\n".join([*lines, "", f"*{where}*"])


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


# ---- The limit, and where gander stands (docs/how.md and docs/performance.md) ----

# Later files replace the points that earlier ones share with them.
_SHAPES_OF_MODELS = ("h200-ace71b4", "h200-727a294", "h200-1ed7d17", "h200-d162d87-few")
_IN_PLACE = "h200-116c1f8"  # fused_add_rmsnorm, beside flashinfer
_HOST = {"H100": GRID, "H200": "h200-fece478-host"}
_STEPS = "h200-636b39f-step"
_ALGORITHMS = "h100-ff72783-algorithms"
_TRAFFIC = {  # an operator that moves it
    "1 read": "cross_entropy_forward",
    "1 read, 1 written": "softmax_forward",
    "2 read, 1 written": "softmax_backward",
}
_DATASHEET = {"H100": 3352, "H200": 4917}  # GB/s, as ops/devices.go has them


def _table_of(columns: list[str], rows: list[list[str]], note: str, labels: int = 1) -> str:
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * labels + "--:|" * (len(columns) - labels))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", textwrap.fill(f"*{note}*", 110, break_on_hyphens=False)])


def _named(*files: str) -> str:
    return ", ".join(f"bench/results/{file}.jsonl" for file in files)


def _point(op: str, m: int, n: int, file: str, section: str, dtype: str) -> dict:
    (found,) = _points(op, file, section, m=m, n=n, dtype=dtype)
    return found


def _figures(point: dict, who: str) -> dict:
    found = point.get("limit") if who == "limit" else point["results"].get(who)
    if not found or "us" not in found:
        raise LookupError(f"no figures of {who} for {point['op']} of {point['m']} x {point['n']}")
    return found


def tbps(op: str, m: int, n: int, who: str = "gander", file: str = GRID, dtype: str = "bfloat16") -> str:
    """The TB/s of a provider, or of the limit, at a point of the grid."""
    return f"{_figures(_point(op, m, n, file, 'throughput', dtype), who)['tbps']:.2f}"


def us(op: str, m: int, n: int, who: str = "gander", file: str = GRID, section: str = "few") -> str:
    """The microseconds of a provider, or of the limit, at a point in bfloat16."""
    return f"{_figures(_point(op, m, n, file, section, 'bfloat16'), who)['us']:.1f}"


def share(op: str, m: int, n: int, who: str = "gander", file: str = GRID, dtype: str = "bfloat16") -> str:
    """The share of the limit of a provider at a point of the grid."""
    return f"{_figures(_point(op, m, n, file, 'throughput', dtype), who)['ratio']:.2f}"


def limits(*files: str) -> str:
    """A table of the limit by traffic and row length, in bfloat16, beside the datasheet's bandwidth."""
    lengths = (256, 1024, 4096, 16384, 65536)
    rows = []
    for file in files:
        for traffic, op in _TRAFFIC.items():
            found = [_figures(_point(op, 32768, n, file, "throughput", "bfloat16"), "limit") for n in lengths]
            part = found[-1]["tbps"] / (_DATASHEET[card(file)] / 1000)
            rows.append([card(file), traffic, *(f"{each['tbps']:.2f}" for each in found), f"{part:.2f}"])
    columns = ["GPU", "tensors", *(f"N = {n}" for n in lengths), "of the datasheet's"]
    note = f"TB/s of plain kernels, M = 32768, bfloat16. The last column is for N = 65536. {_named(*files)}"
    return _table_of(columns, rows, note, labels=2)


def exponentials(op: str = "softmax_forward", per_element: int = 1, file: str = GRID) -> str:
    """The percentage of a GPU's exponentials that an operator needs at the speed that it reaches.

    132 SMs compute 16 in each clock (CUDA's programming guide), of 1.98 GHz at most (NVIDIA's datasheet).
    """
    point = _point(op, 32768, 4096, file, "throughput", "bfloat16")
    each_second = per_element * point["m"] * point["n"] / (_figures(point, "gander")["us"] * 1e-6)
    return f"{100 * each_second / (132 * 16 * 1.98e9):.0f} %"


def over_the_grid(file: str = GRID, dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")) -> str:
    """A table of the share of the limit and of the speed over each peer, by operator: geometric means."""
    all_points = [p for p in report.of(_read(file), "throughput") if p["dtype"] in dtypes]
    names = [name for name in ("torch", "quack", "liger") if any(_ratios([p], name) for p in all_points)]
    rows = []
    for op in report.unique(p["op"] for p in all_points):
        points = [p for p in all_points if p["op"] == op]
        shares = [p["results"]["gander"]["ratio"] for p in points]
        means = [_geomean(points, name) for name in names]
        cells = ["" if mean is None else f"{mean:.2f}" for mean in means]
        worst = f"{min(shares):.2f}"
        rows.append([report.TITLES[op], f"{statistics.geometric_mean(shares):.2f}", worst, *cells])
    columns = ["operator", "share of the limit", "at worst", *(f"over {_PEERS[name]}" for name in names)]
    note = f"{card(file)}, {', '.join(dtypes)}, geometric means over the row lengths. {_named(file)}"
    return _table_of(columns, rows, note)


def _of_models(files: tuple[str, ...] = _SHAPES_OF_MODELS, section: str = "models") -> dict:
    cases: dict = {}
    for file in files:
        cases |= models.by_case(_read(file), section)
    return cases


def over_the_models() -> str:
    """A table of the same over the shapes of language models, of medians over the runs."""
    cases = _of_models()
    rows = []
    for op in report.unique(case.op for case in cases):
        runs = {case: found for case, found in cases.items() if case.op == op}
        pairs = {
            name: [
                theirs / models.median(found, "gander", "us")
                for found in runs.values()
                if (theirs := models.median(found, name, "us"))
            ]
            for name in ("torch", "quack")
        }
        many = [found for case, found in runs.items() if case.m >= models.TRAINING[0]]
        shares = [models.median(found, "gander", "ratio") for found in many]
        means = [statistics.geometric_mean(pairs[name]) for name in pairs]
        cells = [f"{mean:.2f}" for mean in (statistics.geometric_mean(shares), *means)]
        rows.append([report.TITLES[op], str(len(runs)), *cells])
    columns = ["operator", "shapes", "share of the limit", "over torch", "over QuACK"]
    least = models.TRAINING[0]
    note = f"H200, geometric means; shares of the limit from {least} rows on. {_named(*_SHAPES_OF_MODELS)}"
    return _table_of(columns, rows, note)


def _behind(cases: dict) -> dict:
    """The cases at which gander is slower than the best other in every run, with the best run's verdict."""
    found = {case: models.against_others(runs) for case, runs in cases.items()}
    return {case: verdict for case, verdict in found.items() if verdict is not None and not verdict.met()}


def level_with_others() -> str:
    """At how many shapes of models no other one is faster, of how many."""
    cases = _of_models()
    return f"{len(cases) - len(_behind(cases))} of {len(cases)}"


def slower() -> str:
    """A table of the shapes at which another one is faster by more than 2 %, or by more than 0.3 us where a
    call takes less than 20 us, in the best of the runs."""
    cases = _of_models() | _of_models((_IN_PLACE,), "norms")
    rows = []
    for case, verdict in _behind(cases).items():
        best = min(
            (result["us"], name)
            for run in cases[case]
            for name, result in run["results"].items()
            if not name.startswith("gander") and "us" in result
        )[1]
        weights = f", {case.weight} weights" if case.weight else ""
        title = f"{report.TITLES[case.op]}{weights}"
        speed = f"{verdict.measured:.2f}"
        rows.append([title, f"{case.m} x {case.n}", case.dtype, speed, _PEERS.get(best, best)])
    columns = ["operator", "rows", "dtype", "speed over the other's", "other"]
    return _table_of(columns, rows, f"H200. {_named(*_SHAPES_OF_MODELS, _IN_PLACE)}", labels=3)


def host() -> str:
    """A table of the host's time of a call on a 4 x 256 tensor."""
    rows = []
    for gpu, file in _HOST.items():
        for record in report.of(_read(file), "host"):
            if record["mode"] == "forward and backward":
                continue
            taken = {name: each["us"] for name, each in record["results"].items() if "us" in each}
            cells = [f"{taken['gander']:.1f}", f"{taken['torch']:.1f}"]
            cells.append(f"{taken['quack']:.1f}" if "quack" in taken else "")
            cells.append(f"{record['results']['gander']['over torch']:.2f}")
            cells.append(f"{taken['gander.compile'] / taken['torch.compile']:.2f}")
            rows.append([gpu, report.TITLES[record["op"]], record["mode"], *cells])
    columns = ["GPU", "function", "call", "gander, us", "torch, us", "QuACK, us", "gander / torch"]
    note = f"4 x 256 bfloat16 tensors. {_named(*_HOST.values())}"
    return _table_of([*columns, "both compiled"], rows, note, labels=3)


def host_us(op: str, who: str = "gander", gpu: str = "H200", mode: str = "forward") -> str:
    """The host's microseconds of a call on a 4 x 256 tensor."""
    (found,) = _points(op, _HOST[gpu], "host", mode=mode)
    return f"{found['results'][who]['us']:.1f}"


def first_call(op: str = "softmax") -> str:
    """The milliseconds of a call on a shape that the process has not seen, the median of six."""
    (found,) = report.of(_read(GRID), "load")
    return f"{statistics.median(found['results']['gander'][op]['new']):.2f}"


def few(m: int = 4, file: str = GRID) -> str:
    """A table of the microseconds of a few long rows, beside QuACK and a plain kernel."""
    rows = []
    for p in report.of(_read(file), "few", m=m, dtype="bfloat16"):
        taken = {name: each["us"] for name, each in p["results"].items() if "us" in each}
        cells = [f"{taken['gander']:.1f}"]
        cells += [f"{taken[name]:.1f}" if name in taken else "" for name in ("quack", "torch")]
        rows.append([report.TITLES[p["op"]], f"{m} x {p['n']}", *cells, f"{p['limit']['us']:.1f}"])
    if not rows:
        raise LookupError(f"{file}.jsonl has no few rows of M = {m}")
    columns = ["operator", "rows", "gander, us", "QuACK, us", "torch, us", "limit, us"]
    return _table_of(columns, rows, f"{card(file)}, bfloat16. {_named(file)}", labels=2)


def steps() -> str:
    """A table of the microseconds of cross-entropy and its backward, by what is wanted of it."""
    names = {
        "gander": "gander",
        "gander-upstream": "`upstream=`",
        "gander-remember": "`remember=True`",
        "gander-two-passes": "`one_pass=False`",
        "torch": "torch",
    }
    rows = []
    for p in report.of(_read(_STEPS), "step"):
        if p["mode"] in ("backward", "a quarter", "scaled"):
            taken = [f"{p['results'][name]['us']:.0f}" for name in names]
            rows.append([f"`{report._STEPS[p['mode']]}`", *taken])
    note = f"us on an {card(_STEPS)}, {p['m']} x {p['n']} {p['dtype']}. {_named(_STEPS)}"
    return _table_of(["step", *names.values()], rows, note)


def training(file: str, model: str = "small") -> str:
    """A table of a step of training: its milliseconds and its memory, uncompiled and compiled."""
    found = report.of(_read(file), "train", model=model, on="cuda")
    results = {name: each for r in found for name, each in r["results"].items() if "ms" in each}
    if not results:
        raise LookupError(f"{file}.jsonl has no training of {model}")
    rows = []
    for name in report.unique(name.removesuffix(".compile") for name in sorted(results)):
        both = results.get(name), results.get(f"{name}.compile")
        cells = [(f"{each['ms']:.0f}", f"{each['peak_gib']:.1f}") if each else ("", "") for each in both]
        rows.append([name, *cells[0], *cells[1]])
    first = found[0]
    size = report.train_title(found).split(",")[0].removeprefix("Training ")
    note = f"{card(file)}, {size}, {first['batch']} x {first['sequence']} tokens, {first['dtype']}"
    columns = ["contestant", "ms a step", "GiB", "compiled: ms a step", "GiB"]
    return _table_of(columns, rows, f"{note}. {_named(file)}")


_CPUS = {"Intel Xeon": "cpu-xeon-2-threads-5b9b1e1", "AMD EPYC": "cpu-2-threads-fece478"}
_ON_CPUS = {
    "softmax": ("softmax_forward",),
    "its backward": ("softmax_backward",),
    "RMSNorm, forward and backward": ("rmsnorm_forward", "rmsnorm_backward"),
    "cross-entropy, with and without gradient": ("cross_entropy_forward", "cross_entropy_loss_gradient"),
}


def _range(ratios: list[float]) -> str:
    return " to ".join(
        f"{r:.2f}" if r < 1 else f"{r:.1f}" if r < 10 else f"{r:.0f}" for r in (min(ratios), max(ratios))
    )


def cpus(n: int = 4096) -> str:
    """A table of the speed over torch's and torch.compile's on each CPU, over all numbers of rows."""
    rows = []
    for title, ops in _ON_CPUS.items():
        cells = []
        for over in ("torch", "torch.compile"):
            for file in _CPUS.values():
                points = [p for op in ops for p in report.of(_read(file), "cpu", op=op, n=n)]
                cells.append(_range(_ratios(points, over)))
        rows.append([title, *cells])
    columns = [f"over {over}, {name}" for over in ("torch", "torch.compile") for name in _CPUS]
    threads = _read(next(iter(_CPUS.values())))[-1]["environment"]["threads"]
    note = f"{threads} threads, AVX-512, rows of {n}. {_named(*_CPUS.values())}"
    return _table_of(["", *columns], rows, note)


def invariance() -> str:
    """A table of how many times as long a call with batch_invariant=True takes."""
    points = report.of(_read(GRID), "invariant", dtype="bfloat16")
    shapes = report.unique((p["m"], p["n"]) for p in points)
    rows = []
    for op in report.unique(p["op"] for p in points):
        taken = {(p["m"], p["n"]): p["results"] for p in points if p["op"] == op}
        both = [
            [taken.get(shape, {}).get(name, {}).get("us") for name in ("gander-batch-invariant", "gander")]
            for shape in shapes
        ]
        rows.append(
            [report.TITLES[op], *("" if None in pair else f"{pair[0] / pair[1]:.2f}" for pair in both)]
        )
    columns = ["operator", *(f"{m} x {n}" for m, n in shapes)]
    return _table_of(columns, rows, f"{card()}, bfloat16, times the call without it. {_named(GRID)}")


def auto_is_best(within: float = 1.03) -> str:
    """At how many points auto is within a factor of the best forced algorithm, of how many."""
    near = []
    for p in report.of(_read(_ALGORITHMS), "algorithms"):
        taken = {name: each["us"] for name, each in p["results"].items() if "us" in each}
        mine = taken.pop("gander")
        if taken:
            near.append(mine / min(taken.values()) <= within)
    return f"{sum(near)} of {len(near)}"


# ---- The table of operators ----

_LETTERS = {"L": "...", "N": "N", "H": "H", "R": "R", "S": "2 M + 1"}


def _shape(rule: str) -> str:
    """The shapes that a rule allows."""
    shapes = []
    for form in _table.SHAPES[rule].forms:
        sizes = [_LETTERS.get(letter, letter) for letter in form.sizes]
        shapes.append(f"({', '.join(sizes)}{',' if len(sizes) == 1 and sizes[0] != '...' else ''})")
    return " or ".join(dict.fromkeys(shapes))


def _dtypes(operand: _table.Operand) -> str:
    if operand.dtype == "same":
        return f"that of {operand.like}"
    rule = _table.DTYPES[operand.dtype]
    wide = [name for name in rule.wide if name not in rule.narrow]
    beside = f"; where x is float64, {', '.join(wide)}" if wide else ""
    return ", ".join(rule.narrow) + beside


def operands(op: str) -> str:
    """A table of an operator's operands."""
    lines = ["| operand | shape | dtypes | |", "|---|---|---|---|"]
    for operand in _table.OPERATORS[op].operands:
        kind = "result" if operand.output else "input"
        kind = f"optional {kind}" if operand.optional else kind
        lines.append(f"| {operand.name} | {_shape(operand.shape)} | {_dtypes(operand)} | {kind} |")
    return "\n".join(lines)


def options(op: str) -> str:
    """A table of an operator's options, with their defaults."""
    lines = ["| option | type | default |", "|---|---|---|"]
    for option in _table.OPERATORS[op].options:
        default = {"flag": lambda v: str(bool(v)).lower(), "reduction": lambda v: _table.REDUCTIONS[int(v)]}
        default["algorithm"] = lambda v: _table.ALGORITHMS[int(v)]
        shown = default.get(option.type, lambda v: f"{v:g}")(option.default)
        lines.append(f"| {option.name} | {option.type} | {shown} |")
    return "\n".join(lines)


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
        c = f"`gander_{op}`" + (f", `{owned}`" if owned else "")
        lines.append(f"| {', '.join(torch)} | {c} | `ops.{go}` |")
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
    lines = ["| M | N | algorithm | where a row lies |", "|--:|--:|---|---|"]
    for m in (32768, 4):
        found: list[list] = []
        for exponent in range(4, 23):
            n = 1 << exponent
            if m * n > 1 << 31:
                break
            regime, algorithm = _regime(op, m, n, device, dtype)
            key = algorithm, _PLACES[regime]
            if found and found[-1][2] == key:
                found[-1][1] = n
            else:
                found.append([n, n, key])
        for i, (first, last, (algorithm, place)) in enumerate(found):
            lengths = f"to {last}" if i == 0 else f"{first}" if first == last else f"{first} to {last}"
            lines.append(f"| {m} | {lengths} | {algorithm} | {place} |")
    where = f"{device.upper()}, {dtype}, rows of powers of two whose operands are aligned to 16 bytes"
    return "\n".join([*lines, "", f"*{where}. From gander.explain.*"])


def explained(
    op: str, shape: tuple[int, ...], device: str = "h100", dtype: str = "bfloat16", **choice
) -> str:
    """What gander.explain says."""
    text = gander.explain(op, shape=shape, dtype=dtype, device=device, **choice)
    return f"```text\n{text.strip()}\n```"


def refused_algorithm(op: str, shape: tuple[int, int], algorithm: str, device: str = "h100") -> str:
    """What is said of an algorithm that cannot serve a shape."""
    try:
        gander.explain(op, shape=shape, dtype="bfloat16", device=device, algorithm=algorithm)
    except NotImplementedError as error:
        return f"```text\n{textwrap.fill(f'NotImplementedError: {error}', 100)}\n```"
    raise LookupError(f"{algorithm} serves {op} of {shape}")


def regimes() -> str:
    """A table of the policy's regimes."""
    return "\n".join(
        ["| regime | a row lies in |", "|---|---|", *(f"| {k} | {v} |" for k, v in _PLACES.items())]
    )


def by_device(
    op: str, *shapes: tuple[int, int], devices: tuple[str, ...] = ("h100", "b200", "rtx4090")
) -> str:
    """A table of the algorithm and of the place of a row on several devices."""
    rows = []
    for shape in shapes:
        for device in devices:
            regime, algorithm = _regime(op, *shape, device)
            rows.append([f"{shape[0]} x {shape[1]}", device, algorithm, _PLACES[regime]])
    lines = ["| rows | device | algorithm | where a row lies |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", f"*{op}, bfloat16. From gander.explain.*"])


@functools.cache
def _explanation(op: str, m: int, n: int, device: str, dtype: str) -> str:
    return gander.explain(op, shape=(m, n), dtype=dtype, device=device)


def _regime(op: str, m: int, n: int, device: str = "h100", dtype: str = "bfloat16") -> tuple[str, str]:
    """The regime of the policy by which a call is planned, and its algorithm."""
    text = _explanation(op, m, n, device, dtype)
    policy = re.search(r"^policy: .*", text, re.MULTILINE)
    algorithm = re.match(r"auto takes (\w+)", text)
    return next(word for word in policy[0].split() if word in _PLACES), algorithm[1] if algorithm else "auto"


def algorithms(op: str = "softmax") -> str:
    """A table of the names of algorithms, what each does, and which rows it serves."""
    lines = ["| name | what it does | serves |", "|---|---|---|"]
    lines += [f"| `{each.name}` | {each.what} | {each.limits} |" for each in gander.algorithms(op)]
    return "\n".join(lines)


def refusal(call: str) -> str:
    """A call that is refused, and what it says."""
    import numpy
    import torch

    try:
        eval(call, {"gander": gander, "torch": torch, "np": numpy})
    except Exception as error:
        said = textwrap.indent(textwrap.fill(f"{type(error).__name__}: {error}", 88), "# ")
        return f"```python\n{call}\n{said}\n```"
    raise ValueError(f"{call} is not refused")


def torch_releases() -> str:
    """The releases of torch that the tests run with."""
    from gander._torch import fast

    return ", ".join(fast.TESTED)


# ---- Sources ----

_LANGUAGES = {".c": "c", ".h": "c", ".cpp": "cpp", ".go": "go", ".py": "python"}


def source(path: str, function: str = "") -> str:
    """A program that the tests run, or the body of one of its functions."""
    text = (_ROOT / path).read_text()
    if function:
        found = re.search(rf"^[^\s].*\b{function}\([^)]*\)[^\n]*\{{\n(.*?)^\}}$", text, re.M | re.S)
        if not found:
            raise LookupError(f"{path} has no function {function}")
        text = textwrap.dedent(found[1]).expandtabs(4)
    language = _LANGUAGES[Path(path).suffix]
    return f"```{language}\n{text.strip()}\n```\n\n*{path}*"


_C_ITEMS = re.compile(  # of gander.h: a heading, a comment, an option struct, another type, a function
    r"""^/\*\ ----\ (?P<title>.*?)\ ----\n(?P<about>.*?)\*/
    |^/\*(?P<comment>.*?)\*/$
    |^typedef\ struct\ \{(?:(?!^\}).)*^\}\ gander_\w+_options;\n\#define\ \w+\ \\\n[^\n]*\n
    |^(?P<type>typedef\ (?:struct|enum)\ \{(?:(?!^\}).)*^\}\ \w+;|typedef\b[^;{]*;)
    |^(?P<function>[a-z][\w\ *]*\b(?P<name>gander_\w+)\([^;]*\);)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


def _prose(comment: str) -> str:
    """A comment of gander.h as Markdown: operands become a list."""
    text = "\n".join(line.strip().removeprefix("*").removeprefix(" ") for line in comment.splitlines())
    text = re.sub(r"(?<=\n\n)((?:  .*\n)+)", lambda code: f"```c\n{textwrap.dedent(code[1])}```\n", text)
    first, *operands = re.split(r"^  (\w+): ", text, flags=re.MULTILINE)
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return "\n".join([first.strip(), "", *(f"- **{name}**: {what.strip()}" for name, what in pairs)]).strip()


def c_conventions() -> str:
    """What holds for all functions of gander.h: the head of the file."""
    text = (_ROOT / "capi/gander.h").read_text()
    lines = [line.strip().removeprefix("*").strip() for line in text[: text.index("*/")].splitlines()]
    _, *found = re.split(r"^(\w[\w ]*)\. {2,}", "\n".join(lines), flags=re.MULTILINE)
    pairs = zip(found[::2], found[1::2], strict=True)
    return "\n".join(f"- **{name}.** {what.strip()}" for name, what in pairs)


def c_reference() -> str:
    """The functions of gander.h, each with its documentation and its option struct."""
    text = (_ROOT / "capi/gander.h").read_text()
    made, comment, before = [], "", ""
    for item in _C_ITEMS.finditer(text, text.index('extern "C" {')):
        if item["comment"] is not None:
            if not item["comment"].strip().startswith(("generated:", "end of what")):
                comment = _prose(item["comment"])
            continue
        if item["title"]:
            made.append(f"## {item['title']}\n\n{_prose(item['about'])}")
        elif item["function"]:
            code = f"```c\n{before}{item['function']}\n```"
            made.append(f"### {item['name']}\n\n{comment}\n\n{code}")
        elif item["type"] and comment:
            made.append(f"{comment}\n\n```c\n{item['type']}\n```")
        else:
            before += item[0].strip() + "\n\n"
            continue
        comment = before = ""
    return "\n\n".join(made)


# ---- Pictures ----


def pictures() -> dict[str, str]:
    """By file name the pictures of docs/images that come from records, and from the planner."""
    ops = {op for _, *both in _PICTURES for op in both}
    points = [p for p in _read(GRID) if p["section"] == "throughput" and p["dtype"] == "bfloat16"]
    assert ops <= {p["op"] for p in points}, f"{GRID}.jsonl lacks some of {ops}"
    made = {
        f"{name}.svg": _svg([p for p in points if p["op"] in (forward, backward)])
        for name, forward, backward in _PICTURES
    }
    return made | {"ladder.svg": _ladder()}


_LADDER = {
    "softmax": "softmax",
    "softmax_bwd": "its backward",
    "rmsnorm": "RMSNorm",
    "rmsnorm_bwd": "its backward",
    "cross_entropy": "cross-entropy",
    "cross_entropy_fwd_dx": "with gradient",
}
_STEPS_OF_THE_LADDER = {  # a color and a legend by regime
    "warp": ("#cfe8f7", "registers of a warp, or of a part of it"),
    "registers": ("#8cc4e8", "registers of a CTA"),
    "cluster-registers": ("#3f86bd", "registers of a cluster"),
    "shared-memory": ("#bfe5c4", "shared memory of a CTA"),
    "cluster-shared-memory": ("#5fb374", "shared memory of a cluster"),
    "persistent": ("#f6dc8a", "persistent CTAs or clusters"),
    "grid": ("#e8995c", "shared memory of all SMs"),
    "none": ("#d0d0d0", "not kept: read once, or twice"),
}
_KIND = {"stream": "none", "two-passes": "none", "by-columns": "none"}


def _kind(op: str, m: int, n: int) -> str:
    """The step of the ladder that takes a row."""
    regime, _ = _regime(op, m, n)
    if regime == "registers":
        text = _explanation(op, m, n, "h100", "bfloat16")
        threads = re.search(r"registers of (\d+) threads", text)
        return "warp" if int(threads[1]) <= 32 else regime
    return _KIND.get(regime) or next(
        (kind for kind in ("persistent", "grid") if regime.startswith(kind)), regime
    )


def _ladder() -> str:
    """A picture of which kernel takes a row, by its length, for many rows and for four."""
    first, last, left, right = 4, 22, 118, 548

    def x(n: float) -> float:
        return left + (right - left) * (math.log2(n) - first) / (last - first)

    lengths = sorted({round(2 ** (k / 4) / 8) * 8 for k in range(4 * first, 4 * last + 1)})
    parts, used, y = [], set(), 30
    for title, rows in (("Many rows (2^31 elements, at most 32768 rows)", 32768), ("Four rows", 4)):
        parts.append(f'<text x="12" y="{y}" font-weight="600">{title}</text>')
        y += 10
        for op, name in _LADDER.items():
            parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{name}</text>')
            found = [(n, _kind(op, min(rows, (1 << 31) // n), n)) for n in lengths]
            used |= {kind for _, kind in found}
            runs = [pair for i, pair in enumerate(found) if not i or pair[1] != found[i - 1][1]]
            ends = [n for n, _ in runs[1:]] + [1 << last]
            for (start, kind), end in zip(runs, ends, strict=True):
                color = _STEPS_OF_THE_LADDER[kind][0]
                parts.append(
                    f'<rect x="{x(start):.1f}" y="{y}" width="{x(end) - x(start):.1f}" height="22" '
                    f'fill="{color}" stroke="#fff"/>'
                )
            y += 26
        for exponent in range(first, last + 1, 3):
            n = 1 << exponent
            label = f"{n >> 20} Mi" if n >> 20 else f"{n >> 10} Ki" if n >> 10 else str(n)
            parts.append(
                f'<text x="{x(n):.1f}" y="{y + 14}" text-anchor="middle" font-size="12">{label}</text>'
            )
            parts.append(f'<path d="M{x(n):.1f} {y - 2}v4" stroke="#666"/>')
        y += 44
    parts.append(
        f'<text x="12" y="{y - 6}" font-weight="600">Where a row lies while it waits for its sum</text>'
    )
    for i, kind in enumerate(kind for kind in _STEPS_OF_THE_LADDER if kind in used):
        color, legend = _STEPS_OF_THE_LADDER[kind]
        column, line = 12 + 278 * (i // 4), y + 8 + 24 * (i % 4)
        parts.append(f'<rect x="{column}" y="{line}" width="18" height="16" fill="{color}"/>')
        parts.append(f'<text x="{column + 26}" y="{line + 13}" font-size="12.5">{legend}</text>')
    height = y + 116
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 568 {height}" font-size="13" fill="#222" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif">\n'
        f'<rect x=".5" y=".5" width="567" height="{height - 1}" rx="6" fill="#fff" stroke="#ddd"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


_PICTURES = (
    ("softmax", "softmax_forward", "softmax_backward"),
    ("rmsnorm", "rmsnorm_forward", "rmsnorm_backward"),
    ("cross_entropy", "cross_entropy_forward", "cross_entropy_loss_gradient"),
)


def _svg(points: list[dict]) -> str:
    file = io.BytesIO()
    plots.draw_throughput(points, file)
    return file.getvalue().decode()
