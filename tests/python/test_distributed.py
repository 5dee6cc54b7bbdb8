"""gander.distributed, and models with sharded tensors, on the CPU with gloo: each job runs on all ranks of a
pool of processes.

The result is compared with that of gander.cross_entropy, which gets all classes, or with torch's.
"""

import functools
import importlib
import random
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from itertools import accumulate

import gander
import pytest
import torch
from ranks import TIMEOUT, Collectives, dist, in_one_graph, mine, on_all, pools  # noqa: F401
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

SIZES = {2: (5, 12), 3: (7, 1, 9), 4: (4, 0, 8, 5)}
INF, NAN = float("inf"), float("nan")


# ---- What the jobs share ----


def example(sizes, leading=(6,), dtype=torch.float32, scale=3.0):
    """Logits of all classes, targets of which the second is ignored, and class weights. The same on all
    ranks."""
    n = sum(sizes)
    x = (torch.randn(*leading, n, dtype=torch.float64) * scale).to(dtype)
    target = torch.randint(n, leading)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return x, target, (torch.rand(n, dtype=torch.float64) + 0.5).to(dtype)


def sliced(sizes):
    """gander.distributed.cross_entropy, which is told the sizes where it needs them."""
    options = {} if len({*sizes}) == 1 else {"sizes": sizes}
    return functools.partial(gander.distributed.cross_entropy, **options)


def both(x, target, sizes, weight=None, upstream=None, **options):
    """Loss and gradient: those of gander.distributed, and this rank's part of those of all classes."""
    results = []
    for call, cut in (
        (sliced(sizes), lambda tensor: mine(tensor, sizes)),
        (gander.cross_entropy, lambda tensor: tensor),
    ):
        leaf = cut(x).detach().clone().requires_grad_()
        loss = call(leaf, target, weight=None if weight is None else cut(weight), **options)
        given = torch.ones_like(loss) if upstream is None else upstream
        (dx,) = torch.autograd.grad(loss, leaf, given)
        results.append((loss.detach(), dx))
    (loss, dx), (expected, all_dx) = results
    return loss, dx, expected, mine(all_dx, sizes)


def check(*arguments, **options):
    loss, dx, expected, expected_dx = both(*arguments, **options)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(dx, expected_dx, equal_nan=True)
    every = loss.new_empty(dist.get_world_size(), *loss.shape)
    dist.all_gather_into_tensor(every.view(-1), loss.view(-1))
    assert all(torch.equal(row.nan_to_num(7), loss.nan_to_num(7)) for row in every), "the same on all ranks"
    return loss, dx


def refused(kind, match, *arguments, collectives=0, **options):
    with Collectives() as counted, pytest.raises(kind, match=match):
        gander.distributed.cross_entropy(*arguments, **options)
    assert len(counted.sent) == collectives


# ---- Values ----


def _values(sizes, dtype):
    for leading in (), (3, 0), (2, 3), (300,):
        x, target, weight = example(sizes, leading, dtype)
        for reduction in "mean", "sum", "none":
            for w in None, weight:
                upstream = torch.randn(leading if reduction == "none" else (), dtype=torch.float64)
                upstream = upstream.to(torch.float64 if dtype == torch.float64 else torch.float32)
                check(x, target, sizes, weight=w, upstream=upstream, reduction=reduction)
    check(x, target.int(), sizes, weight=weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", SIZES)
def test_values(ranks, dtype):
    on_all(ranks, _values, SIZES[ranks], dtype)


LOSS_OPTIONS = (
    {"z_loss": 0.01},
    {"softcap": 5.0},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"label_smoothing": 0.2, "z_loss": 0.1, "scale": 1.5, "softcap": 30.0, "temperature": 2.0},
    {"z_loss": 0.1, "scale": 2.0, "softcap": 9.0, "temperature": 1.5},
)


def _loss_options(sizes):
    for dtype in torch.bfloat16, torch.float32, torch.float64:
        for leading in (), (3, 0), (40,):
            x, target, weight = example(sizes, leading, dtype)
            for options in LOSS_OPTIONS:
                for reduction in "mean", "sum", "none":
                    upstream = torch.rand(leading if reduction == "none" else (), dtype=torch.float64) + 0.5
                    upstream = upstream.to(torch.float64 if dtype == torch.float64 else torch.float32)
                    check(x, target, sizes, upstream=upstream, reduction=reduction, **options)
                    if not {"z_loss", "label_smoothing"} & options.keys():
                        check(x, target, sizes, weight, upstream, reduction=reduction, **options)
    x, target, weight = example(sizes, (4,))
    target[2] = sum(sizes)  # no class
    for options in LOSS_OPTIONS[2:]:
        loss, _ = check(x, target, sizes, reduction="none", **options)
        assert loss.isnan().tolist() == [False, False, True, False] and loss[1] == 0
        assert check(x, target, sizes, **options)[0].isnan()
    part = mine(x, sizes)
    given = {"sizes": sizes, "reduction": "sum"}
    for name in "z_loss", "label_smoothing":
        message, w = f"{name} is 0.1 with weight and classes", mine(weight, sizes)
        refused(NotImplementedError, message, part, target, weight=w, **{name: 0.1})
    for name, value in (
        ("z_loss", -1),
        ("label_smoothing", 2),
        ("scale", 0),
        ("softcap", -1),
        ("temperature", float("nan")),
    ):
        refused((ValueError, RuntimeError), f"{name} is ", part, target, **{name: value}, **given)
    # One rank alone has another option: no loss is right on any of them.
    alone = {"temperature": 2.0} if dist.get_rank() == 0 else {}
    assert gander.distributed.cross_entropy(part, target.clamp(0, 1), **given, **alone).isnan()

    for options in LOSS_OPTIONS[-2:]:

        def loss(x, options=options):
            return sliced(sizes)(x * 2, target.clamp(0, 1), reduction="none", **options)

        compiled, counter = in_one_graph(loss, "aot_eager")
        torch.testing.assert_close(gradient_of(compiled, part), gradient_of(loss, part), rtol=0, atol=0)
        assert counter.frame_count == 1


@pytest.mark.parametrize("ranks", SIZES)
def test_loss_options(ranks):
    on_all(ranks, _loss_options, SIZES[ranks])


def _smoothing(sizes):
    x, target, _ = example(sizes, (40,))
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 8.0}
    part, n = mine(x, sizes).clone().requires_grad_(), sum(sizes)
    # Backward in place, of several upstream gradients, and twice.
    for reduction in "mean", "none":
        _, dx, _, _ = both(x, target, sizes, reduction=reduction, **options)
        over = part * 1
        loss = sliced(sizes)(over, target, reduction=reduction, inplace_backward=True, **options)
        (got,) = torch.autograd.grad(loss, over, torch.ones_like(loss))
        assert torch.equal(got, dx) and torch.equal(over, dx)
        loss = sliced(sizes)(part, target, reduction=reduction, **options)
        upstream = torch.rand(2, *loss.shape) + 0.5
        (got,) = torch.autograd.grad(loss, part, upstream, retain_graph=True, is_grads_batched=True)
        torch.testing.assert_close(got, dx * upstream.view(2, -1, 1))
        if part.numel():
            (got,) = torch.autograd.grad(loss, part, torch.ones_like(loss), create_graph=True)
            assert torch.equal(got, dx)
            with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
                got.sum().backward()
    # Targets that are nearly certain, and large logits.
    logits = x - 2000
    logits[torch.arange(40), target.clamp(0)] = logits.amax(1) + torch.linspace(0, 60, 40)
    loss, dx, _, _ = both(logits, target, sizes, reduction="none", label_smoothing=1e-3)
    _, _, want, want_dx = both(logits.double(), target, sizes, reduction="none", label_smoothing=1e-3)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-7)
    # Logits of -inf: a slice of them, one class, and a row.
    logits = x[:4].clone()
    logits[0, : sizes[0]] = logits[2, n - 1] = logits[3] = -INF
    target = torch.full((4,), n // 2)
    loss, _, expected, _ = both(logits, target, sizes, reduction="none", label_smoothing=0.1)
    assert loss[0] == loss[2] == expected[0] == INF and loss[3].isnan() == expected[3].isnan()
    torch.testing.assert_close(loss[1], expected[1])

    # One graph for all numbers of rows and classes.
    def loss_of(x, target):
        given = {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 8.0}
        return gander.distributed.cross_entropy(x * 2, target, **given)

    compiled, counter = in_one_graph(loss_of, "inductor" if len(sizes) == 2 else "aot_eager", dynamic=True)
    for rows, n in (5, 6), (7, 9):
        x, target, _ = example([n] * len(sizes), (rows,))
        got = gradient_of(compiled, mine(x, [n] * len(sizes)), target)
        whole = gradient_of(
            lambda x, target: gander.cross_entropy(x * 2, target, reduction="sum", **options), x, target
        )
        torch.testing.assert_close(got, (whole[0], mine(whole[1], [n] * len(sizes))))
    assert counter.frame_count == 1


@pytest.mark.parametrize("ranks", SIZES)
def test_label_smoothing(ranks):
    on_all(ranks, _smoothing, SIZES[ranks])


def _accuracy(sizes):
    """Of the loss of confident rows, and of large logits, against float64."""
    x, target, _ = example(sizes, (500,))
    for shift in 0, 1000, -30000:
        logits = x + shift
        logits[torch.arange(500), target.clamp(0)] = logits.amax(1) + torch.linspace(0, 16, 500)
        want = gander.cross_entropy(logits.double(), target, reduction="none")
        whole = gander.cross_entropy(logits, target, reduction="none")
        got = sliced(sizes)(mine(logits, sizes), target, reduction="none")
        assert (got - want).abs().max() <= 2 * (whole - want).abs().max() + 2e-7


@pytest.mark.parametrize("ranks", SIZES)
def test_accuracy(ranks):
    on_all(ranks, _accuracy, SIZES[ranks])


def _confident(sizes):
    """A target that is nearly certain: its loss and gradient have as many digits as any other's."""
    n, lead = sum(sizes), torch.arange(10.0, 70.0, 5)
    for owner in 0, n // 2, n - 1:
        x, target = torch.zeros(len(lead), n), torch.full((len(lead),), owner)
        x[:, owner] = lead
        loss, dx, _, _ = both(x, target, sizes, reduction="none", upstream=torch.ones(len(lead)))
        expected = torch.log1p((n - 1) * torch.exp(-lead.double()))
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        wanted = -expected.neg().expm1()[:, None].expand(-1, n) / (n - 1)
        wanted = wanted.clone()
        wanted[:, owner] = expected.neg().expm1()
        torch.testing.assert_close(dx.double(), mine(wanted, sizes), rtol=1e-6, atol=0)


@pytest.mark.parametrize("ranks", SIZES)
def test_confident(ranks):
    on_all(ranks, _confident, SIZES[ranks])


def _special_rows(sizes):
    last = sum(sizes) - 1
    x, _, weight = example(sizes, (12,))
    first, end = accumulate((0, sizes[0]))
    target = torch.full((12,), last)
    x[0, first:end] = -INF  # a slice of -inf
    x[1, first:end], target[1] = -INF, 0  # and the target in it: the loss is inf
    x[2, 0], target[2] = -INF, 0
    x[3] = -INF
    x[4, last] = NAN
    x[5, 0] = NAN
    x[6, 0] = INF
    x[7, last] = INF
    x[8], target[8] = NAN, -100
    x[9, 0], target[9] = INF, -100
    x[10, :last] = -INF
    x[11, 0], x[11, 1:], target[11] = 3e38, -3e38, 0
    for reduction in "none", "sum", "mean":
        for w in None, weight:
            check(x, target, sizes, weight=w, reduction=reduction)
    loss, dx = check(x, target, sizes, reduction="none")
    assert loss[1] == loss[2] == INF and loss[10] == loss[11] == 0
    assert torch.equal(dx[8:10], torch.zeros_like(dx[8:10]))


@pytest.mark.parametrize("ranks", SIZES)
def test_special_rows(ranks):
    on_all(ranks, _special_rows, SIZES[ranks])


def _rows_that_do_not_count(sizes):
    last = sum(sizes) - 1
    x, target, weight = example(sizes)
    weight[last] = 0
    target[2:4] = last
    x[3] = NAN
    for ignore_index in -100, 0, last, 2**63 - 1, -(2**63), -(2**31), 1 << 40:
        target[0] = ignore_index
        for reduction in "none", "sum", "mean":
            check(x, target, sizes, weight=weight, ignore_index=ignore_index, reduction=reduction)
    target[0] = -(2**31)
    check(x, target.int(), sizes, weight=weight, ignore_index=-(2**31), reduction="none")
    for every in torch.full((6,), -100), torch.full((6,), last):  # no row counts
        for reduction in "none", "sum", "mean":
            loss, dx = check(x, every, sizes, weight=weight, reduction=reduction)
            assert torch.equal(dx, torch.zeros_like(dx))
    assert loss.isnan()


@pytest.mark.parametrize("ranks", SIZES)
def test_rows_that_do_not_count(ranks):
    on_all(ranks, _rows_that_do_not_count, SIZES[ranks])


def _targets_that_are_no_classes(sizes):
    x, target, weight = example(sizes)
    for bad in -1, -99, sum(sizes), 2**31 - 1, -(2**31), 2**63 - 1, -(2**63):
        target[3] = bad
        for w in None, weight:
            loss, dx = check(x, target, sizes, weight=w, reduction="none")
            assert loss.isnan().tolist() == [row == 3 for row in range(6)]
            assert (
                dx.isnan().all(1).tolist() == [row == 3 and dx.numel() > 0 for row in range(6)]
                or not dx.numel()
            )
            check(x, target, sizes, weight=w, reduction="sum")
            loss, dx = check(x, target, sizes, weight=w)
            assert loss.isnan() and dx[[0, 2, 3, 4, 5]].isnan().all() and not dx[1].isnan().any()
    gander.set_debug(True)
    try:
        message = f"target has the class {bad}, expected 0 to {sum(sizes) - 1}"
        refused(IndexError, message, mine(x, sizes), target, sizes=sizes, collectives=1)  # the texts
    finally:
        gander.set_debug(False)


@pytest.mark.parametrize("ranks", SIZES)
def test_targets_that_are_no_classes(ranks):
    on_all(ranks, _targets_that_are_no_classes, SIZES[ranks])


# ---- Autograd ----


def _layouts(sizes):
    """Megatron's (s, b, v / tp), and rows that lie apart."""
    for shape in (3, 2), (2, 3, 2):
        x, target, weight = example(sizes, shape)
        moved = x.transpose(0, 1), target.transpose(0, 1)
        check(*moved, sizes, weight=weight, reduction="none", upstream=torch.rand(moved[1].shape))
        check(*moved, sizes, reduction="none", upstream=torch.rand(target.shape).transpose(0, 1))
        part = mine(x, sizes)  # its rows lie apart
        loss = sliced(sizes)(part, target)
        torch.testing.assert_close(loss, gander.cross_entropy(x, target))


def _backward(sizes):
    x, target, weight = example(sizes)
    part, w = mine(x, sizes).clone().requires_grad_(), mine(weight, sizes)
    whole = x.clone().requires_grad_()
    for reduction in "mean", "none":
        loss = sliced(sizes)(part, target, weight=w, reduction=reduction)
        theirs = gander.cross_entropy(whole, target, weight=weight, reduction=reduction)
        for _ in range(2):
            upstream = torch.randn(loss.shape)
            (dx,) = torch.autograd.grad(loss, part, upstream, retain_graph=True)
            (expected,) = torch.autograd.grad(theirs, whole, upstream, retain_graph=True)
            torch.testing.assert_close(dx, mine(expected, sizes))
        (dx,) = torch.autograd.grad(loss, part, upstream.expand(2, *upstream.shape), is_grads_batched=True)
        torch.testing.assert_close(dx, mine(expected, sizes).expand(2, -1, -1))
    loss = sliced(sizes)(part, target)
    if part.numel():
        (dx,) = torch.autograd.grad(loss, part, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            dx.sum().backward()
    assert not sliced(sizes)(part.detach(), target).requires_grad
    with torch.inference_mode():
        assert torch.equal(sliced(sizes)(part, target), loss)


def _in_place(sizes):
    x, target, weight = example(sizes)
    _, dx, _, expected = both(x, target, sizes, weight=weight)
    leaf = mine(x, sizes).clone().requires_grad_()
    part = leaf * 1
    sliced(sizes)(part, target, weight=mine(weight, sizes), inplace_backward=True).backward()
    assert torch.equal(leaf.grad, dx) and torch.equal(part, dx)
    torch.testing.assert_close(dx, expected)
    part = leaf * 1
    loss = sliced(sizes)(part, target, inplace_backward=True)
    loss.backward(retain_graph=True)
    if part.numel():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _checkpoints(sizes):
    x, target, _ = example(sizes)
    _, dx, _, _ = both(x, target, sizes)
    for reentrant in True, False:
        leaf = mine(x, sizes).clone().requires_grad_()
        checkpoint(lambda part: sliced(sizes)(part * 1, target), leaf, use_reentrant=reentrant).backward()
        assert torch.equal(leaf.grad, dx)


@pytest.mark.parametrize("job", [_layouts, _backward, _in_place, _checkpoints])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients(ranks, job):
    on_all(ranks, job, SIZES[ranks])


# ---- Communication ----


def _communication(sizes):
    """One all-gather a call, whatever calls came before, with three or four numbers of each row and a hash of
    8 bytes."""
    x, target, weight = example(sizes, (11,))
    for dtype, size in (torch.bfloat16, 4), (torch.float64, 8):
        for w in None, weight.to(dtype):
            part = mine(x, sizes).to(dtype).requires_grad_()
            w = None if w is None else mine(w, sizes)
            for rows in 11, 10, 0, 11:
                with Collectives() as counted:
                    loss = sliced(sizes)(part[:rows], target[:rows], weight=w)
                length = -(-rows * (3 if w is None else 4) * size // 8) * 8 + 8
                assert counted.sent == [length]
                with Collectives() as counted:
                    loss.backward()
                assert counted.sent == []


@pytest.mark.parametrize("ranks", SIZES)
def test_communication(ranks):
    on_all(ranks, _communication, SIZES[ranks])


def _groups():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group([*range(1, ranks)])
    x, target, _ = example(SIZES[ranks])
    if rank == 0:
        message = (
            r"group is -100, expected a torch\.distributed\.ProcessGroup of which this process is a member"
        )
        refused(ValueError, message, x, target, group)
    else:
        first, end = rank * 2 - 2, rank * 2
        loss = gander.distributed.cross_entropy(x[:, first:end], target.clamp(max=3), group)
        expected = gander.cross_entropy(x[:, : 2 * ranks - 2], target.clamp(max=3))
        torch.testing.assert_close(loss, expected)
    alone = [dist.new_group([other]) for other in range(ranks)][rank]
    torch.testing.assert_close(
        gander.distributed.cross_entropy(x, target, alone), gander.cross_entropy(x, target)
    )


def test_groups():
    on_all(3, _groups)


def attempt(x, target, slices, error=None, **options):
    """Loss and gradient of a call on this rank's slice, or None where it raises the error that is expected
    there."""
    part = mine(x, slices).clone().requires_grad_()
    if options.get("weight") is not None:
        options["weight"] = mine(options["weight"], slices)
    with Collectives() as counted:
        if error is None:
            loss = gander.distributed.cross_entropy(part, target, **options)
        else:
            with pytest.raises(ValueError, match=error):
                gander.distributed.cross_entropy(part, target, **options)
            loss = None
    assert len(counted.sent) == 1, counted.sent
    return loss, part


def refused_by_all(x, target, slices, error=None, **options):
    """A call that contradicts that of another rank: on each rank the loss and the gradient of rows that are
    not ignored are NaN, or an error is raised. No rank waits."""
    loss, part = attempt(x, target, slices, error, **options)
    counts = target != options.get("ignore_index", -100)
    refused = loss is None or bool((loss[counts] if loss.ndim else loss).isnan().all())
    if loss is not None:
        loss.sum().backward()
        refused &= bool(part.grad[counts].isnan().all())
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, refused)
    assert all(every)


def right_on_all(x, target, slices, **options):
    loss, part = attempt(x, target, slices, **options)
    (dx,) = torch.autograd.grad(loss.sum(), part)
    options = {name: value for name, value in options.items() if name not in ("sizes", "classes")}
    whole = x.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(whole, target, **options)
    (expected,) = torch.autograd.grad(want.sum(), whole)
    torch.testing.assert_close(loss, want, equal_nan=True)
    torch.testing.assert_close(dx, mine(expected, slices), equal_nan=True)


def _sequences(told):
    """Regression test: ranks that had seen their own shape with other partners skipped the comparison, and
    took the sizes of then for those of now, or sent numbers where the others sent texts."""
    for sequence, rows in (((6, 6), (7, 9), (6, 9)), 4), (((6, 6), (6, 9)), 4), (((6, 6), (6, 9)), 32):
        for weighted in False, True:
            for sizes in (*sequence, *sequence):
                x, target, weight = example(sizes, (rows,))
                options = {"weight": weight if weighted else None}
                if told:
                    options["sizes"] = sizes
                if told or sizes == (6, 6):
                    right_on_all(x, target, sizes, **options)
                else:
                    refused_by_all(x, target, sizes, **options)


@pytest.mark.parametrize("told", [False, True], ids=["sizes unknown", "sizes given"])
def test_sequences_of_sizes(told):
    on_all(2, _sequences, told)


def _chunked(classes):
    """As torch.chunk divides them: the last slices may be shorter, or empty."""
    ranks = dist.get_world_size()
    chunks = [part.numel() for part in torch.arange(classes).chunk(ranks)]
    sizes = (*chunks, *[0] * (ranks - len(chunks)))
    x, target, weight = example(sizes)
    for w in None, weight:
        right_on_all(x, target, sizes, weight=w, classes=classes)
        right_on_all(x, target, sizes, weight=w, sizes=sizes)


@pytest.mark.parametrize("ranks", SIZES)
def test_chunks(ranks):
    for classes in 1, ranks, 2 * ranks + 1, 9, 12:
        on_all(ranks, _chunked, classes)


def _random_calls(seed):
    """All ranks draw the same calls, of which some contradict each other. Each is right, or refused on all
    ranks, whatever came before it, and takes one all-gather."""
    draw, rank, ranks = random.Random(seed), dist.get_rank(), dist.get_world_size()
    kinds = set()
    for step in range(60):
        torch.manual_seed(step)  # the ranks may have drawn different numbers
        equal = draw.random() < 0.4
        sizes = (
            (draw.randint(1, 7),) * ranks
            if equal
            else tuple(draw.choice((0, 1, 4, 6, 7, 9)) for _ in range(ranks))
        )
        if not any(sizes):
            continue
        x, target, weight = example(sizes, (draw.choice((1, 4, 12, 32)),))
        options = {"reduction": draw.choice(("none", "sum", "mean"))}
        target[0] = draw.randrange(sum(sizes))  # a row that counts
        if draw.random() < 0.5:
            options["weight"] = weight
        odd, kind = draw.randrange(ranks), draw.randrange(8)
        told = options | {"sizes": sizes}
        alone = rank == odd
        if kind == 0 and (len({*sizes}) > 1):
            # Sizes unknown and different. A rank without classes cannot be alone in having none.
            error = "x has no classes on rank" if sizes[rank] == 0 else None
            refused_by_all(x, target, sizes, error, **options)
        elif kind == 1:
            other = draw.choice([r for r in range(ranks) if r != odd])
            wrong = [*sizes]
            wrong[odd] += 1  # what one rank has is not what all expect
            error = f"x has {sizes[odd]} classes on rank {odd}, expected {wrong[odd]}" if alone else None
            refused_by_all(x, target, sizes, error, **options, sizes=wrong)
            wrong = [*sizes]
            wrong[other] += 1  # what one rank expects is not what another has
            refused_by_all(x, target, sizes, **options, sizes=wrong if alone else sizes)
        elif kind == 2:
            told["ignore_index"] = 10**6 + alone
            refused_by_all(x, target.clamp(0), sizes, **told)
        elif kind == 3:
            other = draw.choice(sorted({"none", "sum", "mean"} - {told["reduction"]}))
            told["reduction"] = other if alone else told["reduction"]
            refused_by_all(x, target, sizes, **told)
        elif kind == 4:
            told.pop("weight", None)
            refused_by_all(x.half() if alone else x, target, sizes, **told)
        elif kind == 5:  # as many bytes, of other rows
            told.pop("weight", None)
            weights = {"weight": weight} if alone else {}
            rows = 3 if alone else 4
            x, target, _ = example(sizes, (rows,))
            refused_by_all(x, target.clamp(0), sizes, **told, **weights)
        else:
            kind = 6
            right_on_all(x, target, sizes, **(options if len({*sizes}) == 1 else told))
        kinds.add(kind)
    assert len(kinds) >= 6, kinds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", SIZES)
def test_random_calls(ranks, seed):
    on_all(ranks, _random_calls, seed)


def _no_classes():
    x, target = torch.randn(4, 0), torch.zeros(4, dtype=torch.int64)
    message = "x has no classes on rank"
    refused(ValueError, message, x, target, collectives=1)
    sized = {"sizes": (0, 0)}, {"classes": 0}
    for options in sized:
        refused(ValueError, "expected (one class|1) or more in all", x, target, **options)


def test_no_classes():
    on_all(2, _no_classes)


# ---- Graphs ----


def gradient_of(call, x, *arguments):
    leaf = x.clone().requires_grad_()
    loss = call(leaf, *arguments)
    loss.sum().backward()
    return loss.detach(), leaf.grad


def _compiled(sizes, backend):
    x, target, weight = example(sizes)
    part, w = mine(x, sizes).contiguous(), mine(weight, sizes)
    calls = [((w,), "mean"), ((None,), "mean"), ((w,), "none"), ((None,), "none")]
    modes = [torch.no_grad, torch.inference_mode]
    if backend == "inductor" or len(sizes) > 2:  # options do not change what a graph consists of
        calls, modes = calls[:1], modes[:1]
    for weights, reduction in calls:

        def loss(x, weight, reduction=reduction):
            options = {"weight": weight, "reduction": reduction, "ignore_index": -100}
            return sliced(sizes)(x * 2, target, **options, inplace_backward=True) * 3

        compiled, counter = in_one_graph(loss, backend)
        got = gradient_of(compiled, part, *weights)
        assert counter.frame_count == 1
        want = gradient_of(loss, part, *weights)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        for inference in modes:
            with inference():
                torch.testing.assert_close(compiled(part, *weights), want[0], rtol=0, atol=0)

    def loss(x, weight):
        return sliced(sizes)(x * 2, target, reduction="none", inplace_backward=True) * 3

    whole = gradient_of(lambda x: torch.nn.functional.cross_entropy(x * 2, target, reduction="none") * 3, x)
    compiled, _ = in_one_graph(lambda x: loss(x, None), backend)
    torch.testing.assert_close(gradient_of(compiled, part), (whole[0], mine(whole[1], sizes)))


@pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "eager"), (2, "aot_eager"), (2, "inductor"), (4, "aot_eager")]
)
def test_compiled(ranks, backend):
    on_all(ranks, _compiled, SIZES[ranks], backend)


def _compiled_with_dynamic_shapes(backend):
    """One graph for all numbers of rows and classes, with sizes and without."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])

    def loss(x, target, classes):
        return gander.distributed.cross_entropy(x * 2, target, group, classes=classes, reduction="sum")

    compiled, counter = in_one_graph(loss, backend, dynamic=True)
    for rows, n in (5, 6), (7, 9), (9, 12):
        x, target, _ = example((n, n), (rows,))
        got = gradient_of(compiled, mine(x, (n, n)), target, None)
        torch.testing.assert_close(got, gradient_of(loss, mine(x, (n, n)), target, None), rtol=0, atol=0)
    assert counter.frame_count == 1
    for rows, n in (5, 6), (7, 9), (9, 12):
        sizes = (n, n - 1)
        x, target, _ = example(sizes, (rows,))
        got = gradient_of(compiled, mine(x, sizes), target, sum(sizes))
        torch.testing.assert_close(got, gradient_of(loss, mine(x, sizes), target, sum(sizes)), rtol=0, atol=0)
    assert counter.frame_count == 2
    with pytest.raises(ValueError, match=r"x has \d+ classes on rank") if rank else nullcontext():
        assert compiled(mine(x, sizes), target, 2 * n).isnan()  # of which rank 1 has one less
    got = compiled(mine(x, sizes), target, None)  # each takes its own size for that of all
    assert got.isnan()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_with_dynamic_shapes(backend):
    on_all(2, _compiled_with_dynamic_shapes, backend)


def _compiled_with_others(sizes):
    """Two losses in one graph, an activation checkpoint, and torch.func.grad. The order of the all-gathers is
    the same on all ranks, although their slices differ in size."""
    x, target, weight = example(sizes)
    part, w = mine(x, sizes).contiguous(), mine(weight, sizes)

    def two(x):
        first = sliced(sizes)(x.sin(), target, reduction="sum")
        return first + sliced(sizes)(x.cos(), target, weight=w, reduction="sum")

    def with_checkpoint(x):
        return checkpoint(lambda x: sliced(sizes)(x.sin(), target), x, use_reentrant=False)

    for function in two, with_checkpoint:
        compiled, counter = in_one_graph(function, "inductor")
        torch.testing.assert_close(gradient_of(compiled, part), gradient_of(function, part))
        assert counter.frame_count == 1
    gradient = torch.func.grad(lambda x: sliced(sizes)(x.sin(), target))
    compiled, _ = in_one_graph(gradient, "aot_eager")
    torch.testing.assert_close(compiled(part), gradient(part))
    batch = torch.stack((part, part))
    compiled, _ = in_one_graph(torch.func.vmap(lambda x: sliced(sizes)(x, target)), "aot_eager")
    with pytest.raises(Unsupported, match="x is batched by torch"):
        compiled(batch)
    compiled, _ = in_one_graph(
        lambda x: torch.func.jvp(lambda x: sliced(sizes)(x, target), (x,), (x,)), "eager"
    )
    with pytest.raises(Unsupported, match="forward-mode derivatives are not supported"):
        compiled(part)


def test_compiled_with_others():
    on_all(2, _compiled_with_others, SIZES[2])


def _operators(sizes):
    importlib.import_module("gander.distributed")  # registers the operators
    from torch.library import opcheck

    x, target, weight = example(sizes)
    part, operators = mine(x, sizes).contiguous(), torch.ops.gander
    # opcheck takes NaN for a difference, and what is sent has NaN for the targets of other slices.
    target = torch.where(target >= 0, target % sizes[0] + sum(sizes[: dist.get_rank()]), target)
    for w in None, mine(weight, sizes).contiguous():
        for reduction in 0, 1:
            smoothing = 0.1 if w is None and reduction else 0.0
            more = smoothing, 0.0, 1.5, 3.0, 2.0
            options = target, w, [*sizes], -100, reduction, dist.group.WORLD.group_name, *more
            opcheck(operators.cross_entropy_part.default, (part, *options))
            every = torch.cat([operators.cross_entropy_part(part, *options)] * len(sizes))
            leaf = part.clone().requires_grad_()
            opcheck(operators.cross_entropy_of_parts.default, (leaf, every, *options))
    lse, dloss = torch.randn(2 * target.numel() + 1), torch.rand(())
    given = part, target, lse, dloss, 10, -100, 1, 0.1, *more[1:]
    opcheck(operators.cross_entropy_bwd_of_slice.default, given)


def test_operators():
    on_all(2, _operators, (5, 5))


def _same_bits():
    """What is sent has 3 numbers for each row and a hash of 8 bytes, which an odd number of rows pads."""
    importlib.import_module("gander.distributed")
    x, options = (
        torch.randn(5, 4),
        (None, [4, 4], -100, 1, dist.group.WORLD.group_name, 0.0, 0.0, 1.0, 0.0, 1.0),
    )
    target = torch.arange(5) % 8
    for fill in 1.0, 2.0:
        memory = [torch.full((18,), fill) for _ in range(100)]  # the next tensors are made of it
        del memory
        sent = torch.ops.gander.cross_entropy_part(x, target, *options)
        assert sent.numel() == 18 and sent[15] == 0


def test_the_same_bits_are_sent_on_each_run():
    on_all(2, _same_bits)


def _compiled_refusals():
    x, target = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    call = gander.distributed.cross_entropy
    for match, function in (
        (r"weight has shape \(5,\), expected \(6,\)", lambda x: call(x, target, weight=torch.ones(5))),
        ("target has dtype float32", lambda x: call(x, target.float())),
        ("target is None, expected a torch.Tensor", lambda x: call(x, None)),
        ("group is -100, expected a torch.distributed.ProcessGroup", lambda x: call(x, target, -100)),
        ("expected 2 integers, the number of classes of each rank", lambda x: call(x, target, sizes=(6,))),
        ("ignore_index is 'a', expected an integer", lambda x: call(x, target, ignore_index="a")),
    ):
        compiled, _ = in_one_graph(function, "eager")
        with Collectives() as counted, pytest.raises(Exception, match=match):
            compiled(x)
        assert not counted.sent
    compiled, _ = in_one_graph(lambda x, target: call(x, target), "eager")
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="target has the class 99, expected 0 to 11"):
            compiled(x, target + 99)
        with pytest.raises(ValueError, match=r"x has \(6, 5\) classes on the ranks of the group"):
            compiled(x[:, : 6 - dist.get_rank()], target)
    finally:
        gander.set_debug(False)


def test_compiled_refusals():
    on_all(2, _compiled_refusals)


# ---- DTensors ----


def _dtensors(shape, rows, classes):
    """rows: the placements of the rows on the mesh, whose last dimension shards the classes."""
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )

    mesh = init_device_mesh("cpu", shape)
    x, target, weight = example((classes,), (4, 3))
    places = [*rows, Shard(2)]
    by_row = [*rows, Replicate()]
    replicated = [Replicate()] * len(places)
    whole = x.clone().requires_grad_()
    logits = distribute_tensor(x, mesh, places).requires_grad_()
    targets, weights = distribute_tensor(target, mesh, by_row), distribute_tensor(weight, mesh, replicated)
    sharded = any(place.is_shard() for place in rows)

    def of_operator(*given, **named):
        return torch.ops.gander.cross_entropy(*given, **named)[0]

    for call in gander.cross_entropy, of_operator:
        for w, ws in (None, None), (weight, weights):
            for code, reduction in enumerate(("none", "mean", "sum")):
                option = reduction if call is gander.cross_entropy else code
                if sharded and reduction == "mean":
                    with pytest.raises(NotImplementedError, match="a mean over sharded rows"):
                        call(logits, targets, weight=ws, reduction=option)
                    continue
                expected = gander.cross_entropy(whole, target, weight=w, reduction=reduction)
                with Collectives() as counted:
                    loss = call(logits, targets, weight=ws, reduction=option)
                assert len(counted.sent) == 1
                kind = by_row if reduction == "none" else [Partial() if p.is_shard() else p for p in by_row]
                assert [*loss.placements] == kind and loss.shape == expected.shape
                upstream = torch.rand_like(expected)
                up = distribute_tensor(upstream, mesh, by_row if reduction == "none" else replicated)
                with Collectives() as counted:
                    (dx,) = torch.autograd.grad(loss, logits, up)
                assert counted.sent == [] and [*dx.placements] == places
                torch.testing.assert_close(loss.full_tensor(), expected)
                want = torch.autograd.grad(expected, whole, upstream)[0]
                torch.testing.assert_close(dx.full_tensor(), want)
                with torch.no_grad():
                    assert torch.equal(
                        call(logits, targets, weight=ws, reduction=option).to_local(), loss.to_local()
                    )
    for options in LOSS_OPTIONS:
        expected = gander.cross_entropy(whole, target, reduction="sum", **options)
        loss = gander.cross_entropy(logits, targets, reduction="sum", **options)
        torch.testing.assert_close(loss.full_tensor(), expected)
        (dx,), (want,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, whole)
        torch.testing.assert_close(dx.full_tensor(), want)
    with pytest.raises(NotImplementedError, match=r"label_smoothing is 0.1 with weight and classes"):
        gander.cross_entropy(logits, targets, weight=weights, reduction="sum", label_smoothing=0.1)
    divided = gander.cross_entropy(logits, targets, reduction="sum", divisor=7).full_tensor()
    torch.testing.assert_close(divided, gander.cross_entropy(x, target, reduction="sum") / 7)
    if not sharded:  # a plain target is the same on all ranks, as in torch's loss_parallel
        torch.testing.assert_close(
            gander.cross_entropy(logits, target).to_local(), gander.cross_entropy(x, target)
        )
    with (
        torch.inference_mode(),
        pytest.raises(NotImplementedError, match=r"need torch\.no_grad, not inference_mode"),
    ):
        gander.cross_entropy(logits, targets)
    with pytest.raises(NotImplementedError, match=r"weight has placements .* expected .*Replicate"):
        gander.cross_entropy(
            logits,
            targets,
            weight=distribute_tensor(weight, mesh, [*replicated[1:], Shard(0)]),
            reduction="sum",
        )
    with pytest.raises(TypeError, match="x is a DTensor, expected this rank's slice"):
        gander.distributed.cross_entropy(logits, target)
    with pytest.raises(ValueError, match=r"target has shape"):
        gander.cross_entropy(logits, distribute_tensor(target[:, :2], mesh, by_row), reduction="sum")
    part = logits.to_local().detach()
    if classes <= mesh.size(len(shape) - 1):  # there is no slice with a class to spare
        return
    wrong = part[..., 1:] if part.shape[-1] > 1 else part  # no rank waits for one that refuses its part
    given = DTensor.from_local(wrong, mesh, places, shape=x.shape, stride=x.stride(), run_check=False)
    if wrong is part:
        assert gander.cross_entropy(given, targets, reduction="sum").to_local().isnan()
    else:
        with pytest.raises(ValueError, match=f"classes on rank .*, expected {part.shape[-1]}"):
            gander.cross_entropy(given, targets, reduction="sum")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dtensors(ranks):
    for classes in 12, 2 * ranks + 1, 2:
        on_all(ranks, _dtensors, (ranks,), (), classes)


def _compiled_dtensors(shape, rows, classes, backend):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", shape)
    x, target, weight = example((classes,), (4, 3))
    by_row, replicated = [*rows, Replicate()], [Replicate()] * len(shape)
    logits = distribute_tensor(x, mesh, [*rows, Shard(2)])
    targets, weights = distribute_tensor(target, mesh, by_row), distribute_tensor(weight, mesh, replicated)
    for w, ws in (None, None), (weight, weights):
        for reduction in "sum", "none":

            def loss(x, target, weight, reduction=reduction):
                return gander.cross_entropy(x * 2, target, weight=weight, reduction=reduction)

            whole = x.clone().requires_grad_()
            want = loss(whole, target, w)
            want.sum().backward()
            compiled, counter = in_one_graph(loss, backend)
            leaf = logits.clone().detach().requires_grad_()
            got = compiled(leaf, targets, ws)
            got.sum().backward()
            assert counter.frame_count == 1
            torch.testing.assert_close(got.full_tensor(), want)
            torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dtensors(backend):
    from torch.distributed.tensor import Shard

    on_all(2, _compiled_dtensors, (2,), (), 12, backend)
    on_all(2, _compiled_dtensors, (2,), (), 7, backend)
    if backend == "aot_eager":
        on_all(4, _compiled_dtensors, (2, 2), (Shard(0),), 7, backend)


def test_dtensors_on_two_dimensions():
    from torch.distributed.tensor import Replicate, Shard

    for place in Shard(0), Shard(1), Replicate():
        on_all(4, _dtensors, (2, 2), (place,), 7)


def _dtensor_refusals():
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    mesh, other = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    x, target, weight = torch.randn(4, 6), torch.arange(4), torch.ones(6)

    def replicated(tensor, mesh=mesh):
        return distribute_tensor(tensor, mesh, [Replicate(), Replicate()])

    logits, targets = distribute_tensor(x, mesh, [Replicate(), Shard(1)]), replicated(target)
    sum_ = {"reduction": "sum"}
    for name, given in {
        "target": {"target": replicated(target, other)},
        "weight": {"target": targets, "weight": replicated(weight, other)},
        "divisor": {"target": targets, "divisor": replicated(torch.tensor(2.0), other)},
    }.items():
        with pytest.raises(ValueError, match=f"{name} is on DeviceMesh.*, expected .*, the mesh of x"):
            gander.cross_entropy(logits, **given, **sum_)
    for w in weight.clone().requires_grad_(), replicated(weight).requires_grad_():
        with pytest.raises(NotImplementedError, match="weight requires a gradient, but cross_entropy"):
            gander.cross_entropy(logits, targets, weight=w)
        with torch.no_grad():
            gander.cross_entropy(logits, targets, weight=w)
    divided, (none, mean, total) = torch.ops.gander.cross_entropy, range(3)
    for divisor, reduction, error, message in (
        (torch.tensor(2.0), mean, ValueError, "divisor is given with reduction 'mean', expected 'sum'"),
        (torch.ones(4), total, ValueError, r"divisor has shape \(4,\)"),
        (torch.tensor(2.0).double(), none, TypeError, "divisor has dtype float64, expected float32"),
    ):
        with pytest.raises(error, match=message):
            divided(logits, targets, divisor=replicated(divisor), reduction=reduction)
    gander.set_debug(True)
    rows = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    bad = distribute_tensor(torch.tensor([0, 1, 2, 9]), mesh, [Shard(0), Replicate()])
    for sharded in rows, distribute_tensor(x, mesh, [Shard(0), Shard(1)]):
        with pytest.raises(IndexError, match="target has the class 9, expected 0 to 5"):
            gander.cross_entropy(sharded, bad, **sum_)
    gander.set_debug(False)


def test_dtensor_refusals():
    on_all(4, _dtensor_refusals)


# ---- Refusals ----


def _refusals():
    x, target, weight = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), torch.ones(6)
    refused(ValueError, r"target has shape \(3,\), expected \(4,\)", x, target[:3])
    refused(ValueError, r"target has shape \(1, 4\), expected \(4,\)", x, target[None])
    refused(TypeError, "target has dtype float32, expected int32 or int64", x, target.float())
    refused(TypeError, "x has dtype int64, expected float16", x.long(), target)
    refused(ValueError, "x has rank 0", x[0, 0], target[0])
    refused(RuntimeError, "target is on meta, expected cpu as x", x, target.to("meta"))
    refused(ValueError, r"weight has shape \(5,\), expected \(6,\)", x, target, weight=weight[:5])
    refused(ValueError, r"weight has shape \(6,\), expected \(0,\)", x[:, :0], target, weight=weight)
    refused(TypeError, "weight has dtype float64, expected float16", x, target, weight=weight.double())
    refused(TypeError, "x is a list, expected a torch.Tensor", [1.0], target)
    refused(TypeError, "weight is a list, expected a torch.Tensor", x, target, weight=[1.0])
    refused(
        NotImplementedError, "weight requires a gradient", x, target, weight=weight.clone().requires_grad_()
    )
    refused(ValueError, "reduction is 'avg', expected 'none', 'mean' or 'sum'", x, target, reduction="avg")
    refused(ValueError, "ignore_index is 9223372036854775808, expected", x, target, ignore_index=2**63)
    for value in "a", None, 1.5, True:
        message = f"ignore_index is {value!r}, expected an integer of 64 bits"
        refused(TypeError, re.escape(message), x, target, ignore_index=value)
    for value, kind in (None, "None"), ("a", "a str"), ([1.0], "a list"):
        refused(TypeError, f"x is {kind}, expected a torch.Tensor", value, target)
        refused(TypeError, f"target is {kind}, expected a torch.Tensor", x, value)
    for tensor, message in (
        (torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged), "is a nested tensor, expected"),
        (x.to_sparse(), "has layout sparse_coo, expected strided"),
        (x.to_sparse_csr(), "has layout sparse_csr, expected strided"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "is quantized to qint8, expected"),
    ):
        refused((NotImplementedError, TypeError), f"x {message}", tensor, target)
        refused((NotImplementedError, TypeError), f"target {message}", x, tensor)
        refused((NotImplementedError, TypeError), f"weight {message}", x, target, weight=tensor)
    expected = r"expected a torch\.distributed\.ProcessGroup of which this process is a member, or None"
    for group, kind in (-100, ValueError), (5, TypeError), ("0", TypeError), (dist, TypeError):
        refused(kind, f"group is {re.escape(repr(group))}, {expected}", x, target, group)
    numbers = "expected 2 integers, the number of classes of each rank of the group"
    for sizes, kind, message in (
        ("ab", TypeError, f"sizes is 'ab', {numbers}"),
        (6, TypeError, f"sizes is 6, {numbers}"),
        (torch.tensor([6, 6]), TypeError, rf"sizes is tensor\(\[6, 6\]\), {numbers}"),
        ((6, "b"), TypeError, rf"sizes is \(6, 'b'\), {numbers}; 'b' is none"),
        ((6, 6.0), TypeError, rf"sizes is \(6, 6\.0\), {numbers}; 6\.0 is none"),
        ((6, True), TypeError, rf"sizes is \(6, True\), {numbers}; True is none"),
        ((6,), ValueError, rf"sizes is \(6,\), {numbers}"),
        ((6, 6, 6), ValueError, rf"sizes is \(6, 6, 6\), {numbers}"),
        ((13, -1), ValueError, rf"sizes is \(13, -1\), {numbers}"),
        ((0, 0), ValueError, r"sizes is \(0, 0\), expected one class or more in all"),
    ):
        refused(kind, message, x, target, sizes=sizes)
    for classes in "a", 12.0, True, (6, 6):
        refused(
            TypeError,
            f"classes is {re.escape(repr(classes))}, expected an integer",
            x,
            target,
            classes=classes,
        )
    refused(ValueError, "classes is 0, expected 1 or more", x, target, classes=0)
    refused(
        ValueError, "sizes and classes are given, expected one of them", x, target, sizes=(6, 6), classes=12
    )
    for in_dims in (0, None), (None, 0), (0, 0):
        given = [
            each if dim is None else each.expand(2, *each.shape)
            for each, dim in zip((x, target), in_dims, strict=True)
        ]
        with (
            Collectives() as counted,
            pytest.raises(NotImplementedError, match=r"is batched by torch\.func\.vmap"),
        ):
            torch.func.vmap(gander.distributed.cross_entropy, in_dims)(*given)
        assert not counted.sent


def _differences():
    """With set_debug all ranks refuse what differs between them, and can go on."""
    rank = dist.get_rank()
    x, target, weight = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), torch.ones(6)
    k = 4 + rank
    gander.set_debug(True)
    try:
        refused(
            ValueError,
            r"rank 0 passes rows \(4,\) of torch.float32, .*, rank 1 passes rows \(5,\) of torch.float32, "
            r".*; expected the same rows",
            torch.randn(k, 6),
            torch.zeros(k, dtype=torch.int64),
            collectives=1,
        )
        for different in (
            (x.view(2, 2, 6), target.view(2, 2), {}),
            (x.half(), target, {}),
            (x.double(), target, {}),
            (x, target.int(), {}),
            (x, target, {"weight": weight}),
            (x, target, {"ignore_index": 0}),
            (x, target, {"reduction": "sum"}),
        ):
            *tensors, options = different if rank else (x, target, {})
            message = "expected the same rows, targets and options"
            refused(ValueError, message, *tensors, collectives=1, **options)
        for part, options, takes in (
            (
                x[:, : 6 - rank],
                {},
                r"\(6, 5\) .*: rank 0 takes \(6, 6\), rank 1 \(5, 5\); pass sizes=\(6, 5\)",
            ),
            (x, {"sizes": (6, 6 + rank)}, r"\(6, 6\) .*: rank 0 takes \(6, 6\), rank 1 \(6, 7\); pass"),
            (x, {"classes": 12 - rank}, r"\(6, 6\) .*: rank 0 takes \(6, 6\), rank 1 \(6, 5\); pass"),
            (
                x,
                {"sizes": (6, 7)},
                r"\(6, 6\) .*: rank 0 takes \(6, 7\), rank 1 \(6, 7\); pass sizes=\(6, 6\)",
            ),
        ):
            refused(ValueError, rf"x has {takes}", part, target, collectives=1, **options)
        refused(ValueError, "x has no classes on any rank", x[:, :0], target, collectives=1)
        refused(
            ValueError, "target of rank 1 is another than that of rank 0", x, target + rank, collectives=1
        )
        torch.manual_seed(0)  # the ranks have drawn different numbers
        with Collectives() as counted:
            check(torch.randn(4, 12), target, (6, 6))
            check(torch.randn(0, 12), target[:0], (6, 6))
        assert len(counted.sent) == 6  # two in each call, and one in check()
    finally:
        gander.set_debug(False)


@pytest.mark.parametrize("job", [_refusals, _differences])
def test_refusals(job):
    on_all(2, job)


DYING = """
import sys, datetime, torch, gander
import torch.distributed as dist
rank, x, target = int(sys.argv[1]), torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
timeout = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", None, timeout, 2, rank, dist.FileStore(sys.argv[2], 2))
gander.distributed.cross_entropy(x, target)
if rank == 1:
    import os
    os._exit(0)
try:
    gander.distributed.cross_entropy(x, target)
except RuntimeError as error:
    print(error)
    import os
    sys.stdout.flush()
    os._exit(0)
"""


def test_a_rank_that_dies(tmp_path):
    """The other one gets torch's own error."""
    command = sys.executable, "-c", DYING
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes) for rank in range(2)]
    watchdog = threading.Timer(TIMEOUT, lambda: [rank.kill() for rank in ranks])
    watchdog.start()
    try:
        outputs = [rank.communicate() for rank in ranks]
    finally:
        watchdog.cancel()
        for rank in ranks:
            rank.kill()
    report = "".join(f"--- rank {i}\n{out}{err}" for i, (out, err) in enumerate(outputs))
    assert [rank.returncode for rank in ranks] == [0, 0], report
    assert "gloo" in outputs[0][0], report


# ---- Whole models ----


def _sharded_rows():
    """The number of rows is not divisible by the number of ranks."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, weight, target = torch.randn(5, 3, 8), torch.rand(8), torch.randint(8, (5, 3))
    target[0, 1] = -100
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = torch.nn.functional.rms_norm(leaves[0], (8,), leaves[1], 1e-6).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, target.flatten(), reduction="sum").backward()
    for shard in Shard(0), Shard(1):
        a = distribute_tensor(x, mesh, [shard]).requires_grad_()
        b = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
        logits, targets = gander.rmsnorm(a, b), distribute_tensor(target, mesh, [shard])
        gander.cross_entropy(logits, targets, reduction="sum").backward()
        torch.testing.assert_close(a.grad.full_tensor(), leaves[0].grad)
        torch.testing.assert_close(b.grad.full_tensor(), leaves[1].grad)


def test_sharded_rows():
    on_all(2, _sharded_rows)


def _fully_sharded(loss_of_head):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(16, 16), loss_of_head(16, 33)

        def forward(self, x, target):
            return self.head(self.body(x).relu(), target)

    rank, ranks, mesh = (
        dist.get_rank(),
        dist.get_world_size(),
        init_device_mesh("cpu", (dist.get_world_size(),)),
    )
    model, linear = Model(), torch.nn.functional.linear
    whole = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    x, target = torch.randn(ranks, 10, 16), torch.randint(0, 33, (ranks, 10))
    for rows, labels in zip(x, target, strict=True):
        logits = linear(linear(rows, *whole[:2]).relu(), whole[2])
        (torch.nn.functional.cross_entropy(logits, labels) / ranks).backward()
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x[rank], target[rank]).backward()
    for sharded, plain in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)


class _CrossEntropy(gander.nn.LinearCrossEntropy):
    def forward(self, x, target):
        return super().forward(x, target, upstream=1.0)


class _LogProb(torch.nn.Linear):
    """The same mean, by the function that a module calls where its weight is whole."""

    def forward(self, x, target):
        return -gander.linear_token_statistics(x, self.weight, target, self.bias, chunk=3).log_prob.mean()


@pytest.mark.parametrize("head", [_CrossEntropy, _LogProb])
def test_a_fully_sharded_head(head):
    on_all(2, _fully_sharded, functools.partial(head, bias=False))
