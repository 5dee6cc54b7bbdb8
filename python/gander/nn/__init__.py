"""Replacements for torch.nn's RMSNorm, LayerNorm, CrossEntropyLoss, Softmax and LogSoftmax: same
constructors, state_dict and repr. LinearCrossEntropy is a Linear layer together with its loss.

A constructor refuses arguments that gander does not support. gander.nn.functional has the functions.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .._functions.arguments import FAILURES, code_of
from .._functions.cross_entropy import check_chunks, cross_entropy, linear_cross_entropy
from .._table import REDUCTIONS
from .._torch import expected_gradient
from .._torch.cross_entropy import is_eager, takes_one_pass
from .._torch.kernels import explained
from .._torch.tensors import DTYPES, dtype_of, nested, stands_for_tensor, unusable
from .._words import check_flags, integer, kind, number, shortened, shown
from . import functional

__all__ = [
    "CrossEntropyLoss",
    "LayerNorm",
    "LinearCrossEntropy",
    "LogSoftmax",
    "QuackRMSNorm",
    "RMSNorm",
    "Softmax",
    "functional",
]

_NAMES = {"x": "input"}  # what callers of modules call an argument of functions


def _check_weight(weight: Any, name: str = "weight") -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} is {kind(weight)}, expected a torch.Tensor or None")
    if refusal := unusable(name, weight):
        raise refusal
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype_of(weight)}, expected float16, bfloat16, float32 or float64; convert it"
        )


def _check_factory(device: Any, dtype: Any, **flags: Any) -> None:
    """Refuses arguments with which torch's constructors would make no parameter."""
    check_flags(**flags)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else shown(dtype)
        raise TypeError(
            f"dtype is {name}, expected torch.float16, torch.bfloat16, torch.float32 or torch.float64"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise type(error)(
            f"device is {shown(device)}, expected a device that torch has here: {shortened(error)}"
        ) from None


def _check_shape(shape: Any) -> None:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    expected = "one or more integers of 1 or more"
    if not sizes or not all(
        isinstance(size, Integral) and not isinstance(size, bool) and 1 <= size < 2**63 for size in sizes
    ):
        raise ValueError(f"normalized_shape is {shown(shape)}, expected {expected}")


def _check_eps(eps: Any, or_none: str = "") -> None:
    if not 0 <= number("eps", eps, or_none) < math.inf:
        raise ValueError(f"eps is {eps}, expected {or_none}a finite number of 0 or more")


def _check_loss(reduction: Any, ignore_index: Any) -> None:
    code_of("reduction", reduction, REDUCTIONS)
    integer("ignore_index", ignore_index)


def _check_size(name: str, size: Any) -> None:
    if integer(name, size) < 0:
        raise ValueError(f"{name} is {size}, expected 0 or more")


def _check_nested(name: str, x: Any) -> None:
    if isinstance(x, Tensor) and x.is_nested:  # whose shape cannot be asked for
        raise nested(name)


def _check_rows(name: str, x: Any, shape: tuple[int, ...]) -> None:
    _check_nested(name, x)
    if tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected last dimensions {shape}: normalized_shape"
        )


_OURS = ("remember", "_memories")  # attributes that torch's modules do not have


def _scriptable(module: nn.Module, ours: type[nn.Module], theirs: type[nn.Module]) -> nn.Module:
    """What torch.jit.script compiles in place of a module of ours: torch's own, which shares its parameters,
    buffers and hooks. A subclass with a forward of its own stays what it is."""
    if type(module).forward is not ours.forward:
        return module
    twin = theirs.__new__(theirs)
    twin.__dict__.update((name, value) for name, value in vars(module).items() if name not in _OURS)
    return twin


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm(normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None).

    Normalizes over the last len(normalized_shape) dimensions. eps=None means the same as in torch: the
    machine epsilon of the dtype that torch computes in, which for 16-bit x is float32 (torch's documentation
    says x's dtype). The result has x's dtype. See gander.rmsnorm.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | tuple[int, ...] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_shape(normalized_shape)
        if eps is not None:
            _check_eps(eps, "None or ")
        _check_factory(device, dtype, elementwise_affine=elementwise_affine)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]

    def __prepare_scriptable__(self) -> nn.Module:
        return _scriptable(self, RMSNorm, nn.RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) and stands_for_tensor(x):
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        try:
            _check_rows("x", x, self.normalized_shape)
            return functional._rms_norm_over(x, len(self.normalized_shape), self.weight, self.eps)
        except FAILURES as error:
            raise explained(error, x=x) from None


class QuackRMSNorm(RMSNorm):
    """QuACK's module: RMSNorm over the last dimension, of size dim, with eps=1e-6 by default."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if integer("dim", dim, "an integer of 1 or more") < 1:
            raise ValueError(f"dim is {dim}, expected an integer of 1 or more")
        super().__init__(dim, eps, elementwise_affine, device, dtype)


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm(normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None,
    dtype=None).

    Normalizes over the last len(normalized_shape) dimensions. The result has x's dtype, and is float32 under
    CUDA autocast. See gander.layernorm.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | tuple[int, ...] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_shape(normalized_shape)
        _check_eps(eps)
        _check_factory(device, dtype, elementwise_affine=elementwise_affine, bias=bias)
        affine = elementwise_affine, bias
        super().__init__(normalized_shape, eps, *affine, device, dtype)  # type: ignore[arg-type]

    def __prepare_scriptable__(self) -> nn.Module:
        return _scriptable(self, LayerNorm, nn.LayerNorm)

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor) and stands_for_tensor(input):
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        dims = len(self.normalized_shape)
        try:
            _check_rows("input", input, self.normalized_shape)
            return functional._layer_norm_over(input, dims, self.weight, self.bias, self.eps)
        except FAILURES as error:
            raise explained(error, _NAMES, input=input) from None


def _check_dim(dim: Any) -> None:
    if dim is not None:
        integer("dim", dim, "an int or None")


def _dim_of(input: Tensor, dim: int | None) -> int:
    """dim, or torch's deprecated default."""
    if dim is None:
        return 0 if input.ndim in (0, 1, 3) else 1
    return dim


def _softmax(input: Tensor, dim: int | None, log: bool = False) -> Tensor:
    if not isinstance(input, Tensor) and stands_for_tensor(input):
        return functional.log_softmax(input, dim) if log else functional.softmax(input, dim)
    try:
        _check_nested("input", input)
        dim = _dim_of(input, dim)
        if isinstance(input, Tensor) and not torch.compiler.is_compiling() and input.numel() == 0:
            return functional.log_softmax(input, dim) if log else functional.softmax(input, dim)
        return functional._softmax_over(input, dim, log)
    except FAILURES as error:
        raise explained(error, _NAMES, input=input) from None


class Softmax(nn.Softmax):
    """torch.nn.Softmax(dim=None). See gander.softmax.

    A dimension other than the last is moved to the end and back, which copies.
    """

    def __init__(self, dim: int | None = None) -> None:
        _check_dim(dim)
        super().__init__(dim)

    def __prepare_scriptable__(self) -> nn.Module:
        return _scriptable(self, Softmax, nn.Softmax)

    def forward(self, input: Tensor) -> Tensor:
        return _softmax(input, self.dim)


class LogSoftmax(nn.LogSoftmax):
    """torch.nn.LogSoftmax(dim=None). See gander.log_softmax.

    A dimension other than the last is moved to the end and back, which copies.
    """

    def __init__(self, dim: int | None = None) -> None:
        _check_dim(dim)
        super().__init__(dim)

    def __prepare_scriptable__(self) -> nn.Module:
        return _scriptable(self, LogSoftmax, nn.LogSoftmax)

    def forward(self, input: Tensor) -> Tensor:
        return _softmax(input, self.dim, log=True)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss(weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0), and remember=False.

    input: (C), (N, C) or (N, C, d1, ...). target: class indices, with the shape of input without C. The loss
    is float32 (float64 for float64). Label smoothing and class probabilities raise NotImplementedError.
    forward also takes divisor and upstream. See gander.cross_entropy.
    remember: without upstream, the gradient of the loss that backward brought last is expected again: a
    GradScaler's scale, a fourth for four accumulation steps. After two that changed in a row the gradient is
    made in backward, until one stays. What is infinite or NaN is not remembered. The last three are in an
    int32 tensor of the module's for each device: not in the state_dict, not copied or pickled with the
    module, and not seen by DDP. Nothing synchronizes, and no gradient depends on it. It matters for logits
    that take the single pass, outside torch.compile: see one_pass. A captured CUDA graph uses the tensor that
    a call before it has made: keep the module as long as the graph.
    """

    remember = False

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        remember: bool = False,
    ) -> None:
        _check_weight(weight)
        _check_loss(reduction, ignore_index)
        check_flags(remember=remember)
        for name, value in ("size_average", size_average), ("reduce", reduce):
            if value is not None:
                check_flags(**{name: value})
        number("label_smoothing", label_smoothing)
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.remember = remember
        self._memories: dict[torch.device, Tensor] = {}
        self._check_label_smoothing()

    def _check_label_smoothing(self) -> None:
        if self.label_smoothing:
            raise NotImplementedError(
                f"label_smoothing is {shown(self.label_smoothing)}, expected 0: label_smoothing is not "
                "supported; use torch.nn.CrossEntropyLoss"
            )

    def __prepare_scriptable__(self) -> nn.Module:
        return _scriptable(self, CrossEntropyLoss, nn.CrossEntropyLoss)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        divisor: float | Tensor | None = None,
        upstream: float | Tensor | None = None,
    ) -> Tensor:
        self._check_label_smoothing()  # the attribute may have been set after construction
        if isinstance(target, Tensor) and target.is_floating_point():
            raise NotImplementedError(
                f"target has dtype {dtype_of(target)}, expected class indices: class probabilities in target "
                "are not supported; use torch.nn.CrossEntropyLoss"
            )
        if not isinstance(input, Tensor) and stands_for_tensor(input):
            return self._of_stand_in(input, target, divisor, upstream)
        try:
            _check_nested("input", input)
            rows = input.movedim(1, -1) if input.ndim > 2 else input
            memory = self._memory_for(rows) if self.remember and upstream is None else None
            loss: Tensor = cross_entropy(
                rows,
                target,
                weight=self.weight,
                ignore_index=self.ignore_index,
                reduction=self.reduction,  # type: ignore[arg-type]
                divisor=divisor,
                one_pass=None if memory is None else True,
                upstream=upstream if memory is None else expected_gradient.expected(memory),
            )
        except FAILURES as error:
            raise explained(error, _NAMES, input=input) from None
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
        }
        if divisor is None and upstream is None:
            return functional.cross_entropy(input, target, **options)
        # The classes are dimension 0 of (C), and dimension 1 of any other rank.
        rows = input.movedim(1 - 1 // input.ndim, -1)
        return cross_entropy(rows, target, divisor=divisor, upstream=upstream, **options)

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
        return "remember=True" if self.remember else ""


class LinearCrossEntropy(nn.Linear):
    """The last layer of a model and its loss, without the logits of all rows: gander.linear_cross_entropy.

    A torch.nn.Linear of out_features classes, with its state_dict, whose forward takes targets and returns
    the loss. So it can take the place of a model's head, share an embedding's weight, and be sharded by FSDP.
    weight_ce: (out_features), class weights, or None. They are in the state_dict too.
    ignore_index, reduction, chunk, accumulate: as in gander.linear_cross_entropy.
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
    ) -> None:
        _check_size("in_features", in_features)
        _check_size("out_features", out_features)
        _check_factory(device, dtype, bias=bias)
        super().__init__(in_features, out_features, bias, device, dtype)
        _check_weight(weight_ce, "weight_ce")
        _check_loss(reduction, ignore_index)
        check_chunks(chunk, accumulate)
        self.register_buffer("weight_ce", weight_ce)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.chunk, self.accumulate = chunk, accumulate

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor,
        divisor: float | Tensor | None = None,
        upstream: float | Tensor | None = None,
    ) -> Tensor:
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
            )
        except FAILURES as error:
            raise explained(error, _NAMES, input=input) from None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
