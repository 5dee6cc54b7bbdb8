"""bench/RESULTS.md: the tables of several files of measurements, and each point that misses its target."""

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import models
from .models import BYTES, FORWARD, best_other
from .report import (
    AUTO_WITHIN,
    HOST_TARGETS,
    LIBRARY_MEGABYTES,
    LIBRARY_MS,
    NEW_SHAPE_MS,
    TITLES,
    WHOLE_MODELS,
    Table,
    algorithms_tables,
    around,
    beside_the_collective,
    cpu_tables,
    glu_tables,
    head_tables,
    host_tables,
    invariant_tables,
    jax_tables,
    latest,
    least_over_xla,
    linear_tables,
    load_tables,
    models_tables,
    most_of_limit,
    newest,
    norms_tables,
    of,
    of_contestants,
    on_gpu,
    options_tables,
    point_of,
    rotary_tables,
    runs_of_training,
    sharded_tables,
    step_tables,
    summary,
    times_as_fast,
    tokens_tables,
    train_tables,
    unique,
)

_MIB = 1 << 20
_SPREAD = ("softmax_forward", "rmsnorm_forward")  # have targets for a few rows of millions of elements


# ---- Targets ----


class Check(NamedTuple):
    """One target at one point. Measured is a ratio, milliseconds or megabytes; None where there is no figure,
    for the reason in `without`."""

    target: str
    op: str
    point: str
    measured: float | None
    at_least: float | None = None
    at_most: float | None = None
    without: str = "failed"

    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.at_least if self.at_most is None else self.measured <= self.at_most

    def row(self) -> list[str]:
        measured = self.without if self.measured is None else f"{self.measured:.4g}"
        target = f"at least {self.at_least:g}" if self.at_most is None else f"at most {self.at_most:g}"
        return [self.target, TITLES.get(self.op, self.op), self.point, measured, target]


def _share_of_limit(record: dict) -> float:
    """What share of the speed of a kernel that only moves the bytes is aimed at."""
    size = record["m"] * record["n"] * BYTES[record["dtype"]]
    if record["op"] == "rmsnorm_backward":
        return 0.95 if record["n"] > 1024 else 0.90
    if record["op"] == "cross_entropy_forward" and size < 256 * _MIB:
        return 0.94
    return 0.97 if size >= 64 * _MIB else 0.95


def _times_a_copy(record: dict) -> float | None:
    """How many times as long as a plain copy softmax and RMSNorm may take on a few long rows."""
    few = {(4, 1 << 22): 1.35, (4, 1 << 23): 1.5, (1, 1 << 25): 1.5}
    target = few.get((record["m"], record["n"]))
    if target is None or record["op"] not in _SPREAD:
        return None
    return 1.6 if record["dtype"] == "float32" else target


def _against_the_limit(records) -> Iterator[Check]:
    for section in ("throughput", "odd"):
        for r in of(records, section):
            share = r["results"]["gander"].get("ratio")
            name = f"share of the limit, {section}"
            yield Check(name, r["op"], point_of(r), share, at_least=_share_of_limit(r))
    for r in of(records, "few"):
        target, share = _times_a_copy(r), r["results"]["gander"].get("ratio")
        if target:
            yield Check("times a plain copy", r["op"], point_of(r), share and 1 / share, at_most=target)


def _against_peers(records) -> Iterator[Check]:
    for section, target in (("throughput", 0.98), ("odd", 0.98), ("few", 1.0)):
        for r in of(records, section):
            best = best_other(r)
            if best is not None:
                mine = r["results"]["gander"].get("us")
                name = f"speed over the best other's, {section}"
                yield Check(name, r["op"], point_of(r), mine and best / mine, at_least=target)
    yield from _against_quack(of(records, "throughput"))
    for r in of(records, "few", dtype="bfloat16", m=4, n=1 << 20):
        if r["op"] in _SPREAD:
            yield from _faster_than("quack", r, 1.4)
    for r in of(records, "step", mode="backward"):
        yield from _faster_than("quack", r, 1.35)
        yield from _faster_than("torch", r, 2)


def _with_upstream(records) -> Iterator[Check]:
    """Steps whose gradient was announced or remembered, over loss.backward(), a single pass."""
    for single in of(records, "step", mode="backward"):
        least = single["results"].get("gander", {}).get("us")
        for told in of(records, "step", dtype=single["dtype"], m=single["m"], n=single["n"]):
            for way in ("upstream", "remember"):
                us = told["results"].get(f"gander-{way}", {}).get("us")
                if least and us and told["mode"] != "backward":
                    name = f"time with {way} over the single pass"
                    yield Check(name, told["op"], point_of(told), us / least, at_most=1.05)


# By provider: the time over that of three matmuls, and a gradient's error over torch's.
_LINEAR_TIMES = {"gander-1-chunks": 1.035, "gander": 1.08, "gander-8-chunks": 1.12}
_LINEAR_ERRORS = {
    ("gander", "dx off"): 1.1, ("gander-float32", "dx off"): 1.1,
    ("gander", "dw off"): 2, ("gander-float32", "dw off"): 1.1,
}  # fmt: skip


def _linear(records) -> Iterator[Check]:
    """A linear loss beside its matmuls, torch's errors, and QuACK's speed with a third of QuACK's memory."""
    for r in of(records, "linear"):
        results, where = r["results"], point_of(r)
        for name, target in _LINEAR_TIMES.items():
            share = results.get(name, {}).get("ratio")
            yield Check(
                f"{name}: time over the matmuls'", r["op"], where, share and 1 / share, at_most=target
            )
        for (name, field), target in _LINEAR_ERRORS.items():
            mine, torch = (results.get(who, {}).get(field) for who in (name, "torch"))
            if torch:
                kind = f"{name}: error of {field.split()[0]} over torch's"
                yield Check(kind, r["op"], where, mine and mine / torch, at_most=target)
        if "us" in results.get("quack", {}):
            quack = results["quack"]
            small = [
                f["us"]
                for name, f in results.items()
                if name.startswith("gander") and "us" in f and f["peak MiB"] <= quack["peak MiB"] / 3
            ]
            speed = quack["us"] / min(small) if small else None
            yield Check("speed over quack's, in a third of its memory", r["op"], where, speed, at_least=1)


# By mode and provider: the time over that of the matmuls alone, with the logits kept or made again.
_HEAD_TIMES = {
    ("trained", "gander-kept"): ("kept", 1.08), ("trained", "gander"): ("again", 1.10),
    ("frozen", "gander-kept"): ("kept", 1.10), ("frozen", "gander"): ("again", 1.10),
    ("frozen, log_prob", "gander"): ("kept", 1.10),
}  # fmt: skip
_HEAD_MIB = 600  # besides the gradients, with no logits kept, where the weight is trained


def _head(records) -> Iterator[Check]:
    """Statistics of a head's tokens: time beside the matmuls, memory, and errors beside torch's."""
    for r in of(records, "head"):
        results, where = r["results"], point_of(r)
        for (mode, name), (which, target) in _HEAD_TIMES.items():
            if mode == r["mode"]:
                over = results.get(name, {}).get(f"over {which}")
                kind = f"{name}, {mode}: time over the matmuls', logits {which}"
                yield Check(kind, r["op"], where, over, at_most=target)
        for field in "dx off", "dw off":
            mine, torch = (results.get(who, {}).get(field) for who in ("gander", "torch"))
            if torch:
                kind = f"gander, {r['mode']}: error of {field.split()[0]} over torch's"
                yield Check(kind, r["op"], where, mine and mine / torch, at_most=1.1)
        if r["mode"] == "trained":
            peak = results.get("gander", {}).get("peak MiB")
            yield Check("gander, trained: MiB beside the gradients", r["op"], where, peak, at_most=_HEAD_MIB)


def _sharded(records) -> Iterator[Check]:
    for r in of(records, "sharded"):
        if "ranks" in r:
            limit, mine = r.get("limit", {}).get("us"), r["results"].get("gander-sharded", {}).get("us")
            name = f"time on {r['ranks']} ranks, without {_COLLECTIVES_US} us, over two reads and a write"
            over = mine and limit and (mine - _COLLECTIVES_US) / limit
            yield Check(name, r["op"], point_of(r), over, at_most=1.06)
            continue
        name = "time of a slice beside its collective over two passes"
        yield Check(name, r["op"], point_of(r), beside_the_collective(r), at_most=1.05)


_COLLECTIVES_US = 60  # allowed for the exchange between ranks


# What is compared: a figure, whose it is, over whose (None: as it is), the target, and for which models.
_TRAINING = (
    ("time", "ms", "gander.compile", "torch.compile", 0.92, ("small", "medium")),
    ("memory", "peak_gib", "gander.compile", "torch.compile", 0.85, ("small", "medium")),
    ("time", "ms", "gander-linear", "gander", 1, ("small", "medium")),
    ("time", "ms", "gander-linear.compile", "gander.compile", 1, ("small", "medium")),
    ("memory, GiB", "peak_gib", "gander-linear.compile", None, 12, ("small",)),
)


def _training(records) -> Iterator[Check]:
    for mine in runs_of_training([r for r in of(records, "train") if r["on"] == "cuda"]):
        results = of_contestants(mine)
        for what, field, name, other, target, of_models in _TRAINING:
            if mine[0]["model"] not in of_models:
                continue
            compared = [results.get(who, {"not_run": ""}) for who in (name, other) if who]
            figures = [figures.get(field) for figures in compared]
            ratio = None if None in figures else figures[0] / (figures[1] if other else 1)
            kind = f"{name}: {what}" + (f" over {other}'s" if other else "")
            without = "not run" if any("not_run" in figures for figures in compared) else "failed"
            yield Check(kind, "training", mine[0]["model"], ratio, at_most=target, without=without)


# Whole models: who is compared with whom, because both have the same kind of loss, and how many MiB more
# memory it may take.
_SAME_LOSS = (("gander-hf", "liger", 64), ("gander-hf-linear", "liger-linear", 600))


def _around(figures: dict) -> float:
    return around(figures["kernels_ms"])


def _whole_models(records) -> Iterator[Check]:
    """By the median over the runs. A ratio is taken within a run, in which the contestants took turns."""
    for mine in runs_of_training([r for r in of(records, "train") if r["on"] == "cuda"]):
        model = mine[0]["model"]
        if model not in WHOLE_MODELS:
            continue
        runs: dict[int, dict[str, dict]] = {}
        for r in mine:
            runs.setdefault(r.get("run", 1), {}).update(r["results"])
        for name, other, mib in _SAME_LOSS:
            both = [(run[name], run[other]) for run in runs.values() if name in run and other in run]
            ran = [(a, b) for a, b in both if "ms" in a and "ms" in b]
            point = model if len(ran) >= models.RUNS else f"{model}, {len(ran)} of {models.RUNS} runs"
            without = (
                "not run" if any("not_run" in f for pair in both for f in pair) or not both else "failed"
            )

            def check(kind, figures, at_most, *, name=name, point=point, without=without):
                measured = models.median_of(figures)
                return Check(f"{name}: {kind}", "training", point, measured, at_most=at_most, without=without)

            kernels = (_around(a) / _around(b) for a, b in ran)
            yield check(f"time around products, attention and optimizer over {other}'s", kernels, 0.95)
            yield check(f"time over {other}'s", (a["ms"] / b["ms"] for a, b in ran), 1)
            more = ((a["peak_gib"] - b["peak_gib"]) * 1024 for a, b in ran)
            yield check(f"memory above {other}'s, MiB", more, mib)
        for name in ("gander-hf-qk", "gander-hf-linear-qk"):  # an option that stays if it gains so much
            other = name.removesuffix("-qk")
            both = [(run[name], run[other]) for run in runs.values() if name in run and other in run]
            ratios = [a["ms"] / b["ms"] for a, b in both if "ms" in a and "ms" in b]
            if ratios:
                kind = f"{name}: time over {other}'s"
                yield Check(kind, "training", model, models.median_of(ratios), at_most=0.99)
        attention = [
            run["torch.compile"]["kernels_ms"]["attention"] / run["torch"]["kernels_ms"]["attention"]
            for run in runs.values()
            if all("kernels_ms" in run.get(who, {}) for who in ("torch", "torch.compile"))
        ]
        if attention:  # a mask would cost it its fast kernel, and then no compiled figure says anything
            kind, median = "torch.compile: attention's time over torch's", models.median_of(attention)
            yield Check(kind, "training", model, median, at_most=1.1)


def _with_options(records) -> Iterator[Check]:
    """A cap needs a tanh of each logit, and statistics more of each, which may not cost more than this."""
    for r in (*of(records, "options"), *of(records, "tokens")):
        if most := most_of_limit(r):
            share = r["results"].get("gander", {}).get("ratio")
            name = "time with a cap over the limit's" if "softcap" in r["op"] else "time over the limit's"
            yield Check(name, r["op"], point_of(r), share and 1 / share, at_most=most)


def _faster_than(name: str, record: dict, target: float) -> Iterator[Check]:
    speed = times_as_fast(record, name)
    if speed is not None:
        yield Check(f"speed over {name}'s", record["op"], point_of(record), speed, at_least=target)


def _against_quack(records) -> Iterator[Check]:
    """Geometric means over the row lengths of the grid."""
    for op, dtype in unique((r["op"], r["dtype"]) for r in records):
        mine = [r for r in records if (r["op"], r["dtype"]) == (op, dtype)]
        long = [r for r in mine if r["n"] >= 131072]
        wanted = [(mine, 1.03 if op in FORWARD else 1.15 if op == "rmsnorm_backward" else 1.0, dtype)]
        if op == "rmsnorm_backward":
            wanted.append((long, 1.4, f"{dtype}, N >= 131072"))
        for points, target, where in wanted:
            speeds = [speed for r in points if (speed := times_as_fast(r, "quack")) is not None]
            if speeds:
                mean = statistics.geometric_mean(speeds)
                yield Check("speed over quack's, geometric mean", op, where, mean, at_least=target)


def _host(records) -> Iterator[Check]:
    for r in filter(on_gpu, of(records, "host")):
        op, mode, us = r["op"], r["mode"], {name: figures.get("us") for name, figures in r["results"].items()}
        if (op, mode) not in HOST_TARGETS or not us.get("gander"):
            continue
        half = 0.6 if (op, mode) == ("softmax", "with gradient") else 0.5
        for name, target in (("torch", HOST_TARGETS[op, mode]), ("quack", half), ("liger", half)):
            if us.get(name):
                yield Check(f"host time over {name}'s", op, mode, us["gander"] / us[name], at_most=target)
        if us.get("gander.compile") and us.get("torch.compile"):
            ratio = us["gander.compile"] / us["torch.compile"]
            yield Check("host time compiled over torch's compiled", op, mode, ratio, at_most=1)


def _first_calls(records) -> Iterator[Check]:
    for r in filter(on_gpu, of(records, "load")):
        mine = r["results"]["gander"]
        yield Check("library, MB", "", "", mine.get("megabytes"), at_most=LIBRARY_MEGABYTES)
        yield Check("load of the library, ms", "", "", mine.get("library"), at_most=LIBRARY_MS)
        for op in ("softmax", "rmsnorm", "cross_entropy"):
            worst = max(mine[op]["new"]) if op in mine else None
            yield Check("first call of a new shape, ms", op, "worst", worst, at_most=NEW_SHAPE_MS)


def _beside_xla(records) -> Iterator[Check]:
    for r in of(records, "jax", on="cuda"):
        if "us" in r["results"].get("xla", {}):
            least = least_over_xla(r)
            yield Check("speed over XLA's", r["op"], point_of(r), times_as_fast(r, "xla"), at_least=least)


def _algorithms(records) -> Iterator[Check]:
    for r in of(records, "algorithms"):
        us = {name: figures["us"] for name, figures in r["results"].items() if "us" in figures}
        auto, forced = us.pop("gander", None), us
        if forced:
            ratio = auto and auto / min(forced.values())
            yield Check("time of auto over the best", r["op"], point_of(r), ratio, at_most=AUTO_WITHIN)


def _in_several_runs(records) -> Iterator[Check]:
    for section in models.SECTIONS:
        for runs in models.by_case(records, section).values():
            point = point_of({k: v for k, v in runs[0].items() if k != "run"})
            for target, verdict in models.verdicts(runs).items():
                final = verdict.met() or verdict.runs >= models.RUNS
                where = point if final else f"{point}, {verdict.runs} of {models.RUNS} runs"
                yield Check(f"{target}, {section}", runs[0]["op"], where, verdict.measured, verdict.at_least)


def _cpu(records) -> Iterator[Check]:
    for r in of(records, "cpu"):
        if r["m"] * r["n"] * BYTES[r["dtype"]] < 4 << 10:
            targets = {"torch": 0.667}  # at most 1.5 times torch's time
        else:
            targets = {"torch": 1.0 if r["op"].startswith("softmax") else 1.5, "torch.compile": 1.0}
        for name, target in targets.items():
            if "us" in r["results"].get(name, {}):
                speed = times_as_fast(r, name)
                yield Check(f"speed over {name}'s, CPU", r["op"], point_of(r), speed, at_least=target)


_CHECKS: tuple[Callable, ...] = (
    _in_several_runs, _against_the_limit, _against_peers, _with_upstream, _with_options, _linear, _head,
    _sharded, _training, _whole_models, _host, _first_calls, _algorithms, _beside_xla, _cpu,
)  # fmt: skip


def checks(records: list[dict]) -> list[Check]:
    return [check for kind in _CHECKS for check in kind(records)]


def _targets(records) -> list[Table]:
    """How many points meet each target, and those that do not."""
    found = checks(records)
    counts = []
    for name in unique(check.target for check in found):
        mine = [check.met() for check in found if check.target == name]
        counts.append([name, str(sum(mine)), str(len(mine))])
    misses = [check.row() for check in found if not check.met()]
    tables = [Table("Targets", ["target", "met", "of"], counts, labels=1)]
    if misses:
        columns = ["target", "operator", "point", "measured", "target"]
        tables.append(Table("Targets that are missed", columns, misses, labels=3))
    return tables


# ---- Tables ----


def _compact(title: str, records, heading: Callable, mine: Callable, other: Callable) -> Table:
    """Operators against shapes: gander, and the best of the others."""
    points = {(r["op"], heading(r)): r for r in records}
    columns = unique(heading(r) for r in sorted(records, key=lambda r: r["n"]))
    rows = []
    for op in unique(op for op, _ in points):
        for name, cell in (("gander", mine), ("best other", other)):
            row = [cell(points[op, column]) if (op, column) in points else "" for column in columns]
            if any(text.strip("-") for text in row):  # nobody else may have been measured
                rows.append([TITLES[op], name, *row])
    return Table(title, ["operator", "", *columns], rows)


def _shape(record: dict) -> str:
    return f"{record['m']} x {record['n']}"


def _speed(record: dict) -> str:
    figures = record["results"].get("gander", {})
    share = f" ({figures['ratio']:.2f})" if "ratio" in figures else ""
    return f"{figures['tbps']:.2f}{share}" if "tbps" in figures else "-"


def _time(record: dict) -> str:
    figures = record["results"].get("gander", {})
    times = f" ({1 / figures['ratio']:.2f})" if figures.get("ratio") else ""
    return f"{figures['us']:.1f}{times}" if "us" in figures else "-"


def _best(field: str, form: str) -> Callable[[dict], str]:
    def cell(record):
        best = best_other(record, field)
        return "-" if best is None else form.format(best)

    return cell


def _throughput(records) -> list[Table]:
    tables = []
    for section, title, heading in (
        ("throughput", "TB/s by row length N", lambda r: str(r["n"])),
        ("odd", "TB/s off the grid", _shape),
    ):
        for dtype in unique(r["dtype"] for r in of(records, section)):
            mine = of(records, section, dtype=dtype)
            best = _best("tbps", "{:.2f}")
            tables.append(_compact(f"{title}, {dtype}", mine, heading, _speed, best))
    return tables


def _few(records) -> list[Table]:
    tables = []
    for dtype, m in sorted({(r["dtype"], r["m"]) for r in of(records, "few")}):
        mine = of(records, "few", dtype=dtype, m=m)
        best = _best("us", "{:.1f}")
        tables.append(_compact(f"Few rows, us, {dtype}, M = {m}", mine, _shape, _time, best))
    return tables


_TABLES: tuple[Callable, ...] = (
    models_tables, norms_tables, glu_tables, rotary_tables, _throughput, _few, invariant_tables, step_tables,
    options_tables, tokens_tables, linear_tables, head_tables, sharded_tables, host_tables, load_tables,
    algorithms_tables, cpu_tables, train_tables, jax_tables, summary,
)  # fmt: skip


# ---- The document ----

_HEAD = """\
# Results

Written by this command; do not edit:

    {command}

- TB/s count the (M, N) tensors that an operator must read and write, and nothing else. In the tables by row
  length M is 32768, 16384 at N = 131072 and 8192 at N = 262144.
- The limit is the fastest of several plain kernels that only move those bytes, measured in the same process.
  In brackets after a speed stands the share of the limit's speed, after a time how many times the limit's
  time it is. RMSNorm's weights are not counted.
- On a GPU the L2 cache is cold, times are medians, and all providers take turns in one process.
- "best other" is the fastest of the providers that the section names beside gander.

[README.md](README.md) says how a point is measured. [TRIED.md](TRIED.md) says what bounds the points that
miss their target, and what was tried. Each file below holds all figures, with device, versions and commit on
each line.
"""


_SIMD = {"gander": "simd", "torch": "torch_simd"}


def _title(name: str, records) -> str:
    return f"{newest(records)['environment']['device']}, {name}"


def _facts(records) -> str:
    last = newest(records)
    facts = last["environment"]
    where = [f"driver {facts['driver']}" if on_gpu(last) else f"{facts['threads']} threads"]
    where += [f"{who} with {facts[key]}" for who, key in _SIMD.items() if key in facts]
    where += [f"torch {facts['torch']}", f"Python {facts['python']}"]
    others = unique(
        name if name == "torch" else f"{name} {version}"
        for record in records
        for name, version in record.get("versions", {}).items()
        if not name.startswith("gander")
    )
    beside = f"; beside {', '.join(others)}" if others else ""
    commits = unique(r["environment"]["commit"][:12] for r in sorted(records, key=lambda r: r["date"]))
    return f"{', '.join(where)}; commit {', '.join(commits)}; {last['date'][:10]}{beside}."


def document(sources: dict[str, list[dict]], command: str) -> str:
    """The Markdown of measurements by the name of their file."""
    sources = {name: latest(records) for name, records in sources.items()}
    parts = [_HEAD.format(command=command), "## Targets, and what misses them"]
    for name, records in sources.items():
        parts.append(f"### {_title(name, records)}")
        parts += [table.markdown() for table in _targets(records)]
    for name, records in sources.items():
        parts.append(f"## {_title(name, records)}")
        parts.append(f"{_facts(records)} All figures: [{name}](results/{name}).")
        parts += [table.markdown() for make in _TABLES for table in make(records)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
