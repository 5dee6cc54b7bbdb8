"""Describes this machine. Checks each operator against a float64 reference, and times it."""

import functools
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import gander
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import cases
from ..records import driver_version, processor
from ..timing import GPUTimer, cpu_blocks

# ---- This machine ----


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def describe(console: Console, device: str) -> None:
    info = gander.info()
    table = Table(show_header=False, title="This machine", title_justify="left")
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    threads = f"torch uses {torch.get_num_threads()} threads, OMP_WAIT_POLICY={policy}"
    table.add_row("processor", f"{processor()}, {os.cpu_count()} cores; {threads}")
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        memory = f"{facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} SMs"
        table.add_row("GPU", f"{facts.name}, {memory}, compute capability {facts.major}.{facts.minor}")
        table.add_row("driver", driver_version())
    else:
        table.add_row("GPU", "none that torch can use: everything below runs on the processor")
    table.add_row("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    size = Path(info["library"]).stat().st_size / 1e6
    table.add_row("gander", f"{info['version']} ({info['commit'][:12]}), {size:.1f} MB")
    fast = info["fast_path"]
    table.add_row(
        "eager calls", "bypass torch's dispatcher" if fast is True else f"through torch's dispatcher: {fast}"
    )
    table.add_row("GPU kernels for", ", ".join(info["architectures"]) or "no GPU: a build without CUDA")
    table.add_row("CPU kernels for", info["simd"])
    table.add_row("device of the demo", device)
    console.print(table)


# ---- Each operator, checked and timed ----

SHAPES = {"cuda": ((8192, 1024), (8192, 8192), (2048, 50257)), "cpu": ((512, 1000), (256, 8192))}
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
COMPILE_SECONDS = 60  # after this time nothing more is compiled, so that the demo stays short


class Compiler:
    """Compiles operators with torch.compile until an error occurs or the time is up. Keeps the reason."""

    def __init__(self, device: str, wanted: bool):
        self.seconds = 0.0
        self.obstacle = None if wanted else "not asked for"
        if wanted and device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
            self.obstacle = "it needs a C++ compiler, and there is no g++"
        if wanted and device == "cuda" and importlib.util.find_spec("triton") is None:
            self.obstacle = "it needs Triton, which is not installed"

    def prepare(self, op: str, inputs) -> Callable | None:
        if self.obstacle is None and self.seconds > COMPILE_SECONDS:
            self.obstacle = f"compiling has taken {self.seconds:.0f} s, more than {COMPILE_SECONDS} s"
        if self.obstacle is not None:
            return None
        start = time.perf_counter()
        try:
            call = cases.provider("torch.compile").operators[op](*inputs)
            call()
        except Exception as error:  # for example, something is not installed: continue without torch.compile
            self.obstacle = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
            return None
        self.seconds += time.perf_counter() - start
        return call


def error_of(results, reference) -> tuple[float, float]:
    """The RMS error of a result and the RMS of its reference, for the result with the largest relative
    error."""
    found = []
    for got, want in zip(results, reference, strict=False):
        size = want.square().mean().sqrt().item()
        error = (got.double() - want).square().mean().sqrt().item()
        found.append((error, size))
    return max(found, key=lambda pair: cases.nan_last(pair[0] / max(pair[1], 1e-300)))


def check(console: Console, device: str, compile: bool, seconds: float, shapes=None) -> list[str]:
    """Prints a table and returns the failures. An operator fails if its RMS error against float64 is more
    than 1.1 times that of torch's operator, and more than one unit in the last place."""
    dtype = cases.DTYPES[DTYPE[device]]
    compiler = Compiler(device, compile)
    timer = GPUTimer() if device == "cuda" else functools.partial(cpu_blocks, rounds=1)
    table = Table(
        title=f"Each operator, {DTYPE[device]}: RMS error against float64, and time", title_justify="left"
    )
    for column in ("operator", "M x N"):
        table.add_column(column)
    for column in (
        "error",
        "torch's error",
        "gander, us",
        "torch, us",
        "torch.compile, us",
        "torch / gander",
    ):
        table.add_column(column, justify="right")
    wrong = []
    with console.status("checking and timing the operators"):
        for (m, n), (op, operator) in (
            (shape, item) for shape in shapes or SHAPES[device] for item in cases.OPERATORS.items()
        ):
            torch.manual_seed(0)
            inputs = operator.inputs(m, n, dtype, device)
            calls = {name: cases.provider(name).operators[op](*inputs) for name in ("gander", "torch")}
            reference = operator.reference(*cases.double(inputs))
            (mine, size), (torchs, _) = (error_of(call(), reference) for call in calls.values())
            del reference
            if not mine <= max(1.1 * torchs, torch.finfo(dtype).eps * size):
                wrong.append(f"{op} at {m} x {n}: RMS error {mine / size:.1e}, torch has {torchs / size:.1e}")
            if compiled := compiler.prepare(op, inputs):
                calls["torch.compile"] = compiled
            times = timer(calls, seconds)
            us = {name: f"{timing.us:.1f}" for name, timing in times.items()}
            ratio = times["torch"].us / times["gander"].us
            errors = f"{mine / size:.1e}", f"{torchs / size:.1e}"
            row = (us["gander"], us["torch"], us.get("torch.compile", "-"), f"{ratio:.2f}")
            table.add_row(op.replace("_", " "), f"{m} x {n}", *errors, *row)
    console.print(table)
    if compiler.obstacle:
        console.print(f"torch.compile is left out where there is a dash: {escape(compiler.obstacle)}")
    return wrong
