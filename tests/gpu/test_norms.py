"""What norms promise beside accuracy: the same bits, and rows far from zero."""

import gander
import norms
import pytest
import torch
import torch.nn.functional as F
from grid import EPS
from tolerance import assert_accurate

OPS = torch.ops.gander


def layernorm(x, weight, bias, residual=None, **options):
    """y, residual_out with a residual, mean and rstd."""
    adds = residual is not None
    asked = {"needs_residual_out": adds, "needs_mean": True, "needs_rstd": True}
    y, h, mean, rstd = OPS.layernorm(x, weight, bias, residual, **asked, **options)
    return (y, h, mean, rstd) if adds else (y, mean, rstd)


def layernorm_bwd(x, weight, dout, dresidual_out, mean, rstd, **options):
    """dx, dw and db."""
    given = x, weight, dout, dresidual_out, mean, rstd
    dx, _, dw, db = OPS.layernorm_bwd(*given, needs_dw=True, needs_db=True, **options)
    return dx, dw, db


@pytest.mark.parametrize("n", [64, 1000, 4096, 5376, 16384, 50000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "adds"), [("rmsnorm", True), ("layernorm", True), ("layernorm", False)])
def test_batch_invariant(name, adds, dtype, n):
    x, residual = (torch.randn(4096, n, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=dtype)

    asked = {"needs_residual_out": adds, "needs_rstd": True}
    if name == "layernorm":
        asked["needs_mean"] = True

    def forward(m):
        more = residual[:m] if adds else None
        results = getattr(OPS, name)(x[:m], weight, residual=more, batch_invariant=True, **asked)
        assert adds or not results[1].numel()
        return results

    every = forward(4096)
    for m in (1, 255, 256, 257):
        for got, expected in zip(forward(m), every, strict=True):
            assert torch.equal(got, expected[:m]), f"{m} rows"


@pytest.mark.parametrize("n", [1000, 2048, 4096, 5376, 16384, 65544])
def test_batch_invariant_layernorm_backward(n):
    x, dout = (torch.randn(4096, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    _, mean, rstd = layernorm(x, weight, None)

    def backward(m):
        given = x[:m], weight, dout[:m], None, mean[:m], rstd[:m]
        return OPS.layernorm_bwd(*given, batch_invariant=True)[0]

    every = backward(4096)
    for m in (1, 255, 256, 257):
        assert torch.equal(backward(m), every[:m]), f"{m} rows"


@pytest.mark.parametrize("n", [64, 640, 4096, 16384, 16383])
def test_the_same_bits_on_every_run(n):
    x, residual, dout, more = (torch.randn(3000, n, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weight, bias = torch.randn(2, n, device="cuda", dtype=torch.bfloat16)

    def run():
        y, h, mean, rstd = layernorm(x, weight, bias, residual)
        return y, h, *layernorm_bwd(h, weight, dout, more, mean, rstd)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("n", [32, 1000, 4096, 20000, 200000])
@pytest.mark.parametrize("spread", ["all", "one"])
def test_rows_far_from_zero(n, spread):
    """Rows with a mean of 1e4 and a deviation of 1, and rows of which one element is 1e4."""
    x = torch.randn(140, n, device="cuda")
    x[:, : n if spread == "all" else 1] += 1e4
    y, mean, rstd = layernorm(x, None, None, eps=EPS)
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
    results = OPS.layernorm(x, weight, bias, residual, eps=EPS, needs_residual_out=True)[:2]
    ours = torch.autograd.grad(results, leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    h = wide[0] + wide[1]
    exact = torch.autograd.grad(
        (F.layer_norm(h, (n,), *wide[2:], EPS), h), wide, [u.double() for u in upstream]
    )
    for got, expected in zip(ours, exact, strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < 6e-3, error


# ---- Heads, and rounding ----

COLUMNS = [8, 64, 80, 96, 128, 192, 256, 1000, 1024, 5120, 20000, 101]


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("heads", [1, 3, 32, 300])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2]
)
def test_heads(n, heads, dtypes):
    """A head has the results of a call on its rows alone, and sums over them."""
    dtype, kind = dtypes
    tokens = max(3, min(700, (1 << 23) // (heads * n)))
    x, residual, dout, more = (torch.randn(tokens, heads, n, device="cuda", dtype=dtype) for _ in range(4))
    weight, bias = torch.randn(2, heads, n, device="cuda", dtype=kind)
    y, h, mean, rstd = layernorm(x, weight, bias, residual)
    dx, dw, db = layernorm_bwd(h, weight, dout, more, mean, rstd)
    for head in {0, 1, heads // 2, heads - 1} & set(range(heads)):
        mine, given = (slice(None), head), (weight[head], bias[head])
        want = layernorm(x[mine].contiguous(), *given, residual[mine].contiguous())
        for got, expected in zip((y, h, mean, rstd), want, strict=True):
            torch.testing.assert_close(got[mine], expected)
        one = h[mine].double(), mean[mine].double()[:, None], rstd[mine].double()[:, None]
        xhat, g = (one[0] - one[1]) * one[2], dout[mine].double() * weight[head].double()
        exact = (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)) * one[2]
        exact = exact + more[mine].double()
        error = (dx[mine].double() - exact).norm() / exact.norm()
        assert error < 2 * torch.finfo(dtype).eps
        for got, expected in (
            (dw[head], (dout[mine].double() * xhat).sum(0)),
            (db[head], dout[mine].double().sum(0)),
        ):
            # Rows of 16-bit elements are summed in float32.
            assert (got.double() - expected).norm() / expected.norm() < 4 * torch.finfo(kind).eps
    again = layernorm_bwd(h, weight, dout, more, mean, rstd)
    assert all(map(torch.equal, again, (dx, dw, db)))


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
def test_rounding(n, kind, wide):
    """The normalized row is rounded to x's type, and so it is in dw."""
    x, dout = (torch.randn(300, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    residual = torch.randn(300, n, device="cuda") if wide else None
    weight = torch.randn(n, device="cuda", dtype=kind)
    options = {"weight_offset": 1.0, "round_normalized": True}
    asked = {"needs_residual_out": wide, "needs_rstd": True}
    y, h, rstd = OPS.rmsnorm(x, weight, residual=residual, out_dtype=torch.float32, **asked, **options)
    h = h if wide else x
    xhat = (h.double() * rstd.double()[:, None]).float()
    scale = weight.float() + 1
    # A product that lies between two numbers of x's type may be rounded to either of them.
    off = (y - xhat.bfloat16().float() * scale).abs() > 1e-5 * y.abs() + 1e-6
    assert off.float().mean() < 0.01
    assert ((y - xhat * scale).abs() <= 2**-8 * y.abs() + 1e-6).all()
    given, asked = (h, weight, dout, None, rstd), {"x_dtype": torch.bfloat16, "needs_dw": True}
    dx, _, dw, _ = OPS.rmsnorm_bwd(*given, **asked, **options)
    plain = OPS.rmsnorm_bwd(*given, **asked, weight_offset=1.0)[0]
    assert torch.equal(dx, plain)
    exact = (dout.double() * xhat.bfloat16().double()).sum(0)
    unrounded = (dout.double() * xhat.double()).sum(0)
    error = (dw.double() - exact).norm()
    assert error < max(0.1 * (unrounded - exact).norm(), 2 * torch.finfo(kind).eps * exact.norm())


@pytest.mark.parametrize("m", [1, 64, 512])
@pytest.mark.parametrize("n", [4096, 5120, 7168, 16384])
def test_in_place(m, n):
    x, residual = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    want = OPS.rmsnorm(x, weight, residual=residual, needs_residual_out=True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    mine, other = x.clone(), residual.clone()
    gander.fused_add_rmsnorm(mine, other, weight)
    assert torch.equal(mine, want[0])
    assert torch.equal(other, want[1])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        gander.fused_add_rmsnorm(mine, other, weight)
    mine.copy_(x)
    other.copy_(residual)
    graph.replay()
    assert torch.equal(mine, want[0])
    assert torch.equal(other, want[1])
