"""Plots of what was measured: one picture for each section and data type."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from .models import BYTES
from .report import (
    TITLES,
    curve_differences,
    latest,
    newest,
    of_contestants,
    on_gpu,
    runs_of_training,
    train_title,
    unique,
)

_STYLES = {
    "limit": dict(color="black", linestyle="--", marker=""),
    "gander": dict(color="tab:red", linewidth=2),
    "torch": dict(color="tab:blue"),
    "torch.compile": dict(color="tab:cyan"),
    "quack": dict(color="tab:green"),
    "liger": dict(color="tab:orange"),
    "liger-cutedsl": dict(color="tab:brown"),
    "cudnn": dict(color="tab:purple"),
    "trl": dict(color="tab:olive"),
    "verl": dict(color="tab:gray"),
    "liger-linear": dict(color="tab:brown"),
    "gander-linear": dict(color="tab:pink", linewidth=2),
    "gander+liger": dict(color="tab:olive", linewidth=2),
    "gander-linear+liger": dict(color="tab:gray", linewidth=2),
    "gander.compile": dict(color="tab:red", linestyle="--"),
    "gander-linear.compile": dict(color="tab:pink", linestyle="--"),
    "gander-loss.compile": dict(color="tab:red", linestyle=":"),
}


_MOST_INSIDE = 8  # names in a legend that hides no lines


def draw(records: list[dict], path: Path) -> list[Path]:
    """Draws next to the JSON lines of this path. Returns the files. Raises ImportError without matplotlib."""
    records = latest(records)
    made = []
    for name, title, panels in _pictures(records):
        made.append(path.with_name(f"{path.stem}-{name}.png"))
        _figure(records, title, panels).savefig(made[-1], dpi=110)
    return made


def draw_throughput(records: list[dict], path: Path | IO[bytes]) -> None:
    """The README's plot, an SVG: throughput in bfloat16. Nothing where that was not measured."""
    from matplotlib import rc_context

    records = latest(records)
    for name, title, panels in _pictures(records):
        if name == "throughput-bfloat16":
            with rc_context(
                {"svg.hashsalt": "gander", "svg.fonttype": "none"}
            ):  # reproducible, and text as text
                _figure(records, title, panels).savefig(path, format="svg", metadata={"Date": None})


# ---- Pictures for a notebook: figures that are not in a file ----


def throughput(records: list[dict], title: str, figure: str = "us"):
    """A panel for each operator: how many bytes a second over the length of a row. TB/s of a GPU, GB/s of a
    CPU. figure: the time, "us" for the median, "low" for the 10th percentile."""
    panels: Panels = {}
    for op in unique(r["op"] for r in records):
        mine = [r for r in records if r["op"] == op]
        unit, label = (1e12, "TB/s") if on_gpu(mine[0]) else (1e9, "GB/s")
        panels[TITLES[op]] = _lines(mine, "n", _per_second(unit, figure), label)
    return _figure(records, title, panels)


def cpu(records: list[dict], title: str):
    """A panel for each operator: GB/s over the size of a tensor."""
    ops = unique(r["op"] for r in records)
    panels: Panels = {TITLES[op]: _over_bytes([r for r in records if r["op"] == op]) for op in ops}
    return _figure(records, title, panels)


def loss_costs(records: list[dict], over: str, title: str):
    """Time, and peak memory where it was measured, of a loss with its gradients, over "n" (classes) or "m"
    (tokens). The axes are linear: what grows in proportion is a straight line."""
    words = {"n": "classes", "m": "tokens"}[over]
    panels: Panels = {}
    for op in unique(r["op"] for r in records):
        mine = [r for r in records if r["op"] == op]
        panels[f"{TITLES[op]}: time"] = _lines(mine, over, _scaled("us", 1e-3), "ms", words)
        if any("peak MiB" in figures for r in mine for figures in r["results"].values()):
            memory = _lines(mine, over, _scaled("peak MiB"), "MiB", words)
            panels[f"{TITLES[op]}: peak memory"] = memory
    return _figure(records, title, panels)


def loss_differences(records: list[dict], title: str):
    """A panel for each run of `train`: how far the loss of each contestant is from torch's."""
    panels = {f"{run[0]['model']}": _differences(curve_differences(run)) for run in runs_of_training(records)}
    return _figure(records, title, panels)


def shares_of_limit(records: list[dict], title: str):
    """A panel for each operator: bars of the share of the limit's speed, for each row length of each
    contestant. A contestant that refuses a length has no bar but a word."""
    panels: Panels = {}
    for op in unique(r["op"] for r in records):
        panels[TITLES[op]] = _shares([r for r in records if r["op"] == op])
    return _figure(records, title, panels)


def _figure(records, title: str, panels: "Panels"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (panel, fill) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(panel)
        fill(axes)
        axes.grid(alpha=0.3)
    named = [(axes, axes.get_legend_handles_labels()[1]) for axes in figure.axes]
    for place, (axes, names) in enumerate(named):
        if 0 < len(names) <= _MOST_INSIDE:
            axes.legend(fontsize="small")
        elif names and all(names != later for _, later in named[place + 1 :]):
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    environment = newest(records)["environment"]
    figure.suptitle(f"{title}, {environment['device']}, torch {environment['torch']}")
    return figure


Panels = dict[str, Callable]


def _pictures(records) -> Iterable[tuple[str, str, Panels]]:
    """A picture's name, its title, and what fills its panels."""
    for section, title in (
        ("throughput", "Throughput"),
        ("odd", "Throughput off the grid"),
        ("few", "Few rows"),
        ("cpu", "CPU"),
    ):
        mine = [r for r in records if r["section"] == section]
        for dtype in unique(r["dtype"] for r in mine):
            panels: Panels = {}
            for op, m in unique(
                (r["op"], r["m"] if section == "few" else None) for r in mine if r["dtype"] == dtype
            ):
                points = [r for r in mine if (r["dtype"], r["op"]) == (dtype, op) and m in (None, r["m"])]
                panel = TITLES[op] + (f", M = {m}" if m else "")
                if section == "few":
                    panels[panel] = _lines(points, "n", _scaled("us"), "us")
                elif section == "cpu":
                    panels[panel] = _over_bytes(points)
                else:
                    panels[panel] = _lines(points, "n", _scaled("tbps"), "TB/s")
            threads = f", {mine[0]['environment']['threads']} threads" if section == "cpu" else ""
            yield f"{section}-{dtype}", f"{title}, {dtype}{threads}", panels
    for section, title in (("host", "Host time of a call"), ("step", "A step")):
        mine = [r for r in records if r["section"] == section]
        if mine:
            ops = unique(r["op"] for r in mine)
            yield section, title, {TITLES[op]: _bars([r for r in mine if r["op"] == op]) for op in ops}

    for number, mine in enumerate(runs_of_training(records)):
        results = {name: figures for name, figures in of_contestants(mine).items() if "ms" in figures}
        if results:
            panels = {"time of a step": _contestants(results, "ms", "ms")}
            if any("peak_gib" in figures for figures in results.values()):
                panels["peak memory"] = _contestants(results, "peak_gib", "GiB")
            if "torch" in results and len(results) > 1:
                panels["loss, difference from torch's"] = _differences(curve_differences(mine))
            else:
                panels["loss"] = _curves(results)
            name = f"train-{mine[0]['model']}" + (f"-{number}" if number else "")
            yield name, train_title(mine), panels


def _contestants(results: dict[str, dict], figure: str, label: str) -> Callable:
    """A bar for each contestant that has the figure."""

    def fill(axes):
        having = [name for name, figures in results.items() if figure in figures]
        for at, name in enumerate(having):
            color = _STYLES.get(name, {}).get("color")
            hatch = "//" if _STYLES.get(name, {}).get("linestyle") == "--" else None
            axes.bar(at, results[name][figure], color=color, hatch=hatch)
        axes.set_xticks(range(len(having)), having, rotation=45, ha="right")
        axes.set(ylabel=label)

    return fill


def _curves(results: dict[str, dict]) -> Callable:
    def fill(axes):
        for name, figures in results.items():
            axes.plot(figures["losses"], label=name, **_STYLES.get(name, {}))
        axes.set(xlabel="step", ylabel="loss")

    return fill


def _figures(record: dict) -> dict[str, dict]:
    """By provider, with the limit as one more."""
    return record["results"] | ({"limit": record["limit"]} if "limit" in record else {})


Value = Callable[[dict, str], float | None]  # what a record has of a contestant


def _scaled(field: str, factor: float = 1.0) -> Value:
    def value(record, name):
        figure = _figures(record).get(name, {}).get(field)
        return None if figure is None else figure * factor

    return value


def _tensor_bytes(record: dict) -> int:
    """The size of one (M, N) tensor."""
    return record["m"] * record["n"] * BYTES[record["dtype"]]


def _per_second(unit: float, figure: str = "us") -> Value:
    """The bytes that the operator has to move, by the time."""
    from .cases import ALL

    def value(record, name):
        us = _figures(record).get(name, {}).get(figure)
        moved = len(ALL[record["op"]].traffic) * _tensor_bytes(record)
        return None if us is None else moved / us * 1e6 / unit

    return value


def _lines(points: list[dict], over: str, value: Value, label: str, linear: str | None = None) -> Callable:
    """linear: what a linear axis counts, in place of a logarithmic one."""
    points = sorted(points, key=lambda record: record[over])

    def fill(axes):
        for name in unique(name for record in points for name in _figures(record)):
            found = [(r[over], v) for r in points if (v := value(r, name)) is not None]
            if found:
                axes.plot(
                    *zip(*found, strict=True),
                    label=name,
                    **dict(marker="o", markersize=3) | _STYLES.get(name, {}),
                )
        axes.set(xlabel=linear or over.upper(), ylabel=label)
        if linear:
            axes.set_xlim(left=0)
        else:
            axes.set_xscale("log", base=2)
        if label == "us":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)

    return fill


def _over_bytes(points: list[dict]) -> Callable:
    """GB/s over the size of a tensor. A line joins the points of the row length that most of them have; the
    others are hollow, with their row length beside the highest."""
    value = _per_second(1e9)
    points = sorted(points, key=_tensor_bytes)
    lengths = [record["n"] for record in points]
    common = max(unique(lengths), key=lengths.count)

    def fill(axes):
        for name in unique(name for record in points for name in _figures(record)):
            style = dict(marker="o", markersize=4) | _STYLES.get(name, {})
            on = [(_tensor_bytes(r), v) for r in points if r["n"] == common and (v := value(r, name))]
            off = [(_tensor_bytes(r), v) for r in points if r["n"] != common and (v := value(r, name))]
            if on:
                axes.plot(*zip(*on, strict=True), label=name, **style)
            if off:
                hollow = style | dict(linestyle="", markerfacecolor="none")
                axes.plot(*zip(*off, strict=True), label=None if on else name, **hollow)
        for record in points:
            speeds = [v for name in _figures(record) if (v := value(record, name))]
            if record["n"] != common and speeds:
                at = _tensor_bytes(record), max(speeds)
                text = f"N = {record['n']}"
                axes.annotate(text, at, (0, 5), textcoords="offset points", ha="center", fontsize="x-small")
        axes.set_xscale("log", base=2)
        first, last = (_tensor_bytes(points[at]).bit_length() - 1 for at in (0, -1))
        ticks = [1 << power for power in range(first, last + 1, 3 if last - first < 16 else 6)]
        axes.set_xticks(ticks, [binary_size(size) for size in ticks], minor=False)
        axes.minorticks_off()
        axes.margins(y=0.12)  # room for the words above the highest points
        axes.set(xlabel=f"size of a tensor, rows of {common}", ylabel="GB/s", ylim=(0, None))

    return fill


def binary_size(size: float) -> str:
    """Bytes as people write them: 64 KiB, 16 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _differences(differences: dict[str, list[float]]) -> Callable:
    def fill(axes):
        for name, values in differences.items():
            axes.plot(range(1, len(values) + 1), values, label=name, **_STYLES.get(name, {}))
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="step", ylabel="loss less torch's")

    return fill


def _shares(points: list[dict]) -> Callable:
    points = sorted(points, key=lambda record: record["n"])

    def fill(axes):
        names = unique(name for record in points for name in record["results"])
        width = 0.8 / len(points)
        for i, record in enumerate(points):
            for at, name in enumerate(names):
                figures = record["results"].get(name, {})
                share = figures.get("ratio")
                place = at + (i - (len(points) - 1) / 2) * width
                color = f"C{i}"
                label = f"N = {record['n']}" if at == 0 else None
                axes.bar(place, share or 0, 0.9 * width, color=color, label=label)
                if "error" in figures:
                    axes.annotate("refused", (place, 0.02), rotation=90, ha="center", fontsize="x-small")
        axes.axhline(1, color="black", linestyle="--")
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set(ylabel="share of the limit's speed")

    return fill


def _bars(points: list[dict]) -> Callable:
    def fill(axes):
        names = unique(name for record in points for name in record["results"])
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            heights = [record["results"].get(name, {}).get("us", 0) for record in points]
            style = {k: v for k, v in _STYLES.get(name, {}).items() if k == "color"}
            axes.bar([at + i * width for at in range(len(points))], heights, width, label=name, **style)
        middle = 0.4 - width / 2
        axes.set_xticks([at + middle for at in range(len(points))], [record["mode"] for record in points])
        axes.set(ylabel="us")

    return fill
