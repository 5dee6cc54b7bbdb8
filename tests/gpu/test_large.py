"""More than 2^31 elements: in all rows together, in one row, or between two rows; and more than 2^31 rows."""

import gander
import pytest
import qk_norm_rotary
import rotary
import torch
import torch.nn.functional as F
from grid import EPS, gradients, losses, lse_of, rms_norm, same_bits
from tolerance import assert_accurate

LIMIT = 1 << 31


@pytest.fixture(autouse=True)
def room(request, jobs_done):
    need = request.node.get_closest_marker("gib").args[0] << 30
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < need:
        pytest.skip(f"needs {need >> 30} GiB of device memory, {free >> 30} GiB are free")
    yield
    torch.cuda.empty_cache()


def filled(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def sampled(m, n):
    """The indices of the first and the last rows, and of those around element 2^31."""
    border = LIMIT // n
    return [0, 1, border - 1, border, border + 1, m - 2, m - 1]


# Rows of whole 16-byte vectors, and unaligned rows.
SHAPES = pytest.mark.parametrize("m, n", [(70000, 32768), (43000, 50257)])
gib = pytest.mark.gib


@gib(30)
@SHAPES
def test_softmax(m, n):
    x = filled((m, n), torch.bfloat16)
    y = gander.softmax(x)
    rows = sampled(m, n)
    assert_accurate(y[rows], F.softmax(x[rows], -1), F.softmax(x[rows].double(), -1))
    dy = filled((m, n), torch.bfloat16)
    dx = gander.softmax_bwd(dy, y)
    a, b = dy[rows].double(), y[rows].double()
    theirs = torch._softmax_backward_data(dy[rows], y[rows], -1, y.dtype)
    assert_accurate(dx[rows], theirs, (a - (a * b).sum(-1, keepdim=True)) * b)


@gib(30)
@SHAPES
def test_rmsnorm(m, n):
    x, dout = filled((m, n), torch.bfloat16), filled((m, n), torch.bfloat16)
    weight = filled((n,), torch.bfloat16)
    out, _, rstd = gander.rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
    rows = sampled(m, n)
    few, dfew = x[rows], dout[rows]
    assert_accurate(out[rows], rms_norm(few, weight), rms_norm(few.double(), weight.double()))
    del out
    dx, dw = gander.rmsnorm_bwd(x, weight, dout, rstd)[:2]
    theirs, exact = (
        gradients(rms_norm, (a, b), c)[0]
        for a, b, c in ((few, weight, dfew), (few.double(), weight.double(), dfew.double()))
    )
    assert_accurate(dx[rows], theirs, exact, "dx")
    # dw of some columns, summed over all rows in float64. theirs is the exact sum, rounded once.
    columns = torch.tensor([0, 1, 777, n // 2, n - 2, n - 1], device="cuda")
    h, d = x[:, columns].double() * rstd.double()[:, None], dout[:, columns].double()
    exact = (h * d).sum(0)
    assert_accurate(dw[columns], exact.to(dw.dtype), exact, "dw")
    assert same_bits(gander.rmsnorm_bwd(x, weight, dout, rstd)[1], dw)


@gib(30)
@SHAPES
def test_cross_entropy(m, n):
    x = filled((m, n), torch.bfloat16)
    target = torch.randint(n, (m,), device="cuda")
    rows = sampled(m, n)
    few, marks = x[rows], target[rows]
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    ones = torch.ones(len(rows), device="cuda")
    exact_lse = lse_of(few.double())
    assert_accurate(loss[rows], losses(few, marks), losses(few.double(), marks), "loss")
    assert_accurate(lse[rows], lse_of(few), exact_lse, "lse", exact_lse.abs() * 2**-24)
    theirs, exact = (
        gradients(lambda x: losses(x, marks), (v,), ones.to(d))[0]
        for v, d in ((few, ones.dtype), (few.double(), torch.float64))
    )
    assert_accurate(dx[rows], theirs, exact, "dx")
    del dx
    mean = gander.cross_entropy(x, target)
    assert_accurate(mean, loss.mean(), loss.double().mean(), "mean")
    dx = gander.cross_entropy_bwd(x, target, torch.ones(m, device="cuda"), lse, inplace_backward=True)
    assert dx.data_ptr() == x.data_ptr()
    exact = (few.double() - lse[rows].double()[:, None]).exp() - F.one_hot(marks, n)
    assert_accurate(dx[rows], theirs, exact, "dx in place")


@gib(50)
def test_float32():
    m, n = 70000, 32768
    x = filled((m, n), torch.float32)
    rows = sampled(m, n)
    y = gander.softmax(x)
    assert_accurate(y[rows], F.softmax(x[rows], -1), F.softmax(x[rows].double(), -1))
    out, weight = gander.rmsnorm(x, y[0], eps=EPS), y[0].clone()
    assert_accurate(out[rows], rms_norm(x[rows], weight), rms_norm(x[rows].double(), weight.double()))


@gib(20)
def test_rows_of_one_element():
    """More than 2^31 rows. A grid has fewer CTAs."""
    x = filled((LIMIT + 1000, 1), torch.bfloat16)
    y = gander.softmax(x)
    assert bool((y == 1).all())
    x.fill_(2)
    x[-1] = -2
    out = gander.rmsnorm(x, eps=0.0)
    assert bool((out[:-1] == 1).all()) and out[-1] == -1


@gib(20)
def test_rows_far_apart():
    n, apart = 5000, LIMIT + 8
    storage = torch.empty(apart + n, dtype=torch.bfloat16, device="cuda")
    x = storage.as_strided((2, n), (apart, 1)).normal_()
    assert same_bits(gander.softmax(x), gander.softmax(x.contiguous()))
    weight = filled((n,), torch.bfloat16)
    rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)[2]
    for got, want in zip(
        gander.rmsnorm_bwd(x, weight, x, rstd)[:2],
        gander.rmsnorm_bwd(x.contiguous(), weight, x.contiguous(), rstd)[:2],
        strict=True,
    ):
        assert same_bits(got, want)


# Heads that follow each other for each token, and tokens that follow each other for each head.
@gib(40)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [128, 122])
@pytest.mark.parametrize("layout", [rotary.tokens_first, rotary.heads_first], ids=lambda f: f.__name__)
def test_rotary(layout, columns, interleaved):
    tokens, of_q, of_k = 551000, 32, 2
    q, k = (layout(filled((1, tokens, heads, columns), torch.bfloat16)) for heads in (of_q, of_k))
    assert q.numel() > LIMIT
    tables = torch.randn(2, tokens, columns // 2, device="cuda").unbind()
    border = LIMIT // (of_q * columns)
    few = [0, 1, border - 1, border, border + 1, tokens - 2, tokens - 1]
    wide = [rotary.for_elements(t[few], interleaved) for t in tables]
    results = gander.rotary(q, k, *tables, interleaved)
    back = torch.ops.gander.rotary_bwd(
        *(y.transpose(1, 2) for y in results), *tables, interleaved=interleaved, needs_dk=True
    )
    back = [x.transpose(1, 2) for x in back]
    for got, of, (cos, sin) in (results, (q, k), wide), (back, results, (wide[0], -wide[1])):
        for y, x in zip(got, of, strict=True):
            theirs, exact = (
                rotary.formula(x[:, :, few].to(kind), cos.to(kind), sin.to(kind), interleaved)
                for kind in (x.dtype, torch.float64)
            )
            assert_accurate(y[:, :, few], theirs, exact)
    del back
    gander.rotary(q, k, *tables, interleaved, inplace=True)
    assert same_bits(q, results[0]) and same_bits(k, results[1])


# More heads than 2^31 / 32, so that there are more threads than 32 bits count, and elements than 2^31.
@gib(60)
@pytest.mark.parametrize("columns", [32, 29])
@pytest.mark.parametrize("layout", [rotary.tokens_first, rotary.heads_first], ids=lambda f: f.__name__)
def test_qk_norm_rotary(layout, columns):
    tokens, of_q, of_k = 2400000, 32, 2
    q, k = (layout(filled((1, tokens, heads, columns), torch.bfloat16)) for heads in (of_q, of_k))
    assert q.numel() > LIMIT
    weights = [torch.rand(columns, device="cuda") for _ in "qk"]
    tables = torch.randn(2, tokens, columns // 2, device="cuda").unbind()
    border = LIMIT // (of_q * columns)
    few = [0, 1, border - 1, border, border + 1, tokens - 2, tokens - 1]
    function = qk_norm_rotary.of_gander(tables, False)
    small = [x[:, :, few].contiguous() for x in (q, k)]
    some = qk_norm_rotary.of_gander([t[few] for t in tables], False)
    results = function(q, k, *weights)
    for got, want in zip(results, some(*small, *weights), strict=True):
        assert same_bits(got[:, :, few].contiguous(), want.contiguous())
    found = qk_norm_rotary.results_of(function, [q, k, *weights], results)
    least = qk_norm_rotary.results_of(some, [*small, *weights], [y[:, :, few] for y in results])
    for got, want in zip(found[2:4], least[2:4], strict=True):
        assert same_bits(got[:, :, few].contiguous(), want.contiguous())
    assert all(dw.isfinite().all() for dw in found[4:])


@gib(40)
@pytest.mark.parametrize("n", [LIMIT + 64, LIMIT + 4097])
def test_one_row(n):
    """A row of more than 2^31 elements. The exact sums are computed piece by piece."""
    x = filled((1, n), torch.bfloat16)
    # The largest values are at the end, so that a sum without the end of the row is clearly wrong.
    x[0, -5:] = torch.tensor([9, 10, 8, 9.5, 11], dtype=torch.bfloat16)
    pieces = x[0].split(1 << 27)
    total = sum(piece.double().sub_(11).exp_().sum() for piece in pieces)
    lse = 11 + total.log()
    at = torch.tensor([0, 1, LIMIT - 1, LIMIT, LIMIT + 1, n - 3, n - 1], device="cuda")
    few = x[0, at]
    y = gander.softmax(x)
    exact = (few.double() - lse).exp()
    assert_accurate(y[0, at], exact.to(y.dtype), exact)
    del y
    target = torch.tensor([n - 4], device="cuda")
    loss, got_lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    assert_accurate(got_lse, lse.float().view(1), lse.view(1), "lse", lse * 2**-24)
    exact_loss = (lse - x[0, n - 4].double()).view(1)
    assert_accurate(loss, exact_loss.float(), exact_loss, "loss")
    assert_accurate(dx[0, at], exact.to(dx.dtype), exact, "dx")
    assert dx[0, n - 4] == (exact_loss.neg().exp() - 1).to(dx.dtype)
    del dx
    square = sum(piece.double().square_().sum() for piece in pieces)
    rstd = (square / n + EPS).rsqrt()
    out, _, got_rstd = gander.rmsnorm_fwd(x, eps=EPS, store_rstd=True)
    assert_accurate(got_rstd, rstd.float().view(1), rstd.view(1), "rstd")
    exact = few.double() * rstd
    assert_accurate(out[0, at], exact.to(out.dtype), exact, "out")
    # weight and dout are x as well: dw = x * h, and mean(g * h) = rstd * mean(x^3).
    del out
    dx, dw = gander.rmsnorm_bwd(x, x[0], x, got_rstd)[:2]
    exact = few.double().square() * rstd
    assert_accurate(dw[at], exact.to(dw.dtype), exact, "dw")
    mean = sum(piece.double().pow_(3).sum() for piece in pieces) / n * rstd
    exact = (few.double().square() - few.double() * rstd * mean) * rstd
    assert_accurate(dx[0, at], exact.to(dx.dtype), exact, "dx of rmsnorm")
