"""Cross-entropy of class probabilities beside torch and float64: every kernel of it."""

import gander
import pytest
import torch
from grid import DTYPES, Inputs, aligned, name, offset
from test_loss_options import VECTORS
from tolerance import assert_accurate

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "temperature": 0.7},
    "cap": {"softcap": 4.0, "scale": 0.5, "z_loss": 0.01},
}
options = pytest.mark.parametrize("more", OPTIONS.values(), ids=OPTIONS)

pytestmark = pytest.mark.usefixtures("record_kernels")


def of_torch(x, q, weight, label_smoothing=0.0, z_loss=0.0, scale=1.0, softcap=None, temperature=1.0):
    """The losses of rows, by sums that keep digits, and z."""
    z = (x * scale if softcap is None else softcap * torch.tanh(x * scale / softcap)) / temperature
    v = (1 - label_smoothing) * q + label_smoothing / q.shape[-1]
    v = v if weight is None else v * weight
    lse = z.logsumexp(-1)
    return (v * (lse[:, None] - z)).sum(-1) + z_loss * lse**2


def gradient_of_torch(x, q, weight, upstream, more):
    leaf = x.detach().clone().requires_grad_()
    (dx,) = torch.autograd.grad(of_torch(leaf, q, weight, **more), leaf, upstream.to(x.dtype))
    return dx


@options
@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_losses_and_gradients(dtype, vectors, layout, more):
    n = vectors * 16 // dtype.itemsize
    for m in (3, 140) if vectors < 20000 else (3,):
        for odd in (0, 1) if n > 1 else (0,):
            for soft in DTYPES if m == 3 else (dtype,):
                check(Inputs(m, n - odd, dtype, layout), soft, more)


def check(a, soft, more):
    m, n = a.x.shape
    q = torch.rand(m, n, device="cuda")
    q[0] = torch.arange(n, device="cuda") == n // 2
    q = (q / q.sum(-1, keepdim=True)).to(soft)
    weight = torch.linspace(0, 2, n, device="cuda") if "label_smoothing" in more else None
    leaf = a.x.clone().requires_grad_()
    losses = gander.cross_entropy(leaf, q, weight=weight, reduction="none", **more)
    wide = None if weight is None else weight.double()
    exact, theirs = (
        of_torch(a.x.double(), q.double(), wide, **more),
        of_torch(a.x.float(), q.float(), weight, **more),
    )
    steep = 4 if "softcap" in more else 1  # logits of 16-bit rows are off by 2^-23 of the cap
    assert_accurate(losses.detach(), theirs, exact, "loss", extra=(exact.abs() + steep) * 2**-20)
    upstream = torch.arange(m, device="cuda").cos()
    (dx,) = torch.autograd.grad(losses, leaf, upstream)
    exact_dx = gradient_of_torch(a.x.double(), q.double(), wide, upstream, more)
    their_dx = gradient_of_torch(a.x.float(), q.float(), weight, upstream, more).to(dx.dtype)
    assert_accurate(dx, their_dx, exact_dx, "dx", extra=exact_dx.abs().max() * 2**-20 * steep + 2**-22)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(7, 96), (300, 4096), (3, 300000)])
def test_reductions(shape, reduction):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q = torch.rand(shape, device="cuda").softmax(-1)
    loss = gander.cross_entropy(x, q, reduction=reduction)
    losses = gander.cross_entropy(x.detach(), q, reduction="none")
    torch.testing.assert_close(loss, getattr(losses, reduction)(), rtol=4e-6, atol=0)
    loss.backward()
    want = x.detach().float().softmax(-1) * q.sum(-1, keepdim=True) - q
    want = want / shape[0] if reduction == "mean" else want
    torch.testing.assert_close(x.grad.float(), want, rtol=2**-7, atol=float(want.abs().max()) * 2**-8)


@pytest.mark.parametrize("n", [96, 4096, 50257])
def test_same_bits(n):
    """On every run; and with batch_invariant, of a row alone."""
    x = torch.randn(300, n, device="cuda", dtype=torch.bfloat16)
    q = torch.rand(300, n, device="cuda", dtype=torch.bfloat16)
    how = {"reduction": "none", "batch_invariant": True}
    first, again = (gander.cross_entropy(x, q, **how) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first[:7], gander.cross_entropy(x[:7], q[:7], **how))


def test_memory():
    """No tensor of the logits' size is made but the gradient."""
    x = torch.randn(2048, 32000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q = torch.rand(2048, 32000, device="cuda", dtype=torch.bfloat16)
    gander.cross_entropy(x, q).backward()
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gander.cross_entropy(x, q).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * x.numel() * x.element_size()
