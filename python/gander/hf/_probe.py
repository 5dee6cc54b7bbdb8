"""Runs the forward of a module's class on a copy of it: on the CPU, with fresh parameters, without hooks.

The module's own parameters may be on meta, sharded, quantised or offloaded, and are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ._swap import own_class

_OF_INSTANCES = {"forward", "_old_forward", "_hf_hook"}  # accelerate's, and other wrappers of forward
_SCALARS = (bool, int, float, str, type(None), torch.dtype)


class Left(Exception):
    """Why a module is left as it is."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No gradient, no autocast, new tensors on the CPU in float32, and the random numbers of others kept."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
        ):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs too
            yield
    finally:
        torch.set_default_dtype(default)


def bare(module: nn.Module) -> nn.Module:
    """An instance of the same class with the module's attributes, without parameters, children and hooks."""
    copy = cast(nn.Module, object.__new__(own_class(module)))
    nn.Module.__init__(copy)
    kept = vars(copy).keys() | _OF_INSTANCES
    vars(copy).update({name: value for name, value in vars(module).items() if name not in kept})
    return copy.eval()


def scalars(module: nn.Module) -> tuple[Any, ...]:
    """The attributes of a module that may decide what it computes."""
    own = vars(module).items()
    return tuple(sorted((k, repr(v)) for k, v in own if isinstance(v, _SCALARS) and k != "training"))


def forward(module: nn.Module, *args: Any) -> Tensor:
    """What a bare copy returns. Refuses, in words, what is not a tensor."""
    try:
        result = cast(Any, type(module)).forward(module, *args)
    except Exception as error:  # code that nobody here has seen, called as it may not expect
        text = str(error).partition("\n")[0]
        raise Left(f"its forward, tried on its own, raises {type(error).__name__}: {text}") from error
    if not isinstance(result, Tensor):
        raise Left(f"its forward returns {type(result).__name__}, not a tensor")
    return result


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def features(module: nn.Module | None) -> tuple[int, ...]:
    """(in_features, out_features) of a linear layer of any kind, or ()."""
    features = [getattr(module, name, None) for name in ("in_features", "out_features")]
    sizes = tuple(size for size in features if isinstance(size, int))
    return sizes if len(sizes) == 2 else ()
