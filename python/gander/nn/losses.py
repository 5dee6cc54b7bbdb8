"""CrossEntropyLoss and LinearCrossEntropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._functions.arguments import FAILURES
from .._functions.cross_entropy import OUTPUTS, LossOutput, cross_entropy
from .._functions.linear_cross_entropy import check_chunks, linear_cross_entropy
from .._functions.named_tuples import check_outputs
from .._table import REDUCTIONS
from .._torch import expected_gradient
from .._torch.cross_entropy import takes_one_pass
from .._torch.eager import is_eager
from .._torch.kernels import explained
from .._torch.tensors import stands_for_tensor
from .._words import check_flags, shown
from . import functional
from .checks import (
    NAMES,
    check_factory,
    check_loss,
    check_loss_options,
    check_nested,
    check_size,
    check_weight,
    scriptable,
)

# The options that torch's module does not have, and where they change nothing.
NEUTRAL: dict[str, Any] = {"z_loss": 0.0, "scale": 1.0, "softcap": None, "temperature": 1.0, "outputs": None}


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss. See gander.cross_entropy.

    forward takes input, (C), (N, C) or (N, C, d1, ...), target: class indices, with the shape of input
    without C, or class probabilities, with the shape of input, and divisor and upstream as
    gander.cross_entropy. It returns the loss, float32 (float64 for float64), or with outputs a named tuple.

    Args:
        weight: (C) class weights, or None.
        size_average: torch's deprecated option.
        ignore_index: The target of elements that are ignored.
        reduce: torch's deprecated option.
        reduction: "mean", "sum" or "none".
        label_smoothing: As in gander.cross_entropy.
        z_loss: As there.
        scale: As there.
        softcap: As there.
        temperature: As there.
        remember: Without upstream, the gradient of the loss that backward brought last is expected again: a
            GradScaler's scale, a fourth for four accumulation steps. After two that changed in a row the
            gradient is made in backward, until one stays. What is infinite or NaN is not remembered. The last
            three are in an int32 tensor of the module's for each device: not in the state_dict, not copied or
            pickled with the module, and not seen by DDP. Nothing synchronizes, and no gradient depends on it.
            It matters for logits that take the single pass, outside torch.compile: see one_pass. A captured
            CUDA graph uses the tensor that a call before it has made: keep the module as long as the graph.
        outputs: As in gander.cross_entropy. remember does not apply.

    Raises:
        TypeError, ValueError, NotImplementedError: An argument that gander does not support; in forward also
            as gander.cross_entropy.

    Examples:
        >>> gander.nn.CrossEntropyLoss()(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
        tensor(1.3863)
    """

    remember, outputs = False, None
    z_loss, scale, softcap, temperature = 0.0, 1.0, None, 1.0  # of modules that were pickled without them

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        remember: bool = False,
        outputs: Sequence[LossOutput] | None = None,
    ) -> None:
        check_weight(weight)
        check_loss(reduction, ignore_index)
        check_flags(remember=remember)
        for name, value in ("size_average", size_average), ("reduce", reduce):
            if value is not None:
                check_flags(**{name: value})
        check_loss_options(
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            scale=scale,
            softcap=softcap,
            temperature=temperature,
        )
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.scale, self.softcap, self.temperature = z_loss, scale, softcap, temperature
        self.remember = remember
        self.outputs = None if outputs is None else check_outputs(outputs, OUTPUTS, "None or ")
        self._memories: dict[torch.device, Tensor] = {}

    def __prepare_scriptable__(self) -> nn.Module:
        for name, default in NEUTRAL.items():
            if (value := getattr(self, name)) != default:
                raise NotImplementedError(
                    f"{name} is {shown(value)}, expected {default}: torch.jit.script compiles torch's module "
                    "in place of this one, and that has no such option; use torch.compile or torch.export"
                )
        return scriptable(self, CrossEntropyLoss, nn.CrossEntropyLoss)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        divisor: float | Tensor | None = None,
        upstream: float | Tensor | None = None,
    ) -> Tensor:
        if not isinstance(input, Tensor) and stands_for_tensor(input):
            return self._of_stand_in(input, target, divisor, upstream)
        try:
            check_nested("input", input)
            check_nested("target", target)
            rows = input.movedim(1, -1) if input.ndim > 2 else input
            soft = isinstance(target, Tensor) and target.is_floating_point()  # class probabilities
            if soft and target.ndim > 2:
                target = target.movedim(1, -1)
            remembers = self.remember and upstream is None and self.outputs is None and not soft
            memory = self._memory_for(rows) if remembers else None
            loss: Tensor = cross_entropy(
                rows,
                target,
                weight=self.weight,
                ignore_index=self.ignore_index,
                reduction=self.reduction,  # type: ignore[arg-type]
                divisor=divisor,
                **self._options(),
                one_pass=None if memory is None else True,
                upstream=upstream if memory is None else expected_gradient.expected(memory),
            )
        except FAILURES as error:
            raise explained(error, NAMES, input=input) from None
        if memory is not None:
            expected_gradient.watch(loss, memory)
        return loss

    def _of_stand_in(self, input: Any, target: Any, divisor: Any, upstream: Any) -> Any:
        """The loss of what stands for a tensor: a torch.fx.Proxy. Its rank and the dtype of target are not
        known."""
        options: Any = {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            **self._options(),
        }  # torch's four, and others
        if divisor is None and upstream is None and len(options) == 4:
            return functional.cross_entropy(input, target, **options)
        # The classes are dimension 0 of (C), and dimension 1 of any other rank.
        rows = input.movedim(1 - 1 // input.ndim, -1)
        return cross_entropy(rows, target, divisor=divisor, upstream=upstream, **options)

    def _options(self) -> Any:
        """The options of cross_entropy, without those that are neutral but for torch's."""
        options: Any = {"label_smoothing": self.label_smoothing}
        for name, default in NEUTRAL.items():
            if (value := getattr(self, name)) != default:
                options[name] = value
        return options

    def _memory_for(self, x: Tensor) -> Tensor | None:
        """The last upstream gradients, if the gradient of x will be made for one of them."""
        if (
            not (x.requires_grad and torch.is_grad_enabled() and is_eager(x))
            or torch.is_inference_mode_enabled()
        ):
            return None
        if torch.jit.is_tracing() or not takes_one_pass(x, REDUCTIONS.index(self.reduction)):
            return None
        memory = self._memories.get(x.device)
        if memory is None and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            memory = self._memories.setdefault(x.device, expected_gradient.new(x.device))
        return memory

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_memories": {}}

    def extra_repr(self) -> str:
        options = {k: v for k, v in self._options().items() if v}
        if self.remember:
            options["remember"] = True
        return ", ".join(f"{name}={value}" for name, value in options.items())


class LinearCrossEntropy(nn.Linear):
    """The last layer of a model and its loss, without the logits of all rows: gander.linear_cross_entropy.

    A torch.nn.Linear of out_features classes, with its state_dict, whose forward takes input, target, divisor
    and upstream, and returns the loss, or what outputs names. So it can take the place of a model's head,
    share an embedding's weight, and be sharded by FSDP, or by classes: see gander.linear_cross_entropy.

    Args:
        in_features: The size of the last dimension of input.
        out_features: The number of classes.
        bias: Whether there is one.
        device: Where weight and bias are.
        dtype: Theirs.
        weight_ce: (out_features), class weights, or None. They are in the state_dict too.
        ignore_index: As in gander.linear_cross_entropy.
        reduction: As there.
        chunk: As there.
        accumulate: As there.
        label_smoothing: As there.
        z_loss: As there.
        scale: As there.
        softcap: As there.
        temperature: As there.
        outputs: As there: forward returns a named tuple.

    Raises:
        TypeError, ValueError: An argument that is not supported; in forward also as
            gander.linear_cross_entropy.

    Examples:
        >>> loss = gander.nn.LinearCrossEntropy(3, 4)(torch.zeros(2, 3), torch.tensor([0, 3]))
        >>> loss.detach()
        tensor(1.3863)
    """

    weight_ce: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_ce: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | None = None,
        accumulate: str | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        outputs: Sequence[LossOutput] | None = None,
    ) -> None:
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_factory(device, dtype, bias=bias)
        super().__init__(in_features, out_features, bias, device, dtype)
        check_weight(weight_ce, "weight_ce")
        check_loss(reduction, ignore_index)
        check_chunks(chunk, accumulate)
        check_loss_options(
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            scale=scale,
            softcap=softcap,
            temperature=temperature,
        )
        self.register_buffer("weight_ce", weight_ce)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.chunk, self.accumulate = chunk, accumulate
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.scale, self.softcap, self.temperature = scale, softcap, temperature
        self.outputs = None if outputs is None else check_outputs(outputs, OUTPUTS, "None or ")

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor,
        divisor: float | Tensor | None = None,
        upstream: float | Tensor | None = None,
    ) -> Any:
        try:
            return linear_cross_entropy(
                input,
                self.weight,
                target,
                self.bias,
                self.weight_ce,
                self.ignore_index,
                self.reduction,  # type: ignore[arg-type]
                divisor,
                upstream,
                self.chunk,
                accumulate=self.accumulate,  # type: ignore[arg-type]
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
                scale=self.scale,
                softcap=self.softcap,
                temperature=self.temperature,
                outputs=self.outputs,
            )
        except FAILURES as error:
            raise explained(error, NAMES, input=input) from None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
