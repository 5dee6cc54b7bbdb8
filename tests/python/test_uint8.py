"""Targets in uint8, which torch takes for class indices: all functions convert a copy."""

import gander
import gander.nn.functional as F
import pytest
import torch
from test_ops import rand
from torch import nn

M, N = 6, 5
IGNORED = 255


@pytest.fixture
def x(device):
    return rand((M, N), torch.float32, device).requires_grad_()


@pytest.fixture
def target(device):
    return torch.tensor([0, 1, IGNORED, 2, 3, IGNORED], dtype=torch.uint8, device=device)


def compare(call, other, *leaves):
    """Results and gradients, bit for bit."""
    got, want = call(), other()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if leaves:
        gradients = (torch.autograd.grad(loss.sum(), leaves) for loss in (got, want))
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss(x, target, reduction, weighted):
    weight = torch.linspace(0.5, 1, N, device=x.device) if weighted else None
    options = {"weight": weight, "ignore_index": IGNORED, "reduction": reduction}
    want = nn.functional.cross_entropy(x, target, **options)
    for loss in (
        gander.cross_entropy(x, target, **options),
        gander.nn.CrossEntropyLoss(**options)(x, target),
        F.cross_entropy(x, target, **options),
    ):
        torch.testing.assert_close(loss, want)
    compare(
        lambda: gander.cross_entropy(x, target, **options),
        lambda: gander.cross_entropy(x, target.long(), **options),
        x,
    )
    compare(
        lambda: gander.cross_entropy(x * 1, target, inplace_backward=True, **options),
        lambda: gander.cross_entropy(x, target.long(), **options),
        x,
    )


def test_targets_that_lie_apart(x, target):
    apart = torch.stack((target, target), 1)[:, 1]
    compare(
        lambda: gander.cross_entropy(x, apart, ignore_index=IGNORED),
        lambda: gander.cross_entropy(x, target.long(), ignore_index=IGNORED),
        x,
    )
    spatial = gander.nn.CrossEntropyLoss(ignore_index=IGNORED)
    maps = x.view(2, 3, N).movedim(-1, 1)
    compare(lambda: spatial(maps, target.view(2, 3)), lambda: spatial(maps, target.view(2, 3).long()), x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(x, target, reduction):
    def loss(x, target):
        weight = torch.linspace(0.5, 1, N, device=x.device)
        return gander.cross_entropy(x, target, weight=weight, ignore_index=IGNORED, reduction=reduction)

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True)
    got, want = compiled(x, target), loss(x, target)
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(loss.sum(), x) for loss in (got, want))
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(
        torch.vmap(loss)(x.view(2, 3, N), target.view(2, 3)),
        torch.vmap(loss)(x.view(2, 3, N), target.view(2, 3).long()),
    )


def test_functions_without_a_gradient(x, target):
    x, wide = x.detach(), target.long()
    want = gander.cross_entropy_fwd(x, wide, return_lse=True, return_dx=True, ignore_index=IGNORED)
    got = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True, ignore_index=IGNORED)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    loss, lse, dx = (torch.zeros_like(tensor) for tensor in want)
    gander.cross_entropy_fwd_out(x, target, None, loss, lse, dx, None, IGNORED)
    torch.testing.assert_close((loss, lse, dx), want, rtol=0, atol=0)
    dloss = torch.ones_like(loss)
    want = gander.cross_entropy_bwd(x, wide, dloss, lse, ignore_index=IGNORED)
    compare(lambda: gander.cross_entropy_bwd(x, target, dloss, lse, ignore_index=IGNORED), lambda: want)
    gander.cross_entropy_bwd_out(x, target, dloss, lse, dx, ignore_index=IGNORED)
    torch.testing.assert_close(dx, want, rtol=0, atol=0)
    logits = rand((M, N), torch.float32, x.device.type)
    compare(
        lambda: gander.cross_entropy_fwd(x, target, logits, ignore_index=IGNORED),
        lambda: gander.cross_entropy_fwd(x, wide, logits, ignore_index=IGNORED),
    )


def test_other_losses(x, target):
    head = rand((N, N), torch.float32, x.device.type).requires_grad_()
    for call in (
        lambda target: gander.linear_cross_entropy(x, head, target, ignore_index=IGNORED),
        lambda target: gander.linear_cross_entropy(x, head, target, ignore_index=IGNORED, reduction="none"),
        lambda target: gander.cross_entropy(x @ head, target, x.detach(), ignore_index=IGNORED),
        lambda target: sum(gander.linear_token_statistics(x, head, target, ignore_index=IGNORED)),
    ):
        compare(lambda call=call: call(target), lambda call=call: call(target.long()), x, head)


def test_a_target_that_is_no_class(device):
    """It makes its row NaN, and is refused with set_debug. 44 is what 300 is in uint8."""
    x, target = rand((3, 300), torch.float32, device), torch.tensor([0, 44, 200], device=device)
    small = x[:, :100]
    target = target.to(torch.uint8)
    assert gander.cross_entropy(small, target, reduction="none").isnan().tolist() == [False, False, True]
    gander.set_debug(True)
    try:
        gander.cross_entropy(x, target)
        gander.cross_entropy(x, target, ignore_index=-56)  # 200 in uint8
        with pytest.raises(IndexError, match="target has the class 200, expected 0 to 99"):
            gander.cross_entropy(small, target)
        with pytest.raises(IndexError, match="target has the class 200, expected 0 to 99"):
            gander.cross_entropy(small, target, ignore_index=-56)
        gander.cross_entropy(small, target, ignore_index=200)
    finally:
        gander.set_debug(False)


def test_others_stay_refused(x, target):
    for dtype in torch.int8, torch.int16, torch.bool, torch.uint16:
        with pytest.raises(TypeError, match=r"target has dtype \w+, expected int32 or int64"):
            gander.cross_entropy(x, target.to(dtype))


@pytest.mark.parametrize("library", ["numpy", "jax.numpy"])
def test_arrays(library):
    module = pytest.importorskip(library)
    x = torch.randn(M, N)
    target = torch.tensor([0, 1, IGNORED, 2, 3, IGNORED])
    want = gander.cross_entropy(x, target, ignore_index=IGNORED)
    narrow = module.asarray(target.numpy().astype("uint8"))
    arrays = module.asarray(x.numpy()), narrow
    got = gander.cross_entropy(*arrays, ignore_index=IGNORED)
    assert float(got) == pytest.approx(float(want), abs=1e-6)
    loss, lse = gander.cross_entropy_fwd(*arrays, ignore_index=IGNORED, return_lse=True)
    dx = gander.cross_entropy_bwd(*arrays, loss * 0 + 1, lse, ignore_index=IGNORED)
    assert float(abs(dx[2]).sum()) == 0 < float(abs(dx[1]).sum())
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="target has the class 255, expected 0 to 4"):
            gander.cross_entropy(*arrays)
    finally:
        gander.set_debug(False)
    if library == "numpy":
        assert narrow.dtype == "uint8" and narrow[2] == IGNORED
        out = module.zeros_like(loss)
        gander.cross_entropy_fwd_out(*arrays, None, out, None, None, None, IGNORED)
        assert (out == loss).all()
