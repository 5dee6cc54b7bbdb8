"""`python -m gander_bench demo`: describes this machine, checks and times each operator, and trains a model.

The model is small and similar to Llama. It predicts the bytes of the source files of Python's standard
library. It is trained twice with the same seed and the same batches, once with torch's operators and once
with gander's. The two loss curves must agree.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, in place of the default.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; by default the GPU where there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the parameters and of the order of the batches.")] = 0,
    output: Annotated[Path, typer.Option(help="The picture, in a format by the file's suffix.")] = Path(
        "demo.png"
    ),
    compile: Annotated[bool, typer.Option(help="Time torch.compile too.")] = True,
    seconds: Annotated[float, typer.Option(min=0, help="For the timing of one operator at one shape.")] = 0.1,
) -> None:
    """Describes this machine, checks and times each operator, and trains a small language model twice: with
    torch's operators and with gander's. Fails if an operator is wrong or the loss curves do not agree."""
    # By default torch's threads spin between operators. They compete for the cores with gander's threads or
    # other programs, which makes a step ten times as long. The variable must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch
    from matplotlib.backend_bases import FigureCanvasBase
    from rich.console import Console

    from .checks import SHAPES
    from .training import CPU, GPU

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in SHAPES or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(
            f"{device} is not available, expected cpu, or cuda on a machine with a GPU", param_hint="--device"
        )
    formats = FigureCanvasBase.get_supported_filetypes()
    if output.suffix.removeprefix(".").lower() not in formats or not output.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"{output} cannot be written, expected a file in a folder that exists, with one of the suffixes "
            f"{', '.join(formats)}",
            param_hint="--output",
        )
    config = GPU if device == "cuda" else CPU
    if steps is not None:
        config = replace(config, steps=steps)
    demonstrate(console, device, config, seed, output, compile, seconds)


def demonstrate(console, device, config, seed, output, compile, seconds) -> None:
    from . import checks, training

    checks.describe(console, device)
    failures = checks.check(console, device, compile, seconds)
    runs = training.train_both(console, config, device, seed)
    training.plot(runs, config, checks.name_of(device), output)
    differences = training.difference(runs)
    largest = max(differences, key=checks.cases.nan_last)
    torch_step, gander_step = (run.step for run in runs.values())
    console.print(
        f"Loss {runs['torch'].losses[0]:.3f} -> {runs['torch'].losses[-1]:.3f} with torch, -> "
        f"{runs['gander'].losses[-1]:.3f} with gander; a step {torch_step:.1f} ms and {gander_step:.1f} ms."
    )
    console.print(
        f"Largest difference between the curves: {largest:.2e} at step {differences.index(largest)}, "
        f"allowed {config.agreement:g}."
    )
    console.print(f"The curves are in {output}.", soft_wrap=True)
    # Not `largest > config.agreement`: a NaN is the largest, and fails too.
    if not largest <= config.agreement:
        failures.append(f"the loss curves differ by {largest:.2e}, more than {config.agreement:g}")
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red", soft_wrap=True)
    if failures:
        raise typer.Exit(1)
