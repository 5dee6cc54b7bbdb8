"""The loss of a causal language model: from its logits, or inside its head, which then never makes them.

The linear loss is computed in the head's forward, because under FSDP2 its weight is whole only there. The
model's forward leaves the labels with the head, so both get another class.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gander

from ._probe import Left, bare, quiet, random
from ._swap import Mixin, out_of_reach, own_class, swap


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss, without the float32 copy of the logits."""
    target = _shifted(labels, shift_labels, ignore_index).view(-1).to(logits.device)
    options = _reduction(num_items_in_batch, logits.device)
    return gander.cross_entropy(logits.view(-1, vocab_size), target, ignore_index=ignore_index, **options)


def linear_lm_loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """0 where the head has computed the loss in place of logits, which the model may then have changed: Model
    adds it to what the model makes of this."""
    return torch.zeros_like(logits) if logits.dim() == 0 else causal_lm_loss(logits, *args, **kwargs)


def _shifted(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is not None:
        return shift_labels
    return F.pad(cast(Tensor, labels), (0, 1), value=ignore_index)[..., 1:].contiguous()


def _reduction(items: Tensor | int | None, device: torch.device) -> dict[str, Any]:
    if items is None:
        return {}
    return {"reduction": "sum", "divisor": items.to(device) if isinstance(items, Tensor) else items}


class _Task(NamedTuple):
    """What the head needs for the loss."""

    labels: Tensor
    num_items_in_batch: Tensor | int | None
    ignore_index: int
    shift_labels: Tensor | None


class Head(Mixin):
    """The mixin of a head: a loss in place of logits, where the model has left a task."""

    _gander_task: _Task | None = None
    _gander_loss: Tensor | None = None  # for the model, which may change what the head returns
    _gander_map: ClassVar[dict[str, Any]] = {}

    def forward(self, x: Tensor) -> Tensor:
        linear = cast(nn.Linear, self)
        task, self._gander_task = self._gander_task, None
        if task is None or x.shape[:-1] != task.labels.shape:
            return cast(Tensor, cast(Any, super()).forward(x))
        target = _shifted(task.labels, task.shift_labels, task.ignore_index).view(-1).to(x.device)
        options = _reduction(task.num_items_in_batch, x.device)
        options |= self._gander_map | {"ignore_index": task.ignore_index}
        rows = x.reshape(-1, x.shape[-1])
        loss = gander.linear_cross_entropy(rows, linear.weight, target, linear.bias, **options)
        self._gander_loss = loss
        return loss  # FSDP2 puts a hook on it


class Model(Mixin):
    """The mixin of a model whose head computes the loss while it is trained."""

    @classmethod
    def namespace(cls, original: Any) -> dict[str, Any]:
        names = [*inspect.signature(original.forward).parameters][1:]

        @functools.wraps(original.forward)  # Trainer and generate read the signature
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args)) | kwargs  # noqa: B905 - most are not given
            head = self.get_output_embeddings()
            if not (isinstance(head, Head) and _wants_loss_alone(self, given)):
                return original.forward(self, *args, **kwargs)
            options = (
                given.get("num_items_in_batch"),
                given.get("ignore_index", -100),
                given.get("shift_labels"),
            )
            head._gander_task = _Task(given["labels"], *options)
            try:
                output = original.forward(self, *args, **kwargs)
            finally:
                loss, head._gander_task, head._gander_loss = head._gander_loss, None, None
            if loss is None:  # the head was not called with the labels' rows
                return output
            kept = {name: value for name, value in output.items() if name != "logits"}
            return type(output)(**kept | {"loss": output.loss + loss})

        return {"forward": forward}


def _wants_loss_alone(model: Any, given: dict[str, Any]) -> bool:
    keep, as_dict = given.get("logits_to_keep", 0), given.get("return_dict")
    return (
        given.get("labels") is not None
        and model.training
        and torch.is_grad_enabled()
        and type(keep) is int
        and keep == 0
        and (model.config.return_dict if as_dict is None else as_dict)
    )


def replace(model: Any, loss: str) -> tuple[str, str | None]:
    """Replaces a model's loss. Returns by what, and why not by the linear loss if that was wanted."""
    if "labels" not in inspect.signature(model.forward).parameters:
        raise Left("it takes no labels")
    from transformers.loss.loss_utils import ForCausalLMLoss

    function = model.loss_function
    if function is not ForCausalLMLoss:
        raise Left(f"its loss is {getattr(function, '__name__', function)}, expected ForCausalLMLoss")
    refusal = None
    if loss == "linear":
        try:
            head, mapped = _linear_head(model)
        except Left as left:
            refusal = str(left)
        else:
            swap(head, Head)
            swap(model, Model)
            if mapped:
                vars(head)["_gander_map"] = mapped
            model.loss_function = linear_lm_loss
            words = "".join(f", {name} {value:.4g}" for name, value in mapped.items())
            return "linear_cross_entropy, in the head" + words, None
    model.loss_function = causal_lm_loss
    return "cross_entropy", refusal


def restore(model: Any) -> None:
    for module in model.children():
        for name in "_gander_map", "_gander_task", "_gander_loss":
            vars(module).pop(name, None)
    if vars(model).get("_loss_function") in (causal_lm_loss, linear_lm_loss):
        del model._loss_function


def _linear_head(model: Any) -> tuple[nn.Linear, dict[str, float]]:
    """The head that may compute the loss, and what the model does to its logits, as linear_cross_entropy's
    options. Refuses, in words, what that does not compute."""
    head = model.get_output_embeddings()
    if head is None or own_class(head) is not nn.Linear:
        raise Left(f"its head is {type(head).__name__}, expected torch.nn.Linear")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise Left("tensor parallelism divides its head")
    data = type(head.weight.data)
    if data is not Tensor and not _is_sharded_by_fsdp(model, head):
        raise Left(
            f"its head's weight is {data.__name__}, expected a plain tensor, or one that FSDP2 gathers"
        )
    names = [name for name, child in model._modules.items() if child is head]
    if len(names) != 1:
        raise Left("its head is not a child of the model itself")
    for module in (model, head):
        if (reason := out_of_reach(module)) is not None:
            raise Left(reason)
    with quiet():
        return cast(nn.Linear, head), _try_forward(model, names[0])


def _is_sharded_by_fsdp(*modules: nn.Module) -> bool:
    """Whether FSDP2 gathers what its DTensors hold before one of these modules runs."""
    return any(own_class(module) is not type(module) for module in modules)


class _Reached(Exception):
    """Ends a forward where it calls the loss, with what it hands over."""


class _Outputs:
    """What a stub returns: hidden states, and None for all else."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


class _Stub(nn.Module):
    """In the place of all but the head."""

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(random(1, 4, 8, dtype=torch.float32))


_SMALL, _LARGE = 1e-3, 1e30


class _Recording(nn.Linear):
    """A head that returns numbers of ours, and counts its calls."""

    def __init__(self) -> None:
        super().__init__(8, 16, bias=False)
        self.calls = 0
        ends = torch.tensor([_SMALL, _LARGE, -_LARGE])
        self.result = torch.cat((torch.linspace(-60, 60, 61), ends)).view(1, 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.result.clone()


def _map(logits: Any, x: Tensor) -> dict[str, float] | None:
    """What turns x into logits: nothing, a scale, or a cap. None for anything else."""
    if logits is None or logits.shape != x.shape or not logits.isfinite().all():
        return None
    if torch.equal(logits.float(), x):
        return {}
    y, x = logits.double().flatten(), x.double().flatten()
    scale, cap = y[-3].item() / _SMALL, y[-2].item()
    if scale <= 0 or cap <= 0:
        return None
    for exact in 1.0, 1 / max(1, round(1 / scale)):  # without the rounding of this trial
        scale = exact if abs(scale / exact - 1) < 1e-6 else scale
    capped = cap < _LARGE / 1e6
    z = cap * torch.tanh(x * scale / cap) if capped else x * scale
    if not torch.allclose(y, z, rtol=1e-5, atol=1e-7):
        return None
    return ({} if scale == 1 else {"scale": scale}) | ({"softcap": cap} if capped else {})


def _try_forward(model: Any, head_name: str) -> dict[str, float]:
    """Finds what a model does to its head's result before it hands it to the loss, together with labels."""
    copy: Any = bare(model)
    head = _Recording()
    copy._modules.update({name: _Stub() for name in model._modules} | {head_name: head})

    def reached(*args: Any, **kwargs: Any) -> None:
        names = ("logits", "labels", "vocab_size", "num_items_in_batch")
        raise _Reached(dict(zip(names, args)) | kwargs)  # noqa: B905 - most are not given

    copy.loss_function = reached
    ids, name = torch.arange(4)[None], type(model).__name__
    cls: Any = own_class(model)
    given: dict[str, Any] = {}
    try:
        cls.forward(copy, input_ids=ids, labels=ids, num_items_in_batch=3)
    except _Reached as found:
        given = found.args[0]
    except Exception as error:  # code that nobody here has seen
        text = str(error).partition("\n")[0]
        raise Left(f"{name}.forward, tried with a stub, raises {type(error).__name__}: {text}") from error
    if not given:
        raise Left(f"{name}.forward does not call its loss_function")
    mapped = _map(given.get("logits"), head.result) if head.calls == 1 else None
    if mapped is None:
        raise Left(f"{name}.forward changes its head's logits before its loss by more than a cap and a scale")
    if given.get("num_items_in_batch") != 3 or not torch.equal(given.get("labels", ids + 1), ids):
        raise Left(f"{name}.forward changes the labels, or drops num_items_in_batch")
    return mapped
