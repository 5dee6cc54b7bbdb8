"""Cross-entropy with options beside torch and float64: every kernel of cross-entropy with options."""

import gander
import pytest
import torch
from grid import DTYPES, IGNORED, Inputs, aligned, gradients, name, offset
from losses import OPTIONS, cross_entropy
from tolerance import assert_accurate

OPS = torch.ops.gander
FEW = [{"label_smoothing": 0.1}, {"softcap": 4.0}, OPTIONS[-1]]
each = pytest.mark.parametrize("more", FEW, ids=["smoothing", "cap", "all"])
# 16-byte vectors of a row: parts of warps, warps, CTAs, clusters, and what takes two passes.
VECTORS = (1, 9, 32, 100, 128, 300, 700, 1024, 2050, 6500, 20000, 33000)

pytestmark = pytest.mark.usefixtures("record_kernels")


def losses(x, target, weight, more, reduction="none"):
    x = x if x.dtype == torch.float64 else x.float()
    weight = None if weight is None else weight.to(x.dtype)
    return cross_entropy(x, target, weight, reduction, IGNORED, **more)


def references(a, weight, dloss, more):
    """The losses and their gradient with torch's operators in float32, and in float64."""
    for x, d in ((a.x, dloss), (a.x.double(), dloss.double())):
        wide = None if weight is None else weight.double() if x.dtype == torch.float64 else weight
        (dx,) = gradients(lambda x, wide=wide: losses(x, a.target, wide, more), (x,), d)
        yield losses(x, a.target, wide, more), dx


@each
@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_losses_and_gradients(dtype, vectors, weighted, layout, more):
    n = vectors * 16 // dtype.itemsize
    for m in (3, 140) if vectors < 20000 else (3,):
        for odd in (0, 1) if n > 1 else (0,):
            a = Inputs(m, n - odd, dtype, layout)
            weight = a.class_weight if weighted else None
            ones = torch.ones(m, device="cuda")
            (theirs, their_dx), (exact, exact_dx) = references(a, weight, ones, more)
            loss, lse, dx = OPS.cross_entropy_fwd(
                a.x,
                a.target,
                weight,
                ignore_index=IGNORED,
                needs_lse=True,
                needs_dx=True,
                **more,
            )
            alone = OPS.cross_entropy_fwd(a.x, a.target, weight, ignore_index=IGNORED, needs_lse=True, **more)
            terms = exact_dx.abs().max() * 2**-20
            steep = 4 if "softcap" in more else 1  # logits of 16-bit rows are off by 2^-23 of the cap
            terms *= steep
            for got in loss, alone[0]:
                assert_accurate(got, theirs, exact, "loss", extra=(exact.abs() + steep - 1) * 2**-20)
            assert_accurate(dx, their_dx.to(dtype), exact_dx, "dx", extra=terms)
            back = OPS.cross_entropy_bwd(
                a.x, a.target, weight, ones, lse, ignore_index=IGNORED, reduction=0, **more
            )
            # lse is one number here, which has lost digits of the logarithm.
            lost = terms + exact_dx.abs() * alone[1].abs()[:, None] * 2**-23
            assert_accurate(back, their_dx.to(dtype), exact_dx, "dx of backward", extra=lost)


@each
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("n", [1000, 4096, 50257])
@pytest.mark.parametrize("m", [5, 700, 20000])
def test_mean(m, n, one_pass, more):
    """The mean and its gradient. The device adds up the weights that it is divided by, or the rows."""
    if m * n > 1 << 28:
        m = 700
    a = Inputs(m, n, torch.bfloat16)
    weight = None if "z_loss" in more else a.class_weight
    x = a.x.clone().requires_grad_()
    options = {"ignore_index": IGNORED, "one_pass": one_pass, **more}
    loss = gander.cross_entropy(x, a.target, weight=weight, **options)
    (dx,) = torch.autograd.grad(loss * 0.5, x)
    wide = None if weight is None else weight.double()
    exact = losses(a.x.double(), a.target, wide, more, "mean")
    (exact_dx,) = gradients(lambda x: losses(x, a.target, wide, more, "mean") * 0.5, (a.x.double(),), None)
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=0)
    bound = exact_dx.abs() * 2**-8 + exact_dx.abs().max() * 2**-20
    assert ((dx.double() - exact_dx).abs() <= bound).all()


@each
@pytest.mark.parametrize("n", [96, 4096, 50257])
def test_same_bits(n, more):
    """On every run; and with batch_invariant, of a row alone."""
    a = Inputs(300, n, torch.bfloat16)
    options = {"ignore_index": IGNORED, "batch_invariant": True, **more}
    first = gander.cross_entropy_fwd(a.x, a.target, weight=a.class_weight, return_dx=True, **options)
    again = gander.cross_entropy_fwd(a.x, a.target, weight=a.class_weight, return_dx=True, **options)
    few = gander.cross_entropy_fwd(a.x[:7], a.target[:7], weight=a.class_weight, return_dx=True, **options)
    for one, other, part in zip(first, again, few, strict=True):
        assert torch.equal(one, other) and torch.equal(one[:7], part)
