"""linear_token_statistics against torch's operators in float64, on each of torch's paths."""

import functools

import gander
import pytest
import torch
import torch.nn.functional as F
from gander._functions.token_statistics import STATISTICS
from test_token_statistics import OPTIONS, of_torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {HALF: 4e-3, BRAIN: 3e-2, SINGLE: 1e-5, DOUBLE: 1e-11}
M, K, V = 10, 16, 200  # more columns than three tiles of backward have
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
options = pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)
DIFFERENTIABLE = ("log_prob", "entropy")


def operands(device="cpu", dtype=SINGLE, m=M):
    """hidden, weight, index and bias."""
    if device == "cuda" and dtype == DOUBLE:
        pytest.skip("float64 is served on the CPU only")
    hidden, weight, bias = torch.randn(m, K), torch.randn(V, K) / 2, torch.randn(V)
    index = torch.randint(V, (m,), device=device)
    return hidden.to(device, dtype), weight.to(device, dtype), index, bias.to(device, dtype)


def exact(hidden, weight, index, bias=None, row_mask=None, ignore_index=-100, outputs=DIFFERENTIABLE, **maps):
    """The statistics in float64, by torch's operators."""
    logits = F.linear(*(None if t is None else t.double() for t in (hidden, weight, bias)))
    counts = index != ignore_index
    if row_mask is not None:
        counts = counts & row_mask.bool()
    every = of_torch(logits, torch.where(counts, index.long(), 0), **maps)
    return [torch.where(counts, every[name], -1 if name == "predicted" else 0) for name in outputs]


def weighted(results):
    """A number to differentiate, in which each row of each result has another weight."""
    total = 0
    for step, result in enumerate(results, 1):
        if result.is_floating_point():
            weights = torch.linspace(-step, 2, result.numel(), dtype=DOUBLE, device=result.device)
            total = total + (result.double() * weights.view(result.shape)).sum()
    return total


def run(function, hidden, weight, index, bias=None, needs=(True, True, True), **given):
    """The results, and the gradients that are needed."""
    tensors = zip((hidden, weight, bias), needs, strict=True)
    leaves = [None if t is None else t.detach().clone().requires_grad_(need) for t, need in tensors]
    results = function(*leaves[:2], index, leaves[2], **given)
    weighted(results).backward()
    gradients = [leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [result.detach() for result in results], gradients


def check(got, want, dtype):
    tolerance = TOLERANCE[dtype]
    for mine, true in zip(got, want, strict=True):
        true = true.double()
        largest = float(true.abs().max()) if true.numel() else 0.0
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance * largest)


@options
@dtypes
@pytest.mark.parametrize("keep", ["nothing", "logits"])
@pytest.mark.parametrize("chunk", [None, 1, 4, 10, 100])
def test_values(device, dtype, given, chunk, keep):
    *rows, bias = operands(device, dtype)
    for outputs in DIFFERENTIABLE, ("entropy",), ("log_prob",):
        for own in {}, {"bias": bias}:
            how = own | given | {"outputs": outputs}
            want = run(exact, *rows, **how)
            got = run(gander.linear_token_statistics, *rows, **how, chunk=chunk, keep=keep)
            check(got[0] + got[1], want[0] + want[1], dtype)
    # Logits of 16 bits are rounded, so that the largest of one row may be another one.
    outputs = STATISTICS if dtype in (SINGLE, DOUBLE) else STATISTICS[:4]
    with torch.no_grad():
        got = gander.linear_token_statistics(*rows, bias, **given, outputs=outputs, chunk=chunk, keep=keep)
    check(got, exact(*rows, bias, **given, outputs=outputs), dtype)


@pytest.mark.parametrize("keep", ["nothing", "logits"])
@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("outputs", [DIFFERENTIABLE, DIFFERENTIABLE[:1]], ids=str)
def test_only_what_is_needed_is_multiplied(device, needs, outputs, keep, monkeypatch):
    rows = operands(device)[:3]
    want = run(exact, *rows, needs=(*needs, False), outputs=outputs) if any(needs) else None
    products = []
    for name in "mm", "addmm", "addmm_":
        of = torch.Tensor if name == "addmm_" else torch
        own = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *g, own=own, **how: products.append(1) or own(*g, **how))
    leaves = [t.clone().requires_grad_(need) for t, need in zip(rows[:2], needs, strict=True)]
    results = gander.linear_token_statistics(*leaves, rows[2], outputs=outputs, chunk=M, keep=keep)
    if not any(needs):
        assert len(products) == 1 and not results[0].requires_grad
        return
    weighted(results).backward()
    made = needs == (True, False) and outputs == DIFFERENTIABLE[:1] and keep == "nothing"
    assert len(products) == (2 if made or keep == "logits" else 3)
    check([leaf.grad for leaf in leaves if leaf.requires_grad], want[1], SINGLE)


def test_one_upstream_gradient(device):
    """A result that is not part of the loss has no gradient to compute."""
    rows = operands(device)[:3]
    for keep in "nothing", "logits":
        for outputs in DIFFERENTIABLE:
            leaves = [t.clone().requires_grad_() for t in rows[:2]]
            both = gander.linear_token_statistics(*leaves, rows[2], chunk=3, keep=keep)
            weighted([getattr(both, outputs)]).backward()
            check([leaf.grad for leaf in leaves], run(exact, *rows, outputs=(outputs,))[1], SINGLE)


def test_gradients_are_rounded_once(device):
    """In 16 bits, however many tiles there are, the error is that of one product."""
    torch.manual_seed(0)
    hidden, weight, index, _ = operands(device, BRAIN, 192)
    want = run(exact, hidden, weight, index)[1]

    def of_linear(hidden, weight, index, bias=None):
        return gander.token_statistics(F.linear(hidden, weight), index)

    errors = {
        chunk: [
            float((mine.double() - true.double()).square().mean().sqrt())
            for mine, true in zip(run(function, hidden, weight, index, **more)[1], want, strict=True)
        ]
        for chunk, function, more in (
            (0, of_linear, {}),
            (48, gander.linear_token_statistics, {"chunk": 48}),
        )
    }
    for mine, one in zip(errors[48], errors[0], strict=True):
        assert mine <= 1.1 * one


def test_shapes(device):
    """More dimensions, tensors that are not contiguous, other integers, and no rows."""
    hidden, weight, index, bias = operands(device, m=12)
    mask = torch.arange(12, device=device) % 3 != 0
    wide, long = torch.randn(12, 2 * K, device=device)[:, ::2], torch.randn(K, V, device=device).t()
    for rows, how in (
        ((hidden.view(3, 4, K), weight, index.view(3, 4)), {"row_mask": mask.view(3, 4)}),
        ((hidden.view(3, 4, K).transpose(0, 1), weight, index.view(3, 4).t().int()), {}),
        ((wide, long, (index % 100).to(torch.uint8)), {"row_mask": mask.long()}),
        ((hidden[0], weight, index[0]), {"row_mask": mask[1]}),
    ):
        for keep in "nothing", "logits":
            got = run(gander.linear_token_statistics, *rows, bias, **how, keep=keep, chunk=5)
            assert got[0][0].shape == rows[2].shape
            want = run(exact, *rows, bias, **how)
            check(got[0] + got[1], want[0] + want[1], SINGLE)
    empty = gander.linear_token_statistics
    results, gradients = run(empty, hidden[:0], weight, index[:0], outputs=STATISTICS[:2])
    assert [len(result) for result in results] == [0, 0] and gradients[0].shape == (0, K)
    assert not gradients[1].any()


@pytest.mark.parametrize("outputs", [DIFFERENTIABLE, DIFFERENTIABLE[:1]], ids=str)
@pytest.mark.parametrize("needs", [(True, True), (True, False)], ids=str)
def test_rows_that_are_left_out(device, outputs, needs):
    """Whatever is in them. An index that counts from a tile's first column is never the ignored one."""
    hidden, weight, index, _ = operands(device)
    index[:] = torch.arange(M) * 20
    mask = torch.ones(M, dtype=torch.bool, device=device)
    mask[4], index[6] = False, 7
    given = {"row_mask": mask, "ignore_index": 7, "outputs": outputs, "needs": (*needs, False)}
    want = run(exact, hidden, weight, index, **given)
    for chunk in 1, 3, M:
        results, gradients = run(gander.linear_token_statistics, hidden, weight, index, **given, chunk=chunk)
        check(results + gradients, want[0] + want[1], SINGLE)
        for row in 4, 6:
            assert not any(result[row] for result in results) and not gradients[0][row].any()
    negative = index.clone()
    negative[6] = given["ignore_index"] = -20
    want = run(exact, hidden, weight, negative, **given)
    got = run(gander.linear_token_statistics, hidden, weight, negative, **given, chunk=3)
    check(got[0] + got[1], want[0] + want[1], SINGLE)


@pytest.mark.parametrize("keep", ["nothing", "logits"])
@pytest.mark.parametrize("outputs", [DIFFERENTIABLE, DIFFERENTIABLE[:1]], ids=len)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_rows_that_are_left_out_whatever_comes_back(device, keep, outputs, compiles):
    """An importance ratio may overflow where the mask leaves a token out: 0 times inf comes back."""
    hidden, weight, index, _ = operands(device)
    mask = torch.arange(M, device=device) != 4
    index[6] = -100

    def gradient(hidden):
        given = {"row_mask": mask, "outputs": outputs, "keep": keep, "chunk": 3}
        return gander.linear_token_statistics(hidden, weight, index, **given).log_prob

    for bad in torch.nan, torch.inf:
        leaf = hidden.clone().requires_grad_()
        upstream = torch.ones(M, device=device).masked_fill_(~mask | (index == -100), bad)
        log_prob = (torch.compile(gradient, backend="aot_eager") if compiles else gradient)(leaf)
        (dx,) = torch.autograd.grad(log_prob, leaf, upstream)
        assert not dx[[4, 6]].any() and dx.isfinite().all() and dx[0].any()


@pytest.mark.parametrize("bad", [V, -1, 2**40])
def test_indices_out_of_range(device, bad):
    hidden, weight, index, _ = operands(device)
    index[5] = bad
    for needs in (True, True, False), (True, False, False):
        for outputs in DIFFERENTIABLE, DIFFERENTIABLE[:1]:
            given = {"needs": needs, "outputs": outputs, "chunk": 3}
            (log_prob, *_), (dx, *_) = run(gander.linear_token_statistics, hidden, weight, index, **given)
            nan = log_prob.isnan()
            assert nan[5] and nan.sum() == 1
            assert dx[5].isnan().all() and dx.isnan().sum() == K
            # Also if its result does not count, but not in a row that is left out.
            x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(needs[1])
            for mask, expected in (None, K), (torch.arange(M, device=device) != 5, 0):
                found = gander.linear_token_statistics(x, w, index, row_mask=mask, outputs=outputs, chunk=3)
                (dx,) = torch.autograd.grad(found.log_prob, x, (index != bad).float())
                assert dx.isnan().sum() == expected
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    weighted([gander.linear_token_statistics(*leaves, index, chunk=3).entropy]).backward()
    assert not leaves[0].grad.isnan().any()  # the entropy does not depend on the index
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="index"):
            gander.linear_token_statistics(hidden, weight, index)
    finally:
        gander.set_debug(False)


@dtypes
def test_another_dtype_of_weight(device, dtype):
    hidden, weight, index, bias = operands(device, dtype)
    other = SINGLE if dtype in (HALF, BRAIN) else dtype
    got = run(gander.linear_token_statistics, hidden, weight.to(other), index, bias.to(other))
    assert [gradient.dtype for gradient in got[1]] == [dtype, other, other]
    want = run(exact, hidden, weight, index, bias)
    check(got[0] + got[1], want[0] + want[1], dtype)


def test_autocast(device):
    hidden, weight, index, bias = operands(device)
    with torch.autocast(device, BRAIN):
        got = run(gander.linear_token_statistics, hidden, weight, index, bias)
    assert {gradient.dtype for gradient in got[1]} == {SINGLE}
    want = run(exact, hidden, weight, index, bias)
    check(got[0] + got[1], want[0] + want[1], BRAIN)


# ---- Paths ----

keeps = pytest.mark.parametrize("keep", ["nothing", "logits"])


def call(hidden, weight, index, bias=None, **given):
    return gander.linear_token_statistics(hidden, weight, index, bias, chunk=4, **given)


@keeps
def test_later_backward_passes(keep, device):
    rows = operands(device)
    want = run(exact, *rows)[1]
    leaves = [t.clone().requires_grad_() for t in (rows[0], rows[1], rows[3])]
    loss = weighted(call(*leaves[:2], rows[2], leaves[2], keep=keep))
    for times in 1, 2, 3:
        loss.backward(retain_graph=True)
        check([leaf.grad for leaf in leaves], [times * gradient for gradient in want], SINGLE)
    upstream = torch.eye(2, device=device)[0]
    got = torch.autograd.grad(loss, leaves, upstream, is_grads_batched=True, retain_graph=True)
    check([gradient[0] for gradient in got], want, SINGLE)


@keeps
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(keep, use_reentrant, device):
    rows = operands(device)
    each = lambda *given: tuple(call(*given, keep=keep))  # noqa: E731 - a reentrant one takes a tuple
    got = run(lambda *given: checkpoint(each, *given, use_reentrant=use_reentrant), *rows)
    want = run(exact, *rows)
    check(got[0] + got[1], want[0] + want[1], SINGLE)


@keeps
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)], ids=str)
@pytest.mark.parametrize("outputs", [DIFFERENTIABLE, DIFFERENTIABLE[:1]], ids=str)
def test_compiled(keep, needs, outputs, device):
    torch._dynamo.reset()  # the same code with other options
    rows = operands(device)
    compiled = torch.compile(call, fullgraph=True)
    got = run(compiled, *rows, needs=needs, outputs=outputs, keep=keep)
    want = run(exact, *rows, needs=needs, outputs=outputs)
    check(got[0] + got[1], want[0] + want[1], SINGLE)


@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_with_results_that_have_no_gradient(frozen, device):
    """They may be logged. If one is part of the loss, the gradient is NaN, because a graph cannot raise."""
    torch._dynamo.reset()
    hidden, weight, index, _ = operands(device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    needs = True, not frozen, False
    want = run(exact, hidden, weight, index, needs=needs, outputs=("log_prob",))[1]
    for factor in 0, 1:

        def loss(*given, factor=factor):
            log_prob, mean = compiled(*given, outputs=("log_prob", "mean_logit"))
            return (log_prob, mean.detach()) if not factor else (log_prob + mean,)

        gradients = run(lambda *given, loss=loss: loss(*given)[:1], hidden, weight, index, needs=needs)[1]
        if factor:
            assert all(gradient.isnan().all() for gradient in gradients)
        else:
            check(gradients, want, SINGLE)


@pytest.mark.parametrize("keep", ["nothing", "logits"])
def test_compiled_with_dynamic_shapes(device, keep):
    """A graph serves every number of rows and of tokens."""
    counter = CompileCounterWithBackend("aot_eager")
    function = functools.partial(gander.linear_token_statistics, keep=keep)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for m, classes in (5, 11), (12, 11), (7, 9), (9, 10):
        hidden, weight, index, bias = operands(device, m=m)
        rows = hidden, weight[:classes], index % classes, bias[:classes]
        got, want = run(compiled, *rows), run(exact, *rows)
        check(got[0] + got[1], want[0] + want[1], SINGLE)
        frames.append(counter.frame_count)
    assert frames[1] == frames[-1], frames


def test_compiled_autograd(device):
    rows = operands(device)
    want = run(exact, *rows)[1]
    for keep in "nothing", "logits":
        leaves = [t.clone().requires_grad_() for t in (rows[0], rows[1], rows[3])]
        loss = weighted(call(*leaves[:2], rows[2], leaves[2], keep=keep))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
        check([leaf.grad for leaf in leaves], want, SINGLE)


def test_transforms(device):
    hidden, weight, index, bias = operands(device)

    def loss(function):
        return lambda hidden, weight, bias: weighted(function(hidden, weight, index, bias))

    want = torch.func.grad(loss(exact), (0, 1, 2))(hidden, weight, bias)
    check(torch.func.grad(loss(call), (0, 1, 2))(hidden, weight, bias), want, SINGLE)
    batch = torch.stack([hidden, 2 * hidden])
    got = torch.vmap(lambda hidden: call(hidden, weight, index, bias).entropy)(batch)
    check([got], [torch.stack([exact(h, weight, index, bias)[1] for h in batch])], SINGLE)


@keeps
def test_batched_gradients(keep, device):
    hidden, weight, index, _ = operands(device)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    upstream = torch.randn(3, M, device=device)
    log_prob = call(*leaves, index, keep=keep).log_prob
    got = torch.autograd.grad(log_prob, leaves, upstream, is_grads_batched=True, retain_graph=True)
    for at in range(3):
        want = torch.autograd.grad(exact(*leaves, index)[0], leaves, upstream[at].double())
        check([gradient[at] for gradient in got], want, SINGLE)


def test_exported(device):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(K, V)

        def forward(self, hidden, index):
            return tuple(call(hidden, self.linear.weight, index, self.linear.bias))

    head, (hidden, _, index, _) = Head().to(device), operands(device)
    program = torch.export.export(head, (hidden, index))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "gander.linear_token_statistics.default" in targets
    torch.testing.assert_close(program.module()(hidden, index), head(hidden, index))
    trained = program.module()
    weighted(trained(hidden, index)).backward()
    weighted(head(hidden, index)).backward()
    torch.testing.assert_close(trained.linear.weight.grad, head.linear.weight.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_traced(device):
    hidden, weight, index, bias = operands(device)
    traced = torch.jit.trace(lambda *given: tuple(call(*given)), (hidden, weight, index, bias))
    check(traced(hidden, weight, index, bias), exact(hidden, weight, index, bias), SINGLE)
    graph = make_fx(lambda *given: tuple(call(*given)), tracing_mode="fake")(hidden, weight, index).graph
    assert torch.ops.gander.linear_token_statistics.default in [node.target for node in graph.nodes]
    assert [r.shape for r in call(hidden.to("meta"), weight.to("meta"), index.to("meta"))] == [(M,)] * 2


# ---- Refusals ----


def test_what_has_no_gradient(device):
    hidden, weight, index, _ = operands(device)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    result = call(*leaves, index, outputs=("log_prob", "mean_logit")).mean_logit
    with pytest.raises(NotImplementedError, match="mean_logit of linear_token_statistics has no gradient"):
        result.sum().backward()
    gradient = torch.autograd.grad(call(*leaves, index).log_prob.sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        call(forward_ad.make_dual(hidden, hidden), weight, index)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.ones(V, K + 1)}, ValueError, r"weight has shape \(200, 17\), expected \(V, 16\)"),
        ({"weight": torch.ones(V, K, dtype=DOUBLE)}, TypeError, "weight has dtype float64, expected float32"),
        ({"index": torch.zeros(M + 1, dtype=torch.long)}, ValueError, r"index has shape .* of hidden"),
        ({"index": torch.zeros(M)}, TypeError, "index has dtype float32, expected int32 or int64"),
        ({"row_mask": torch.ones(M - 1)}, ValueError, r"row_mask has shape \(9,\), expected \(10,\)"),
        ({"row_mask": torch.ones(M)}, TypeError, "row_mask has dtype float32"),
        ({"bias": torch.ones(V + 1)}, ValueError, r"bias has shape \(201,\), expected \(200,\)"),
        ({"hidden": torch.ones(M, K, dtype=torch.int32)}, TypeError, "hidden has dtype int32"),
        ({"keep": "all"}, ValueError, "keep is 'all', expected 'nothing' or 'logits'"),
        ({"chunk": 0}, ValueError, "chunk is 0, expected a number of rows of 1 or more"),
        ({"outputs": ("loss",)}, ValueError, "outputs is"),
        ({"softcap": 0}, ValueError, "softcap is 0, expected more than 0, or None"),
    ],
    ids=str,
)
def test_refusals(change, error, words):
    hidden, weight, index, bias = operands()
    given = {"hidden": hidden, "weight": weight, "index": index, "bias": bias} | change
    with pytest.raises(error, match=words):
        gander.linear_token_statistics(**given)


def test_accuracy_of_a_certain_token(device):
    """Where one token has nearly all of the probability, log_prob and entropy keep their digits."""
    hidden, weight = torch.eye(2, K, device=device), torch.zeros(V, K, device=device)
    weight[3, 0] = weight[5, 1] = 18.0
    index = torch.tensor([3, 5], device=device)
    got = gander.linear_token_statistics(hidden, weight, index, chunk=1)
    for name, value in zip(DIFFERENTIABLE, exact(hidden, weight, index), strict=True):
        torch.testing.assert_close(getattr(got, name).double(), value, rtol=1e-5, atol=0)
