"""Softmax and log-softmax with options: gander's operators against float64. The bound is the error of torch's
operators on float32 copies."""

import math
from typing import NamedTuple

import torch
from grid import Inputs, aligned
from tolerance import assert_accurate

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
B, H = 2, 3


class Case(NamedTuple):
    """What softmax is given for x of shape (B, H, Q, N)."""

    log: bool = False
    scale: float = 1.0
    mask: str = ""  # its shape in letters: "1QN", "1N", and so on
    kind: object = torch.bool  # of the mask; None is x's dtype
    causal: bool = False
    out: object = None  # the dtype of y
    masked_zero: bool = False


CASES = {
    "scale": Case(scale=0.3),
    "log": Case(log=True),
    "wide": Case(out=F32),
    "log-wide": Case(log=True, out=F32, scale=0.5),
    "bool": Case(mask="B1QN", scale=0.5),
    "log-bool": Case(mask="B1QN", log=True, masked_zero=True),
    "keys": Case(mask="B11N", kind=torch.uint8),
    "queries": Case(mask="Q1"),
    "added": Case(mask="HQN", kind=None, masked_zero=True),
    "added-float16": Case(mask="B1QN", kind=F16, log=True),
    "added-bfloat16": Case(mask="QN", kind=BF16),
    "added-float32": Case(mask="BHQN", kind=F32, scale=0.5),
    "causal": Case(causal=True),
    "log-causal-mask": Case(causal=True, mask="B11N", log=True),
}
# Row lengths in 16-byte vectors: at and between the limits of the kernels' tiles.
VECTORS = (
    *(1, 8, 13, 16, 27, 32, 50, 64, 100, 128, 200, 256, 300, 512, 700, 1024, 1500, 2048, 3000, 8192, 12000),
    *(16384, 20000, 40000),
)


def queries_of(vectors):
    """Rows of each of the six matrices: too few to fill the device, and several rounds of it."""
    return (2, max(23, min(3000, (1 << 16) // vectors)))


def make_mask(case, a, q):
    """The mask: a fifth of its elements, and its rows 1, 10, 19 and so on, are masked."""
    if not case.mask:
        return None
    sizes = {"B": B, "H": H, "Q": q, "N": a.n, "1": 1}
    shape = [sizes[letter] for letter in case.mask]
    generator = torch.Generator("cuda").manual_seed(7)
    out = torch.rand(shape, device="cuda", generator=generator) < 0.2
    if "Q" in case.mask:
        out.unbind(-2)[1].fill_(True)
        out[..., 10::9, :] = True
    if case.kind in (torch.bool, torch.uint8):
        return a.layout(~out).view(case.kind)  # layouts fill gaps with NaN, which uint8 does not have
    added = torch.randn(shape, device="cuda", generator=generator).masked_fill_(out, -math.inf)
    return a.layout(added.to(case.kind or a.dtype))


def masked_elements(case, x, mask):
    out = torch.zeros(x.shape, dtype=torch.bool, device="cuda")
    if mask is not None:
        out |= mask == (0 if case.kind in (torch.bool, torch.uint8) else -math.inf)
    if case.causal:
        out |= ~torch.ones(x.shape[-2:], dtype=torch.bool, device="cuda").tril()
    return out


def forward(case, x, mask, out):
    """y in the dtype of x."""
    h = torch.where(out, 0, x) * case.scale
    if mask is not None and mask.is_floating_point():
        h = h + torch.where(out, 0, mask.to(x.dtype))
    whole = out.all(-1, keepdim=True)
    h = h.masked_fill(out & ~whole, -math.inf)
    y = torch.log_softmax(h, -1) if case.log else torch.softmax(h, -1)
    empty = (-math.inf if case.log else 0.0) if case.masked_zero else math.nan
    return torch.where(whole, empty, y)


def backward(case, dy, y, out):
    """dx for a given y, in the dtype of dy."""
    dy, y = torch.where(out, 0, dy), torch.where(out, 0, y)
    if case.log:
        dx = dy - torch.where(out, 0, y.exp()) * dy.sum(-1, keepdim=True)
    else:
        dx = (dy - (dy * y).sum(-1, keepdim=True)) * y
    return torch.where(out, 0, dx * case.scale)


def check(case, q, n, dtype, layout=aligned):
    """Compares forward and backward of one case. Masked elements of all inputs are NaN."""
    a = Inputs(B * H * q, n, dtype, layout)
    mask = make_mask(case, a, q)
    x = a.x.unflatten(0, (B, H, q))
    out = masked_elements(case, x, mask)
    x = layout(torch.where(out, math.nan, x))
    options = {"scale": case.scale, "log": case.log, "causal": case.causal}
    y = torch.ops.gander.masked_softmax(x, mask, out_dtype=case.out, masked_zero=case.masked_zero, **options)
    assert y.dtype == (case.out or dtype)
    theirs, exact = (forward(case, x.to(to), mask, out) for to in (F32, torch.double))
    # An exponential is no more accurate than its argument, of which torch's float32 has as many digits.
    assert_accurate(y, theirs.to(y.dtype), exact, "y", extra=2**-23 if case.log else exact * 2**-21)

    stored = layout(torch.where(out, math.nan, y))
    dy = layout(torch.where(out, math.nan, a._random(5, (B * H * q, n), y.dtype).view(x.shape)))
    dx = torch.ops.gander.masked_softmax_bwd(dy, stored, mask, x_dtype=dtype, **options)
    assert dx.dtype == dtype
    theirs, exact = (backward(case, dy.to(to), stored.to(to), out) for to in (F32, torch.double))
    assert_accurate(dx, theirs.to(dtype), exact, "dx", extra=abs(case.scale) * 2**-21)
    assert not dx[out].any(), "dx of a masked element is not 0"
