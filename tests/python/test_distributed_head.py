"""linear_cross_entropy of a DTensor weight whose classes are sharded, on the CPU with gloo: each job runs on
all ranks of a pool of processes. Loss and gradients are compared with those of torch in float64."""

import re

import gander
import losses
import pytest
import torch
from ranks import Collectives, dist, on_all, pools  # noqa: F401
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

K = 8
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 4e-2, "atol": 4e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}
OPTIONS = (
    {},
    {"softcap": 5.0},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.2, "z_loss": 0.1, "scale": 1.5, "softcap": 30.0, "temperature": 2.0},
    {"z_loss": 0.1, "scale": 2.0, "softcap": 9.0, "temperature": 1.5},
)

# DTensors of torch 2.10 cut the graph of a gradient, and torch's Linear refuses sharded sequences of them.
NEW_DTENSOR = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def distributed(tensor, *placements, mesh=None):
    """A leaf that is a DTensor."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    leaf = distribute_tensor(tensor.detach(), mesh, placements)
    return leaf.requires_grad_(tensor.is_floating_point())


def placements():
    from torch.distributed.tensor import Replicate, Shard

    return Replicate(), Shard(0)


def example(classes, leading=(3, 4), dtype=torch.float32):
    """Hidden states, weight, targets of which the second is ignored, bias and class weights. The same on all
    ranks."""
    torch.manual_seed(classes)  # a broadcast draws random numbers on some ranks
    x, weight, bias = (torch.randn(shape) for shape in ((*leading, K), (classes, K), (classes,)))
    target, weight_ce = torch.randint(classes, leading), torch.rand(classes) + 0.5
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return x.to(dtype), weight.to(dtype), target, bias.to(dtype), weight_ce.to(dtype)


def sharded(x, weight, bias=None):
    replicate, shard = placements()
    bias = None if bias is None else distributed(bias, shard)
    return distributed(x, replicate), distributed(weight, shard), bias


def expected(x, weight, target, bias, weight_ce, upstream, divisor=1, **options):
    """Loss and gradients of the whole row, in float64."""
    leaves = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    leaves = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    logits = linear(*leaves).reshape(-1, len(weight))
    weight_ce = None if weight_ce is None else weight_ce.double()
    loss = losses.cross_entropy(logits, target.reshape(-1).long(), weight_ce, **options) / divisor
    loss = loss.view(upstream.shape)
    loss.backward(upstream.double())
    return loss.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want, equal_nan=True, **TOLERANCES[dtype])


def check(x, weight, target, bias=None, weight_ce=None, backwards=1, factor=1.0, **options):
    """Compares a call, and the gradients of a backward pass or more."""
    from torch.distributed.tensor import Partial

    replicate, shard = placements()
    leaves = sharded(x, weight, bias)
    rows, chunk = target.numel(), options.get("chunk") or max(1, -(-target.numel() // 4))
    with Collectives() as counted:
        loss = gander.linear_cross_entropy(*leaves[:2], target, leaves[2], weight_ce, **options)
    dtype, size = x.dtype, loss.element_size()
    lengths = [min(chunk, rows - first) for first in range(0, rows, chunk)]
    numbers = 4 if options.get("label_smoothing") else 3
    assert counted.sent == [-(-numbers * length * size // 8) * 8 + 8 for length in lengths]
    assert loss.placements == (replicate,)
    upstream = (torch.rand(loss.shape, dtype=torch.float64) + 0.5) * factor
    upstream = distributed(upstream.to(loss.dtype), replicate).detach()
    given = {
        name: value for name, value in options.items() if name not in ("chunk", "accumulate", "upstream")
    }
    want, gradients = expected(x, weight, target, bias, weight_ce, upstream.to_local(), **given)
    close(loss.to_local(), want, dtype)
    with Collectives() as counted:
        for _ in range(backwards):
            loss.backward(upstream, retain_graph=backwards > 1)
    assert counted.sent == []  # and no other collective
    for leaf, gradient, place in zip(leaves, gradients, (Partial(), shard, shard), strict=True):
        if leaf is not None:
            assert leaf.grad.placements == (place,) and leaf.grad.shape == leaf.shape
            close(leaf.grad.full_tensor(), gradient * backwards, dtype)
    for without in torch.no_grad, torch.inference_mode:
        with without():
            again = gander.linear_cross_entropy(*leaves[:2], target, leaves[2], weight_ce, **options)
        torch.testing.assert_close(again.to_local(), loss.to_local(), rtol=0, atol=0, equal_nan=True)


def _values(classes, dtype):
    for leading in (3, 4), (7,), ():
        x, weight, target, bias, weight_ce = example(classes, leading, dtype)
        for reduction in "mean", "sum", "none":
            for options in OPTIONS:
                check(x, weight, target, bias, reduction=reduction, **options)
            check(x, weight, target, weight_ce=weight_ce, reduction=reduction, temperature=2.0)
    for chunk in 1, 3, 100:
        check(x[None], weight, target[None], bias, chunk=chunk, accumulate="float32")
    check(x, weight, target.int(), reduction="sum", divisor=7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_values(ranks, dtype):
    for classes in 12, 7, 2:  # of 3 ranks the last has none of 2
        on_all(ranks, _values, classes, dtype)


def _rows_that_do_not_count():
    x, weight, target, bias, weight_ce = example(7)
    weight_ce[target[0, 0]] = 0
    for reduction in "mean", "sum", "none":
        check(x, weight, target, bias, weight_ce, reduction=reduction)
        check(x, weight, target.clamp(0), bias, reduction=reduction, ignore_index=int(target[2, 2]))
        check(x, weight, torch.full_like(target, -100), bias, weight_ce, reduction=reduction)
        leaves = sharded(x[:0], weight)
        loss = gander.linear_cross_entropy(*leaves[:2], target[:0], reduction=reduction)
        loss.backward(torch.ones_like(loss))
        if reduction == "mean":
            assert loss.to_local().isnan()
        assert not leaves[1].grad.to_local().any() and leaves[0].grad.shape == (0, 4, K)
    target[2, 3] = 7  # no class
    leaves = sharded(x, weight)
    loss = gander.linear_cross_entropy(*leaves[:2], target, reduction="none")
    assert loss.to_local().isnan().nonzero().tolist() == [[2, 3]] and loss.to_local()[0, 1] == 0
    loss.backward(torch.ones_like(loss))
    rows = leaves[0].grad.to_local().isnan()
    assert rows[2, 3].all() and rows.sum() == K
    assert gander.linear_cross_entropy(*leaves[:2], target).to_local().isnan()


def test_rows_that_do_not_count():
    on_all(2, _rows_that_do_not_count)


def _upstream():
    """Gradients that forward makes for another upstream gradient than comes, and second backward passes."""
    for dtype in torch.float16, torch.bfloat16, torch.float32:
        x, weight, target, bias, _ = example(7, dtype=dtype)
        for upstream in None, 1.0, 0.5, torch.tensor(2.0):
            for backwards in 1, 2:
                given = {"upstream": upstream, "backwards": backwards, "chunk": 5}
                check(x, weight, target, bias, reduction="sum", factor=0.25, **given)
    x, weight, target, _, _ = example(7)
    replicate, _ = placements()
    given = {name: distributed(torch.tensor(2.0), replicate).detach() for name in ("divisor", "upstream")}
    leaves = sharded(x, weight)
    targets = distributed(target, replicate)
    loss = gander.linear_cross_entropy(*leaves[:2], targets, reduction="sum", **given)
    (loss * 2).backward()
    want, (dx, dw, _) = expected(x, weight, target, None, None, torch.tensor(2.0), 2, reduction="sum")
    close(loss.to_local(), want, torch.float32)
    close(leaves[0].grad.full_tensor(), dx, torch.float32)
    close(leaves[1].grad.full_tensor(), dw, torch.float32)
    if NEW_DTENSOR:
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            loss = gander.linear_cross_entropy(*leaves[:2], target)
            torch.autograd.grad(loss, leaves[1], create_graph=True)[0].to_local().sum().backward()
    # Which gradients are needed.
    for frozen in range(2):
        x_, w_, _ = sharded(x, weight)
        (x_, w_)[frozen].requires_grad_(False)
        gander.linear_cross_entropy(x_, w_, target, reduction="sum", divisor=2).backward()
        assert (x_, w_)[frozen].grad is None
        close((w_, x_)[frozen].grad.full_tensor() * 2, (dw, dx)[frozen], torch.float32)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of the largest result."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def _memory():
    """A rank holds the logits of its classes for one chunk of rows."""
    x, weight, target, _, _ = example(60, (100,))
    leaves = sharded(x, weight)
    for options in {"upstream": 1.0}, {"reduction": "none"}:
        with Largest() as largest:
            loss = gander.linear_cross_entropy(*leaves[:2], target, chunk=25, **options)
            loss.sum().backward()
        assert largest.elements == max(25 * 30, x.numel())


def test_memory():
    on_all(2, _memory)


def test_upstream():
    on_all(2, _upstream)


def _checkpoints():
    x, weight, target, _, _ = example(7)
    _, (dx, dw, _) = expected(x, weight, target, None, None, torch.tensor(1.0))
    for reentrant in False, True:
        leaves = sharded(x, weight)
        loss = checkpoint(gander.linear_cross_entropy, *leaves[:2], target, use_reentrant=reentrant)
        loss.backward()
        close(leaves[0].grad.full_tensor(), dx, torch.float32)
        close(leaves[1].grad.full_tensor(), dw, torch.float32)
    leaves = sharded(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = gander.linear_cross_entropy(*leaves[:2], target)
    loss.backward()
    assert leaves[0].grad.dtype == leaves[1].grad.dtype == torch.float32
    close(leaves[1].grad.full_tensor(), dw, torch.bfloat16)


def test_checkpoints_and_autocast():
    on_all(2, _checkpoints)


# ---- Modules ----


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = torch.nn.Linear(K, K), gander.nn.LinearCrossEntropy(K, 7, **options)

    def forward(self, x, target):
        return self.head(self.body(x).relu(), target=target)


def _parallelized():
    """torch's ColwiseParallel divides the head. The gradient of hidden, a partial sum, is reduced once:
    where the hidden states were made, by an all-reduce, or for sharded sequences a reduce-scatter."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, _, target, _, weight_ce = example(7, (2, 4))
    for sequences in (False, True) if NEW_DTENSOR else (False,):
        for local in True, False:
            for options in {"bias": True}, {"weight_ce": weight_ce.clone(), "reduction": "sum"}:
                whole, model = Model(**options).double(), Model(**options)
                want = whole(x.double(), target)
                want.backward()
                head = ColwiseParallel(
                    input_layouts=Shard(1) if sequences else Replicate(),
                    output_layouts=Replicate(),
                    use_local_output=local,
                )
                plan = {"head": head} | ({"body": SequenceParallel()} if sequences else {})
                model = parallelize_module(model, mesh, plan)
                given = distribute_tensor(x, mesh, [Shard(1)]) if sequences else x
                loss = model(given, target)
                assert (type(loss) is torch.Tensor) == local
                close(loss.detach() if local else loss.to_local(), want.detach(), torch.float32)
                with CommDebugMode() as counted:
                    loss.backward()
                functional = torch.ops.c10d_functional
                kind = functional.reduce_scatter_tensor if sequences else functional.all_reduce
                assert {k: n for k, n in counted.get_comm_counts().items() if n} == {kind: 1}
                for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                    gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
                    close(gradient, theirs.grad, torch.float32)


def test_parallelized_modules():
    on_all(2, _parallelized)


# ---- Refusals ----


def refused(kind, message, *arguments, collectives=0, **options):
    with Collectives() as counted, pytest.raises(kind, match=message):
        gander.linear_cross_entropy(*arguments, **options)
    assert len(counted.sent) == collectives


def _refusals():
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, init_device_mesh

    replicate, shard = placements()
    x, weight, target, bias, weight_ce = example(8)
    a, b, _ = sharded(x, weight, bias)
    error = NotImplementedError
    grid, reverse = init_device_mesh("cpu", (1, 2)), DeviceMesh("cpu", [1, 0])
    expected = re.escape("expected (Replicate(),) with a weight whose classes are sharded; redistribute it")
    for dtensor in distributed(x, Shard(0)), distributed(x, Shard(1)), distributed(x, Shard(2)):
        refused(error, rf"x has placements \(Shard\(dim=\d\),\), {expected}", dtensor, b, target)
    refused(
        error, r"x has placements \(Partial", DTensor.from_local(x, b.device_mesh, [Partial()]), b, target
    )
    for other in Shard(1), Replicate():
        refused(
            error,
            r"weight has placements .*, expected \(Shard\(dim=0\),\)",
            a,
            distributed(weight, other),
            target,
        )
    refused(error, "bias has placements .*, expected .Shard", a, b, target, distributed(bias, replicate))
    refused(error, f"target has placements .*, {expected}", a, b, distributed(target, shard))
    refused(
        error,
        f"weight_ce has placements .*, {expected}",
        a,
        b,
        target,
        None,
        distributed(weight_ce, shard).detach(),
    )
    refused(error, "weight is a DTensor with outputs", a, b, target, outputs=("loss", "lse"))
    on_grid = distributed(weight, replicate, shard, mesh=grid)
    refused(error, "weight is on DeviceMesh.*expected a mesh of one dimension", a, on_grid, target)
    moved = distributed(x, replicate, mesh=reverse)
    refused(ValueError, "x is on DeviceMesh.*, expected .*, the mesh of weight", moved, b, target)
    message = (
        r"x is a plain tensor, expected a DTensor .*; pass DTensor\.from_local\(x, mesh, \[Replicate\(\)\]\)"
    )
    refused(TypeError, message, x, b, target)
    message = r"bias is a plain tensor, expected a DTensor .*\(bias, mesh, \[Shard\(0\)\]\)"
    refused(TypeError, message, a, b, target, bias)
    refused(TypeError, "x is a DTensor, expected a plain tensor as weight is", a, weight, target)
    for name in "label_smoothing", "z_loss":
        message = f"{name} is 0.1 with weight_ce and classes of which each rank has a slice, expected 0"
        refused(error, message, a, b, target, None, weight_ce, reduction="sum", **{name: 0.1})
    refused(ValueError, "softcap is -1", a, b, target, softcap=-1)
    refused(ValueError, r"target has shape \(2, 4\), expected \(3, 4\)", a, b, target[:2])
    refused(TypeError, "target has dtype float32, expected int32 or int64", a, b, target.float())
    refused(ValueError, r"weight_ce has shape \(5,\), expected \(8,\)", a, b, target, None, weight_ce[:5])
    refused(error, "weight_ce requires a gradient", a, b, target, None, weight_ce.clone().requires_grad_())
    refused(
        TypeError,
        "weight has dtype float64, expected float32 as x",
        a,
        distributed(weight.double(), shard),
        target,
    )
    with pytest.raises(NotImplementedError, match=r"weight is a DTensor inside a transform of torch\.func"):
        torch.func.vmap(lambda target: gander.linear_cross_entropy(a, b, target))(target[None])
    with pytest.raises(NotImplementedError, match="input has placements"):
        head = gander.nn.LinearCrossEntropy(K, 8)
        head.weight = torch.nn.Parameter(b)
        head(distributed(x, Shard(0)), target)
    loss = gander.linear_cross_entropy(a, b, target, reduction="none").to_local()
    with pytest.raises(NotImplementedError, match="has no batched gradients"):
        torch.autograd.grad(loss, b, torch.ones(2, 3, 4), is_grads_batched=True)
    gander.set_debug(True)
    try:
        refused(IndexError, "target has the class 9, expected 0 to 7", a, b, target.clamp(9, 9))
        loss = gander.linear_cross_entropy(a, b, target, chunk=6).to_local()
        torch.testing.assert_close(loss, gander.linear_cross_entropy(x, weight, target))
    finally:
        gander.set_debug(False)


def test_refusals():
    on_all(2, _refusals)


def _contradictions():
    """No rank waits for one that knows something else."""
    from torch.distributed.tensor import DTensor, init_device_mesh

    _, shard = placements()
    x, weight, target, _, _ = example(8)
    a, b, _ = sharded(x, weight)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    odd = b.to_local().detach()[: 4 - rank]  # rank 1 has a class less than all expect
    odd = DTensor.from_local(odd, mesh, [shard], shape=weight.shape, stride=weight.stride(), run_check=False)
    if rank:
        refused(ValueError, "weight has 3 classes on rank 1, expected 4", a, odd, target, collectives=4)
    else:
        with Collectives() as counted:
            assert gander.linear_cross_entropy(a, odd, target).to_local().isnan()
        assert len(counted.sent) == 4
    for alone in (
        {"temperature": 2.0},
        {"reduction": "sum"},
        {"ignore_index": 9},
        {"weight_ce": torch.ones(8)},
    ):
        given = alone if rank else {}
        a.grad = b.grad = None
        with Collectives() as counted:
            loss = gander.linear_cross_entropy(a, b, target.clamp(0), **given)
        assert len(counted.sent) == 4 and loss.to_local().isnan()
        loss.backward()
        assert a.grad.to_local().isnan().all() and b.grad.to_local().isnan().all()
    close(
        gander.linear_cross_entropy(a, b, target).to_local().detach(),
        gander.linear_cross_entropy(x, weight, target).double(),
        torch.float32,
    )


def test_contradictions():
    on_all(2, _contradictions)


def _compiled(classes, backend):
    """One all-gather in one graph."""
    x, weight, target, bias, weight_ce = example(classes)
    variants = [
        (weight_ce, {}),
        (None, {"chunk": 5, "reduction": "none", "label_smoothing": 0.1}),
        (weight_ce, {"reduction": "sum", "divisor": 3.0, "upstream": 0.5, "softcap": 5.0}),
        (None, {}),
        (None, {"reduction": "sum", "divisor": 3.0, "upstream": 0.5, "softcap": 5.0}),
    ]
    # Options do not change what a graph consists of. A variant takes aot_eager and Inductor 20 s and more.
    for w, options in variants[: {"eager": 5, "aot_eager": 3, "inductor": 2}[backend]]:

        def loss(x, weight, bias, target, w=w, options=options):
            return gander.linear_cross_entropy(x * 2, weight, target, bias, w, **options)

        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(loss, backend=counter, fullgraph=True)
        results = []
        for call in compiled, loss:
            leaves = sharded(x, weight, bias)
            value = call(*leaves, target)
            value.sum().backward()
            results.append((value.to_local().detach(), *(leaf.grad.full_tensor() for leaf in leaves)))
        torch.testing.assert_close(*results)
        assert counter.frame_count == 1
        if not options or backend == "eager":
            with torch.no_grad():
                torch.testing.assert_close(compiled(*leaves, target).to_local(), results[0][0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend):
    on_all(2, _compiled, 7, backend)


def _operators():
    from torch.library import opcheck

    x, weight, target, bias, _ = example(8, (10,))
    sharded_leaves, operators = sharded(x, weight, bias), torch.ops.gander
    gander.linear_cross_entropy(*sharded_leaves[:2], target)  # registers the operators
    _, w, b = (leaf.to_local().detach() for leaf in sharded_leaves)
    # opcheck takes NaN for a difference, and what is sent has NaN for the targets of other slices.
    target = torch.where(target >= 0, target % 4 + 4 * dist.get_rank(), target)
    for smoothing in 0.1, 0.0:
        options = None, [4, 4], -100, 2, dist.group.WORLD.group_name, 4, False, smoothing, 0.0, 1.5, 3.0, 2.0
        opcheck(operators.linear_cross_entropy_part.default, (x, w, target, b, *options))
        every = torch.cat([operators.linear_cross_entropy_part(x, w, target, b, *options)] * 2)
        leaves = [leaf.clone().requires_grad_() for leaf in (x, w, b)]
        given = *leaves[:2], target, leaves[2], None, torch.tensor(2.0), None, every, *options
        for needs in (True, True, True), (False, False, False):
            opcheck(operators.linear_cross_entropy_of_parts.default, (*given, *needs))
        lse, dloss = torch.randn(2, 10), torch.tensor(2.0)
        given = x, w, target, b, None, None, dloss, lse, *options, True, True, True
        opcheck(operators.linear_cross_entropy_bwd_of_slice.default, given)


def test_operators():
    on_all(2, _operators)
