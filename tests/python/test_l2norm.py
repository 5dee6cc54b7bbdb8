"""l2norm: values and gradients beside torch's operators and float64, and RMSNorm's kernels behind it."""

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_accurate, assert_same

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ops = torch.ops.gander
dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=lambda d: str(d)[6:])
# Rows that one vector holds, that CPUs take together, unaligned ones, and of several blocks.
shapes = pytest.mark.parametrize(
    "shape", [(3, 1), (5, 4), (300, 64), (70, 128), (9, 256), (7, 333), (4, 4096), (2, 50257)], ids=str
)


def exact(x, eps):
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def gradient(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy.to(y.dtype))[0]


@pytest.fixture
def served(device, dtype):
    if device == "cuda" and dtype == DOUBLE:
        pytest.skip("float64 is served on the CPU only")
    return device


@pytest.mark.parametrize("eps", [1e-6, 0.0, 3.0])
@shapes
@dtypes
def test_values_and_gradients(served, dtype, shape, eps):
    x, dy = (torch.randn(shape, dtype=DOUBLE).to(dtype).to(served) for _ in range(2))
    y, dx = gradient(lambda x: gander.l2norm(x, eps), x, dy)
    want, want_dx = gradient(lambda x: exact(x, eps), x.double(), dy)
    # torch's own RMSNorm with the same numbers: its rows are sqrt(N) times as long.
    n = shape[-1]
    theirs, theirs_dx = gradient(lambda x: F.rms_norm(x, (n,), None, eps / n) / n**0.5, x, dy)
    assert y.is_contiguous() and y.shape == x.shape
    slack = 2.0 if served == "cuda" else 1.0
    assert_accurate(y, theirs, want, "y", slack=slack)
    # dx is a difference of these terms, which may cancel.
    rows, dy = x.double(), dy.double()
    rnorm = (rows.square().sum(-1, keepdim=True) + eps).rsqrt()
    size = (dy.abs() + rows.abs() * rnorm.square() * (rows * dy).abs().sum(-1, keepdim=True)) * rnorm
    if dtype == DOUBLE:
        bound = 1e-13 * (want_dx.abs() + want_dx.abs().max()) + size * 2.0**-51
        assert ((dx - want_dx).abs() <= bound).all()
    else:
        assert_accurate(dx, theirs_dx, want_dx, "dx", extra=size * 2.0**-22, slack=slack)


def test_of_functional_normalize(device):
    x = torch.randn(4, 64, device=device)
    torch.testing.assert_close(gander.l2norm(x, 0.0), F.normalize(x, dim=-1))


@pytest.mark.parametrize("n", [64, 96, 128, 256, 1000])
def test_powers_of_two_are_exact(n, device):
    """A row of n = 4^k has the bits of RMSNorm's row over 2^k: the divisor is all that differs."""
    x = torch.randn(40, n, device=device).bfloat16()
    if (n & (n - 1)) == 0 and n.bit_length() % 2:
        assert_same(gander.l2norm(x, 0.0), gander.rmsnorm(x, eps=0.0) / n**0.5)
    y = gander.l2norm(x.float(), 0.0).double()
    torch.testing.assert_close(
        y.square().sum(-1), torch.ones(40, dtype=DOUBLE, device=device), rtol=1e-6, atol=0
    )


def test_special_values(device):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, 0.0], [inf, 1.0], [nan, 1.0], [1e-30, 0.0]], device=device)
    y = gander.l2norm(x)
    torch.testing.assert_close(y, exact(x, 1e-6), equal_nan=True)
    assert gander.l2norm(x, 0.0)[0].isnan().all()


def test_statistic(device):
    """The operator also returns 1 / sqrt(sum(x^2) + eps), of which backward is made."""
    x, dy = torch.randn(2, 5, 6, 40, device=device)
    y, rnorm = ops.l2norm(x, 0.5, False, True)
    assert rnorm.shape == (5, 6) and rnorm.dtype == SINGLE
    torch.testing.assert_close(rnorm, (x.square().sum(-1) + 0.5).rsqrt())
    torch.testing.assert_close(y, x * rnorm[..., None])
    want = gradient(lambda x: exact(x, 0.5), x, dy)[1]
    torch.testing.assert_close(ops.l2norm_bwd(x, dy, rnorm), want)
    assert ops.l2norm(x)[1].numel() == 0


def test_strided_rows(device):
    x = torch.randn(6, 4, 80, device=device)[:, ::2, ::2]
    assert_same(gander.l2norm(x), gander.l2norm(x.contiguous()))
    dy = torch.randn(2, 6, 40, device=device).transpose(0, 1)
    got, want = (gradient(gander.l2norm, rows, dy)[1] for rows in (x, x.contiguous()))
    assert_same(got, want)


def test_batch_invariant(device):
    x, dy = torch.randn(2, 500, 256, device=device)
    for rows in (1, 7, 500):
        got = gradient(lambda x: gander.l2norm(x, batch_invariant=True), x[:rows], dy[:rows])
        want = gradient(lambda x: gander.l2norm(x, batch_invariant=True), x, dy)
        assert all(torch.equal(a, b[:rows]) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training(device, backend):
    torch._dynamo.reset()

    def loss(x, w):
        return (gander.l2norm(x @ w, 1e-3) * w[0]).sum()

    x, w = torch.randn(12, 8, device=device), torch.randn(8, 64, device=device)
    results = []
    for function in loss, torch.compile(loss, backend=backend, fullgraph=True):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        results.append(torch.autograd.grad(function(a, b), (a, b)))
    want = torch.func.grad(lambda x, w: (exact(x @ w, 1e-3) * w[0]).sum(), (0, 1))(x, w)
    for got in results:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_checkpoint_and_export(device):
    x = torch.randn(6, 64, device=device)
    want = gradient(gander.l2norm, x, x.cos())[1]

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(gander.l2norm, x, use_reentrant=False)

    assert torch.equal(gradient(checkpointed, x, x.cos())[1], want)

    class Model(torch.nn.Module):
        def forward(self, x):
            return gander.l2norm(x, 0.25)

    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: rows},)).module()
    for m in 6, 3:
        assert torch.equal(program(x[:m]), gander.l2norm(x[:m], 0.25))


def test_opcheck(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    torch.library.opcheck(ops.l2norm.default, (x, 1e-3))
    torch.library.opcheck(ops.l2norm.default, (x.detach(), 1e-3), {"needs_rnorm": True})
    rnorm = torch.rand(3, device=device)
    torch.library.opcheck(ops.l2norm_bwd.default, (x.detach(), x.detach().cos(), rnorm))


def test_arrays():
    x = np.random.default_rng(0).standard_normal((3, 4, 64)).astype(np.float32)
    y = gander.l2norm(x, 0.5)
    assert type(y) is np.ndarray and y.dtype == np.float32
    np.testing.assert_allclose(y, x / np.sqrt((x * x).sum(-1, keepdims=True) + 0.5), rtol=1e-5)


def test_no_rows(device):
    x = torch.empty(0, 8, device=device, requires_grad=True)
    gander.l2norm(x).sum().backward()
    assert x.grad.shape == (0, 8)


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), "a", None])
def test_refused_eps(eps):
    with pytest.raises((TypeError, ValueError), match="eps is "):
        gander.l2norm(torch.ones(1, 2), eps)


def test_explained():
    text = gander.explain("l2norm", shape=(4096, 128), dtype="bfloat16", device="h100")
    same = gander.explain("rmsnorm", shape=(4096, 128), dtype="bfloat16", device="h100")
    assert text.splitlines()[1:] == same.splitlines()[1:]  # RMSNorm's kernels
