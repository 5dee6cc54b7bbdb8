"""RMSNorms: which form a class computes, and the class that computes it with gander.rmsnorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import gander

from ._probe import Left, bare, forward, quiet, random, scalars
from ._swap import Mixin, out_of_reach, swap

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EQUAL = 0.99  # the share of elements in which a form has the bits of the class
_NEAR = 0.95  # the share that no other form may reach


class Form(NamedTuple):
    """One way to compute an RMSNorm, as options of gander.rmsnorm."""

    words: str
    weighted: bool
    options: dict[str, Any]


FORMS = {
    "llama": Form("rmsnorm, rounded before the weight", True, {"casting_mode": "llama"}),
    "once": Form("rmsnorm, rounded once", True, {}),
    "zero": Form("rmsnorm, times 1 + weight", True, {"weight_offset": 1.0}),
    "plain": Form("rmsnorm without a weight", False, {}),
}


class Norm(Mixin):
    """Serves what was proven: the dtypes that were tried. Any other call is the class's own."""

    _gander_form: str
    _gander_eps: str  # the name of the attribute: its value may change
    # The result's dtype by those of x and of the weight. Pairs, because facts are hashable.
    _gander_dtypes: tuple[tuple[tuple[torch.dtype, torch.dtype | None], torch.dtype], ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        form = FORMS[self._gander_form]
        if len(args) == 1 and not kwargs:
            x: Tensor = args[0]
            weight: Tensor | None = cast(Any, self).weight if form.weighted else None
            types = x.dtype, None if weight is None else weight.dtype
            for tried, dtype in self._gander_dtypes:
                if tried == types:
                    eps = getattr(self, self._gander_eps)
                    return gander.rmsnorm(x, weight, eps=eps, out_dtype=dtype, **form.options)
        return cast(Any, super()).forward(*args, **kwargs)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module may be a norm: by its name, or because it has an epsilon and nothing but a weight."""
    if "norm" in type(module).__name__.lower():
        return True
    return _epsilon(module) is not None and set(module._parameters) == {"weight"} and not module._modules


def replace(module: nn.Module, known: dict[Any, Any]) -> str:
    """Replaces a norm, and says by what. `known` keeps what was found for a class and its attributes."""
    if (reason := out_of_reach(module)) is not None:
        raise Left(reason)
    weight = module._parameters.get("weight")
    key = type(module), scalars(module), None if weight is None else tuple(weight.shape)
    if key not in known:
        try:
            known[key] = _find(module)
        except Left as left:
            known[key] = left
    if isinstance(known[key], Left):
        raise known[key]
    form, eps, dtypes = known[key]
    swap(module, Norm, _gander_form=form, _gander_eps=eps, _gander_dtypes=dtypes)
    return FORMS[form].words


def _epsilon(module: nn.Module) -> str | None:
    """The name of the attribute that holds epsilon."""
    names = [
        name for name, value in vars(module).items() if "eps" in name and type(value) in (float, type(None))
    ]
    return names[0] if len(names) == 1 else None


def _find(module: nn.Module) -> tuple[str, str, tuple[Any, ...]]:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if module._modules or module._buffers or set(parameters) - {"weight"}:
        others = [*module._modules, *module._buffers, *sorted(set(parameters) - {"weight"})]
        raise Left(f"it has more than a weight: {', '.join(others)}")
    weight = parameters.get("weight")
    if weight is not None and weight.dim() != 1:
        raise Left(f"its weight has shape {tuple(weight.shape)}, expected one dimension")
    eps = _epsilon(module)
    if eps is None:
        raise Left("it has no attribute that is its epsilon")
    with quiet():
        return _find_form(module, None if weight is None else weight.numel(), eps)


def _find_form(module: nn.Module, n: int | None, eps: str) -> tuple[str, str, tuple[Any, ...]]:
    # Half of the rows are so small that epsilon decides about them.
    rows = max(16, 8192 // (n or 64))
    x = random(rows, n or 64, dtype=torch.float32, scale=3)
    x[::2] *= (getattr(module, eps) or torch.finfo(torch.float32).eps) ** 0.5 / 3
    w = None if n is None else random(n, dtype=torch.float32, scale=0.5) + 1

    def run(dtypes: tuple[torch.dtype, torch.dtype | None]) -> tuple[Tensor, Callable[[str], float]]:
        """What the class computes, and the share of elements in which a form agrees."""
        copy, given = bare(module), x.to(dtypes[0])
        scale = None if w is None else nn.Parameter(w.to(dtypes[1]), requires_grad=False)
        if scale is not None:
            copy.weight = scale
        expected = forward(copy, given)
        if expected.shape != x.shape or expected.dtype not in _DTYPES:
            raise Left(f"it returns {tuple(expected.shape)} of {expected.dtype} for {tuple(x.shape)}")

        def agreement(form: str) -> float:
            options = dict(eps=getattr(module, eps), out_dtype=expected.dtype, **FORMS[form].options)
            y = gander.rmsnorm(given, scale, **options).double()
            # float32 results differ in their last bits. In 16 bits this much is no difference at all.
            return ((y - expected).abs() <= 1e-5 * expected.double().abs()).double().mean().item()

        return expected, agreement

    _, agreement = run((torch.bfloat16, None if w is None else torch.bfloat16))
    shares = {name: agreement(name) for name, form in FORMS.items() if form.weighted == (w is not None)}
    best = max(shares, key=lambda name: shares[name])
    others = [share for name, share in shares.items() if name != best]
    if shares[best] < _EQUAL or max(others, default=0) > _NEAR:
        near = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        raise Left(f"it computes none of the known forms (equal elements: {near})")
    dtypes = []
    for pair in [(a, b) for a in _DTYPES for b in (_DTYPES if w is not None else (None,))]:
        expected, agreement = run(pair)
        if agreement(best) >= _EQUAL:
            dtypes.append((pair, expected.dtype))
    return best, eps, tuple(dtypes)
