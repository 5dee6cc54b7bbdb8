"""Which calls and backward passes are eager, and may write over what forward has read."""

import sys
from itertools import pairwise

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import fast


def _in_compiled_autograd():
    """Whether compiled autograd runs the backward pass. It unpacks all that is saved before any node runs, so
    that none would notice what another writes over."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


def is_eager(x):
    return (
        type(x) in (Tensor, Parameter)
        and not is_compiling()
        and not _in_compiled_autograd()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def is_batched(dloss):
    """Whether dloss is batched (vmap, is_grads_batched). Then one tensor does not hold all gradients."""
    return torch._C._functorch.is_batchedtensor(dloss) or torch._C._functorch.is_legacy_batchedtensor(dloss)


def is_traced(dloss):
    """Whether a backward pass is recorded: by compiled autograd, make_fx or another mode. Or dloss is of a
    subclass. Then nothing may be written over what was saved."""
    return is_compiling() or not (is_batched(dloss) or is_eager(dloss))


def is_plain(upstream):
    """Whether an upstream gradient is neither traced nor batched. Then one tensor holds the gradients that
    backward computes from it, and backward may write them over what was saved."""
    return is_eager(upstream) and not is_batched(upstream)


def may_write(x):
    """Whether backward may write over x. Autograd has to notice that a saved tensor is overwritten, which it
    does not where hooks pack and unpack it. And no elements may share memory, as an expanded x's do."""
    return fast.saved_tensors_hooks() is None and 0 not in x.stride()


def is_of_leaf(x):
    """Whether x is a leaf of autograd's graph, or a view of one."""
    return (x if x._base is None else x._base).is_leaf


def are_apart(tensors):
    """Whether the addresses of no two of these tensors overlap. The halves of a tensor's rows alternate."""
    spans = []
    for x in tensors:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))
    spans.sort()
    return all(end <= start for (_, end), (start, _) in pairwise(spans))
