"""cross_entropy's lse_partial and cross_entropy_fwd's target_logit, which are QuACK's."""

import gander
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, jacrev, vmap

INF, NAN = float("inf"), float("nan")


def slices(x):
    """The log-sum-exps of three slices of each row, the second of which is all -inf."""
    a, b = x[..., :4], x[..., 4:]
    return torch.stack(
        [gander.logsumexp(a), torch.full_like(gander.logsumexp(a), -INF), gander.logsumexp(b)], -1
    )


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def data(request):
    x = torch.randn(2, 5, 11).mul(3).to(request.param)
    target = torch.randint(11, (2, 5))
    target[0, 1], target[1, 1] = -100, 3
    weight = torch.rand(11).to(request.param)
    weight[3] = 0
    return x, target, weight


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lse_partial(data, reduction, weighted):
    x, target, weight = data
    weight = weight if weighted else None
    whole, leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = gander.cross_entropy(whole, target, weight=weight, reduction=reduction)
    partial = slices(leaf)
    assert partial.requires_grad
    got = gander.cross_entropy(leaf, target, partial, weight, reduction=reduction)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    for _ in range(2):
        upstream = torch.rand_like(want)
        (dx,) = torch.autograd.grad(got, leaf, upstream, retain_graph=True)
        (expected,) = torch.autograd.grad(want, whole, upstream, retain_graph=True)
        torch.testing.assert_close(dx, expected)
    other = x * 1
    loss = gander.cross_entropy(other.requires_grad_(), target, partial, weight, -100, reduction, True)
    (dx,) = torch.autograd.grad(loss, other, upstream)
    torch.testing.assert_close(dx, expected)
    assert torch.equal(other.detach(), dx)
    assert not gander.cross_entropy(x, target, partial.detach(), weight).requires_grad


def test_rows_with_special_values(data):
    x, target, weight = data
    x[0, 0, 0], x[0, 1], x[1, 0], target[1, 0] = NAN, NAN, -INF, 0
    x[1, 1, 0], x[1, 2, 3:], target[1, 2] = INF, -INF, 9
    for bad in 11, -1:
        target[0, 3] = bad
        for w in None, weight:
            for reduction in "none", "mean":
                want_x, got_x = x.clone().requires_grad_(), x.clone().requires_grad_()
                want = gander.cross_entropy(want_x, target, weight=w, reduction=reduction)
                got = gander.cross_entropy(got_x, target, slices(x), w, reduction=reduction)
                torch.testing.assert_close(got, want, equal_nan=True)
                want.sum().backward()
                got.sum().backward()
                torch.testing.assert_close(got_x.grad, want_x.grad, equal_nan=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_target_logit(data, weighted):
    x, target, weight = data
    weight = weight if weighted else None
    loss, lse = gander.cross_entropy_fwd(x, target, weight=weight, return_lse=True)
    by_row = x.gather(-1, target.clamp(0).unsqueeze(-1)).squeeze(-1)
    for logit in x, by_row, x.to(torch.float64 if x.dtype == torch.float64 else torch.float32):
        for given in x, slices(x):
            got = gander.cross_entropy_fwd(given, target, logit, weight, return_lse=True)
            torch.testing.assert_close(got, (loss, lse))
            assert torch.equal(gander.cross_entropy_fwd(given, target.int(), logit, weight), got[0])
    target[0, 0], target[0, 2] = 11, -1
    got = gander.cross_entropy_fwd(x, target, x, weight)
    assert got.isnan().flatten().tolist() == [True, False, True] + [False] * 7
    got = gander.cross_entropy_fwd(x, target, by_row, weight)
    assert got.isnan().flatten().tolist() == [weighted, False, True] + [False] * 7
    assert gander.cross_entropy_fwd(x.requires_grad_(), target, x).grad_fn is None


def test_no_rows():
    x, target = torch.randn(0, 4).requires_grad_(), torch.zeros(0, dtype=torch.int64)
    loss = gander.cross_entropy(x, target, x.detach(), reduction="sum")
    assert loss == 0
    loss.backward()
    assert x.grad.shape == (0, 4)
    assert gander.cross_entropy(x, target, x.detach()).isnan()
    assert gander.cross_entropy_fwd(x, target, x).shape == (0,)


def test_compiled():
    """The graph breaks at the call."""
    x, target = torch.randn(3, 5), torch.tensor([0, 4, -100])
    partial = gander.logsumexp(x)[:, None]
    compiled = torch.compile(lambda x: gander.cross_entropy(x * 2, target, partial) * 2, backend="eager")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = gander.cross_entropy(a * 2, target, partial) * 2
    got = compiled(b)
    assert torch.equal(got, loss)
    got.backward()
    loss.backward()
    assert torch.equal(a.grad, b.grad)


def test_refusals():
    x, target, weight = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), torch.ones(6)
    arrays = x.numpy(), target.numpy(), x.numpy()
    loss, forward = gander.cross_entropy, gander.cross_entropy_fwd
    for kind, match, call in (
        (ValueError, r"lse_partial has shape \(3, 2\)", lambda: loss(x, target, x[:3, :2])),
        (ValueError, r"lse_partial has shape \(4,\)", lambda: loss(x, target, x[:, 0])),
        (ValueError, r"lse_partial has shape \(4, 0\)", lambda: loss(x, target, x[:, :0])),
        (TypeError, "lse_partial has dtype float64, .* float32 as x is", lambda: loss(x, target, x.double())),
        (TypeError, "lse_partial has dtype int64", lambda: loss(x, target, x.long())),
        (TypeError, "lse_partial is a list, expected", lambda: loss(x, target, [1.0])),
        (RuntimeError, "lse_partial is on meta, expected cpu", lambda: loss(x, target, x.to("meta"))),
        (ValueError, "target has shape", lambda: loss(x, target[:3], x)),
        (ValueError, "weight has shape", lambda: loss(x, target, x, weight[:3])),
        (ValueError, r"target_logit has shape \(3,\)", lambda: forward(x, target, x[:3, 0])),
        (TypeError, "target_logit has dtype float64", lambda: forward(x, target, x.double())),
        (ValueError, r"weight has shape .* expected \(3,\)", lambda: forward(x, target, x[:, :3], weight)),
        (TypeError, "target has dtype float32", lambda: forward(x, target.float(), x)),
        (
            NotImplementedError,
            "return_dx is set with target_logit",
            lambda: forward(x, target, x, return_dx=True),
        ),
        (NotImplementedError, "lse_partial is supported for torch tensors only", lambda: loss(*arrays)),
        (NotImplementedError, "target_logit is supported for torch tensors only", lambda: forward(*arrays)),
    ):
        with pytest.raises(kind, match=match):
            call()


def test_lse_partial_inside_transforms():
    """Regression test: transforms outside of the innermost one took the loss for a constant."""
    x, target = torch.randn(4, 5, 11, dtype=torch.float64), torch.randint(11, (5,))

    def loss(x):
        return gander.cross_entropy(x, target, gander.logsumexp(x.detach()).unsqueeze(-1))

    def torchs(x):
        return F.cross_entropy(x, target)

    for transform in lambda f: vmap(grad(f))(x), lambda f: jacrev(f)(x[0]), lambda f: vmap(f)(x):
        torch.testing.assert_close(transform(loss), transform(torchs))
    value_of_a_gradient = grad(lambda x: grad_and_value(lambda scale: loss(x * scale))(torch.tensor(1.0))[1])
    for call in (
        lambda: grad(lambda x: vmap(loss)(x).sum())(x),
        lambda: vmap(loss)(x.clone().requires_grad_()),
        lambda: value_of_a_gradient(x[0]),
    ):
        with pytest.raises(NotImplementedError, match=r"for the innermost transform of torch\.func only"):
            call()
    with torch.no_grad():
        torch.testing.assert_close(vmap(loss)(x.clone().requires_grad_()), vmap(torchs)(x))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_checkpoint_that_saves_everything(reduction, device):
    """It refuses tensors that are written after they are saved."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    x, parts = torch.randn(4, 7, device=device, requires_grad=True), torch.randn(4, 1, device=device)
    target = torch.tensor([0, 6, -100, 3], device=device)

    def loss(x):
        return gander.cross_entropy(x, target, parts, reduction=reduction)

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    got = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False, context_fn=contexts).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(loss(x).sum(), x))
