"""Cross-entropy with label smoothing beside torch and float64: every kernel of cross-entropy with options."""

import gander
import pytest
import torch
import torch.nn.functional as F
from grid import DTYPES, IGNORED, Inputs, aligned, gradients, name, offset
from tolerance import assert_accurate

OPS = torch.ops.gander
SMOOTHING = 0.1
# 16-byte vectors of a row: parts of warps, warps, CTAs, clusters, and what takes two passes.
VECTORS = (1, 9, 32, 100, 128, 700, 1024, 2050, 6500, 20000, 33000)

pytestmark = pytest.mark.usefixtures("record_kernels")


def losses(x, target, weight, reduction="none"):
    x = x if x.dtype == torch.float64 else x.float()
    weight = None if weight is None else weight.to(x.dtype)
    options = {"reduction": reduction, "ignore_index": IGNORED, "label_smoothing": SMOOTHING}
    return F.cross_entropy(x, target, weight, **options)


def references(a, weight, dloss):
    """The losses and their gradient with torch's operators in float32, and in float64."""
    for x, d in ((a.x, dloss), (a.x.double(), dloss.double())):
        wide = None if weight is None else weight.double() if x.dtype == torch.float64 else weight
        (dx,) = gradients(lambda x, wide=wide: losses(x, a.target, wide), (x,), d)
        yield losses(x, a.target, wide), dx


@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_losses_and_gradients(dtype, vectors, weighted, layout):
    n = vectors * 16 // dtype.itemsize
    for m in (3, 140) if vectors < 20000 else (3,):
        for odd in (0, 1) if n > 1 else (0,):
            a = Inputs(m, n - odd, dtype, layout)
            weight = a.class_weight if weighted else None
            ones = torch.ones(m, device="cuda")
            (theirs, their_dx), (exact, exact_dx) = references(a, weight, ones)
            loss, lse, dx = OPS.cross_entropy_fwd(
                a.x,
                a.target,
                weight,
                ignore_index=IGNORED,
                label_smoothing=SMOOTHING,
                needs_lse=True,
                needs_dx=True,
            )
            alone = OPS.cross_entropy_fwd(
                a.x, a.target, weight, ignore_index=IGNORED, label_smoothing=SMOOTHING, needs_lse=True
            )
            terms = exact_dx.abs().max() * 2**-20
            for got in loss, alone[0]:
                assert_accurate(got, theirs, exact, "loss", extra=exact.abs() * 2**-20)
            assert_accurate(dx, their_dx.to(dtype), exact_dx, "dx", extra=terms)
            back = OPS.cross_entropy_bwd(
                a.x, a.target, weight, ones, lse, ignore_index=IGNORED, reduction=0, label_smoothing=SMOOTHING
            )
            # lse is one number here, which has lost digits of the logarithm.
            lost = terms + exact_dx.abs() * alone[1].abs()[:, None] * 2**-23
            assert_accurate(back, their_dx.to(dtype), exact_dx, "dx of backward", extra=lost)


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("n", [1000, 4096, 50257])
@pytest.mark.parametrize("m", [5, 700, 20000])
def test_mean(m, n, one_pass):
    """The mean and its gradient, with weights of which the device adds up what the mean is divided by."""
    if m * n > 1 << 28:
        m = 700
    a = Inputs(m, n, torch.bfloat16)
    x = a.x.clone().requires_grad_()
    loss = gander.cross_entropy(
        x,
        a.target,
        weight=a.class_weight,
        ignore_index=IGNORED,
        label_smoothing=SMOOTHING,
        one_pass=one_pass,
    )
    (dx,) = torch.autograd.grad(loss * 0.5, x)
    exact = losses(a.x.double(), a.target, a.class_weight.double(), "mean")
    (exact_dx,) = gradients(
        lambda x: losses(x, a.target, a.class_weight.double(), "mean") * 0.5, (a.x.double(),), None
    )
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=0)
    bound = exact_dx.abs() * 2**-8 + exact_dx.abs().max() * 2**-20
    assert ((dx.double() - exact_dx).abs() <= bound).all()


@pytest.mark.parametrize("n", [96, 4096, 50257])
def test_same_bits(n):
    """On every run; and with batch_invariant, of a row alone."""
    a = Inputs(300, n, torch.bfloat16)
    options = {"label_smoothing": SMOOTHING, "ignore_index": IGNORED, "batch_invariant": True}
    first = gander.cross_entropy_fwd(a.x, a.target, weight=a.class_weight, return_dx=True, **options)
    again = gander.cross_entropy_fwd(a.x, a.target, weight=a.class_weight, return_dx=True, **options)
    few = gander.cross_entropy_fwd(a.x[:7], a.target[:7], weight=a.class_weight, return_dx=True, **options)
    for one, other, part in zip(first, again, few, strict=True):
        assert torch.equal(one, other) and torch.equal(one[:7], part)
