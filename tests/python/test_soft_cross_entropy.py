"""Class probabilities as the targets of gander.cross_entropy, against torch in float64."""

import math
import pickle

import gander
import gander.nn.functional as F
import numpy as np
import pytest
import torch
from torch.nn import functional as theirs

M, N = 6, 40
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def given(dtype, soft=None):
    torch.manual_seed(0)
    x = (3 * torch.randn(M, N)).to(dtype)
    q = torch.rand(M, N).softmax(-1).to(soft or dtype)
    q[0] = 0
    q[0, 3], x[0, 3] = 1, 30  # a certain row
    return x, q


def close(got, want, dtype, units=4):
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}.get(dtype, 2.0**-50)
    size = want.abs().max().clamp(min=1e-30)
    assert got.shape == want.shape and (got.double() - want).abs().max() <= units * unit * size, (got, want)


OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01, "scale": 0.5},
    {"softcap": 5.0, "temperature": 0.7, "label_smoothing": 1.0},
]


def reference(
    x, q, weight, reduction, label_smoothing=0.0, z_loss=0.0, scale=1.0, softcap=None, temperature=1.0
):
    """By torch's function, in float64."""
    z = scale * x.double()
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    weight = None if weight is None else weight.double()
    losses = theirs.cross_entropy(z, q.double(), weight, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * z.logsumexp(-1) ** 2
    return {"none": losses, "sum": losses.sum(), "mean": losses.mean()}[reduction]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_loss_and_gradient(dtype, options, weighted, reduction):
    x, q = given(dtype)
    weight = torch.linspace(0, 2, N).to(dtype) if weighted else None
    leaf, exact = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    loss = gander.cross_entropy(leaf, q, weight=weight, reduction=reduction, **options)
    want = reference(exact, q, weight, reduction, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(loss.detach(), want.detach(), loss.dtype)
    upstream = torch.linspace(-1, 2, want.numel()).double().view_as(want)
    loss.backward(upstream.to(loss.dtype))
    want.backward(upstream)
    close(leaf.grad, exact.grad, dtype)

    again = x.clone().requires_grad_()
    middle = again * 1
    gander.cross_entropy(
        middle, q, weight=weight, reduction=reduction, inplace_backward=True, **options
    ).backward(upstream.to(loss.dtype))
    assert torch.equal(again.grad, leaf.grad)
    assert not torch.equal(middle.detach(), x), "the gradient was not written over the logits"


@pytest.mark.parametrize("soft", FLOATS[:3])
@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_probabilities_of_another_dtype(dtype, soft):
    x, q = given(dtype, soft)
    leaf, exact = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    loss, want = gander.cross_entropy(leaf, q), reference(exact, q, None, "mean")
    close(loss.detach(), want.detach(), torch.float32)
    loss.backward()
    want.backward()
    close(leaf.grad, exact.grad, dtype)


def test_a_certain_row_keeps_its_digits():
    x = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    loss = gander.cross_entropy(x, torch.tensor([[1.0, 0.0, 0.0]]))
    loss.backward()
    others = math.exp(-30)
    assert loss.item() == pytest.approx(2 * others, rel=1e-5)
    assert x.grad[0].tolist() == pytest.approx([-2 * others, others, others], rel=1e-5)


def test_a_class_that_cannot_be():
    x = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    loss = gander.cross_entropy(x, torch.tensor([[0.5, 0.0, 0.5]]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(x.grad).all() and x.grad[0, 1] == 0
    assert gander.cross_entropy(x, torch.tensor([[0.5, 0.5, 0.0]])) == math.inf
    assert gander.cross_entropy(torch.full((1, 3), -math.inf), torch.ones(1, 3)).isnan()


def test_divisor():
    x, q = given(torch.float32)
    leaf = x.clone().requires_grad_()
    loss = gander.cross_entropy(
        leaf, q, reduction="sum", divisor=torch.tensor(3.0), upstream=2.0, one_pass=True
    )
    loss.backward()
    exact = x.double().clone().requires_grad_()
    (reference(exact, q, None, "sum") / 3).backward()
    close(leaf.grad, exact.grad, torch.float32)


def test_without_rows():
    x, q = torch.empty(0, N, requires_grad=True), torch.empty(0, N)
    assert gander.cross_entropy(x, q).isnan() and theirs.cross_entropy(x, q).isnan()
    loss = gander.cross_entropy(x, q, reduction="sum")
    assert loss == 0
    loss.backward()
    assert x.grad.shape == (0, N)
    assert gander.cross_entropy(x, q, reduction="none").shape == (0,)


def test_more_dimensions():
    x, q = torch.randn(2, 3, N), torch.rand(2, 3, N)
    losses = gander.cross_entropy(x, q, reduction="none")
    assert losses.shape == (2, 3)
    want = reference(x.view(6, N), q.view(6, N), None, "mean")
    close(gander.cross_entropy(x, q), want, torch.float32)
    close(gander.cross_entropy(x[0, 0], q[0, 0]), reference(x[0, :1], q[0, :1], None, "mean"), torch.float32)


def test_arrays():
    x, q = (tensor.numpy() for tensor in given(torch.float32))
    loss = gander.cross_entropy(x, q, reduction="none")
    close(torch.from_numpy(loss), reference(*given(torch.float32), None, "none"), torch.float32)
    assert gander.cross_entropy(x, q.astype(np.float16)).shape == ()


def test_compiled():
    x, q = given(torch.float32)
    step = torch.compile(lambda x, q: gander.cross_entropy(x * 2, q, label_smoothing=0.1), fullgraph=True)
    leaf, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, want = step(leaf, q), gander.cross_entropy(eager * 2, q, label_smoothing=0.1)
    loss.backward()
    want.backward()
    assert torch.allclose(loss, want) and torch.allclose(leaf.grad, eager.grad)


def test_exported():
    class Loss(torch.nn.Module):
        def forward(self, x, q):
            return gander.cross_entropy(x, q)

    x, q = given(torch.float32)
    program = torch.export.export(Loss(), (x, q))
    assert any("soft_cross_entropy" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x, q), gander.cross_entropy(x, q))


SHAPES = [(N,), (M, N), (M, N, 3), (2, N, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_torch_names(shape, weighted, reduction):
    """The module and the function take what torch's take."""
    x, q = torch.randn(shape), torch.rand(shape)
    weight = torch.rand(N) if weighted else None
    leaf = x.clone().requires_grad_()
    module = gander.nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=0.1, remember=True)
    want = theirs.cross_entropy(x, q, weight, reduction=reduction, label_smoothing=0.1)
    loss = module(leaf, q)
    assert torch.allclose(loss, want, rtol=1e-5)
    assert "SoftCrossEntropy" in type(loss.grad_fn).__name__
    loss = F.cross_entropy(leaf, q, weight, reduction=reduction, label_smoothing=0.1)
    assert torch.allclose(loss, want, rtol=1e-5)
    assert "SoftCrossEntropy" in type(loss.grad_fn).__name__
    copy = pickle.loads(pickle.dumps(module))
    assert torch.equal(copy(x, q), module(x, q))


def test_torch_computes_gradients_of_probabilities():
    x, q = torch.randn(M, N), torch.rand(M, N, requires_grad=True)
    F.cross_entropy(x, q).backward()
    assert torch.allclose(q.grad, -x.log_softmax(-1) / M, atol=1e-6)


def test_refusals():
    x, q = given(torch.float32)
    lse, head = x.logsumexp(-1), torch.randn(9, N)
    use = "target has class probabilities, expected class indices, int32 or int64; use cross_entropy"
    for refused, call, words in (
        (
            NotImplementedError,
            lambda: gander.cross_entropy(x, q.clone().requires_grad_()),
            "target requires a gradient, but soft_cross_entropy has none for it, expected a constant; detach",
        ),
        (
            NotImplementedError,
            lambda: gander.cross_entropy(x, q, weight=torch.ones(N, requires_grad=True)),
            "weight requires a gradient",
        ),
        (
            ValueError,
            lambda: gander.cross_entropy(x, q, ignore_index=3),
            "ignore_index is 3 with class probab",
        ),
        (
            ValueError,
            lambda: gander.cross_entropy(x, q[1:]),
            r"target has shape \(5, 40\), expected \(6, 40\)",
        ),
        (
            TypeError,
            lambda: gander.cross_entropy(x, q[:, 0]),
            "target has dtype float32, expected int32 or int64",
        ),
        (
            TypeError,
            lambda: gander.cross_entropy(x.double(), q),
            "target has dtype float32, expected float64",
        ),
        (ValueError, lambda: gander.cross_entropy(x, q, divisor=2.0), "expected 'sum'"),
        (ValueError, lambda: gander.cross_entropy(x, q, label_smoothing=2.0), "label_smoothing is 2"),
        (NotImplementedError, lambda: gander.cross_entropy(x, q, lse.unsqueeze(-1)), use),
        (NotImplementedError, lambda: gander.cross_entropy_fwd(x, q), use),
        (NotImplementedError, lambda: gander.cross_entropy_bwd(x, q, lse, lse), use),
        (NotImplementedError, lambda: gander.cross_entropy_fwd_out(x, q, None, lse, None, None, None), use),
        (NotImplementedError, lambda: gander.cross_entropy_bwd_out(x, q, lse, lse, x.clone(), None), use),
        (
            NotImplementedError,
            lambda: gander.cross_entropy(x, q, outputs=["lse"]),
            "outputs is .* with class prob",
        ),
        (NotImplementedError, lambda: gander.distributed.cross_entropy(x, q), use),
        (NotImplementedError, lambda: gander.linear_cross_entropy(x, head, torch.rand(M, 9)), use),
        (NotImplementedError, lambda: gander.cross_entropy_fwd(x.numpy(), q.numpy()), use),
    ):
        with pytest.raises(refused, match=words):
            call()


def test_debug_checks_no_probability():
    gander.set_debug(True)
    try:
        assert gander.cross_entropy(*given(torch.float32)).isfinite()
    finally:
        gander.set_debug(False)
