"""Each op is compared with float64: dtypes, shapes, layouts, special values. The bits are the same in every
run."""

import math
import warnings

import gander
import numpy as np
import pytest
import tolerance
import torch
import torch.nn.functional as F
from tolerance import assert_same

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LOW = DTYPES[:3]
# Odd sizes: less than a vector, powers of two plus and minus one, a vocabulary. There are enough rows for a
# root mean square.
SHAPES = [(1000, 1), (1000, 3), (256, 31), (256, 127), (128, 1000), (32, 4097), (4, 50257)]
EPS = 1e-6
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
low_dtypes = pytest.mark.parametrize("dtype", LOW, ids=lambda d: str(d)[6:])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")


@pytest.fixture
def served(device, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is served on the CPU only")
    return device


def rand(shape, dtype, device, scale=1.0):
    """Normally distributed values with outliers. Without outliers softmax and a mean of squares would be
    easy."""
    x = torch.randn(shape, dtype=torch.float64) * scale
    x[torch.rand(shape) < 0.01] *= 8
    return x.to(device=device, dtype=dtype)


def rms(x, weight=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about mixed dtypes
        return F.rms_norm(x, x.shape[-1:], weight, EPS)


def accumulator_eps(dtype):
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def assert_accurate(got, *rest):
    """The maximum error of few rows is left to chance. On CUDA its bound is twice that of tests/gpu, which
    compares many rows.
    """
    tolerance.assert_accurate(got, *rest, slack=2.0 if got.is_cuda else 1.0)


def grads(function, *inputs):
    """The result, and the gradients of a weighted sum of it."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    torch.manual_seed(1)
    weights = torch.randn(out.shape, dtype=torch.float64).to(out.device).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, weights)


# ---- softmax ----


@shapes
@dtypes
def test_softmax(served, dtype, shape):
    x = rand(shape, dtype, served, 3)
    assert_accurate(gander.softmax(x), F.softmax(x, -1), F.softmax(x.double(), -1))


@shapes
@dtypes
def test_softmax_backward(served, dtype, shape):
    dy, y = rand(shape, dtype, served), F.softmax(rand(shape, dtype, served), -1)
    exact = (dy.double() - (dy.double() * y.double()).sum(-1, keepdim=True)) * y.double()
    assert_accurate(gander.softmax_bwd(dy, y), torch._softmax_backward_data(dy, y, -1, dtype), exact)


@dtypes
def test_softmax_special_values(served, dtype):
    inf, nan = math.inf, math.nan
    x = torch.randn(8, 9, dtype=torch.float64).to(dtype)
    x[0, 3] = -inf
    x[1, :8] = -inf
    x[2] = -inf
    x[3, 4] = nan
    x[4, 0] = inf
    x[5] = 0
    x = x.to(served)
    assert_accurate(gander.softmax(x), F.softmax(x, -1), F.softmax(x.double(), -1))


@low_dtypes
def test_softmax_of_large_logits(device, dtype):
    x = rand((16, 333), torch.float32, device).add(1e4).to(dtype)
    assert_accurate(gander.softmax(x), F.softmax(x, -1), F.softmax(x.double(), -1))


# ---- rmsnorm ----


@pytest.mark.parametrize("weighted", [True, False])
@shapes
@dtypes
def test_rmsnorm(served, dtype, shape, weighted):
    x, weight = rand(shape, dtype, served), rand(shape[1:], dtype, served) if weighted else None
    exact = rms(x.double(), weight.double() if weighted else None)
    assert_accurate(gander.rmsnorm(x, weight), rms(x, weight), exact)
    rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)[2]
    accumulated = x if dtype == torch.float64 else x.float()
    assert_accurate(
        rstd,
        (accumulated.square().mean(-1) + EPS).rsqrt(),
        (x.double().square().mean(-1) + EPS).rsqrt(),
        "rstd",
    )


@shapes
@dtypes
def test_rmsnorm_backward(served, dtype, shape):
    x, weight = rand(shape, dtype, served), rand(shape[1:], dtype, served)
    got = grads(lambda x, w: gander.rmsnorm(x, w, eps=EPS), x, weight)
    theirs = grads(rms, x, weight)
    exact = grads(rms, x.double(), weight.double())
    for what, *results in zip(("out", "dx", "dw"), got, theirs, exact, strict=True):
        assert_accurate(*results, what)


@pytest.mark.parametrize("shape", [(64, 31), (9, 1000)])
@low_dtypes
def test_rmsnorm_backward_without_weight(device, dtype, shape):
    x = rand(shape, dtype, device)
    _, *got = grads(lambda x: gander.rmsnorm(x, eps=EPS), x)
    assert_accurate(*got, grads(rms, x)[1], grads(rms, x.double())[1])


@pytest.mark.parametrize("offset", [1.0, -0.25])
@pytest.mark.parametrize("shape", [(7, 31), (33, 256), (129, 1000), (5, 8192), (3, 50257)], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=lambda d: str(d)[6:])
def test_rmsnorm_weight_offset(device, dtype, shape, offset):
    """The same as adding the offset to the weight before the call, on the CPU with the same bits."""
    x, dout = rand(shape, dtype, device), rand(shape, dtype, device)
    weight = (torch.randint(-64, 64, shape[-1:], device=device) / 16).to(dtype)  # weight + offset is exact

    def results(weight, **options):
        x_, weight_ = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = gander.rmsnorm(x_, weight_, **options)
        out.backward(dout)
        fwd, _, rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True, **options)
        dx, dw, _, _ = gander.rmsnorm_bwd(x, weight, dout, rstd, **options)
        assert torch.equal(out, fwd) and torch.equal(x_.grad, dx) and torch.equal(weight_.grad, dw)
        return out.detach(), dx, dw

    for want, got in zip(results(weight + offset), results(weight, weight_offset=offset), strict=True):
        if device == "cpu":
            assert torch.equal(want, got)
        else:  # a weight offset uses the kernels for rows at any address
            torch.testing.assert_close(got, want)


def test_rmsnorm_without_weight_offset_keeps_negative_zeros(device):
    weight = torch.full((8,), -0.0, device=device)
    assert gander.rmsnorm(torch.ones(3, 8, device=device), weight, weight_offset=0.0).signbit().all()


@pytest.mark.parametrize("out_dtype", LOW, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("weight_dtype", LOW, ids=lambda d: str(d)[6:])
@low_dtypes
def test_rmsnorm_of_mixed_dtypes(device, dtype, weight_dtype, out_dtype):
    x, weight = rand((9, 1000), dtype, device), rand((1000,), weight_dtype, device)
    dout = rand((9, 1000), out_dtype, device)
    out = gander.rmsnorm(x, weight, out_dtype=out_dtype)
    exact = rms(x.double(), weight.double())
    assert out.dtype == out_dtype
    assert_accurate(out, rms(x.float(), weight.float()).to(out_dtype), exact)
    rstd = gander.rmsnorm_fwd(x, store_rstd=True)[2]
    dx, dw, db, dresidual = gander.rmsnorm_bwd(x, weight, dout, rstd)
    assert (db, dresidual) == (None, None)
    h = x.double() * rstd.double()[:, None]
    g = dout.double() * weight.double()
    exact_dx = (g - h * (g * h).mean(-1, keepdim=True)) * rstd.double()[:, None]
    exact_dw = (dout.double() * h).sum(0)
    wide = x.float().requires_grad_(), weight.float().requires_grad_()
    torch_dx, torch_dw = torch.autograd.grad(rms(*wide), wide, dout.float())
    assert_accurate(dx, torch_dx.to(dtype), exact_dx, "dx")
    assert_accurate(dw, torch_dw.to(weight_dtype), exact_dw, "dw")
    assert (dx.dtype, dw.dtype) == (dtype, weight_dtype)


@dtypes
def test_rmsnorm_eps_none_is_that_of_torch(served, dtype):
    """The values are so small that eps decides the result."""
    x = rand((16, 33), dtype, served, 1e-3)
    got, fwd = gander.rmsnorm(x, eps=None), gander.rmsnorm_fwd(x, eps=None)[0]
    assert_accurate(got, F.rms_norm(x, (33,)), F.rms_norm(x.double(), (33,), eps=accumulator_eps(dtype)))
    assert torch.equal(got, fwd)
    array = gander.rmsnorm(x.float().cpu().numpy(), eps=None)
    assert_same(gander.rmsnorm(x.float(), eps=None), torch.from_numpy(array).to(served))


def test_rmsnorm_out_dtype_by_name(device):
    x = rand((4, 33), torch.float32, device)
    for out_dtype in ("float16", "torch.float16", np.float16, np.dtype("float16"), torch.float16):
        assert gander.rmsnorm(x, out_dtype=out_dtype).dtype == torch.float16
        assert gander.rmsnorm_fwd(x, out_dtype=out_dtype, store_rstd=True)[0].dtype == torch.float16
    compiled = torch.compile(
        lambda x: gander.rmsnorm(x, out_dtype="bfloat16", eps=None), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), gander.rmsnorm(x, out_dtype=torch.bfloat16, eps=None))


@low_dtypes
def test_rmsnorm_special_values(device, dtype):
    x = torch.randn(6, 65, device=device).to(dtype)
    x[0, 3] = math.inf
    x[1, 5] = math.nan
    x[2] = 0
    x[3] *= torch.finfo(dtype).tiny
    x[4] *= 1e4
    weight = rand((65,), dtype, device)
    got = gander.rmsnorm(x, weight).cpu()
    x, weight = x.cpu(), weight.cpu()  # torch's CUDA kernel makes a whole row NaN if one element is infinite
    assert_accurate(got, rms(x, weight), rms(x.double(), weight.double()))


# ---- cross-entropy ----


def ce(x, target, **options):
    """torch's cross-entropy in float32 or wider, like gander's losses."""
    return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), target, **options)


def targets(shape, device):
    target = torch.randint(shape[-1], shape[:-1])
    target[..., -1:] = -100
    return target.to(device)


@shapes
@dtypes
def test_cross_entropy(served, dtype, shape):
    x, target = rand(shape, dtype, served, 3), targets(shape, served)
    for reduction in ("none", "mean", "sum"):
        got = gander.cross_entropy(x, target, reduction=reduction)
        exact = ce(x.double(), target, reduction=reduction)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_accurate(got, ce(x, target, reduction=reduction), exact, reduction)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@shapes
@dtypes
def test_cross_entropy_backward(served, dtype, shape, reduction):
    x, target = rand(shape, dtype, served, 3), targets(shape, served)
    _, got = grads(lambda x: gander.cross_entropy(x, target, reduction=reduction), x)
    _, theirs = grads(lambda x: ce(x, target, reduction=reduction), x)
    _, exact = grads(lambda x: ce(x, target, reduction=reduction), x.double())
    assert got.dtype == dtype
    assert_accurate(got, theirs, exact)


@shapes
@dtypes
def test_cross_entropy_fwd_and_bwd(served, dtype, shape):
    x, target = rand(shape, dtype, served, 3), targets(shape, served)
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    accumulated = x if dtype == torch.float64 else x.float()
    exact = x.double().logsumexp(-1)
    assert_accurate(loss, ce(x, target, reduction="none"), ce(x.double(), target, reduction="none"), "loss")
    assert_accurate(lse, accumulated.logsumexp(-1), exact, "lse", exact.abs() * 2**-24)
    leaf = x.double().requires_grad_()
    (exact_dx,) = torch.autograd.grad(ce(leaf, target, reduction="sum"), leaf)
    leaf = x.clone().requires_grad_()
    (torch_dx,) = torch.autograd.grad(ce(leaf, target, reduction="sum"), leaf)
    assert_accurate(dx, torch_dx, exact_dx, "dx")
    for dloss in (torch.ones_like(loss), torch.ones_like(loss[:1]).expand_as(loss), torch.ones_like(loss[0])):
        again = gander.cross_entropy_bwd(x, target, dloss, lse)
        # lse is a single number here. For large logits its rounding limits the accuracy of the probabilities.
        assert_accurate(again, torch_dx, exact_dx, "dx of cross_entropy_bwd", 2**-23 * float(lse.abs().max()))
    assert_same(gander.cross_entropy_fwd(x, target), loss)
    assert_same(gander.cross_entropy_fwd(x, target, return_lse=True)[1], lse)
    assert len(gander.cross_entropy_fwd(x, target, return_dx=True)) == 2


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@low_dtypes
def test_cross_entropy_class_weights(device, dtype, reduction):
    shape = (33, 127)
    x, target, weight = rand(shape, dtype, device), targets(shape, device), torch.rand(127, device=device)
    for class_weights in (weight, weight.to(torch.float16)):
        options = {"weight": class_weights.float(), "reduction": reduction}
        wide = {"weight": class_weights.double(), "reduction": reduction}
        got = grads(
            lambda x, w=class_weights: gander.cross_entropy(x, target, weight=w, reduction=reduction), x
        )
        theirs = grads(lambda x, o=options: ce(x, target, **o), x)
        exact = grads(lambda x, o=wide: ce(x, target, **o), x.double())
        for what, *results in zip(("loss", "dx"), got, theirs, exact, strict=True):
            assert_accurate(*results, what)


def test_cross_entropy_ignore_index(device):
    x, target = rand((50, 31), torch.float32, device), torch.randint(31, (50,), device=device)
    for ignored in (3, -1, 30):
        target[::7] = ignored
        got = grads(lambda x, i=ignored: gander.cross_entropy(x, target, ignore_index=i), x)
        theirs = grads(lambda x, i=ignored: ce(x, target, ignore_index=i), x)
        exact = grads(lambda x, i=ignored: ce(x, target, ignore_index=i), x.double())
        for what, *results in zip(("loss", "dx"), got, theirs, exact, strict=True):
            assert_accurate(*results, what)
        assert not got[1][::7].any()
        target.clamp_(min=0)


@pytest.mark.parametrize("n", [5, 500, 9000])
def test_ignored_rows_do_not_affect_the_mean(device, n):
    """Rows of the ignored class and of a class of weight 0 have no effect, even if their logits are NaN."""
    x, target = rand((20, n), torch.float32, device), torch.arange(20, device=device) % n
    target[3] = -100
    weight = torch.ones(n, device=device)
    weight[target[7]] = 0
    nothing = (target == -100) | (target == target[7])
    x[nothing] = torch.nan
    loss, dx = gander.cross_entropy_fwd(x, target, weight=weight, return_dx=True)
    assert not loss[nothing].any() and not dx[nothing].any()
    assert loss.isfinite().all() and dx.isfinite().all()
    leaf = x.requires_grad_()
    total = gander.cross_entropy(leaf, target, weight=weight)
    torch.testing.assert_close(total, loss[~nothing].mean())
    total.backward()
    assert not leaf.grad[nothing].any() and leaf.grad.isfinite().all()
    (leaf.grad,) = torch.autograd.grad(
        gander.cross_entropy(leaf, target, weight=weight, reduction="sum"), leaf
    )
    torch.testing.assert_close(leaf.grad, dx)


def test_cross_entropy_with_all_rows_ignored_follows_torch(device):
    x, target = rand((5, 31), torch.float32, device), torch.full((5,), -100, device=device)
    for reduction in ("none", "mean", "sum"):
        got = grads(lambda x, r=reduction: gander.cross_entropy(x, target, reduction=r), x)
        theirs = grads(lambda x, r=reduction: F.cross_entropy(x, target, reduction=r), x)
        torch.testing.assert_close(got, theirs, rtol=0, atol=0, equal_nan=True)


def test_cross_entropy_int32_targets(device):
    x, target = rand((50, 31), torch.float32, device), torch.randint(31, (50,), device=device)
    torch.testing.assert_close(
        gander.cross_entropy(x, target.int()), gander.cross_entropy(x, target), rtol=0, atol=0
    )


@low_dtypes
def test_cross_entropy_special_values(device, dtype):
    """-inf logits, rows that are all -inf, NaN and +inf give the same as the formula in float64."""
    x = torch.randn(8, 70, device=device).to(dtype)
    x[0, 3] = -math.inf
    x[1, :64] = -math.inf  # a whole tile
    x[2] = -math.inf
    x[3, 4] = math.nan
    x[4, 0] = math.inf
    x[5, 7] = -math.inf
    target = torch.tensor([1, 65, 1, 1, 1, 7, 2, 3], device=device)
    got = grads(lambda x: gander.cross_entropy(x, target, reduction="none"), x)
    theirs = grads(lambda x: ce(x, target, reduction="none"), x)
    exact = grads(lambda x: ce(x, target, reduction="none"), x.double())
    for what, *results in zip(("loss", "dx"), got, theirs, exact, strict=True):
        assert_accurate(*results, what)


@low_dtypes
def test_cross_entropy_of_large_logits(device, dtype):
    """Logits around 1e4. Backward is only accurate if maximum and logarithm are saved as two numbers."""
    x, target = (
        rand((64, 333), torch.float32, device).add(1e4).to(dtype),
        torch.randint(333, (64,), device=device),
    )
    got = grads(lambda x: gander.cross_entropy(x, target, reduction="none"), x)
    theirs = grads(lambda x: ce(x, target, reduction="none"), x)
    exact = grads(lambda x: ce(x, target, reduction="none"), x.double())
    for what, *results in zip(("loss", "dx"), got, theirs, exact, strict=True):
        assert_accurate(*results, what)


def test_targets_out_of_range_are_never_used_as_an_index(device):
    x = rand((6, 31), torch.float32, device)
    target = torch.tensor([0, 31, -1, 2**31, -(2**40), 30], device=device)
    loss, dx = grads(lambda x: gander.cross_entropy(x, target, reduction="none"), x)
    bad = torch.tensor([False, True, True, True, True, False], device=device)
    assert torch.equal(loss.isnan(), bad)
    assert torch.equal(dx.isnan(), bad[:, None].expand_as(dx))
    leaf = x.clone().requires_grad_()
    mean = gander.cross_entropy(leaf, target)
    mean.backward()
    assert mean.isnan()
    assert leaf.grad.isnan().all()


# ---- layouts ----


# ---- logsumexp ----


@shapes
@dtypes
def test_logsumexp(served, dtype, shape):
    x = rand(shape, dtype, served)
    wide = torch.promote_types(dtype, torch.float32)
    want, want_dx = grads(lambda x: torch.logsumexp(x.to(torch.float64), -1).to(wide), x)
    got, dx = grads(gander.logsumexp, x)
    assert got.dtype == wide and dx.dtype == dtype
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dx, want_dx)


def test_logsumexp_special_values(device):
    inf = float("inf")
    x = torch.tensor([[-inf, -inf], [-inf, 2.0], [float("nan"), 1.0], [1e4, 1e4]], device=device)
    torch.testing.assert_close(gander.logsumexp(x), torch.logsumexp(x, -1), equal_nan=True)


@pytest.mark.parametrize("columns", [1, 2, 33, 64, 1000, 4096, 5001, 140000])
@dtypes
def test_logsumexp_of_infinities(served, dtype, columns):
    """A row with +inf gives +inf, one with a NaN as well NaN. The gradient is NaN at +inf, else 0."""
    x = rand((9, columns), dtype, served)
    inf, nan = float("inf"), float("nan")
    for row, values in enumerate(((inf,), (inf, inf), (-inf, inf), (inf, nan), (nan, inf), (-inf,), (nan,))):
        x[row, -len(values) :] = torch.tensor(values[:columns], dtype=dtype)
    x[5] = -inf
    x[7] = inf
    want, want_dx = grads(lambda x: torch.logsumexp(x.to(torch.float64), -1), x)
    got, dx = grads(gander.logsumexp, x)
    torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, want_dx, equal_nan=True)
    target = torch.zeros(9, dtype=torch.int64, device=x.device)
    loss, dx = grads(lambda x: gander.cross_entropy(x, target, reduction="none"), x)
    assert loss[[0, 1, 2, 3, 4, 7]].isnan().all() and dx[[0, 1, 2, 3, 4, 7]].isnan().all()


def layouts(dtype, device, n=67):
    """Views of shape (..., n) whose rows are not contiguous."""
    base = rand((5, 4, 2 * n + 1), dtype, device)
    return {
        "sliced": base[..., :n],
        "offset": base[..., 1 : n + 1],
        "row stride": base[:, 1, 3 : n + 3],
        "every other": base[..., ::2][..., :n],
        "transposed": rand((n, 9), dtype, device).t(),
        "permuted": rand((4, n, 5), dtype, device).permute(2, 0, 1),
        "leading dimensions swapped": rand((4, 5, n), dtype, device).transpose(0, 1),
        "expanded rows": rand((1, n), dtype, device).expand(6, n),
        "expanded columns": rand((6, 1), dtype, device).expand(6, n),
        "one dimension": rand((n,), dtype, device),
        "four dimensions": rand((2, 1, 3, n), dtype, device),
    }


@pytest.mark.parametrize("layout", layouts(torch.float32, "cpu"))
@low_dtypes
def test_layouts_give_the_bits_of_contiguous_rows(device, dtype, layout):
    x = layouts(dtype, device)[layout]
    compact = x.clone(memory_format=torch.contiguous_format)
    weight = rand((2, x.shape[-1]), dtype, device).t()[:, 0]  # strided
    target = torch.randint(x.shape[-1], x.shape[:-1], device=device)
    strided_target = torch.stack([target, target], -1)[..., 0]

    def results(x, weight, target, dout):
        leaf, leaf_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = gander.softmax(leaf)
        out = gander.rmsnorm(leaf, leaf_weight)
        loss = gander.cross_entropy(leaf, target, reduction="none")
        yield from (y, out, loss)
        yield from torch.autograd.grad(y, leaf, dout)
        yield from torch.autograd.grad(out, (leaf, leaf_weight), dout)
        yield from torch.autograd.grad(loss, leaf, dout[..., 0].float())
        yield from gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)

    # The upstream gradient has the same layout.
    for got, expected in zip(
        results(x, weight, strided_target, x),
        results(compact, weight.contiguous(), target, compact),
        strict=True,
    ):
        assert got.is_contiguous()
        assert_same(got, expected)


@low_dtypes
def test_expanded_gradients(device, dtype):
    """.sum().backward() passes a gradient whose strides are all zero."""
    x, weight = rand((9, 67), dtype, device), rand((67,), dtype, device)
    target = torch.randint(67, (9,), device=device)
    for function in (
        gander.softmax,
        lambda x: gander.rmsnorm(x, weight),
        lambda x: gander.cross_entropy(x, target, reduction="none"),
    ):
        leaf = x.clone().requires_grad_()
        function(leaf).sum().backward()
        other = x.clone().requires_grad_()
        out = function(other)
        out.backward(torch.ones_like(out))
        assert torch.equal(leaf.grad, other.grad)


@pytest.mark.parametrize("layout", ["sliced", "row stride", "transposed", "permuted", "four dimensions"])
def test_in_place_gradients_over_any_layout(device, layout):
    x = layouts(torch.float32, device)[layout]
    target = torch.randint(x.shape[-1], x.shape[:-1], device=device)
    expected_loss, lse, expected = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    y = layouts(torch.float32, device)[layout].copy_(x)
    version = y._version
    loss, dx = gander.cross_entropy_fwd(y, target, return_dx=True, inplace_backward=True)
    assert dx is y
    assert y._version > version
    assert torch.equal(y, expected)
    assert torch.equal(loss, expected_loss)
    y.copy_(x)
    version = y._version
    dx = gander.cross_entropy_bwd(y, target, torch.ones_like(loss), lse, inplace_backward=True)
    assert dx is y
    assert y._version > version
    assert torch.equal(y, gander.cross_entropy_bwd(x, target, torch.ones_like(loss), lse))


@pytest.mark.parametrize("strides", [(0, 1), (1, 2), (1, 1), (7, 0)], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_in_place_gradients_over_shared_memory_are_refused(device, strides, mode):
    """Regression test: with strides (1, 2) the gradient was wrong, because elements were written
    repeatedly."""
    with mode():
        memory = torch.arange(100.0, device=device)
        x, target = memory.as_strided((4, 7), strides), torch.zeros(4, dtype=torch.long, device=device)
        with pytest.raises(ValueError, match=r"x has (rows|stride) .*; make it contiguous"):
            gander.cross_entropy_fwd(x, target, return_dx=True, inplace_backward=True)
        assert torch.equal(memory, torch.arange(100.0, device=device))


@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7)])
@low_dtypes
def test_no_rows(device, dtype, shape):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.ones(7, device=device, dtype=dtype)
    target = torch.empty(shape[:-1], dtype=torch.long, device=device)
    y, dx = grads(gander.softmax, x)
    assert y.shape == dx.shape == x.shape
    out, dx, dw = grads(gander.rmsnorm, x, weight)
    assert out.shape == dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(weight))
    for reduction in ("none", "mean", "sum"):
        got = grads(lambda x, r=reduction: gander.cross_entropy(x, target, reduction=r), x)
        theirs = grads(
            lambda x, r=reduction: F.cross_entropy(
                x.float().movedim(-1, min(1, x.ndim - 1)), target, reduction=r
            ),
            x,
        )
        torch.testing.assert_close(got[0].flatten(), theirs[0].flatten(), equal_nan=True)
        assert got[1].shape == x.shape
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    assert loss.shape == lse.shape == shape[:-1]
    assert dx.shape == x.shape


@low_dtypes
def test_the_same_bits_on_every_run(device, dtype):
    x, weight = rand((257, 1003), dtype, device), rand((1003,), dtype, device)
    target = torch.randint(1003, (257,), device=device)

    def run():
        return (
            *grads(gander.softmax, x),
            *grads(gander.rmsnorm, x, weight),
            *grads(lambda x: gander.cross_entropy(x, target), x),
        )

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_gradients_by_finite_differences():
    """In float64, gradcheck's central differences with a step of 1e-6. Tolerances: 1e-5 relative, 1e-7
    absolute."""
    x = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, dtype=torch.float64, requires_grad=True)
    classes = torch.rand(11, dtype=torch.float64)
    target = torch.tensor([0, 10, -100, 4, 4])
    options = {"eps": 1e-6, "atol": 1e-7, "rtol": 1e-5}
    for softmax, rmsnorm in (
        (gander.softmax, gander.rmsnorm),
        (torch.ops.gander.softmax, torch.ops.gander.rmsnorm),
    ):
        assert torch.autograd.gradcheck(softmax, (x,), **options)
        assert torch.autograd.gradcheck(rmsnorm, (x, weight), **options)
        assert torch.autograd.gradcheck(rmsnorm, (x,), **options)
    for reduction in ("none", "mean", "sum"):
        for class_weights in (None, classes):
            assert torch.autograd.gradcheck(
                lambda x, w=class_weights, r=reduction: gander.cross_entropy(
                    x, target, weight=w, reduction=r
                ),
                (x,),
                **options,
            )
    assert torch.autograd.gradcheck(lambda x: torch.ops.gander.cross_entropy(x, target), (x,), **options)
