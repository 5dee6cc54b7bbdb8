"""linear_cross_entropy against torch's linear and cross_entropy in float64."""

import threading
from functools import partial

import gander
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 4e-6, torch.float64: 1e-12}
M, K, V = 10, 16, 33


def given(device="cpu", dtype=torch.float32, m=M):
    """x, weight, target, bias and class weights."""
    x, weight = torch.randn(m, K, device=device), torch.randn(V, K, device=device) / 4
    target = torch.randint(0, V, (m,), device=device)
    target[3::4] = -100
    bias, weight_ce = torch.randn(V, device=device), torch.rand(V, device=device) + 0.5
    return x.to(dtype), weight.to(dtype), target, bias.to(dtype), weight_ce.to(dtype)


def total(loss):
    """A number to differentiate. Rows get different upstream gradients."""
    if loss.ndim == 0:
        return loss
    return (loss * torch.linspace(0.5, 2, loss.numel(), device=loss.device).view_as(loss)).sum()


def run(function, x, weight, target, bias=None, **options):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    loss = function(*leaves[:2], target, leaves[2], **options)
    total(loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def reference(x, weight, target, bias=None, weight_ce=None, reduction="mean", divisor=None, **options):
    x, weight, bias, weight_ce = (None if t is None else t.double() for t in (x, weight, bias, weight_ce))
    logits = F.linear(x, weight, bias)
    loss = F.cross_entropy(logits.flatten(0, -2), target.long().flatten(), weight_ce, reduction=reduction)
    loss = loss.view(target.shape) if reduction == "none" else loss
    return loss if divisor is None else loss / divisor


def check(got, want, dtype):
    tolerance = TOLERANCE[dtype]
    for a, b in zip(got, want, strict=True):
        b = b.double()
        largest = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * largest)


@pytest.fixture(params=FLOATS, ids=str)
def dtype(request, device):
    if device == "cuda" and request.param == torch.float64:
        pytest.skip("float64 is served on the CPU only")
    return request.param


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 1, 4, 10, 100])
def test_values(device, dtype, reduction, chunk):
    x, weight, target, bias, weight_ce = given(device, dtype)
    for options in (
        {},
        {"bias": bias, "weight_ce": weight_ce, "accumulate": "float32"},
        {"divisor": 7} if reduction == "sum" else {},
    ):
        how = options | {"reduction": reduction, "chunk": chunk}
        want = run(reference, x, weight, target, **how)
        check(run(gander.linear_cross_entropy, x, weight, target, **how), want, dtype)
        with torch.no_grad():
            loss = gander.linear_cross_entropy(x, weight, target, **how)
        check([loss], want[:1], dtype)


def test_shapes(device):
    """More dimensions, tensors that are not contiguous, int32 targets, and no rows."""
    x, weight, target, bias, _ = given(device, m=12)
    wide, long = torch.randn(12, 2 * K, device=device)[:, ::2], torch.randn(K, V, device=device).t()
    for args in (
        (x.view(3, 4, K), weight, target.view(3, 4)),
        (x.view(3, 4, K).transpose(0, 1), weight, target.view(3, 4).t().int()),
        (wide, long, target),
    ):
        for reduction in "mean", "none":
            got = run(gander.linear_cross_entropy, *args, bias=bias, reduction=reduction)
            check(got, run(reference, *args, bias=bias, reduction=reduction), torch.float32)
    for reduction in "mean", "sum", "none":
        got = run(gander.linear_cross_entropy, x[:0], weight, target[:0], reduction=reduction)
        want = F.cross_entropy(x.new_empty(0, V), target[:0], reduction=reduction)
        torch.testing.assert_close(got[0], want, equal_nan=True)
        assert got[1].shape == (0, K) and not got[2].any()
    loss, dx, dw = run(gander.linear_cross_entropy, x[0], weight, target[0])
    check([loss, dx[None], dw], run(reference, x[:1], weight, target[:1]), torch.float32)


OUTPUTS = ("loss", "z_loss", "lse", "predicted", "is_top1")


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_outputs(device, dtype, reduction, compiles):
    """Those of cross_entropy, and the gradients of the loss without them."""
    x, weight, target, bias, _ = given(device, dtype, m=12)
    x, target, options = x.view(3, 4, K), target.view(3, 4), {"z_loss": 0.01, "softcap": 3.0}
    options |= {"temperature": 0.7, "label_smoothing": 0.1, "reduction": reduction}

    def call(x, weight, target, bias, **more):
        return gander.linear_cross_entropy(x, weight, target, bias, chunk=5, **options, **more)

    def with_outputs(x, weight, target, bias):
        return call(x, weight, target, bias, outputs=OUTPUTS)

    torch._dynamo.reset()
    function = torch.compile(with_outputs, backend="aot_eager", fullgraph=True) if compiles else with_outputs
    logits = F.linear(x, weight, bias)
    want = gander.cross_entropy(logits, target, **options, outputs=OUTPUTS)
    found = function(x, weight, target, bias)
    assert found._fields == OUTPUTS
    check(found[:3], want[:3], dtype)
    assert torch.equal(found.predicted, want.predicted) and torch.equal(found.is_top1, want.is_top1)
    with_loss = run(lambda *tensors: function(*tensors).loss, x, weight, target, bias)
    for a, b in zip(with_loss, run(call, x, weight, target, bias), strict=True):
        torch.testing.assert_close(a, b)

    # Other gradients are refused.
    for name in "lse", "z_loss":
        leaf = x.clone().requires_grad_()
        found = function(leaf, weight, target, bias)
        wrong = total(found.loss) + total(getattr(found, name))
        if not compiles:
            with pytest.raises(NotImplementedError, match="lse or z_loss of linear_cross_entropy has no"):
                wrong.backward()
        else:
            wrong.backward()
            assert leaf.grad[target != -100].isnan().all()


def test_outputs_elsewhere(device):
    x, weight, target, bias, weight_ce = given(device)
    found = gander.linear_cross_entropy(x[:0], weight, target[:0], outputs=OUTPUTS, reduction="none")
    assert [value.shape for value in found] == [(0,)] * 5
    meta = [t.to("meta") for t in (x, weight, target)]
    assert gander.linear_cross_entropy(*meta, outputs=("predicted",)).predicted.shape == (M,)

    def loss(x):
        return gander.linear_cross_entropy(x, weight, target, outputs=("lse", "loss")).loss

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad)
    few = gander.linear_cross_entropy(x, weight, target, bias, weight_ce, outputs=["is_top1", "loss"])
    assert few._fields == ("is_top1", "loss")
    torch.testing.assert_close(few.loss, gander.linear_cross_entropy(x, weight, target, bias, weight_ce))
    head = gander.nn.LinearCrossEntropy(K, V, device=device, outputs=("loss", "predicted"))
    assert torch.equal(head(x, target).predicted[:3], F.linear(x, head.weight)[:3].argmax(-1))
    with pytest.raises(ValueError, match=r"outputs is .*, expected None or a tuple of different names"):
        gander.linear_cross_entropy(x, weight, target, outputs=("accuracy",))


def test_rows_that_do_not_count(device):
    x, weight, target, _, _ = given(device)
    for chunk in 3, M:
        got = run(gander.linear_cross_entropy, x, weight, torch.full_like(target, -100), chunk=chunk)
        assert got[0].isnan() and not got[1].any() and not got[2].any()
        bad = target.clone()
        bad[5] = V
        got = run(gander.linear_cross_entropy, x, weight, bad, reduction="sum", chunk=chunk)
        assert got[0].isnan() and got[1][5].isnan().all() and not got[1][6].isnan().any()
        loss, dx, dw = run(gander.linear_cross_entropy, x, weight, bad, chunk=chunk)
        assert loss.isnan() and dx[5].isnan().all() and dw.isnan().all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen(device, frozen, monkeypatch):
    """No matrix product is computed for x or weight that needs no gradient."""
    x, weight, target, _, _ = given(device)
    want = run(reference, x, weight, target)
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **how: products.append(1) or mm(*given, **how))
    leaves = [x.clone().requires_grad_(frozen != 0), weight.clone().requires_grad_(frozen != 1)]
    gander.linear_cross_entropy(*leaves, target, chunk=M).backward()
    assert leaves[frozen].grad is None and len(products) == 2
    check([leaves[1 - frozen].grad], [want[2 - frozen]], torch.float32)
    products.clear()
    with torch.no_grad():
        gander.linear_cross_entropy(*leaves, target, chunk=M)
    assert len(products) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_upstream(device, dtype):
    """Whatever was expected and whatever comes, also in later backward passes."""
    x, weight, target, _, _ = given(device, dtype)
    for expects in None, 1.0, 0.25, torch.tensor(0.25, device=device):
        for scale in 1.0, 0.25, 4096.0:
            leaves = [t.clone().requires_grad_() for t in (x, weight)]
            loss = gander.linear_cross_entropy(*leaves, target, upstream=expects)
            want = run(reference, x, weight, target)
            for times in 1, 2, 3:
                (loss * scale).backward(retain_graph=True)
                check([t.grad for t in leaves], [t * scale * times for t in want[1:]], dtype)


@pytest.mark.parametrize("upstream", [0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 1e-30, 1e30])
def test_upstream_is_an_expectation_only(device, dtype, upstream):
    """Regression test: gradients that were made for 0 could not be scaled, and became NaN."""
    x, weight, target, bias, _ = given(device, dtype)
    want = run(reference, x, weight, target, bias)
    compiled = torch.compile(gander.linear_cross_entropy, backend="aot_eager")
    for function in gander.linear_cross_entropy, compiled:
        for expects in upstream, torch.tensor(upstream, device=device):
            check(run(partial(function, upstream=expects), x, weight, target, bias), want, dtype)
    torch._dynamo.reset()


def test_expected_upstream_gives_the_bits_of_forward(device):
    """A hit returns what forward made: with a factor that would make float16's gradients vanish otherwise."""
    x, weight, target, _, _ = given(device, torch.float16)
    small = run(gander.linear_cross_entropy, x, weight, target, reduction="sum", divisor=1 << 26)
    assert not small[1].any()
    for upstream in None, 2.0**26:
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss = gander.linear_cross_entropy(
            *leaves, target, reduction="sum", divisor=1 << 26, upstream=upstream
        )
        (loss * 2.0**26).backward()
        want = run(reference, x, weight, target, reduction="sum")
        check([t.grad for t in leaves], want[1:], torch.float16)


def test_sums_in_float32():
    """accumulate="float32" rounds the gradient of weight once, not once for each chunk."""
    x, weight, target, _, _ = given(dtype=torch.bfloat16, m=256)
    want = run(reference, x, weight, target)[2]

    def error(**how):
        return (run(gander.linear_cross_entropy, x, weight, target, **how)[2] - want).abs().mean()

    once = error(chunk=256)
    assert error(chunk=4, accumulate="float32") <= 1.1 * once
    assert error(chunk=4) > 1.1 * error(chunk=4, accumulate="float32")


def test_module_and_tied_weights(device):
    _, weight, target, _, weight_ce = given(device)
    module = gander.nn.LinearCrossEntropy(K, V, device=device, weight_ce=weight_ce, chunk=3)
    assert module.state_dict().keys() == {"weight", "weight_ce"}
    without = gander.nn.LinearCrossEntropy(K, V, bias=True)
    assert without.state_dict().keys() == torch.nn.Linear(K, V).state_dict().keys()
    saved = {"weight": weight, "weight_ce": weight_ce}
    module = module.to("meta").to_empty(device=device)  # as large models are loaded
    module.load_state_dict(saved)
    tokens = torch.randint(0, V, (M,), device=device)
    module(F.embedding(tokens, module.weight), target, upstream=1).backward()
    tied = weight.clone().requires_grad_()
    reference(F.embedding(tokens, tied), tied, target, weight_ce=weight_ce).backward()
    check([module.weight.grad], [tied.grad], torch.float32)
    assert "out_features=33" in repr(module) and "reduction='mean'" in repr(module)


def test_meta():
    module = gander.nn.LinearCrossEntropy(K, V, device="meta")
    x = torch.empty(M, K, device="meta", requires_grad=True)
    for reduction in "mean", "none":
        module.reduction = reduction
        loss = module(x, torch.empty(M, dtype=torch.int64, device="meta"))
        assert loss.is_meta and loss.shape == ((M,) if reduction == "none" else ())
        assert torch.autograd.grad(loss.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    for how in {}, {"reduction": "none"}, {"reduction": "sum", "divisor": torch.tensor(3, device=device)}:

        def three_times(*given, function=gander.linear_cross_entropy, how=how):
            return function(given[0] * 1, *given[1:], **how) * 3

        torch._dynamo.reset()  # the same code with other options
        compiled = torch.compile(three_times, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for m in 8, 12:
            x, weight, target, bias, _ = given(device, m=m)
            want = run(partial(three_times, function=reference), x, weight, target, bias)
            check(run(compiled, x, weight, target, bias), want, torch.float32)


def test_compiled_gradients_are_scaled_without_a_bias(device):
    """Regression test: the factor was rounded to bfloat16, which made all elements 0.2 % too large."""
    x, weight, target, _, _ = given(device, torch.bfloat16, m=64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: gander.linear_cross_entropy(*given) / 3, backend="aot_eager")
    want = run(lambda *given: reference(*given) / 3, x, weight, target)
    for got, wanted in zip(run(compiled, x, weight, target)[1:], want[1:], strict=True):
        got, wanted = got.double(), wanted.double()
        assert ((got * wanted).sum() / wanted.square().sum()).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("how", [{}, {"reduction": "none"}, {"upstream": 0.25}], ids=str)
def test_compiled_autograd(device, dtype, how):
    """The backward pass of an eager call is compiled."""
    x, weight, target, bias, _ = given(device, dtype)
    want = run(reference, x, weight, target, bias, **how)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        check(run(gander.linear_cross_entropy, x, weight, target, bias, **how), want, dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    loss = total(gander.linear_cross_entropy(*leaves[:2], target, leaves[2], **how))
    (loss * 3).backward(retain_graph=True)  # scales what forward made, which the next pass must not read
    for leaf in leaves:
        leaf.grad = None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    check([leaf.grad for leaf in leaves], want[1:], dtype)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", [{}, {"reduction": "none"}, {"upstream": 0.25}, {"chunk": 3}], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_exported(device, dtype, how, frozen):
    """An exported module can be trained."""

    class Head(torch.nn.Module):
        def __init__(self, weight, bias):
            super().__init__()
            self.weight = torch.nn.Parameter(weight, requires_grad=not frozen)
            self.bias = torch.nn.Parameter(bias)

        def forward(self, x, target):
            return gander.linear_cross_entropy(x * 1, self.weight, target, self.bias, **how)

    x, weight, target, bias, _ = given(device, dtype)
    want = run(reference, x, weight, target, bias, **how)
    program = torch.export.export(Head(weight, bias), (x.clone().requires_grad_(), target))
    module = program.module()
    for _ in range(2):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        total(module(leaf, target)).backward()
        loss = module(leaf, target).detach()
        got = [loss, leaf.grad, want[2] if frozen else module.weight.grad, module.bias.grad]
        assert frozen == (module.weight.grad is None)
        check(got, want, dtype)
    frozen_later = program.module()
    frozen_later.bias.requires_grad_(False)
    total(frozen_later(leaf.clone(), target)).backward()
    loss = total(module(leaf, target))
    (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        dx.sum().backward()


@pytest.mark.parametrize("how", [{}, {"upstream": 4.0}], ids=str)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(device, dtype, how, mode):
    """A graph of forward and backward serves any upstream gradient and, if it is symbolic, any rows."""
    x, weight, target, bias, _ = given(device, dtype)

    def step(x, weight, bias, target, scale):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        loss = gander.linear_cross_entropy(*leaves[:2], target, leaves[2], **how)
        return loss.detach(), *torch.autograd.grad(loss * scale, leaves)

    scale = torch.tensor(4.0, device=device)
    graph = make_fx(step, tracing_mode=mode)(x, weight, bias, target, scale)
    if mode == "symbolic":
        x, _, target, _, _ = given(device, dtype, m=11)
    for factor in 4.0, 0.5:
        got = graph(x, weight, bias, target, scale * 0 + factor)
        want = run(lambda *given, f=factor: reference(*given) * f, x, weight, target, bias)
        check([got[0] * factor, *got[1:]], want, dtype)


def test_fake_tensors(device, dtype):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = (torch.randn(n, 8, dtype=dtype, device=device, requires_grad=True) for n in (6, 9))
        target = torch.zeros(6, dtype=torch.long, device=device)
        dx, dw = torch.autograd.grad(
            gander.linear_cross_entropy(x, weight, target, upstream=4.0), (x, weight)
        )
    assert (dx.shape, dw.shape, dx.dtype) == (x.shape, weight.shape, dtype)


def test_checkpoint_and_hooks(device):
    x, weight, target, _, _ = given(device)
    want = run(reference, x, weight, target)

    def checkpointed(*given):
        return checkpoint(gander.linear_cross_entropy, *given, use_reentrant=False)

    check(run(checkpointed, x, weight, target), want, torch.float32)
    with torch.autograd.graph.save_on_cpu():
        check(run(gander.linear_cross_entropy, x, weight, target), want, torch.float32)

    def transposed(saved):
        return saved.mT.contiguous().mT if saved.ndim == 2 else saved

    with torch.autograd.graph.saved_tensors_hooks(transposed, lambda saved: saved):
        loss = gander.linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), target)
    check([2 * g for g in want[1:]], torch.autograd.grad(2 * loss, (x, weight)), torch.float32)


def test_autocast(device):
    x, weight, target, bias, _ = given(device)
    with torch.autocast(device, torch.bfloat16):
        got = run(gander.linear_cross_entropy, x, weight, target, bias)
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        gander.linear_cross_entropy(*leaves, target, bias, reduction="none").sum().backward()  # within it
    assert [t.dtype for t in got] == [torch.float32] * 4
    want = run(lambda *given: reference(*given, reduction="none").sum(), x, weight, target, bias)
    check([t.grad for t in leaves], want[1:3], torch.bfloat16)
    check(got, run(reference, x, weight, target, bias), torch.bfloat16)


def test_functorch(device):
    x, weight, target, _, _ = given(device)
    want = run(reference, x, weight, target)
    got = torch.func.grad(gander.linear_cross_entropy, argnums=(0, 1))(x, weight, target)
    check(got, want[1:], torch.float32)
    got = torch.vmap(gander.linear_cross_entropy, (0, None, 0))(x.view(2, 5, K), weight, target.view(2, 5))
    each = [reference(a, weight, t) for a, t in zip(x.view(2, 5, K), target.view(2, 5), strict=True)]
    check([got], [torch.stack(each)], torch.float32)


def test_second_derivatives_are_refused(device):
    x, weight, target, _, _ = given(device)
    for dtype in torch.float16, torch.float32:
        leaf = x.to(dtype).requires_grad_()
        loss = gander.linear_cross_entropy(leaf, weight.to(dtype), target)
        (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            dx.sum().backward()
    bias = torch.zeros(V, device=device)
    for leaf, given_to in (weight, lambda leaf: (x, leaf, target)), (bias, lambda b: (x, weight, target, b)):
        leaf = leaf.clone().requires_grad_()
        loss = gander.linear_cross_entropy(*given_to(leaf))
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            gradient.square().sum().backward()
    leaf = x.clone().requires_grad_()
    message = "forward-mode derivatives are not supported"
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        gander.linear_cross_entropy(forward_ad.make_dual(x, x), weight, target)
    with pytest.raises(NotImplementedError, match="no batched gradients"):
        loss = gander.linear_cross_entropy(leaf, weight, target, reduction="none")
        torch.autograd.grad(loss, leaf, torch.eye(M, device=device), is_grads_batched=True)


X, WEIGHT, TARGET, BIAS, _ = given()
BAD = {
    "x is an array": (lambda f: f(X.numpy(), WEIGHT, TARGET), TypeError, "x is a ndarray"),
    "weight is transposed": (
        lambda f: f(X, WEIGHT.t(), TARGET),
        ValueError,
        r"weight has shape \(16, 33\), expected \(V, 16\)",
    ),
    "target": (lambda f: f(X, WEIGHT, TARGET[1:]), ValueError, r"target has shape \(9,\), expected \(10,\)"),
    "float targets": (lambda f: f(X, WEIGHT, TARGET.float()), TypeError, "target has dtype float32"),
    "bias": (
        lambda f: f(X, WEIGHT, TARGET, BIAS[1:]),
        ValueError,
        r"bias has shape \(32,\), expected \(33,\)",
    ),
    "mixed dtypes": (
        lambda f: f(X, WEIGHT.half(), TARGET),
        TypeError,
        "weight has dtype float16, expected float32",
    ),
    "integers": (
        lambda f: f(X.int(), WEIGHT.int(), TARGET),
        TypeError,
        "x has dtype int32, expected float16",
    ),
    "chunk": (lambda f: f(X, WEIGHT, TARGET, chunk=0), ValueError, "chunk is 0, expected a number of rows"),
    "accumulate": (
        lambda f: f(X, WEIGHT, TARGET, accumulate="float64"),
        ValueError,
        "accumulate is 'float64', expected None or 'float32'",
    ),
    "reduction": (lambda f: f(X, WEIGHT, TARGET, reduction="max"), ValueError, "reduction is 'max'"),
    "divisor": (
        lambda f: f(X, WEIGHT, TARGET, divisor=3),
        ValueError,
        "divisor is given with reduction 'mean'",
    ),
    "device": (
        lambda f: f(X, WEIGHT.to("meta"), TARGET),
        RuntimeError,
        "weight is on meta, expected cpu as x",
    ),
    "dtype of class weights": (
        lambda f: f(X, WEIGHT, TARGET, weight_ce=torch.ones(V).long()),
        TypeError,
        "weight_ce has dtype int64, expected float16, bfloat16 or float32",
    ),
    "class weights with a gradient": (
        lambda f: f(X, WEIGHT, TARGET, weight_ce=torch.ones(V, requires_grad=True)),
        NotImplementedError,
        "weight_ce requires a gradient",
    ),
}


def test_an_ignored_index_of_64_bits(device):
    """Regression test: an int32 target was compared with its low half, which is class 0."""
    x, weight, target, *_ = given(device)
    target = target.clamp(0)
    target[:3] = 0
    got = gander.linear_cross_entropy(x, weight, target.int(), ignore_index=2**32)
    torch.testing.assert_close(got.double(), reference(x, weight, target))


@pytest.mark.parametrize("case", BAD)
def test_refusals(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call(gander.linear_cross_entropy)


@pytest.mark.parametrize("rows", [0, M])
def test_transposed_weight(device, dtype, rows):
    """Regression test: a sum with the weight's strides could not be scaled, and fakes had others."""
    x, weight, target, *_ = given(device, dtype, rows)
    columns = weight.t().contiguous().t()
    for how in {"reduction": "sum"}, {"reduction": "sum", "chunk": 4, "accumulate": "float32"}:
        want = run(reference, x, weight, target, reduction="sum")
        for function in (
            gander.linear_cross_entropy,
            torch.compile(gander.linear_cross_entropy, backend="aot_eager"),
        ):
            leaves = x.clone().requires_grad_(), columns.detach().requires_grad_()
            loss = function(*leaves, target, **how)
            loss.backward()
            check([loss.detach(), *(leaf.grad for leaf in leaves)], want, dtype)
    torch._dynamo.reset()


def test_backward_in_two_threads(device):
    """Regression test: both scaled the gradient that forward made, in place, and returned it."""
    x, weight, target, *_ = given(device, m=64)
    want = run(reference, x, weight, target)
    for _ in range(20):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss, start, got = gander.linear_cross_entropy(*leaves, target), threading.Barrier(2), {}

        def backward(factor, loss=loss, leaves=leaves, start=start, got=got):
            scaled = loss * factor
            start.wait()
            got[factor] = torch.autograd.grad(scaled, leaves, retain_graph=True)

        threads = [threading.Thread(target=backward, args=(factor,)) for factor in (2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for factor, gradients in got.items():
            check(gradients, [factor * each for each in want[1:]], x.dtype)
        assert len(got) == 2
