"""DTensor: operands with sharded rows need no collective. Other placements are refused with an error.

All tests run on one rank, most with torch's fake backend, which counts collectives and does not run them.
test_distributed.py has several ranks.
"""

import functools
import os
import subprocess
import sys

import gander
import pytest
import torch
from demands import asked_for, check_unwanted, demands, every_demand, leaves, shown
from gander._table import TORCH, operands, tensors

dist = pytest.importorskip("torch.distributed", reason="this torch is built without it")
if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

ops = torch.ops.gander
N = 8


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(group):
    """One mesh for all tests, because torch 2.15 compiles only for the first mesh, also its own functions."""
    return init_device_mesh("cpu", (4,))


@pytest.fixture
def local():
    """This rank's parts of x, of a weight and of targets."""
    return torch.randn(4, 3, N), torch.rand(N), torch.randint(N, (4, 3))


def place(tensor, mesh, *placements):
    return DTensor.from_local(tensor.detach(), mesh, placements)


def leaf(tensor, mesh, *placements):
    return place(tensor, mesh, *placements).requires_grad_()


def collectives(function):
    """A function's results, and its number of collectives."""
    with CommDebugMode() as counter:
        results = function()
    return results, counter.get_total_counts()


def check(got, want, *placements):
    assert got.placements == placements
    assert torch.equal(got.to_local(), want)


SHARDS = [(Shard(0),), (Shard(1),), (Replicate(),)]
FUNCTIONS = {
    "softmax": lambda x, weight, target: gander.softmax(x),
    "rmsnorm": lambda x, weight, target: gander.rmsnorm(x, weight),
    "rmsnorm without weight": lambda x, weight, target: gander.rmsnorm(x, out_dtype=torch.bfloat16),
    "l2norm": lambda x, weight, target: gander.l2norm(x),
    "layernorm": lambda x, weight, target: gander.layernorm(x, weight, weight),
    "sum and norm": lambda x, weight, target: torch.mul(*gander.layernorm(x, weight, None, x, prenorm=True)),
    "logsumexp": lambda x, weight, target: gander.logsumexp(x),
    "log_softmax": lambda x, weight, target: gander.log_softmax(x, scale=2.0, mask=weight),
    "sum": lambda x, weight, target: gander.cross_entropy(x, target, reduction="sum"),
    "divided sum": lambda x, weight, target: gander.cross_entropy(x, target, reduction="sum", divisor=7),
    "none": lambda x, weight, target: gander.cross_entropy(x, target, weight=weight, reduction="none"),
    "probabilities": lambda x, weight, target: gander.cross_entropy(
        x, x.detach().cos().abs(), weight=weight, reduction="none"
    ),
    "statistics": lambda x, weight, target: gander.token_statistics(x, target).entropy,
}


@pytest.mark.parametrize("dim", [0, 2], ids=["sequences", "heads"])
@pytest.mark.parametrize("each", [False, True], ids=["one table", "tables"])
def test_rotary(dim, each, mesh):
    """Heads of tokens sharded by sequences or by heads, with their gradients and no collective."""
    q, k = torch.randn(4, 5, 8, N), torch.randn(4, 5, 4, N)
    cos, sin = torch.randn(2, 4, 5, N) if each else torch.randn(2, 1, 5, N)
    offsets = torch.tensor([0, 0, 0, 0])
    options = {"per_element": True, "needs_k_out": True}
    plain = q.clone().requires_grad_(), k.clone().requires_grad_()
    want = ops.rotary(*plain, cos, sin, offsets, **options)
    wanted = torch.autograd.grad(want, plain, want)

    shard = Shard(dim)
    by_sequence = shard if dim == 0 else Replicate()
    leaves = leaf(q, mesh, shard), leaf(k, mesh, shard)
    table = by_sequence if each else Replicate()
    others = place(cos, mesh, table), place(sin, mesh, table), place(offsets, mesh, by_sequence)
    got, forward = collectives(lambda: ops.rotary(*leaves, *others, **options))
    upstream = [place(y, mesh, shard) for y in want]
    gradients, backward = collectives(lambda: torch.autograd.grad(got, leaves, upstream))
    for result, expected in zip((*got, *gradients), (*want, *wanted), strict=True):
        check(result, expected, shard)
    assert forward == backward == 0


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("name", ["rotary", "qk_norm_rotary"])
def test_loss_of_one_result(name, used, backend, mesh):
    """A loss of q alone, or of k alone: what belongs to the other has no gradient, as without DTensor."""
    heads = [torch.randn(4, 5, 8, N), torch.randn(4, 5, 4, N)]
    weights = [] if name == "rotary" else [torch.rand(N), torch.rand(N)]
    tables = torch.randn(2, 5, N // 2)

    def gradients(loss, leaves, others):
        return torch.autograd.grad(loss(*leaves, *others), leaves, allow_unused=True)

    def loss(*given):
        y = getattr(ops, name)(*given, needs_k_out=True)[used].square()
        return (y.to_local() if isinstance(y, DTensor) else y).sum()

    want = gradients(loss, [x.clone().requires_grad_() for x in heads + weights], tables)
    assert [gradient is not None for gradient in want] == [used == i % 2 for i in range(len(want))]
    leaves = [leaf(x, mesh, Shard(2)) for x in heads] + [leaf(x, mesh, Replicate()) for x in weights]
    others = [place(table, mesh, Replicate()) for table in tables]
    if backend:
        loss = torch.compile(loss, backend=backend, fullgraph=True)
    got = gradients(loss, leaves, others)
    for x, gradient, expected in zip(leaves, got, want, strict=True):
        if expected is None:
            assert gradient is None
        else:
            check(gradient, expected, Shard(2) if x.ndim > 1 else Partial("sum"))


@pytest.mark.parametrize(
    "dim, message", [(1, "because a position counts from the first token"), (3, "Shard of")]
)
def test_rotary_refuses(dim, message, mesh):
    q, table = torch.randn(4, 5, 8, N), torch.randn(5, N // 2)
    with pytest.raises(NotImplementedError, match=message):
        ops.rotary(place(q, mesh, Shard(dim)), None, *(place(table, mesh, Replicate()) for _ in range(2)))
    with pytest.raises(NotImplementedError, match=r"cos has placements .* expected Replicate"):
        ops.rotary(place(q, mesh, Replicate()), None, *(place(table, mesh, Shard(0)) for _ in range(2)))


@pytest.mark.parametrize("placements", SHARDS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_results(name, placements, mode, mesh, local):
    x, weight, target = local
    with mode():
        want = FUNCTIONS[name](*local)
        inputs = (
            place(x, mesh, *placements),
            place(weight, mesh, Replicate()),
            place(target, mesh, *placements),
        )
        got, count = collectives(lambda: FUNCTIONS[name](*inputs))
    expected = (
        (Partial("sum"),) if name in ("sum", "divided sum") and placements != (Replicate(),) else placements
    )
    check(got, want, *expected)
    assert count == 0
    if got.ndim:
        assert got.shape[0] == (4 * 4 if placements == (Shard(0),) else 4)


@pytest.mark.parametrize("placements", SHARDS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name, placements, mesh, local):
    x, weight, target = local
    trained = name in ("rmsnorm", "layernorm", "sum and norm")
    plain = x.clone().requires_grad_(), weight.clone().requires_grad_(trained)
    wanted = plain[: 1 + trained]
    out = FUNCTIONS[name](*plain, target)
    upstream = torch.rand_like(out)
    want = torch.autograd.grad(out, wanted, upstream)

    leaves = leaf(x, mesh, *placements), place(weight, mesh, Replicate()).requires_grad_(trained)
    got, forward = collectives(lambda: FUNCTIONS[name](*leaves, place(target, mesh, *placements)))
    # the gradient of a partial sum is the same on every rank
    upstream = place(
        upstream, mesh, *(got.placements if got.placements != (Partial("sum"),) else (Replicate(),))
    )
    gradients, backward = collectives(lambda: torch.autograd.grad(got, leaves[: len(wanted)], upstream))
    assert forward == backward == 0
    torch.testing.assert_close(gradients[0].to_local(), want[0])
    assert gradients[0].placements == placements
    if trained:
        check(gradients[1], want[1], Partial("sum") if placements != (Replicate(),) else Replicate())


def operands_of(name, local):
    """This rank's tensors for an operator with results on demand, and its options."""
    x, weight, target = local
    by_row = torch.rand(x.shape[:-1]) + 0.5
    norm = (x, weight, weight.cos(), x.cos()), {"out_dtype": torch.bfloat16}
    statistics = (by_row.cos(), by_row) if name.startswith("layernorm") else (by_row,)
    rotation = x[:, None], x[:, None].cos(), *torch.rand(2, 1, N // 2)
    return {
        "rmsnorm": norm,
        "layernorm": norm,
        "l2norm": ((x,), {"eps": 0.5}),
        "token_statistics": ((x, target, target > 1), {"temperature": 0.5}),
        "soft_cross_entropy": ((x, x.cos().abs(), weight.cos()), {"temperature": 0.5, "reduction": 0}),
        "rotary": (rotation, {}),
        "rotary_bwd": (rotation, {}),
        "qk_norm_rotary": ((*rotation[:2], weight, weight.cos(), *rotation[2:]), {}),
        "qk_norm_rotary_bwd": (
            (*rotation[:2], weight, weight.cos(), *rotation[2:], None, None, x[:, None].sin(), x[:, None]),
            {},
        ),
        "rmsnorm_bwd": ((x, weight, x.sin(), x.cos(), *statistics), {"bias_dtype": torch.bfloat16}),
        "layernorm_bwd": ((x, weight, x.sin(), x.cos(), *statistics), {"residual_dtype": torch.half}),
        "cross_entropy": ((x, target, weight), {"reduction": 2}),
        "cross_entropy_fwd": ((x, target, weight, torch.tensor(2.0), torch.tensor(4.0)), {}),
    }[name]


@pytest.mark.parametrize("placements", SHARDS, ids=str)
@pytest.mark.parametrize(("name", "asked"), every_demand(), ids=shown)
@pytest.mark.parametrize("how", ["eager", "gradient", "aot_eager"])
def test_every_demand(name, asked, placements, how, mesh, local):
    """Results that are not asked for have no elements on any rank, and others are those of the rows."""
    given, options = operands_of(name, local)
    op = functools.partial(getattr(ops, name), **options, **asked)
    want, every = op(*given), getattr(ops, name)(*given, **options, **demands(name)[-1])
    by_row = {"rows", "per_row", "strided", "heads", "other_heads"}
    if "rotary" in name and placements == (Shard(1),):  # tokens
        placements = (Shard(2),)
    inputs = [
        value
        if value is None
        else place(value, mesh, *(placements if operands(name)[argument].shape in by_row else (Replicate(),)))
        for argument, value in zip(tensors(name), given, strict=False)
    ]
    if how == "gradient":
        inputs = leaves(name, inputs)
    if how == "aot_eager":
        torch._dynamo.reset()
        call = lambda *given: getattr(ops, name)(*given, **options, **asked)  # noqa: E731
        op = torch.compile(call, backend="aot_eager", fullgraph=True)
    if name == "cross_entropy" and asked["needs_lse"] and placements != (Replicate(),):
        with pytest.raises(Exception, match="statistics of all rows are returned in one tensor"):
            op(*inputs)
        return
    if how == "aot_eager":  # which is not compiled while a mode counts
        got = op(*inputs)
    else:
        got, count = collectives(lambda: op(*inputs))
        assert count == 0
    check_unwanted(name, asked, [result.to_local() for result in got], every)
    for result, wanted, mine, expected in zip(
        TORCH[name].results, asked_for(name, asked), got, want, strict=True
    ):
        assert torch.equal(mine.to_local(), expected)
        shape = operands(name)[result].shape
        if not wanted or placements == (Replicate(),):
            assert mine.placements == (Replicate(),)
        elif shape in ("head_columns", "columns") or (shape == "reduced" and name == "cross_entropy"):
            assert mine.placements == (Partial("sum"),)
        else:
            assert mine.placements == placements
            assert mine.shape[placements[0].dim] == 4 * expected.shape[placements[0].dim]


def test_heads_are_replicated(mesh, local):
    """Rows may be sharded, but not the heads, whose weights are replicated."""
    x, _, _ = local
    weight = torch.rand(3, N)
    sharded, weights = leaf(x, mesh, Shard(0)), leaf(weight, mesh, Replicate())
    plain = x.clone().requires_grad_(), weight.clone().requires_grad_()
    want = gander.rmsnorm(*plain)
    got, count = collectives(lambda: gander.rmsnorm(sharded, weights))
    check(got, want, Shard(0))
    upstream = torch.rand_like(want)
    dx, dw = torch.autograd.grad(got, (sharded, weights), place(upstream, mesh, Shard(0)))
    expected = torch.autograd.grad(want, plain, upstream)
    check(dx, expected[0], Shard(0))
    check(dw, expected[1], Partial("sum"))
    assert count == 0
    whole = place(torch.rand(3 * 4, N), mesh, Replicate())
    with pytest.raises(NotImplementedError, match="expected Replicate of the heads, which have weights"):
        gander.rmsnorm(place(x, mesh, Shard(1)), whole)


def test_a_mean_of_replicated_rows(mesh, local):
    x, _, target = local
    logits = leaf(x, mesh, Replicate())
    loss, count = collectives(lambda: gander.cross_entropy(logits, place(target, mesh, Replicate())))
    plain = x.clone().requires_grad_()
    check(loss, gander.cross_entropy(plain, target), Replicate())
    (dx,) = torch.autograd.grad(loss, logits)
    check(dx, torch.autograd.grad(gander.cross_entropy(plain, target), plain)[0], Replicate())
    assert count == 0


def test_a_sharded_gradient_of_replicated_rows(mesh):
    """Regression test: the statistics of all rows, in one tensor, were split like the rows. The parts of some
    shapes fit: here 5 of 17 numbers, for 2 of 8 rows."""
    logits = leaf(torch.randn(8, N), mesh, Replicate())
    targets = place(torch.randint(N, (8,)), mesh, Replicate())
    loss = gander.cross_entropy(logits, targets, reduction="none")
    (dx,) = torch.autograd.grad((loss * place(torch.rand(2), mesh, Shard(0))).sum(), logits)
    assert dx.placements == (Replicate(),) and dx.to_local().shape == (8, N)
    lse = place(torch.rand(17), mesh, Replicate())
    rows, some = place(torch.randn(2, N), mesh, Shard(0)), place(torch.randint(N, (2,)), mesh, Shard(0))
    dloss = place(torch.rand(2), mesh, Shard(0))
    with pytest.raises(NotImplementedError, match="lse has the statistics of all rows in one tensor"):
        ops.cross_entropy_bwd(rows, some, None, dloss=dloss, lse=lse, reduction=0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_mean_over_sharded_rows_is_refused(mesh, local, mode):
    x, _, target = local
    for logits in place(x, mesh, Shard(0)), leaf(x, mesh, Shard(0)):
        with (
            mode(),
            pytest.raises(NotImplementedError, match=r"a mean over sharded rows .* use reduction='sum'"),
        ):
            gander.cross_entropy(logits, place(target, mesh, Shard(0)))
    with mode(), pytest.raises(NotImplementedError, match="or with class probabilities by their number"):
        gander.cross_entropy(leaf(x, mesh, Shard(0)), place(x, mesh, Shard(0)))
    rows = place(torch.rand(4, 3, N), mesh, Shard(0))
    dloss, state = place(torch.tensor(1.0), mesh, Replicate()), place(torch.rand(4, 3, 3), mesh, Shard(0))
    with pytest.raises(NotImplementedError, match="a mean over sharded rows"):
        ops.soft_cross_entropy_bwd(rows, rows, None, dloss, state, reduction=1)


def test_sharded_rows_are_refused(mesh, local):
    x, weight, target = local
    columns = place(x, mesh, Shard(2))
    whole = place(torch.rand(4 * N), mesh, Replicate())
    targets = place(target, mesh, Replicate())
    for call in (  # cross_entropy takes them: test_distributed.py
        lambda: gander.softmax(columns),
        lambda: gander.softmax(columns.detach().requires_grad_()),
        lambda: gander.softmax_bwd(columns, place(torch.rand(4, 3, 4 * N), mesh, Replicate())),
        lambda: gander.rmsnorm(columns, whole),
        lambda: gander.logsumexp(columns),
        lambda: gander.log_softmax(columns),
        lambda: gander.softmax(
            place(torch.rand(4, 4 * N), mesh, Replicate()), mask=place(weight, mesh, Shard(0))
        ),
        lambda: ops.cross_entropy_fwd(columns, targets, needs_lse=True),
    ):
        with (
            CommDebugMode() as counter,
            pytest.raises(NotImplementedError, match="expected Shard of a leading"),
        ):
            call()
        assert counter.get_total_counts() == 0
    with pytest.raises(
        NotImplementedError, match=r"weight has placements .* expected Replicate: it has no element for each"
    ):
        gander.rmsnorm(place(torch.rand(4, 4 * N), mesh, Replicate()), place(weight, mesh, Shard(0)))


def test_logits_in_slices_with_the_sums_of_others_are_refused(mesh, local):
    x, _, target = local
    columns, rows = place(x, mesh, Shard(2)), place(torch.rand(4, 3, 4 * N), mesh, Replicate())
    targets, partial = (place(tensor, mesh, Replicate()) for tensor in (target, torch.randn(4, 3, 2)))
    for name, call in (
        ("x", lambda: gander.cross_entropy(columns, targets, lse_partial=partial)),
        ("target_logit", lambda: gander.cross_entropy_fwd(rows, targets, target_logit=columns)),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name} is a DTensor whose classes are sharded"):
            call()
    loss = gander.cross_entropy(rows, targets, lse_partial=partial, reduction="none")
    want = gander.cross_entropy(rows.to_local(), target, lse_partial=partial.to_local(), reduction="none")
    check(loss, want, Replicate())


def test_refusals_name_the_argument(mesh, local):
    """And no operator, nor what DTensor says of it."""
    x, weight, target = local
    logits, targets = place(x, mesh, Replicate()), place(target, mesh, Replicate())
    sharded = place(target, mesh, Shard(0))
    plain = "is a plain tensor, expected a DTensor as"
    for error, message, call in (
        (TypeError, f"target {plain} x", lambda: gander.cross_entropy(logits, target)),
        (TypeError, f"x {plain} target", lambda: gander.cross_entropy(x, targets)),
        (TypeError, f"weight {plain} x", lambda: gander.rmsnorm(logits, weight)),
        (TypeError, f"mask {plain} x", lambda: gander.softmax(logits, mask=weight)),
        (TypeError, f"residual {plain} x", lambda: gander.layernorm(logits, residual=x)),
        (
            ValueError,
            r"target has shape \(16, 3\), expected \(4, 3\), the leading dimensions of x",
            lambda: gander.cross_entropy(logits, sharded),
        ),
        (
            ValueError,
            r"target has shape \(4, 3\), expected \(16, 3\), the leading dimensions of x",
            lambda: gander.cross_entropy_fwd(place(x, mesh, Shard(0)), targets, return_dx=True),
        ),
        (
            NotImplementedError,
            "x is a DTensor of partial sums, expected their sum; redistribute it",
            lambda: gander.cross_entropy(
                place(x, mesh, Partial()), targets, place(torch.randn(4, 3, 2), mesh, Replicate())
            ),
        ),
        (
            NotImplementedError,
            "reduction is 'mean' with sharded rows, expected 'sum': ",
            lambda: gander.cross_entropy(place(x, mesh, Shard(0)), sharded),
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            call()
        assert caught.type is error
        assert "Sharding propagation" not in str(caught.value) and len(str(caught.value)) < 300


MASKS = [  # the mask's shape, and its placement if dimension 0, or 1, of x is sharded
    ((4, 3, N), Shard(0), Shard(1)),
    ((4, 1, N), Shard(0), Replicate()),
    ((3, N), Replicate(), Shard(0)),
    ((N,), Replicate(), Replicate()),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_are_sharded_with_the_rows(mesh, local, dim, mask):
    shape, *placements = mask
    x, mask = local[0], torch.rand(shape) > 0.3
    plain = x.clone().requires_grad_()
    want = gander.softmax(plain, mask=mask)
    logits = leaf(x, mesh, Shard(dim))
    got, count = collectives(lambda: gander.softmax(logits, mask=place(mask, mesh, placements[dim])))
    check(got.detach(), want.detach(), Shard(dim))
    (dx,) = torch.autograd.grad(got, logits, place(x, mesh, Shard(dim)))
    check(dx, torch.autograd.grad(want, plain, x)[0], Shard(dim))
    assert count == 0


def test_causal_with_sharded_queries_is_refused(mesh, local):
    for causal in gander.softmax, gander.log_softmax:
        got = causal(place(local[0], mesh, Shard(0)), causal=True)
        check(got, causal(local[0], causal=True), Shard(0))
        with pytest.raises(NotImplementedError, match="expected whole matrices of the last two dimensions"):
            causal(place(local[0], mesh, Shard(1)), causal=True)


def test_operands_that_cannot_be_sharded_are_refused(mesh, local):
    x, _, target = local
    logits, targets = place(x, mesh, Shard(0)), place(target, mesh, Shard(0))
    with pytest.raises(NotImplementedError, match="statistics of all rows are returned in one tensor"):
        ops.cross_entropy(logits, targets, reduction=2, needs_lse=True)
    with pytest.raises(NotImplementedError, match="a DTensor cannot be written over"):
        ops.cross_entropy_fwd_dx_(logits, targets)
    for placements in (Shard(0),), (Shard(2),), (Replicate(),):
        with pytest.raises(NotImplementedError, match=r"^x is a DTensor with outputs"):
            gander.cross_entropy(place(x, mesh, *placements), targets, outputs=("loss", "lse"))


def test_a_partial_sum_is_reduced(mesh, local):
    """torch's nonlinear operators do this too."""
    out, count = collectives(lambda: gander.softmax(place(local[0], mesh, Partial("sum"))))
    assert out.placements == (Replicate(),)
    assert count == 1
    norm, count = collectives(
        lambda: gander.rmsnorm_bwd(
            place(local[0], mesh, Shard(0)),
            place(local[1], mesh, Replicate()),
            place(torch.rand(16, 3, N), mesh, Partial("sum")),
            place(torch.rand(4, 3), mesh, Shard(0)),
        )
    )
    assert [t.placements for t in norm[:2]] == [(Shard(0),), (Partial("sum"),)]
    assert count == 1  # a reduce-scatter


def test_two_dimensions_of_a_mesh(local):
    mesh = init_device_mesh("cpu", (2, 2))
    x, weight, target = local
    for placements in (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1)):
        logits, w = leaf(x, mesh, *placements), leaf(weight, mesh, Replicate(), Replicate())
        y, count = collectives(functools.partial(gander.rmsnorm, logits, w))
        check(y.detach(), gander.rmsnorm(x, weight), *placements)
        dx, dw = torch.autograd.grad(y, (logits, w), y.detach())
        assert dx.placements == placements
        assert dw.placements == tuple(p if p == Replicate() else Partial("sum") for p in placements)
        loss = gander.cross_entropy(logits, place(target, mesh, *placements), reduction="sum")
        assert loss.placements == dw.placements
        assert torch.autograd.grad(loss, logits)[0].placements == placements
        assert count == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(mesh, local, backend):
    torch._dynamo.reset()
    x, weight, target = local

    def loss(x, weight, target):
        return gander.cross_entropy(gander.rmsnorm(x, weight), target, reduction="sum")

    inputs = leaf(x, mesh, Shard(0)), leaf(weight, mesh, Replicate())
    targets = place(target, mesh, Shard(0))
    want = torch.autograd.grad(loss(*inputs, targets), inputs)
    got = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(*inputs, targets), inputs)
    for a, b in zip(got, want, strict=True):
        check(a, b.to_local(), *b.placements)


def test_dtensor_is_not_imported_before_it_is_used():
    """Importing it takes about as long as the rest of torch. find_spec must not import it."""
    code = (
        "import importlib.util, sys, torch, gander\n"
        "name = 'torch.distributed.tensor'; assert name not in sys.modules\n"
        "importlib.util.find_spec(name)\n"
        "assert name not in sys.modules and not gander._torch.dtensor.DTensor\n"
        "import torch.distributed.tensor\n"
        "assert gander._torch.dtensor.DTensor is torch.distributed.tensor.DTensor"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ, check=True, timeout=300)
