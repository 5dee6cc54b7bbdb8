"""Gives one module another class: a subclass of its own, in which a mixin's forward comes first.

A class survives what a patched `forward` does not: deepcopy and PEFT's copies take it along with the right
parameters, a pickle can name it, and torch.compile guards it. It changes no name in the state_dict.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

_BOUND = (
    "forward",
    "_old_forward",
)  # where an instance may hold its class's forward; the latter is accelerate's


class Mixin:
    """The base of what is put before a module's class."""

    _gander_recipe: tuple[
        type, type[Mixin], tuple[tuple[str, Hashable], ...]
    ]  # what `subclass` was called with

    @classmethod
    def namespace(cls, original: type) -> dict[str, Any]:
        """What else the subclass of a class has."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if "_gander_recipe" not in vars(type(self)):  # FSDP2's class, which has no pickle of its own
            return made
        return _make, self._gander_recipe, *made[2:]


@functools.cache
def subclass(original: type, mixin: type[Mixin], facts: tuple[tuple[str, Hashable], ...] = ()) -> type:
    """The mixin before a class, with the facts as attributes, under the class's name."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    recipe = (original, mixin, facts)
    names |= {"__doc__": original.__doc__, "_gander_recipe": recipe, **dict(facts)}  # type: ignore[dict-item]
    return type(original.__name__, (mixin, original), names | mixin.namespace(original))


def _make(*recipe: Any) -> Any:
    cls = subclass(*recipe)
    return cls.__new__(cls)


def own_class(module: nn.Module) -> type:
    """The module's class without that which FSDP2 puts on top."""
    cls = type(module)
    return cls.__bases__[1] if _is_fsdp(cls) else cls


def _is_fsdp(cls: type) -> bool:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return fsdp is not None and len(cls.__bases__) == 2 and issubclass(cls.__bases__[0], fsdp)


@functools.cache
def _with_base(cls: type, base: type) -> type:
    """FSDP2's class on top of another one."""
    names = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (cls.__bases__[0], base), names)


def _change(module: nn.Module, cls: type) -> None:
    old: Any = type(module)
    new: Any = _with_base(old, cls) if _is_fsdp(old) else cls
    for name in _BOUND:
        bound = vars(module).get(name)
        if isinstance(bound, types.MethodType) and bound.__func__ is old.forward:
            vars(module)[name] = types.MethodType(new.forward, module)
    module.__class__ = new


def swap(module: nn.Module, mixin: type[Mixin], **facts: Hashable) -> None:
    _change(module, subclass(own_class(module), mixin, tuple(facts.items())))


def restore(module: nn.Module) -> bool:
    """Takes a swap back. False if there was none."""
    recipe = vars(own_class(module)).get("_gander_recipe")
    if recipe is not None:
        _change(module, recipe[0])
    return recipe is not None


def out_of_reach(module: nn.Module) -> str | None:
    """Why another class would not change what calling the module does, or None."""
    cls: Any = type(module)
    own = vars(module)
    bound = own.get("_old_forward" if "_hf_hook" in own else "forward")
    if bound is None or getattr(bound, "__func__", None) is cls.forward:
        return None
    return f"its forward is not that of its class, but {_name(bound)}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
