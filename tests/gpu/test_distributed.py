"""Cross-entropy and statistics of tokens that are divided among ranks: the kernels, and calls with NCCL."""

import subprocess
import sys
import time

import gander
import pytest
import torch
from grid import DTYPES, Inputs, name, same_bits


@pytest.mark.parametrize("n", [5, 256, 4099, 50257, 262144])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_backward_of_slices(dtype, n):
    """The gradients of slices are slices of the gradient, to the bit."""
    a = Inputs(12, n, dtype)
    target = torch.randint(n, (12,), device="cuda")
    target[3], target[4:6] = -100, n - 1
    dloss = torch.rand(12, device="cuda")
    _, lse = gander.cross_entropy_fwd(a.x, target, return_lse=True)
    want = gander.cross_entropy_bwd(a.x, target, dloss, lse)
    for cut in 1, n // 2, n - 1:
        for first, end in (0, cut), (cut, n):
            for part in a.x[:, first:end], a.x[:, first:end].contiguous():
                options = {"ignore_index": -100 - first, "reduction": 0, "slice": True}
                given = target - first, None, dloss, lse
                dx = torch.ops.gander.cross_entropy_bwd(part, *given, **options)
                assert same_bits(dx, want[:, first:end].contiguous())
                part = part.clone()
                torch.ops.gander.cross_entropy_bwd_(part, *given, **options)
                assert same_bits(part, dx)
    weight = torch.full((n,), 2.0, device="cuda")
    options = {"ignore_index": -100 - n, "reduction": 0, "slice": True}
    dx = torch.ops.gander.cross_entropy_bwd(
        a.x, target - n, weight, dloss, lse, **options
    )  # all targets are in another slice
    softmax = (a.x.double() - lse[:, None]).exp() * dloss[:, None]
    softmax[3] = 0
    limits = torch.finfo(dtype)
    smallest = max(limits.smallest_normal * limits.eps, torch.finfo(torch.float32).smallest_normal)
    torch.testing.assert_close(dx.double(), softmax, rtol=4 * max(limits.eps, 2e-5), atol=smallest)


RANK = """
import sys, torch, gander
import torch.distributed as dist
from gander._functions.token_statistics import STATISTICS
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", rank=rank, world_size=ranks, store=dist.FileStore(sys.argv[3], ranks))
torch.manual_seed(0)
for dtype, m, n in (torch.bfloat16, 512, 32000), (torch.float32, 7, 1001), (torch.float16, 3, 129):
    x, target = (torch.randn(m, n) * 3).to(device, dtype), torch.randint(n, (m,)).to(device)
    weight = torch.rand(n).to(device) + 0.5
    target[1] = -100
    sizes = [part.numel() for part in torch.arange(n).tensor_split(ranks)]
    first = sum(sizes[:rank])
    cut = slice(first, first + sizes[rank])
    for reduction in "mean", "sum", "none":
        for w in None, weight:
            whole, part = x.clone().requires_grad_(), x[:, cut].clone().requires_grad_()
            want = gander.cross_entropy(whole, target, weight=w, reduction=reduction)
            def call():
                own = None if w is None else w[cut]
                return gander.distributed.cross_entropy(
                    part, target, weight=own, reduction=reduction, sizes=sizes
                )
            loss = call()
            torch.testing.assert_close(loss, want)
            upstream = torch.rand(want.shape).to(device)
            (dx,) = torch.autograd.grad(loss, part, upstream)
            (expected,) = torch.autograd.grad(want, whole, upstream)
            torch.testing.assert_close(dx, expected[:, cut])
    options = {"temperature": 0.7, "row_mask": torch.arange(m, device=device) != 2, "outputs": STATISTICS}
    index, logits = target.clone(), x.clone().requires_grad_()
    index[0], logits.data[0, sizes[0]:] = 0, float("-inf")  # other slices have nothing else
    of_slice = logits.detach()[:, cut].clone().requires_grad_()
    def statistics():
        return gander.distributed.token_statistics(of_slice, index, sizes=sizes, **options)
    found, want = statistics(), gander.token_statistics(logits, index, **options)
    for value, expected in zip(found, want, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=5e-5)
    upstream = [torch.rand(m).to(device) for _ in range(2)]
    (dx,) = torch.autograd.grad(found[:2], of_slice, upstream)
    (expected,) = torch.autograd.grad(want[:2], logits, upstream)
    torch.testing.assert_close(dx, expected[:, cut])
    hidden, head = (torch.randn(rows, 64).to(device, dtype) / 4 for rows in (m, n))
    leaves = [t.clone().requires_grad_() for t in (hidden, head, hidden, head[cut])]
    def of_head():
        return gander.distributed.linear_token_statistics(
            *leaves[2:], target, sizes=sizes, allreduce_dgrad=True, **options
        )
    # Products of slices may round to another element of 16 bits.
    close = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 5e-2}
    of_rows, want = of_head(), gander.linear_token_statistics(*leaves[:2], target, **options)
    for value, expected in zip(of_rows[:4], want[:4], strict=True):
        torch.testing.assert_close(value, expected, **close)
    for of, with_head in (want, leaves[:2]), (of_rows, leaves[2:]):
        torch.autograd.backward(of[:2], upstream, inputs=with_head)
    torch.testing.assert_close(leaves[2].grad, leaves[0].grad, **close)
    torch.testing.assert_close(leaves[3].grad, leaves[1].grad[cut], **close)
    with torch.no_grad():  # nothing waits for the device, so a graph can capture the calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, of_tokens, of_captured_rows = call(), statistics(), of_head()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, loss) and all(map(torch.equal, of_tokens, found))
        for value, expected in zip(of_captured_rows[:4], of_rows[:4], strict=True):
            torch.testing.assert_close(value, expected, **close)
        graph.reset()  # the group cannot be destroyed while a graph has its collectives
dist.destroy_process_group()
"""


def test_nccl(tmp_path, record_property):
    """One rank on each GPU, up to 4."""
    count = min(torch.cuda.device_count(), 4)
    record_property("note", f"test_nccl: {count} ranks" + ", so nothing was split" * (count == 1))
    command = sys.executable, "-c", RANK
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(tmp_path / "store")],
            stderr=(tmp_path / f"{rank}.log").open("w"),
        )
        for rank in range(count)
    ]
    deadline = time.monotonic() + 120
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    errors = [(tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(count)]
    assert codes == [0] * count, errors  # None: it was still running
