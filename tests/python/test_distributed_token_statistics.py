"""gander.distributed.token_statistics, and gander.token_statistics of sharded DTensors, on the CPU with gloo:
each job runs on all ranks of a pool of processes.

The results are compared with torch's formulas of whole rows in float64, or with those of
gander.token_statistics, which gets all tokens.
"""

import functools
import importlib
import re
from contextlib import nullcontext

import gander
import pytest
import torch
from gander._functions.token_statistics import STATISTICS
from ranks import Collectives, dist, in_one_graph, mine, on_all, pools  # noqa: F401
from test_token_statistics import OPTIONS, of_torch
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

SIZES = {2: (5, 12), 3: (7, 0, 9)}
INF, NAN = float("inf"), float("nan")
HEADS = "log_prob", "entropy"
FLOATS = STATISTICS[:4]
# Numbers of a row that a rank sends.
NUMBERS = {
    ("log_prob",): 4,
    ("entropy",): 4,
    HEADS: 4,
    ("log_sum_sq_probs",): 8,
    ("mean_logit",): 8,
    ("is_top1",): 8,
    ("predicted", "is_top1"): 8,
    ("predicted", "log_prob"): 8,
    ("mean_logit", "entropy"): 8,
    STATISTICS: 8,
}
every_rank_count = pytest.mark.parametrize("ranks", SIZES)


# ---- What the jobs share ----


def example(sizes, leading=(6,), dtype=torch.float32):
    """Logits of all tokens, and indices of which the second is ignored. The same on all ranks."""
    torch.manual_seed(sum(sizes))  # the ranks may have drawn different numbers
    logits = (3 * torch.randn(*leading, sum(sizes), dtype=torch.float64)).to(dtype)
    index = torch.randint(sum(sizes), leading)
    if index.numel() > 1:
        index.view(-1)[1] = -100
    return logits, index


def sliced(sizes):
    return functools.partial(gander.distributed.token_statistics, sizes=sizes)


def gradient_of(found, leaf, names=HEADS, counts=None):
    """The gradient of some of the results, with another upstream gradient for each row and statistic. counts:
    rows that do."""
    found = found if isinstance(found, dict) else found._asdict()
    values, upstream = [found[name] for name in names], []
    for at, value in enumerate(values):
        rows = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
        upstream.append((rows + at + 1).sin().to(value.dtype))
        if counts is not None:
            upstream[-1] *= counts
    return torch.autograd.grad(values, leaf, upstream, retain_graph=True)[0]


def leaf_of(logits, sizes=None):
    return (logits if sizes is None else mine(logits, sizes)).detach().clone().requires_grad_()


def assert_same(got, want, **tolerances):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerances)


def assert_on_all(results):
    """They have the same bits on all ranks."""
    for result in results:
        bits = result.detach().reshape(-1).view(torch.uint8)
        every = bits.new_empty(dist.get_world_size() * bits.numel())
        dist.all_gather_into_tensor(every, bits)
        assert all(torch.equal(each, bits) for each in every.view(dist.get_world_size(), -1))


def check(logits, index, sizes, **options):
    """Compares with gander.token_statistics of all tokens. Returns the results by name and the gradient."""
    part, whole = leaf_of(logits, sizes), leaf_of(logits)
    got = sliced(sizes)(part, index, outputs=STATISTICS, **options)
    want = gander.token_statistics(whole, index, outputs=STATISTICS, **options)
    assert_same(got, want)
    assert_on_all(got)
    for names in ("log_prob",), ("entropy",), HEADS:
        dlogits = gradient_of(got, part, names)
        torch.testing.assert_close(dlogits, mine(gradient_of(want, whole, names), sizes), equal_nan=True)
    return got, dlogits


def refused(kind, match, *arguments, collectives=0, **options):
    with Collectives() as counted, pytest.raises(kind, match=match):
        gander.distributed.token_statistics(*arguments, **options)
    assert len(counted.sent) == collectives


# ---- Values ----


def _values(sizes, dtype):
    wide, rounded = torch.promote_types(dtype, torch.float32), torch.finfo(dtype).eps
    tight = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-5}
    slack = {"rtol": max(rounded, 1e-12), "atol": max(rounded / 50, tight["atol"] / 2)}
    for leading in (), (3, 0), (2, 3), (40,):
        for at, options in enumerate(OPTIONS.values()):
            logits, index = example(sizes, leading, dtype)
            keep = torch.rand(leading) > 0.3
            counts = keep & (index != -100)
            exact, part = leaf_of(logits.double()), leaf_of(logits, sizes)
            want = of_torch(exact, index.clamp(0), **options)
            mask = keep.to((torch.bool, torch.uint8, torch.int64)[at % 3])
            kind = (torch.int64, torch.int32)[at % 2]
            found = sliced(sizes)(part, index.to(kind), outputs=STATISTICS, row_mask=mask, **options)
            assert_on_all(found)
            for name, value in zip(STATISTICS, found, strict=True):
                expected = want[name].detach().masked_fill(~counts, -1 if name == "predicted" else 0)
                if name in FLOATS:
                    assert value.dtype == wide
                    torch.testing.assert_close(value.double(), expected, **tight)
                else:
                    assert torch.equal(value, expected)
            assert not (found.log_prob > 0).any() and not (found.entropy < 0).any()
            for names in ("log_prob",), ("entropy",), HEADS:
                got = gradient_of(found, part, names)
                assert got.dtype == dtype and not got[~counts].any()
                wanted = mine(gradient_of(want, exact, names, counts), sizes)
                torch.testing.assert_close(got.double(), wanted, **slack)
    index = index.clamp(0)
    part = mine(logits, sizes)
    assert_same(sliced(sizes)(part, index.to(torch.uint8)), sliced(sizes)(part, index), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@every_rank_count
def test_values(ranks, dtype):
    on_all(ranks, _values, SIZES[ranks], dtype)


def _accuracy(sizes):
    """Confident rows and large logits have as many digits as any others."""
    logits, index = example(sizes, (300,))
    index, rows = index.clamp(0), torch.arange(300)
    for shift in 0, 1000, -30000:
        x = logits + shift
        x[rows, index] = x.amax(1) + torch.linspace(0, 16, 300)
        exact, part = leaf_of(x.double()), leaf_of(x, sizes)
        want = of_torch(exact, index)
        got = sliced(sizes)(part, index, outputs=FLOATS)
        for name, value in zip(FLOATS, got, strict=True):
            close = (
                {"rtol": 0, "atol": 4e-7 * x.abs().max()}
                if name == "mean_logit"
                else {"rtol": 2e-6, "atol": 0}
            )
            torch.testing.assert_close(value.double(), want[name], **close)
        for names in ("log_prob",), ("entropy",):
            dlogits, wanted = gradient_of(got, part, names), gradient_of(want, exact, names)
            torch.testing.assert_close(dlogits.double(), mine(wanted, sizes), rtol=1e-5, atol=1e-12)


@every_rank_count
def test_accuracy(ranks):
    on_all(ranks, _accuracy, SIZES[ranks])


def _special_rows(sizes):
    last, end = sum(sizes) - 1, sizes[0]
    for dtype in torch.float32, torch.bfloat16, torch.float64:
        x, _ = example(sizes, (13,), dtype)
        index = torch.full((13,), last)
        x[0, :end] = -INF  # a slice of -inf
        x[1, :end], index[1] = -INF, 0  # and the index in it
        x[2, 0], index[2] = -INF, 0
        x[3] = -INF
        x[4, :end], x[4, 1] = -INF, NAN  # the NaN has nothing but -inf beside it
        x[5, last] = NAN
        x[6, 0] = INF
        x[7, last] = INF
        x[8], index[8] = NAN, -100
        x[9, 0], index[9] = INF, -100
        x[10, :last] = -INF
        x[11, 0], x[11, 1:], index[11] = 3e38, -3e38, 0
        x[12], index[12] = -INF, 0
        for options in {}, {"temperature": 0.7, "scale": 0.5}, {"softcap": 5.0}:
            found, dlogits = check(x, index, sizes, **options)
            assert not dlogits[8:10].any()
            for left_out, value in zip((0, 0, 0, 0, False, -1), found, strict=True):
                assert (value[8:10] == left_out).all()
        found, _ = check(x, index, sizes)
        assert found.log_prob.isnan().tolist() == [row in (3, 4, 5, 6, 7, 12) for row in range(13)]
        assert (found.log_prob[1:3] == -INF).all() and found.log_prob[10] == found.entropy[10] == 0
        assert found.predicted[[3, 4, 5, 6, 7, 12]].tolist() == [0, -1, -1, -1, -1, 0]
        assert found.is_top1[[3, 10, 12]].tolist() == [False, True, True]
        # Without the statistics that tell rows with a NaN from others.
        for outputs in STATISTICS:
            (alone,) = sliced(sizes)(mine(x, sizes), index, outputs=(outputs,))
            torch.testing.assert_close(alone, getattr(found, outputs).detach(), equal_nan=True)


@every_rank_count
def test_special_rows(ranks):
    on_all(ranks, _special_rows, SIZES[ranks])


def _ties(sizes):
    """Of several largest logits the first one counts, whichever ranks have them."""
    n = sum(sizes)
    columns = [(n - 1, 0), (sizes[0], sizes[0] - 1), (n - 1, n - 2), (n - 1, sizes[0] + 1), (*range(n),)]
    logits = torch.zeros(len(columns), n)
    for row, at in enumerate(columns):
        logits[row, [*at]] = 2.0
    first = torch.tensor([min(at) for at in columns])
    for index in first, torch.tensor([max(at) for at in columns]):
        found, _ = check(logits, index, sizes)
        assert torch.equal(found.predicted, first) and torch.equal(found.is_top1, index == first)
        torch.testing.assert_close(
            found.log_prob, torch.log_softmax(logits, 1).gather(1, index[:, None])[:, 0]
        )


@every_rank_count
def test_ties_are_the_first(ranks):
    on_all(ranks, _ties, SIZES[ranks])


def _indices_out_of_range(sizes):
    logits, index = example(sizes)
    n = sum(sizes)
    for bad in -1, -2, -99, n, 2**31 - 1, -(2**63), 2**63 - 1:
        index[3] = bad
        part = leaf_of(logits, sizes)
        found = sliced(sizes)(part, index, outputs=STATISTICS)
        assert found.log_prob.isnan().tolist() == [row == 3 for row in range(6)]
        assert found.entropy.isfinite().all() and not found.is_top1[3] and found.predicted[3] >= 0
        check(logits, index, sizes)
        for names, is_nan in (("log_prob",), True), (("entropy",), False), (HEADS, True):
            dlogits = gradient_of(found, part, names)
            assert dlogits[3].isnan().all() if is_nan else dlogits.isfinite().all()
            assert dlogits[[0, 1, 2, 4, 5]].isfinite().all()
        mask = torch.arange(6) != 3
        assert sliced(sizes)(part, index, row_mask=mask).log_prob[3] == 0
    for ignore_index in 2, n - 1, -(2**63), 2**63 - 1:
        index[3] = ignore_index
        check(logits, index.clamp(0) if ignore_index > 0 else index, sizes, ignore_index=ignore_index)
    gander.set_debug(True)
    try:
        index[3] = n
        message = f"index has the class {n}, expected 0 to {n - 1}, or ignore_index"
        refused(IndexError, message, mine(logits, sizes), index, sizes=sizes, collectives=1)  # the texts
    finally:
        gander.set_debug(False)


@every_rank_count
def test_indices_out_of_range(ranks):
    on_all(ranks, _indices_out_of_range, SIZES[ranks])


# ---- Communication ----


def _communication(sizes):
    """One all-gather of what the outputs need and a hash of 8 bytes. Backward has none."""
    logits, index = example(sizes, (11,))
    every = check(logits, index, sizes)[0]._asdict()
    for dtype, size in (torch.bfloat16, 4), (torch.float64, 8):
        part = leaf_of(logits.to(dtype), sizes)
        for outputs, numbers in NUMBERS.items():
            for rows in 11, 10, 0:
                with Collectives() as counted:
                    found = sliced(sizes)(part[:rows], index[:rows], outputs=outputs)
                assert counted.sent == [-(-rows * numbers * size // 8) * 8 + 8]
                assert counted.sent[0] <= rows * (64 if size == 8 else 32) + 8
                heads = [name for name in HEADS if name in outputs]
                if heads:
                    with Collectives() as counted:
                        gradient_of(found, part, heads)
                    assert counted.sent == []
            assert found._fields == outputs
    for outputs in NUMBERS:
        got = sliced(sizes)(mine(logits, sizes), index, outputs=outputs)
        assert_same(got, [every[name].detach() for name in outputs], rtol=0, atol=0)


@every_rank_count
def test_communication(ranks):
    on_all(ranks, _communication, SIZES[ranks])


def _sizes_and_groups():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    call = gander.distributed.token_statistics
    for classes in 1, ranks, 2 * ranks + 1:
        chunks = [len(part) for part in torch.arange(classes).chunk(ranks)]
        sizes = (*chunks, *[0] * (ranks - len(chunks)))
        logits, index = example(sizes)
        want = gander.token_statistics(logits, index)
        assert_same(call(mine(logits, sizes), index, classes=classes), want)
        assert_same(call(mine(logits, sizes), index, sizes=sizes), want)
    logits, index = example((4,) * ranks)
    assert_same(call(mine(logits, (4,) * ranks), index), gander.token_statistics(logits, index))
    group = dist.new_group([*range(1, ranks)])
    if rank:
        assert_same(
            call(logits[:, 2 * rank - 2 : 2 * rank], index.clamp(max=3), group),
            gander.token_statistics(logits[:, : 2 * ranks - 2], index.clamp(max=3)),
        )
    else:
        refused(ValueError, "group is -100, expected a torch.distributed.ProcessGroup", logits, index, group)


def test_sizes_and_groups():
    on_all(3, _sizes_and_groups)


def _disagreements(sizes):
    """Where ranks contradict each other no number is right on any of them, and none waits."""
    rank = dist.get_rank()
    logits, index = example(sizes)
    part = mine(logits, sizes)
    wrong = (sizes[0] + 1, *sizes[1:])
    for alone in (
        {"temperature": 2.0},
        {"softcap": 3.0},
        {"scale": 0.5},
        {"batch_invariant": True},
        {"ignore_index": -7},
        {"row_mask": torch.ones(6, dtype=torch.bool)},
        {"index": index.int()},
        {"logits": part.half()},
        {"sizes": wrong},
        {"outputs": ("log_prob", "mean_logit", "predicted")},  # of as many bytes
    ):
        given = {"logits": part, "index": index, "sizes": sizes, "outputs": ("entropy", *STATISTICS[3:])}
        if rank == len(sizes) - 1:
            given |= alone
        x, counts = leaf_of(given.pop("logits")), index != given.get("ignore_index", -100)
        found = gander.distributed.token_statistics(x, **given)
        for name, value in found._asdict().items():
            if name in FLOATS:
                assert value[counts].isnan().all() and (value[~counts] == 0).all(), name
            else:
                assert (value == (-1 if name == "predicted" else 0)).all(), name
        for name in {*found._fields} & {*HEADS}:
            dlogits = gradient_of(found, x, (name,))
            assert dlogits[counts].isnan().all() and not dlogits[~counts].any()
    # A slice that is not as long as this rank itself says is refused there, after the all-gather.
    counts = index != -100
    message = rf"logits has {sizes[0]} classes on rank 0, expected {wrong[0]} by sizes"
    with pytest.raises(ValueError, match=message) if rank == 0 else nullcontext():
        found = gander.distributed.token_statistics(part, index, sizes=wrong)
        assert found.log_prob[counts].isnan().all()
    # Rows that one rank alone leaves out.
    keep = torch.ones(6, dtype=torch.bool)
    keep[2] = rank != 0
    x = leaf_of(part)
    found = sliced(sizes)(x, index, row_mask=keep, outputs=STATISTICS)
    whole = gander.token_statistics(logits, index, row_mask=keep, outputs=STATISTICS)
    for name, value, want in zip(STATISTICS, found, whole, strict=True):
        others = torch.arange(6) != 2
        torch.testing.assert_close(value[others].detach(), want[others])
        if rank == 0:
            assert value[2] == want[2]
        else:
            assert value[2].isnan() if name in FLOATS else value[2] == (-1 if name == "predicted" else 0)
    dlogits = gradient_of(found, x)
    assert not dlogits[2].any() if rank == 0 else dlogits[2].isnan().all()


@every_rank_count
def test_disagreements(ranks):
    on_all(ranks, _disagreements, SIZES[ranks])


def _differences():
    """With set_debug all ranks refuse what differs between them, and can go on."""
    rank = dist.get_rank()
    x, index = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    k, keep = 4 + rank, torch.ones(4, dtype=torch.bool)
    gander.set_debug(True)
    try:
        message = (
            r"rank 0 passes rows \(4,\) of torch.float32, .*, rank 1 passes rows \(5,\) of torch.float32, "
            r".*; expected the same rows"
        )
        refused(ValueError, message, torch.randn(k, 6), torch.zeros(k, dtype=torch.int64), collectives=1)
        for tensors, options in (
            ((x.view(2, 2, 6), index.view(2, 2)), {}),
            ((x.double(), index), {}),
            ((x, index.int()), {}),
            ((x, index), {"row_mask": keep}),
            ((x, index), {"ignore_index": 0}),
            ((x, index), {"temperature": 2.0}),
            ((x, index), {"batch_invariant": True}),
            ((x, index), {"outputs": ("entropy",)}),
        ):
            message = "expected the same rows, targets and options"
            if rank == 0:
                tensors, options = (x, index), {}
            refused(ValueError, message, *tensors, collectives=1, **options)
        takes = r"logits has \(6, 5\) .*: rank 0 takes \(6, 6\), rank 1 \(5, 5\); pass sizes=\(6, 5\)"
        refused(ValueError, takes, x[:, : 6 - rank], index, collectives=1)
        refused(ValueError, "logits has no classes on any rank", x[:, :0], index, collectives=1)
        message = "index or row_mask of rank 1 is another than that of rank 0"
        refused(ValueError, message, x, index + rank, collectives=1)
        refused(ValueError, message, x, index, row_mask=keep & (rank == 0), collectives=1)
        with Collectives() as counted:
            logits, index = example((6, 6))
            assert_same(sliced((6, 6))(mine(logits, (6, 6)), index), gander.token_statistics(logits, index))
        assert len(counted.sent) == 2
    finally:
        gander.set_debug(False)


def test_differences():
    on_all(2, _differences)


# ---- Autograd ----


def _layouts(sizes):
    """Megatron's (s, b, v / tp), and rows that lie apart."""
    for shape in (3, 2), (2, 3, 2):
        logits, index = example(sizes, shape)
        check(logits.transpose(0, 1), index.transpose(0, 1), sizes, row_mask=index.transpose(0, 1) > 2)
        apart = torch.empty(*shape, 2 * sum(sizes))[..., ::2].copy_(logits)
        first = sum(sizes[: dist.get_rank()])
        part = apart[..., first : first + sizes[dist.get_rank()]]
        assert_same(sliced(sizes)(part, index), gander.token_statistics(logits, index))


def _backward(sizes):
    logits, index = example(sizes)
    part, whole = leaf_of(logits, sizes), leaf_of(logits)
    found = sliced(sizes)(part, index, outputs=STATISTICS)
    expected = mine(gradient_of(gander.token_statistics(whole, index), whole), sizes)
    for _ in range(2):
        torch.testing.assert_close(gradient_of(found, part), expected)
    upstream = torch.rand(2, 6)
    (batched,) = torch.autograd.grad(found.entropy, part, upstream, retain_graph=True, is_grads_batched=True)
    for row, got in zip(upstream, batched, strict=True):
        (want,) = torch.autograd.grad(found.entropy, part, row, retain_graph=True)
        torch.testing.assert_close(got, want)
    assert not found.is_top1.requires_grad and not found.predicted.requires_grad
    for name in "log_sum_sq_probs", "mean_logit":
        with pytest.raises(NotImplementedError, match=f"{name} of token_statistics has no gradient; detach"):
            (getattr(found, name) + found.log_prob).sum().backward(retain_graph=True)
    if part.numel():
        (first,) = torch.autograd.grad(found.log_prob.sum(), part, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            first.sum().backward()
    assert not any(value.requires_grad for value in sliced(sizes)(part.detach(), index))
    with torch.inference_mode():
        assert_same(sliced(sizes)(part, index, outputs=STATISTICS), found, rtol=0, atol=0)
    by_func = torch.func.grad(lambda x: sliced(sizes)(x * 2, index).log_prob.sum())(part.detach())
    (want,) = torch.autograd.grad(sliced(sizes)(part * 2, index).log_prob.sum(), part)
    assert torch.equal(by_func, want)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives are not supported"):
        torch.func.jvp(lambda x: sliced(sizes)(x, index).log_prob, (part.detach(),), (part.detach(),))
    with pytest.raises(NotImplementedError, match=r"innermost transform of torch\.func only"):
        torch.func.grad(
            lambda x: torch.func.grad(lambda y: sliced(sizes)(x, index).entropy.sum() * y)(x.sum())
        )(part.detach())


def _in_place(sizes):
    logits, index = example(sizes)
    leaf = leaf_of(logits, sizes)
    want = gradient_of(sliced(sizes)(leaf, index), leaf)
    part = leaf * 1
    found = sliced(sizes)(part, index, inplace_backward=True)
    assert torch.equal(gradient_of(found, leaf), want) and torch.equal(part, want)
    if part.numel():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.entropy.sum().backward()
    part = leaf * 1
    found = sliced(sizes)(part, index, inplace_backward=True)
    upstream = torch.rand(2, 6)
    (batched,) = torch.autograd.grad(found.entropy, leaf, upstream, is_grads_batched=True)
    assert torch.equal(part, leaf) and batched.shape == (2, *leaf.shape)
    with torch.autograd.graph.save_on_cpu():  # hooks: nothing is written over
        part = leaf * 1
        found = sliced(sizes)(part, index, inplace_backward=True)
    assert torch.equal(gradient_of(found, leaf), want) and torch.equal(part, leaf)


def _checkpoints(sizes):
    logits, index = example(sizes)
    leaf = leaf_of(logits, sizes)
    want = gradient_of(sliced(sizes)(leaf * 2, index), leaf)
    for reentrant in True, False:
        found = checkpoint(lambda x: sliced(sizes)(x * 2, index), leaf, use_reentrant=reentrant)
        values = [value * torch.arange(6.0).add(at + 1).sin() for at, value in enumerate(found)]
        leaf.grad = None
        sum(value.sum() for value in values).backward()
        torch.testing.assert_close(leaf.grad, want)


@pytest.mark.parametrize("job", [_layouts, _backward, _in_place, _checkpoints])
@every_rank_count
def test_gradients(ranks, job):
    on_all(ranks, job, SIZES[ranks])


# ---- Graphs ----


def _compiled(sizes, backend):
    logits, index = example(sizes)
    part = mine(logits, sizes).contiguous()
    mask = torch.arange(6) != 3
    calls = (
        (STATISTICS, {"row_mask": mask, "temperature": 0.7, "softcap": 9.0, "scale": 2.0}),
        (HEADS, {"inplace_backward": True}),
        (("entropy",), {"batch_invariant": True}),
        (("predicted", "is_top1"), {}),
    )
    for outputs, options in calls[:1] if backend == "inductor" else calls:  # each takes it half a minute

        def call(x, outputs=outputs, options=options):
            return sliced(sizes)(x * 2, index, outputs=outputs, **options)

        compiled, counter = in_one_graph(call, backend)
        a, b = leaf_of(part), leaf_of(part)
        got, want = compiled(a), call(b)
        assert got._fields == want._fields == outputs
        assert_same(got, want, rtol=0, atol=0)
        names = [name for name in HEADS if name in outputs]
        if names:
            assert torch.equal(gradient_of(got, a, names), gradient_of(want, b, names))
        assert counter.frame_count == 1
        for inference in () if backend == "inductor" else (torch.no_grad, torch.inference_mode):
            with inference():
                assert_same(compiled(part), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "eager"), (2, "aot_eager"), (2, "inductor"), (3, "aot_eager")]
)
def test_compiled(ranks, backend):
    on_all(ranks, _compiled, SIZES[ranks], backend)


def _compiled_with_constants(sizes):
    """Statistics without a gradient may be logged. If one is part of the loss, the gradient is NaN, because a
    graph cannot raise."""
    logits, index = example(sizes)
    part, counts = mine(logits, sizes).contiguous(), index != -100
    for outputs in ("log_prob", "log_sum_sq_probs"), ("mean_logit",):
        for is_part in False, True:

            def loss(x, outputs=outputs, is_part=is_part):
                found = sliced(sizes)(x * 1, index, outputs=outputs)
                first = found.log_prob.sum() if "log_prob" in outputs else x.sum()
                return first + found[-1].sum() if is_part else first, found[-1]

            a, b = leaf_of(part), leaf_of(part)
            got, other = in_one_graph(loss, "aot_eager")[0](a)
            got.backward()
            (sliced(sizes)(b, index).log_prob if "log_prob" in outputs else b).sum().backward()
            want = b.grad.masked_fill(counts[:, None], NAN) if is_part else b.grad
            torch.testing.assert_close(a.grad, want, equal_nan=True)
            torch.testing.assert_close(other, gander.token_statistics(logits, index, outputs=outputs)[-1])


def test_compiled_with_results_that_have_no_gradient():
    on_all(3, _compiled_with_constants, SIZES[3])


def _compiled_with_dynamic_shapes():
    """One graph for all numbers of rows and tokens, with classes and without."""

    def loss(x, index, classes):
        found = gander.distributed.token_statistics(x * 2, index, classes=classes, temperature=0.7)
        return (found.log_prob - found.entropy).sum()

    for less, backend in (0, "inductor"), (1, "aot_eager"):
        compiled, counter = in_one_graph(loss, backend, dynamic=True)
        for rows, n in (3, 6), (7, 9), (10, 12):
            sizes = n, n - less
            logits, index = example(sizes, (rows,))
            a, b = leaf_of(logits, sizes), leaf_of(logits, sizes)
            classes = sum(sizes) if less else None
            got, want = compiled(a, index, classes), loss(b, index, classes)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got, a)[0], torch.autograd.grad(want, b)[0])
        assert counter.frame_count == 1
    assert compiled(mine(logits, sizes), index, None).isnan()  # each takes its own size for that of all


def test_compiled_with_dynamic_shapes():
    on_all(2, _compiled_with_dynamic_shapes)


def _compiled_with_others(sizes):
    """Two calls in one graph, an activation checkpoint, and transforms."""
    logits, index = example(sizes)
    part = mine(logits, sizes).contiguous()

    def two(x):
        found = sliced(sizes)(x.sin(), index)
        return (found.log_prob - sliced(sizes)(x.cos(), index, temperature=2.0).entropy).sum()

    def with_checkpoint(x):
        return checkpoint(lambda x: sliced(sizes)(x.sin(), index).entropy.sum(), x, use_reentrant=False)

    for function in two, with_checkpoint:
        compiled, counter = in_one_graph(function, "aot_eager")
        a, b = leaf_of(part), leaf_of(part)
        got, want = compiled(a), function(b)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, a)[0], torch.autograd.grad(want, b)[0])
        assert counter.frame_count == 1
    gradient = torch.func.grad(lambda x: sliced(sizes)(x.sin(), index).log_prob.sum())
    compiled, _ = in_one_graph(gradient, "aot_eager")
    torch.testing.assert_close(compiled(part), gradient(part))
    compiled, _ = in_one_graph(torch.func.vmap(lambda x: sliced(sizes)(x, index)[0]), "aot_eager")
    with pytest.raises(Unsupported, match="logits is batched by torch"):
        compiled(torch.stack((part, part)))


def test_compiled_with_others():
    on_all(2, _compiled_with_others, SIZES[2])


def _operators(sizes):
    importlib.import_module("gander.distributed")  # registers the operators
    from torch.library import opcheck

    operators, group = torch.ops.gander, dist.group.WORLD.group_name
    logits, index = example(sizes)
    part = mine(logits, sizes).contiguous()
    # opcheck takes NaN for a difference: that of a row that is left out, or whose index is in no slice.
    index = index.clamp(0) % sizes[0] + sum(sizes[: dist.get_rank()])
    asked = [name in HEADS for name in STATISTICS]
    options = index, None, [*sizes], -100, group, *asked, 1.5, 3.0, 2.0, False
    opcheck(operators.token_statistics_part.default, (part, *options))
    sent = operators.token_statistics_part(part, *options)
    assert sent.numel() == 6 * NUMBERS[HEADS] + 2
    every = torch.cat([sent] * len(sizes))
    opcheck(operators.token_statistics_of_parts.default, (leaf_of(part), every, *options))
    # A float64 has room for all bits of a predicted token, so one number of each row is not used.
    options = index, None, [*sizes], -100, group, *[True] * 6, 1.0, 0.0, 1.0, False
    for fill in 1.0, 2.0:
        memory = [torch.full((49,), fill, dtype=torch.float64) for _ in range(100)]
        del memory  # of which the next tensors are made
        sent = operators.token_statistics_part(part.double(), *options)
        assert sent.numel() == 49 and not sent[42:48].any()


def test_operators():
    on_all(2, _operators, (5, 5))


# ---- DTensors ----


@functools.cache
def mesh_of(shape):
    """One mesh for all jobs, because torch 2.15 compiles only for the first one, also its own functions."""
    from torch.distributed.tensor import init_device_mesh

    return init_device_mesh("cpu", shape)


def _dtensors(shape, rows, tokens, backend):
    """rows: the placements of the rows on the mesh, whose last dimension shards the tokens."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(shape)
    x, index = example((tokens,), (4, 3))
    places, by_row = [*rows, Shard(2)], [*rows, Replicate()]
    mask = torch.arange(12).view(4, 3) != 7
    indices, masks = (distribute_tensor(tensor, mesh, by_row) for tensor in (index, mask))
    ours, operator = gander.token_statistics, torch.ops.gander.token_statistics

    def of_function(x, index, mask):
        options = {"temperature": 0.7, "softcap": 9.0, "scale": 2.0, "batch_invariant": True}
        return ours(x * 2, index, row_mask=mask, outputs=STATISTICS, **options)

    def of_operator(x, index, mask):
        return operator(x * 2, index, mask, **{f"needs_{name}": True for name in STATISTICS})[:-1]

    def alone(call):  # torch wants the gradient of each DTensor that a graph returns
        def difference(*given):
            log_prob, entropy, *_ = call(*given)
            return log_prob - 0.5 * entropy

        return difference

    for call in of_function, of_operator:
        whole, logits = leaf_of(x), distribute_tensor(x, mesh, places).requires_grad_()
        expected, upstream = call(whole, index, mask), torch.rand(4, 3)
        up = distribute_tensor(upstream, mesh, by_row)
        if backend:
            run, counter = in_one_graph(alone(call), backend)
        else:
            run = alone(call)
            with Collectives() as counted:
                found = call(logits, indices, masks)
            assert len(counted.sent) == 1
            for value, want in zip(found, expected, strict=True):
                assert [*value.placements] == by_row and value.shape == want.shape
                torch.testing.assert_close(value.full_tensor(), want)
        got, want = run(logits, indices, masks), alone(call)(whole, index, mask)
        assert not backend or counter.frame_count == 1
        with nullcontext() if backend else Collectives() as counted:
            (dlogits,) = torch.autograd.grad(got, logits, up)
        assert backend or counted.sent == []
        assert [*got.placements] == by_row and [*dlogits.placements] == places
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(dlogits.full_tensor(), torch.autograd.grad(want, whole, upstream)[0])
        with torch.no_grad():
            assert torch.equal(run(logits, indices, masks).to_local(), got.to_local())


@pytest.mark.parametrize("ranks", [2, 3])
def test_dtensors(ranks):
    for tokens in 12, 2 * ranks + 1, 2:
        on_all(ranks, _dtensors, (ranks,), (), tokens, None)


def test_compiled_dtensors():
    on_all(2, _dtensors, (2,), (), 7, "aot_eager")


def test_dtensors_on_two_dimensions():
    from torch.distributed.tensor import Replicate, Shard

    for place in Shard(0), Shard(1), Replicate():
        on_all(4, _dtensors, (2, 2), (place,), 7, None)
    on_all(4, _dtensors, (2, 2), (Shard(0),), 7, "aot_eager")


def _dtensor_refusals():
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

    mesh, other = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    x, index = torch.randn(4, 6), torch.arange(4)
    places = [Replicate(), Shard(1)]

    def replicated(tensor, mesh=mesh):
        return distribute_tensor(tensor, mesh, [Replicate(), Replicate()])

    logits, indices, call = distribute_tensor(x, mesh, places), replicated(index), gander.token_statistics
    # A plain index is the same on all ranks.
    want = call(x, index)
    assert_same([value.to_local() for value in call(logits, index)], want)
    for error, message, function in (
        (
            ValueError,
            "index is on DeviceMesh.*, the mesh of logits",
            lambda: call(logits, replicated(index, other)),
        ),
        (
            ValueError,
            "row_mask is on DeviceMesh.*, the mesh of logits",
            lambda: call(logits, indices, row_mask=replicated(index, other)),
        ),
        (ValueError, r"index has shape \(3,\), expected \(4,\)", lambda: call(logits, replicated(index[:3]))),
        (
            NotImplementedError,
            r"index has placements .*Shard.*, expected .*Replicate",
            lambda: call(logits, distribute_tensor(index, mesh, [Replicate(), Shard(0)])),
        ),
        (
            NotImplementedError,
            "needs_state is set with logits whose tokens are sharded",
            lambda: torch.ops.gander.token_statistics(logits, indices, needs_state=True),
        ),
        (
            TypeError,
            "logits is a DTensor, expected this rank's slice; pass logits.to_local.*gander.token_statistics",
            lambda: gander.distributed.token_statistics(logits, index),
        ),
    ):
        with pytest.raises(error, match=message):
            function()
    with torch.inference_mode(), pytest.raises(NotImplementedError, match=r"need torch\.no_grad, not inf"):
        call(logits, indices)
    # No rank waits for one that refuses its part.
    wrong = DTensor.from_local(
        logits.to_local()[:, 1:], mesh, places, shape=x.shape, stride=x.stride(), run_check=False
    )
    with pytest.raises(ValueError, match=r"logits has 2 classes on rank .*, expected 3"):
        call(wrong, indices)
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="index has the class 9, expected 0 to 5"):
            call(logits, replicated(torch.tensor([0, 1, 2, 9])))
    finally:
        gander.set_debug(False)


def test_dtensor_refusals():
    on_all(4, _dtensor_refusals)


# ---- Refusals ----


def _refusals():
    x, index, rows = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), torch.ones(4)
    refused(ValueError, r"index has shape \(3,\), expected \(4,\)", x, index[:3])
    refused(TypeError, "index has dtype float32, expected int32 or int64", x, index.float())
    refused(TypeError, "logits has dtype int64, expected float16", x.long(), index)
    refused(ValueError, "logits has rank 0", x[0, 0], index[0])
    refused(RuntimeError, "index is on meta, expected cpu as logits", x, index.to("meta"))
    refused(ValueError, r"row_mask has shape \(3,\), expected \(4,\)", x, index, row_mask=rows[:3].bool())
    refused(TypeError, "row_mask has dtype float32, expected", x, index, row_mask=rows)
    refused(ValueError, r"index has shape \(3,\), expected \(4,\)", x[:, :0], index[:3], sizes=(6, 6))
    for outputs in ("loss",), (), ("entropy", "entropy"), "entropy":
        refused((TypeError, ValueError), "outputs is", x, index, outputs=outputs)
    for name in "inplace_backward", "batch_invariant":
        refused(TypeError, f"{name} is 1, expected True or False", x, index, **{name: 1})
    for name, value in ("scale", 0), ("softcap", -1), ("temperature", NAN), ("temperature", 0.0):
        for given in x, x[:, :0]:  # a rank without tokens refuses them too
            refused(ValueError, f"{name} is ", given, index, **{name: value}, sizes=(6, 6))
    for value in "a", None, 1.5, True:
        message = f"ignore_index is {value!r}, expected an integer of 64 bits"
        refused(TypeError, re.escape(message), x, index, ignore_index=value)
    refused(ValueError, "ignore_index is 9223372036854775808, expected", x, index, ignore_index=2**63)
    for value, kind in (None, "None"), ("a", "a str"), ([1.0], "a list"):
        refused(TypeError, f"logits is {kind}, expected a torch.Tensor", value, index)
        refused(TypeError, f"index is {kind}, expected a torch.Tensor", x, value)
        if value is not None:
            refused(TypeError, f"row_mask is {kind}, expected a torch.Tensor", x, index, row_mask=value)
    refused(
        NotImplementedError, "logits is a nested tensor, expected", torch.nested.nested_tensor([x]), index
    )
    refused(NotImplementedError, "logits has layout sparse_coo, expected strided", x.to_sparse(), index)
    refused(TypeError, "group is 5, expected a torch.distributed.ProcessGroup", x, index, 5)
    refused(ValueError, r"sizes is \(6,\), expected 2 integers", x, index, sizes=(6,))
    refused(ValueError, "sizes and classes are given, expected one", x, index, sizes=(6, 6), classes=12)
    for in_dims in (0, None), (None, 0), (0, 0):
        given = [
            each if dim is None else each.expand(2, *each.shape)
            for each, dim in zip((x, index), in_dims, strict=True)
        ]
        with (
            Collectives() as counted,
            pytest.raises(NotImplementedError, match=r"is batched by torch\.func\.vmap.* in one call$"),
        ):
            torch.func.vmap(lambda x, i: gander.distributed.token_statistics(x, i)[0], in_dims)(*given)
        assert not counted.sent
    call = gander.distributed.token_statistics
    for match, function in (
        (r"row_mask has shape \(3,\), expected \(4,\)", lambda x: call(x, index, row_mask=rows[:3].bool())),
        ("index has dtype float32", lambda x: call(x, index.float())),
        ("expected 2 integers, the number of classes of each rank", lambda x: call(x, index, sizes=(6,))),
        ("outputs is", lambda x: call(x, index, outputs=("loss",))),
    ):
        compiled, _ = in_one_graph(function, "eager")
        with Collectives() as counted, pytest.raises(Exception, match=match):
            compiled(x)
        assert not counted.sent


def test_refusals():
    on_all(2, _refusals)
