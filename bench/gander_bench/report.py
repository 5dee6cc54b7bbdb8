"""Tables of what was measured, for a terminal and for bench/RESULTS.md."""

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from . import models
from .models import best_other

# gander's targets: host time of a call over torch's own, without and with gradient; milliseconds; megabytes.
HOST_TARGETS = {
    ("softmax", "forward"): 1.0,
    ("rmsnorm", "forward"): 0.75,
    ("cross_entropy", "forward"): 0.5,
    ("softmax", "with gradient"): 1.4,
    ("rmsnorm", "with gradient"): 1.0,
    ("cross_entropy", "with gradient"): 0.65,
}
# What is measured on the CPU besides blocks of calls whose results lie in memory that is reused.
IN_TURNS, NEW_MEMORY = "us in turns", "us in new memory"
LIBRARY_MS, NEW_SHAPE_MS, LIBRARY_MEGABYTES = 20, 1, 40

TITLES = {
    "softmax": "softmax",
    "rmsnorm": "RMSNorm",
    "cross_entropy": "cross-entropy",
    "linear_cross_entropy": "linear cross-entropy",
    "token_statistics": "statistics of tokens",
    "linear_token_statistics": "statistics of tokens of a head",
    "softmax_forward": "softmax forward",
    "softmax_forward_backward": "softmax forward and backward",
    "softmax_backward": "softmax backward",
    "rmsnorm_forward": "RMSNorm forward",
    "rmsnorm_forward_backward": "RMSNorm forward and backward (dx, dw)",
    "rmsnorm_backward": "RMSNorm backward (dx, dw)",
    "cross_entropy_forward": "cross-entropy forward",
    "cross_entropy_loss_gradient": "cross-entropy loss + gradient",
    "cross_entropy_mean_gradient": "cross-entropy mean + gradient",
    "rmsnorm_residual_forward": "RMSNorm of x + residual",
    "rmsnorm_residual_backward": "RMSNorm of x + residual, backward (dx, dw)",
    "layernorm_forward": "LayerNorm forward",
    "layernorm_forward_backward": "LayerNorm forward and backward (dx, dw, db)",
    "layernorm_residual_forward": "LayerNorm of x + residual",
    "layernorm_backward": "LayerNorm backward (dx, dw, db)",
    "fused_add_rmsnorm": "RMSNorm of x + residual, in place",
    "swiglu_forward": "SwiGLU forward",
    "swiglu_backward": "SwiGLU backward (dgate, dup)",
    "rotary_forward": "rotary forward",
    "rotary_backward": "rotary backward",
    "rotary_partial_forward": "rotary of half of the columns, forward",
    "rotary_partial_backward": "rotary of half of the columns, backward",
    "rotary_interleaved_forward": "rotary interleaved, forward",
    "rotary_interleaved_backward": "rotary interleaved, backward",
    "qk_norm_rotary_forward": "RMSNorm of each head and rotary, forward",
    "qk_norm_rotary_backward": "RMSNorm of each head and rotary, backward (dq, dk, dw)",
    **{
        f"cross_entropy_{option}_{way}": f"cross-entropy with {which}, {what}"
        for way, what in (("forward", "forward"), ("loss_gradient", "loss + gradient"))
        for option, which in (
            ("smoothing", "label smoothing"),
            ("z_loss", "a z-loss"),
            ("temperature", "a temperature"),
            ("softcap", "a cap"),
            ("options", "all of them"),
        )
    },
    "cross_entropy_probabilities_forward": "cross-entropy of class probabilities, forward",
    "cross_entropy_probabilities_backward": "cross-entropy of class probabilities, backward",
    **{
        f"token_statistics{kind}_{way}": f"{which}, {what}"
        for way, what in (("forward", "forward"), ("gradient", "with the gradient"))
        for kind, which in (
            ("", "log-probability and entropy"),
            ("_temperature", "the same with a temperature"),
            ("_softcap", "the same with a cap"),
            ("_masked", "the same of half of the rows"),
            ("_all", "all statistics"),
        )
    },
}


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    labels: int = 2  # columns before the figures

    def rich(self):
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", caption=self.note, caption_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i < self.labels else "right", no_wrap=True)
        for before, row in zip([None, *self.rows], self.rows, strict=False):
            if before is not None and row[0] != before[0]:
                table.add_section()
            table.add_row(*(row if before is None or row[0] != before[0] else ["", *row[1:]]))
        return table

    def markdown(self) -> str:
        lines = [
            f"**{self.title}**",
            "",
            _line(self.columns),
            _line([*["---"] * self.labels, *["--:"] * (len(self.columns) - self.labels)]),
        ]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", self.note] if self.note else lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def of(records, section, **wanted):
    return [r for r in records if r["section"] == section and all(r.get(k) == v for k, v in wanted.items())]


def unique(values):
    return list(dict.fromkeys(values))


def _date(record: dict) -> str:
    return record["date"]


def newest(records: list[dict]) -> dict:
    return max(records, key=_date)


def _size(m: int, n: int) -> str:
    return f"{m} x {n}"


def _met(figure: float | None, target: float | None) -> str:
    return "" if None in (figure, target) else f"{target:g} {'met' if figure <= target else 'MISSED'}"


def on_gpu(record: dict) -> bool:
    return "driver" in record["environment"]


# ---- Sections ----


def host_tables(records) -> list[Table]:
    records = of(records, "host")
    if not records:
        return []
    providers = unique(name for r in records for name in r["results"])
    rows = []
    for record in records:
        results = record["results"]
        target = HOST_TARGETS.get((record["op"], record["mode"])) if on_gpu(record) else None
        ratio = results.get("gander", {}).get("over torch")
        row = [TITLES[record["op"]], record["mode"]]
        row += [_figure(results.get(name), "us", "{:.1f}") for name in providers]
        row += ["-" if ratio is None else f"{ratio:.2f}", _met(ratio, target)]
        if "gander.compile" in providers:
            ours, theirs = (results.get(name, {}).get("us") for name in ("gander.compile", "torch.compile"))
            row.append(f"{ours / theirs:.2f}" if ours and theirs else "-")
        rows.append(row)
    title = f"Host time of a call on a tiny tensor, us ({_where(records)})"
    columns = ["function", "call", *providers, "gander / torch", "at most"]
    return [Table(title, [*columns, "both compiled"] if "gander.compile" in providers else columns, rows)]


def load_tables(records) -> list[Table]:
    records = of(records, "load")
    if not records:
        return []
    results = records[-1]["results"]
    rows = []
    for name, figures in results.items():
        if "error" in figures:
            rows.append([name, figures["error"], "failed", ""])
            continue
        if "library" in figures:
            size = figures["megabytes"]
            rows += [
                [name, "size of the library, MB", f"{size:.1f}", _met(size, LIBRARY_MEGABYTES)],
                [name, "import after torch", f"{figures['import']:.2f}", ""],
                [
                    name,
                    "load of the library",
                    f"{figures['library']:.2f}",
                    _met(figures["library"], LIBRARY_MS),
                ],
            ]
        for function in ("softmax", "rmsnorm", "cross_entropy"):
            first, new = figures[function]["first"], figures[function]["new"]
            worst = max(new)
            target = _met(worst, NEW_SHAPE_MS) if name == "gander" and on_gpu(records[-1]) else ""
            rows.append([name, f"{TITLES[function]}: first call, loads the kernels", f"{first:.2f}", ""])
            rows.append(
                [
                    name,
                    f"{TITLES[function]}: new shape, median of {len(new)}",
                    f"{statistics.median(new):.2f}",
                    "",
                ]
            )
            rows.append([name, f"{TITLES[function]}: new shape, worst", f"{worst:.2f}", target])
    return [Table(f"First calls, ms ({_where(records)})", ["provider", "what", "measured", "at most"], rows)]


def _where(records) -> str:
    environment = newest(records)["environment"]
    return f"{environment['device']}, torch {environment['torch']}"


def _figure(result: dict | None, field: str, form: str) -> str:
    if result is None:
        return ""
    return form.format(result[field]) if field in result else "failed" if "error" in result else "-"


def _grid_table(records, title, field, form, note, extra: list[tuple[str, Callable[[dict], str]]]) -> Table:
    """Operators x providers against shapes; `extra` rows are made of whole records."""
    shapes = unique((r["m"], r["n"]) for r in records)
    providers = unique(name for r in records for name in r["results"])
    by_point = {(r["op"], r["m"], r["n"]): r for r in records}
    rows = []
    for op in unique(r["op"] for r in records):
        points = [by_point.get((op, *shape)) for shape in shapes]
        for name in providers:
            cells = [_figure(None if p is None else p["results"].get(name), field, form) for p in points]
            if any(cells):  # not every provider has every operator
                rows.append([TITLES[op], name, *cells])
        for label, cell in extra:
            rows.append([TITLES[op], label, *("" if p is None else cell(p) for p in points)])
    return Table(title, ["operator", "", *(_size(*shape) for shape in shapes)], rows, note)


def _share(record: dict) -> str:
    return _figure(record["results"].get("gander"), "ratio", "{:.3f}")


def _speedup(record: dict, field="us") -> str:
    best, mine = best_other(record, field), record["results"].get("gander", {}).get(field)
    return "-" if None in (best, mine) else f"{best / mine:.2f}"


def _limit(record: dict) -> str:
    return _figure(record.get("limit"), "tbps", "{:.2f}")


_FASTER = ("gander, times as fast as the best other", _speedup)
_GPU_NOTE = (
    "Bytes are those of the (M, N) tensors that must be read and written; "
    "the limit is a kernel that only moves them."
)


def _dtypes(records):
    return unique(r["dtype"] for r in records)


def _gpu_tables(records, section, what) -> list[Table]:
    rows = [("limit", _limit), ("gander / limit", _share), _FASTER]
    return [
        _grid_table(mine, f"{what}, TB/s, {dtype} ({_where(mine)})", "tbps", "{:.2f}", _GPU_NOTE, rows)
        for dtype in _dtypes(of(records, section))
        if (mine := of(records, section, dtype=dtype))
    ]


def throughput_tables(records) -> list[Table]:
    return _gpu_tables(records, "throughput", "Throughput")


def odd_tables(records) -> list[Table]:
    return _gpu_tables(records, "odd", "Off the grid")


def step_tables(records) -> list[Table]:
    tables = []
    for point in unique((r["dtype"], r["m"], r["n"]) for r in of(records, "step")):
        dtype, m, n = point
        mine = of(records, "step", dtype=dtype, m=m, n=n)
        rows = []
        for record in mine:
            for name, figures in record["results"].items():
                row = [_figure(figures, *cell) for cell in _STEP_CELLS]
                rows.append([STEP_TITLES[record["mode"]], name, *row])
        title = f"Cross-entropy and its gradient, {dtype}, {_size(m, n)} ({_where(mine)})"
        note = "Share of the limit: of a kernel that reads the logits once and writes as much."
        columns = ["us", "share of the limit", "memory beside the logits, MiB", "in sizes of the logits"]
        tables.append(Table(title, ["step", "provider", *columns], rows, note))
    return tables


STEP_TITLES = {
    "backward": "loss.backward()",
    "a quarter": "(loss / 4).backward()",
    "a third": "(loss / 3).backward()",
    "eight times": "(loss * 8).backward()",
    "scaled": "GradScaler.scale(loss).backward()",
}
_STEP_CELLS = (("us", "{:.1f}"), ("ratio", "{:.3f}"), ("peak MiB", "{:.0f}"), ("peak / logits", "{:.2f}"))


def linear_tables(records) -> list[Table]:
    tables = []
    for record in of(records, "linear"):
        rows = [["three matmuls alone", *(_figure(record.get("limit"), *cell) for cell in _LINEAR_CELLS)]]
        for name, figures in record["results"].items():
            rows.append([name, *(_figure(figures, *cell) for cell in _LINEAR_CELLS)])
        title = f"Linear loss and its gradients, {record['dtype']}, {_size(record['m'], record['n'])}"
        columns = ["us", "share of the matmuls' speed", "memory beside dx and dw, MiB", "dx off", "dw off"]
        title = f"{title} ({_where([record])})"
        tables.append(Table(title, ["provider", *columns], rows, _LINEAR_NOTE, labels=1))
    return tables


_LINEAR_CELLS = (
    ("us", "{:.0f}"), ("ratio", "{:.3f}"), ("peak MiB", "{:.0f}"), ("dx off", "{:.2e}"), ("dw off", "{:.2e}"),
)  # fmt: skip
_LINEAR_NOTE = (
    "gander holds the logits of a quarter of the rows, gander-N-chunks those of an Nth; gander-float32 "
    "accumulates dw in float32; gander-outputs returns lse and predicted classes too. Off: from float64, "
    "relative to its size."
)


def head_tables(records) -> list[Table]:
    tables = []
    for record in of(records, "head"):
        alone = record.get("matmuls", {})
        rows = [
            [f"matmuls alone, logits {which}", _figure(alone.get(which), "us", "{:.0f}"), *["-"] * 5]
            for which in ("kept", "again")
        ]
        for name, figures in record["results"].items():
            rows.append([name, *(_figure(figures, *cell) for cell in _HEAD_CELLS)])
        title = f"Statistics of a head's tokens, {record['mode']}, {record['dtype']}, "
        title += f"{_size(record['m'], record['n'])} ({_where([record])})"
        tables.append(Table(title, _HEAD_COLUMNS, rows, _HEAD_NOTE, labels=1))
    return tables


_HEAD_CELLS = (
    ("us", "{:.0f}"), ("over kept", "{:.3f}"), ("over again", "{:.3f}"),
    ("peak MiB", "{:.0f}"), ("dx off", "{:.2e}"), ("dw off", "{:.2e}"),
)  # fmt: skip
_HEAD_COLUMNS = [
    "provider", "us", "over the matmuls, kept", "over the matmuls, again", "memory beside gradients, MiB",
    "dx off", "dw off",
]  # fmt: skip
_HEAD_NOTE = (
    "log_prob and entropy with gradients, but for log_prob alone. gander makes the logits again in backward, "
    "gander-kept keeps them. Off: from float64, relative to its size."
)


OF_SLICES = {"cross_entropy": "Cross-entropy", "token_statistics": "Log-probability and entropy"}


def sharded_tables(records) -> list[Table]:
    mine = of(records, "sharded")
    alone, divided = [r for r in mine if "ranks" not in r], [r for r in mine if "ranks" in r]
    return _tables_of_slices(alone) + _tables_of_ranks(divided)


def _tables_of_slices(records) -> list[Table]:
    tables = []
    for op, what in OF_SLICES.items():
        rows, mine = [], of(records, "sharded", op=op)
        for record in mine:
            collective = _figure(record.get("collective"), "us", "{:.1f}")
            cells = [_figure(record["results"].get(name), "us", "{:.1f}") for name in _SHARDED]
            beside = beside_the_collective(record)
            point = [record["dtype"], _size(record["m"], record["n"])]
            rows.append([*point, *cells, collective, "-" if beside is None else f"{beside:.3f}"])
        if rows:
            title = f"{what} of a slice of the classes and its gradient, us ({_where(mine)})"
            columns = ["dtype", "slice", "two passes", "sharded", "all-gather alone"]
            columns.append("sharded beside it / two passes")
            tables.append(Table(title, columns, rows, "A group of one rank."))
    return tables


def _tables_of_ranks(records) -> list[Table]:
    tables = []
    for ranks, (op, what) in itertools.product(unique(r["ranks"] for r in records), OF_SLICES.items()):
        rows = []
        mine = [r for r in records if (r["ranks"], r["op"]) == (ranks, op)]
        for record in mine:
            point = [record["dtype"], _size(record["m"], record["n"])]
            alone = {"two reads and a write": record.get("limit"), "the all-gather": record.get("collective")}
            rows += [[*point, f"{who} alone", _figure(f, "us", "{:.0f}"), "-"] for who, f in alone.items()]
            for name, figures in record["results"].items():
                cells = [_figure(figures, "us", "{:.0f}"), _figure(figures, "peak MiB", "{:.0f}")]
                rows.append([*point, name, *cells])
        if rows:
            title = f"{what} of classes divided among {ranks} ranks, and the gradient ({_where(mine)})"
            columns = ["dtype", "slice", "provider", "us", "memory beside the gradient, MiB"]
            tables.append(Table(title, columns, rows, _OF_RANKS, labels=3))
    return tables


_OF_RANKS = (
    "The first rank's time. gander-sharded is gander.distributed's function, torch its loss_parallel, liger "
    "its vocab-parallel loss; gander-two-passes computes the slice's classes alone."
)
_SHARDED = ("gander-two-passes", "gander-sharded")


def beside_the_collective(record: dict) -> float | None:
    """A sharded loss without its collective, over two passes."""
    passes, mine = (record["results"].get(name, {}).get("us") for name in _SHARDED)
    collective = record.get("collective", {}).get("us")
    return None if None in (passes, mine, collective) else (mine - collective) / passes


def few_tables(records) -> list[Table]:
    rows = [("a plain kernel of that traffic", lambda r: _figure(r.get("limit"), "us", "{:.1f}")), _FASTER]
    tables = []
    for dtype in _dtypes(of(records, "few")):
        for m in unique(r["m"] for r in of(records, "few", dtype=dtype)):
            mine = of(records, "few", dtype=dtype, m=m)
            title = f"Few rows, us, {dtype}, M = {m} ({_where(mine)})"
            tables.append(_grid_table(mine, title, "us", "{:.1f}", "", rows))
    return tables


def _models_cell(runs: list[dict] | None, m: int) -> str:
    if runs is None:
        return ""
    field, form = ("us", "{:.1f}") if m < models.TRAINING[0] else ("tbps", "{:.2f}")
    mine, other = models.median(runs, "gander", field), models.best_median(runs, field)
    cell = "-" if mine is None else form.format(mine)
    return cell if other is None else f"{cell} ({form.format(other)})"


def models_tables(records) -> list[Table]:
    """Row lengths against numbers of rows, for each operator, dtype and dtype of the weights."""
    cases = models.by_case(records, "models")
    tables = []
    for kind in unique((case.op, case.dtype, case.weight) for case in cases):
        mine = {c: runs for c, runs in cases.items() if (c.op, c.dtype, c.weight) == kind}
        shapes = {(c.m, c.n): runs for c, runs in mine.items()}
        columns = sorted({m for m, _ in shapes})
        rows = [
            [str(n), *(_models_cell(shapes.get((m, n)), m) for m in columns)]
            for n in sorted({n for _, n in shapes})
        ]
        op, dtype, weight = kind
        weights = "" if weight is None else f", {weight} weights"
        where = _where([run for runs in mine.values() for run in runs])
        title = f"Models: {TITLES[op]}, {dtype}{weights} ({where})"
        tables.append(Table(title, ["N", *(f"M = {m}" for m in columns)], rows, _MODELS_NOTE, labels=1))
    return tables


_MODELS_NOTE = (
    f"us below M = {models.TRAINING[0]}, TB/s from there on: medians over the runs, "
    "in brackets those of the best other."
)


def norms_tables(records) -> list[Table]:
    return _tables_by_shape(records, "norms", "Norms")


def glu_tables(records) -> list[Table]:
    return _tables_by_shape(records, "glu", "Gated linear units")


def rotary_tables(records) -> list[Table]:
    return _tables_by_shape(records, "rotary", "Rotary embeddings")


def _tables_by_shape(records, section: str, what: str) -> list[Table]:
    """Shapes against providers, for each operator and dtype: medians over the runs."""
    cases = models.by_case(records, section)
    tables = []
    for op, dtype in unique((case.op, case.dtype) for case in cases):
        mine = {(c.m, c.n): runs for c, runs in cases.items() if (c.op, c.dtype) == (op, dtype)}
        every = [run for runs in mine.values() for run in runs]
        providers = unique(name for run in every for name in run["results"])
        served = max(m for m, _ in mine) < models.TRAINING[0]
        field, form, unit = ("us", "{:.1f}", "us") if served else ("tbps", "{:.2f}", "TB/s")
        rows = []
        for (m, n), runs in sorted(mine.items(), key=lambda item: item[0][::-1]):
            median = partial(models.median, runs)
            us, best = median("gander", "us"), models.best_median(runs, "us")
            share, faster = median("gander", "ratio"), best / us if us and best else None
            limit = models.median_of(run.get("limit", {}).get(field) for run in runs)
            cells = [_number(limit, form), *(_norms_cell(runs, name, field, form) for name in providers)]
            rows.append([_size(m, n), *cells, _number(share, "{:.3f}"), _number(faster, "{:.2f}")])
        title = f"{what}: {TITLES[op]}, {unit}, {dtype} ({_where(every)})"
        columns = ["M x N", "limit", *providers, "gander / limit", "times the best other"]
        tables.append(Table(title, columns, rows, _NORMS_NOTE, labels=1))
    return tables


_NORMS_NOTE = (
    "Medians over the runs. The limit is a kernel that only moves the bytes. "
    "The last column is gander's speed over that of the best other."
)


def options_tables(records) -> list[Table]:
    return _beside_plain(of(records, "options"), "Options of cross-entropy", _OPTIONS_NOTE)


def tokens_tables(records) -> list[Table]:
    return _beside_plain(of(records, "tokens"), "Statistics of tokens", _TOKENS_NOTE)


_TOKENS_NOTE = (
    "gander-plain is cross-entropy of as many logits. The limit is a kernel that reads the logits once; with "
    "a gradient, one that reads them twice and writes as much once."
)


def _beside_plain(records, what: str, note: str) -> list[Table]:
    """Operators and shapes against providers."""
    tables = []
    for dtype in _dtypes(records):
        mine = [r for r in records if r["dtype"] == dtype]
        providers = unique(name for r in mine for name in r["results"])
        rows = []
        for r in mine:
            times = {name: figures.get("us") for name, figures in r["results"].items()}
            us, plain, limit = times.get("gander"), times.get("gander-plain"), r.get("limit", {}).get("us")
            row = [TITLES[r["op"]], _size(r["m"], r["n"]), _number(limit, "{:.1f}")]
            row += [_figure(r["results"].get(name), "us", "{:.1f}") for name in providers]
            row += [_number(us / other if us and other else None, "{:.3f}") for other in (plain, limit)]
            rows.append([*row, _met(us / limit if us and limit else None, most_of_limit(r)), _speedup(r)])
        title = f"{what}, us, {dtype} ({_where(mine)})"
        columns = ["operator", "M x N", "limit", *providers, "over plain", "over the limit", "at most"]
        tables.append(Table(title, [*columns, "times the best other"], rows, note))
    return tables


_OPTIONS_NOTE = (
    "gander-plain is without options. The limit is a kernel that reads the logits once; with a gradient, one "
    "that reads them twice and writes as much once."
)


def most_of_limit(record: dict) -> float | None:
    """How many times the limit's time an operator may take; None where there is no target."""
    if record["m"] < models.TRAINING[0]:
        return None
    op = record["op"]
    if op.startswith("token_statistics"):
        return 1.15 if "_all" in op else 1.3 if op == "token_statistics_softcap_forward" else 1.05
    return {"cross_entropy_softcap_forward": 1.3, "cross_entropy_softcap_loss_gradient": 1.05}.get(op)


def _number(figure: float | None, form: str) -> str:
    return "-" if figure is None else form.format(figure)


def _norms_cell(runs: list[dict], name: str, field: str, form: str) -> str:
    if not any(name in run["results"] for run in runs):
        return ""
    figure = models.median(runs, name, field)
    return "failed" if figure is None else form.format(figure)


AUTO_WITHIN = 1.03  # of the best algorithm that can be forced


def algorithms_tables(records) -> list[Table]:
    """Rows are shapes, columns algorithms; empty where one cannot serve a shape."""
    tables = []
    for dtype in _dtypes(of(records, "algorithms")):
        mine = of(records, "algorithms", dtype=dtype)
        forced = unique(name for r in mine for name in r["results"] if name != "gander")
        rows = []
        for record in sorted(mine, key=lambda r: r["op"], reverse=True):
            results = record["results"]
            auto = results["gander"].get("us")
            best = min((results[name]["us"] for name in forced if "us" in results[name]), default=None)
            share = None if None in (auto, best) else auto / best
            row = [
                TITLES[record["op"]],
                _size(record["m"], record["n"]),
                _figure(results["gander"], "us", "{:.1f}"),
            ]
            row += [_algorithm(results.get(name)) for name in forced]
            row += [
                "-" if share is None else f"{share:.3f}",
                _met(share, AUTO_WITHIN),
                record.get("taken", ""),
            ]
            rows.append(row)
        title = f"Algorithms, us, {dtype} ({_where(mine)})"
        columns = ["operator", "M x N", "auto", *(name.partition(":")[2] for name in forced)]
        tables.append(Table(title, [*columns, "auto / best", "at most", "auto takes"], rows))
    return tables


def invariant_tables(records) -> list[Table]:
    tables = []
    for dtype in _dtypes(of(records, "invariant")):
        points = {(r["op"], (r["m"], r["n"])): r["results"] for r in of(records, "invariant", dtype=dtype)}
        shapes = unique(shape for _, shape in points)
        rows = [
            [TITLES[op], *(_invariant(points.get((op, shape), {})) for shape in shapes)]
            for op in unique(op for op, _ in points)
        ]
        note = "In brackets, times the call without it."
        title = f"With batch_invariant=True, us, {dtype}"
        tables.append(Table(title, ["operator", *(_size(*shape) for shape in shapes)], rows, note, labels=1))
    return tables


def _invariant(results: dict) -> str:
    us, auto = (results.get(name, {}).get("us") for name in ("gander-batch-invariant", "gander"))
    return f"{us:.1f} ({us / auto:.2f})" if us and auto else "-"


def _algorithm(result: dict | None) -> str:
    refused = result is not None and result.get("error", "").startswith("NotImplementedError")
    return "" if refused else _figure(result, "us", "{:.1f}")


_CPU_NOTE = (
    "Each provider in its own blocks, results in memory that is reused; "
    "in turns: a call of each after the other"
)
_NEW_MEMORY_NOTE = (
    "in new memory: results are kept, so that each lies in other memory, mapped anew from 128 KiB on"
)


def cpu_tables(records) -> list[Table]:
    records = of(records, "cpu")
    tables = []
    for dtype in _dtypes(records):
        mine = of(records, "cpu", dtype=dtype)
        title = f"CPU, us, {dtype}, {mine[-1]['environment']['threads']} threads ({_where(mine)})"
        fields, note = [IN_TURNS], _CPU_NOTE
        if any(NEW_MEMORY in figures for figures in _results(mine)):
            fields.append(NEW_MEMORY)
            note += f"; {_NEW_MEMORY_NOTE}"
        others = [
            (f"the same, {field.removeprefix('us ')}", partial(_speedup, field=field)) for field in fields
        ]
        tables.append(_grid_table(mine, title, "us", "{:.1f}", f"{note}.", [_FASTER, *others]))
    return tables


def least_over_xla(record: dict) -> float:
    """The speed over XLA's that is aimed at: never slower, beyond what two runs differ by."""
    return 1.5 if (record["op"], record["n"]) == ("cross_entropy_mean_gradient", 128256) else 0.98


def jax_tables(records) -> list[Table]:
    """gander.jax beside XLA: programs and shapes are rows."""
    tables = []
    for on, dtype in unique((r["on"], r["dtype"]) for r in of(records, "jax")):
        mine = of(records, "jax", on=on, dtype=dtype)
        rows = []
        for r in mine:
            both = [r["results"].get(name) for name in ("gander", "xla")]
            speed, least = times_as_fast(r, "xla"), least_over_xla(r)
            judged = (
                "" if speed is None or on == "cpu" else f"{least:g} {'met' if speed >= least else 'MISSED'}"
            )
            cells = [_figure(figures, *cell) for cell in _JAX_CELLS for figures in both]
            shown = [*cells[:2], _number(speed, "{:.3f}"), judged, *cells[2:]]
            rows.append([TITLES[r["op"]], _size(r["m"], r["n"]), *shown])
        device, versions = newest(mine)["environment"]["device"], newest(mine)["versions"]
        title = f"gander.jax beside XLA, us, {dtype} ({device}, jax {versions['jax']})"
        columns = ["program", "M x N", "gander", "XLA", "times XLA's speed", "at least"]
        tables.append(Table(title, [*columns, "first call, s: gander", "XLA"], rows, _JAX_NOTES[on]))
    return tables


_JAX_CELLS = (("us", "{:.1f}"), ("first s", "{:.2f}"))
_JAX_NOTES = {
    "cuda": "Time of the kernels of a call, without the pauses between them, from jax.profiler's trace.",
    "cpu": "Time of a call on the host's clock.",
}


def _reason(figures: dict) -> str | None:
    """Why a contestant has no figures."""
    if "not_run" in figures:
        return f"not run: {figures['not_run']}"
    return f"failed: {figures['error']}" if "error" in figures else None


def _apart(losses: list[float] | None, others: list[float] | None) -> str:
    """The largest difference of two loss curves."""
    if losses is None or others is None:
        return "-"
    return f"{max(abs(a - b) for a, b in zip(losses, others, strict=True)):.1e}"


_TRAIN_CELLS = (("tokens_per_second", "{:.0f}"), ("peak_gib", "{:.2f}"), ("first_step_s", "{:.1f}"))
_TRAIN_COLUMNS = (
    *("contestant", "ms a step", "times torch's speed", "tokens/s", "GiB", "first step, s"),
    *("loss", "curve from torch's", "graph breaks"),
)


def runs_of_training(records) -> list[list[dict]]:
    """The records of `train` that differ in the contestant alone."""
    records = of(records, "train")
    parts = ("model", "dtype", "batch", "sequence", "steps", "seed", "on")
    names = unique(tuple(r[part] for part in parts) for r in records)
    return [of(records, "train", **dict(zip(parts, name, strict=True))) for name in names]


def train_title(records) -> str:
    """Of records of one run."""
    first = records[0]
    sizes = [figures["parameters"] for figures in _results(records) if "parameters" in figures]
    size = f" ({sizes[0] / 1e6:.1f} M parameters)" if sizes else ""
    where = " on the CPU" if on_gpu(first) and first["on"] == "cpu" else ""
    return (
        f"Training {first['model']}{size}{where}, {first['batch']} x {first['sequence']} tokens, "
        f"{first['steps']} steps, {first['dtype']}"
    )


def _results(records) -> list[dict]:
    return [figures for record in records for figures in record["results"].values()]


def of_contestants(records) -> dict[str, dict]:
    """The figures of each contestant: of the run whose time is the median, so that they belong together. Of
    one that no run has figures of, the last reason."""
    found: dict[str, list[dict]] = {}
    for record in records:
        for name, figures in record["results"].items():
            found.setdefault(name, []).append(figures)
    chosen = {}
    for name, runs in found.items():
        times = sorted((figures for figures in runs if "ms" in figures), key=lambda figures: figures["ms"])
        chosen[name] = times[(len(times) - 1) // 2] if times else runs[-1]
    return chosen


def train_tables(records) -> list[Table]:
    tables = []
    for mine in runs_of_training(records):
        results = of_contestants(mine)
        torch = results.get("torch", {})
        rows, notes = [], []
        for name, figures in results.items():
            if reason := _reason(figures):
                rows.append([name, reason.partition(":")[0], *["-"] * (len(_TRAIN_COLUMNS) - 2)])
                notes.append(f"{name} {reason}.")
                continue
            speed = f"{torch['ms'] / figures['ms']:.2f}" if "ms" in torch else "-"
            rows.append([name, f"{figures['ms']:.1f}", speed])
            rows[-1] += [_figure(figures, *cell) for cell in _TRAIN_CELLS]
            rows[-1] += [f"{figures['losses'][-1]:.3f}", _apart(figures["losses"], torch.get("losses"))]
            rows[-1].append(str(figures.get("graph_breaks", "")))
        runs = len({r.get("run") for r in mine})
        notes.append(
            "Each contestant in a process of its own; Liger also replaces rotary embeddings and SwiGLU, "
            "which +liger takes from it."
            + (" So does gander-hf." if any(name.startswith("gander-hf") for name in results) else "")
            + (f" Of {runs} runs the one with the median time." if runs > 1 else "")
        )
        title = f"{train_title(mine)} ({_where(mine)})"
        tables.append(Table(title, list(_TRAIN_COLUMNS), rows, " ".join(notes), labels=1))
        if any("kernels_ms" in figures for figures in results.values()):
            tables.append(kernels_table(mine))
    return tables


WHOLE_MODELS = ("llama3-8b", "qwen3-8b")  # whose targets are judged
_APART = ("products", "attention", "optimizer")  # parts of a step that gander does not change


def around(kernels_ms: dict[str, float]) -> float:
    """The time of a step's kernels outside of products, attention and the optimizer."""
    return sum(ms for part, ms in kernels_ms.items() if part not in _APART)


def kernels_table(records) -> Table:
    """Of the records of one run: where the GPU's time of a step goes."""
    results = {n: f["kernels_ms"] for n, f in of_contestants(records).items() if "kernels_ms" in f}
    parts = unique(part for parts in results.values() for part in parts)
    rows = [
        [name, *(f"{parts_ms[part]:.2f}" for part in parts), f"{around(parts_ms):.2f}"]
        for name, parts_ms in results.items()
    ]
    title = f"Kernels of a step, ms: {train_title(records)} ({_where(records)})"
    note = (
        "By the names of kernels. Each moment counts once, where a kernel starts while another one runs. "
        f"The last column is the sum without {', '.join(_APART)}."
    )
    return Table(title, ["contestant", *parts, "around them"], rows, note, labels=1)


def curve_differences(records) -> dict[str, list[float]]:
    """How far each contestant's loss is from torch's, in every step of one run of `train`.

    Raises KeyError where the run lacks torch's curve.
    """
    curves = {name: f["losses"] for name, f in of_contestants(records).items() if "losses" in f}
    torch = curves.pop("torch")
    return {name: [a - b for a, b in zip(losses, torch, strict=True)] for name, losses in curves.items()}


def curve_tables(records) -> list[Table]:
    """The differences of loss curves from torch's, whose own curve is the first row."""
    tables = []
    for mine in runs_of_training(records):
        torch = next(r["results"]["torch"]["losses"] for r in mine if "torch" in r["results"])
        steps = unique([0, *range(9, len(torch), 10), len(torch) - 1])
        rows = [["torch: its loss", *(f"{torch[step]:.3f}" for step in steps), ""]]
        for name, differences in curve_differences(mine).items():
            cells = (f"{differences[step]:+.4f}" for step in steps)
            rows.append([name, *cells, f"{max(map(abs, differences)):.4f}"])
        title = f"Loss less torch's: {train_title(mine)} ({_where(mine)})"
        columns = ["contestant", *(f"step {step + 1}" for step in steps), "largest of all steps"]
        tables.append(Table(title, columns, rows, labels=1))
    return tables


_SECTIONS = {
    "host": host_tables,
    "load": load_tables,
    "throughput": throughput_tables,
    "odd": odd_tables,
    "few": few_tables,
    "models": models_tables,
    "norms": norms_tables,
    "glu": glu_tables,
    "rotary": rotary_tables,
    "options": options_tables,
    "tokens": tokens_tables,
    "algorithms": algorithms_tables,
    "invariant": invariant_tables,
    "step": step_tables,
    "linear": linear_tables,
    "head": head_tables,
    "sharded": sharded_tables,
    "cpu": cpu_tables,
    "train": train_tables,
    "jax": jax_tables,
}


def latest(records: list[dict]) -> list[dict]:
    """The last measurement of each point: by operator, then by dtype, in any order of the run."""
    from .records import key

    operators, dtypes = list(TITLES), ["bfloat16", "float16", "float32", None]
    last = {key(record): record for record in records}.values()

    def place(record):
        return operators.index(record["op"]) if "op" in record else -1, dtypes.index(record.get("dtype"))

    return sorted(last, key=place)


def tables(records: list[dict]) -> list[Table]:
    records = latest(records)
    return [table for make in _SECTIONS.values() for table in make(records)]


# ---- All points in a few lines ----


def point_of(record: dict) -> str:
    """What was measured, without the operator."""
    parts = [record[part] for part in ("dtype", "mode") if part in record]
    parts += [f"{record['weight']} weights"] if "weight" in record else []
    parts += [f"run {record['run']}"] if "run" in record else []
    return ", ".join([*parts, *([_size(record["m"], record["n"])] if "m" in record else [])])


def summary(records: list[dict]) -> list[Table]:
    """How many times as fast as each of the others gander is, by operator."""
    records = latest(records)
    rows = []
    for section in unique(r["section"] for r in records):
        for op in unique(r["op"] for r in of(records, section) if "op" in r):
            mine = of(records, section, op=op)
            for name in unique(name for r in mine for name in r["results"] if not name.startswith("gander")):
                faster = {point_of(r): speed for r in mine if (speed := times_as_fast(r, name)) is not None}
                if not faster:
                    continue
                worst = min(faster, key=lambda point: faster[point])
                mean = statistics.geometric_mean(faster.values())
                cells = f"{mean:.2f}", str(len(faster)), f"{faster[worst]:.2f}", worst
                rows.append([f"{section}: {TITLES[op]}", name, *cells])
    title = "How many times as fast as others gander is"
    columns = ["operator", "than", "geometric mean", "points", "worst", "at"]
    return [Table(title, columns, rows)] if rows else []


def speed_table(*runs: list[dict], figure: str = "us") -> Table:
    """How many times as fast as each of the others gander is, as geometric means over the points: operators
    against others. Each run gives its own ratios; the first one that has a contestant counts. figure: the
    time, "us" for the median, "low" for the 10th percentile."""
    cells: dict[tuple[str, str], str] = {}
    for records in runs:
        for op in unique(r["op"] for r in records):
            for name in unique(name for r in records for name in r["results"]):
                mine = [r for r in records if r["op"] == op]
                speeds = [s for r in mine if (s := times_as_fast(r, name, figure)) is not None]
                if speeds and not name.startswith("gander"):
                    cells.setdefault((op, name), f"{statistics.geometric_mean(speeds):.2f}")
    operators, others = (unique(key[i] for key in cells) for i in (0, 1))
    rows = [[TITLES[op], *(cells.get((op, name), "-") for name in others)] for op in operators]
    title = f"gander's speed over that of others, geometric means ({_where(runs[0])})"
    return Table(title, ["operator", *others], rows, labels=1)


def off_table(records) -> Table:
    """How far the results of one shape are from float64, relative to their size."""
    names = unique(name for r in records for name in r["results"])
    rows = [
        [TITLES[r["op"]], *(_figure(r["results"].get(name), "off", "{:.1e}") for name in names)]
        for r in records
    ]
    first = records[0]
    title = f"Distance from float64, {first['dtype']}, {_size(first['m'], first['n'])} ({_where(records)})"
    return Table(title, ["operator", *names], rows, labels=1)


def times_as_fast(record: dict, name: str, figure: str = "us") -> float | None:
    mine, other = (record["results"].get(who, {}).get(figure) for who in ("gander", name))
    return None if None in (mine, other) else other / mine


# ---- Then and now ----


def _relative(record: dict) -> tuple[float, float, float] | None:
    """gander's speed relative to what was measured beside it: the limit, or torch where there is none. The
    median, and the least and the most that the spread of both allows."""
    mine = record["results"].get("gander", {})
    base = next((b for b in (record.get("limit"), record["results"].get("torch")) if b and "us" in b), None)
    if "us" not in mine or base is None:
        return None
    return base["us"] / mine["us"], base["low"] / mine["high"], base["high"] / mine["low"]


def comparison(records: list[dict], before: list[dict]) -> list[Table]:
    """gander at each point that both runs have. Absolute times mix what changed with the machine's mood, so
    the ratios are compared; a change counts where the spreads of then and now do not overlap."""
    from .records import key

    old = {key(record): record for record in latest(before) if record["section"] != "load"}
    rows, changes = [], []
    for record in sorted(latest(records), key=lambda r: (r["section"], r.get("op", ""))):
        then, now = (None if r is None else _relative(r) for r in (old.get(key(record)), record))
        if then is None or now is None:
            continue
        changes.append(now[0] / then[0])
        flag = "SLOWER" if now[2] < then[1] else "faster" if now[1] > then[2] else ""
        figures = (f"{figure:.3f}" for figure in (then[0], now[0], changes[-1]))
        rows.append([f"{record['section']}: {TITLES[record['op']]}", point_of(record), *figures, flag])
    if not rows:
        return []
    note = f"Geometric mean of now / then: {statistics.geometric_mean(changes):.3f}, {len(changes)} points."
    title = "gander's speed relative to the limit; on the host and on the CPU relative to torch"
    return [Table(title, ["operator", "point", "then", "now", "now / then", "beyond the spread"], rows, note)]
