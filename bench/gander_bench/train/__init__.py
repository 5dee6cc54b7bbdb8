"""`python -m gander_bench bench train`: a language model trained with torch's operators, torch.compile's,
Liger's and gander's."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer


def main(
    model: Annotated[
        str | None,
        typer.Option(
            help="small, medium, llama3-8b, qwen3-8b, tiny, tiny-qwen3, or stand-in, which is torch alone; "
            "small on a GPU, else tiny."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 50,
    batch: Annotated[int | None, typer.Option(min=1, help="In place of the model's: 8.")] = None,
    sequence: Annotated[int | None, typer.Option(min=2, help="In place of the model's: 2048.")] = None,
    contestants: Annotated[
        str | None,
        typer.Option(help="torch,torch.compile,liger,liger-linear,gander-hf,gander-hf-linear,gander, ..."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="In each of which all contestants run; 3 for the whole models, else 1."),
    ] = None,
    run: Annotated[
        int | None, typer.Option(min=1, help="Only this one of the runs: each GPU of a machine can have one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; by default the GPU where there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters and of the batches.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines; if not given, those of `bench` with -train in the name.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the file, and skip the contestants in it.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="After this time a contestant has failed.")] = 900,
    plots: Annotated[bool, typer.Option(help="Draw a picture beside the JSON lines.")] = True,
) -> None:
    """Trains a model of transformers with each contestant, each in a process of its own: milliseconds a step,
    memory, the loss curve and on a GPU the time of its kernels.

    Weights are random, and follow from the seed as the batches do. What fails or is not there is listed with
    the reason.
    """
    import torch
    from rich.console import Console

    from ..command import draw_plots, print_tables, records_of, words
    from ..records import Store, default_path, environment
    from .child import Settings
    from .contestants import CONTESTANTS, NotRun
    from .models import PRESETS

    console = Console(width=None if Console().is_terminal else 160)
    gpu = torch.cuda.is_available()
    device = device or ("cuda" if gpu else "cpu")
    if device not in ("cuda", "cpu") or (device == "cuda" and not gpu):
        raise typer.BadParameter(
            f"{device} is not available, expected cpu, or cuda on a machine with a GPU", param_hint="--device"
        )
    model = model or ("small" if device == "cuda" else "tiny")
    if model not in PRESETS:
        raise typer.BadParameter(f"{model} is not one of {', '.join(PRESETS)}", param_hint="--model")
    preset = PRESETS[model]
    if preset.transformers and importlib.util.find_spec("transformers") is None:
        raise typer.BadParameter(
            f"{model} needs transformers: pip install transformers, or ./build.sh bench train in a checkout; "
            "stand-in needs torch alone",
            param_hint="--model",
        )
    runs = runs or preset.runs
    if run is not None and run > runs:
        raise typer.BadParameter(f"{run} is more than the runs, which are {runs}", param_hint="--run")
    names = (
        words(contestants, tuple(CONTESTANTS), "--contestants") or preset.contestants or tuple(CONTESTANTS)
    )
    point = {
        "section": "train",
        "model": model,
        "dtype": str(preset.dtype).removeprefix("torch."),
        "batch": batch or preset.batch,
        "sequence": sequence or preset.sequence,
        "steps": steps,
        "seed": seed,
        "on": device,
    }
    default = default_path()
    store = Store(out or default.with_name(f"{default.stem}-train.jsonl"), resume)
    facts = environment()
    console.print(
        f"gander {facts['gander']} ({facts['commit'][:12]}) on {facts['device']}, torch {facts['torch']}: "
        f"{model}, {point['batch']} x {point['sequence']} tokens, {steps} steps, {point['dtype']}, {device}"
    )
    versions = _versions(preset.transformers)
    for number, name in _turns(names, runs):
        if run not in (None, number):
            continue
        named = point | {"contestant": name} | ({"run": number} if max(runs, preset.runs) > 1 else {})
        if store.has(named, [name]):
            continue
        settings = Settings(name, model, point["batch"], point["sequence"], steps, seed, device)
        try:
            version = {name: CONTESTANTS[name].version()}
            figures = _in_a_process(settings, seconds)
        except NotRun as why:
            version, figures = {}, {"not_run": str(why)}
        store.add(named, {"results": {name: figures}}, versions | version)
        which = f"{name}, run {number}" if runs > 1 else name
        console.print(f"{which}: {_line(figures)}", highlight=False, markup=False, soft_wrap=True)
    records = [record for record in records_of(store.path, "--out") if record["section"] == "train"]
    print_tables(console, records, None)
    if plots:
        draw_plots(console, records, store.path)
    console.print(f"written: {store.path}", soft_wrap=True)


def _turns(names: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """In each run all contestants, each time with another one first, so that what else the machine does meets
    everyone. Turns are processes: two models with their optimizers do not fit on a GPU, and patches of
    modules, as Liger's, would reach the next contestant."""
    for run in range(runs):
        first = run % len(names)
        yield from ((run + 1, name) for name in (*names[first:], *names[:first]))


def _versions(transformers: bool) -> dict[str, str]:
    return {"transformers": importlib.metadata.version("transformers")} if transformers else {}


def _in_a_process(settings, seconds: float) -> dict:
    """The child's figures, or why there are none. The caches of compiled code are empty, so that the first
    step is what a first user waits for."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        child = [sys.executable, "-m", "gander_bench.train.child"]
        child += [json.dumps(dataclasses.asdict(settings)), str(result)]
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        # By default torch's threads spin between operators, and compete with gander's for the cores.
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | caches
        try:
            ended = subprocess.run(
                child, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {seconds:g} s"}
        if ended.returncode == 0 and result.exists():
            return json.loads(result.read_text())
        if ended.returncode < 0:
            return {"error": f"killed by {signal.Signals(-ended.returncode).name}"}
        said = ended.stderr.strip().splitlines() or ["no message"]
        return {"error": f"exit status {ended.returncode}: {said[-1][:200]}"}


def _line(figures: dict) -> str:
    if "not_run" in figures:
        return f"not run: {figures['not_run']}"
    if "error" in figures:
        return f"failed: {figures['error']}"
    memory = f", {figures['peak_gib']:.1f} GiB" if "peak_gib" in figures else ""
    losses = figures["losses"]
    return (
        f"{figures['ms']:.1f} ms a step{memory}, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
        f"the first step {figures['first_step_s']:.1f} s"
    )
