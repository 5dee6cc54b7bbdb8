"""`python -m gander_bench jax`: gander.jax beside formulas that XLA fuses."""

from pathlib import Path
from typing import Annotated

import typer


def main(
    ops: Annotated[
        str | None, typer.Option(help="Programs, such as softmax_forward,cross_entropy_mean_gradient.")
    ] = None,
    dtypes: Annotated[str | None, typer.Option(help="bfloat16,float16,float32")] = None,
    shapes: Annotated[str | None, typer.Option(help="In place of the grid: 32768x4096,4x1048576.")] = None,
    seconds: Annotated[float, typer.Option(help="For the timing of one point, at least 5 rounds.")] = 0.4,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines; if not given, those of `bench` with -jax in the name.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the file, and skip the points in it.")
    ] = False,
    shard: Annotated[str, typer.Option(help="I/N: only every Nth point, from the Ith on.")] = "1/1",
    limit_seconds: Annotated[float | None, typer.Option(help="Begin no point after this time.")] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: print the table of these files. May be repeated."),
    ] = None,
) -> None:
    """Measures softmax, the norms and cross-entropy of gander.jax beside the formulas under jax.jit.

    On a GPU the time is that of the kernels, by jax.profiler; on the CPU, that of a call. The two take turns.
    Results that disagree are a failure of gander's.
    """
    from rich.console import Console

    from .command import measure_all, print_tables, records_of, shapes_of, shard_of, words

    console = Console(width=None if Console().is_terminal else 160)
    if report:
        print_tables(console, [r for path in report for r in records_of(path, "--report")], None)
        return
    import jax

    from .cases import DTYPES
    from .jax_points import SHAPES, points
    from .jax_programs import PROGRAMS
    from .records import Store, default_path, environment

    index, count = shard_of(shard)
    named = words(ops, tuple(PROGRAMS), "--ops") or tuple(PROGRAMS)
    kinds = words(dtypes, tuple(DTYPES), "--dtypes") or ("bfloat16",)
    chosen = list(points(named, kinds, shapes_of(shapes) or SHAPES, seconds))
    default = default_path()
    try:
        store = Store(out or default.with_name(f"{default.stem}-jax.jsonl"), resume)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    facts = environment()
    where = f"{jax.default_backend()} of {facts['device']}"
    console.print(f"gander {facts['gander']} ({facts['commit'][:12]}) on the {where}, jax {jax.__version__}")
    complete = measure_all(console, store, chosen[index - 1 :: count], limit_seconds)
    print_tables(console, [r for r in records_of(store.path, "--out") if r["section"] == "jax"], None)
    console.print(
        f"{'complete' if complete else 'unfinished, go on with --resume'}: {store.path}", soft_wrap=True
    )
