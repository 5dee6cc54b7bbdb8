"""What heads of tokens share: the matrix products of one chunk of rows after the other. And what
linear_cross_entropy and its sharded form do: when the gradients that forward makes are those that backward
returns."""

import math

import torch

from .._table import NONE
from .autograd import once_differentiable
from .registry import overloads
from .tensors import statistic

# Gradients are rescaled as so many rows, which the threads of a CPU share.
_RESCALED_ROWS = 2048


# ---- The products ----


def widened(a, b, dtype):
    """The operands and options with which torch.mm and torch.addmm have a result of this dtype."""
    if a.dtype == dtype:
        return (a, b), {}
    if a.is_cuda:  # torch's products with a wider result are for GPUs
        return (a, b), {"out_dtype": dtype}
    return (a.to(dtype), b.to(dtype)), {}


class Sum:
    """The sum over chunks of products a.T @ b, or of the rows of a."""

    def __init__(self, like, wide):
        self.like, self.sum = like, None
        self.dtype = statistic(like.dtype) if wide else like.dtype

    def add_product(self, a, b):
        operands, how = widened(a.t(), b, self.dtype)
        if self.sum is None:
            self.sum = torch.mm(*operands, **how)
        else:
            torch.addmm(self.sum, *operands, **how, out=self.sum)

    def add_rows(self, a):
        self.sum = self._zeros().add_(a.sum(0, dtype=self.dtype))

    def _zeros(self):
        if self.sum is None:
            self.sum = torch.zeros_like(self.like, dtype=self.dtype, memory_format=torch.contiguous_format)
        return self.sum

    def result(self):
        return self._zeros().to(self.like.dtype)


def new_gradient(like, need):
    """A gradient without values. One that is not needed has no elements."""
    return torch.empty_like(like, memory_format=torch.contiguous_format) if need else like.new_empty(0)


def product(out, x, weight, bias):
    """x @ weight.T + bias, in out."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def chunks_of(x, weight, bias, held):
    """The rows of each chunk, as a slice, and their logits, in held, which has those of one chunk or of all
    rows. Without rows there is one chunk."""
    rows = x.shape[0]
    for first in range(0, max(rows, 1), len(held) or 1):
        part = slice(first, min(first + len(held), rows))
        yield part, product(held[: part.stop - first], x[part], weight, bias)


class Products:
    """The logits x @ weight.T + bias of chunks of rows, in one buffer, and from their gradients dx, dw and
    db. Those that are not needed have no elements.

    x: (M, K). weight: (V, K). wide: dw is accumulated in float32.
    """

    def __init__(self, x, weight, bias, needs, chunk, wide):
        self.x, self.weight, self.bias, self.chunk = x, weight, bias, chunk
        self.needs_dx, self.needs_dw, self.needs_db = needs
        self.dx = new_gradient(x, self.needs_dx)
        # In a single chunk nothing is accumulated.
        self.dw = Sum(weight, wide and chunk < x.shape[0])
        self.db = None if bias is None else Sum(bias, True)

    def chunks(self):
        """The rows of each chunk, as a slice, and their logits, which the next chunk overwrites. Without rows
        there is none."""
        rows = self.x.shape[0]
        held = self.x.new_empty(min(self.chunk, rows), self.weight.shape[0])
        return chunks_of(self.x, self.weight, self.bias, held) if rows else ()

    def add(self, part, dlogits):
        """Adds what the gradient of a chunk's logits contributes."""
        if self.needs_dx:
            torch.mm(dlogits, self.weight, out=self.dx[part])
        if self.needs_dw:
            self.dw.add_product(dlogits, self.x[part])
        if self.needs_db:
            self.db.add_rows(dlogits)

    def gradients(self):
        dw = self.dw.result() if self.needs_dw else self.x.new_empty(0)
        return self.dx, dw, self.db.result() if self.needs_db else self.x.new_empty(0)


def weights_of_rows(target, weight_ce, classes, ignore_index, dtype):
    """The class weight of each row's target, 0 of an ignored row, NaN if a target is not a class."""
    inside = (target >= 0) & (target < classes)
    each = torch.where(inside, 1.0, float("nan")).to(statistic(dtype))
    if weight_ce is not None:
        each *= weight_ce[target.clamp(0, classes - 1).long()]
    # An int32 could be equal to the low bits alone.
    return each.masked_fill_(target.long() == ignore_index, 0)


# ---- What forward makes, and backward returns ----


def to_make(x, upstream, reduction, needs, compiling=False):
    """Which of dx, dw and db forward makes: those that are needed, or none.

    Gradients of float16 would underflow without the factor of a GradScaler. A graph cannot choose to make
    them again.
    """
    later = reduction == NONE or (x.dtype == torch.float16 and (upstream is None or compiling))
    return [bool(need) and not later for need in needs]


def rescale(gradients, dloss, upstream):
    """Multiplies gradients that were made for another upstream gradient. Reads nothing if it was this one."""
    with torch._C._AutoDispatchBelowADInplaceOrView():  # a later backward pass does not read them
        for gradient in gradients:
            if gradient.numel():
                rows = gradient.view(math.gcd(gradient.numel(), _RESCALED_ROWS), -1)
                overloads["rescale_"](rows, dloss, upstream)


def is_same(dloss, expected):
    """Whether two numbers are the same. Waits for the device, but not while a graph is captured."""
    if dloss.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(dloss == expected)


def once(gradients, needs, inputs, dloss):
    """The needed ones of these gradients of x, weight and bias, which refuse second derivatives."""
    sources = [tensor for tensor in inputs if tensor is not None]
    return [
        once_differentiable(gradient, *sources, dloss) if need else None
        for gradient, need in zip(gradients, needs, strict=True)
    ]
