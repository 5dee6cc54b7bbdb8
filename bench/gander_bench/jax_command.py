"""`python -m gander_bench jax`: gander.jax beside formulas that XLA fuses."""

import importlib.metadata
import itertools
import time
from functools import partial
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
    from .jax_programs import PROGRAMS
    from .records import Store, default_path, environment

    index, count = shard_of(shard)
    named = words(ops, tuple(PROGRAMS), "--ops") or tuple(PROGRAMS)
    kinds = words(dtypes, tuple(DTYPES), "--dtypes") or ("bfloat16",)
    points = list(_points(named, kinds, shapes_of(shapes) or _shapes(), seconds))
    default = default_path()
    try:
        store = Store(out or default.with_name(f"{default.stem}-jax.jsonl"), resume)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    facts = environment()
    where = f"{jax.default_backend()} of {facts['device']}"
    console.print(f"gander {facts['gander']} ({facts['commit'][:12]}) on the {where}, jax {jax.__version__}")
    complete = measure_all(console, store, points[index - 1 :: count], limit_seconds)
    print_tables(console, [r for r in records_of(store.path, "--out") if r["section"] == "jax"], None)
    console.print(
        f"{'complete' if complete else 'unfinished, go on with --resume'}: {store.path}", soft_wrap=True
    )


def _shapes() -> tuple[tuple[int, int], ...]:
    """The grid of `throughput`, and shapes of models."""
    from .sections import TRAINING

    hidden = *((8192, n) for n in (4096, 5120, 8192, 14336)), (2048, 7168)
    vocabularies = (8192, 128256), (4096, 151936), (8192, 50257)
    return *TRAINING, *hidden, *vocabularies, (128, 32768), (4, 1 << 20)


def _points(ops, dtypes, shapes, seconds):
    import gander
    import jax

    from .jax_programs import CONTESTANTS
    from .sections import Point

    versions = {"gander": gander.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    on = "cuda" if jax.default_backend() == "gpu" else "cpu"
    for dtype, (m, n), op in itertools.product(dtypes, shapes, ops):
        name = {"section": "jax", "op": op, "dtype": dtype, "m": m, "n": n, "on": on}
        yield Point(name, CONTESTANTS, partial(_point, op, dtype, m, n, seconds), versions)


def _point(op: str, dtype: str, m: int, n: int, seconds: float) -> dict:
    import jax

    from .cases import DTYPES
    from .jax_programs import CONTESTANTS, PROGRAMS, inputs_of, off
    from .jax_timing import in_turns
    from .sections import WRONG, each_result

    inputs = jax.block_until_ready(inputs_of(op, dtype, m, n))
    calls, made = {}, {}

    def prepare(name):
        call = partial(PROGRAMS[op].of(name), *inputs)
        start = time.perf_counter()
        made[name] = jax.block_until_ready(call())
        first = time.perf_counter() - start
        calls[name] = call
        return {"first s": round(first, 3)}

    def compared(name):
        distance = off(made[name], made["xla"])
        if not distance < WRONG[DTYPES[dtype]]:
            del calls[name]
            raise ArithmeticError(f"wrong result: {distance:.1e} off XLA's")
        return {"off": float(f"{distance:.2e}")}

    results = each_result(CONTESTANTS, prepare)
    if calls.keys() == set(CONTESTANTS):
        checked = each_result(("gander",), compared)["gander"]
        results["gander"] = checked if "error" in checked else results["gander"] | checked
    made.clear()
    for name, timing in in_turns(calls, seconds).items():
        results[name] |= timing._asdict()
    return {"results": results}
