"""gander.distributed.linear_token_statistics, and gander.linear_token_statistics of a DTensor weight whose
tokens are sharded, on the CPU with gloo: each job runs on all ranks of a pool of processes.

Statistics and gradients are compared with those of torch's formulas of whole rows in float64.
"""

import contextlib
import functools
import importlib
import re

import gander
import pytest
import torch
from gander._functions.token_statistics import STATISTICS
from ranks import Collectives, bounds, dist, in_one_graph, on_all, pools  # noqa: F401
from test_distributed_head import NEW_DTENSOR
from test_distributed_token_statistics import HEADS, NUMBERS, SIZES, every_rank_count, mesh_of
from test_linear_token_statistics import exact, weighted
from test_token_statistics import OPTIONS
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

K = 8
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 4e-2, "atol": 4e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}
PLAIN, SHARDED = gander.linear_token_statistics, gander.distributed.linear_token_statistics


# ---- What the jobs share ----


def example(sizes, leading=(3, 4), dtype=torch.float32):
    """hidden, weight and bias of all tokens, and indices of which the second is ignored. The same on all
    ranks."""
    torch.manual_seed(sum(sizes))
    hidden, weight, bias = (torch.randn(s) for s in ((*leading, K), (sum(sizes), K), (sum(sizes),)))
    index = torch.randint(sum(sizes), leading)
    if index.numel() > 1:
        index.view(-1)[1] = -100
    return hidden.to(dtype), (weight / 2).to(dtype), index, bias.to(dtype)


def leaf(tensor):
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def mine(tensor, sizes):
    """This rank's slice of a weight or a bias."""
    first, end = bounds(sizes)
    return tensor[first:end]


def leaves_of(hidden, weight, bias, sizes):
    return leaf(hidden), leaf(mine(weight, sizes)), None if bias is None else leaf(mine(bias, sizes))


def summed(tensor):
    """The sum over the ranks."""
    total = tensor.detach().double().clone()
    dist.all_reduce(total)
    return total


def close(got, want, dtype):
    """Of 16 bits the logits are rounded, which moves small elements as far as large ones."""
    got, want, tolerances = got.detach().double(), want.detach().double(), dict(TOLERANCES[dtype])
    if dtype.itemsize == 2 and want.numel():
        tolerances["atol"] *= max(1, float(want.nan_to_num().abs().max()))
    torch.testing.assert_close(got, want, equal_nan=True, **tolerances)


def check_gradients(leaves, whole, sizes, dtype, is_sum=False):
    """Compares with the gradients of whole operands. is_sum: that of hidden is already added up."""
    (hidden, weight, bias), (dx, dw, db) = leaves, whole
    close(hidden.grad if is_sum else summed(hidden.grad), dx, dtype)
    close(weight.grad, mine(dw, sizes), dtype)
    if bias is not None:
        close(bias.grad, mine(db, sizes), dtype)


def of_whole(hidden, weight, index, bias, outputs=HEADS, **given):
    """The statistics and the gradients of whole operands."""
    leaves = [None if t is None else leaf(t.double()) for t in (hidden, weight, bias)]
    found = exact(*leaves[:2], index, leaves[2], outputs=outputs, **given)
    if heads := [value for name, value in zip(outputs, found, strict=True) if name in HEADS]:
        weighted(heads).backward()
    return found, [None if each is None else each.grad for each in leaves]


def check(hidden, weight, index, bias, sizes, call=SHARDED, outputs=HEADS, **given):
    dtype, how = hidden.dtype, {n: given.pop(n) for n in ("chunk", "keep", "allreduce_dgrad") if n in given}
    reduces = how.get("allreduce_dgrad", False)
    leaves = leaves_of(hidden, weight, bias, sizes)
    with Collectives() as counted:
        found = call(*leaves[:2], index, leaves[2], sizes=sizes, outputs=outputs, **given, **how)
    size, numbers = (8 if dtype == torch.float64 else 4), NUMBERS[tuple(outputs)]
    assert counted.sent == [-(-index.numel() * numbers * size // 8) * 8 + 8]
    assert counted.sent[0] <= index.numel() * 8 * size + 8
    want, gradients = of_whole(hidden, weight, index, bias, outputs=outputs, **given)
    assert found._fields == outputs
    for name, value, other in zip(outputs, found, want, strict=True):
        if value.is_floating_point():
            assert value.dtype == torch.promote_types(dtype, torch.float32)
            close(value, other, dtype)
        else:
            assert torch.equal(value, other), name
    with torch.no_grad():
        again = call(*leaves[:2], index, leaves[2], sizes=sizes, outputs=outputs, **given, **how)
    for a, b in zip(again, found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    heads = [value for name, value in zip(outputs, found, strict=True) if name in HEADS]
    if heads:
        with CountedReductions() as reductions:
            weighted(heads).backward()
        assert reductions.count == reduces
        check_gradients(leaves, gradients, sizes, dtype, reduces)


class CountedReductions:
    """Counts the all-reduces. No other collective may run."""

    def __enter__(self):
        from torch.distributed.tensor.debug import CommDebugMode

        self._mode = CommDebugMode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)
        counts = {kind: n for kind, n in self._mode.get_comm_counts().items() if n}
        self.count = sum(counts.values())
        assert all("all_reduce" in str(kind) or "allreduce" in str(kind) for kind in counts), counts


# ---- Values ----


def _values(sizes, dtype):
    for leading in (3, 4), (7,), ():
        hidden, weight, index, bias = example(sizes, leading, dtype)
        mask = torch.rand(leading) > 0.3
        for given in OPTIONS.values() if leading == (3, 4) else [OPTIONS["all"]]:
            check(hidden, weight, index, bias, sizes, **given)
            check(hidden, weight, index.int(), None, sizes, row_mask=mask, **given)
    hidden, weight, index, bias = example(sizes, (11,), dtype)
    for keep in "nothing", "logits":
        for chunk in 1, 4, 100:
            for outputs in HEADS, *[(head,) for head in HEADS]:
                check(hidden, weight, index, bias, sizes, chunk=chunk, keep=keep, outputs=outputs)
        check(hidden, weight, index, bias, sizes, keep=keep, allreduce_dgrad=True)
    index[3] = 2
    check(hidden, weight, index.clamp(0), bias, sizes, ignore_index=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@every_rank_count
def test_values(ranks, dtype):
    on_all(ranks, _values, SIZES[ranks], dtype)


def _every_statistic(sizes):
    """In chunks, with options, and with the bytes that the outputs need."""
    for dtype in torch.float32, torch.float64:
        hidden, weight, index, bias = example(sizes, (12,), dtype)
        mask = torch.arange(12) % 3 != 0
        for outputs in NUMBERS:
            for given in {}, {"softcap": 5.0, "temperature": 0.7, "scale": 1.5, "row_mask": mask.int()}:
                check(hidden, weight, index, bias, sizes, outputs=outputs, chunk=5, **given)


@every_rank_count
def test_every_statistic(ranks):
    on_all(ranks, _every_statistic, SIZES[ranks])


def _slices(ranks):
    """Slices by sizes, by classes, and of one size; empty ones; a group of some ranks."""
    rank = dist.get_rank()
    for classes in 1, ranks, 2 * ranks + 1:
        chunks = [len(part) for part in torch.arange(classes).chunk(ranks)]
        sizes = (*chunks, *[0] * (ranks - len(chunks)))
        given = example(sizes)
        for keep in "nothing", "logits":
            check(*given, sizes, keep=keep, outputs=STATISTICS)
        by_classes = functools.partial(SHARDED, classes=classes)
        check(*given, sizes, call=lambda *a, sizes, f=by_classes, **o: f(*a, **o))
    check(*example((4,) * ranks), (4,) * ranks, call=lambda *a, sizes, **o: SHARDED(*a, **o))
    for empty in range(ranks):
        sizes = tuple(0 if at == empty else 5 + at for at in range(ranks))
        for more in {}, {"allreduce_dgrad": True}:
            check(*example(sizes), sizes, **more)
    group = dist.new_group([*range(1, ranks)])
    hidden, weight, index, _ = example((3,) * (ranks - 1))
    if rank:
        leaves = leaf(hidden), leaf(weight[3 * rank - 3 : 3 * rank])
        found = SHARDED(*leaves, index, group=group, allreduce_dgrad=True)
        want, (dx, dw, _) = of_whole(hidden, weight, index, None)
        weighted(found).backward()
        close(found[0], want[0], torch.float32)
        close(leaves[0].grad, dx, torch.float32)
        close(leaves[1].grad, dw[3 * rank - 3 : 3 * rank], torch.float32)
    else:
        refused(
            ValueError, "group is -100, expected a torch.distributed.Proc", hidden, weight, index, group=group
        )


def test_slices():
    on_all(3, _slices, 3)


def _rows_that_do_not_count(sizes):
    """Ignored rows, rows without elements, and an index that no slice has."""
    hidden, weight, index, bias = example(sizes, (6,))
    check(hidden, weight, torch.full_like(index, -100), bias, sizes)
    check(hidden[:0], weight, index[:0], bias, sizes)
    n = sum(sizes)
    for bad in -1, -2, -99, n, 2**31 - 1, -(2**63), 2**63 - 1:
        index[3] = bad
        for keep in "nothing", "logits":
            for names, is_nan in (("log_prob",), True), (("entropy",), False):
                leaves = leaves_of(hidden, weight, bias, sizes)
                found = SHARDED(*leaves[:2], index, leaves[2], sizes=sizes, outputs=names, keep=keep, chunk=2)
                assert found[0].isnan().tolist() == [is_nan and row == 3 for row in range(6)]
                found[0].sum().backward()
                rows = leaves[0].grad.isnan().all(1).tolist()
                has_tokens = sizes[dist.get_rank()] > 0
                assert rows == [is_nan and has_tokens and row == 3 for row in range(6)]
                assert not leaves[0].grad[1].any()
        mask = torch.arange(6) != 3
        leaves = leaves_of(hidden, weight, bias, sizes)
        found = SHARDED(*leaves[:2], index, leaves[2], sizes=sizes, row_mask=mask)
        weighted(found).backward()
        assert found.log_prob[3] == 0 and not leaves[0].grad[3].any() and leaves[1].grad.isfinite().all()
    gander.set_debug(True)
    try:
        index[3] = n
        message = f"index has the class {n}, expected 0 to {n - 1}, or ignore_index"
        given = hidden, mine(weight, sizes), index
        refused(IndexError, message, *given, sizes=sizes, collectives=1)  # of the texts
        with Collectives() as counted:
            SHARDED(*given[:2], index.clamp(0, n - 1), sizes=sizes, chunk=1)
        assert len(counted.sent) == 2
    finally:
        gander.set_debug(False)


@every_rank_count
def test_rows_that_do_not_count(ranks):
    on_all(ranks, _rows_that_do_not_count, SIZES[ranks])


# ---- Which gradients, how often, and memory ----


def _needs(sizes):
    """Gradients of some operands, of one result, and two backward passes."""
    hidden, weight, index, bias = example(sizes)
    _, gradients = of_whole(hidden, weight, index, bias)
    for keep in "nothing", "logits":
        for needed in range(3):
            leaves = leaves_of(hidden, weight, bias, sizes)
            for at, each in enumerate(leaves):
                each.requires_grad_(at == needed)
            found = SHARDED(*leaves[:2], index, leaves[2], sizes=sizes, keep=keep, allreduce_dgrad=True)
            with CountedReductions() as reductions:
                weighted(found).backward()
            assert reductions.count == (needed == 0)
            want = gradients[needed] if needed == 0 else mine(gradients[needed], sizes)
            close(leaves[needed].grad, want, torch.float32)
        leaves = leaves_of(hidden, weight, bias, sizes)
        loss = weighted(SHARDED(*leaves[:2], index, leaves[2], sizes=sizes, keep=keep, chunk=5))
        loss.backward(retain_graph=True)
        loss.backward()
        check_gradients(leaves, [2 * each for each in gradients], sizes, torch.float32)
        for name in HEADS:
            leaves = leaves_of(hidden, weight, bias, sizes)
            found = SHARDED(*leaves[:2], index, leaves[2], sizes=sizes, keep=keep)
            weighted([getattr(found, name)]).backward()
            alone = of_whole(hidden, weight, index, bias, outputs=(name,))[1]
            check_gradients(leaves, alone, sizes, torch.float32)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        found = SHARDED(*leaves[:2], index, leaves[2], sizes=sizes)
        torch.autograd.grad(found[0].sum(), leaves[1], create_graph=True)[0].sum().backward()


def test_needs():
    on_all(2, _needs, SIZES[2])


class Largest:
    """Records the elements of the largest new tensor."""

    def __enter__(self):
        self.elements = 0

        def new_empty(tensor, *arguments, **options):
            made = torch._C.TensorBase.new_empty(tensor, *arguments, **options)
            self.elements = max(self.elements, made.numel())
            return made

        torch.Tensor.new_empty = new_empty
        return self

    def __exit__(self, *error):
        del torch.Tensor.new_empty


def _memory():
    """A rank holds the logits of its tokens for one chunk of rows."""
    hidden, weight, index, _ = example((96, 96), (120,))
    for keep, in_forward, in_backward in ("nothing", 20 * 96, 120 * 64), ("logits", 120 * 96, 0):
        leaves = leaves_of(hidden, weight, None, (96, 96))
        with Largest() as largest:
            found = SHARDED(*leaves[:2], index, chunk=20, keep=keep)
        assert largest.elements == in_forward
        with Largest() as largest:  # columns of tiles begin at multiples of 64
            weighted(found).backward()
        assert largest.elements == in_backward
        with Largest() as largest, torch.no_grad():
            SHARDED(*leaves[:2], index, chunk=20, keep=keep)
        assert largest.elements == 20 * 96
        with Largest() as largest:  # nothing to differentiate
            SHARDED(*leaves[:2], index, chunk=20, keep=keep, outputs=("predicted",))
        assert largest.elements < 120 * 96 / 4


def test_memory():
    on_all(2, _memory)


def _casts(sizes):
    """Autocast, a weight of another dtype, and activation checkpoints."""
    hidden, weight, index, bias = example(sizes)
    _, gradients = of_whole(hidden, weight, index, bias)
    call = functools.partial(SHARDED, sizes=sizes)
    for enabled, to in (True, torch.float32), (False, torch.bfloat16):
        leaves = leaf(hidden.to(to)), leaf(mine(weight, sizes)), leaf(mine(bias, sizes))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = call(*leaves[:2], index, leaves[2])
        weighted(found).backward()
        assert leaves[0].grad.dtype == to and leaves[1].grad.dtype == leaves[2].grad.dtype == torch.float32
        assert found.log_prob.dtype == torch.float32
        for got, want in zip(leaves[1:], gradients[1:], strict=True):
            torch.testing.assert_close(got.grad.double(), mine(want, sizes), rtol=5e-2, atol=1e-1)
    for reentrant in False, True:
        leaves = leaves_of(hidden, weight, bias, sizes)
        found = checkpoint(call, *leaves[:2], index, leaves[2], use_reentrant=reentrant)
        weighted(found).backward()
        check_gradients(leaves, gradients, sizes, torch.float32)


def test_casts_and_checkpoints():
    on_all(2, _casts, SIZES[2])


def _sequences():
    """Sequences that are sharded are gathered before the call, and their gradients scattered after it."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    sizes, rank = (5, 12), dist.get_rank()
    hidden, weight, index, _ = example(sizes, (4, 3))
    part, head = leaf(hidden[2 * rank : 2 * rank + 2]), leaf(mine(weight, sizes))
    found = SHARDED(all_gather_tensor_autograd(part, 0, dist.group.WORLD), head, index, sizes=sizes)
    weighted(found).backward()
    want, (dx, dw, _) = of_whole(hidden, weight, index, None)
    close(found[1], want[1], torch.float32)
    close(part.grad, dx[2 * rank : 2 * rank + 2], torch.float32)
    close(head.grad, mine(dw, sizes), torch.float32)
    refused(ValueError, r"index has shape \(4, 3\), expected \(2, 3\)", part, head, index, sizes=sizes)


def test_sequences():
    on_all(2, _sequences)


def _verl():
    """What takes the place of verl's function, with sequences that Megatron gathers."""
    from gander.rl._verl import _of_head
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    hidden, weight, index, _ = example((9, 9), (4, 3))
    index[0, 1] = 17
    rank, group = dist.get_rank(), dist.group.WORLD
    part, head = leaf(hidden[2 * rank : 2 * rank + 2]), leaf(mine(weight, (9, 9)))
    rows = all_gather_tensor_autograd(part, 0, group)
    found = _of_head(None)(rows, head, index, 0.7, "none", group)
    want, (dx, dw, _) = of_whole(hidden, weight, index, None, temperature=0.7)
    weighted([value.view(4, 3) for value in found]).backward()
    for value, other in zip(found, want, strict=True):
        close(value, other.flatten(), torch.float32)
    close(part.grad, dx[2 * rank : 2 * rank + 2], torch.float32)
    close(head.grad, mine(dw, (9, 9)), torch.float32)
    index[0, 1] = -100  # which verl does not leave out
    assert _of_head(None)(rows, head, index, 0.7, "none", group)[0].isnan().nonzero().tolist() == [[1]]


def test_verl():
    on_all(2, _verl)


# ---- Refusals ----


def refused(kind, match, *arguments, collectives=0, **options):
    with Collectives() as counted, pytest.raises(kind, match=match):
        SHARDED(*arguments, **options)
    assert len(counted.sent) == collectives


def _refusals():
    hidden, weight, index, bias = example((6, 6))
    weight, bias = weight[:6], bias[:6]
    given = hidden, weight, index
    refused(ValueError, r"index has shape \(2, 4\), expected \(3, 4\)", hidden, weight, index[:2])
    refused(ValueError, r"row_mask has shape \(2, 4\), expected", *given, row_mask=index[:2])
    refused(ValueError, r"weight has shape \(6, 7\), expected \(V, 8\)", hidden, weight[:, 1:], index)
    refused(ValueError, r"bias has shape \(5,\), expected \(6,\)", *given, bias[1:])
    refused(TypeError, "index has dtype float32, expected int32 or int64", hidden, weight, index.float())
    refused(TypeError, "row_mask has dtype float32, expected", *given, row_mask=index.float())
    refused(TypeError, "hidden has dtype int64, expected float16", hidden.long(), weight, index)
    refused(TypeError, "weight has dtype float64, expected float32 as hidden", hidden, weight.double(), index)
    refused(RuntimeError, "weight is on meta, expected cpu as hidden", hidden, weight.to("meta"), index)
    for at, name in enumerate(("hidden", "weight", "index")):
        wrong = [*given]
        wrong[at] = [1.0]
        refused(TypeError, f"{name} is a list, expected a torch.Tensor", *wrong)
    refused(TypeError, "bias is a list, expected a torch.Tensor", *given, [1.0])
    refused(NotImplementedError, "hidden has layout sparse_coo", hidden.to_sparse(), weight, index)
    refused(ValueError, "keep is 'all', expected 'nothing' or 'logits'", *given, keep="all")
    refused(ValueError, "chunk is 0, expected a number of rows of 1 or more", *given, chunk=0)
    refused(TypeError, "allreduce_dgrad is 1, expected True or False", *given, allreduce_dgrad=1)
    refused(ValueError, "outputs is", *given, outputs=("loss",))
    refused(TypeError, "ignore_index is 1.5, expected", *given, ignore_index=1.5)
    for name, value in ("scale", 0), ("softcap", -1), ("temperature", float("nan")):
        for n in 6, 0:  # a rank without tokens refuses them too
            refused(ValueError, f"{name} is ", hidden, weight[:n], index, sizes=(6, 6), **{name: value})
    refused(TypeError, "group is 5, expected a torch.distributed.ProcessGroup", *given, group=5)
    refused(ValueError, r"sizes is \(6,\), expected 2 integers", *given, sizes=(6,))
    refused(ValueError, "sizes and classes are given, expected one", *given, sizes=(6, 6), classes=12)
    for transform in torch.func.vmap, lambda f: torch.func.grad(lambda i: f(i).log_prob.sum()):
        message = r"inside a transform of torch\.func.*call distributed\.linear_token_statistics outside"
        rows = hidden[:1] if transform is torch.func.vmap else hidden[0]
        with pytest.raises(NotImplementedError, match=message):
            transform(lambda h: SHARDED(h, weight, index[0]))(rows)
    leaves = leaf(hidden), leaf(weight)
    for name in STATISTICS[2:4]:
        found = SHARDED(*leaves, index, outputs=("log_prob", name))
        with pytest.raises(NotImplementedError, match=f"{name} of linear_token_statistics has no gradient"):
            found[1].sum().backward()
    found = SHARDED(*leaves, index, allreduce_dgrad=True)
    with pytest.raises(NotImplementedError, match="with allreduce_dgrad has no batched gradients"):
        torch.autograd.grad(found[0], leaves, torch.ones(2, 3, 4), is_grads_batched=True)


def test_refusals():
    on_all(2, _refusals)


def _disagreements(sizes):
    """Where ranks contradict each other no number is right on any of them, and none waits."""
    rank = dist.get_rank()
    hidden, weight, index, _ = example(sizes)
    head = mine(weight, sizes)
    for alone in (
        {"temperature": 2.0},
        {"batch_invariant": True},
        {"ignore_index": -7},
        {"allreduce_dgrad": True},
        {"row_mask": torch.ones(3, 4)[:, :].bool()},
        {"index": index.int()},
        {"bias": torch.zeros(len(head))},
        {"sizes": (sizes[0] + 1, *sizes[1:])},
        {"hidden": hidden[..., :7], "weight": head[:, :7]},
    ):
        given = {"hidden": hidden, "weight": head, "index": index, "sizes": sizes}
        if rank == len(sizes) - 1:
            given |= alone
        counts = index != given.get("ignore_index", -100)
        given["hidden"], given["weight"] = leaf(given["hidden"]), leaf(given["weight"])
        found = SHARDED(**given)
        for value in found:
            assert value[counts].isnan().all() and (value[~counts] == 0).all()
        if "allreduce_dgrad" not in alone:  # else one rank would wait for the others
            weighted(found).backward()
            if len(given["weight"]):
                assert given["hidden"].grad[counts].isnan().all()
            gander.set_debug(True)
            try:
                with pytest.raises(ValueError, match=r"rank 0 passes|weight has .* classes on the ranks"):
                    SHARDED(**given)
            finally:
                gander.set_debug(False)
    # Chunks and what is kept may differ.
    how = {"chunk": rank + 1, "keep": ("nothing", "logits")[rank % 2]}
    check(hidden, weight, index, None, sizes, **how)
    if rank:
        message = f"weight has {sizes[rank]} classes on rank {rank}, expected {sizes[rank] + 1}"
        wrong = (*sizes[:rank], sizes[rank] + 1, *sizes[rank + 1 :])
        refused(ValueError, message, hidden, head, index, sizes=wrong, collectives=1)
    else:
        assert SHARDED(hidden, head, index, sizes=sizes).log_prob[index >= 0].isnan().all()


@every_rank_count
def test_disagreements(ranks):
    on_all(ranks, _disagreements, SIZES[ranks])


# ---- In graphs ----


def _compiled(sizes, backend):
    """One all-gather in one graph."""
    hidden, weight, index, bias = example(sizes)
    mask = torch.arange(12).view(3, 4) % 5 != 0
    variants = (
        {},
        {"chunk": 5, "keep": "logits", "allreduce_dgrad": True, "softcap": 5.0, "row_mask": mask},
        {"temperature": 0.7, "scale": 2.0, "batch_invariant": True, "outputs": STATISTICS},
        {"outputs": ("predicted",)},
    )
    for given in variants[1:2] if backend == "inductor" or 0 in sizes else variants:

        def call(hidden, weight, index, bias, given=given):
            return SHARDED(hidden * 2, weight, index, bias, sizes=sizes, **given)

        compiled, counter = in_one_graph(call, backend)
        results = []
        for run in compiled, call:
            leaves = leaves_of(hidden, weight, bias, sizes)
            found = run(*leaves[:2], index, leaves[2])
            heads = [getattr(found, name) for name in HEADS if name in found._fields]
            if heads:
                weighted(heads).backward()
            results.append((*(value.detach() for value in found), *(each.grad for each in leaves)))
        torch.testing.assert_close(*[[value for value in each if value is not None] for each in results])
        assert counter.frame_count == 1
        with torch.no_grad():
            torch.testing.assert_close(
                [*compiled(*leaves[:2], index, leaves[2])], [*results[1][: len(found)]], equal_nan=True
            )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend):
    on_all(2, _compiled, SIZES[2], backend)


def test_compiled_with_an_empty_slice():
    on_all(3, _compiled, SIZES[3], "aot_eager")


def _compiled_with_others():
    """Dynamic shapes, activation checkpoints, and results that have no gradient."""
    sizes = SIZES[2]

    def loss(hidden, weight, index, classes=None):
        found = SHARDED(hidden.sin(), weight, index, classes=classes, temperature=0.7)
        return (found.log_prob - found.entropy).sum()

    compiled, counter = in_one_graph(loss, "aot_eager", dynamic=True)
    for rows, n in (3, 6), (7, 9), (10, 12):
        hidden, weight, index, _ = example((n, n - 1), (rows,))
        pairs = [leaves_of(hidden, weight, None, (n, n - 1))[:2] for _ in range(2)]
        got, want = (f(*pair, index, 2 * n - 1) for f, pair in zip((compiled, loss), pairs, strict=True))
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(value, pair) for value, pair in zip((got, want), pairs, strict=True)]
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 1

    hidden, weight, index, _ = example(sizes)

    def with_checkpoint(hidden, weight):
        return checkpoint(
            lambda h, w: SHARDED(h.sin(), w, index, sizes=sizes).entropy.sum(),
            hidden,
            weight,
            use_reentrant=False,
        )

    compiled, _ = in_one_graph(with_checkpoint, "aot_eager")
    pairs = [leaves_of(hidden, weight, None, sizes)[:2] for _ in range(2)]
    got, want = compiled(*pairs[0]), with_checkpoint(*pairs[1])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, pairs[0]), torch.autograd.grad(want, pairs[1]))

    for outputs in ("entropy", "mean_logit"), ("mean_logit",):

        def of_mean(hidden, weight, outputs=outputs):
            return SHARDED(hidden.sin(), weight, index, sizes=sizes, outputs=outputs).mean_logit.sum()

        leaves = leaves_of(hidden, weight, None, sizes)[:2]
        in_one_graph(of_mean, "aot_eager")[0](*leaves).backward()
        assert leaves[0].grad[index >= 0].isnan().all() and not leaves[0].grad[index < 0].any()
        assert leaves[1].grad.isnan().all()
    want, got = (leaves_of(hidden, weight, None, sizes)[:2] for _ in range(2))
    for leaves in want, got:
        found = SHARDED(*leaves, index, sizes=sizes, allreduce_dgrad=True)
        autograd = compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True))
        with autograd if leaves is got else contextlib.nullcontext():
            (found.log_prob.sum() + found.entropy.sum()).backward()
    torch.testing.assert_close([leaf.grad for leaf in got], [leaf.grad for leaf in want])

    batched = torch.func.vmap(lambda h: SHARDED(h, mine(weight, sizes), index[0], sizes=sizes)[0])
    with pytest.raises(Unsupported, match="inside a transform of torch"):
        in_one_graph(batched, "aot_eager")[0](hidden[:1])


def test_compiled_with_others():
    on_all(2, _compiled_with_others)


def _operators(sizes):
    importlib.import_module("gander._torch.sharded_linear_token_statistics")  # registers the operators
    from torch.library import opcheck

    operators, group = torch.ops.gander, dist.group.WORLD.group_name
    hidden, weight, index, bias = example(sizes, (6,))
    # opcheck takes NaN for a difference: that of a row that is left out, or whose index is in no slice.
    index = index.clamp(0) % sizes[0] + sum(sizes[: dist.get_rank()])
    given = hidden, mine(weight, sizes), index, mine(bias, sizes), None
    asked = [name in HEADS for name in STATISTICS]
    for keeps in False, True:
        options = False, 4, keeps, [*sizes], -100, group, *asked, 1.5, 3.0, 2.0, False
        opcheck(operators.linear_token_statistics_part.default, (*given, *options))
        sent, logits = operators.linear_token_statistics_part(*given, *options)
        assert logits.shape == ((6, 5) if keeps else (0,))
        every = torch.cat([sent] * len(sizes))
        leaves = leaf(given[0]), leaf(given[1]), index, leaf(given[3]), None
        opcheck(operators.linear_token_statistics_of_parts.default, (*leaves, logits, every, *options))


def test_operators():
    on_all(2, _operators, (5, 5))


# ---- DTensors ----


def placed(tensor, *placements, shape=None):
    """A leaf that is a DTensor."""
    from torch.distributed.tensor import distribute_tensor

    made = distribute_tensor(tensor.detach(), mesh_of(shape or (dist.get_world_size(),)), placements)
    return made.requires_grad_(tensor.is_floating_point())


def of_mesh(hidden, weight, bias=None):
    from torch.distributed.tensor import Replicate, Shard

    bias = None if bias is None else placed(bias, Shard(0))
    return placed(hidden, Replicate()), placed(weight, Shard(0)), bias


def _dtensors(tokens, backend):
    from torch.distributed.tensor import Partial, Replicate, Shard

    hidden, weight, index, bias = example((tokens,))
    mask = torch.arange(12).view(3, 4) % 5 != 0
    indices, masks = placed(index, Replicate()), placed(mask, Replicate())
    for rows in (index, mask), (indices, masks):
        for own in None, bias:
            for how in {}, {"keep": "logits", "chunk": 5, "temperature": 0.7, "scale": 2.0, "softcap": 9.0}:

                def call(hidden, weight, bias, how=how, rows=rows, outputs=STATISTICS):
                    return PLAIN(hidden, weight, rows[0], bias, row_mask=rows[1], outputs=outputs, **how)

                leaves = of_mesh(hidden, weight, own)
                maps = {name: value for name, value in how.items() if name not in ("keep", "chunk")}
                given = {"row_mask": mask, "outputs": STATISTICS, **maps}
                want, gradients = of_whole(hidden, weight, index, own, **given)
                if backend:
                    run, counter = in_one_graph(functools.partial(call, outputs=HEADS), backend)
                    found = run(*leaves)
                    assert counter.frame_count == 1
                else:
                    with Collectives() as counted:
                        found = call(*leaves)
                    assert len(counted.sent) == 1
                    with torch.inference_mode():
                        again = call(*leaves)
                    for one, other in zip(again, found, strict=True):
                        torch.testing.assert_close(one.to_local(), other.to_local(), equal_nan=True)
                for name, value, other in zip(found._fields, found, want, strict=False):
                    assert value.placements == (Replicate(),) and value.shape == index.shape
                    if name in STATISTICS[:4]:
                        close(value.to_local(), other, torch.float32)
                    else:
                        assert torch.equal(value.to_local(), other)
                with CountedReductions() as reductions:
                    weighted([value.to_local() for value in found[:2]]).backward()
                assert reductions.count == 0
                for each, gradient, place in zip(
                    leaves, gradients, (Partial(), Shard(0), Shard(0)), strict=True
                ):
                    if each is not None:
                        assert each.grad.placements == (place,) and each.grad.shape == each.shape
                        close(each.grad.full_tensor(), gradient, torch.float32)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dtensors(ranks):
    for tokens in 12, 7, 2:  # of 3 ranks the last has none of 2
        on_all(ranks, _dtensors, tokens, None)


@pytest.mark.skipif(not NEW_DTENSOR, reason="DTensors of torch 2.10 cut the graph of a gradient")
def test_compiled_dtensors():
    on_all(2, _dtensors, 7, "aot_eager")


def _sequences_of_dtensors():
    """The gradient of hidden, a partial sum, is reduced once: where the hidden states were made."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    hidden, weight, index, _ = example((9,), (4, 3))
    _, (dx, dw, _) = of_whole(hidden, weight, index, None)
    functional = torch.ops.c10d_functional
    for place, kind in (Shard(0), functional.reduce_scatter_tensor), (Replicate(), functional.all_reduce):
        rows, head = placed(hidden, place), placed(weight, Shard(0))
        local = leaf(rows.to_local())
        made = type(rows).from_local(local, rows.device_mesh, [place], run_check=False)
        found = PLAIN(made.redistribute(placements=[Replicate()]), head, index)
        with CommDebugMode() as counted:
            weighted([value.to_local() for value in found]).backward()
        assert {name: n for name, n in counted.get_comm_counts().items() if n} == {kind: 1}
        first = 2 * dist.get_rank()
        close(local.grad, dx[first : first + 2] if place == Shard(0) else dx, torch.float32)
        close(head.grad.full_tensor(), dw, torch.float32)


def test_sequences_of_dtensors():
    on_all(2, _sequences_of_dtensors)


def _dtensor_refusals():
    from torch.distributed.tensor import Replicate, Shard

    hidden, weight, index, bias = example((8,))
    rows, head, own = of_mesh(hidden, weight, bias)
    whole = re.escape("expected (Replicate(),) with a weight whose classes are sharded; redistribute it")
    from_local = r"pass DTensor\.from_local\({}, mesh, \[{}\(.*\)\]\), or weight\.full_tensor\(\) if FSDP2"
    grid = placed(weight, Replicate(), Shard(0), shape=(1, 2))
    error = NotImplementedError
    for kind, message, *given in (
        (error, rf"hidden has placements \(Shard.*{whole}", placed(hidden, Shard(1)), head, index),
        (error, "weight has placements .*dim=1.*dim=0", rows, placed(weight, Shard(1)), index),
        (error, rf"index has placements .*{whole}", rows, head, placed(index, Shard(0))),
        (error, "weight is on DeviceMesh.*, expected a mesh of one dimension", rows, grid, index),
        (TypeError, "hidden is a plain.*" + from_local.format("hidden", "Replicate"), hidden, head, index),
        (TypeError, "bias is a plain.*" + from_local.format("bias", "Shard"), rows, head, index, bias),
        (TypeError, "hidden is a DTensor, expected a plain tensor as weight is", rows, weight, index),
        (TypeError, "bias is a DTensor, expected a plain tensor as weight is", hidden, weight, index, own),
        (ValueError, r"index has shape \(2, 4\), expected \(3, 4\)", rows, head, index[:2]),
    ):
        with Collectives() as counted, pytest.raises(kind, match=message):
            PLAIN(*given)
        assert not counted.sent
    with pytest.raises(NotImplementedError, match=r"weight is a DTensor inside a transform of torch\.func"):
        torch.func.vmap(lambda index: PLAIN(rows, head, index))(index[None])
    with pytest.raises(TypeError, match=r"weight is a DTensor, expected this rank's slice; pass weight\.to"):
        SHARDED(hidden, head, index)
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="index has the class 9, expected 0 to 7"):
            PLAIN(rows, head, index.clamp(9, 9))
        PLAIN(rows, head, index)
    finally:
        gander.set_debug(False)


def test_dtensor_refusals():
    on_all(2, _dtensor_refusals)
