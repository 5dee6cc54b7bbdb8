"""How much memory a call needs at its peak."""

from collections.abc import Callable

import torch

from . import trace

_CPU = 0  # of c10::DeviceType


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
    events = trace.events(call, torch.profiler.ProfilerActivity.CPU, profile_memory=True)
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    steps = [e["args"] for e in memory if e["args"]["Device Type"] == _CPU]
    if not steps:
        return 0
    before = steps[0]["Total Allocated"] - steps[0]["Bytes"]
    return max(0, max(step["Total Allocated"] for step in steps) - before)
