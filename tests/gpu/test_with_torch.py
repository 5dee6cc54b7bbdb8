"""Integration with torch on CUDA: autograd, torch.compile, opcheck, autocast, gradients in place, errors."""

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from grid import DTYPES, EPS, IGNORED, Inputs, gradients, losses, name, rms_norm, same_bits
from tolerance import assert_accurate, summing

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)


@pytest.mark.parametrize("n", [256, 1001, 32768, 262144])
@by_dtype
def test_autograd(dtype, n):
    """Forward and backward through autograd, with every reduction."""
    a = Inputs(400 if n < 10000 else 40, n, dtype)

    def loss_gradient(x, reduction, dloss):
        return gradients(lambda x: losses(x, a.target, a.class_weight, reduction), (x,), dloss)[0]

    for reduction in ("mean", "sum", "none"):
        dloss = a.dloss if reduction == "none" else torch.tensor(1.5, device="cuda")
        x = a.x.detach().requires_grad_()
        loss = gander.cross_entropy(x, a.target, weight=a.class_weight, reduction=reduction)
        (dx,) = torch.autograd.grad(loss, x, dloss)
        theirs = loss_gradient(a.x, reduction, dloss.float())
        exact = loss_gradient(a.x.double(), reduction, dloss.double())
        # All rows are divided by the same rounded denominator.
        extra = exact.abs() * summing(a.m) if reduction == "mean" else 0.0
        assert_accurate(dx, theirs, exact, f"dx of {reduction}", extra)
    for function, reference in (
        (lambda x, w: gander.rmsnorm(x, w, eps=EPS), rms_norm),
        (lambda x, w: torch.ops.gander.rmsnorm(x, w, eps=EPS)[0], rms_norm),
    ):
        got = gradients(function, (a.x, a.weight), a.dy)
        theirs = gradients(reference, (a.x, a.weight), a.dy)
        exact = gradients(reference, (a.x.double(), a.weight.double()), a.dy.double())
        for what, *results in zip(("dx", "dw"), got, theirs, exact, strict=True):
            assert_accurate(*results, what)
    x = a.x.detach().requires_grad_()
    y = gander.softmax(x)
    (dx,) = torch.autograd.grad(y, x, a.dy)
    assert same_bits(dx, gander.softmax_bwd(a.dy, y.detach()))


@by_dtype
def test_compile(dtype):
    """One graph serves every number of rows, with the results of eager mode."""

    def model(x, weight, target):
        return gander.cross_entropy(gander.softmax(gander.rmsnorm(x, weight)) * 8, target)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for m in (300, 301, 17):
        a = Inputs(m, 1001, dtype)
        for function in (model, compiled):
            leaves = a.x.detach().requires_grad_(), a.weight.detach().requires_grad_()
            loss = function(*leaves, a.target)
            results = (loss.detach(), *torch.autograd.grad(loss, leaves))
            if function is model:
                expected = results
        for got, want in zip(results, expected, strict=True):
            # Inductor fuses the multiplication with other operations and may round at other points.
            torch.testing.assert_close(got, want)


# Unaligned rows; several rows per CTA, with fewer in the last CTA; one row per cluster.
@pytest.mark.parametrize("m, n", [(300, 1001), (299, 64), (299, 1000), (40, 50256)])
@by_dtype
def test_gradient_in_place(dtype, m, n):
    a = Inputs(m, n, dtype)

    def gradient(x):
        return gradients(lambda x: losses(x, a.target, None, "mean"), (x,), None)[0]

    theirs, exact = gradient(a.x), gradient(a.x.double())
    leaf = a.x.detach().clone().requires_grad_()
    logits = leaf * 1
    version = logits._version
    loss = gander.cross_entropy(logits, a.target, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss, logits)
    assert_accurate(dx, theirs, exact, "dx", exact.abs() * summing(a.m))
    assert dx.data_ptr() == logits.data_ptr() and logits._version > version
    # Another operation that saved the logits raises an error and computes no wrong gradient.
    logits = leaf * 1
    other = logits.square().sum()
    loss = gander.cross_entropy(logits, a.target, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    x = a.x.clone()
    loss, dx = gander.cross_entropy_fwd(x, a.target, return_dx=True, inplace_backward=True)
    assert dx is x
    assert same_bits(x, gander.cross_entropy_fwd(a.x, a.target, return_dx=True)[1])
    strided = torch.zeros(n, m, dtype=dtype, device="cuda").t().copy_(a.x)  # gander copies it and copies back
    gander.cross_entropy_fwd(strided, a.target, return_dx=True, inplace_backward=True)
    assert same_bits(strided, x)


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16], ids=name)
@by_dtype
def test_autocast(dtype, cast):
    """Results have the dtypes of torch's own operators under autocast on CUDA. The loss stays float32."""
    a = Inputs(300, 1000, dtype)
    with torch.autocast("cuda", dtype=cast):
        y = gander.softmax(a.x)
        assert y.dtype == F.softmax(a.x, -1).dtype
        assert_accurate(y, F.softmax(a.x, -1), F.softmax(a.x.double(), -1))
        assert gander.rmsnorm(a.x, a.weight).dtype == rms_norm(a.x, a.weight).dtype
        loss = gander.cross_entropy(a.x, a.target)
        assert loss.dtype == F.cross_entropy(a.x, a.target).dtype == torch.float32
        x = a.x.detach().requires_grad_()
        gander.softmax(x)[:, 0].sum().backward()
        assert x.grad.dtype == dtype and x.grad.isfinite().all()


def test_opcheck():
    x = torch.randn(30, 1001, device="cuda", requires_grad=True)
    target = Inputs(30, 1001, torch.float32).target
    weight = torch.randn(1001, device="cuda", requires_grad=True)
    heads = torch.randn(2, 6, 30, 64, device="cuda", requires_grad=True).transpose(1, 2)
    cos, sin = torch.randn(2, 30, 32, device="cuda").unbind()
    for op, arguments in (
        (torch.ops.gander.softmax, (x,)),
        (torch.ops.gander.rmsnorm, (x, weight)),
        (torch.ops.gander.cross_entropy, (x, target)),
        (torch.ops.gander.rotary, (heads, None, cos, sin)),
    ):
        assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}


# ---- Errors ----

X = (4, 1001)


def cuda(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device="cuda")


REFUSALS = {
    "float64": (
        lambda: gander.softmax(cuda(*X, dtype=torch.float64)),
        NotImplementedError,
        "float64 on cuda.*host memory",
    ),
    "a weight on the CPU": (
        lambda: gander.rmsnorm(cuda(*X), torch.ones(1001)),
        RuntimeError,
        "weight is on cpu.*expected cuda.*as x",
    ),
    "x on the CPU": (
        lambda: gander.rmsnorm(torch.ones(X), cuda(1001)),
        RuntimeError,
        "weight is on cuda.*expected cpu.*as x",
    ),
    "a target on the CPU": (
        lambda: gander.cross_entropy(cuda(*X), torch.zeros(4, dtype=torch.int64)),
        RuntimeError,
        "target is on cpu.*expected cuda",
    ),
    "an array": (
        lambda: gander.cross_entropy(cuda(*X), np.zeros(4, np.int64)),
        TypeError,
        "target is a ndarray",
    ),
    "another shape": (
        lambda: gander.softmax_bwd(cuda(*X), cuda(4, 1000)),
        ValueError,
        r"y has shape \(4, 1000\), expected \(4, 1001\) as dy",
    ),
    "another dtype": (
        lambda: gander.softmax_bwd(cuda(*X), cuda(*X).half()),
        TypeError,
        "y has dtype float16, expected float32",
    ),
    "integers": (lambda: gander.softmax(cuda(*X, dtype=torch.int32)), TypeError, "x has dtype int32"),
    "no columns": (lambda: gander.softmax(cuda(4, 0)), ValueError, "expected a last dimension of 1 or more"),
    "probabilities": (lambda: gander.cross_entropy(cuda(*X), cuda(4)), TypeError, "target has dtype float32"),
    "a short target": (
        lambda: gander.cross_entropy(cuda(*X), cuda(3, dtype=torch.int64)),
        ValueError,
        r"target has shape \(3,\), expected \(4,\)",
    ),
    "an rstd of halves": (
        lambda: gander.rmsnorm_bwd(cuda(*X), None, cuda(*X), cuda(4, dtype=torch.float16)),
        TypeError,
        "rstd has dtype float16, expected float32",
    ),
    "a negative eps": (lambda: gander.rmsnorm(cuda(*X), eps=-1.0), ValueError, "eps is -1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    call, exception, message = REFUSALS[case]
    with pytest.raises(exception, match=message):
        call()
    torch.cuda.synchronize()  # would raise if a kernel had been launched and failed


def test_nothing_is_written_on_refusal():
    x = cuda(*X)
    with pytest.raises(TypeError):
        gander.cross_entropy_fwd(x, cuda(4), return_dx=True, inplace_backward=True)
    assert bool((x == 1).all())


def test_debug_names_the_bad_target():
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="class 1001, expected 0 to 1000"):
            gander.cross_entropy(cuda(*X), torch.tensor([0, IGNORED, 1001, 3], device="cuda"))
    finally:
        gander.set_debug(False)
