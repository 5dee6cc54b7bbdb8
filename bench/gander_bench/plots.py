"""Plots of what was measured: one picture for each section and data type."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from .report import TITLES, latest, newest, runs_of_training, train_title, unique

_STYLES = {
    "limit": dict(color="black", linestyle="--", marker=""),
    "gander": dict(color="tab:red", linewidth=2),
    "torch": dict(color="tab:blue"),
    "torch.compile": dict(color="tab:cyan"),
    "quack": dict(color="tab:green"),
    "liger": dict(color="tab:orange"),
    "liger-cutedsl": dict(color="tab:brown"),
    "cudnn": dict(color="tab:purple"),
    "liger-linear": dict(color="tab:brown"),
    "gander-linear": dict(color="tab:pink", linewidth=2),
    "gander+liger": dict(color="tab:olive", linewidth=2),
    "gander-linear+liger": dict(color="tab:gray", linewidth=2),
    "gander.compile": dict(color="tab:red", linestyle="--"),
    "gander-linear.compile": dict(color="tab:pink", linestyle="--"),
    "gander-loss.compile": dict(color="tab:red", linestyle=":"),
}


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


def _figure(records, title: str, panels: "Panels"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = min(3, len(panels)), -(-len(panels) // 3)
    figure = Figure(figsize=(5 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (panel, fill) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(panel)
        fill(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    environment = newest(records)["environment"]
    figure.suptitle(f"{title}, {environment['device']}, torch {environment['torch']}")
    return figure


Panels = dict[str, Callable]


def _pictures(records) -> Iterable[tuple[str, str, Panels]]:
    """A picture's name, its title, and what fills its panels."""
    for section, title, figure, label in (
        ("throughput", "Throughput", "tbps", "TB/s"),
        ("odd", "Throughput off the grid", "tbps", "TB/s"),
        ("few", "Few rows", "us", "us"),
        ("cpu", "CPU", "us", "us"),
    ):
        mine = [r for r in records if r["section"] == section]
        for dtype in unique(r["dtype"] for r in mine):
            panels: Panels = {}
            for op, m in unique(
                (r["op"], r["m"] if section == "few" else None) for r in mine if r["dtype"] == dtype
            ):
                points = [r for r in mine if (r["dtype"], r["op"]) == (dtype, op) and m in (None, r["m"])]
                panel = TITLES[op] + (f", M = {m}" if m else "")
                panels[panel] = _lines(points, "m" if section == "cpu" else "n", figure, label)
            yield f"{section}-{dtype}", f"{title}, {dtype}", panels
    for section, title in (("host", "Host time of a call"), ("step", "A step")):
        mine = [r for r in records if r["section"] == section]
        if mine:
            ops = unique(r["op"] for r in mine)
            yield section, title, {TITLES[op]: _bars([r for r in mine if r["op"] == op]) for op in ops}

    for number, mine in enumerate(runs_of_training(records)):
        results = {name: figures for r in mine for name, figures in r["results"].items() if "ms" in figures}
        if results:
            panels = {"time of a step": _contestants(results, "ms", "ms")}
            if any("peak_gib" in figures for figures in results.values()):
                panels["peak memory"] = _contestants(results, "peak_gib", "GiB")
            panels["loss"] = _curves(results)
            name = f"train-{mine[0]['model']}" + (f"-{number}" if number else "")
            yield name, train_title(mine), panels


def _contestants(results: dict[str, dict], figure: str, label: str) -> Callable:
    """A bar for each contestant that has the figure."""

    def fill(axes):
        for name, figures in results.items():
            if figure in figures:
                color = _STYLES.get(name, {}).get("color")
                hatch = "//" if _STYLES.get(name, {}).get("linestyle") == "--" else None
                axes.bar(name, figures[figure], color=color, hatch=hatch)
        axes.tick_params("x", rotation=45)
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


def _lines(points: list[dict], over: str, figure: str, label: str) -> Callable:
    points = sorted(points, key=lambda record: record[over])

    def fill(axes):
        for name in unique(name for record in points for name in _figures(record)):
            found = [(r[over], f[figure]) for r in points if figure in (f := _figures(r).get(name, {}))]
            if found:
                axes.plot(
                    *zip(*found, strict=True),
                    label=name,
                    **dict(marker="o", markersize=3) | _STYLES.get(name, {}),
                )
        axes.set_xscale("log", base=2)
        axes.set(xlabel=over.upper(), ylabel=label)
        if figure == "us":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)

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
