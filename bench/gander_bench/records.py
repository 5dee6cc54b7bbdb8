"""Measurements as JSON lines: one for each point, with all providers' figures and where they come from."""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import gander
import torch

from .cases import provider_version

# What names a point.
KEY = (
    *("section", "op", "dtype", "m", "n", "mode", "weight", "ranks", "run"),
    *("model", "batch", "sequence", "steps", "seed", "on", "contestant"),
)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.machine()


def driver_version() -> str:
    """NVIDIA's; "unknown" where nvidia-smi cannot say."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if said.returncode != 0:  # its message is in the output
        return "unknown"
    return said.stdout.split("\n")[0].strip() or "unknown"


@functools.cache
def environment() -> dict:
    """What a measurement depends on, besides the providers' versions."""
    info = gander.info()
    facts = {
        "gander": gander.__version__,
        "commit": info["commit"],
        "architectures": info["architectures"],
        "fast_path": info["fast_path"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "threads": torch.get_num_threads(),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["triton"] = importlib.metadata.version("triton")
    if torch.cuda.is_available():
        facts |= {
            "device": torch.cuda.get_device_name(),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
        }
    else:
        facts |= {
            "device": processor(),
            "simd": info["simd"],
            "torch_simd": torch.backends.cpu.get_cpu_capability(),
        }
    return facts


def default_path() -> Path:
    """A file of this device and commit, so that --resume finds what the same code has measured before."""
    facts = environment()
    device = "".join(c if c.isalnum() else "-" for c in facts["device"].lower())
    name = "-".join(part for part in [*device.split("-"), facts["commit"][:8]] if part)
    return Path("bench", "results", f"{name}.jsonl")


def read(path: Path) -> list[dict]:
    """A last line that was cut off by an interruption is left out.

    Raises ValueError for another line that is no JSON.
    """
    records, lines = [], path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from None
    return records


def key(point: dict) -> tuple:
    return tuple(point.get(name) for name in KEY)


def record(point: dict, figures: dict, versions: dict[str, str] | None = None) -> dict:
    """A point's name and figures with what they depend on. versions: by default those of the providers among
    the results."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if versions is None:
        versions = {name: provider_version(name) for name in figures["results"]}
    return point | figures | {"versions": versions, "environment": environment(), "date": date}


class Store:
    """A file of records that grows by a line for each point measured."""

    def __init__(self, path: Path, resume: bool):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        old = read(path) if resume and path.exists() else []
        self._done = {key(record): set(record["results"]) for record in old}
        if not resume or not path.exists():
            path.write_text("")
        elif not path.read_text().endswith("\n"):
            path.write_text("".join(json.dumps(record) + "\n" for record in old))

    def has(self, point: dict, providers: Iterable[str]) -> bool:
        return key(point) in self._done and set(providers) <= self._done[key(point)]

    def add(self, point: dict, figures: dict, versions: dict[str, str] | None = None) -> dict:
        """versions: by default those of the providers among the results."""
        made = record(point, figures, versions)
        with self.path.open("a") as file:
            file.write(json.dumps(made) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return made
