"""cross_entropy as training loops call it, and linear_cross_entropy, on CUDA: the same bits whatever upstream
gradient was expected, no synchronization, CUDA graphs, errors and memory."""

import gander
import pytest
import torch
import torch.nn.functional as F
from gander._torch import cross_entropy as _cross_entropy
from grid import DTYPES, IGNORED, Inputs, losses, name, same_bits
from tolerance import LINEAR_DW, RMS, assert_accurate, summing

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
# Several rows per warp; one row per CTA; clusters; two passes with scratch memory; unaligned rows.
SHAPES = (
    *((20000, 256), (4096, 1024), (2048, 1536), (2048, 2048), (700, 3000), (700, 8192), (70, 65536)),
    *((40, 128256), (6, 1 << 20), (5000, 1001)),
)


def gradient(a, scale, passes=1, **options):
    x = a.x.detach().requires_grad_()
    loss = gander.cross_entropy(x, a.target, weight=a.class_weight, one_pass=True, **options)
    assert "OnePass" in type(loss.grad_fn).__name__
    dloss = torch.full((), scale, device="cuda")
    for _ in range(passes):
        (dx,) = torch.autograd.grad(loss, x, dloss, retain_graph=True)
    return loss.detach(), dx


@by_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_same_bits_whatever_is_expected(dtype, reduction):
    """A hit, a miss, a call without upstream, and a second backward pass."""
    for m, n in SHAPES:
        a = Inputs(m, n, dtype)
        divisor = {"divisor": torch.tensor(m + 3, device="cuda")} if reduction == "sum" else {}
        options = {"reduction": reduction} | divisor
        loss, hit = gradient(a, 0.25, upstream=torch.tensor(0.25, device="cuda"), **options)
        for what, (got, dx) in {
            "the same number": gradient(a, 0.25, upstream=0.25, **options),
            "a miss": gradient(a, 0.25, upstream=8.0, **options),
            "no upstream": gradient(a, 0.25, **options),
            "a second pass after a hit": gradient(a, 0.25, 2, upstream=0.25, **options),
            "a second pass after a miss": gradient(a, 0.25, 2, **options),
        }.items():
            assert same_bits(got, loss), (what, m, n)
            assert same_bits(dx, hit), (what, m, n)


@by_dtype
@pytest.mark.parametrize("one_pass", [False, True])
def test_divisor(dtype, one_pass):
    for m, n in SHAPES:
        a = Inputs(m, n, dtype)
        scale = 0.25 / (m + 3)

        def reduced(x, a=a, scale=scale):
            return losses(x, a.target, a.class_weight, "sum") * scale

        theirs, exact = a.x.detach().requires_grad_(), a.x.double().requires_grad_()
        reduced(theirs).backward()
        want = reduced(exact)
        want.backward()
        for divisor in m + 3, torch.tensor(m + 3, device="cuda"), torch.tensor(m + 3.0, device="cuda"):
            x = a.x.detach().requires_grad_()
            how = {"weight": a.class_weight, "reduction": "sum", "one_pass": one_pass}
            loss = gander.cross_entropy(x, a.target, divisor=divisor, upstream=0.25, **how)
            (loss * 0.25).backward()
            assert_accurate(x.grad, theirs.grad, exact.grad, f"dx of {m} x {n}")
            torch.testing.assert_close(loss.double() * 0.25, want, rtol=summing(m), atol=0)


def test_nothing_synchronizes():
    a = Inputs(512, 8192, torch.bfloat16)
    assert a.x.numel() >= _cross_entropy.ONE_PASS
    count, scale = torch.tensor(500, device="cuda"), torch.tensor(2.0, device="cuda")
    weight = torch.randn(1000, 8192, device="cuda", dtype=torch.bfloat16)
    target = a.target % 1000
    for _ in range(2):  # the first call loads kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for divisor in 500, count:
                for upstream in None, 0.5, scale:
                    x = a.x.detach().requires_grad_()
                    how = {"reduction": "sum", "divisor": divisor, "upstream": upstream}
                    (gander.cross_entropy(x, a.target, **how) * scale).backward()
                    (gander.linear_cross_entropy(x, weight, target, **how) * scale).backward()
            gander.linear_cross_entropy(x, weight, target, chunk=100).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_graph():
    """A replay reads divisor, upstream and the upstream gradient that then are there."""
    a = Inputs(512, 8192, torch.bfloat16)
    weight = torch.randn(1000, 8192, device="cuda", dtype=torch.bfloat16) / 64
    target = a.target % 1000
    x = a.x.detach().requires_grad_()
    count, expected, dloss = (torch.tensor(value, device="cuda") for value in (500.0, 1.0, 1.0))

    def step():
        how = {"reduction": "sum", "divisor": count, "upstream": expected}
        loss = gander.cross_entropy(x, a.target, **how)
        linear = gander.linear_cross_entropy(x, weight, target, **how)
        return (
            loss.detach(),
            torch.autograd.grad(loss, x, dloss)[0],
            torch.autograd.grad(linear, x, dloss)[0],
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for values in (500.0, 1.0, 1.0), (77.0, 4.0, 4.0), (77.0, 4.0, 0.5):
        for tensor, value in zip((count, expected, dloss), values, strict=True):
            tensor.fill_(value)
        for value in captured:
            value.fill_(7)
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert same_bits(got, want), values


# ---- nn.CrossEntropyLoss(remember=True) ----


def memory_of(loss):
    (memory,) = loss._memories.values()
    return memory


def remembered(loss, a, scale):
    x = a.x.detach().requires_grad_()
    made = loss(x, a.target)
    return made.detach(), torch.autograd.grad(made, x, scale)[0]


@by_dtype
def test_remembering_changes_no_bit(dtype):
    """Whatever bits are remembered, in every regime: NaN is among them, for which forward makes nothing."""
    torch.manual_seed(0)
    for m, n in SHAPES:
        a = Inputs(m, n, dtype)
        loss = gander.nn.CrossEntropyLoss(weight=a.class_weight, reduction="sum", remember=True)
        if m * n < _cross_entropy.ONE_PASS:
            continue
        scale = torch.full((), 0.25, device="cuda")
        want = gradient(a, 0.25, reduction="sum")
        memory = torch.full((3,), 0.25, device="cuda").view(torch.int32)  # a hit
        for step in range(8):
            loss._memories[a.x.device] = memory.clone()
            for _ in range(2):
                got = remembered(loss, a, scale)
                assert all(map(same_bits, got, want)), (m, n, step)
            memory = torch.randint(-(1 << 31), 1 << 31, (3,), device="cuda").to(torch.int32)
            if step % 3 == 2:
                memory[0] = 0x7FC0FFEE


def test_remembering_in_graphs_and_on_streams():
    """A replay reads what then is remembered. Other bits may be written at any time, by any stream."""
    a = Inputs(512, 8192, torch.bfloat16)
    loss = gander.nn.CrossEntropyLoss(weight=a.class_weight, remember=True)
    scale = torch.tensor(0.25, device="cuda")
    want = gradient(a, 0.25)
    remembered(loss, a, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = remembered(loss, a, scale)
    side = torch.cuda.Stream()
    for step in range(20):
        for value in captured:
            value.fill_(7)
        if step % 2:
            memory_of(loss).random_(-(1 << 31), 1 << 31)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            memory_of(loss).random_(-(1 << 31), 1 << 31)
            other = remembered(loss, a, scale)
        graph.replay()
        torch.cuda.current_stream().wait_stream(side)
        assert all(map(same_bits, captured, want)) and all(map(same_bits, other, want)), step


def test_remembering_waits_for_nothing():
    """Not even a call that makes the memory; and a scale that stays is a hit from the third call on."""
    a = Inputs(512, 8192, torch.bfloat16)
    loss = gander.nn.CrossEntropyLoss(weight=a.class_weight, remember=True)
    scale = torch.tensor(8.0, device="cuda")
    gradient(a, 1.0)  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            remembered(loss, a, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert memory_of(loss).view(torch.float32).tolist() == [8.0] * 3


# ---- linear_cross_entropy ----


def rms(tensor):
    return tensor.double().square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_errors_of_the_linear_loss(dtype):
    """dx is at most 1.1 times as far from float64 as torch's. So is dw in one chunk or with float32 sums.
    Each further chunk rounds dw once more: 2 times as far in four of them, 2.5 in eight."""
    m, k, v = 2048, 1024, 32000
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    weight = (torch.randn(v, k, device="cuda") / 32).to(dtype)
    target = torch.randint(0, v, (m,), device="cuda")
    target[::7] = IGNORED

    def run(function, x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        function(x, weight).backward()
        return x.grad, weight.grad

    def torchs(x, weight):
        return losses(F.linear(x, weight), target, reduction="sum")

    exact = run(torchs, x.double(), weight.double())
    theirs = [rms(a - b) for a, b in zip(run(torchs, x, weight), exact, strict=True)]
    bounds = {(m // chunks, None): (RMS, most) for chunks, most in LINEAR_DW.items()}
    for how, most in (bounds | {(512, "float32"): (RMS, RMS)}).items():

        def ours(x, weight, how=how):
            options = {"reduction": "sum", "upstream": 1.0, "chunk": how[0], "accumulate": how[1]}
            return gander.linear_cross_entropy(x, weight, target, **options)

        got = run(ours, x, weight)
        for which, (gradient, right, error, factor) in enumerate(zip(got, exact, theirs, most, strict=True)):
            assert rms(gradient - right) <= factor * error, (how, ["dx", "dw"][which])


def test_memory_of_the_linear_loss():
    """Beyond the gradients a call needs the logits of one chunk."""
    m, k, v = 4096, 512, 32000
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, v, (m,), device="cuda")

    def peak(**how):
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gander.linear_cross_entropy(x, weight, target, **how).backward()
        return torch.cuda.max_memory_allocated() - before

    peak()
    gradients = 2 * (x.numel() + weight.numel())
    for chunk in 4096, 1024, 512:
        assert peak(chunk=chunk) <= gradients + 2 * chunk * v + (4 << 20)
    assert peak() <= gradients + 2 * 1024 * v + (4 << 20)
