"""`python -m gander info | demo | bench | bench train`.

The options of demo, bench and bench train are the parameters of their main functions.
"""

import importlib
import json
import sys

import gander

try:
    import typer
except ImportError:
    sys.exit("python -m gander needs the packages of its demo: pip install 'gander-kernels[demo]'")

app = typer.Typer(
    help="gander: row reductions at the speed of memory.", no_args_is_help=True, add_completion=False
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def info(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Print what is installed, what it was built for, and how calls with torch tensors are served."""
    try:
        importlib.import_module("torch")  # gander.info() reports on torch only if it is imported
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is there, but broken
            raise
    facts = gander.info()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        typer.echo(f"{key:14} {', '.join(value) if isinstance(value, list) else value}")


def _run(command: str, arguments: list[str]) -> None:
    main = typer.Typer(add_completion=False)
    main.command()(importlib.import_module(f"gander.{command.replace(' ', '.')}").main)
    main(args=arguments, prog_name=f"python -m gander {command}")


@app.command(context_settings=_PASSED_ON)
def demo(context: typer.Context) -> None:
    """Train a small language model with torch's operators and with gander's, and compare."""
    _run("demo", context.args)


@app.command(context_settings=_PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure host time and throughput, and compare them with torch and torch.compile. `bench train` trains a
    language model."""
    if context.args[:1] == ["train"]:
        _run("bench train", context.args[1:])
    else:
        _run("bench", context.args)


if __name__ == "__main__":
    app(prog_name="python -m gander")
