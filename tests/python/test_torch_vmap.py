"""vmap gives the results of a loop over the samples, and each sample has its own gradient."""

import functools

import gander
import pytest
import torch
import torch.nn.functional as F
from demands import ON_DEMAND, asked_for, demands, every_demand, shown
from gander._table import TORCH

ops = torch.ops.gander
B, M, N = 5, 6, 33


@pytest.fixture
def batch():
    """Two targets of each sample are ignored, at different positions."""
    target = torch.randint(N, (B, M))
    for sample in range(B):
        target[sample, torch.randperm(M)[: sample % M]] = -100
    return {"x": torch.randn(B, M, N), "weight": torch.rand(B, N) + 0.5, "target": target}


PAIRS = {
    "softmax": (lambda x, weight, target: gander.softmax(x), lambda x, weight, target: F.softmax(x, -1)),
    "rmsnorm": (
        lambda x, weight, target: gander.rmsnorm(x, weight),
        lambda x, weight, target: F.rms_norm(x, (N,), weight, 1e-6),
    ),
    "l2norm": (
        lambda x, weight, target: gander.l2norm(x * weight),
        lambda x, weight, target: F.normalize(x * weight, dim=-1),
    ),
    "swiglu": (
        lambda x, weight, target: gander.swiglu(x, x.cos() * weight),
        lambda x, weight, target: F.silu(x) * (x.cos() * weight),
    ),
    "gelu_and_mul": (
        lambda x, weight, target: gander.gelu_and_mul(torch.cat((x, x.cos() * weight), -1)),
        lambda x, weight, target: F.gelu(x) * (x.cos() * weight),
    ),
    "token_statistics": (
        lambda x, weight, target: sum(gander.token_statistics(x * weight, target)),
        lambda x, weight, target: (
            -F.cross_entropy(x * weight, target, reduction="none")
            - (F.softmax(x * weight, -1) * F.log_softmax(x * weight, -1)).sum(-1) * (target != -100)
        ),
    ),
    "soft_cross_entropy": (
        lambda x, weight, target: gander.cross_entropy(
            x * weight, x.detach().cos().softmax(-1), reduction="none"
        ),
        lambda x, weight, target: F.cross_entropy(x * weight, x.detach().cos().softmax(-1), reduction="none"),
    ),
    "layernorm": (
        lambda x, weight, target: gander.layernorm(x, weight, weight.cos()),
        lambda x, weight, target: F.layer_norm(x, (N,), weight, weight.cos(), 1e-6),
    ),
    "sum and norm": (
        lambda x, weight, target: torch.mul(*gander.rmsnorm(x, weight, None, x.cos(), prenorm=True)),
        lambda x, weight, target: F.rms_norm(x + x.cos(), (N,), weight, 1e-6) * (x + x.cos()),
    ),
    "logsumexp": (
        lambda x, weight, target: gander.logsumexp(x),
        lambda x, weight, target: torch.logsumexp(x, -1),
    ),
} | {
    reduction: (
        lambda x, weight, target, reduction=reduction: gander.cross_entropy(
            x, target, weight=weight.detach(), reduction=reduction
        ),
        lambda x, weight, target, reduction=reduction: F.cross_entropy(
            x, target, weight=weight.detach(), reduction=reduction
        ),
    )
    for reduction in ("none", "sum", "mean")
}
BATCHED = [("x",), ("weight",), ("target",), ("x", "weight"), ("x", "target"), ("x", "weight", "target")]


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


def given(batch, batched, dims=(0, 0, 0)):
    """The arguments, some of them batched, and in_dims."""
    dims = tuple(dim if name in batched else None for name, dim in zip(batch, dims, strict=True))
    pairs = zip(batch.values(), dims, strict=True)
    return [value[0] if dim is None else value.movedim(0, dim) for value, dim in pairs], dims


def check(got, want):
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_results(pair, batch, batched):
    values, dims = given(batch, batched)
    check(torch.vmap(pair[0], dims)(*values), torch.vmap(pair[1], dims)(*values))


def test_batches_in_other_dimensions(pair, batch):
    values, dims = given(batch, ("x", "weight", "target"), (1, 1, 1))
    check(torch.vmap(pair[0], dims)(*values), torch.vmap(pair[1], dims)(*values))


def test_batches_of_batches(pair, batch):
    x = torch.randn(2, B, M, N)
    inner = lambda function: torch.vmap(function, (0, 0, 0))  # noqa: E731
    got, want = (
        torch.vmap(inner(function), (0, None, None))(x, batch["weight"], batch["target"]) for function in pair
    )
    check(got, want)


@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_gradients_per_sample(pair, batch, batched):
    """If the batch became rows, dw and the gradient of a mean would be those of all samples together."""
    values, dims = given(batch, batched)

    def gradients(function):
        scalar = lambda *inputs: function(*inputs).square().sum()  # noqa: E731
        return torch.vmap(torch.func.grad(scalar, argnums=(0, 1)), dims)(*values)

    check(gradients(pair[0]), gradients(pair[1]))


def test_gradients_of_a_batch(pair, batch):
    def gradients(function):
        def total(x, weight):
            return torch.vmap(function, (0, None, 0))(x, weight, batch["target"]).square().nansum()

        return torch.func.grad(total, argnums=(0, 1))(batch["x"], batch["weight"][0])

    check(gradients(pair[0]), gradients(pair[1]))


def test_gradients_of_what_the_function_closes_over(batch):
    def gradient(norm):
        weight = batch["weight"][0].clone().requires_grad_()
        torch.vmap(lambda x: norm(x, weight))(batch["x"]).square().sum().backward()
        return weight.grad

    check(gradient(gander.rmsnorm), gradient(lambda x, weight: F.rms_norm(x, (N,), weight, 1e-6)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(pair, batch, backend):
    torch._dynamo.reset()

    def gradients(function):
        scalar = lambda *inputs: function(*inputs).square().sum()  # noqa: E731
        return lambda *inputs: torch.vmap(torch.func.grad(scalar, argnums=(0, 1)), (0, None, 0))(*inputs)

    values, _ = given(batch, ("x", "target"))
    check(
        torch.compile(gradients(pair[0]), backend=backend, fullgraph=True)(*values),
        gradients(pair[1])(*values),
    )


def calls_of_every_operator(x, weight, target):
    """The arguments of each operator that does not write, all with a batch. One may have several calls."""
    rstd, mean, cos = torch.rand(B, M) + 0.5, torch.randn(B, M), weight.cos()
    saved = statistics(x, target)
    norms = (x, weight), (x, weight, cos), (x, weight, cos, x.cos()), (x, None, cos, x.cos())
    gradients = (x, weight, x.flip(0), None), (x, weight, x.flip(0), x.cos())
    heads, table = x[:, :, None], torch.rand(B, M, N // 2)
    rotation = heads, torch.cat([heads, heads.cos()], 2), table, table.cos()
    return {
        "softmax": [(x,)],
        "softmax_bwd": [(x, x.softmax(-1))],
        "rmsnorm": norms,
        "rmsnorm_bwd": [(*given, rstd) for given in gradients],
        "glu": [(x, x.cos())],
        "glu_bwd": [(x, x.cos(), x.flip(0))],
        "packed_glu": [(torch.cat((x, x.cos()), -1),)],
        "packed_glu_bwd": [(torch.cat((x, x.cos()), -1), x.flip(0))],
        "rotary": [rotation],
        "rotary_bwd": [rotation],
        "qk_norm_rotary": [(*rotation[:2], weight, cos, *rotation[2:])],
        "qk_norm_rotary_bwd": [
            (*rotation[:2], weight, cos, *rotation[2:], None, None, heads.sin(), rotation[1].sin())
        ],
        "token_statistics": [(x, target), (x, target, target > 1)],
        "token_statistics_bwd": [(x, target, None, torch.rand(B, M, 3), rstd, mean)],
        "soft_cross_entropy": [(x, x.abs(), weight)],
        "soft_cross_entropy_bwd": [(x, x.abs(), weight, rstd, torch.rand(B, M, 3))],
        "l2norm": [(x,)],
        "l2norm_bwd": [(x, x.flip(0), rstd)],
        "layernorm": norms,
        "layernorm_bwd": [(*given, mean, rstd) for given in gradients],
        "cross_entropy": [(x, target, weight)],
        "cross_entropy_fwd": [
            (x, target, weight),
            (x, target, weight, rstd[:, 0]),
            (x, target, weight, rstd[:, 0], rstd[:, 1]),
        ],
        "cross_entropy_fwd_one_pass": [(x, target, weight)],
        "cross_entropy_bwd": [(x, target, weight, rstd[:, 0], saved)],
        "masked_softmax": [(x, x.cos())],
        "masked_softmax_bwd": [(x, x.softmax(-1), weight[:, None].cos())],
        "logsumexp": [(x,)],
        "logsumexp_bwd": [(x, rstd, mean)],
    }


def statistics(x, target):
    """What cross_entropy_bwd reads, of each sample."""
    return torch.stack([ops.cross_entropy(a, b, needs_lse=True)[1] for a, b in zip(x, target, strict=True)])


def compare_with_a_loop(op, given):
    """With all arguments batched, with the first alone, and with all but the first."""
    others = len(given) - 1
    for dims in {(0,) + (0,) * others, (0,) + (None,) * others, (None,) + (0,) * others} - {(None,)}:
        dims = tuple(None if a is None else dim for a, dim in zip(given, dims, strict=True))
        values = [a if a is None or dim == 0 else a[1] for a, dim in zip(given, dims, strict=True)]
        each = [op(*(a[b] if dim == 0 else a for a, dim in zip(values, dims, strict=True))) for b in range(B)]
        if isinstance(each[0], torch.Tensor):
            each = [(result,) for result in each]
        check(torch.vmap(op, dims)(*values), tuple(map(torch.stack, zip(*each, strict=True))))


def test_every_operator(batch):
    x, weight, target = batch.values()
    calls = calls_of_every_operator(x, weight, target)
    assert set(calls) == {name for name, operator in TORCH.items() if not operator.writes}
    for name in set(calls) - set(ON_DEMAND):
        for given in calls[name]:
            compare_with_a_loop(getattr(ops, name), given)
    weight, dloss, saved = torch.rand(B, N), torch.rand(B), statistics(x, target)
    of_slice = functools.partial(ops.cross_entropy_bwd, slice=True)
    compare_with_a_loop(of_slice, (x, target + 2, weight, dloss, saved))


@pytest.mark.parametrize(("name", "asked"), every_demand(), ids=shown)
def test_every_demand(batch, name, asked):
    """A result that is not asked for has no elements in a sample either, and a tensor of its own."""
    op, found = functools.partial(getattr(ops, name), **asked), []

    def watched(*given):
        results = op(*given)
        found.append([(result.shape, result.dtype) for result in results])
        return results

    for given in calls_of_every_operator(*batch.values())[name]:
        compare_with_a_loop(op, given)
        dims = tuple(None if a is None else 0 for a in given)
        results = torch.vmap(watched, dims)(*given)
        every = torch.vmap(functools.partial(getattr(ops, name), **demands(name)[-1]), dims)(*given)
        for wanted, result, full, (shape, dtype) in zip(
            asked_for(name, asked), results, every, found.pop(), strict=True
        ):
            assert result.dtype == full.dtype == dtype
            assert (shape, result.numel()) == ((full.shape[1:], full.numel()) if wanted else ((0,), 0))
        storages = {result.untyped_storage()._cdata for result in results}
        assert len(storages) == len(results)


def test_unreduced_gradients_with_one_value_for_all_rows(batch):
    """The dloss of a sample is one value for all its rows, or one for each."""
    x, _, target = batch.values()
    _, lse, _ = ops.cross_entropy_fwd(x, target, needs_lse=True)
    gradient = functools.partial(ops.cross_entropy_bwd, reduction=0)
    for dloss in torch.rand(B), torch.rand(B, M), torch.rand(()):
        dims = (0, 0, None, 0 if dloss.ndim else None, 0)
        got = torch.vmap(gradient, dims)(x, target, None, dloss, lse)
        each = [gradient(x[b], target[b], None, dloss[b] if dloss.ndim else dloss, lse[b]) for b in range(B)]
        check(got, torch.stack(each))


def test_samples_of_one_row(batch):
    """Samples of shape (N), so that the batch is the only leading dimension."""
    x, weight, target = batch["x"][:, 0], batch["weight"][0], batch["target"][:, 0]
    check(torch.vmap(gander.softmax)(x), F.softmax(x, -1))
    check(torch.vmap(gander.rmsnorm, (0, None))(x, weight), F.rms_norm(x, (N,), weight, 1e-6))
    got = torch.vmap(lambda x, t: gander.cross_entropy(x, t, reduction="sum"))(x, target)
    check(got, F.cross_entropy(x, target, reduction="none"))


def test_samples_of_rank_0():
    """If the batch became rows, it would be the columns."""
    x = torch.randn(B)
    with pytest.raises((ValueError, RuntimeError), match="rank 0, expected rows"):
        torch.vmap(ops.softmax)(x)
    for function in gander.softmax, gander.log_softmax, gander.logsumexp:
        assert torch.equal(torch.vmap(function)(x), torch.stack([function(sample) for sample in x]))


def test_operands_of_a_higher_rank_than_a_sample_are_refused():
    """Regression test: the batch passed for heads, or for the first dimension of a mask."""
    weight, mask = torch.rand(B, N), torch.rand(B, M, N) > 0.3
    for norm in gander.rmsnorm, gander.layernorm:
        with pytest.raises((ValueError, RuntimeError), match="weight has shape"):
            torch.vmap(lambda x, norm=norm: norm(x, weight))(torch.randn(B, N))
    with pytest.raises((ValueError, RuntimeError), match="mask has shape"):
        torch.vmap(lambda x: gander.softmax(x, mask=mask))(torch.randn(B, M, N))


def test_operators_that_write(batch):
    x, _, target = batch.values()
    written = x.clone()
    loss, lse = torch.vmap(ops.cross_entropy_fwd_dx_)(written, target)
    every = functools.partial(ops.cross_entropy_fwd, needs_lse=True, needs_dx=True)
    each = [every(x[b], target[b]) for b in range(B)]
    check((loss, lse, written), tuple(map(torch.stack, zip(*each, strict=True))))
    moved = x.movedim(0, 1).clone()
    torch.vmap(ops.cross_entropy_fwd_dx_, (1, 0))(moved, target)
    check(moved.movedim(1, 0), written)
    saved = statistics(x, target)
    written = x.clone()
    torch.vmap(lambda x, t, s: ops.cross_entropy_bwd_(x, t, None, torch.ones(()), s) or x)(
        written, target, saved
    )
    each = [ops.cross_entropy_bwd(x[b], target[b], None, torch.ones(()), saved[b]) for b in range(B)]
    check(written, torch.stack(each))
    with pytest.raises(ValueError, match="over the same x; batch it too"):
        torch.vmap(ops.cross_entropy_fwd_dx_, (None, 0))(x[0].clone(), target)


def test_no_gradient_is_written_over_a_sample(batch):
    """Autograd outside of vmap sees all logits as one tensor, which later samples still need."""
    x, target = batch["x"].requires_grad_(), batch["target"]

    def gradient(function, **options):
        losses = torch.vmap(lambda x, target: function(x * 1, target, **options))(x, target)
        return torch.autograd.grad(losses, x, torch.rand(B, generator=torch.Generator().manual_seed(0)))[0]

    torch.testing.assert_close(
        gradient(gander.cross_entropy, inplace_backward=True), gradient(F.cross_entropy)
    )
    outside = x * 1
    losses = torch.vmap(lambda x, target: gander.cross_entropy(x, target, inplace_backward=True))
    before = outside.detach().clone()
    losses(outside, target).sum().backward()
    assert torch.equal(outside.detach(), before)


def test_no_samples():
    with pytest.raises(ValueError, match="batch of size 0"):
        torch.vmap(lambda x, t: gander.cross_entropy(x, t))(
            torch.randn(0, M, N), torch.zeros(0, M, dtype=torch.long)
        )
