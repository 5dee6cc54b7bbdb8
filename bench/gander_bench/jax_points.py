"""The points of `gander_bench jax`: a program, an element type and a shape each, for gander.jax and XLA."""

import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

import gander

from .cases import DTYPES
from .sections import TRAINING, WRONG, Point, each_result

# The grid of `throughput`, and shapes of models.
_HIDDEN = *((8192, n) for n in (4096, 5120, 8192, 14336)), (2048, 7168)
_VOCABULARIES = (8192, 128256), (4096, 151936), (8192, 50257)
SHAPES = *TRAINING, *_HIDDEN, *_VOCABULARIES, (128, 32768), (4, 1 << 20)


def points(
    ops: Iterable[str], dtypes: Iterable[str], shapes: Iterable[tuple[int, int]], seconds: float
) -> Iterator[Point]:
    """seconds: for the timing of each."""
    import jax

    from .jax_programs import CONTESTANTS

    versions = {"gander": gander.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    on = "cuda" if jax.default_backend() == "gpu" else "cpu"
    for dtype, (m, n), op in itertools.product(dtypes, shapes, ops):
        name = {"section": "jax", "op": op, "dtype": dtype, "m": m, "n": n, "on": on}
        yield Point(name, CONTESTANTS, partial(_point, op, dtype, m, n, seconds), versions)


def _point(op: str, dtype: str, m: int, n: int, seconds: float) -> dict:
    import jax

    from .jax_programs import CONTESTANTS, PROGRAMS, inputs_of, off
    from .jax_timing import in_turns

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


# ---- For a process that has torch on the GPU ----

_CHILD = """
import json, sys
from gander_bench import jax_points, sections
print(json.dumps(sections.measured(jax_points.points(*json.loads(sys.argv[1])))))
"""


def has_cuda() -> bool:
    """Whether JAX for CUDA is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


def in_a_fresh_process(
    ops: Iterable[str], dtypes: Iterable[str], shapes: Iterable[tuple[int, int]], seconds: float
) -> list[dict]:
    """The records of points(...). JAX would reserve most of the memory that torch has left, and two profilers
    do not trace one process."""
    given = json.dumps([list(ops), list(dtypes), list(shapes), seconds])
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, given],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        raise RuntimeError((child.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(child.stdout.splitlines()[-1])
