"""The gradients of a loss that its last backward passes brought, on the device: what the next is expected to
bring. Whatever bits are there, they change how long a loss takes, never its gradient.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .eager import is_batched

_KEPT = 3  # enough to see two changes in a row


def new(device: torch.device) -> Tensor:
    """The bits of the last upstream gradients, the newest first: int32 (3). Those before the first are 1."""
    return torch.ones(_KEPT, dtype=torch.float32, device=device).view(torch.int32)


def expected(memory: Tensor) -> Tensor:
    """The newest, a 0-dim float32 tensor. NaN, for which forward makes no gradient, if each of the last two
    was another than the one before."""
    stayed = (memory[1:] == memory[:-1]).any()
    return torch.where(stayed, memory.view(torch.float32)[0], math.nan)


def watch(loss: Tensor, memory: Tensor) -> None:
    """Lets backward passes of a loss, a float32 scalar, write into the memory."""
    if loss.requires_grad:
        hook = partial(_learn, memory)
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save would print it
        loss.register_hook(hook)


def _learn(memory: Tensor, dloss: Tensor | None) -> None:
    """Adds an upstream gradient, unless it is infinite or NaN, as a GradScaler's overflow is."""
    if dloss is None or is_compiling():
        return
    if torch._C._are_functorch_transforms_active() or is_batched(dloss):  # not one number
        return
    newest = dloss.detach().view(1)
    with torch.no_grad():
        shifted = torch.cat((newest.view(torch.int32), memory[:-1]))
        torch.where(newest.abs() < math.inf, shifted, memory, out=memory)
