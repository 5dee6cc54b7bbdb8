"""The loss of a causal language model: from its logits, or inside its head, which then never makes them.

The linear loss is computed in the head's forward, because under FSDP2 its weight is whole only there. The
model's forward leaves the labels with the head, so both get another class.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple, cast

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
    """The loss itself where the head has computed it in place of logits."""
    return logits if logits.dim() == 0 else causal_lm_loss(logits, *args, **kwargs)


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

    def forward(self, x: Tensor) -> Tensor:
        linear = cast(nn.Linear, self)
        task: _Task | None = vars(self).pop("_gander_task", None)
        if task is None or x.shape[:-1] != task.labels.shape:
            return cast(Tensor, cast(Any, super()).forward(x))
        target = _shifted(task.labels, task.shift_labels, task.ignore_index).view(-1).to(x.device)
        options = _reduction(task.num_items_in_batch, x.device)
        rows = x.reshape(-1, x.shape[-1])
        return gander.linear_cross_entropy(
            rows, linear.weight, target, linear.bias, ignore_index=task.ignore_index, **options
        )


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
            vars(head)["_gander_task"] = _Task(given["labels"], *options)
            try:
                output = original.forward(self, *args, **kwargs)
            finally:
                vars(head).pop("_gander_task", None)
            # Where the head was not called with the labels' rows, these are logits.
            if output.logits is None or output.logits.dim() > 0:
                return output
            return type(output)(**{name: value for name, value in output.items() if name != "logits"})

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
            head = _linear_head(model)
        except Left as left:
            refusal = str(left)
        else:
            swap(head, Head)
            swap(model, Model)
            model.loss_function = linear_lm_loss
            return "linear_cross_entropy, in the head", None
    model.loss_function = causal_lm_loss
    return "cross_entropy", refusal


def restore(model: Any) -> None:
    if vars(model).get("_loss_function") in (causal_lm_loss, linear_lm_loss):
        del model._loss_function


def _linear_head(model: Any) -> nn.Linear:
    """The head that may compute the loss. Refuses, in words, what linear_cross_entropy does not compute."""
    head = model.get_output_embeddings()
    if head is None or own_class(head) is not nn.Linear:
        raise Left(f"its head is {type(head).__name__}, expected torch.nn.Linear")
    data = type(head.weight.data)
    if data is not Tensor and not _is_sharded_by_fsdp(model, head):
        raise Left(
            f"its head's weight is {data.__name__}, expected a plain tensor, or one that FSDP2 gathers"
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise Left("tensor parallelism divides its head")
    names = [name for name, child in model._modules.items() if child is head]
    if len(names) != 1:
        raise Left("its head is not a child of the model itself")
    for module in (model, head):
        if (reason := out_of_reach(module)) is not None:
            raise Left(reason)
    with quiet():
        _try_forward(model, names[0])
    return cast(nn.Linear, head)


def _is_sharded_by_fsdp(model: nn.Module, head: nn.Module) -> bool:
    return type(head.weight.data).__name__ == "DTensor" and own_class(model) is not type(model)


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


class _Recording(nn.Linear):
    """A head that keeps what it has returned."""

    def __init__(self) -> None:
        super().__init__(8, 16, bias=False)
        self.results: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.results.append(super().forward(x))
        return self.results[-1]


def _try_forward(model: Any, head_name: str) -> None:
    """Proves that a model hands its head's result, as it is, to the loss, together with the labels."""
    copy: Any = bare(model)
    head = _Recording()
    copy._modules.update({name: _Stub() for name in model._modules} | {head_name: head})

    def reached(*args: Any, **kwargs: Any) -> None:
        names = ("logits", "labels", "vocab_size", "num_items_in_batch")
        raise _Reached(dict(zip(names, args)) | kwargs)  # noqa: B905 - most are not given

    copy.loss_function = reached
    ids = torch.arange(4)[None]
    name = type(model).__name__
    try:
        own_class(model).forward(copy, input_ids=ids, labels=ids, num_items_in_batch=3)  # type: ignore[attr-defined]
        raise Left(f"{name}.forward does not call its loss_function")
    except _Reached as found:
        given = found.args[0]
    except Left:
        raise
    except Exception as error:  # code that nobody here has seen
        text = str(error).partition("\n")[0]
        raise Left(f"{name}.forward, tried with a stub, raises {type(error).__name__}: {text}") from error
    logits = given.get("logits")
    if len(head.results) != 1 or logits is None or not torch.equal(logits.float(), head.results[0]):
        raise Left(f"{name}.forward changes the logits between its head and its loss (a cap, a scale)")
    if given.get("num_items_in_batch") != 3 or not torch.equal(given.get("labels", ids + 1), ids):
        raise Left(f"{name}.forward changes the labels, or drops num_items_in_batch")
