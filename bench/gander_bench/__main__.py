"""`python -m gander_bench demo | bench | bench train | jax`.

The options of a command are the parameters of its main function.
"""

import importlib.util
import sys

import typer

app = typer.Typer(
    help="Measures gander beside torch, torch.compile and others, and demonstrates it.",
    no_args_is_help=True,
    add_completion=False,
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _run(command: str, module: str, arguments: list[str], needs: tuple[str, ...] = ("torch",)) -> None:
    main = typer.Typer(add_completion=False)
    for name in needs:
        if importlib.util.find_spec(name) is None:
            sys.exit(f"gander_bench {command} needs {name}, which is not installed: pip install {name}")
    main.command()(importlib.import_module(f"gander_bench.{module}").main)
    main(args=arguments, prog_name=f"python -m gander_bench {command}")


@app.command(context_settings=_PASSED_ON)
def demo(context: typer.Context) -> None:
    """Train a small language model with torch's operators and with gander's, and compare."""
    _run("demo", "demo", context.args)


@app.command(context_settings=_PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure host time and throughput, and compare them with torch and torch.compile. `bench train` trains a
    language model."""
    if context.args[:1] == ["train"]:
        _run("bench train", "train", context.args[1:])
    else:
        _run("bench", "command", context.args)


@app.command(context_settings=_PASSED_ON)
def jax(context: typer.Context) -> None:
    """Measure gander.jax beside formulas that XLA fuses."""
    _run("jax", "jax_command", context.args, ("torch", "jax"))


if __name__ == "__main__":
    app(prog_name="python -m gander_bench")
