"""Tests in a separate process: NVIDIA's sanitizers, and the PTX images that newer devices will run."""

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CALLS = HERE / "sanitized.py"


def sanitizer(tool, *arguments):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "86"]
    if tool == "racecheck":
        # At lower levels it also warns about a thread that initializes a barrier and then arrives at it. That
        # is no race.
        command += ["--racecheck-detect-level", "error"]
    return pytest.mark.job(*command, sys.executable, CALLS, *arguments)


def errors_of(job):
    """The number of errors in the sanitizer's summary. The summary shows that it ran to the end."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?", job.stdout)
    assert summary, job.stdout[-4000:]
    return int(summary[1])


@pytest.mark.parametrize(
    "tool, dtype",
    [
        pytest.param(tool, dtype, marks=sanitizer(tool, dtype, "fewer" if tool == "racecheck" else "all"))
        for tool in ("racecheck", "memcheck", "synccheck")
        for dtype in ("float16", "bfloat16", "float32")
    ],
)
def test_sanitizer(job, tool, dtype, record_property):
    calls = re.search(r"(\d+) calls", job.stdout)
    assert errors_of(job) == 0 and job.returncode == 0, job.stdout[-6000:]
    assert calls and int(calls[1]) > 1000, job.stdout[-4000:]
    record_property("note", f"compute-sanitizer {tool}, {dtype}: {calls[0]}, no error")


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param("short", marks=sanitizer("memcheck", "short")),
        pytest.param("race", marks=sanitizer("racecheck", "race")),
        pytest.param("diverge", marks=sanitizer("synccheck", "diverge")),
    ],
)
def test_sanitizer_sees_planted_defects(job, defect):
    assert errors_of(job) > 0, job.stdout[-4000:]


# ---- PTX ----


def forced(number, dtype):
    """Runs the core shapes of test_grid.py with the PTX image of a compute capability."""
    selection = "float16 and not bfloat16" if dtype == "float16" else dtype
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "core", "-k", selection]
    return pytest.mark.job(*command, HERE / "test_grid.py", GANDER_FORCE_PTX=number)


@pytest.mark.parametrize(
    "number, dtype",
    [
        pytest.param(number, dtype, marks=forced(number, dtype))
        for number in ("80", "90")
        for dtype in ("float16", "bfloat16", "float32")
    ],
)
def test_ptx(job, number, dtype, record_property):
    assert job.returncode == 0 and " passed" in job.stdout, job.stdout[-6000:]
    last = job.stdout.strip().rpartition("\n")[2].strip("= ")
    record_property("note", f"GANDER_FORCE_PTX={number}, {dtype}: {last}")


CALL = """
import os, tempfile
os.environ["CUDA_CACHE_PATH"] = cache = tempfile.mkdtemp()
import torch, gander
x = torch.ones(4, 100000, device="cuda", dtype=torch.bfloat16)
try:
    print(gander.explain("softmax", x))
    print("sum:", gander.softmax(x).sum(-1).double().mean().round().item())
except (RuntimeError, NotImplementedError) as error:
    print(type(error).__name__, error, sep=": ")
print("compiled:", sum(len(files) for _, _, files in os.walk(cache)) > 0)
"""


def call(**environment):
    return pytest.mark.job(sys.executable, "-c", CALL, **environment)


@call(GANDER_FORCE_PTX="80")
def test_ptx_80_is_compiled_and_uses_no_clusters(job):
    assert "sum: 1.0" in job.stdout and "compiled: True" in job.stdout, job.stdout
    assert "clusters" not in job.stdout, job.stdout


@call(GANDER_FORCE_PTX="90")
def test_ptx_90_is_compiled_and_uses_clusters(job):
    assert "sum: 1.0" in job.stdout and "compiled: True" in job.stdout, job.stdout
    assert "clusters" in job.stdout, job.stdout


@call()
def test_machine_code_is_not_compiled(job):
    assert "sum: 1.0" in job.stdout and "compiled: False" in job.stdout, job.stdout


@call(GANDER_FORCE_PTX="12")
def test_ptx_that_is_not_there(job):
    assert "GANDER_FORCE_PTX=12 asks for compute_12, which the library lacks" in job.stdout, job.stdout
