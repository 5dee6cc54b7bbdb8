"""apply, undo and patched."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from . import _loss, _mlp, _norms, _rotary, _swap, _versions
from ._probe import Left
from ._report import Draft, Report

Loss = Literal["cross_entropy", "linear"]

M = TypeVar("M", bound=nn.Module)


def apply(
    model: nn.Module,
    norms: bool = True,
    loss: Loss | None = "cross_entropy",
    rotary: bool = True,
    mlp: bool = True,
    qk_norm: bool = False,
) -> Report:
    """Puts gander into a model, in place: this instance changes, and nothing else.

    What a module computes is found by running its class on the CPU, with fresh parameters of its shape (in an
    MLP, of small ones), and never taken from its name. Where its bits are not those of a known form it stays
    as it is, and the report says why. Before or after PEFT, FSDP2 and torch.compile. A model that gander is
    in already is changed to what this call says.

    Args:
        model: A model of transformers, or a module that contains one, such as a PeftModel.
        norms: Replace RMSNorms: rounded as their class rounds, with or without a weight, times the weight or
            times 1 + weight.
        loss: "cross_entropy" replaces the loss that is computed from logits. "linear" computes it in the head
            while the model is trained, and the output then has no logits. Where that would be another loss
            (logits that are changed by more than a cap and a scale, a head with LoRA, quantised or divided
            among ranks) it is the former. None keeps the loss. It is replaced only where it is transformers'
            ForCausalLMLoss.
        rotary: Replace the rotary position embeddings of attentions, where a function of their module whose
            name begins with apply_rotary computes them.
        mlp: Replace the product of activation and up projection in gated MLPs and experts.
        qk_norm: Compute the norms of queries and keys together with their rotary embeddings, where an
            attention has such norms (Qwen3, Gemma 3). It needs norms and rotary. Not by default, because its
            gain has not been measured on a GPU.

    Returns:
        What was replaced and what was left, which str() makes a table of.

    Raises:
        TypeError: An argument of another type.
        ValueError: loss, or qk_norm without norms and rotary.
        ImportError: transformers is missing or too old.
        NotImplementedError: The parameters are divided by DeepSpeed's ZeRO-3.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}, expected a torch.nn.Module, such as a model of transformers"
        )
    _check(norms, loss, rotary, mlp, qk_norm)
    notes = _versions.require()
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise NotImplementedError(
            "model has parameters that DeepSpeed's ZeRO-3 divides: gander.hf does not support it"
        )
    undo(model)
    draft = Draft()
    if mlp:
        _apply_to_mlps(model, draft)
    if norms:
        _apply_to_norms(model, draft)
    if rotary:
        _apply_to_attentions(model, draft, qk_norm)
    if loss is not None:
        _apply_to_loss(model, loss, draft)
    return draft.report(notes)


def _check(norms: Any, loss: Any, rotary: Any, mlp: Any, qk_norm: Any) -> None:
    flags = {"norms": norms, "rotary": rotary, "mlp": mlp, "qk_norm": qk_norm}
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise TypeError(f"{name} is {flag!r}, expected True or False")
    if loss not in ("cross_entropy", "linear", None):
        raise ValueError(f"loss is {loss!r}, expected 'cross_entropy', 'linear' or None")
    if qk_norm and not (norms and rotary):
        raise ValueError("qk_norm is True, expected False without norms and rotary, which it joins")


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, without those that are scripted: their class says nothing."""
    found = model.named_modules()
    return [(name, module) for name, module in found if not isinstance(module, torch.jit.ScriptModule)]


def _apply_to_norms(model: nn.Module, draft: Draft) -> None:
    known: dict[Any, Any] = {}
    for name, module in _modules(model):
        if not _norms.is_candidate(module):
            continue
        try:
            draft.replaced("norm", module, name, _norms.replace(module, known))
        except Left as left:
            draft.left("norm", module, name, str(left))


def _apply_to_attentions(model: nn.Module, draft: Draft, qk_norm: bool) -> None:
    for name, module in _modules(model):
        if not _rotary.is_candidate(module):
            continue
        try:
            by, reasons = _rotary.replace(module)
        except Left as left:
            draft.left("rotary", module, name, str(left))
            continue
        draft.replaced("rotary", module, name, by)
        for reason in reasons:
            draft.left("rotary", module, name, reason)
        if qk_norm:
            try:
                draft.replaced("qk_norm", module, name, _rotary.replace_norms(module))
            except Left as left:
                draft.left("qk_norm", module, name, str(left))


def _apply_to_mlps(model: nn.Module, draft: Draft) -> None:
    kinds: dict[Any, str | None] = {}
    known: dict[Any, Any] = {}
    users: dict[nn.Module, list[tuple[str, nn.Module]]] = {}  # activations may be shared
    for name, module in _modules(model):
        acts = {child for child in module.children() if _mlp.activation(child, kinds) is not None}
        for act in acts:
            users.setdefault(act, []).append((name, module))
        if hasattr(module, "_apply_gate") and not acts:
            draft.left("mlp", module, name, "its gate is none of the known activations")
    for act, parents in users.items():
        product = cast(str, _mlp.activation(act, kinds))
        try:
            _mlp.replace([module for _, module in parents], act, product, known)
        except Left as left:
            for name, module in parents:
                draft.left("mlp", module, name, str(left))
        else:
            for name, module in parents:
                draft.replaced("mlp", module, name, product)


def _apply_to_loss(model: nn.Module, loss: Loss, draft: Draft) -> None:
    from transformers import PreTrainedModel

    # The outermost: parts of a model of vision and language are models too.
    found = next(((n, m) for n, m in model.named_modules() if isinstance(m, PreTrainedModel)), None)
    if found is None:
        draft.left("loss", model, "", "it contains no PreTrainedModel")
        return
    name, inner = found
    try:
        by, refusal = _loss.replace(inner, loss)
    except Left as left:
        draft.left("loss", inner, name, str(left))
        return
    draft.replaced("loss", inner, name, by)
    if refusal is not None:
        draft.left("loss", inner, name, f"linear_cross_entropy: {refusal}")


def undo(model: M) -> M:
    """Takes gander out of a model, in place. Other models keep it, copies of this one too.

    Args:
        model: A model, with or without gander.

    Returns:
        The model.

    Raises:
        TypeError: model is no torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    for module in model.modules():
        _swap.restore(module)
        _loss.restore(module)
    return model


_Options = tuple[bool, "Loss | None", bool, bool, bool]

# What models get that are loaded in this context, and the list of their reports.
_active: ContextVar[tuple[_Options, list[Report]] | None] = ContextVar("gander.hf.patched", default=None)
_loaders = ("from_pretrained", "_from_config")
_originals: dict[str, Any] = {}
_contexts = 0
_lock = threading.Lock()


@contextlib.contextmanager
def patched(
    norms: bool = True,
    loss: Loss | None = "cross_entropy",
    rotary: bool = True,
    mlp: bool = True,
    qk_norm: bool = False,
) -> Iterator[list[Report]]:
    """Models that are loaded inside this context get `apply`, with these arguments.

    That is what from_pretrained and from_config return, in this thread alone.

    Args:
        norms: As in apply.
        loss: As in apply.
        rotary: As in apply.
        mlp: As in apply.
        qk_norm: As in apply.

    Returns:
        A list, to which each model adds its report.

    Raises:
        TypeError, ValueError: As apply.
        ImportError: transformers is missing or too old.
    """
    _check(norms, loss, rotary, mlp, qk_norm)
    _versions.require()
    reports: list[Report] = []
    _count_contexts(1)
    token = _active.set(((norms, loss, rotary, mlp, qk_norm), reports))
    try:
        yield reports
    finally:
        _active.reset(token)
        _count_contexts(-1)


def _count_contexts(change: int) -> None:
    """The first context wraps transformers' loaders, the last one takes that back."""
    from transformers import PreTrainedModel

    global _contexts
    with _lock:
        _contexts += change
        if _contexts == 1 and not _originals:
            _originals.update({name: vars(PreTrainedModel)[name] for name in _loaders})
            for name, original in _originals.items():
                setattr(PreTrainedModel, name, classmethod(_applied(original.__func__)))
        elif _contexts == 0:
            for name, original in _originals.items():
                setattr(PreTrainedModel, name, original)
            _originals.clear()


def _applied(loader: Any) -> Any:
    @functools.wraps(loader)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        if active is None:
            return loader(cls, *args, **kwargs)
        token = _active.set(None)  # a model that loads its parts gets `apply` once, as a whole
        try:
            loaded = loader(cls, *args, **kwargs)
        finally:
            _active.reset(token)
        options, reports = active
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
        reports.append(apply(model, *options))
        return loaded

    return load
