"""Values that are easy to get wrong: infinities, NaN, large logits, targets out of range, no rows."""

import math

import gander
import pytest
import torch
import torch.nn.functional as F
from grid import (
    DTYPES,
    EPS,
    IGNORED,
    Inputs,
    aligned,
    exact_rms_norm,
    gradients,
    losses,
    lse_of,
    name,
    offset,
    rms_norm,
    same_bits,
)
from tolerance import assert_accurate

INF, NAN = math.inf, math.nan
# Lengths for each kind of kernel: several rows per warp, a CTA per row, a cluster per row, two passes. Some
# rows are whole 16-byte vectors, some are not.
LENGTHS = (1, 3, 31, 256, 1000, 4096, 4099, 8192, 50257, 65536, 262144, 1 << 20)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
by_length = pytest.mark.parametrize("n", LENGTHS)


def special(n, dtype):
    """Rows with some or all elements -inf, NaN or +inf; rows of equal elements; rows of large elements; rows
    of which a part is so small that its exponentials are subnormal, or 0, beside the others'."""
    x = Inputs(16, n, dtype).x
    x[0, ::3] = -INF
    x[1, : n // 2] = -INF
    x[2, n // 2 :] = -INF
    x[3, 1:] = -INF
    x[4, :-1] = -INF
    x[5] = -INF
    x[6, n // 3] = NAN
    x[7] = NAN
    x[8, n // 2] = INF
    x[9] = INF
    x[10] = 0
    x[11] = 3
    x[12] += 1e4
    x[13] -= 1e4
    x[14, : n // 2] -= 88
    x[15, n // 3 :] -= 104
    return x


@by_length
@by_dtype
def test_softmax(dtype, n):
    x = special(n, dtype)
    for placed in (x, offset(x)):
        for rows in (slice(None), slice(0, 6), slice(6, 16)):
            x = placed[rows]
            assert_accurate(gander.softmax(x), F.softmax(x, -1), F.softmax(x.double(), -1))


@by_length
@by_dtype
def test_cross_entropy(dtype, n):
    x = special(n, dtype)
    target = torch.arange(len(x), device="cuda") * 7919 % n
    for placed in (x, offset(x)):
        loss, lse, dx = gander.cross_entropy_fwd(placed, target, return_lse=True, return_dx=True)
        exact = lse_of(placed.double())
        exact[8:10] = NAN  # with +inf, gander's lse is NaN like the loss; torch.logsumexp returns inf
        assert_accurate(lse, lse_of(placed), exact, "lse", torch.nan_to_num(exact.abs(), 0, 0, 0) * 2**-24)
        assert_accurate(loss, losses(placed, target), losses(placed.double(), target), "loss")
        alone = gander.cross_entropy(placed, target, reduction="none")  # uses other kernels than with dx
        assert_accurate(alone, losses(placed, target), losses(placed.double(), target), "loss alone")
        ones = torch.ones(len(x), device="cuda")
        theirs, exact = (
            gradients(lambda x: losses(x, target), (v,), ones.to(d))[0]
            for v, d in ((placed, torch.float32), (placed.double(), torch.float64))
        )
        assert_accurate(dx, theirs, exact, "dx")
        leaf = placed.detach().requires_grad_()
        loss = gander.cross_entropy(leaf, target, reduction="none")
        (through_autograd,) = torch.autograd.grad(loss, leaf, ones)
        assert_accurate(through_autograd, theirs, exact, "dx of autograd")


@by_length
@by_dtype
def test_rmsnorm(dtype, n):
    x = special(n, dtype)
    weight = Inputs(16, n, dtype).weight
    for placed in (x, offset(x)):
        out = gander.rmsnorm(placed, weight, eps=EPS)
        exact = exact_rms_norm(placed, weight)[0]
        theirs = exact.to(dtype)  # torch's own kernel makes a whole row NaN if one element is infinite
        finite = placed.isfinite().all(-1)
        theirs[finite] = rms_norm(placed[finite], weight)
        assert_accurate(out, theirs, exact)
    zeros = torch.zeros(5, n, dtype=dtype, device="cuda")
    assert not gander.rmsnorm(zeros, weight).any()


@pytest.mark.parametrize("n", [31, 4096, 50257, 262144])
@by_dtype
def test_logits_far_from_zero(dtype, n):
    """The loss depends on differences of logits, so an offset of 1e4 must not cost it digits."""
    a = Inputs(64, n, dtype)
    x = (a.x + 1e4).to(dtype)
    assert_accurate(gander.softmax(x), F.softmax(x, -1), F.softmax(x.double(), -1))
    got = gander.cross_entropy(x, a.target, reduction="none")
    assert_accurate(got, losses(x, a.target), losses(x.double(), a.target))
    assert (got.double() - losses(x.double(), a.target)).abs().max() < 1e-4
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(gander.cross_entropy(leaf, a.target, reduction="sum"), leaf)

    def gradient(x):
        return gradients(lambda x: losses(x, a.target, None, "sum"), (x,), None)[0]

    assert_accurate(dx, gradient(x), gradient(x.double()), "dx")


# ---- Targets out of range, ignored rows and weights of 0 ----


@pytest.mark.parametrize("n", [1, 31, 4096, 50257, 262144, 1 << 20])
@by_dtype
def test_targets_out_of_range(dtype, n):
    a = Inputs(12, n, dtype)
    target = torch.randint(n, (12,), device="cuda")
    clean = gander.cross_entropy_fwd(a.x, target, return_lse=True, return_dx=True)
    bad = torch.tensor([-1, n, n + 1, -99, -(1 << 40), 1 << 40, (1 << 63) - 1, -(1 << 63)], device="cuda")
    mixed = target.clone()
    mixed[2:10] = bad
    for layout in (aligned, offset):
        x = layout(a.x)
        loss, lse, dx = gander.cross_entropy_fwd(x, mixed, weight=None, return_lse=True, return_dx=True)
        assert loss[2:10].isnan().all() and dx[2:10].isnan().all()
        assert lse.isfinite().all()
        good = [0, 1, 10, 11]
        assert loss[good].isfinite().all() and dx[good].isfinite().all()
        dx = gander.cross_entropy_bwd(x, mixed, torch.ones(12, device="cuda"), lse)
        assert dx[2:10].isnan().all() and dx[good].isfinite().all()
    results = gander.cross_entropy_fwd(a.x, mixed, return_lse=True, return_dx=True)
    for got, want in zip(results, clean, strict=True):
        assert same_bits(got[:2], want[:2]) and same_bits(got[10:], want[10:])
    assert gander.cross_entropy(a.x, mixed).isnan()


@pytest.mark.parametrize("n", [31, 4096, 262144])
@by_dtype
def test_ignored_rows_are_not_read(dtype, n):
    a = Inputs(40, n, dtype)
    target = torch.randint(n, (40,), device="cuda")
    target[::4] = IGNORED
    x = a.x.clone()
    x[::4] = NAN
    got = gander.cross_entropy(x, target)
    assert_accurate(got, *(losses(v, target, None, "mean") for v in (a.x, a.x.double())))
    loss, dx = gander.cross_entropy_fwd(x, target, return_dx=True)
    assert not loss[::4].any() and not dx[::4].any()
    assert loss.isfinite().all() and dx.isfinite().all()


@by_dtype
def test_all_rows_ignored(dtype):
    a = Inputs(9, 1000, dtype)
    target = torch.full((9,), IGNORED, device="cuda")
    x = a.x.detach().requires_grad_()
    loss = gander.cross_entropy(x, target)
    loss.backward()
    assert loss.isnan() and not x.grad.any()  # as in torch
    assert gander.cross_entropy(x, target, reduction="sum") == 0


@by_dtype
def test_class_weights_of_zero(dtype):
    a = Inputs(90, 500, dtype)
    weight = a.class_weight.clone()
    weight[::2] = 0
    for reduction in ("none", "mean", "sum"):
        got = gander.cross_entropy(a.x, a.target, weight=weight, reduction=reduction)
        theirs, exact = (losses(x, a.target, weight, reduction) for x in (a.x, a.x.double()))
        assert_accurate(got, theirs, exact, reduction)
    weightless = (a.target >= 0) & (weight[a.target.clamp(0)] == 0)
    assert weightless.any() and not weightless.all()
    x = torch.where(weightless[:, None], torch.nan, a.x)
    loss, dx = gander.cross_entropy_fwd(x, a.target, weight=weight, return_dx=True)
    assert not loss[weightless].any() and not dx[weightless].any()
    assert dx[~weightless].isfinite().all()


@by_dtype
@pytest.mark.parametrize("n", [64, 500, 4096])
def test_few_rows_as_if_many(dtype, n):
    """batch_invariant selects kernels for many rows. They must also reduce the losses of a few rows."""
    for m in (1, 4, 17):
        a = Inputs(m, n, dtype)
        got = gander.cross_entropy(a.x, a.target, batch_invariant=True)
        assert_accurate(got, *(losses(x, a.target, None, "mean") for x in (a.x, a.x.double())), f"{m} rows")


# ---- No rows ----


@by_dtype
def test_no_rows(dtype):
    x = torch.empty(0, 33, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.ones(33, dtype=dtype, device="cuda", requires_grad=True)
    target = torch.empty(0, dtype=torch.int64, device="cuda")
    assert gander.softmax(x).shape == (0, 33)
    gander.rmsnorm(x, weight).sum().backward()
    assert x.grad.shape == (0, 33) and not weight.grad.any()
    loss, lse, dx = gander.cross_entropy_fwd(x.detach(), target, return_lse=True, return_dx=True)
    assert loss.shape == lse.shape == (0,) and dx.shape == (0, 33)
    assert gander.cross_entropy(x, target).isnan() and gander.cross_entropy(x, target, reduction="sum") == 0
    gander.cross_entropy(x, target, reduction="sum").backward()
    assert gander.softmax(torch.empty(3, 0, 8, device="cuda")).shape == (3, 0, 8)
