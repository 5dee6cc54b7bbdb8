"""RMSNorm and LayerNorm with bias, residual, prenorm and dtypes. Results and gradients equal those of torch's
operators, in every combination."""

import itertools

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from demands import named
from tolerance import assert_accurate
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
NORMS = {"rmsnorm": gander.rmsnorm, "layernorm": gander.layernorm}


@pytest.fixture(params=NORMS)
def name(request):
    return request.param


def reference(name, x, weight=None, bias=None, residual=None, eps=1e-6, offset=0.0):
    """The norm and the sum that it normalizes, in the widest dtype of the operands."""
    h = x if residual is None else x + residual
    if weight is not None:
        weight = weight + offset
    if name == "layernorm":
        return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h
    y = F.rms_norm(h, h.shape[-1:], weight, eps)
    return (y if bias is None else y + bias), h


def operands(device="cpu", dtypes=(SINGLE,) * 4, shape=(2, 5, 24)):
    """x, weight, bias and residual."""
    shapes = shape, shape[-1:], shape[-1:], shape
    return [torch.randn(shape, device=device).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def leaves(tensors, wanted):
    return [
        None if t is None else t.clone().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)
    ]


def of(results, used, upstream):
    """The scalar whose gradient is taken: of the results that are used."""
    return sum((r * u).sum() for r, u, use in zip(results, upstream, used, strict=True) if use)


# ---- Every combination ----


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("prenorm", [False, True])
def test_every_combination(name, given, prenorm, device):
    """Of what is given, returned, used, and requires a gradient."""
    x, *others = operands(device)
    tensors = [x, *(t if is_given else None for t, is_given in zip(others, given, strict=True))]
    upstream = torch.randn_like(x), torch.randn_like(x)
    for wanted in itertools.product([False, True], repeat=4):
        wanted = [want and t is not None for want, t in zip(wanted, tensors, strict=True)]
        for used in [(1, 0), (0, 1), (1, 1)] if prenorm else [(1, 0)]:
            mine = leaves(tensors, wanted)
            theirs = leaves([None if t is None else t.double() for t in tensors], wanted)
            got = NORMS[name](*mine, prenorm=prenorm)
            got, want = got if prenorm else (got, None), reference(name, *theirs)
            for a, b in zip(got, want, strict=True):
                if a is not None:
                    torch.testing.assert_close(a, b.float())
            for results in got, want:  # gander's sum has a gradient if anything has
                loss = of(results, used, upstream)
                if loss.requires_grad:
                    loss.backward()
            for a, b, want_gradient in zip(mine, theirs, wanted, strict=True):
                if want_gradient:
                    exact = torch.zeros_like(a) if b.grad is None else b.grad.float()
                    grad = torch.zeros_like(a) if a.grad is None else a.grad
                    torch.testing.assert_close(grad, exact, atol=2e-5, rtol=1e-4)


def exact_gradients(name, tensors, stored, upstream):
    """The gradients of x, weight, bias and residual in float64. The statistics are those of the sum, which
    backward itself reads as it was stored."""
    x, weight, _, residual = (t.double() for t in tensors)
    dout, dsum = (u.double() for u in upstream)
    h, center = x + residual, name == "layernorm"
    mean = h.mean(-1, keepdim=True) * center
    rstd = ((h - mean).square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normed, g = (stored.double() - mean) * rstd, dout * weight
    dx = g - center * g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
    dx = dx * rstd + dsum
    return dx, (dout * normed).sum(0), dout.sum(0), dx


@pytest.mark.parametrize("path", ["eager", "compiled", "checkpoint"])
def test_a_narrower_residual(name, path, device):
    """Without prenorm nobody sees the sum, and its gradient is that of the exact one."""
    norm = {
        "eager": NORMS[name],
        "compiled": torch.compile(NORMS[name], backend="aot_eager", fullgraph=True),
        "checkpoint": lambda *t: checkpoint(NORMS[name], *t, use_reentrant=False),
    }[path]
    x, weight, bias, residual = operands(device, (SINGLE, SINGLE, SINGLE, BRAIN), (8, 64))
    tensors = 10 + 0.05 * x, weight, bias, 0.05 * residual
    mine, theirs = leaves(tensors, [True] * 4), leaves([t.double() for t in tensors], [True] * 4)
    upstream = torch.randn_like(x)
    norm(*mine).backward(upstream)
    reference(name, *theirs)[0].backward(upstream.double())
    for got, want in zip(mine, theirs, strict=True):
        assert got.grad.dtype == got.dtype
        bound = (1e-2 if got.dtype == BRAIN else 1e-4) * float(want.grad.abs().max())
        torch.testing.assert_close(got.grad.double(), want.grad, atol=bound, rtol=0)


DTYPES = [
    (BRAIN, BRAIN, BRAIN, BRAIN),
    (HALF, SINGLE, SINGLE, HALF),
    (BRAIN, SINGLE, HALF, SINGLE),
    (SINGLE, BRAIN, SINGLE, HALF),
    (SINGLE, HALF, BRAIN, BRAIN),
]


@pytest.mark.parametrize("residual_dtype", [None, HALF, SINGLE])
@pytest.mark.parametrize("out_dtype", [None, BRAIN, SINGLE])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_dtypes(name, dtypes, out_dtype, residual_dtype, device):
    """Gradients have the dtypes of their tensors, and the accuracy that these allow."""
    tensors = operands(device, dtypes, (64, 128))
    mine = leaves(tensors, [True] * 4)
    y, h = NORMS[name](*mine, out_dtype=out_dtype, residual_dtype=residual_dtype, prenorm=True)
    assert y.dtype == (out_dtype or dtypes[0])
    x, weight, bias, residual = tensors
    assert h.dtype == (residual_dtype or ((x + residual).dtype if name == "layernorm" else residual.dtype))
    if name == "layernorm":  # its norm is that of the rounded sum
        tensors = (x.float() + residual.float()).to(h.dtype), weight, bias, torch.zeros_like(residual)
    theirs = reference(name, *(t.float() for t in tensors))
    for a, b, c in zip((y, h), theirs, reference(name, *(t.double() for t in tensors)), strict=True):
        assert_accurate(a.detach(), b.to(a.dtype), c)
    upstream = torch.randn_like(y), torch.randn_like(h)
    torch.autograd.backward((y, h), upstream)
    want = exact_gradients(name, tensors, h.detach(), upstream)
    for leaf, exact in zip(mine, want, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        rtol, atol = 2 * torch.finfo(leaf.dtype).eps, 3e-6 * float(exact.abs().max())
        torch.testing.assert_close(leaf.grad.double(), exact, rtol=rtol, atol=atol)


def test_float64(name):
    tensors = operands(dtypes=(DOUBLE,) * 4)
    mine, theirs = leaves(tensors, [True] * 4), leaves(tensors, [True] * 4)
    got, want = NORMS[name](*mine, prenorm=True), reference(name, *theirs)
    (got[0] * got[1]).sum().backward()
    (want[0] * want[1]).sum().backward()
    for a, b in zip([*got, *(t.grad for t in mine)], [*want, *(t.grad for t in theirs)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# ---- Accuracy ----


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("columns", [1, 33, 1000])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_layernorm_is_accurate(dtype, columns, mean, device):
    if mean and dtype != SINGLE:
        pytest.skip("16-bit numbers around 1e4 are whole numbers or coarser")
    x = (torch.randn(50, columns, device=device) + mean).to(dtype)
    weight, bias, dout = (torch.randn_like(x[0]), torch.randn_like(x[0]), torch.randn_like(x))
    run = {}
    for key, function, to in (
        ("mine", gander.layernorm, lambda t: t),
        ("theirs", lambda *t, eps: F.layer_norm(t[0], (columns,), *t[1:], eps), lambda t: t),
        ("exact", lambda *t, eps: F.layer_norm(t[0], (columns,), *t[1:], eps), lambda t: t.double()),
    ):
        given = [to(t).clone().requires_grad_() for t in (x, weight, bias)]
        y = function(*given, eps=1e-5)
        y.backward(to(dout))
        run[key] = [y.detach(), *(t.grad for t in given)]
    for what, *results in zip(("y", "dx", "dw", "db"), run["mine"], run["theirs"], run["exact"], strict=True):
        # dx of a single column is 0, but for the rounding error of g times rstd, which is 1 / sqrt(eps)
        extra = 2.0**-23 / 1e-5**0.5 * float(dout.abs().max()) if columns == 1 and what == "dx" else 0.0
        assert_accurate(*results, what, extra=extra)


@pytest.mark.parametrize("columns", [2, 3, 8, 64, 768, 5000])
@pytest.mark.parametrize("gap", [1e-3, 1e-2])
def test_layernorm_of_close_elements(columns, gap, device):
    """Backward has as many digits as forward where elements are close to each other beside their mean. The
    mean is saved in float32, and rounding it is up to 1e-4 of what they deviate from it."""
    x = torch.randn(64, 1, device=device) + gap * torch.randn(64, columns, device=device)
    weight, bias, dout = (torch.randn_like(t) for t in (x[0], x[0], x))
    mine, exact = (
        leaves((x, weight, bias), [True] * 3),
        leaves([t.double() for t in (x, weight, bias)], [True] * 3),
    )
    y, want = gander.layernorm(*mine), F.layer_norm(exact[0], (columns,), *exact[1:], 1e-6)
    y.backward(dout)
    want.backward(dout.double())
    results = [(y, want), *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True))]
    for what, (got, expected) in zip(("y", "dx", "dw", "db"), results, strict=True):
        assert (got - expected).abs().max() <= 2**-20 * expected.abs().max(), what


def test_the_sum_is_not_rounded(device):
    """The norm is of x + residual in float32, though both have 16 bits and residual_out too."""
    x, weight, _, residual = operands(device, (BRAIN,) * 4, (16, 256))
    y, h = gander.rmsnorm(x, weight, residual=residual, out_dtype=SINGLE, prenorm=True)
    want, total = reference("rmsnorm", x.float(), weight.float(), None, residual.float())
    torch.testing.assert_close(y, want)
    assert torch.equal(h, total.bfloat16())
    assert not torch.allclose(y, reference("rmsnorm", h.float(), weight.float())[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtypes",
    [
        *((HALF, HALF, None), (BRAIN, BRAIN, None), (HALF, BRAIN, None), (SINGLE, BRAIN, None)),
        *((HALF, HALF, SINGLE), (HALF, HALF, BRAIN), (SINGLE, BRAIN, BRAIN), (BRAIN, SINGLE, HALF)),
    ],
    ids=str,
)
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("columns", [256, 257, 5000])
def test_layernorm_rounds_the_sum_that_backward_reads(dtypes, prenorm, columns, device):
    """Rows whose elements differ by less than x + residual is rounded to: the gradient has to be that of the
    row that backward reads, or it is off by factors of hundreds."""
    spread = torch.tensor([0.0, 0.001, 0.01, 0.1, 1.0, 30.0], device=device).repeat_interleave(4)[:, None]
    x = (0.3 + spread * torch.randn(24, columns, device=device)).to(dtypes[0])
    residual = torch.full_like(x, 100.0, dtype=dtypes[1])
    weight, bias = torch.rand(columns, device=device) + 0.5, torch.randn(columns, device=device)
    mine = leaves((x, weight, bias, residual), [True] * 4)
    y = gander.layernorm(*mine, eps=1e-5, residual_dtype=dtypes[2], out_dtype=dtypes[0], prenorm=prenorm)
    y, h = y if prenorm else (y, None)
    total = (x.float() + residual.float()).to(dtypes[2] or (x + residual).dtype)
    theirs = [t.double().requires_grad_() for t in (total, weight, bias)]
    want = F.layer_norm(theirs[0], (columns,), *theirs[1:], 1e-5)
    assert h is None or torch.equal(h, total)
    # A unit in the last place, and what rounding a mean of 100 to float32 is beside elements 0.003 apart.
    torch.testing.assert_close(y, want.to(y.dtype), rtol=8e-3, atol=5e-3)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    want.backward(upstream.double())
    for got, exact in zip(mine, [*theirs, theirs[0]], strict=True):
        rows = exact.grad.abs().amax(-1, keepdim=True)  # each row has a scale of its own
        assert ((got.grad - exact.grad).abs() <= 1e-2 * rows + 1e-5).all()
    with torch.no_grad():
        again = gander.layernorm(*mine, eps=1e-5, residual_dtype=dtypes[2], prenorm=prenorm)
        assert torch.equal(again[0] if prenorm else again, y)


# ---- What is returned ----


def test_prenorm_without_a_residual(name, device):
    x, weight, bias, _ = operands(device)
    norm = NORMS[name]
    for options in ({}, {"residual_dtype": SINGLE}, {"residual_dtype": "float32"}):
        y, same = norm(x, weight, prenorm=True, **options)
        assert same is x
        assert torch.equal(y, norm(x, weight))
    leaf = x.clone().requires_grad_()
    y, half = norm(leaf, weight, bias, residual_dtype=HALF, prenorm=True)
    assert torch.equal(half, x.half())
    normed = half.float() if name == "layernorm" else x  # layernorm's h is residual_out
    torch.testing.assert_close(y, norm(normed, weight, bias))
    (y.sum() + half.sum()).backward()
    assert leaf.grad.dtype == SINGLE
    other = x.clone().requires_grad_()
    y, h = reference(name, other, weight, bias)
    (y.sum() + h.sum()).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-3, atol=1e-3)


def test_rmsnorm_fwd_and_bwd(device):
    x, weight, bias, residual = operands(device, (BRAIN, SINGLE, HALF, SINGLE))
    out, h, rstd = gander.rmsnorm_fwd(x, weight, bias, residual, store_rstd=True, weight_offset=1.0)
    want, total = reference("rmsnorm", x.float(), weight, bias.float(), residual, offset=1.0)
    assert torch.equal(h, total)
    assert (out.dtype, rstd.shape) == (BRAIN, x.shape[:-1])
    torch.testing.assert_close(out, want.bfloat16())
    torch.testing.assert_close(rstd, total.square().mean(-1).add(1e-6).rsqrt())
    assert torch.equal(gander.rmsnorm_fwd(x, weight, bias, residual, weight_offset=1.0)[0], out)
    assert gander.rmsnorm_fwd(x, weight, bias)[1] is x
    assert gander.rmsnorm_fwd(x, weight, bias, store_rstd=True)[2].dtype == SINGLE
    assert gander.rmsnorm_fwd(x, residual_dtype=HALF)[1].dtype == HALF

    dout, dh = torch.randn_like(out), torch.randn_like(x)
    dx, dw, db, dresidual = gander.rmsnorm_bwd(h, weight, dout, rstd, dh, True, True, weight_offset=1.0)
    leaf, *parameters = leaves([h, weight, bias.float()], [True] * 3)
    torch.autograd.backward(
        (reference("rmsnorm", leaf, *parameters, offset=1.0)[0], leaf), (dout.float(), dh.float())
    )
    assert [t.dtype for t in (dx, dw, db, dresidual)] == [SINGLE, SINGLE, SINGLE, BRAIN]
    for a, b in zip((dx, dw, db), (leaf, *parameters), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(dresidual, dx.bfloat16())


def test_what_rmsnorm_bwd_returns(device):
    """dresidual is dx itself if their dtypes agree, and db float32 without a weight."""
    x, weight, _, dh = operands(device, (HALF,) * 4)
    rstd = torch.rand(2, 5, device=device)
    dx, dw, db, dresidual = gander.rmsnorm_bwd(x, weight, x, rstd, dh, has_residual=True)
    assert dresidual is dx
    assert (dw.dtype, db) == (HALF, None)
    dx, dw, db, dresidual = gander.rmsnorm_bwd(x, None, x, rstd, has_bias=True)
    assert (dw, db.dtype, dresidual) == (None, SINGLE, None)
    torch.testing.assert_close(db, x.float().sum((0, 1)))
    assert gander.rmsnorm_bwd(x, weight, x, rstd, has_bias=True)[2].dtype == HALF
    dx, _, _, dresidual = gander.rmsnorm_bwd(x, weight, x, rstd, has_residual=True)
    assert dresidual is dx
    assert gander.rmsnorm_bwd(x, weight, x, rstd, dh)[3] is None


def test_layernorm_fwd_and_bwd(device):
    x, weight, bias, _ = operands(device)
    out, rstd, mean = gander.layernorm_fwd(x, weight, bias, return_rstd=True, return_mean=True)
    assert torch.equal(out, gander.layernorm_fwd(x, weight, bias))
    torch.testing.assert_close(mean, x.mean(-1))
    torch.testing.assert_close(rstd, x.var(-1, correction=0).add(1e-6).rsqrt())
    only = (
        gander.layernorm_fwd(x, weight, return_rstd=True),
        gander.layernorm_fwd(x, weight, return_mean=True),
    )
    assert torch.equal(only[0][1], rstd)
    assert torch.equal(only[1][1], mean)
    tensors = leaves([x, weight, bias], [True] * 3)
    reference("layernorm", *tensors)[0].backward(out)
    got = gander.layernorm_bwd(x, weight, out, rstd, mean)
    for a, b in zip(got, tensors, strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-4, atol=1e-4)
    dx, dw, db = gander.layernorm_bwd(x, None, out, rstd, mean, has_bias=False)
    assert (dw, db) == (None, None)
    assert dx.shape == x.shape


def test_arrays():
    x, weight, bias, residual = (t.numpy() for t in operands())
    for name, norm in NORMS.items():
        y, h = norm(x, weight, bias, residual, residual_dtype=np.float16, prenorm=True)
        total = torch.tensor(x) + torch.tensor(residual)
        np.testing.assert_array_equal(h, total.half())
        normed = total.half().float() if name == "layernorm" else total  # layernorm's h is residual_out
        want, _ = reference(name, normed, *map(torch.tensor, (weight, bias)))
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
        assert norm(x, weight, bias, residual_dtype="float32", prenorm=True)[1] is x
        assert type(norm(x, None, bias)) is np.ndarray
    out, rstd, mean = gander.layernorm_fwd(x, weight, bias, return_rstd=True, return_mean=True)
    dx, dw, db = gander.layernorm_bwd(x, weight, out, rstd, mean)
    assert (dx.shape, dw.shape, db.dtype) == (x.shape, weight.shape, np.float32)
    h, rstd = gander.rmsnorm_fwd(x, residual=residual, store_rstd=True)[1:]
    dx, dw, db, dresidual = gander.rmsnorm_bwd(h, None, x, rstd, x.astype(np.float16), has_bias=True)
    assert (dw, db.dtype, dresidual.dtype) == (None, np.float32, np.float16)


# ---- Special cases ----


def test_no_rows(name, device):
    tensors = operands(device, shape=(0, 8))
    mine = leaves(tensors, [True] * 4)
    y, h = NORMS[name](*mine, prenorm=True)
    (y.sum() + h.sum()).backward()
    assert [t.grad.shape for t in mine] == [t.shape for t in tensors]
    assert not mine[1].grad.any()
    assert not mine[2].grad.any()


def test_backward_again_with_expanded_gradients(name, device):
    mine, theirs = (leaves(operands(device), [True] * 4) for _ in range(2))
    for a, b in zip(mine, theirs, strict=True):
        b.data.copy_(a.data)
    for tensors, norm in (mine, NORMS[name]), (theirs, lambda *t, prenorm: reference(name, *t)):
        y, h = norm(*tensors, prenorm=True)
        for _ in range(2):
            (y.sum() * 3 + h.sum()).backward(retain_graph=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=2e-5)


def test_strided_operands(name, device):
    x, weight, bias, residual = operands(device, shape=(6, 4, 24))
    want = NORMS[name](x, weight, bias, residual)
    columns = torch.stack([x, x], -1)[..., 0], torch.stack([residual] * 2, -1)[..., 1]
    swapped = x.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.stack([weight, bias], -1)
    assert torch.equal(NORMS[name](columns[0], wide[:, 0], wide[:, 1], columns[1]), want)
    assert torch.equal(NORMS[name](swapped, weight, bias, residual), want)
    expanded = residual[:1].expand_as(residual)
    assert torch.equal(
        NORMS[name](x, weight, bias, expanded), NORMS[name](x, weight, bias, expanded.contiguous())
    )


def test_the_sum_is_protected(name):
    """Backward reads the sum that was returned. Changing it raises torch's error."""
    x, weight, _, residual = leaves(operands(), [True] * 4)
    y, h = NORMS[name](x, weight, residual=residual, prenorm=True)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_residual_stream(name, device):
    """Layers that pass residual_out on, as in a transformer: the gradients of both results are added."""
    x, weight, bias, residual = operands(device)

    def stream(norm, x, residual):
        for _ in range(3):
            y, residual = norm(x, weight, bias, residual)
            x = y.tanh()
        return x * residual

    grads = []
    for norm in (lambda *t: NORMS[name](*t, prenorm=True), lambda *t: reference(name, *t)):
        tensors = leaves([x, residual], [True] * 2)
        stream(norm, *tensors).sum().backward()
        grads.append([t.grad for t in tensors])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # a residual that is x itself gets both gradients
    leaf = x.clone().requires_grad_()
    y, h = NORMS[name](leaf, weight, residual=leaf, prenorm=True)
    (y * h).sum().backward()
    other = x.clone().requires_grad_()
    y, h = reference(name, other, weight, residual=other)
    (y * h).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_the_sum_is_not_written_without_a_gradient(name):
    """Without prenorm and a gradient, residual_out is neither computed nor returned."""
    x, weight, _, residual = operands()
    operator = getattr(torch.ops.gander, name).default
    asked, sums = [], []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if func.namespace == "gander":
                assert func == operator
                asked.append(named(name, args, kwargs)["needs_residual_out"])
                sums.append(results[1].shape)
            return results

    with Record():
        NORMS[name](x, weight, residual=residual)
        with torch.no_grad():
            NORMS[name](x.requires_grad_(), weight, residual=residual)
        NORMS[name](x, weight, residual=residual)
    assert asked == [False, False, True]
    assert sums == [(0,), (0,), x.shape]


@pytest.mark.parametrize("how", ["eager", "leaf", "compiled", "vmap"])
def test_results_that_are_not_asked_for(how, device):
    """They are None, also where the dispatcher serves the call, whose operators return empty tensors."""
    x, dout = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, 8, device=device)
    x.requires_grad_(how == "leaf")
    rstd, mean = torch.ones(2, 3, device=device), torch.zeros(2, 3, device=device)

    def results(x, dout, rstd, mean):
        forward = gander.rmsnorm_fwd(x)
        backward = (
            gander.rmsnorm_bwd(x, None, dout, rstd),
            gander.layernorm_bwd(x, None, dout, rstd, mean, False),
        )
        nothing = forward[2], *backward[0][1:], *backward[1][1:]
        assert nothing == (None,) * 6
        return forward[0]

    function = {"compiled": lambda f: torch.compile(f, backend="eager", fullgraph=True), "vmap": torch.vmap}
    function.get(how, lambda f: f)(results)(x, dout, rstd, mean)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtypes", [(SINGLE, torch.float64), (torch.float64, SINGLE)])
def test_a_residual_dtype_that_is_not_served_is_refused(dtypes, with_residual, grad):
    """Also where nobody asks for residual_out."""
    x = torch.randn(4, 6, dtype=dtypes[0], requires_grad=grad)
    residual = torch.randn(4, 6, dtype=dtypes[0]) if with_residual else None
    for norm in gander.rmsnorm, gander.layernorm:
        with pytest.raises(TypeError, match=r"^(rms|layer)norm_forward: residual_dtype is float"):
            norm(x, residual=residual, residual_dtype=dtypes[1])
