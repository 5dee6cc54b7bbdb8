"""Forms of operands: strides, offsets, expanded gradients, mixed dtypes, kinds of targets and weights."""

import gander
import pytest
import torch
import torch.nn.functional as F
from grid import (
    DTYPES,
    EPS,
    IGNORED,
    OPS,
    Inputs,
    aligned,
    check,
    gradients,
    losses,
    name,
    odd_strided,
    offset,
    rms_norm,
    same_bits,
    strided,
    transposed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import assert_accurate, summing

LENGTHS = (31, 128, 1000, 4096, 50257)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
by_op = pytest.mark.parametrize("op", OPS)
by_length = pytest.mark.parametrize("n", LENGTHS)


@pytest.mark.parametrize("layout", [strided, odd_strided, transposed], ids=lambda f: f.__name__)
@by_length
@by_dtype
@by_op
def test_layout(op, dtype, n, layout):
    check(op, (Inputs(m, n, dtype, layout) for m in (2, 67, 300)))


@by_dtype
@by_op
def test_copies_give_the_same_bits(op, dtype):
    # Strided rows of whole 16-byte vectors use the kernels of compact rows. Transposed operands are copied
    # first.
    results = [OPS[op](Inputs(67, 1024, dtype, layout)) for layout in (aligned, strided, transposed)]
    for what, expected in results[0].items():
        for other in results[1:]:
            assert same_bits(other[what], expected), what


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    op=st.sampled_from(sorted(OPS)),
    # Not float32: its maximum error over few elements is a matter of luck.
    dtype=st.sampled_from(DTYPES[:2]),
    m=st.integers(1, 150),
    n=st.one_of(st.integers(1, 600), st.integers(600, 20000)),
    shift=st.integers(0, 9),
    gap=st.integers(0, 9),
)
def test_any_placement(op, dtype, m, n, shift, gap):
    def placed(x):
        if x.ndim < 2:
            return offset(x) if shift % 2 else x
        storage = torch.full((shift + x.shape[0] * (n + gap),), torch.nan, dtype=x.dtype, device=x.device)
        return storage[shift:].view(x.shape[0], n + gap)[:, :n].copy_(x)

    check(op, (Inputs(rows, n, dtype, placed) for rows in (m, 400)))


@pytest.mark.parametrize("operand", ["x", "dy", "y", "weight"])
@pytest.mark.parametrize("n", [64, 1024, 16384, 262144])
@by_dtype
def test_one_misaligned_operand(operand, dtype, n):
    """One operand is misaligned and the others are aligned: kernels must not take one's alignment for all."""
    for op in OPS:
        a = Inputs(5, n, dtype)
        setattr(a, operand, offset(getattr(a, operand)))
        b = Inputs(300 if n < 10000 else 40, n, dtype)
        setattr(b, operand, offset(getattr(b, operand)))
        check(op, (a, b))


# ---- Mixed dtypes ----


@pytest.mark.parametrize("n", [31, 1000, 4096, 50257, 300000])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=name)
@by_dtype
def test_rmsnorm_dtypes(dtype, weight_dtype, n):
    """torch refuses or promotes most mixed dtypes. It gets float32 copies; its results are rounded once."""
    x, dout = Inputs(130, n, dtype).x, Inputs(130, n, dtype).dy
    weight = Inputs(130, n, weight_dtype).weight
    rstd = gander.rmsnorm_fwd(x, store_rstd=True, eps=EPS)[2]
    exact = rms_norm(x.double(), weight.double())
    for out_dtype in DTYPES:
        out = gander.rmsnorm(x, weight, out_dtype=out_dtype, eps=EPS)
        assert out.dtype == out_dtype
        assert_accurate(out, rms_norm(x.float(), weight.float()).to(out_dtype), exact, "out")
        dy = dout.to(out_dtype)
        theirs = gradients(rms_norm, (x.float(), weight.float()), dy.float())
        exacts = gradients(rms_norm, (x.double(), weight.double()), dy.double())
        dx, dw = gander.rmsnorm_bwd(x, weight, dy, rstd)[:2]
        assert (dx.dtype, dw.dtype) == (dtype, weight_dtype)
        assert_accurate(dx, theirs[0].to(dtype), exacts[0], "dx")
        assert_accurate(dw, theirs[1].to(weight_dtype), exacts[1], "dw")
        alone = gander.rmsnorm_bwd(x, None, dy, rstd)[0]
        theirs = gradients(rms_norm, (x.float(), None), dy.float())[0].to(dtype)
        exact_alone = gradients(rms_norm, (x.double(), None), dy.double())[0]
        assert_accurate(alone, theirs, exact_alone, "dx without weight")


@pytest.mark.parametrize("n", [1024, 1536, 2560, 4096, 5376, 8192, 11008, 16384, 18432])
@pytest.mark.parametrize("m", [64, 512, 1024, 2048, 4000])
@by_dtype
def test_rmsnorm_weights(dtype, m, n):
    """The planner chooses by the number of rows, and by whether the weights are wider than they."""
    x = Inputs(m, n, dtype).x
    for weight_dtype in dict.fromkeys((dtype, torch.float32)):
        weight = Inputs(m, n, weight_dtype).weight
        theirs = rms_norm(x.float(), weight.float()).to(dtype)
        out = gander.rmsnorm(x, weight, eps=EPS)
        assert_accurate(out, theirs, rms_norm(x.double(), weight.double()))


@pytest.mark.parametrize("n", [31, 4096, 300000])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=name)
@by_dtype
def test_class_weight_dtypes(dtype, weight_dtype, n):
    a = Inputs(300 if n < 10000 else 40, n, dtype)
    weight = a.class_weight.to(weight_dtype)
    for reduction in ("none", "mean", "sum"):
        got = gander.cross_entropy(a.x, a.target, weight=weight, reduction=reduction)
        theirs, exact = (losses(x, a.target, weight, reduction) for x in (a.x, a.x.double()))
        extra = exact.abs() * summing(a.m) if reduction != "none" else 0.0
        assert_accurate(got, theirs, exact, reduction, extra)


# ---- Targets ----


@pytest.mark.parametrize("n", [31, 4096, 300000])
@by_dtype
def test_target_kinds(dtype, n):
    a = Inputs(300 if n < 10000 else 40, n, dtype)
    expected = gander.cross_entropy_fwd(a.x, a.target, return_lse=True, return_dx=True)
    dloss = a.dloss
    backward = gander.cross_entropy_bwd(a.x, a.target, dloss, expected[1])
    wide = torch.full((a.m, 3), 1 << 40, device="cuda")
    wide[:, 1] = a.target
    for target in (a.target.int(), wide[:, 1], wide.int()[:, 1], offset(a.target)):
        for got, want in zip(
            gander.cross_entropy_fwd(a.x, target, return_lse=True, return_dx=True), expected, strict=True
        ):
            assert same_bits(got, want)
        assert same_bits(gander.cross_entropy_bwd(a.x, target, dloss, expected[1]), backward)


def test_leading_dimensions():
    a = Inputs(60, 257, torch.bfloat16)
    x, target = a.x.view(3, 4, 5, 257), a.target.view(3, 4, 5)
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    flat = gander.cross_entropy_fwd(a.x, a.target, return_lse=True, return_dx=True)
    assert loss.shape == lse.shape == target.shape and dx.shape == x.shape
    for got, want in zip((loss, lse, dx), flat, strict=True):
        assert same_bits(got.view(want.shape), want)
    swapped = x.transpose(0, 2)  # leading dimensions that do not collapse
    assert same_bits(gander.softmax(swapped), gander.softmax(x).transpose(0, 2).contiguous())
    assert same_bits(gander.softmax(a.x[7]), gander.softmax(a.x[7:8])[0])


# ---- Expanded gradients ----


@by_length
@by_dtype
def test_expanded_gradients(dtype, n):
    """The gradients that .sum() and .mean() pass to backward: one element with stride 0."""
    a = Inputs(130, n, dtype)
    one = torch.full((), 0.75, dtype=dtype, device="cuda")
    full = one.expand(a.m, n).contiguous()
    b = Inputs(a.m, n, dtype)
    for b.dy in (one.expand(a.m, n), one.expand(n).expand(a.m, n), full[:1].expand(a.m, n)):
        for op in ("softmax_backward", "rmsnorm_backward", "rmsnorm_backward_dw"):
            check(op, [b])
    few = torch.full((), 0.75, device="cuda")
    want = gander.cross_entropy_bwd(a.x, a.target, few.expand(a.m).contiguous(), a.lse)
    for dloss in (few.expand(a.m), few):
        assert same_bits(gander.cross_entropy_bwd(a.x, a.target, dloss, a.lse), want)
    x = a.x.clone().requires_grad_()
    gander.softmax(x).sum().backward()
    gander.rmsnorm(x, a.weight).sum().backward()
    gander.cross_entropy(x, a.target, reduction="none").sum().backward()
    assert x.grad.isfinite().all()


def test_overlapping_rows_are_read():
    values = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    for x in (values.as_strided((1000, 513), (3, 1)), values[:513].expand(1000, 513)):
        assert_accurate(gander.softmax(x), F.softmax(x, -1), F.softmax(x.double(), -1))


def test_ignored_target_inside_the_classes():
    a = Inputs(300, 50, torch.float32)
    target = a.target.clamp(min=0)
    for ignored in (0, 49, IGNORED):
        got = gander.cross_entropy(a.x, target, ignore_index=ignored)
        theirs, exact = (F.cross_entropy(x, target, ignore_index=ignored) for x in (a.x, a.x.double()))
        assert_accurate(got, theirs, exact)
