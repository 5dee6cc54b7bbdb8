"""`python -m gander_bench bench`: host cost, load time and throughput, beside torch, torch.compile and
others."""

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

_DEFAULT_SECTIONS = {"cuda": ("host", "load", "throughput"), "cpu": ("host", "load", "cpu")}


def words(text: str | None, allowed, option: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(word for word in text.split(",") if word)
    unknown = [word for word in words if word not in allowed]
    if unknown or not words:
        raise typer.BadParameter(
            f"{', '.join(unknown) or 'nothing'} is not one of {', '.join(allowed)}", param_hint=option
        )
    return words


def shapes_of(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    try:
        shapes = tuple((int(m), int(n)) for m, n in (word.split("x") for word in text.split(",")))
    except ValueError:
        shapes = ()
    if not shapes or min(min(shape) for shape in shapes) < 1:
        raise typer.BadParameter(f"{text} is not of the form 32768x4096,4x1048576", param_hint="--shapes")
    return shapes


def shard_of(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise typer.BadParameter(f"{text} is not of the form 1/4 ... 4/4", param_hint="--shard")
    return int(index), int(count)


def main(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION]",
            help="host, load, throughput, odd, few, models, norms, glu, rotary, options, tokens, "
            "algorithms, invariant, step, linear, head, sharded, cpu; `train` is a command with options of "
            "its own.",
        ),
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(
            help="torch,torch.compile,gander,gander:ALGORITHM,quack,liger,liger-cutedsl,cudnn,flashinfer,"
            "trl,verl"
        ),
    ] = None,
    ops: Annotated[
        str | None, typer.Option(help="Operators, such as softmax_forward,rmsnorm_backward.")
    ] = None,
    dtypes: Annotated[str | None, typer.Option(help="bfloat16,float16,float32")] = None,
    shapes: Annotated[str | None, typer.Option(help="In place of the grid: 32768x4096,4x1048576.")] = None,
    seconds: Annotated[
        float, typer.Option(help="For the timing of one point, at least 10 rounds; under torchrun 50 rounds.")
    ] = 0.4,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines; bench/results/DEVICE-COMMIT.jsonl if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the file, and skip the points in it.")
    ] = False,
    run: Annotated[
        int,
        typer.Option(
            min=1,
            help="Of `models`, `norms`, `glu`, `rotary`, which are judged by three runs: this one's number.",
        ),
    ] = 1,
    missed: Annotated[
        bool,
        typer.Option(
            "--missed",
            help="With --resume: of these sections only the points whose verdict is open, because all runs "
            "in the file have missed a target.",
        ),
    ] = False,
    shard: Annotated[str, typer.Option(help="I/N: only every Nth point, from the Ith on.")] = "1/1",
    limit_seconds: Annotated[float | None, typer.Option(help="Begin no point after this time.")] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: print the tables of this file. May be repeated."),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="With --report: write all tables to this Markdown file, a plot beside it."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with this file's measurements, point by point.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw pictures beside the JSON lines.")] = True,
) -> None:
    """Measures gander beside torch, torch.compile and others.

    Without sections: host, load and throughput on a GPU; host, load and cpu without one. Ratios are always
    taken within one process at one point. What fails is recorded, and the rest goes on.
    """
    from rich.console import Console

    from . import losses

    console = Console(width=None if Console().is_terminal else 160, quiet=losses.rank() > 0)
    before = None if compare is None else records_of(compare, "--compare")
    if report and losses.ranks() > 1:
        raise typer.BadParameter("measures nothing: run it without torchrun", param_hint="--report")
    if report:
        files = {path: records_of(path, "--report") for path in report}
        for path, records in files.items():
            print_tables(console, records, before)
            if plots:
                draw_plots(console, records, path)
        if results is not None:
            _write_results(console, results, files)
        return
    if results is not None:
        raise typer.BadParameter("needs --report FILE", param_hint="--results")
    if missed and not resume:
        raise typer.BadParameter("needs --resume, and a file with the runs before", param_hint="--missed")
    # The advice of Inductor's developers for reductions; it must be set before Inductor is imported.
    os.environ.setdefault("TORCHINDUCTOR_MULTI_KERNEL", "1")
    # Such kernels fail when they come from Inductor's cache (torch 2.11: "'NoneType' object does not ...").
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    import torch

    from .cases import COMPARED, DEFAULT_PROVIDERS, DTYPES, PROVIDERS
    from .records import Store, default_path, environment
    from .sections import NEEDS_GPU, SECTIONS, Options

    gpu = torch.cuda.is_available()
    sections = words(",".join(chosen), tuple(SECTIONS), "SECTION") if chosen else None
    sections = sections or _DEFAULT_SECTIONS["cuda" if gpu else "cpu"]
    if not gpu and set(sections) & set(NEEDS_GPU):
        wanted = [section for section in sections if section in NEEDS_GPU]
        others = [section for section in SECTIONS if section not in NEEDS_GPU]
        raise typer.BadParameter(
            f"{', '.join(wanted)} need a GPU, and torch finds none; expected some of {', '.join(others)}",
            param_hint="SECTION",
        )
    if losses.ranks() > 1:
        if sections != ("sharded",) or resume or limit_seconds is not None or shard != "1/1":
            raise typer.BadParameter(
                "under torchrun `sharded` alone is measured, without --resume, --limit-seconds and --shard, "
                "by which each rank would choose points of its own",
                param_hint="SECTION",
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if losses.rank() > 0:  # the first one's record is kept
        folder = tempfile.TemporaryDirectory()
        out, plots = Path(folder.name, "record.jsonl"), False
    index, count = shard_of(shard)
    options = Options(
        providers=_installed(console, words(providers, PROVIDERS, "--providers") or DEFAULT_PROVIDERS),
        operators=words(ops, tuple(COMPARED), "--ops"),
        dtypes=words(dtypes, tuple(DTYPES), "--dtypes"),
        shapes=shapes_of(shapes),
        seconds=seconds,
        run=run,
    )
    try:
        store = Store(out or default_path(), resume)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    facts = environment()
    console.print(
        f"gander {facts['gander']} ({facts['commit'][:12]}) on {facts['device']}, torch {facts['torch']}"
    )
    points = [point for section in sections for point in SECTIONS[section](options)]
    if missed:
        points = _undecided(points, records_of(store.path, "--out"))
    gc.freeze()  # what is imported: looking through it after each point takes longer than most points
    complete = measure_all(console, store, points[index - 1 :: count], limit_seconds)
    gc.unfreeze()
    records = records_of(store.path, "--out")
    print_tables(console, [record for record in records if record["section"] in sections], before)
    if plots:
        draw_plots(console, records, store.path)
    console.print(
        f"{'complete' if complete else 'unfinished, go on with --resume'}: {store.path}", soft_wrap=True
    )


def _undecided(points, records: list[dict]) -> list:
    """The points whose verdict is open. A section that has no runs is measured whole."""
    from . import models

    runs = {section: models.by_case(records, section) for section in models.SECTIONS}

    def before(point) -> list[dict]:
        return runs.get(point.name["section"], {}).get(models.case_of(point.name), [])

    return [point for point in points if models.is_undecided(before(point))]


def _installed(console, names) -> tuple[str, ...]:
    from .sections import installed

    found, reasons = installed(names)
    for name, why in reasons.items():
        console.print(f"{name} is left out: {why}", markup=False)
    if not found:
        raise typer.BadParameter("none of them can be imported here", param_hint="--providers")
    return tuple(found)


def measure_all(console, store, points, limit_seconds) -> bool:
    """Whether all points are in the store now."""
    from .sections import context_is_lost, figures_of, forget

    began = time.monotonic()
    for number, point in enumerate(points, 1):
        if store.has(point.name, point.providers):
            continue
        if limit_seconds is not None and time.monotonic() - began > limit_seconds:
            return False
        start = time.monotonic()
        figures = figures_of(point)
        store.add(point.name, figures, point.versions)
        line = _line(number, len(points), point.name, figures, time.monotonic() - start)
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        if context_is_lost():
            console.print(
                "The GPU is lost to this process after an error; --resume goes on with the next point."
            )
            raise typer.Exit(1)
        forget()
    return True


def _line(number, count, name, figures, seconds) -> str:
    parts = ("section", "op", "dtype", "weight", "mode")
    what = " ".join(str(name[part]) for part in parts if part in name)
    shape = f" {name['m']}x{name['n']}" if "m" in name else ""
    shape += f" on each of {name['ranks']} ranks" if "ranks" in name else ""
    results = []
    for who, result in figures["results"].items():
        share = f" ({result['ratio']:.3f})" if "ratio" in result else ""
        if "error" in result:
            results.append(f"{who} failed: {result['error'][:60]}")
        elif "us" in result:
            results.append(f"{who} {result['us']:.1f} us{share}")
    return f"{number}/{count} {what}{shape}: {', '.join(results) or 'done'} [{seconds:.1f} s]"


def records_of(path: Path, option: str) -> list[dict]:
    from .records import read

    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}", param_hint=option)
    try:
        return read(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def print_tables(console, records: list[dict], before: list[dict] | None) -> None:
    from .report import comparison, summary, tables

    shown = tables(records) + summary(records)
    if before is not None:
        shown += comparison(records, before)
    for table in shown:
        console.print(table.rich())


def _write_results(console, path: Path, files: dict[Path, list[dict]]) -> None:
    from .plots import draw_throughput
    from .results import document

    reports = " ".join(f"--report {file.as_posix()}" for file in files)
    command = f"./build.sh bench --no-plots {reports} --results {path.as_posix()}"
    path.write_text(document({file.name: records for file, records in files.items()}, command))
    console.print(f"written: {path}", soft_wrap=True)
    draw_throughput(next(iter(files.values())), path.with_name("throughput.svg"))


def draw_plots(console, records: list[dict], path: Path) -> None:
    from .plots import draw

    try:
        for picture in draw(records, path):
            console.print(f"drawn: {picture}", soft_wrap=True)
    except ImportError as error:
        console.print(f"nothing is drawn: {error}", markup=False)
