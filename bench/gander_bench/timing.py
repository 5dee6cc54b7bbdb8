"""How long calls take: on the GPU with a cold L2 and the host ahead, on the CPU in blocks, on the host
alone."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import torch

Call = Callable[[], object]
_HOST_MARGIN = 1.5
_CYCLES_PER_US = 2000  # at the highest clock; at a lower one the host is only further ahead
_PAUSE_US = 20  # the shortest pause. It is doubled until it suffices, so that runs seldom differ in it
_ROUNDS_TOGETHER = 50
_MOST_US = 2000  # host time that a pause covers: the GPU waits for a slower host


class Timing(NamedTuple):
    """Microseconds: median, 10th and 90th percentile, of so many repeats."""

    us: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        ordered = sorted(samples)
        last = len(ordered) - 1
        figures = statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        return cls(*(round(figure, 4) for figure in figures), len(ordered))


def turns(names: list[str]) -> Iterator[list[str]]:
    """Everyone's turn, each time with another one first."""
    while True:
        yield names
        names = names[1:] + names[:1]


@contextmanager
def _no_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class GPUTimer:
    """Times calls with CUDA events, in turns. Before each the L2 cache is flushed, and the GPU pauses until
    the slowest host has enqueued its call, so that what is timed is the GPU's work and nothing of Python's.
    All have the same pause: with another one a short call may take 0.6 us more or less (bench/TRIED.md).
    pause_us is that of the last calls."""

    def __init__(self):
        size = max(256 << 20, 4 * torch.cuda.get_device_properties().L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.pause_us = 0

    def _start(self, call: Call, together: Call | None) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(self.pause_us * _CYCLES_PER_US)
        if together is not None:
            together()
        begin.record()
        call()
        end.record()
        return begin, end

    @staticmethod
    def _host_us(call: Call) -> float:
        host = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            host.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(host)

    def __call__(
        self,
        calls: dict[str, Call],
        seconds: float,
        least: int = 10,
        most: int = 100,
        together: Call | None = None,
    ) -> dict[str, Timing]:
        """At least `least` rounds, then more until the seconds are over. The calls have run before. together:
        a collective, after which the GPUs of all ranks begin a call; the rounds are then _ROUNDS_TOGETHER, as
        many on each."""
        if together is not None:
            least = most = _ROUNDS_TOGETHER
        host = min(max(map(self._host_us, calls.values()), default=0), _MOST_US) * _HOST_MARGIN
        self.pause_us = _PAUSE_US
        while self.pause_us < host:
            self.pause_us *= 2
        samples = {name: [] for name in calls}
        began = time.perf_counter()
        with _no_garbage_collection():
            for rounds, turn in enumerate(turns(list(calls))):
                if rounds == most or (rounds >= least and time.perf_counter() - began > seconds):
                    break
                events = {name: self._start(calls[name], together) for name in turn}
                torch.cuda.synchronize()
                for name, (begin, end) in events.items():
                    samples[name].append(begin.elapsed_time(end) * 1e3)
        return {name: Timing.of(values) for name, values in samples.items()}


_KEPT_BYTES = 1 << 30


def _cpu_block(call: Call, seconds: float, least: int, most: int, keep: bool) -> list[float]:
    """Times one call again and again, after a pause: torch's threads spin for a while after their last call,
    and would take the cores from whoever comes next. With keep, no result is freed before the last call."""
    time.sleep(0.3)
    samples, kept = [], []
    began = time.perf_counter()
    with _no_garbage_collection():
        if keep:
            most = min(most, max(least, _KEPT_BYTES // max(_bytes(call()), 1)))
        else:
            call()
        while len(samples) < most and (len(samples) < least or time.perf_counter() - began < seconds):
            start = time.perf_counter()
            if keep:
                kept.append(call())
            else:
                call()
            samples.append((time.perf_counter() - start) * 1e6)
    return samples


def _bytes(result) -> int:
    """The size of the tensors that a call returned."""
    if isinstance(result, tuple | list):
        return sum(map(_bytes, result))
    return 0 if result is None else result.nbytes


@contextmanager
def reused_memory():
    """Results reuse memory: glibc's allocator keeps what is freed, and maps nothing anew."""
    mmap_threshold, trim_threshold, mmap_max = -3, -1, -4  # <malloc.h>
    allocator = ctypes.CDLL(None)
    if not hasattr(allocator, "mallopt"):
        yield
        return
    allocator.mallopt(mmap_max, 0)
    allocator.mallopt(trim_threshold, -1)
    try:
        yield
    finally:
        allocator.mallopt(mmap_max, 65536)
        allocator.mallopt(trim_threshold, 128 << 10)
        allocator.mallopt(mmap_threshold, 128 << 10)


def cpu_blocks(
    calls: dict[str, Call], seconds: float, rounds: int = 3, least: int = 5, most: int = 1000, keep=False
) -> dict[str, Timing]:
    """Blocks of calls, in turns, so that what else the machine does meets everyone. With keep, a block keeps
    all results, so that none lies in memory of another; from 128 KiB on the system maps it anew."""
    samples = {name: [] for name in calls}
    for _, turn in zip(range(rounds), turns(list(calls)), strict=False):
        for name in turn:
            samples[name] += _cpu_block(calls[name], seconds / rounds, least, most, keep)
    return {name: Timing.of(values) for name, values in samples.items()}


def host_cost(
    calls: dict[str, Call],
    settle: Call,
    seconds: float = 2,
    least: int = 10,
    most: int = 40,
    batch: int = 100,
) -> dict[str, Timing]:
    """The host's time per call, in turns. settle() waits for the device; a batch must fit into its queue."""
    samples = {name: [] for name in calls}
    with _no_garbage_collection():
        for call in calls.values():
            for _ in repeat(None, batch):
                call()
            settle()
        began = time.perf_counter()
        for rounds, turn in enumerate(turns(list(calls))):
            if rounds == most or (rounds >= least and time.perf_counter() - began > seconds):
                break
            for name in turn:
                call = calls[name]
                settle()
                start = time.perf_counter()
                for _ in repeat(None, batch):
                    call()
                samples[name].append((time.perf_counter() - start) * 1e6 / batch)
        settle()
    return {name: Timing.of(values) for name, values in samples.items()}
