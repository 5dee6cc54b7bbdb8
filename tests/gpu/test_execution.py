"""Execution: the same bits in each run, streams, threads, CUDA graphs, devices, and freed memory."""

import ctypes
import gc
import sys
import threading
from pathlib import Path

import gander
import pytest
import torch
from gander._native import library as abi
from grid import DTYPES, OPS, Inputs, check, name, same_bits

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
by_op = pytest.mark.parametrize("op", OPS)
# Several rows per warp; persistent CTAs; one row per CTA; clusters; two passes with scratch memory; rows in
# the shared memory of all SMs; unaligned rows.
SHAPES = (
    *((20000, 64), (4096, 1024), (300, 8192), (3, 65536), (40, 131072), (3, 1 << 20), (6, 1 << 21)),
    *((1500, 1001), (7, 300001)),
)


def assert_same(got, want, why):
    for what, value in want.items():
        assert same_bits(got[what], value), f"{what}: other bits {why}"


@by_dtype
@by_op
def test_runs_are_identical(op, dtype):
    for m, n in SHAPES:
        a = Inputs(m, n, dtype)
        first = OPS[op](a)
        for _ in range(3):
            assert_same(OPS[op](a), first, f"on another run of {m} x {n}")


@by_op
def test_two_streams(op):
    """Calls that need scratch memory run on two streams at once."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    for m, n in ((2, 300001), (3, 1 << 20), (6, 1 << 21), (200, 8192), (400, 1001)):
        cases = [Inputs(m, n, torch.bfloat16, scale=scale) for scale in (1.0, 3.0)]
        expected = [OPS[op](a) for a in cases]
        torch.cuda.synchronize()
        results = ([], [])
        for _ in range(8):
            for stream, a, into in zip(streams, cases, results, strict=True):
                with torch.cuda.stream(stream):
                    into.append(OPS[op](a))
        torch.cuda.synchronize()
        for into, want in zip(results, expected, strict=True):
            for got in into:
                assert_same(got, want, f"on a stream of its own, {m} x {n}")


def softmax_in_place(x):
    """Calls the C ABI, because the PyTorch operators have no in-place form."""
    shape = (ctypes.c_int64 * 2)(*x.shape)
    dtype = abi.DType(*abi.DTYPES[name(x.dtype)], 1)
    tensor = abi.Tensor(x.data_ptr(), abi.Device(abi.CUDA, 0), 2, dtype, shape, None, 0)
    stream = torch.cuda.current_stream().cuda_stream
    abi.check(abi.call("gander_softmax_forward", stream, x=tensor, y=tensor))


@by_dtype
def test_grid_wide_kernels_beside_other_work(dtype):
    """CTAs that share a row wait for each other. Other work may occupy the SMs that some of them need."""
    a = Inputs(6, 1 << 21, dtype)
    calls = (OPS["softmax_forward"], OPS["softmax_backward"], OPS["rmsnorm_forward"])
    want = [call(a) for call in calls]
    places = [a.x.clone() for _ in range(9)]
    matrix = torch.randn(4096, 4096, device="cuda").to(dtype)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for i, x in enumerate(places):
        with torch.cuda.stream(streams[i % 3]):
            softmax_in_place(x)
            got.append([call(a) for call in calls])
            if i % 2:
                matrix @ matrix
    torch.cuda.synchronize()
    for x, results in zip(places, got, strict=True):
        assert same_bits(x, next(iter(want[0].values()))), "in place, beside other work"
        for result, expected in zip(results, want, strict=True):
            assert_same(result, expected, "beside other work")


def test_a_stream_is_waited_for():
    """gander enqueues its work on torch's current stream, between earlier and later work."""
    stream = torch.cuda.Stream()
    a = Inputs(64, 4096, torch.float32)
    want = gander.softmax(a.x)
    with torch.cuda.stream(stream):
        x = torch.zeros_like(a.x)
        torch.cuda._sleep(50_000_000)
        x.copy_(a.x)
        y = gander.softmax(x)
        x.zero_()
    stream.synchronize()
    assert same_bits(y, want)


def test_threads():
    a = [Inputs(300, n, torch.bfloat16) for n in (64, 1001, 8192, 300001)]
    want = [{op: OPS[op](case) for op in OPS} for case in a]
    torch.cuda.synchronize()
    failures = []

    def work(case, expected):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    for op, results in expected.items():
                        assert_same(OPS[op](case), results, f"in a thread: {op}")
                torch.cuda.current_stream().synchronize()
        except BaseException as failure:
            failures.append(failure)

    pairs = [pair for pair in zip(a, want, strict=True) for _ in range(2)]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- CUDA graphs ----


@by_dtype
@by_op
def test_graph_replay(op, dtype):
    """A graph reads its inputs at the time of its replay, and its memory is not shared with other calls."""
    for m, n in SHAPES[1:]:
        a, b = Inputs(m, n, dtype), Inputs(m, n, dtype, scale=3.0)
        operands = ("x", "dy", "y", "weight", "rstd", "target", "class_weight", "dloss", "lse")
        for operand in operands:  # create the cached properties before the capture
            getattr(a, operand), getattr(b, operand)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = OPS[op](a)
        for operand in operands:
            getattr(a, operand).copy_(getattr(b, operand))
        want = OPS[op](b)
        for _ in range(2):
            for value in results.values():
                value.fill_(7)
            graph.replay()
            assert_same(results, want, f"in a graph of {m} x {n}")


def test_graph_of_a_training_step():
    m, n = 512, 5003
    a = Inputs(m, n, torch.float32)
    x, weight, target = a.x.requires_grad_(), a.weight.requires_grad_(), a.target

    def step():
        loss = gander.cross_entropy(gander.softmax(gander.rmsnorm(x, weight)), target)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.mul_(0.5)
        target.copy_(target.flip(0))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert same_bits(got, want)


@pytest.mark.job(sys.executable, Path(__file__).with_name("captured.py"))
def test_first_calls_of_a_process_in_a_capture(job):
    assert job.returncode == 0 and job.stdout.rstrip().endswith("identical"), job.stdout


# ---- Devices ----


@by_op
def test_device_that_is_not_current(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, of which one is not the current device")
    assert torch.cuda.current_device() == 0
    a = Inputs(40, 5003, torch.bfloat16)
    want = OPS[op](a)
    with torch.cuda.device(1):
        torch.cuda.synchronize()
    b = Inputs(40, 5003, torch.bfloat16)
    for operand in ("x", "dy", "y", "weight", "rstd", "target", "class_weight", "dloss", "lse"):
        setattr(b, operand, getattr(a, operand).to("cuda:1"))
    got = OPS[op](b)
    assert torch.cuda.current_device() == 0
    for what, value in want.items():
        assert got[what].device.index == 1
        assert same_bits(got[what].to("cuda:0"), value)


# ---- Memory ----


def test_memory_comes_back():
    a = [Inputs(40, n, torch.bfloat16) for n in (64, 1001, 300001)]
    leaves = [case.x.detach().clone().requires_grad_() for case in a]

    def step():
        for case, x in zip(a, leaves, strict=True):
            loss = gander.cross_entropy(gander.softmax(gander.rmsnorm(x, case.weight)), case.target)
            torch.autograd.grad(loss, x)
            gander.cross_entropy_fwd(case.x, case.target, return_dx=True)

    def used():
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    for _ in range(3):
        step()
    before = used()
    reserved = torch.cuda.memory_reserved()
    for _ in range(350):  # more than 1000 calls of each op
        step()
    assert used() == before
    assert torch.cuda.memory_reserved() == reserved


def test_refused_calls_leave_nothing():
    x = torch.randn(40, 1001, device="cuda")
    bad = torch.zeros(40, device="cuda")  # not an integer
    torch.cuda.synchronize()
    gc.collect()  # what tests before this one have left
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        with pytest.raises(TypeError):
            gander.cross_entropy_fwd(x, bad, return_dx=True)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory():
    # The input is one element, expanded to twice the device's memory. Its copy or the result does not fit.
    rows = torch.cuda.get_device_properties(0).total_memory
    huge = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16).expand(rows, 1)
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.cuda.OutOfMemoryError, match="allocate"):
        gander.softmax(huge)
    assert torch.cuda.memory_allocated() == before
    check("softmax_forward", [Inputs(30, 1000, torch.bfloat16)])


def test_warmup_and_explain():
    gander.warmup("cuda")
    text = gander.explain("softmax", torch.empty(4, 1 << 20, device="cuda", dtype=torch.bfloat16))
    assert "softmax_forward" in text and "CTAs" in text


def test_explain_by_name_is_explain_on_the_device():
    """The stored facts of a GPU that explain knows by name are those that the driver reports."""
    device = torch.cuda.get_device_name()
    name = next((name for name in ("h100", "h200", "a100") if name in device.lower()), None)
    if name is None:
        pytest.skip(f"explain does not know {device} by name")
    if torch.cuda.get_device_properties(0).multi_processor_count != {"a100": 108}.get(name, 132):
        pytest.skip("a MIG slice, or a GPU with fewer SMs than the SXM part")
    for op in ("softmax", "softmax_bwd", "rmsnorm", "rmsnorm_bwd", "cross_entropy", "cross_entropy_fwd_dx"):
        for shape in ((1, 1 << 22), (4, 1 << 20), (16, 65536), (1000, 4097), (32768, 131072), (1 << 20, 64)):
            for dtype in (torch.bfloat16, torch.float32):
                rows = {"shape": shape, "dtype": dtype}
                assert gander.explain(op, **rows, device=name) == gander.explain(op, **rows, device="cuda")
