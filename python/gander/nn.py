"""Drop-ins for torch.nn's RMSNorm, CrossEntropyLoss and Softmax: same constructors, state_dict and repr."""

import torch
from torch import nn

from ._ops import cross_entropy, rmsnorm, softmax

__all__ = ["CrossEntropyLoss", "RMSNorm", "Softmax"]


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm(normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None).

    Normalizes over the last len(normalized_shape) dimensions. eps=None is what torch makes of it: the machine epsilon
    of the dtype it computes in, float32 for 16-bit x (its page says x's dtype). The result has x's dtype. See
    gander.rmsnorm.
    """

    def forward(self, x):
        dims = len(self.normalized_shape)
        if tuple(x.shape[x.ndim - dims :]) != self.normalized_shape:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected last dimensions {self.normalized_shape}: normalized_shape"
            )
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        if dims == 1:
            return rmsnorm(x, self.weight, eps=eps)
        weight = None if self.weight is None else self.weight.flatten()
        return rmsnorm(x.flatten(x.ndim - dims), weight, eps=eps).view(x.shape)


class Softmax(nn.Softmax):
    """torch.nn.Softmax(dim=None). See gander.softmax; a dimension that is not the last one is moved there and back."""

    def forward(self, x):
        dim = self.dim
        if dim is None:  # torch's rule from before dim was asked for
            dim = 0 if x.ndim in (0, 1, 3) else 1
        if x.ndim == 0:
            return softmax(x.view(1)).view(())
        if dim in (-1, x.ndim - 1):
            return softmax(x)
        return softmax(x.movedim(dim, -1)).movedim(-1, dim)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss(weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0).

    input: (C), (N, C) or (N, C, d1, ...); target: class indices, input's shape without C. The loss is float32 (float64
    for float64). See gander.cross_entropy. Label smoothing and class probabilities raise NotImplementedError.
    """

    def forward(self, input, target):
        if self.label_smoothing:
            raise NotImplementedError("label_smoothing is not supported yet; use torch.nn.CrossEntropyLoss")
        if target.is_floating_point():
            raise NotImplementedError("class probabilities in target are not supported; use torch.nn.CrossEntropyLoss")
        if input.ndim > 2:
            input = input.movedim(1, -1)
        return cross_entropy(
            input, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction
        )
