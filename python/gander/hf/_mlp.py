"""Gated MLPs and experts: act(gate) * up with gander.swiglu and gander.geglu.

Only this product is replaced. The activation's module returns an `Activated`, which computes nothing until
it is multiplied. So the forward around it stays the class's own, whatever its layout: separate or packed
projections, LoRA, quantised weights, experts in a loop or in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gander

from ._pending import Pending
from ._probe import Left, bare, features, forward, quiet, random, scalars
from ._swap import Mixin, out_of_reach, own_class, subclass, swap

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)

# In PyTorch, and with gander. "llama" rounds the activation, as two operators do.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "swiglu": (F.silu, lambda gate, up: gander.swiglu(gate, up, casting_mode="llama")),
    "geglu": (F.gelu, lambda gate, up: gander.geglu(gate, up, casting_mode="llama")),
    "geglu, tanh": (
        lambda gate: F.gelu(gate, approximate="tanh"),
        lambda gate, up: gander.geglu(gate, up, approximate="tanh", casting_mode="llama"),
    ),
}


class Activated(Pending):
    """The activation of gate, which is computed together with the product, or else when it is used."""

    _kept: ClassVar[tuple[str, ...]] = ("module", "gate")

    def __init__(self, module: Activation, gate: Tensor) -> None:
        self.module, self.gate = module, gate

    def tensor(self) -> Tensor:
        return self.module.activate(self.gate)

    def times(self, up: Any) -> Any:
        if isinstance(up, Activated):
            up = up.tensor()
        gate = self.gate
        if isinstance(up, Tensor) and up.dtype == gate.dtype and up.shape == gate.shape:
            return ACTIVATIONS[self.module._gander_product][1](gate, up)
        return self.tensor() * up

    __mul__ = __rmul__ = times

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _PRODUCTS and len(args) == 2 and not kwargs:
            first, second = args
            return first.times(second) if isinstance(first, Activated) else second.times(first)
        return super().__torch_function__(function, types, args, kwargs)


class Activation(Mixin):
    """The mixin of an activation's module."""

    _gander_product: str
    _gander_result: ClassVar[type[Activated]] = Activated

    def activate(self, gate: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, super()).forward(gate))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0].dtype in _DTYPES:
            return self._gander_result(self, args[0])
        return cast(Any, super()).forward(*args, **kwargs)


class _Witness(Activated):
    """Notes how an activation is used, and computes it with PyTorch."""

    products: ClassVar[int] = 0
    others: ClassVar[int] = 0

    def tensor(self) -> Tensor:
        _Witness.others += 1
        return super().tensor()

    def times(self, up: Any) -> Any:
        if not isinstance(up, Tensor) or up.shape != self.gate.shape or up.dtype != self.gate.dtype:
            return self.tensor() * up
        _Witness.products += 1
        return self.module.activate(self.gate) * up

    __mul__ = __rmul__ = times


class _Watched(Activation):
    _gander_result = _Witness


def activation(module: nn.Module, known: dict[Any, str | None]) -> str | None:
    """Which activation a module is: the one that has its bits for each number of bfloat16."""
    if module._modules or module._parameters or module._buffers:
        return None
    key = own_class(module), scalars(module)
    if key not in known:
        known[key] = None
        with quiet():
            x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
            x = x[x.isfinite()]
            try:
                y = forward(bare(module), x)
            except Left:
                return None
            found = [name for name, (torch_s, _) in ACTIVATIONS.items() if _same(torch_s(x), y)]
            known[key] = found[0] if found else None
    return known[key]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def replace(parents: list[nn.Module], act: nn.Module, product: str, known: dict[Any, Any]) -> None:
    """Replaces an activation, if each module that has it as a child multiplies it."""
    if (reason := out_of_reach(act)) is not None:
        raise Left(f"of its activation, {reason}")
    for parent in parents:
        key = own_class(parent), scalars(parent), own_class(act), tuple(_sizes(parent))
        if key not in known:
            known[key] = _refusal(parent, act, product)
        if known[key] is not None:
            raise Left(known[key])
    swap(act, Activation, _gander_product=product)


def _refusal(parent: nn.Module, act: nn.Module, product: str) -> str | None:
    """Why a module is no gated MLP, or None."""
    try:
        for bias in (False, True):
            for implementation in ("eager", "batched_mm"):
                _try(parent, act, product, bias, implementation)
                if not hasattr(parent, "_apply_gate"):
                    break
    except Left as left:
        return str(left)
    return None


def _try(parent: nn.Module, act: nn.Module, product: str, bias: bool, implementation: str) -> None:
    with quiet():
        small = _Small(parent, act, bias, implementation)
        expected, inputs = small.run()
        kept = small.act
        for name, child in small.copy._modules.items():
            if child is kept:
                small.copy._modules[name] = watched = bare(act)
                watched.__class__ = subclass(own_class(act), _Watched, (("_gander_product", product),))
        _Witness.products = _Witness.others = 0
        other_use = Left("its activation is not multiplied by a second projection")
        try:
            y = forward(small.copy, *inputs)
        except Left:  # where PyTorch's own activation did not raise
            raise other_use from None
    if _Witness.products == 0 or _Witness.others:
        raise other_use
    if not _same(y, expected):
        raise Left("it computes something else than act(gate) * up")


def _sizes(module: nn.Module) -> Iterator[int]:
    """The sizes of the linear layers and parameters of a module."""
    for child in module._modules.values():
        yield from features(child)
    for parameter in module._parameters.values():
        yield from () if parameter is None else parameter.shape


class _Config:
    """A configuration with another implementation of experts."""

    def __init__(self, config: Any, implementation: str) -> None:
        self._config, self._experts_implementation = config, implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Small:
    """A copy of an MLP or of experts whose large sizes are small, with fresh parameters."""

    def __init__(self, module: nn.Module, act: nn.Module, bias: bool, implementation: str) -> None:
        self.smaller = _smaller(set(_sizes(module)))
        self.copy, self.act = bare(module), bare(act)
        own = vars(self.copy)
        own.update({k: self.smaller[v] for k, v in own.items() if type(v) is int and v in self.smaller})
        if "config" in own:
            own["config"] = _Config(own["config"], implementation)
        for name, child in module._modules.items():
            self.copy._modules[name] = self.act if child is act else self._child(name, child, bias)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = random(*map(self.smaller.__getitem__, parameter.shape), scale=0.3)
                self.copy._parameters[name] = nn.Parameter(fresh, requires_grad=False)

    def _child(self, name: str, child: nn.Module | None, bias: bool) -> nn.Module | None:
        if child is None:
            return None
        if not (sizes := features(child)):
            if next(child.parameters(), None) is not None:
                raise Left(f"its child {name}, {type(child).__name__}, is no linear layer")
            return bare(child)
        ins, outs = (self.smaller[size] for size in sizes)
        linear = nn.Linear(ins, outs, bias=bias, device="meta", dtype=torch.bfloat16)
        for key, parameter in linear._parameters.items():
            if parameter is not None:
                fresh = random(*parameter.shape, scale=0.3)
                linear._parameters[key] = nn.Parameter(fresh, requires_grad=False)
        return linear

    def run(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the copy computes, and of what: hidden states of the first size that it takes."""
        experts = max((p.shape[0] for p in self.copy._parameters.values() if p is not None), default=4)
        index = torch.randint(experts, (2 * experts, 2))
        error = Left("it has neither linear layers nor parameters")
        for size in sorted(set(_sizes(self.copy))):
            x = random(2 * experts, size)
            for inputs in ((x,), (x, index, random(2 * experts, 2).abs())):
                try:
                    return forward(self.copy, *inputs), inputs
                except Left as left:
                    error = left
        raise error


def _smaller(sizes: set[int]) -> dict[int, int]:
    """A small size for each large one. What is twice another size stays that."""
    fresh = iter(range(8, 1 << 30, 12))
    small: dict[int, int] = {}
    for size in sorted(sizes):
        if size <= 64:
            small[size] = size
        else:
            half = small.get(size // 2) if size % 2 == 0 else None
            small[size] = 2 * half if half else next(fresh)
    return small
