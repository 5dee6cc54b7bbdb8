"""Shared by the tests: shapes, inputs, gander's ops on them, and the results of torch and of float64."""

import warnings
from functools import cached_property
from types import SimpleNamespace

import gander
import torch
import torch.nn.functional as F
from tolerance import assert_accurate, summing

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPS = 1e-6
IGNORED = -100

# Row lengths just below and above those at which the planner changes to another kernel.
COLUMNS = (
    *(1, 3, 7, 8, 31, 64, 101, 127, 128, 255, 256, 512, 513, 1000, 1024, 1800, 2048, 4096, 4097, 8192),
    *(16384, 32768, 50257, 65536, 131072, 262144, 1 << 20, 1 << 22, 1 << 25),
)


def name(dtype):
    return str(dtype).removeprefix("torch.")


def rows_of(n):
    """Numbers of rows: from too few to fill the device to several rounds of persistent kernels."""
    if n >= 1 << 24:
        return 1, 3
    if n >= 1 << 20:
        return 1, 3, 16
    return 1, 3, 64, 199, min(20000, max(200, (1 << 24) // n))


# ---- Layouts: the same values at other places in memory ----


def aligned(x):
    return x.contiguous()


def offset(x):
    """A copy, one element after a multiple of 16 bytes. So are its rows if they are whole 16-byte vectors."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def strided(x, gap=16):
    """Rows with a gap between them."""
    if x.ndim < 2:
        return x.contiguous()
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), torch.nan, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


def odd_strided(x):
    return strided(x, 1)


def transposed(x):
    return x.mT.contiguous().mT if x.ndim >= 2 else x.contiguous()


class Inputs:
    """The operands of one call of any op, each made at its first use. The layout does not change the values.

    All values have one magnitude: with a few large ones, the maximum error would be a matter of luck.
    """

    def __init__(self, m, n, dtype, layout=aligned, scale=1.0):
        self.m, self.n, self.dtype, self.layout, self.scale = m, n, dtype, layout, scale

    def _random(self, seed, shape, dtype=None):
        generator = torch.Generator("cuda").manual_seed(seed)
        values = torch.randn(shape, device="cuda", generator=generator)
        return values.mul_(self.scale if seed == 0 else 1).to(dtype or self.dtype)

    @cached_property
    def x(self):
        return self.layout(self._random(0, (self.m, self.n)))

    @cached_property
    def dy(self):
        return self.layout(self._random(1, (self.m, self.n)))

    @cached_property
    def y(self):
        return self.layout(F.softmax(self.x, -1))

    @cached_property
    def weight(self):
        return self.layout(self._random(2, (self.n,)))

    @cached_property
    def rstd(self):
        return gander.rmsnorm_fwd(self.x, eps=EPS, store_rstd=True)[2]

    @cached_property
    def target(self):
        generator = torch.Generator("cuda").manual_seed(3)
        target = torch.randint(self.n, (self.m,), device="cuda", generator=generator)
        target[4::9] = IGNORED
        return target

    @cached_property
    def class_weight(self):
        generator = torch.Generator("cuda").manual_seed(4)
        return torch.rand(self.n, device="cuda", generator=generator) + 0.5

    @cached_property
    def dloss(self):
        return self._random(5, (self.m,), torch.float32)

    @cached_property
    def lse(self):
        return gander.cross_entropy_fwd(self.x, self.target, return_lse=True)[1]


# ---- gander's ops: {name: function of Inputs that returns {name of a result: tensor}} ----


def _cross_entropy_forward(a, **options):
    loss, lse = gander.cross_entropy_fwd(a.x, a.target, return_lse=True, **options)
    mean = gander.cross_entropy(a.x, a.target, weight=a.class_weight, **options)
    total = gander.cross_entropy(a.x, a.target, reduction="sum", **options)
    return {"loss": loss, "lse": lse, "mean": mean, "sum": total}


def _cross_entropy_forward_dx(a):
    weight = a.class_weight
    loss, lse, dx = gander.cross_entropy_fwd(a.x, a.target, weight=weight, return_lse=True, return_dx=True)
    return {"loss": loss, "lse": lse, "dx": dx}


# Upstream gradients of a reduced loss whose forward computes the gradient as well. Backward keeps that
# gradient if the upstream gradient is 1, and otherwise computes it again. The scaled mean is multiplied by M,
# so that its gradients have the same magnitude for every M.
UPSTREAM = {
    "dx of sum": ("sum", lambda m: 1.0),
    "dx of a scaled mean": ("mean", float),
    "dx of mean": ("mean", lambda m: 1.0),
}


def _cross_entropy_one_pass(a, **options):
    found = {}

    def gradient(reduction, upstream):
        x = a.x.detach().requires_grad_()
        weight = a.class_weight
        loss = gander.cross_entropy(x, a.target, weight=weight, reduction=reduction, **options)
        found[reduction] = loss
        return torch.autograd.grad(loss, x, torch.full((), upstream(a.m), device=x.device))[0]

    return {what: gradient(*case) for what, case in UPSTREAM.items()} | {"mean": found["mean"].detach()}


def _rmsnorm_forward(a, **options):
    out, _, rstd = gander.rmsnorm_fwd(a.x, a.weight, eps=EPS, store_rstd=True, **options)
    return {"out": out, "rstd": rstd}


def _rmsnorm_backward_dx(a, **options):
    return {"dx": gander.rmsnorm_bwd(a.x, None, a.dy, a.rstd, **options)[0]}


# The first five take the options algorithm and batch_invariant.
OPS = {
    "softmax_forward": lambda a, **options: {"y": gander.softmax_fwd(a.x, **options)},
    "softmax_backward": lambda a, **options: {"dx": gander.softmax_bwd(a.dy, a.y, **options)},
    "rmsnorm_forward": _rmsnorm_forward,
    "rmsnorm_backward": _rmsnorm_backward_dx,
    "rmsnorm_backward_dw": lambda a, **options: dict(
        zip(("dx", "dw"), gander.rmsnorm_bwd(a.x, a.weight, a.dy, a.rstd, **options)[:2], strict=True)
    ),
    "cross_entropy_forward": _cross_entropy_forward,
    "cross_entropy_forward_dx": _cross_entropy_forward_dx,
    "cross_entropy_one_pass": _cross_entropy_one_pass,
    "cross_entropy_backward": lambda a: {
        "dx": gander.cross_entropy_bwd(a.x, a.target, a.dloss, a.lse, weight=a.class_weight)
    },
}


# ---- torch's own operators, and the exact results: {name: (torch's, exact)} ----


def rms_norm(x, weight):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about mixed dtypes
        return F.rms_norm(x, x.shape[-1:], weight, EPS)


def gradients(function, inputs, dout):
    """The gradients of a function with respect to its inputs, except those that are None."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs), [x for x in inputs if x is not None], dout)


def in_both(function, *inputs):
    """The results of a function in the dtypes of its inputs, and in float64."""
    return function(*inputs), function(*(None if x is None else x.double() for x in inputs))


def _softmax_forward(a):
    return {"y": in_both(lambda x: F.softmax(x, -1), a.x)}


def _softmax_backward(a):
    theirs = torch._softmax_backward_data(a.dy, a.y, -1, a.dtype)
    dy, y = a.dy.double(), a.y.double()
    return {"dx": (theirs, (dy - (dy * y).sum(-1, keepdim=True)) * y)}


def exact_rms_norm(x, weight=None):
    """out and rstd in float64. torch's own kernel makes a whole row NaN if one element is infinite."""
    x = x.double()
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * rstd * (1 if weight is None else weight.double()), rstd[..., 0]


def _rmsnorm_forward_reference(a):
    out, rstd = torch.ops.aten._fused_rms_norm(a.x, [a.n], a.weight, EPS)
    exact_out, exact_rstd = exact_rms_norm(a.x, a.weight)
    return {"out": (out, exact_out), "rstd": (rstd.view(a.m), exact_rstd)}


def exact_rms_norm_gradients(x, weight, dy, rstd):
    x, dy, rstd = x.double(), dy.double(), rstd.double()[:, None]
    h, g = x * rstd, dy if weight is None else dy * weight.double()
    return (g - h * (g * h).mean(-1, keepdim=True)) * rstd, (dy * h).sum(0)


def _rmsnorm_backward(a, weight=None):
    theirs = gradients(rms_norm, (a.x, weight), a.dy)
    given = exact_rms_norm_gradients(a.x, weight, a.dy, a.rstd)
    own = exact_rms_norm_gradients(a.x, weight, a.dy, exact_rms_norm(a.x)[1])
    return {w: (moved(t, o, g), g) for w, t, o, g in zip(("dx", "dw"), theirs, own, given, strict=False)}


def moved(theirs, exact, given):
    """torch's result, shifted to the exact result for the rounded statistics that gander was given.

    Its error stays the same: theirs - exact.
    """
    return theirs.double() - exact + given


# gander's loss is float32 for every dtype of x. torch's loss has the dtype of x, so torch gets float32 copies
# of 16-bit inputs.
def losses(x, target, weight=None, reduction="none"):
    x = x if x.dtype == torch.float64 else x.float()
    weight = None if weight is None else weight.to(x.dtype)
    return F.cross_entropy(x, target, weight, reduction=reduction, ignore_index=IGNORED)


def lse_of(x):
    return torch.logsumexp(x if x.dtype == torch.float64 else x.float(), -1)


def _cross_entropy_reference(a):
    target, weight = a.target, a.class_weight
    return {
        "loss": in_both(lambda x: losses(x, target), a.x),
        "lse": in_both(lse_of, a.x),
        "mean": in_both(lambda x, w: losses(x, target, w, "mean"), a.x, weight),
        "sum": in_both(lambda x: losses(x, target, None, "sum"), a.x),
    }


def _cross_entropy_dx_reference(a):
    target, weight = a.target, a.class_weight
    ones = torch.ones(a.m, device="cuda")

    def gradient(x, w, dloss):
        return gradients(lambda x: losses(x, target, w), (x,), dloss)[0]

    return {
        "loss": in_both(lambda x, w: losses(x, target, w), a.x, weight),
        "lse": in_both(lse_of, a.x),
        "dx": in_both(gradient, a.x, weight, ones),
    }


def _cross_entropy_one_pass_reference(a):
    def gradient(reduction, upstream):
        def reduced(x, w):
            return losses(x, a.target, w, reduction) * upstream(a.m)

        return in_both(lambda x, w: gradients(lambda x: reduced(x, w), (x,), None)[0], a.x, a.class_weight)

    mean = in_both(lambda x, w: losses(x, a.target, w, "mean"), a.x, a.class_weight)
    return {what: gradient(*case) for what, case in UPSTREAM.items()} | {"mean": mean}


def _cross_entropy_backward(a):
    target, weight = a.target, a.class_weight
    theirs = gradients(lambda x: losses(x, target, weight), (a.x,), a.dloss)[0]
    counted = target != IGNORED
    classes = target.where(counted, 0)
    scale = (a.dloss.double() * weight.double()[classes] * counted)[:, None]

    def exact(lse):
        return ((a.x.double() - lse[:, None]).exp_() * scale).scatter_add_(1, classes[:, None], -scale)

    given = exact(a.lse.double())
    return {"dx": (moved(theirs, exact(lse_of(a.x.double())), given), given)}


REFERENCES = {
    "softmax_forward": _softmax_forward,
    "softmax_backward": _softmax_backward,
    "rmsnorm_forward": _rmsnorm_forward_reference,
    "rmsnorm_backward": _rmsnorm_backward,
    "rmsnorm_backward_dw": lambda a: _rmsnorm_backward(a, a.weight),
    "cross_entropy_forward": _cross_entropy_reference,
    "cross_entropy_forward_dx": _cross_entropy_dx_reference,
    "cross_entropy_one_pass": _cross_entropy_one_pass_reference,
    "cross_entropy_backward": _cross_entropy_backward,
}


def check(op, cases, **options):
    """Compares an op with torch and float64.

    All cases are compared together, because a few elements have no meaningful root mean square error.
    """
    results, rows = {}, []
    for a in cases:
        rows.append(a.m)
        references = REFERENCES[op](a)
        for what, got in OPS[op](a, **options).items():
            theirs, exact = references[what]
            shapes = tuple(got.shape), tuple(exact.shape)
            assert shapes[0] == shapes[1], f"{what}: shape {shapes[0]}, expected {shapes[1]}"
            parts = results.setdefault(what, SimpleNamespace(got=[], theirs=[], exact=[]))
            for part, value in ((parts.got, got), (parts.theirs, theirs), (parts.exact, exact)):
                part.append(value.flatten())
    for what, parts in results.items():
        exact = torch.cat(parts.exact)
        extra = torch.zeros_like(exact)
        if what == "lse":
            extra = exact.abs() * 2**-24
        elif "mean" in what or what == "sum":
            extra = exact.abs() * summing(max(rows))
        assert_accurate(torch.cat(parts.got), torch.cat(parts.theirs), exact, what, extra)


def same_bits(a, b):
    """Equality of bits: NaN equals the same NaN, and 0 differs from -0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
    )
