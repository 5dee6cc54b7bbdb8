"""RMSNorm of the heads of queries and keys, in one pass with their rotary embeddings.

The norm's module returns a `Normed`, which computes nothing until the function that rotates both gets it. So
the forward around it stays the class's own, and so do the modules, their weights and their hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ._norms import FORMS, Norm
from ._pending import Pending
from ._probe import Left, bare, features, forward, quiet, random
from ._swap import own_class, restore, swap

_WIDEST = 512  # columns that a head of qk_norm_rotary may have
_EQUAL = 0.99  # the share of elements that have the bits of norm and rotary embedding, one after the other
_MODES = {"llama": "llama", "once": "gemma", "zero": "gemma", "plain": "gemma"}  # of the forms of norms


class Normed(Pending):
    """The norm of x, then with dimensions other than the last one swapped."""

    _kept: ClassVar[tuple[str, ...]] = ("module", "x", "swaps", "result")

    def __init__(self, module: HeadNorm, x: Tensor, swaps: tuple[tuple[int, int], ...] = ()) -> None:
        self.module, self.x, self.swaps = module, x, swaps
        self.result: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.result is None:
            self.result = _swapped(self.module.norm(self.x), self.swaps)
        return self.result

    def rows(self) -> Tensor:
        """x, as if it was swapped before the norm, which goes by the last dimension."""
        return _swapped(self.x, self.swaps)

    def transpose(self, dim0: int, dim1: int) -> Any:
        last = self.x.dim() - 1
        if dim0 in (-1, last) or dim1 in (-1, last):
            return self.tensor().transpose(dim0, dim1)
        return Normed(self.module, self.x, (*self.swaps, (dim0, dim1)))


def _swapped(x: Tensor, swaps: tuple[tuple[int, int], ...]) -> Tensor:
    for pair in swaps:
        x = x.transpose(*pair)
    return x


class HeadNorm(Norm):
    """The mixin of a norm whose result goes to a rotary embedding."""

    def norm(self, x: Tensor) -> Tensor:
        return cast(Tensor, Norm.forward(self, x))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A hook may expect a tensor, or be what takes the weight away after this call: FSDP2 where the norm
        # is a unit of its own, accelerate's offloading, tensor parallelism.
        hooked = self._forward_hooks or self._forward_pre_hooks or hasattr(self, "_hf_hook")
        if hooked or len(args) != 1 or kwargs or args[0].shape[-1] > _WIDEST:
            return Norm.forward(self, *args, **kwargs)
        return Normed(self, args[0])


class Options(NamedTuple):
    """What qk_norm_rotary takes of two norms."""

    weights: tuple[Tensor | None, Tensor | None]
    named: dict[str, Any]


def options(q: Normed, k: Normed) -> Options | None:
    """Those by which it has the bits of both norms, or None: of other forms, dtypes or epsilons."""
    norms = q.module, k.module
    form = norms[0]._gander_form
    epsilons = [getattr(norm, norm._gander_eps) for norm in norms]
    if norms[1]._gander_form != form or epsilons[0] != epsilons[1] or epsilons[0] is None:
        return None
    weights: list[Tensor | None] = [None, None]
    for i, norm in enumerate(norms):
        if FORMS[form].weighted:
            weights[i] = cast(Any, norm).weight
        x, weight = (q, k)[i].x, weights[i]
        types = x.dtype, None if weight is None else weight.dtype
        if (types, x.dtype) not in norm._gander_dtypes:  # left to the class, or another dtype than x
            return None
    offset = FORMS[form].options.get("weight_offset", 0.0)
    named = {"eps": epsilons[0], "weight_offset": offset, "casting_mode": _MODES[form]}
    return Options((weights[0], weights[1]), named)


# ---- Which norms: found by running the attention's forward up to its rotary embedding ----


class _Reached(Exception):
    """Ends a forward where it calls the function that rotates."""


class _Watched(nn.Module):
    """In the place of a norm, or of what PEFT has made of it."""

    def forward(self, x: Tensor) -> Any:
        return Normed(cast(Any, self), x)

    def norm(self, x: Tensor) -> Tensor:
        return x


def replace(attention: nn.Module, reach: Callable[[Callable[..., Any]], Any], rotate: Any) -> str:
    """Lets the norms of queries and keys leave their work to the rotary embedding, and names them.

    reach: makes the forward of the attention's class that calls another function in place of the one that
    rotates. rotate: the function that gander has for it, which wraps it.
    """
    with quiet():
        names = _norms_of_heads(attention, reach)
    children = (attention.get_submodule(name) for name in names)
    found = [[module for module in child.modules() if isinstance(module, Norm)] for child in children]
    for pair in zip(*found):  # noqa: B905 - PEFT has both, or one of them
        with quiet():
            _try(pair, rotate)
    for norm in (norm for norms in found for norm in norms):
        _let_wait(norm)
    return f"qk_norm_rotary, for {names[0]} and {names[1]}"


def _let_wait(norm: nn.Module) -> None:
    """Another mixin with the same facts."""
    facts = cast(Any, own_class(norm))._gander_recipe[2]
    restore(norm)
    swap(norm, HeadNorm, **dict(facts))


def _norms_of_heads(attention: nn.Module, reach: Callable[[Callable[..., Any]], Any]) -> tuple[str, str]:
    """The children whose results an attention's forward rotates, as they are."""
    copy, watched = bare(attention), {}
    for name, child in attention._modules.items():
        copy._modules[name] = stand_in = _stand_in(name, child)
        if isinstance(stand_in, _Watched):
            watched[stand_in] = name
    for name, parameter in attention._parameters.items():
        if parameter is not None:
            empty = torch.empty(parameter.shape, dtype=torch.bfloat16, device="meta")
            copy._parameters[name] = nn.Parameter(empty, requires_grad=False)
    if not watched:
        raise Left("it has no norms that gander computes")

    def reached(*args: Any, **kwargs: Any) -> None:
        raise _Reached(args)

    run = reach(reached)
    required = [
        name
        for name, parameter in inspect.signature(run).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][1:]
    reason = "it has no linear layers"
    for size in sorted({sizes[0] for child in copy._modules.values() if (sizes := features(child))}):
        table = torch.empty(1, 4, 8, dtype=torch.bfloat16, device="meta")
        given = dict.fromkeys(required) | {
            "hidden_states": torch.empty(1, 4, size, dtype=torch.bfloat16, device="meta"),
            "position_embeddings": (table, table),
        }
        try:
            run(copy, **given)
            reason = "its forward, tried on its own, rotates nothing"
        except _Reached as end:
            pair = end.args[0][:2]
            names = [watched.get(cast(Any, x.module)) for x in pair if isinstance(x, Normed)]
            if len(names) == 2 and names[0] is not None and names[1] is not None and names[0] != names[1]:
                return names[0], names[1]
            raise Left("it does not rotate the results of two norms, as they are") from None
        except Exception as error:  # code that nobody here has seen, or another size
            text = str(error).partition("\n")[0]
            reason = f"its forward, tried on its own, raises {type(error).__name__}: {text}"
    raise Left(reason)


def _stand_in(name: str, child: nn.Module | None) -> nn.Module | None:
    if child is None:
        return None
    if any(isinstance(module, Norm) for module in child.modules()):
        return _Watched()
    if sizes := features(child):
        return nn.Linear(*sizes, bias=False, device="meta", dtype=torch.bfloat16)
    if next(child.parameters(), None) is not None:
        raise Left(f"its child {name}, {type(child).__name__}, is neither a norm nor a linear layer")
    return bare(child)


def _try(norms: tuple[Norm, ...], rotate: Any) -> None:
    """Refuses two norms if one pass has not the bits of their classes and of the function that rotates."""
    columns = [_columns(norm) for norm in norms]
    if columns[0] != columns[1] or columns[0] > _WIDEST:
        raise Left(
            f"its norms have {columns[0]} and {columns[1]} columns, expected equally many, 512 at most"
        )
    rows, pending = [], []
    for norm, heads in zip(norms, (4, 2)):  # noqa: B905
        copy: Any = bare(norm)
        if norm._parameters.get("weight") is not None:
            fresh = random(columns[0], scale=0.3) + 1
            copy.weight = nn.Parameter(fresh, requires_grad=False)
        _let_wait(copy)
        x = random(2, heads, 7, columns[0], scale=2)
        rows.append(forward(_of_the_class(copy), x))
        pending.append(Normed(copy, x))
    tables = random(2, 7, columns[0]), random(2, 7, columns[0])
    expected, results = rotate.__wrapped__(*rows, *tables), rotate(*pending, *tables)
    if any(one.result is not None for one in pending):
        raise Left("qk_norm_rotary does not compute its norms and its rotary embedding")
    equal = [(y == z).double().mean().item() for y, z in zip(results, expected)]  # noqa: B905
    if min(equal) < _EQUAL:
        raise Left(f"qk_norm_rotary computes something else (equal elements: {min(equal):.0%})")


def _columns(norm: Norm) -> int:
    weight = norm._parameters.get("weight")
    return 64 if weight is None else weight.numel()


def _of_the_class(copy: nn.Module) -> nn.Module:
    """A copy with the forward of the class that transformers has."""
    original = bare(copy)
    original._parameters.update(copy._parameters)
    restore(original)
    return original
