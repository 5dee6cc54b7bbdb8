"""Results are no views where torch's are none, so that operations in place on them have torch's history."""

import subprocess
import sys

import gander
import gander.nn.functional as F
import pytest
import torch
import torch.nn.functional as theirs
from test_ops import rand
from torch import nn

# By name: ours, torch's, and the shape of x. Where softmax's dimension is moved and only dimensions of size 1
# follow it, a view of the kernel's result would be contiguous.
CALLS = {
    "RMSNorm": (gander.nn.RMSNorm((4, 8)), nn.RMSNorm((4, 8)), (3, 4, 8)),
    "LayerNorm": (gander.nn.LayerNorm((4, 8)), nn.LayerNorm((4, 8)), (3, 4, 8)),
    "LayerNorm of all": (gander.nn.LayerNorm((4, 8)), nn.LayerNorm((4, 8)), (4, 8)),
    "rms_norm": (lambda x: F.rms_norm(x, (4, 8)), lambda x: theirs.rms_norm(x, (4, 8)), (3, 4, 8)),
    "layer_norm": (lambda x: F.layer_norm(x, (4, 8)), lambda x: theirs.layer_norm(x, (4, 8)), (3, 4, 8)),
    "logsumexp": (
        lambda x: gander.logsumexp(x, keepdim=True),
        lambda x: torch.logsumexp(x, -1, keepdim=True),
        (3, 4, 8),
    ),
    "logsumexp of the first": (
        lambda x: gander.logsumexp(x, 0, keepdim=True),
        lambda x: torch.logsumexp(x, 0, keepdim=True),
        (3, 4, 8),
    ),
    "logsumexp of several": (
        lambda x: gander.logsumexp(x, (2, 0), keepdim=True),
        lambda x: torch.logsumexp(x, (2, 0), keepdim=True),
        (3, 4, 8),
    ),
    "logsumexp over several": (
        lambda x: gander.logsumexp(x, (0, 1)),
        lambda x: torch.logsumexp(x, (0, 1)),
        (3, 4, 8),
    ),
    "logsumexp of one number": (lambda x: gander.logsumexp(x), lambda x: torch.logsumexp(x, 0), ()),
    "softmax of one number": (lambda x: F.softmax(x, 0), lambda x: theirs.softmax(x, 0), ()),
    "log_softmax of one number": (lambda x: F.log_softmax(x, -1), lambda x: theirs.log_softmax(x, -1), ()),
    "Softmax of one number": (gander.nn.Softmax(0), nn.Softmax(0), ()),
    "softmax of a column": (lambda x: gander.softmax(x, dim=0), lambda x: x.softmax(0), (8, 1)),
    "softmax of columns": (lambda x: gander.softmax(x, dim=1), lambda x: x.softmax(1), (3, 8, 1)),
    "softmax of moved rows": (lambda x: gander.softmax(x, dim=0), lambda x: x.softmax(0), (3, 8)),
    "log_softmax of a column": (lambda x: gander.log_softmax(x, 0), lambda x: x.log_softmax(0), (8, 1)),
    "scaled softmax of a column": (
        lambda x: gander.softmax(x, dim=0, scale=2.0),
        lambda x: (x * 2).softmax(0),
        (8, 1),
    ),
}
by_call = pytest.mark.parametrize(("mine", "other", "shape"), CALLS.values(), ids=CALLS)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("grad", [False, True], ids=["without gradient", "with gradient"])
@by_call
def test_results_are_no_views(mine, other, shape, grad, compiled):
    x = rand(shape, torch.float32, "cpu").requires_grad_(grad)
    if compiled:
        torch.compiler.reset()
        mine = torch.compile(mine, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        got, want = mine(x), other(x)
    assert not got._is_view() and not want._is_view()
    assert got.is_contiguous()
    torch.testing.assert_close(got, want)


def in_place(call, x):
    """The gradient after the result was doubled in place, or what autograd says."""
    x = x.clone().requires_grad_()
    y = call(x)
    try:
        y.mul_(2).square().sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None
    return x.grad


@by_call
def test_results_may_be_written_where_torchs_may(mine, other, shape):
    """A result that backward reads may not be written. Then autograd says so, as for torch's."""
    x = rand(shape, torch.float32, "cpu")
    got, want = in_place(mine, x), in_place(other, x)
    if want is not None:  # ours may be a copy, where torch's is what backward reads
        assert got is not None
    if got is not None:
        with torch.no_grad():
            exact = torch.func.grad(lambda x: (2 * other(x)).square().sum())
        torch.testing.assert_close(got, exact(x) if want is None else want)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("grad", [False, True], ids=["without gradient", "with gradient"])
def test_losses_of_a_linear_layer_are_no_views(shape, grad):
    x, target = rand((*shape, 8), torch.float32, "cpu"), torch.randint(5, shape)
    head = gander.nn.LinearCrossEntropy(8, 5, reduction="none")
    with torch.set_grad_enabled(grad):
        loss = head(x, target)
        want = theirs.cross_entropy((x @ head.weight.t()).flatten(0, -2), target.flatten(), reduction="none")
    assert not loss._is_view()
    torch.testing.assert_close(loss, want.view(shape))
    if grad:
        mask = rand(shape, torch.float32, "cpu")
        got = torch.autograd.grad(loss.mul_(mask).sum(), head.weight)
        torch.testing.assert_close(got, torch.autograd.grad(want @ mask.flatten(), head.weight))


def test_transforms_and_exports_of_norms_over_several_dimensions():
    x = rand((3, 4, 8), torch.float64, "cpu")
    mine, other = (kind((4, 8), dtype=torch.float64) for kind in (gander.nn.LayerNorm, nn.LayerNorm))
    for transform in (
        lambda norm: torch.vmap(norm)(x),
        lambda norm: torch.func.grad(lambda x: norm(x).square().sum())(x),
        lambda norm: torch.vmap(torch.func.grad(lambda x: norm(x).square().sum()))(x),
        lambda norm: torch.func.jacrev(norm)(x[0]),
        lambda norm: torch.compile(norm, dynamic=True, fullgraph=True)(x),
    ):
        torch.testing.assert_close(transform(mine), transform(other))
    exported = torch.export.export(mine, (x,), dynamic_shapes=[{0: torch.export.Dim.DYNAMIC}])
    torch.testing.assert_close(exported.module()(x[:2]), other(x[:2]))


SHARDED = """
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
import gander.nn as gnn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for kind in (gnn.LayerNorm, gnn.RMSNorm):
    x, norm = torch.randn(3, 2, 8, requires_grad=True), kind((2, 8))
    norm(x).relu().square().sum().backward()
    want = norm.weight.grad
    norm.weight.grad = None
    fully_shard(norm, mesh=mesh, reshard_after_forward=True)
    torch.relu_(norm(x)).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad.full_tensor(), want)

    if torch.__version__ < (2, 12):  # whose DTensor has no sharding strategy for these norms' views
        continue
    norm, parts = kind((2, 8), elementwise_affine=False), DTensor.from_local(x.detach(), mesh, [Shard(0)])
    y = norm(parts)
    assert y.placements == (Shard(0),) and not y._is_view()
    torch.testing.assert_close(y.full_tensor(), norm(x.detach()))
head, mask = gnn.LinearCrossEntropy(8, 5, reduction="none"), torch.tensor([1.0, 0.0, 0.5])
x, target = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 1, 2])
(head(x, target) * mask).sum().backward()
want = head.weight.grad
head.weight.grad = None
fully_shard(head, mesh=mesh, reshard_after_forward=True)
head(x, target).mul_(mask).sum().backward()
torch.testing.assert_close(head.weight.grad.full_tensor(), want)
dist.destroy_process_group()
"""


def test_results_may_be_written_under_fsdp():
    run = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1, (0,)])
def test_logsumexp_of_one_number(dim, keepdim):
    x, y = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
    got, want = gander.logsumexp(x, dim, keepdim), torch.logsumexp(y, dim, keepdim)
    assert got.shape == ()
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    torch.testing.assert_close(x.grad, y.grad)
    with pytest.raises(IndexError, match="dim is 1, expected -1 to 0"):
        gander.logsumexp(x, 1)


def test_logsumexp_of_one_number_in_arrays():
    numpy = pytest.importorskip("numpy")
    for dim in (0, -1):
        got = gander.logsumexp(numpy.array(2.0, dtype="float32"), dim)
        assert got.shape == () and got == 2
