"""Replacements for torch.nn's RMSNorm, LayerNorm, CrossEntropyLoss, Softmax and LogSoftmax: same
constructors, state_dict and repr. LinearCrossEntropy is a Linear layer together with its loss.

A constructor refuses arguments that gander does not support. gander.nn.functional has the functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._functions.arguments import FAILURES
from .._torch.kernels import explained
from .._torch.tensors import stands_for_tensor
from .._words import integer
from . import functional
from .checks import NAMES, check_eps, check_factory, check_nested, check_rows, check_shape, scriptable
from .losses import CrossEntropyLoss, LinearCrossEntropy

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

for _module in CrossEntropyLoss, LinearCrossEntropy:  # a pickle must survive a move
    _module.__module__ = __name__


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm: normalizes over the last len(normalized_shape) dimensions. See gander.rmsnorm.

    Args:
        normalized_shape: The sizes of these dimensions.
        eps: Added to the mean of squares. None means the same as in torch: the machine epsilon of the dtype
            that torch computes in, which for 16-bit x is float32 (torch's documentation says x's dtype).
        elementwise_affine: Whether there is a weight.
        device: Where the weight is.
        dtype: The weight's.

    Raises:
        TypeError, ValueError: An argument that gander does not support; in forward also as gander.rmsnorm.

    Examples:
        >>> gander.nn.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | tuple[int, ...] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_shape(normalized_shape)
        if eps is not None:
            check_eps(eps, "None or ")
        check_factory(device, dtype, elementwise_affine=elementwise_affine)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, RMSNorm, nn.RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) and stands_for_tensor(x):
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        try:
            check_rows("x", x, self.normalized_shape)
            return functional._rms_norm_over(x, len(self.normalized_shape), self.weight, self.eps)
        except FAILURES as error:
            raise explained(error, x=x) from None


class QuackRMSNorm(RMSNorm):
    """QuACK's module: RMSNorm over the last dimension, with eps=1e-6 by default.

    Args:
        dim: The size of the last dimension.
        eps: As in RMSNorm.
        elementwise_affine: As in RMSNorm.
        device: As in RMSNorm.
        dtype: As in RMSNorm.

    Raises:
        TypeError, ValueError: As RMSNorm.

    Examples:
        >>> gander.nn.QuackRMSNorm(2).eps
        1e-06
    """

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
    """torch.nn.LayerNorm: normalizes over the last len(normalized_shape) dimensions. See gander.layernorm.

    The result has the dtype of input, and is float32 under CUDA autocast.

    Args:
        normalized_shape: The sizes of these dimensions.
        eps: Added to the variance.
        elementwise_affine: Whether there is a weight.
        bias: Whether there is a bias too.
        device: Where they are.
        dtype: Theirs.

    Raises:
        TypeError, ValueError: An argument that gander does not support; in forward also as gander.layernorm.

    Examples:
        >>> gander.nn.LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]])).detach()
        tensor([[-1.,  1.]])
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
        check_shape(normalized_shape)
        check_eps(eps)
        check_factory(device, dtype, elementwise_affine=elementwise_affine, bias=bias)
        affine = elementwise_affine, bias
        super().__init__(normalized_shape, eps, *affine, device, dtype)  # type: ignore[arg-type]

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, LayerNorm, nn.LayerNorm)

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor) and stands_for_tensor(input):
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        dims = len(self.normalized_shape)
        try:
            check_rows("input", input, self.normalized_shape)
            return functional._layer_norm_over(input, dims, self.weight, self.bias, self.eps)
        except FAILURES as error:
            raise explained(error, NAMES, input=input) from None


def _check_dim(dim: Any) -> None:
    if dim is not None:
        integer("dim", dim, "an int or None")


def _softmax(input: Tensor, dim: int | None, log: bool = False) -> Tensor:
    function = functional.log_softmax if log else functional.softmax
    if not isinstance(input, Tensor) and stands_for_tensor(input):
        return function(input, dim)
    try:
        check_nested("input", input)
        if dim is None:  # torch's deprecated default
            dim = 0 if input.ndim in (0, 1, 3) else 1
        if isinstance(input, Tensor) and not torch.compiler.is_compiling() and input.numel() == 0:
            return function(input, dim)
        return functional._softmax_over(input, dim, log)
    except FAILURES as error:
        raise explained(error, NAMES, input=input) from None


class Softmax(nn.Softmax):
    """torch.nn.Softmax. See gander.softmax.

    Args:
        dim: The dimension. One other than the last is moved to the end and back, which copies. None is
            torch's deprecated default.

    Raises:
        TypeError: dim; in forward also as gander.softmax.

    Examples:
        >>> gander.nn.Softmax(-1)(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """

    def __init__(self, dim: int | None = None) -> None:
        _check_dim(dim)
        super().__init__(dim)

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, Softmax, nn.Softmax)

    def forward(self, input: Tensor) -> Tensor:
        return _softmax(input, self.dim)


class LogSoftmax(nn.LogSoftmax):
    """torch.nn.LogSoftmax. See gander.log_softmax.

    Args:
        dim: As in Softmax.

    Raises:
        TypeError: dim; in forward also as gander.log_softmax.

    Examples:
        >>> gander.nn.LogSoftmax(-1)(torch.zeros(1, 2))
        tensor([[-0.6931, -0.6931]])
    """

    def __init__(self, dim: int | None = None) -> None:
        _check_dim(dim)
        super().__init__(dim)

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self, LogSoftmax, nn.LogSoftmax)

    def forward(self, input: Tensor) -> Tensor:
        return _softmax(input, self.dim, log=True)
