"""`python -m gander info | explain | check`: what is installed, what a call would run, whether it is right.

No package besides gander is needed, but for `check`, which needs torch or NumPy.
"""

import argparse
import importlib
import json
import sys
from types import ModuleType
from typing import Any, NoReturn

import gander


class _Parser(argparse.ArgumentParser):
    """Ends with status 2 and one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, but broken
            raise
        return None


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape, expected sizes such as 8192,4096") from None


def _info(options: argparse.Namespace) -> int:
    _imported("torch")  # gander.info() reports on torch only if it is imported
    facts = gander.info()
    if options.json:
        print(json.dumps(facts))
        return 0
    for key, value in facts.items():
        print(f"{key:14} {', '.join(value) if isinstance(value, list) else value}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    wanted = {name: value for name, value in vars(options).items() if name not in ("run", "op")}
    print(gander.explain(options.op, **wanted))
    return 0


def _check(options: argparse.Namespace) -> int:
    from .check import main

    arrays = _imported("torch") or _imported("numpy")
    if arrays is None:
        raise ImportError("check needs torch or NumPy, and neither is installed: pip install numpy")
    if arrays.__name__ == "torch":
        # linear_cross_entropy's matrix products are torch's, which an environment variable may let use TF32.
        arrays.set_float32_matmul_precision("highest")
    return main(arrays)


def _parser() -> _Parser:
    parser = _Parser(prog="python -m gander", description=(gander.__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    info = command("info", _info, "what is installed, what it was built for, how torch's calls are served")
    info.add_argument("--json", action="store_true", help="print one JSON object")

    explain = command("explain", _explain, "which algorithm and which kernels a call would run, and why")
    explain.add_argument("op", metavar="OP", help="softmax, rmsnorm_bwd, cross_entropy, ...")
    explain.add_argument("--shape", type=_shape, required=True, metavar="M,N", help="such as 8192,4096")
    explain.add_argument("--dtype", required=True, help="float16, bfloat16, float32, or float64 on the CPU")
    explain.add_argument("--device", required=True, help="cpu, cuda, cuda:1, or a GPU's name, such as h100")
    explain.add_argument("--algorithm", default="auto", help="one of gander.algorithms(OP)")
    explain.add_argument("--batch-invariant", action="store_true")

    command("check", _check, "compare each operator with float64, on the CPU and on the GPU if there is one")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
