"""Statistics of tokens' logits: their accuracy, and their gradients on each of torch's paths."""

import pickle

import gander
import numpy as np
import pytest
import torch
from gander._functions.token_statistics import STATISTICS
from tolerance import assert_accurate
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
M, N = 6, 50
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"scale": 0.25},
    "all": {"temperature": 1.5, "scale": 0.5, "softcap": 3.0},
}
dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=lambda d: str(d)[6:])
options = pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)


def skip_what_a_gpu_lacks(device, dtype):
    if device == "cuda" and dtype == DOUBLE:
        pytest.skip("float64 is served on the CPU only")


def operands(shape=(M, N), dtype=SINGLE, device="cpu"):
    logits = (3 * torch.randn(shape, dtype=DOUBLE)).to(device, dtype)
    return logits, torch.randint(shape[-1], shape[:-1], device=device)


def of_torch(logits, index, temperature=1.0, scale=1.0, softcap=None):
    """All statistics in torch's operators, in the logits' dtype."""
    z = logits * scale if softcap is None else softcap * torch.tanh(logits * scale / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    p, predicted = log_p.exp(), z.argmax(-1)
    return {
        "log_prob": log_p.gather(-1, index[..., None])[..., 0],
        "entropy": torch.special.entr(p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logit": (z / temperature).mean(-1),
        "is_top1": predicted == index,
        "predicted": predicted,
    }


@options
@dtypes
@pytest.mark.parametrize("shape", [(M, N), (2, 3, 1001), (7,), (3, 1), (2, 5000)], ids=str)
def test_accuracy(shape, dtype, given, device):
    skip_what_a_gpu_lacks(device, dtype)
    logits, index = operands(shape, dtype, device)
    got = gander.token_statistics(logits, index, outputs=STATISTICS, **given)
    exact = of_torch(logits.double(), index, **given)
    wide = SINGLE if dtype in (HALF, BRAIN) else dtype
    for name, value in exact.items():
        result = getattr(got, name)
        assert result.shape == shape[:-1]
        if name in ("is_top1", "predicted"):
            assert torch.equal(result, value)
        else:
            assert result.dtype == wide
            torch.testing.assert_close(
                result.double(), value, rtol=0, atol=(1e-13 if dtype == DOUBLE else 4e-6) * 10
            )
    assert not (got.log_prob > 0).any() and not (got.entropy < 0).any()


@options
@dtypes
@pytest.mark.parametrize("which", ["log_prob", "entropy", "log_prob entropy"])
def test_gradients(which, dtype, given, device):
    skip_what_a_gpu_lacks(device, dtype)
    logits, index = operands((2, 3, 1001), dtype, device)
    names = which.split()

    def gradient(of, leaf):
        leaf = leaf.detach().clone().requires_grad_()
        values = of(leaf)
        loss = sum((value * torch.arange(1, 7, device=device).view(2, 3).sin()).sum() for value in values)
        return torch.autograd.grad(loss, leaf)[0]

    def ours(x):
        return gander.token_statistics(x, index, outputs=names, **given)

    def theirs(x):
        found = of_torch(x, index, **given)
        return [found[name] for name in names]

    got = gradient(ours, logits)
    assert got.dtype == dtype and got.shape == logits.shape
    of_torch_itself = gradient(theirs, logits if dtype == DOUBLE else logits.float()).to(dtype)
    assert_accurate(got, of_torch_itself, gradient(theirs, logits.double()))


def test_what_is_not_asked_for_has_no_gradient():
    logits, index = operands()
    logits.requires_grad_()
    found = gander.token_statistics(logits, index, outputs=STATISTICS)
    assert not found.is_top1.requires_grad and not found.predicted.requires_grad
    for name in ("log_sum_sq_probs", "mean_logit"):
        with pytest.raises(NotImplementedError, match=f"{name} of token_statistics has no gradient"):
            (getattr(found, name) + found.log_prob).sum().backward(retain_graph=True)
    (first,) = torch.autograd.grad(found.log_prob.sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()


def test_no_tensor_of_the_size_of_the_logits_besides_the_gradient():
    """Forward keeps three numbers a row, whatever the options."""
    logits, index = operands((4, 4096))
    logits.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gander.token_statistics(logits, index, softcap=3.0, temperature=0.5)
    others = [t for t in saved if t.data_ptr() != logits.data_ptr() and t is not index]
    assert max(t.numel() for t in others) == 12


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_rows_that_are_left_out(mask, device):
    logits, index = operands(device=device)
    keep = torch.tensor([1, 0, 1, 1, 0, 1], device=device).to(mask)
    index[3] = -5
    logits[[1, 3, 4]] = torch.nan
    logits.requires_grad_()
    found = gander.token_statistics(logits, index, row_mask=keep, ignore_index=-5, outputs=STATISTICS)
    (found.log_prob + found.entropy).sum().backward()
    left_out = torch.tensor([False, True, False, True, True, False], device=device)
    for name in STATISTICS:
        values = getattr(found, name)[left_out]
        assert (values == (-1 if name == "predicted" else 0)).all(), name
    assert (logits.grad[left_out] == 0).all() and (logits.grad[~left_out] != 0).any(-1).all()
    few = logits.detach()[~left_out]
    alone = gander.token_statistics(few, index[~left_out], outputs=STATISTICS)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(found, name)[~left_out].detach(), getattr(alone, name))


def test_indices_out_of_range(device):
    logits, index = operands(device=device)
    index[0], index[1] = N, -1
    logits[0, 1], logits[1, 2] = -200.0, -torch.inf  # with a probability of 0, whose gradient is NaN too
    logits.requires_grad_()
    found = gander.token_statistics(logits, index)
    assert found.log_prob[:2].isnan().all() and found.log_prob[2:].isfinite().all()
    assert found.entropy.isfinite().all()
    for name, bad in ("log_prob", True), ("entropy", False):
        (gradient,) = torch.autograd.grad(getattr(found, name).sum(), logits, retain_graph=True)
        assert gradient[:2].isnan().all() == bad and gradient[2:].isfinite().all()
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match=f"index has the class {N}, expected 0 to {N - 1}, or ignore"):
            gander.token_statistics(logits, index)
    finally:
        gander.set_debug(False)


def test_nearly_certain_rows(device):
    """The entropy and the loss keep their digits where one token has nearly all of the probability."""
    logits = torch.zeros(2, 1000, device=device)
    logits[0, 7], logits[1, 7] = 20.0, 40.0
    index = torch.tensor([7, 7], device=device)
    found, exact = gander.token_statistics(logits, index), of_torch(logits.double(), index)
    for name in ("log_prob", "entropy"):
        torch.testing.assert_close(getattr(found, name).double(), exact[name], rtol=2e-5, atol=1e-13)


def test_ties_are_the_first(device):
    logits = torch.zeros(3, 4097, device=device)
    logits[0, [5, 3000]] = 9.0
    found = gander.token_statistics(
        logits, torch.tensor([3000, 0, 1], device=device), outputs=("predicted", "is_top1")
    )
    assert found.predicted.tolist() == [5, 0, 0] and found.is_top1.tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
def test_rows_have_the_same_bits_in_any_batch(dtype, device):
    """And with another stride that keeps rows aligned, and in a compiled function."""
    logits, index = operands((4096, 1000), dtype, device)
    padded = torch.empty(4096, 1024, dtype=dtype, device=device)[:, :1000].copy_(logits)

    def statistics(logits, index):
        return gander.token_statistics(logits, index, outputs=STATISTICS, batch_invariant=True)

    whole = statistics(logits, index)
    compiled = torch.compile(statistics, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in slice(0, 1), slice(3, 10), slice(1, 257), slice(7, 264), slice(0, 4096):
        for found in (
            statistics(logits[rows], index[rows]),
            statistics(padded[rows], index[rows]),
            compiled(logits[rows], index[rows]),
        ):
            assert all(torch.equal(a, b[rows]) for a, b in zip(found, whole, strict=True))


# ---- torch's paths ----


def loss_of(logits, index, **how):
    found = gander.token_statistics(logits, index, temperature=0.7, **how)
    return (found.log_prob - 0.1 * found.entropy).mean()


def expected():
    logits, index = operands()
    logits.requires_grad_()
    loss_of(logits, index).backward()
    return logits.detach(), index, logits.grad


def test_compiled():
    logits, index, gradient = expected()
    leaf = logits.clone().requires_grad_()
    torch.compile(loss_of, fullgraph=True)(leaf, index).backward()
    assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize(
    "outputs", [("entropy",), ("predicted", "log_prob"), ["is_top1", "entropy"]], ids=str
)
def test_compiled_outputs(outputs):
    """A graph returns a named tuple of what was asked for, also of names that no call had before."""
    logits, index = operands()
    want = gander.token_statistics(logits, index, outputs=outputs)

    def function(x, i):
        return gander.token_statistics(x, i, outputs=outputs)

    got = torch.compile(function, fullgraph=True)(logits, index)
    assert type(got)._fields == type(want)._fields == tuple(outputs)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", ["log_sum_sq_probs", "mean_logit"])
def test_compiled_with_results_that_have_no_gradient(name):
    """They may be logged. If one is part of the loss, the gradient is NaN, because a graph cannot raise."""
    logits, index = operands()
    for factor in 0, 1:

        def loss(x, i, factor=factor):
            found = gander.token_statistics(x, i, outputs=("log_prob", name))
            other = getattr(found, name)
            return (found.log_prob + other).sum() if factor else found.log_prob.sum(), other

        leaf = logits.clone().requires_grad_()
        got, other = torch.compile(loss, fullgraph=True)(leaf, index)
        got.backward()
        expected = logits.clone().requires_grad_()
        gander.token_statistics(expected, index).log_prob.sum().backward()
        assert leaf.grad.isnan().all() if factor else torch.equal(leaf.grad, expected.grad)
        torch.testing.assert_close(other, of_torch(logits, index)[name])


def test_grad_of_func():
    logits, index, gradient = expected()
    assert torch.equal(torch.func.grad(loss_of)(logits, index), gradient)
    each = torch.func.vmap(torch.func.grad(loss_of))(logits[:, None], index[:, None])
    torch.testing.assert_close(each[:, 0] / M, gradient)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    logits, index, gradient = expected()
    leaf = logits.clone().requires_grad_()
    checkpoint(loss_of, leaf, index, use_reentrant=use_reentrant).backward()
    assert torch.equal(leaf.grad, gradient)


def test_exported():
    logits, index, gradient = expected()

    class Loss(torch.nn.Module):
        def forward(self, x, i):
            return loss_of(x, i)

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Loss(), (logits, index), dynamic_shapes=({0: rows}, {0: rows})).module()
    leaf = logits.clone().requires_grad_()
    program(leaf, index).backward()
    assert torch.equal(leaf.grad, gradient)
    assert torch.equal(program(logits[:3], index[:3]), loss_of(logits[:3], index[:3]))


def test_in_place():
    logits, index, gradient = expected()
    leaf = logits.clone().requires_grad_()
    given = leaf * 1
    (got,) = torch.autograd.grad(loss_of(given, index, inplace_backward=True), given)
    assert got.data_ptr() == given.data_ptr() and torch.equal(got, gradient)


@pytest.mark.parametrize("name", ["log_prob", "entropy"])
def test_in_place_with_one_upstream_gradient(name):
    (logits, index, _), gradients = expected(), []
    for in_place in False, True:
        given = logits.clone().requires_grad_() * 1
        found = getattr(gander.token_statistics(given, index, inplace_backward=in_place), name)
        (got,) = torch.autograd.grad(found.sum(), given)
        assert (got.data_ptr() == given.data_ptr()) == in_place
        gradients.append(got)
    assert torch.equal(*gradients)


def test_strides():
    logits, index = operands((4, 2 * N))
    for view in logits[:, ::2], logits[::2, :N], logits.t()[:5]:
        i = (
            index[: len(view)] % view.shape[-1]
            if len(view) <= 4
            else torch.zeros(len(view), dtype=torch.int32)
        )
        assert all(
            map(torch.equal, gander.token_statistics(view, i), gander.token_statistics(view.contiguous(), i))
        )


# ---- The named tuple ----


def test_outputs():
    logits, index = operands()
    log_prob, entropy = gander.token_statistics(logits, index)
    assert torch.equal(entropy, gander.token_statistics(logits, index, outputs=["entropy"]).entropy)
    found = gander.token_statistics(logits, index, outputs=("predicted", "log_prob"))
    assert found._fields == ("predicted", "log_prob") and torch.equal(found.log_prob, log_prob)
    again = pickle.loads(pickle.dumps(found))
    assert again._fields == found._fields and torch.equal(again.predicted, found.predicted)
    with pytest.raises(AttributeError):
        found.entropy  # noqa: B018 - it was not asked for
    with pytest.raises(
        ValueError, match=r"outputs is \('entropy', 'entropy'\), expected a tuple of different"
    ):
        gander.token_statistics(logits, index, outputs=("entropy", "entropy"))
    with pytest.raises(
        ValueError, match=r"outputs is \(\), expected a tuple of different names out of 'log_"
    ):
        gander.token_statistics(logits, index, outputs=())


def test_arrays():
    logits, index = operands()
    found = gander.token_statistics(logits.numpy(), index.numpy(), outputs=STATISTICS)
    for mine, of in zip(found, gander.token_statistics(logits, index, outputs=STATISTICS), strict=True):
        assert isinstance(mine, np.ndarray) and np.array_equal(mine, of.numpy())
    assert found.is_top1.dtype == bool and found.predicted.dtype == np.int64
