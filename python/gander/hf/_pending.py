"""A tensor that is not computed yet: together with what uses it, or else when anything touches it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert", "getitem"),
)
_REVERSED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")


class Pending:
    """The base of such a value. A subclass keeps what it is computed from, and says in which attributes."""

    _kept: ClassVar[tuple[str, ...]]

    def tensor(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*computed(args), **computed(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._kept:  # before they are there
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __len__(self) -> int:
        return len(self.tensor())

    def __iter__(self) -> Any:
        return iter(self.tensor())

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("what gander.hf has put in place of this tensor cannot be written to")


def computed(value: Any) -> Any:
    """A value, or a list, tuple or dict of them, with tensors in place of what is pending."""
    if isinstance(value, (list, tuple)):
        return type(value)([computed(one) for one in value])
    if isinstance(value, dict):
        return {name: computed(one) for name, one in value.items()}
    return value.tensor() if isinstance(value, Pending) else value


def _operators(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    function = getattr(operator, name)

    def apply(self: Pending, *others: Any) -> Any:
        return function(self.tensor(), *computed(others))

    def apply_reversed(self: Pending, other: Any) -> Any:
        return function(computed(other), self.tensor())

    return apply, apply_reversed


for _name in _OPERATORS:
    _straight, _turned = _operators(_name)
    setattr(Pending, f"__{_name.rstrip('_')}__", _straight)
    if _name in _REVERSED:
        setattr(Pending, f"__r{_name}__", _turned)
