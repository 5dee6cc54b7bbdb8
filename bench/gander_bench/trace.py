"""What torch's profiler saw of a call."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces each of its runs


def events(call: Callable[[], object], activity: torch.profiler.ProfilerActivity, **options) -> list[dict]:
    """The events of a Chrome trace, with times in microseconds. The call waits for its own work on a GPU, and
    its result lives until the profile ends. options: torch.profiler.profile's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with torch.profiler.profile(activities=[activity], **options) as profile:
            result = call()
        del result
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def without_overlap(events: Iterable[dict]) -> Iterator[tuple[dict, float]]:
    """The complete events of a GPU, and of each the microseconds behind the end of those before it. Their sum
    is the time in which the GPU was not idle.

    Programmatic dependent launch starts a kernel while the one before it still runs, for whose memory it then
    waits.
    """
    end = float("-inf")
    for event in sorted(events, key=lambda e: (e["ts"], e["dur"])):
        over = event["ts"] + event["dur"]
        yield event, max(0.0, over - max(event["ts"], end))
        end = max(end, over)
