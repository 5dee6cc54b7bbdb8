"""The limit, and where gander stands: docs/how.md and docs/performance.md."""

import statistics

from gander_bench import models, report, stored

from . import ROOT
from .measured import GRID, IN_PLACE, INVARIANT, PEERS, card, geomean, points_of, ratios, records_of
from .tables import named, table_of

# Later files replace the points that earlier ones share with them.
_SHAPES_OF_MODELS = ("h200-ace71b4", "h200-727a294", "h200-1ed7d17", "h200-d162d87-few")
_HOST = {"H100": GRID, "H200": "h200-fece478-host"}
_ALGORITHMS = "h100-ff72783-algorithms"
_TRAFFIC = {  # an operator that moves it
    "1 read": "cross_entropy_forward",
    "1 read, 1 written": "softmax_forward",
    "2 read, 1 written": "softmax_backward",
}
_DATASHEET = {"H100": 3352, "H200": 4917}  # GB/s, as ops/devices.go has them


def _point(op: str, m: int, n: int, file: str, section: str, dtype: str) -> dict:
    (found,) = points_of(op, file, section, m=m, n=n, dtype=dtype)
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
    note = f"TB/s of plain kernels, M = 32768, bfloat16. The last column is for N = 65536. {named(*files)}"
    return table_of(columns, rows, note, align="llr")


def exponentials(op: str = "softmax_forward", per_element: int = 1, file: str = GRID) -> str:
    """The percentage of a GPU's exponentials that an operator needs at the speed that it reaches.

    132 SMs compute 16 in each clock (CUDA's programming guide), of 1.98 GHz at most (NVIDIA's datasheet).
    """
    point = _point(op, 32768, 4096, file, "throughput", "bfloat16")
    each_second = per_element * point["m"] * point["n"] / (_figures(point, "gander")["us"] * 1e-6)
    return f"{100 * each_second / (132 * 16 * 1.98e9):.0f} %"


def over_the_grid(file: str = GRID, dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")) -> str:
    """A table of the share of the limit and of the speed over each peer, by operator: geometric means."""
    all_points = [p for p in report.of(records_of(file), "throughput") if p["dtype"] in dtypes]
    names = [name for name in ("torch", "quack", "liger") if any(ratios([p], name) for p in all_points)]
    rows = []
    for op in report.unique(p["op"] for p in all_points):
        points = [p for p in all_points if p["op"] == op]
        shares = [p["results"]["gander"]["ratio"] for p in points]
        means = [geomean(points, name) for name in names]
        cells = ["" if mean is None else f"{mean:.2f}" for mean in means]
        worst = f"{min(shares):.2f}"
        rows.append([report.TITLES[op], f"{statistics.geometric_mean(shares):.2f}", worst, *cells])
    columns = ["operator", "share of the limit", "at worst", *(f"over {PEERS[name]}" for name in names)]
    note = f"{card(file)}, {', '.join(dtypes)}, geometric means over the row lengths. {named(file)}"
    return table_of(columns, rows, note)


def _of_models(files: tuple[str, ...] = _SHAPES_OF_MODELS, section: str = "models") -> dict:
    cases: dict = {}
    for file in files:
        cases |= models.by_case(records_of(file), section)
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
    note = f"H200, geometric means; shares of the limit from {least} rows on. {named(*_SHAPES_OF_MODELS)}"
    return table_of(columns, rows, note)


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
    cases = _of_models() | _of_models((IN_PLACE,), "norms")
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
        rows.append([title, f"{case.m} x {case.n}", case.dtype, speed, PEERS.get(best, best)])
    columns = ["operator", "rows", "dtype", "speed over the other's", "other"]
    return table_of(columns, rows, f"H200. {named(*_SHAPES_OF_MODELS, IN_PLACE)}", align="lllrl")


def host() -> str:
    """A table of the host's time of a call on a 4 x 256 tensor."""
    rows = []
    for gpu, file in _HOST.items():
        for record in report.of(records_of(file), "host"):
            if record["mode"] == "forward and backward":
                continue
            taken = {name: each["us"] for name, each in record["results"].items() if "us" in each}
            cells = [f"{taken['gander']:.1f}", f"{taken['torch']:.1f}"]
            cells.append(f"{taken['quack']:.1f}" if "quack" in taken else "")
            cells.append(f"{record['results']['gander']['over torch']:.2f}")
            cells.append(f"{taken['gander.compile'] / taken['torch.compile']:.2f}")
            rows.append([gpu, report.TITLES[record["op"]], record["mode"], *cells])
    columns = ["GPU", "function", "call", "gander, us", "torch, us", "QuACK, us", "gander / torch"]
    note = f"4 x 256 bfloat16 tensors. {named(*_HOST.values())}"
    return table_of([*columns, "both compiled"], rows, note, align="lllr")


def host_us(op: str, who: str = "gander", gpu: str = "H200", mode: str = "forward") -> str:
    """The host's microseconds of a call on a 4 x 256 tensor."""
    (found,) = points_of(op, _HOST[gpu], "host", mode=mode)
    return f"{found['results'][who]['us']:.1f}"


def few(m: int = 4, file: str = GRID) -> str:
    """A table of the microseconds of a few long rows, beside QuACK and a plain kernel."""
    rows = []
    for p in report.of(records_of(file), "few", m=m, dtype="bfloat16"):
        taken = {name: each["us"] for name, each in p["results"].items() if "us" in each}
        cells = [f"{taken['gander']:.1f}"]
        cells += [f"{taken[name]:.1f}" if name in taken else "" for name in ("quack", "torch")]
        rows.append([report.TITLES[p["op"]], f"{m} x {p['n']}", *cells, f"{p['limit']['us']:.1f}"])
    if not rows:
        raise LookupError(f"{file}.jsonl has no few rows of M = {m}")
    columns = ["operator", "rows", "gander, us", "QuACK, us", "torch, us", "limit, us"]
    return table_of(columns, rows, f"{card(file)}, bfloat16. {named(file)}", align="llr")


def training(file: str, model: str = "small") -> str:
    """A table of a step of training: its milliseconds and its memory, uncompiled and compiled."""
    found = report.of(records_of(file), "train", model=model, on="cuda")
    results = {name: each for name, each in report.of_contestants(found).items() if "ms" in each}
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
    return table_of(columns, rows, f"{note}. {named(file)}")


def whole_models(*contestants: str) -> str:
    """A table of whole models on gander.hf beside Liger with the same kind of loss: times and memory of a
    step. Nothing before a GPU has measured them. contestants: all if none is named."""
    measured = stored.whole_models(ROOT / "bench/results")
    if measured is None:
        return ""
    file, found = measured
    rows = []
    for mine in report.runs_of_training(found):
        for name, each in report.of_contestants(mine).items():
            if "ms" in each and name in (contestants or (name,)):
                cells = (
                    f"{each['ms']:.0f}",
                    f"{report.around(each['kernels_ms']):.1f}",
                    f"{each['peak_gib']:.1f}",
                )
                rows.append([mine[0]["model"], name, *cells])
    first = found[0]
    note = (
        f"{card(file)}, half of the layers, {first['batch']} x {first['sequence']} tokens, {first['dtype']}, "
        f"the median of {len({r.get('run') for r in found})} runs. {named(file)}"
    )
    columns = ["model", "contestant", "ms a step", "around products, attention, optimizer", "GiB"]
    return table_of(columns, rows, note, align="llr")


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
                points = [p for op in ops for p in report.of(records_of(file), "cpu", op=op, n=n)]
                cells.append(_range(ratios(points, over)))
        rows.append([title, *cells])
    columns = [f"over {over}, {name}" for over in ("torch", "torch.compile") for name in _CPUS]
    threads = records_of(next(iter(_CPUS.values())))[-1]["environment"]["threads"]
    note = f"{threads} threads, AVX-512, rows of {n}. {named(*_CPUS.values())}"
    return table_of(["", *columns], rows, note)


def invariance() -> str:
    """A table of how many times as long a call with batch_invariant=True takes."""
    points = [
        p for file in (GRID, INVARIANT) for p in report.of(records_of(file), "invariant", dtype="bfloat16")
    ]
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
    note = f"{card()}, bfloat16, times the call without it. {named(GRID)}; of statistics of tokens "
    return table_of(columns, rows, f"{note}{card(INVARIANT)}, {named(INVARIANT)}")


def auto_is_best(within: float = 1.03) -> str:
    """At how many points auto is within a factor of the best forced algorithm, of how many."""
    near = []
    for p in report.of(records_of(_ALGORITHMS), "algorithms"):
        taken = {name: each["us"] for name, each in p["results"].items() if "us" in each}
        mine = taken.pop("gander")
        if taken:
            near.append(mine / min(taken.values()) <= within)
    return f"{sum(near)} of {len(near)}"
