"""How long a call of a compiled JAX program takes: on a GPU its kernels, on the CPU by the host's clock."""

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from .timing import Timing, turns
from .trace import without_overlap

_SAMPLE_S = 5e-3  # of calls that one trace has, but at least three and at most fifty calls
_WARM = 2  # calls before those that are timed


def busy_us(events: Iterable[dict]) -> float:
    """The microseconds of a Chrome trace in which a GPU was not idle.

    Raises RuntimeError if the trace has no kernel.
    """
    events = list(events)
    names = {
        (e["name"], e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and "name" in e.get("args", {})
    }

    def on_gpu(event):
        """Other lines of a GPU have the same time by operation and by module."""
        process = names.get(("process_name", event["pid"], None), "")
        return "/device:GPU" in process and names.get(
            ("thread_name", event["pid"], event["tid"]), ""
        ).startswith("Stream")

    found = [e for e in events if e.get("ph") == "X" and on_gpu(e)]
    if not found:
        raise RuntimeError("jax.profiler's trace has no kernel: its CUPTI does not work here")
    return sum(us for _, us in without_overlap(found))


def _repeat(call: Callable, count: int) -> None:
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)


def _traced_us(call: Callable, count: int) -> float:
    """A call's time on the GPU. Each trace has calls of one contestant alone, so all kernels are its own."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    _repeat(call, _WARM)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            _repeat(call, count)
        (path,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        with gzip.open(path) as file:
            return busy_us(json.load(file)["traceEvents"]) / count


def _wall_us(call: Callable, count: int) -> float:
    _repeat(call, _WARM)
    start = time.perf_counter()
    _repeat(call, count)
    return (time.perf_counter() - start) * 1e6 / count


def in_turns(calls: dict[str, Callable], seconds: float, least: int = 5) -> dict[str, Timing]:
    """Samples of several calls each, at least `least` of each contestant, then more until the seconds are
    over. The calls have run before."""
    if not calls:
        return {}
    sample = _traced_us if jax.default_backend() == "gpu" else _wall_us
    slowest = max(_wall_us(call, 1) for call in calls.values())
    count = min(max(3, round(_SAMPLE_S * 1e6 / max(slowest, 1))), 50)
    samples = {name: [] for name in calls}
    began = time.perf_counter()
    for rounds, turn in enumerate(turns(list(calls))):
        if rounds >= least and time.perf_counter() - began > seconds:
            break
        for name in turn:
            samples[name].append(sample(calls[name], count))
    return {name: Timing.of(values) for name, values in samples.items()}
