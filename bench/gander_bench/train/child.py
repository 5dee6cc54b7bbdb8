"""One contestant's training, in a process of its own: python -m gander_bench.train.child SETTINGS RESULT.

SETTINGS is the JSON of a Settings, RESULT the file that the figures are written to.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from ..demo.training import corpus
from ..sections import reason
from . import kernels
from .contestants import CONTESTANTS, NotRun
from .models import PRESETS, build

LEARNING_RATE = 3e-4
_WARM_UP = 10  # steps whose times and memory do not count: compilation, tuning, the allocator's first blocks


@dataclasses.dataclass(frozen=True)
class Settings:
    contestant: str
    model: str
    batch: int
    sequence: int
    steps: int
    seed: int
    device: str


def batches(settings: Settings) -> torch.Tensor:
    """(steps, batch, sequence): windows of the standard library's bytes."""
    text = corpus()
    order = torch.Generator().manual_seed(settings.seed)
    at = torch.randint(len(text) - settings.sequence, (settings.steps, settings.batch, 1), generator=order)
    return text[at + torch.arange(settings.sequence)].to(device=settings.device, dtype=torch.int64)


class _Clock:
    """Marks the ends of steps: on a GPU by events, for which the host does not wait."""

    def __init__(self, device: str):
        self._cuda = device == "cuda"
        self._marks = []

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        if self._cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]


def _peak_gib(device: str) -> dict:
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)} if device == "cuda" else {}


def _counters() -> dict:
    from torch._dynamo.utils import counters

    return counters


def _graphs() -> dict:
    """How often torch.compile broke the graph and why, and how many graphs it compiled."""
    counters = _counters()
    breaks = counters["graph_break"]
    found = {"graph_breaks": sum(breaks.values()), "graphs": counters["stats"]["unique_graphs"]}
    return found | ({"graph_break_reasons": [reason[:300] for reason in breaks]} if breaks else {})


def measure(settings: Settings) -> dict:
    contestant, preset = CONTESTANTS[settings.contestant], PRESETS[settings.model]
    _counters().clear()  # Dynamo counts in the whole process
    data = batches(settings)
    model = build(preset, settings.device, settings.seed)
    parameters = sum(p.numel() for p in model.parameters())
    loss_of = contestant.prepare(model)
    if contestant.compiled:
        # A function that returns the loss alone: a compiled model would return the logits too, and keep them.
        loss_of = torch.compile(loss_of, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=settings.device == "cuda"
    )

    def step(tokens):
        loss = loss_of(tokens)
        loss.backward()
        if preset.clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = torch.zeros(settings.steps, device=settings.device)
    warm_up = min(_WARM_UP, settings.steps // 2)
    clock = _Clock(settings.device)
    began = time.perf_counter()
    for number, tokens in enumerate(data):
        if number == warm_up:
            clock.mark()
            if settings.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (number + 1) / _WARM_UP)
        losses[number] = step(tokens)
        if number == 0:
            losses[0].item()  # waits for the device
            first = time.perf_counter() - began
        if number >= warm_up:
            clock.mark()
    milliseconds = clock.milliseconds()
    peak = _peak_gib(settings.device)
    curve = losses.tolist()
    bad = next((i for i, value in enumerate(curve) if not math.isfinite(value)), None)
    if bad is not None:
        raise ArithmeticError(f"the loss is {curve[bad]} at step {bad}")
    ms = statistics.median(milliseconds)
    return {
        "ms": round(ms, 3),
        "tokens_per_second": round(settings.batch * settings.sequence / ms * 1e3, 1),
        **peak,
        **(kernels.profiled(lambda: step(data[-1])) if settings.device == "cuda" else {}),
        "first_step_s": round(first, 3),
        "parameters": parameters,
        **(_graphs() if contestant.compiled else {}),
        "step_ms": [round(value, 3) for value in milliseconds],
        "losses": [round(value, 6) for value in curve],
    }


def main() -> None:
    settings, path = Settings(**json.loads(sys.argv[1])), Path(sys.argv[2])
    try:
        figures = measure(settings)
    except NotRun as why:
        figures = {"not_run": str(why)}
    except Exception as error:  # out of memory, say
        figures = {"error": reason(error)}
    path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
