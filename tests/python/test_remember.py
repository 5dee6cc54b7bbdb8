"""nn.CrossEntropyLoss(remember=True): what backward brought last decides on time, never on a gradient."""

import copy
import io
from functools import partial

import gander
import pytest
import torch
from gander._torch import cross_entropy as _cross_entropy
from gander._torch import expected_gradient as _remember
from torch.utils.checkpoint import checkpoint

INF, NAN = float("inf"), float("nan")
# Upstream gradients, some of them special: 0, a subnormal, infinity, NaN, and that which kernels use inside.
BITS = (0, 1, 0x3F800000, 0x3E800000, 0x47800000, 0x7F800000, 0x7FC00000, 0x7FC0FFEE, -1, -(2**31), 2**31 - 1)


@pytest.fixture(autouse=True)
def single_pass(monkeypatch):
    """Takes the single pass, which is for large CUDA tensors, for small ones and on the CPU too."""
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)
    monkeypatch.setattr(_cross_entropy, "ONE_PASS", 0)


@pytest.fixture
def given(device):
    return torch.randn(6, 33, device=device), torch.randint(0, 33, (6,), device=device)


def memory_of(loss):
    """Of the only device on which it has been called; None if it was not."""
    return next(iter(loss._memories.values()), None)


def assert_same(got, want):
    """The same bits on a GPU. The CPU, where torch never takes the single pass, divides at another place."""
    if got.is_cuda:
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    else:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def gradient(loss, x, target, scale):
    leaf = x.detach().clone().requires_grad_()
    (loss(leaf, target) * scale).backward()
    return leaf.grad


def test_what_is_expected(given):
    """The last upstream gradient; nothing after two changes in a row, until one stays."""
    loss = gander.nn.CrossEntropyLoss(reduction="sum", remember=True)
    plain = partial(gander.cross_entropy, reduction="sum", one_pass=True)
    seen = []
    for scale in (1.0, 1.0, 0.25, 0.25, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0, 5.0, 32.0):
        assert_same(gradient(loss, *given, scale), gradient(plain, *given, scale))
        seen.append(_remember.expected(memory_of(loss)).item())
    wanted = [1.0, 1.0, 0.25, 0.25, 4.0, NAN, NAN, NAN, 32.0, 32.0, 5.0, NAN]
    assert seen == pytest.approx(wanted, nan_ok=True)


def test_a_hit_and_a_miss(given, monkeypatch):
    """What backward finds expected in what forward has saved."""
    kept = []
    operators = dict(_cross_entropy.overloads)
    run = operators["cross_entropy_bwd_one_pass"]
    at = _cross_entropy.arguments("cross_entropy_bwd_one_pass").index("upstream")
    operators["cross_entropy_bwd_one_pass"] = lambda *a: (kept.append(a[at].item()), run(*a))[1]
    monkeypatch.setattr(_cross_entropy, "overloads", operators)
    loss = gander.nn.CrossEntropyLoss(remember=True)
    for scale in (0.5, 0.5, 2.0, 3.0, 4.0, 4.0, 4.0):
        gradient(loss, *given, scale)
    assert kept == pytest.approx([1.0, 0.5, 0.5, 2.0, NAN, NAN, 4.0], nan_ok=True)


def test_any_bits_give_the_same_gradient(given):
    """Also between forward and backward, for a second backward pass, and in a checkpoint."""
    x, target = given
    generator = torch.Generator().manual_seed(0)
    loss, other = (gander.nn.CrossEntropyLoss(remember=True) for _ in range(2))
    plain = partial(gander.cross_entropy, one_pass=True)

    def scramble(to=None):
        for module in loss, other:
            if (memory := memory_of(module)) is not None:
                some = torch.randint(-(2**31), 2**31, (3,), generator=generator, dtype=torch.int64)
                memory.copy_(some if to is None else torch.full((3,), to, dtype=torch.int64))

    wanted = {scale: gradient(plain, x, target, scale) for scale in (1.0, 0.25, 65536.0, -0.0)}
    for to in (*BITS, *[None] * 20):
        for scale, want in wanted.items():
            leaf, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
            scramble(to)
            made = loss(leaf, target)
            scramble()
            in_turn = other(twin, target)
            scramble(to)
            for _ in range(2):  # the graph is kept: the second pass computes anew
                leaf.grad = None
                (made * scale).backward(retain_graph=True)
                assert_same(leaf.grad, want)
                scramble()
            (in_turn * scale).backward()
            assert_same(twin.grad, want)
            leaf.grad = None
            scramble(to)
            again = checkpoint(loss, leaf, target, use_reentrant=False)
            scramble()
            (again * scale).backward()
            assert_same(leaf.grad, want)


def test_an_overflow_is_not_remembered(given):
    loss = gander.nn.CrossEntropyLoss(remember=True)
    gradient(loss, *given, 8.0)
    before = memory_of(loss).clone()
    for scale in (INF, NAN, -INF):
        gradient(loss, *given, scale)
        assert torch.equal(memory_of(loss), before)


def test_the_memory_is_no_state(given):
    x, target = given
    loss = gander.nn.CrossEntropyLoss(weight=torch.ones(33, device=x.device), remember=True)
    gradient(loss, x, target, 8.0)
    assert list(loss.state_dict()) == ["weight"] == [name for name, _ in loss.named_buffers()]
    copied = copy.deepcopy(loss)
    assert memory_of(copied) is None
    gradient(copied, x, target, 4.0)
    assert _remember.expected(memory_of(loss)) == 8 and _remember.expected(memory_of(copied)) == 4
    stream = io.BytesIO()
    torch.save(loss, stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=False)
    assert memory_of(read) is None and read.remember
    assert_same(gradient(read, x, target, 8.0), gradient(loss, x, target, 8.0))
    gander.nn.CrossEntropyLoss(remember=True).load_state_dict({})
    assert repr(loss) == "CrossEntropyLoss(remember=True)"
    assert repr(gander.nn.CrossEntropyLoss()) == "CrossEntropyLoss()"


def untouched(call, **options):
    loss = gander.nn.CrossEntropyLoss(remember=True, **options)
    call(loss)
    return memory_of(loss) is None


def test_what_remembers_nothing(given):
    """Off by default; without a gradient; a known upstream; no reduction; transforms; torch.compile."""
    x, target = given
    assert untouched(lambda loss: loss(x, target))
    assert untouched(lambda loss: gradient(lambda *a: loss(*a, upstream=2.0), x, target, 2.0))
    assert untouched(lambda loss: gradient(lambda *a: loss(*a).sum(), x, target, 2.0), reduction="none")
    with torch.no_grad():
        assert untouched(lambda loss: loss(x.clone().requires_grad_(), target))
    assert untouched(lambda loss: torch.func.grad(loss)(x, target))
    off = gander.nn.CrossEntropyLoss()
    gradient(off, x, target, 2.0)
    assert memory_of(off) is None

    def compiled(loss):
        run = torch.compile(loss, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradient(run, x, target, 2.0), gradient(off, x, target, 2.0))

    assert untouched(compiled)


def test_batched_gradients(given):
    """One memory does not hold the gradients of a batch."""
    x, target = given
    loss = gander.nn.CrossEntropyLoss(remember=True)
    leaf = x.clone().requires_grad_()
    scales = torch.tensor([1.0, 3.0], device=x.device)
    made = loss(leaf, target)
    before = memory_of(loss).clone()
    (got,) = torch.autograd.grad(made, leaf, scales, is_grads_batched=True)
    assert torch.equal(memory_of(loss), before)
    for scale, dx in zip(scales.tolist(), got, strict=True):
        torch.testing.assert_close(dx, gradient(gander.nn.CrossEntropyLoss(), x, target, scale))


def test_small_logits_need_no_memory(given, monkeypatch):
    monkeypatch.setattr(_cross_entropy, "ONE_PASS", 1 << 22)
    assert untouched(lambda loss: gradient(loss, *given, 2.0))


# ---- Calls that work without it, and so with it ----


class Dropped(torch.autograd.Function):
    """Has no gradient for its second argument."""

    @staticmethod
    def forward(ctx, kept, dropped):
        return kept * dropped

    @staticmethod
    def backward(ctx, dout):
        return dout, None


def test_a_loss_without_a_gradient(given):
    x, target = given
    leaf, other = x.clone().requires_grad_(), torch.ones((), device=x.device, requires_grad=True)
    loss = gander.nn.CrossEntropyLoss(remember=True)
    Dropped.apply(other, loss(leaf, target)).backward()
    assert leaf.grad is None and _remember.expected(memory_of(loss)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_default_dtypes(given, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        loss = gander.nn.CrossEntropyLoss(remember=True)
        gradient(loss, *given, 4.0)
    finally:
        torch.set_default_dtype(before)
    assert memory_of(loss).view(torch.float32).tolist() == [4.0, 1.0, 1.0]


def test_inference_mode_leaves_nothing_behind(given):
    x, target = given
    loss = gander.nn.CrossEntropyLoss(remember=True)
    leaf = x.clone().requires_grad_()
    refused = pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward")
    with torch.inference_mode(), torch.enable_grad(), refused:
        loss(leaf, target).backward()
    assert memory_of(loss) is None
    gradient(loss, x, target, 4.0)


def test_a_loss_can_be_saved(given, recwarn):
    x, target = given
    loss = gander.nn.CrossEntropyLoss(remember=True)(x.clone().requires_grad_(), target)
    torch.save({"loss": loss}, io.BytesIO())
    assert not [w for w in recwarn if "hook" in str(w.message)]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_traced_modules(given):
    assert untouched(lambda loss: torch.jit.trace(loss, (given[0].clone().requires_grad_(), given[1])))
