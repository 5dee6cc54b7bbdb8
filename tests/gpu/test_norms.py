"""What norms promise beside accuracy: the same bits, and rows far from zero."""

import gander  # noqa: F401  registers the operators
import norms
import pytest
import torch
import torch.nn.functional as F
from grid import EPS
from tolerance import assert_accurate

OPS = torch.ops.gander


@pytest.mark.parametrize("n", [64, 1000, 4096, 5376, 16384, 50000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["rmsnorm_add_fwd", "layernorm_add_fwd"])
def test_batch_invariant(name, dtype, n):
    x, residual = (torch.randn(4096, n, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=dtype)
    forward = getattr(OPS, name)
    every = forward(x, weight, None, residual, batch_invariant=True)
    for m in (1, 255, 256, 257):
        few = forward(x[:m], weight, None, residual[:m], batch_invariant=True)
        for got, expected in zip(few, every, strict=True):
            assert torch.equal(got, expected[:m]), f"{m} rows"


@pytest.mark.parametrize("n", [64, 640, 4096, 16384, 16383])
def test_the_same_bits_on_every_run(n):
    x, residual, dout, more = (torch.randn(3000, n, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weight, bias = torch.randn(2, n, device="cuda", dtype=torch.bfloat16)

    def run():
        y, h, mean, rstd = OPS.layernorm_add_fwd(x, weight, bias, residual)
        return y, h, *OPS.layernorm_add_bwd_dw_db(h, weight, dout, more, mean, rstd)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("n", [32, 1000, 4096, 20000, 200000])
@pytest.mark.parametrize("spread", ["all", "one"])
def test_rows_far_from_zero(n, spread):
    """Rows with a mean of 1e4 and a deviation of 1, and rows of which one element is 1e4."""
    x = torch.randn(140, n, device="cuda")
    x[:, : n if spread == "all" else 1] += 1e4
    y, mean, rstd = OPS.layernorm_fwd(x, None, None, eps=EPS)
    exact = norms._norm(norms.CASES["layernorm-bare"], x.double(), None, None)
    theirs, their_mean, their_rstd = torch.native_layer_norm(x, [n], None, None, EPS)
    assert_accurate(y, theirs, exact[0], "y")
    assert_accurate(mean, their_mean.view(-1), exact[1], "mean")
    assert_accurate(rstd, their_rstd.view(-1), exact[2], "rstd")


@pytest.mark.parametrize("m", [1, 5000])
def test_autograd(m):
    """A block as models have it: residual, norm, and both results used."""
    n, dtype = 1024, torch.bfloat16
    leaves = [torch.randn(m, n, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]
    leaves += [torch.randn(n, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]
    upstream = [torch.randn(m, n, device="cuda", dtype=dtype) for _ in range(2)]
    x, residual, weight, bias = leaves
    ours = torch.autograd.grad(OPS.layernorm_add(x, weight, bias, residual, eps=EPS), leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    h = wide[0] + wide[1]
    exact = torch.autograd.grad(
        (F.layer_norm(h, (n,), *wide[2:], EPS), h), wide, [u.double() for u in upstream]
    )
    for got, expected in zip(ours, exact, strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < 6e-3, error
