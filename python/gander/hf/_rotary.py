"""Rotary position embeddings: the functions of an attention's module that rotate its queries and keys.

They are globals of transformers' module, which all models of a class share. So one attention gets another
class, whose forward is the same code with globals of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import gander

from . import _heads
from ._pending import computed
from ._probe import Left, quiet, random
from ._swap import Mixin, out_of_reach, own_class, swap

_PREFIX = "apply_rotary"  # of the functions' names
_PAIR, _SINGLE = ["q", "k", "cos", "sin", "unsqueeze_dim"], ["x", "cos", "sin", "unsqueeze_dim"]


def _given(table: Tensor) -> Tensor:
    return table


def _twice(table: Tensor) -> Tensor:
    """A number for each element of two halves, from one for each pair."""
    return torch.cat((table, table), -1)


def _first_half_twice(table: Tensor) -> Tensor:
    """A number for each element of adjacent pairs, from the first half of those of two halves."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


class _Form(NamedTuple):
    words: str
    table: Callable[[Tensor], Tensor]  # what rotary takes, from what the function does
    options: dict[str, Any]


def _forms() -> dict[str, _Form]:
    layouts = {
        "halves": ("rotary of halves", _given, False),
        "pairs": ("rotary of halves", _twice, False),
        "adjacent": ("rotary of adjacent pairs", _given, True),
        "adjacent pairs": ("rotary of adjacent pairs", _first_half_twice, True),
    }
    forms = {}
    for name, (words, table, interleaved) in layouts.items():
        for mode, more in (("llama", ""), (None, ", rounded once")):
            options = {"interleaved": interleaved, "casting_mode": mode}
            forms[name + more] = _Form(words + more, table, options)
    return forms


_FORMS = _forms()
_EQUAL, _NEAR = 0.99, 0.95  # shares of elements: of the form that it is, and at most of any other
_COLUMNS = 32  # of the heads that are tried
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _find(function: Callable[..., Any]) -> dict[int, str]:
    """The forms that a function has, by the quarters of a head's columns that tables have columns for."""
    names = [*inspect.signature(function).parameters]
    if names not in (_PAIR, _SINGLE):
        raise Left(f"it takes {', '.join(names)}, expected {', '.join(_PAIR)}")
    found, reasons = {}, []
    with quiet():
        rows = [random(2, heads, 7, _COLUMNS) for heads in ((4, 2) if names == _PAIR else (4,))]
        for quarters in (4, 3, 2, 1):
            try:
                found[quarters] = _form(function, rows, quarters * _COLUMNS // 4)
            except Left as left:
                reasons.append(str(left))
    if not found:
        raise Left(f"it {reasons[0]}")
    return found


def _form(function: Callable[..., Any], rows: list[Tensor], width: int) -> str:
    """The form that a function has beside tables of a width."""
    tables = random(2, 7, width), random(2, 7, width)
    try:
        expected = function(*rows, *tables)
    except Exception as error:  # code that nobody here has seen, called as it may not expect
        text = str(error).partition("\n")[0]
        raise Left(f"raises {type(error).__name__}: {text}") from error
    if len(rows) == 1:
        expected = (expected,)
    if [getattr(y, "shape", None) for y in expected] != [x.shape for x in rows]:
        raise Left("returns other shapes than it takes")
    shares = {}
    for name, form in _FORMS.items():
        given = [form.table(table) for table in tables]
        if given[0].shape[-1] <= _COLUMNS:
            results = gander.rotary(rows[0], rows[1] if len(rows) > 1 else None, *given, **form.options)
            equal = [(y == z).float().mean().item() for y, z in zip(results, expected)]  # noqa: B905
            shares[name] = min(equal)
    best = max(shares, key=lambda name: shares[name])
    if shares[best] < _EQUAL or max(share for name, share in shares.items() if name != best) > _NEAR:
        raise Left(f"computes none of the known forms ({best}: {shares[best]:.0%})")
    return best


def _served(
    forms: dict[int, str], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> _Form | None:
    """The form by which rotary has the function's result, or None.

    Tables of another dtype or width, and what PyTorch would broadcast, are left to the function.
    """
    tokens, heads = (2, 1) if unsqueeze_dim == 1 else (1, 2)
    fits = (
        unsqueeze_dim in (1, 2)
        and q.dim() == 4
        and q.dtype in _DTYPES
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype == q.dtype
        and not (cos.requires_grad or sin.requires_grad)
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[tokens]
        and 4 * cos.shape[2] % q.shape[3] == 0
    )
    if fits and k is not None:
        same = (dim for dim in range(4) if dim != heads)
        fits = k.dim() == 4 and k.dtype == q.dtype and all(k.shape[dim] == q.shape[dim] for dim in same)
    name = forms.get(4 * cos.shape[2] // q.shape[3]) if fits else None
    return None if name is None else _FORMS[name]


def _turned(x: Tensor | None, unsqueeze_dim: int) -> Any:
    """Heads before tokens, or back. With unsqueeze_dim=2 the function has tokens before heads."""
    return x if x is None or unsqueeze_dim == 1 else x.transpose(1, 2)


class _Replacement(NamedTuple):
    function: Callable[..., Any]
    words: str


@functools.cache
def _replacement(function: Callable[..., Any]) -> _Replacement:
    """A function of the same arguments that calls rotary where that has the function's result."""
    forms = _find(function)
    words = _FORMS[forms[max(forms)]].words

    def rotate(rows: tuple[Any, ...], cos: Tensor, sin: Tensor, dim: int) -> Any:
        rows = computed(rows)
        q, k = (*rows, None)[:2]
        form = _served(forms, q, k, cos, sin, dim)
        if form is None:
            return function(*rows, cos, sin, dim)
        tables = form.table(cos), form.table(sin)
        results = gander.rotary(_turned(q, dim), _turned(k, dim), *tables, **form.options)
        q, k = (_turned(y, dim) for y in results)
        return q if len(rows) == 1 else (q, k)

    def one(x: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return rotate((x,), cos, sin, unsqueeze_dim)

    def both(q: Any, k: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if isinstance(q, _heads.Normed) and isinstance(k, _heads.Normed):
            rows = q.rows(), k.rows()
            form, norms = _served(forms, *rows, cos, sin, unsqueeze_dim), _heads.options(q, k)
            if form is not None and norms is not None and form.options["casting_mode"] == "llama":
                turned = [_turned(x, unsqueeze_dim) for x in rows]
                options = {**form.options, **norms.named}
                tables = form.table(cos), form.table(sin)
                results = gander.qk_norm_rotary(*turned, *norms.weights, *tables, **options)
                return tuple(_turned(y, unsqueeze_dim) for y in results)
        return rotate((q, k), cos, sin, unsqueeze_dim)

    made = one if [*inspect.signature(function).parameters] == _SINGLE else both
    return _Replacement(functools.wraps(function)(made), words)


@functools.cache
def _functions(cls: type) -> tuple[dict[str, _Replacement], dict[str, str]]:
    """The functions that a class's forward calls: those that are replaced, and why others are not."""
    replaced, left = {}, {}
    for function in _chain(cls):
        for name in function.__code__.co_names:
            found = function.__globals__.get(name)
            if not (name.startswith(_PREFIX) and callable(found)):
                continue
            try:
                replaced[name] = _replacement(found)
            except Left as reason:
                left[name] = str(reason)
    return replaced, left


def _chain(cls: Any) -> list[types.FunctionType]:
    """A class's forward, and what it wraps as a decorator does."""
    chain, function = [], cls.forward
    while isinstance(function, types.FunctionType):
        chain.append(function)
        function = vars(function).get("__wrapped__")
    return chain


def _rebound(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """The same code, in which globals have other values. Decorators that wrap it are kept."""
    inner = vars(function).get("__wrapped__")
    closure = function.__closure__
    if isinstance(inner, types.FunctionType):
        made = _rebound(inner, names)
        closure = tuple(types.CellType(made) if _holds(cell, inner) else cell for cell in closure or ())
    # A decorator's own globals stay, and so do those of a function that has none of the names.
    used = {name: value for name, value in names.items() if name in function.__code__.co_names}
    scope = {**function.__globals__, **used} if used else function.__globals__
    if used:  # Dynamo of torch before 2.14 looks globals up in the module that is named in them
        del scope["__name__"]
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    vars(copy).update(vars(function))
    copy.__qualname__, copy.__doc__ = function.__qualname__, function.__doc__
    copy.__annotations__, copy.__module__ = function.__annotations__, function.__module__
    if isinstance(inner, types.FunctionType):
        copy.__wrapped__ = made  # type: ignore[attr-defined]
    return copy


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


class Attention(Mixin):
    """The mixin of an attention whose forward calls other functions."""

    @classmethod
    def namespace(cls, original: Any) -> dict[str, Any]:
        replaced, _ = _functions(original)
        names = {name: replacement.function for name, replacement in replaced.items()}
        return {"forward": _rebound(original.forward, names)}


def is_candidate(module: nn.Module) -> bool:
    names = (name for function in _chain(own_class(module)) for name in function.__code__.co_names)
    return any(name.startswith(_PREFIX) for name in names)


def replace(module: nn.Module) -> tuple[str, list[str]]:
    """Replaces the functions that a module's forward calls. Says by what, and why some were left."""
    if (reason := out_of_reach(module)) is not None:
        raise Left(reason)
    replaced, left = _functions(own_class(module))
    reasons = [f"{name}: {reason}" for name, reason in left.items()]
    if not replaced:
        raise Left("; ".join(reasons) or f"it calls no function of its own module named {_PREFIX}...")
    swap(module, Attention)
    return ", ".join(sorted({replacement.words for replacement in replaced.values()})), reasons


def replace_norms(module: nn.Module) -> str:
    """Of an attention that was replaced: has the norms of its heads computed together with their rotary
    embeddings. Says by what and which norms."""
    original = cast(Any, own_class(module))._gander_recipe[0]
    replaced, _ = _functions(original)
    if len(replaced) != 1:
        raise Left(f"it calls {', '.join(replaced)}, expected one function that rotates")
    ((name, replacement),) = replaced.items()
    return _heads.replace(
        module, lambda other: _rebound(original.forward, {name: other}), replacement.function
    )
