"""How much memory a call needs at its peak."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

_CPU = 0  # of c10::DeviceType
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces each of its runs


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """The bytes that torch's allocator has given away at the peak of a call, besides what there is before.
    The call's results count. Memory that is not torch's does not: on a CPU that is scratch space of compiled
    code and of gander. The call has run before."""
    return _on_gpu(call) if device == "cuda" else _on_cpu(call)


def _on_gpu(call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def _on_cpu(call) -> int:
    """By the profiler, whose trace has each allocation with the sum of all."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            results = call()
        del results
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    steps = [e["args"] for e in memory if e["args"]["Device Type"] == _CPU]
    if not steps:
        return 0
    before = steps[0]["Total Allocated"] - steps[0]["Bytes"]
    return max(0, max(step["Total Allocated"] for step in steps) - before)
