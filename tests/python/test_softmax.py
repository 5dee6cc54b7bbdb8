"""Softmax and log-softmax with a dimension, a dtype, a scale, masks and causal; logsumexp over dimensions.
Results and gradients equal those of torch's operators, in every combination."""

import functools
import itertools
import math

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gander._table import arguments
from tolerance import assert_accurate
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
FUNCTIONS = {"softmax": gander.softmax, "log_softmax": gander.log_softmax}
THEIRS = {"softmax": F.softmax, "log_softmax": F.log_softmax}
SHAPE = B, H, Q, N = 2, 3, 5, 24


@pytest.fixture(params=FUNCTIONS)
def name(request):
    return request.param


def masked_out(x, mask=None, causal=False):
    """Which elements of x are masked."""
    out = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None:
        out = out | (mask == (0 if mask.dtype in (torch.bool, torch.uint8) else -math.inf))
    if causal:
        out = out | ~torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return out


def reference(name, x, scale=None, mask=None, causal=False, masked="nan"):
    """With torch's operators. Masked rows get no gradient: torch's is NaN."""
    out = masked_out(x, mask, causal)
    h = torch.where(out, 0, x) * (1 if scale is None else scale)
    if mask is not None and mask.dtype.is_floating_point:
        h = h + torch.where(out, 0, mask)
    whole = out.all(-1, keepdim=True)
    h = h.masked_fill(out & ~whole, -math.inf)
    y = THEIRS[name](h, -1)
    empty = math.nan if masked == "nan" else -math.inf if name == "log_softmax" else 0.0
    return torch.where(whole, empty, y)


def masks(device="cpu", dtype=SINGLE):
    """Masks of (B, H, Q, N). One row of most is masked whole."""
    some = torch.rand(B, 1, Q, N, device=device) > 0.3
    some[0, 0, 1] = False
    added = torch.randn(H, Q, N, device=device).masked_fill(some[0], -math.inf).to(dtype)
    return {
        "none": None,
        "bool": some,
        "uint8": some.to(torch.uint8) * 2,
        "keys": some[:, :, :1],
        "queries": some[..., :1],
        "one": torch.tensor(True, device=device),
        "added": added,
        "bfloat16": added.bfloat16() if dtype != DOUBLE else added,
    }


MASKS = list(masks())


@pytest.fixture(params=MASKS)
def mask(request, device):
    return masks(device)[request.param]


def gradient(function, x, upstream):
    """y and dx. The gradient of elements that are not finite is that of the others."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(upstream.to(y.dtype))
    return y.detach(), x.grad


# ---- Every combination ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["nan", "zero"])
@pytest.mark.parametrize("scale", [None, -0.7, 2])
def test_every_combination(name, mask, causal, masked, scale, device):
    x = torch.randn(SHAPE, device=device)
    upstream = torch.randn_like(x)
    options = {"scale": scale, "mask": mask, "causal": causal, "masked": masked}
    out = masked_out(x, mask, causal)
    want, dx = gradient(lambda x: reference(name, x, **options), x, torch.where(out, 0, upstream))
    poison = torch.where(out, math.nan, x), torch.where(out, math.nan, upstream)
    got, grad = gradient(lambda x: FUNCTIONS[name](x, **options), *poison)
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(grad, dx, atol=1e-5, rtol=1e-4)
    assert not grad[out].any()
    with torch.no_grad():
        assert torch.equal(FUNCTIONS[name](poison[0], **options).nan_to_num(), got.nan_to_num())


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("columns", [1, 33, 1000, 4096])
@pytest.mark.parametrize("option", ["plain", "scale", "mask", "causal"])
def test_accuracy(name, dtype, columns, option, device):
    """torch's operator in float32 and then a cast is what gander computes without the copies."""
    x = (torch.randn(64, columns, device=device) * 3).to(dtype)
    keep = torch.rand(64, columns, device=device) > 0.2
    options = {"scale": {"scale": 0.3}, "mask": {"mask": keep}, "causal": {"causal": True}}.get(option, {})
    dy = torch.randn(64, columns, device=device).to(dtype)
    results = {}
    for key, function, to in (
        ("mine", FUNCTIONS[name], lambda t: t),
        ("theirs", functools.partial(reference, name), lambda t: t.float()),
        ("exact", functools.partial(reference, name), lambda t: t.double()),
    ):
        leaf = to(x).clone().requires_grad_()
        y = function(leaf, **options)
        y.backward(torch.where(masked_out(x, options.get("mask"), option == "causal"), 0, to(dy)))
        results[key] = y.detach(), leaf.grad
    (y, dx), theirs, exact = results["mine"], results["theirs"], results["exact"]
    assert_accurate(y, theirs[0].to(dtype), exact[0], "y", extra=2.0**-23)
    # Backward reads y as it was rounded.
    stored, weight = y.double(), dy.double() * ~masked_out(x, options.get("mask"), option == "causal")
    p = stored if name == "softmax" else stored.exp()
    p = torch.where(masked_out(x, options.get("mask"), option == "causal"), 0, p)
    dot = (weight * p).sum(-1, keepdim=True) if name == "softmax" else weight.sum(-1, keepdim=True)
    want = ((weight - dot) * p if name == "softmax" else weight - p * dot) * options.get("scale", 1)
    rtol, atol = 2 * torch.finfo(dtype).eps, 3e-6 * float(want.abs().max() + 1)
    torch.testing.assert_close(dx.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("columns", [12, 64, 300, 5000])
@pytest.mark.parametrize("option", ["plain", "scale", "mask", "causal"])
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
def test_subnormal_results(columns, option, dtype, device):
    """Elements so far below the maximum that their softmax is subnormal keep the digits that it has."""
    if device == "cuda" and dtype == BRAIN:
        pytest.skip("the exponential that GPUs have for 16-bit elements has no subnormal results")
    x = torch.full((columns, columns) if option == "causal" else (3, columns), -math.inf, device=device)
    x[:, :12] = -torch.tensor([0, 80, 86, 87, 88, 89, 90, 95, 100, 102, 103, 105.0], device=device)
    x = x.to(dtype)
    options = {
        "plain": {},
        "scale": {"scale": 0.5},
        "mask": {"mask": torch.ones(columns, dtype=torch.bool, device=device)},
        "causal": {"causal": True},
    }[option]
    y = gander.softmax(2 * x if option == "scale" else x, **options)[-1]
    exact = F.softmax(x[-1].double(), -1)
    digits = (torch.finfo(dtype).eps + 1e-6) * exact + 2 * torch.finfo(dtype).smallest_normal * torch.finfo(
        dtype
    ).eps
    assert ((y - exact).abs() <= digits).all(), (y, exact)
    assert 0 < y[6] < torch.finfo(dtype).tiny


@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3)), ids=str)
def test_gradcheck(name, options):
    scale, causal, with_mask = options
    mask = masks(dtype=DOUBLE)["added"] if with_mask else None
    x = torch.randn(SHAPE, dtype=DOUBLE, requires_grad=True)

    def function(x):
        y = FUNCTIONS[name](x, scale=0.7 if scale else None, mask=mask, causal=causal, masked="zero")
        return y.masked_fill(y == -math.inf, 0)

    assert torch.autograd.gradcheck(function, (x,))


# ---- dtype and dim ----


@pytest.mark.parametrize("x_dtype", [HALF, BRAIN, SINGLE, DOUBLE])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
def test_dtype(name, x_dtype, dtype):
    x = torch.randn(6, 33).to(x_dtype)
    upstream = torch.randn(6, 33, dtype=dtype)
    for given in dtype, str(dtype).removeprefix("torch."):
        got, dx = gradient(lambda x, given=given: FUNCTIONS[name](x, dtype=given), x, upstream)
        want, theirs = gradient(lambda x: THEIRS[name](x, -1, dtype=dtype), x, upstream)
        assert (got.dtype, dx.dtype) == (dtype, x_dtype)
        torch.testing.assert_close(got, want)
        # Both are small differences of numbers of about 1, some of which were rounded to dtype.
        eps = max(torch.finfo(dtype).eps, torch.finfo(x_dtype).eps)
        torch.testing.assert_close(dx, theirs, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("dim", [-4, -3, -2, -1, 0, 1, 2, 3])
def test_dim(name, dim, device):
    x, upstream = torch.randn(SHAPE, device=device), torch.randn(SHAPE, device=device)
    for mask in None, torch.rand(Q, 1, device=device) > 0.3:
        got, dx = gradient(lambda x, mask=mask: FUNCTIONS[name](x, dim=dim, mask=mask), x, upstream)
        h = x if mask is None else x.masked_fill(~mask, -math.inf)
        want = THEIRS[name](h, dim)
        torch.testing.assert_close(got, want, equal_nan=True)
        assert got.is_contiguous()
        if mask is None:
            theirs = gradient(lambda x: THEIRS[name](x, dim), x, upstream)[1]
            torch.testing.assert_close(dx, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dim", [0, 1, -1, -2, (1,), (0, 2), (-1, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp(dim, keepdim, device):
    x = torch.randn(SHAPE, device=device)
    want = torch.logsumexp(x, dim, keepdim)
    upstream = torch.randn_like(want)
    got, dx = gradient(lambda x: gander.logsumexp(x, dim, keepdim), x, upstream)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dx, gradient(lambda x: torch.logsumexp(x, dim, keepdim), x, upstream)[1])


def test_integers_of_numpy_as_dimensions(name):
    x = torch.randn(SHAPE)
    assert torch.equal(FUNCTIONS[name](x, dim=np.int64(1)), FUNCTIONS[name](x, dim=1))
    for dim in np.int64(1), (np.int64(1), np.int32(-1)):
        torch.testing.assert_close(gander.logsumexp(x, dim), torch.logsumexp(x, dim))
    with pytest.raises(TypeError, match="dim is True, expected an int"):
        FUNCTIONS[name](x, dim=True)


def test_logsumexp_refuses():
    x = torch.randn(2, 3)
    for dim, match in (
        (2, "dim is 2, expected -2 to 1"),
        ((0, 0), "different dimensions"),
        ((0, 5), "different"),
    ):
        with pytest.raises(IndexError, match=match):
            gander.logsumexp(x, dim)
    with pytest.raises(TypeError, match="dim is 'rows', expected an int"):
        gander.logsumexp(x, "rows")


def test_softmax_without_options_keeps_its_operator(device):
    """And options that change nothing are none."""
    calls = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 8, device=device)
    with Record():
        gander.softmax(x)
        gander.softmax(x, dim=1, dtype=SINGLE, scale=1, masked="zero")
        gander.softmax(x, scale=2)
    plain = torch.ops.gander.softmax.default
    assert [call for call in calls if call.namespace == "gander"] == [
        plain,
        plain,
        torch.ops.gander.masked_softmax.default,
    ]


# ---- Masks ----


def test_strides_of_masks(name, device):
    """What the kernels cannot read as it is, is copied."""
    x = torch.randn(2, 3, 2, 3, 4, 8, device=device)
    want = {}
    for shape in (2, 1, 2, 1, 4, 8), (1, 3, 1, 3, 1, 8), (2, 3, 2, 3, 4, 8), (2, 1, 2, 1, 4, 1):
        mask = torch.rand(shape, device=device) > 0.3
        want = reference(name, x, mask=mask)
        wide = torch.zeros(*shape, 3, dtype=torch.bool, device=device)
        wide[..., 1] = mask
        swapped = mask.transpose(0, -2).contiguous().transpose(0, -2)
        for m in mask, mask.expand_as(x), wide[..., 1], swapped, swapped.half().log():
            torch.testing.assert_close(FUNCTIONS[name](x, mask=m), want, equal_nan=True)
            leaf = x.clone().requires_grad_()
            FUNCTIONS[name](leaf, mask=m, masked="zero").nan_to_num(neginf=0).square().sum().backward()
            assert leaf.grad.isfinite().all()
            assert not leaf.grad[~mask.expand_as(x)].any()


def test_rows_that_are_not_numbers(name):
    """A row is NaN if an element that takes part is NaN or +inf, or if all of them are -inf."""
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1, nan, 2], [1, inf, 2], [-inf, -inf, 5], [-inf, 0, nan]])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, False], [True, True, False]])
    for masked in "nan", "zero":
        y = FUNCTIONS[name](x, mask=mask, masked=masked)
        assert y[:3].isnan().all()
        zero, one = (0.0, 1.0) if name == "softmax" else (-inf, 0.0)
        assert y[3].tolist() == [zero, one, zero]


def test_causal_counts_the_rows_of_each_matrix(name, device):
    for queries, keys in (5, 3), (3, 5), (1, 4), (4, 1):
        x = torch.randn(2, 2, queries, keys, device=device)
        torch.testing.assert_close(
            FUNCTIONS[name](x, causal=True), reference(name, x, causal=True), equal_nan=True
        )


def test_scores_of_attention(device):
    """softmax with a scale and a mask is what scaled_dot_product_attention does with the scores."""
    q, k, v = (torch.randn(B, H, 8, 16, device=device) for _ in range(3))
    mask = torch.rand(B, 1, 8, 8, device=device) > 0.3
    mask[..., 0] = True
    for options, theirs in ({"mask": mask}, {"attn_mask": mask}), ({"causal": True}, {"is_causal": True}):
        scores = q @ k.transpose(-1, -2)
        got = gander.softmax(scores, scale=16**-0.5, **options) @ v
        torch.testing.assert_close(
            got, F.scaled_dot_product_attention(q, k, v, **theirs), rtol=1e-4, atol=1e-5
        )


# ---- Transforms ----


def model(x, mask):
    y = gander.softmax(x, scale=0.5, mask=mask, causal=True, masked="zero")
    z = gander.log_softmax(x, dim=1, dtype=SINGLE)
    return (y * z).sum() + gander.logsumexp(x, dim=1, keepdim=True).sum()


def torch_model(x, mask):
    y = reference("softmax", x, scale=0.5, mask=mask, causal=True, masked="zero")
    z = F.log_softmax(x.float(), 1)
    return (y * z).sum() + torch.logsumexp(x.float(), 1, keepdim=True).sum()


@pytest.fixture
def data(device):
    return torch.randn(SHAPE, device=device), masks(device)["bool"]


def both(function, x, mask):
    x = x.clone().requires_grad_()
    loss = function(x, mask)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def check(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compile(data):
    torch._dynamo.reset()
    check(both(torch.compile(model, fullgraph=True, backend="aot_eager"), *data), both(torch_model, *data))


def test_compile_with_dynamic_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries in 5, 7:
        x, mask = torch.randn(B, H, queries, N), torch.rand(B, 1, queries, N) > 0.3
        check(both(compiled, x, mask), both(torch_model, x, mask))


def test_export(data):
    class Module(torch.nn.Module):
        def forward(self, x, mask):
            return model(x, mask)

    program = torch.export.export(Module(), data)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.gander.masked_softmax.default) == 2
    check(both(program.module(), *data), both(torch_model, *data))


def test_functional_gradients(data):
    check([torch.func.grad(model)(*data)], both(torch_model, *data)[1:])
    per_sample = torch.vmap(torch.func.grad(model))(*data)
    for sample in range(B):
        want = both(torch_model, data[0][sample], data[1][sample])[1]
        torch.testing.assert_close(per_sample[sample], want, rtol=1e-4, atol=1e-4)


def test_checkpoint(data):
    check(
        both(lambda x, mask: checkpoint(model, x, mask, use_reentrant=False), *data), both(torch_model, *data)
    )


def test_vmap_of_masks(name):
    x, mask = torch.randn(4, Q, N), torch.rand(4, N) > 0.3
    call = functools.partial(FUNCTIONS[name], causal=True)
    for x_dim, mask_dim in (0, None), (None, 0), (0, 0):
        given = x if x_dim == 0 else x[0], mask if mask_dim == 0 else mask[0]
        got = torch.vmap(lambda x, mask: call(x, mask=mask), (x_dim, mask_dim))(*given)
        want = torch.stack(
            [call(x[i if x_dim == 0 else 0], mask=mask[i if mask_dim == 0 else 0]) for i in range(4)]
        )
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    with pytest.raises(ValueError, match="causal is set for x of rank 1"):
        torch.vmap(call)(x[0])


def test_autocast_follows_torch(name, device):
    x = torch.randn(4, 8, device=device).bfloat16()
    with torch.autocast(device, dtype=HALF if device == "cuda" else BRAIN):
        for dtype in None, BRAIN, HALF, SINGLE:
            want = THEIRS[name](x, -1, dtype=dtype).dtype
            assert FUNCTIONS[name](x, dtype=dtype).dtype == want
            assert FUNCTIONS[name](x, dtype=dtype, scale=2.0).dtype == want


def test_autocast_rule_on_cuda():
    """Calls the rule itself, so that it is tested without a GPU too."""
    from gander._torch import autocast

    op = torch.ops.gander.masked_softmax.default
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCUDA")
    kernel = autocast._to_float32("masked_softmax")
    assert kernel(torch.ones(2, 3, dtype=HALF)).dtype == SINGLE
    assert kernel(torch.ones(2, 3, dtype=HALF), None, BRAIN).dtype == BRAIN
    assert kernel(torch.ones(2, 3, dtype=DOUBLE)).dtype == DOUBLE


# ---- Arrays ----


def test_arrays(name):
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    mask = np.random.default_rng(1).random((B, 1, Q, N)) > 0.3
    torch_x, torch_mask = torch.tensor(x), torch.tensor(mask)
    call = FUNCTIONS[name]
    for options in {}, {"scale": 0.5, "causal": True}, {"mask": mask}, {"dim": 3, "dtype": "float32"}:
        given = {key: value for key, value in options.items() if key not in ("mask", "dim", "dtype")}
        want = reference(name, torch_x, mask=torch_mask if "mask" in options else None, **given)
        got = call(x, **options)
        assert type(got) is np.ndarray
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    transposed = np.ascontiguousarray(mask.swapaxes(-1, -2)).swapaxes(-1, -2)
    np.testing.assert_array_equal(call(x, mask=transposed), call(x, mask=mask))
    np.testing.assert_array_equal(call(x, mask=mask.astype(np.uint8)), call(x, mask=mask))
    assert call(x.astype(np.float16), dtype="float32").dtype == np.float32
    with pytest.raises(NotImplementedError, match="dtype is float16 for x of float32"):
        call(x, dtype="float16")


# ---- Refusals ----


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mask": torch.ones(N, requires_grad=True)}, NotImplementedError, "mask requires a gradient, but"),
        ({"mask": torch.ones(N - 1)}, ValueError, r"expected one that broadcasts to \(2, 3, 5, 24\)"),
        ({"mask": torch.ones(1, *SHAPE)}, ValueError, "expected one that broadcasts"),
        ({"mask": torch.ones(N, dtype=torch.int32)}, TypeError, "mask has dtype int32, expected .* bool"),
        ({"mask": torch.ones(N, dtype=DOUBLE)}, TypeError, "mask has dtype float64"),
        ({"mask": torch.ones(N, device="meta")}, RuntimeError, "mask is on meta, expected cpu as x"),
        ({"mask": [True] * N}, TypeError, "mask is a list, expected a torch.Tensor"),
        ({"masked": "none"}, ValueError, "masked is 'none', expected 'nan' or 'zero'"),
        ({"scale": torch.tensor(2.0)}, TypeError, "scale is a Tensor, expected None or a number"),
        (
            {"scale": torch.nn.Parameter(torch.tensor(1.0))},
            TypeError,
            "scale is a Parameter, expected None or",
        ),
        ({"scale": math.inf}, ValueError, "scale is .*, expected a finite number"),
        ({"dim": 4}, IndexError, "dim is 4, expected -4 to 3"),
        ({"dim": None}, TypeError, "dim is None, expected an int"),
        ({"dim": 0, "causal": True}, ValueError, "causal is set with dim 0, expected the last one"),
        ({"dtype": torch.int32}, TypeError, "int32"),
    ],
    ids=str,
)
def test_refusals(name, options, error, match):
    with pytest.raises(error, match=match):
        FUNCTIONS[name](torch.randn(SHAPE, requires_grad=True), **options)


def test_causal_needs_rows(name):
    for tensor in torch.randn(4), torch.randn(4, device="meta"):
        with pytest.raises(ValueError, match="causal is set for x of rank 1, expected rank 2 or more"):
            FUNCTIONS[name](tensor, causal=True)


def test_fakes_refuse_what_kernels_refuse(name):
    x = torch.randn(SHAPE, device="meta")
    for mask, error in (
        (torch.ones(N - 1, device="meta"), ValueError),
        (torch.ones(1, *SHAPE, device="meta"), ValueError),
        (torch.ones(N, dtype=torch.int32, device="meta"), TypeError),
        (torch.ones(N, dtype=DOUBLE, device="meta"), TypeError),
    ):
        with pytest.raises(error, match="mask has"):
            FUNCTIONS[name](x, mask=mask)


def test_algorithms_are_refused_with_options():
    x = torch.randn(4, 8, dtype=BRAIN)
    for options, what in (
        ({"scale": 2.0}, "a scale"),
        ({"causal": True}, "causal"),
        ({"dtype": SINGLE}, "a wider"),
    ):
        with pytest.raises(NotImplementedError, match=f"algorithm is 'warp' with {what}"):
            gander.softmax(x, algorithm="warp", **options)


def test_every_option_takes_the_kernels_with_options():
    """softmax calls the kernels without options if none is given. One that it forgot there would be lost."""
    x = torch.randn(4, 4, dtype=HALF)
    given = {
        "mask": dict(mask=torch.eye(4)),
        "out_dtype": dict(dtype=SINGLE),
        "scale": dict(scale=0.0),
        "causal": dict(causal=True),
        "masked_zero": dict(mask=torch.zeros(4, 4, dtype=torch.bool), masked="zero"),
    }
    others = {
        "x",
        "log",
        "batch_invariant",
    }  # log is that of log_softmax, both kinds of kernels have the last
    assert given.keys() | others == set(arguments("masked_softmax"))
    assert others >= set(arguments("softmax")) - {"algorithm"}
    for option, values in given.items():
        y = gander.softmax(x, **values)
        assert not torch.equal(y.double(), gander.softmax(x).double()), option
