"""Every op and dtype over the whole range of shapes. At the end conftest.py checks that every kernel ran."""

from functools import partial

import gander
import masked
import norms
import pytest
import qk_norm_rotary
import rotary
import torch
import torch.nn.functional as F
from grid import (
    COLUMNS,
    DTYPES,
    EPS,
    OPS,
    Inputs,
    aligned,
    check,
    exact_rms_norm,
    in_both,
    name,
    odd_strided,
    offset,
    rows_of,
    same_bits,
    strided,
)
from tolerance import assert_accurate

# The row lengths that are tested with every image, also with PTX.
CORE = {3, 64, 127, 1000, 1024, 4096, 4097, 16384, 50257, 131072, 1 << 20}

pytestmark = pytest.mark.usefixtures("record_kernels")


def column(n):
    return pytest.param(n, marks=[pytest.mark.core] * (n in CORE), id=f"n{n}")


@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [column(n) for n in COLUMNS])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", OPS)
def test_op(op, dtype, n, layout):
    check(op, (Inputs(m, n, dtype, layout) for m in rows_of(n)))


@pytest.mark.parametrize("vectors", [16384, 32768])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_many_long_rows(dtype, vectors):
    """RMSNorm forward has separate kernels for these. The test compares every tenth row."""
    a = Inputs(1031, vectors * 16 // dtype.itemsize, dtype)
    out, _, rstd = gander.rmsnorm_fwd(a.x, a.weight, eps=EPS, store_rstd=True)
    few = a.x[::10]
    theirs = torch.ops.aten._fused_rms_norm(few, [a.n], a.weight, EPS)
    exact = exact_rms_norm(few, a.weight)
    assert_accurate(out[::10], theirs[0], exact[0], "out")
    assert_accurate(rstd[::10], theirs[1].flatten(), exact[1], "rstd")


# (op, 16-byte vectors per row, options) for kernels that no shape above uses: those for the longest rows of a
# cluster or of a grid-wide kernel, and those that only an option selects. With `odd`, rows are one element
# shorter; with `offset`, the inputs begin one element after a multiple of 16 bytes.
RARE = (
    ("softmax_forward", 65536, {}),
    ("softmax_forward", 131072, {}),
    ("softmax_forward", 200000, {}),
    ("softmax_forward", 33000, {"odd": True}),
    ("softmax_backward", 65536, {}),
    ("softmax_backward", 70000, {}),
    ("softmax_backward", 65536, {"algorithm": "cluster"}),
    ("softmax_backward", 17000, {"odd": True}),
    ("rmsnorm_forward", 131072, {}),
    ("rmsnorm_forward", 200000, {}),
    # One CTA of 192 threads, a kernel that cannot reduce the losses of the rows itself.
    ("cross_entropy_one_pass", 1001, {"odd": True, "rows": 1, "one_pass": True}),
    ("cross_entropy_forward_dx", 60000, {}),
    ("cross_entropy_forward_dx", 131072, {}),
    ("cross_entropy_forward_dx", 33000, {"odd": True}),
    ("rmsnorm_backward_dw", 18000, {}),
    ("rmsnorm_backward_dw", 18000, {"rows": 211}),  # several rounds of a grid-wide kernel's ring buffer
    ("softmax_forward", 40000, {"rows": 131}),
    ("softmax_forward", 2048, {"rows": 2400}),  # an H200 has fewer rows in clusters
    ("rmsnorm_forward", 40000, {"rows": 131}),
    ("rmsnorm_backward_dw", 1000, {"algorithm": "medium"}),
    ("rmsnorm_backward_dw", 1000, {"algorithm": "medium", "odd": True}),
    ("rmsnorm_backward_dw", 1000, {"algorithm": "cluster"}),
    ("rmsnorm_backward_dw", 1000, {"algorithm": "cluster", "odd": True}),
    ("rmsnorm_backward_dw", 400, {}),
    ("rmsnorm_backward_dw", 1000, {"rows": 4500}),  # several rounds of the ring buffers of two CTAs
    ("rmsnorm_backward_dw", 1000, {"rows": 4500, "odd": True}),
    ("rmsnorm_backward_dw", 65536, {}),
    ("rmsnorm_backward_dw", 131072, {}),
    ("cross_entropy_forward", 450, {"odd": True, "batch_invariant": True}),
    ("cross_entropy_forward", 1000, {"odd": True, "batch_invariant": True}),
    ("cross_entropy_forward", 1900, {"odd": True, "batch_invariant": True}),
    ("cross_entropy_forward", 3900, {"odd": True, "batch_invariant": True}),
    ("cross_entropy_forward", 9000, {"odd": True, "batch_invariant": True}),
    ("softmax_forward", 100, {"algorithm": "warp"}),
    ("softmax_forward", 200, {"algorithm": "warp"}),
    # Rows of heads, whose vectors are no power of two. A row's errors have that of its rstd in common, so
    # with 17 rows of 44 float32 elements chance would decide whose are smaller.
    ("softmax_forward", 9, {}),
    ("softmax_forward", 20, {}),
    ("rmsnorm_forward", 11, {"rows": 2000}),
    ("rmsnorm_forward", 11, {"rows": 14000}),
    ("rmsnorm_forward", 100, {"rows": 5000}),
    ("rmsnorm_forward", 11, {"rows": 2000, "batch_invariant": True}),
    ("rmsnorm_forward", 20, {"rows": 20000}),
    ("cross_entropy_forward_dx", 150, {}),
    ("cross_entropy_forward", 150, {"batch_invariant": True}),
    ("cross_entropy_forward", 200, {"batch_invariant": True}),
    ("cross_entropy_forward", 300, {"rows": 2000}),
    ("cross_entropy_forward", 450, {"rows": 700}),
    ("cross_entropy_forward", 1700, {}),
    # Rows of a vocabulary's length.
    ("softmax_forward", 20000, {}),
    ("softmax_backward", 20000, {}),
    ("cross_entropy_forward", 6000, {"rows": 140}),
    ("cross_entropy_forward", 6000, {"rows": 140, "odd": True}),
    ("cross_entropy_forward", 33000, {}),
    ("cross_entropy_forward", 33000, {"odd": True}),
    ("cross_entropy_forward", 26000, {"rows": 1100}),
    ("cross_entropy_forward", 26000, {"rows": 1100, "odd": True}),
    ("cross_entropy_forward_dx", 20000, {}),
    ("cross_entropy_forward_dx", 6500, {"rows": 140, "odd": True}),
    ("cross_entropy_forward_dx", 12000, {"rows": 140, "odd": True}),
    ("cross_entropy_forward_dx", 17000, {"odd": True}),
    ("softmax_forward", 6500, {"algorithm": "register"}),
    ("rmsnorm_forward", 1024, {"algorithm": "medium"}),
    ("rmsnorm_forward", 6500, {"algorithm": "medium"}),
    ("rmsnorm_forward", 1500, {"algorithm": "register"}),
    ("rmsnorm_forward", 6500, {"algorithm": "register"}),
    ("softmax_forward", 6500, {"algorithm": "register", "odd": True}),
    ("softmax_forward", 3000, {"algorithm": "register", "offset": True}),
    ("softmax_forward", 40000, {"algorithm": "extreme", "offset": True}),
    ("softmax_backward", 3000, {"algorithm": "medium"}),
    ("softmax_backward", 3000, {"algorithm": "medium", "odd": True}),
    ("softmax_backward", 1500, {"algorithm": "medium", "offset": True}),
    ("softmax_backward", 20000, {"algorithm": "extreme", "offset": True}),
    ("rmsnorm_forward", 3000, {"algorithm": "register", "offset": True}),
    ("rmsnorm_forward", 40000, {"algorithm": "extreme", "offset": True}),
    ("rmsnorm_backward", 1500, {"algorithm": "medium", "offset": True}),
    ("rmsnorm_backward", 20000, {"algorithm": "extreme"}),
    ("rmsnorm_backward", 20000, {"algorithm": "extreme", "offset": True}),
)
# Algorithms that need compute capability 9.0.
HOPPER = (
    ("softmax_forward", "extreme"),
    ("softmax_backward", "extreme"),
    ("rmsnorm_forward", "extreme"),
    ("rmsnorm_backward", "extreme"),
    ("softmax_backward", "cluster"),
    ("rmsnorm_backward_dw", "cluster"),
    ("rmsnorm_backward_dw", "medium"),
)


def holds_in_shared_memory(vectors):
    """Whether a block can have enough shared memory for the smallest kernel that holds such a row.

    That needs 64 or 128 KiB for the row, and less than 4 KiB for everything else.
    """
    needs = (64 if vectors <= 4096 else 128) + 4 << 10
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin >= needs


def label(parameter):
    return "-".join(map(str, parameter.values())) if isinstance(parameter, dict) else str(parameter)


@pytest.mark.parametrize("op, vectors, options", RARE, ids=label)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rare_shapes(dtype, op, vectors, options):
    if (op, options.get("algorithm")) in HOPPER and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters and bulk copies need compute capability 9.0")
    if options.get("algorithm") == "medium" and not holds_in_shared_memory(vectors):
        pytest.skip("this device's shared memory does not hold the row")
    options = dict(options)
    rows, odd = options.pop("rows", 17), options.pop("odd", False)
    layout = offset if options.pop("offset", False) else aligned
    check(op, [Inputs(rows, vectors * 16 // dtype.itemsize - odd, dtype, layout)], **options)


# Kernels of which one CTA fills an SM. The planner uses them only for many rows.
MANY = (
    *(
        (op, n, aligned, odd)
        for op in ("softmax_forward", "cross_entropy_forward_dx")
        for n, odd in ((2300, 0), (6500, 0), (6500, 1))
    ),
    *((op, 3900, offset, 0) for op in ("softmax_forward", "rmsnorm_forward", "cross_entropy_forward_dx")),
    ("softmax_backward", 3900, aligned, 0),
    ("softmax_backward", 3900, aligned, 1),
    ("softmax_backward", 1900, aligned, 0),
    ("softmax_backward", 1900, offset, 0),
    *(("rmsnorm_forward", n, aligned, 0) for n in (3000, 4600, 6500)),
    *(("rmsnorm_forward", n, aligned, 1) for n in (3000, 6500, 10000, 20000)),
    ("rmsnorm_backward", 1900, aligned, 0),
    ("rmsnorm_backward", 1900, offset, 0),
    ("cross_entropy_forward", 6500, aligned, 0),
    ("cross_entropy_forward", 8200, aligned, 0),
    ("cross_entropy_forward", 4600, aligned, 1),
)


@pytest.mark.parametrize("op, vectors, layout, odd", MANY, ids=lambda p: getattr(p, "__name__", str(p)))
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_many_rows(dtype, op, vectors, layout, odd):
    check(op, [Inputs(1100, vectors * 16 // dtype.itemsize - odd, dtype, layout)])


# Row lengths that are not a multiple of 16 bytes have kernels for sizes between powers of two. With
# `aligned`, the rows of all operands have the same offset. With `offset`, the offsets are mixed, because
# results are aligned.
BETWEEN = (300, 450, 700, 1000, 1100, 1400, 1900, 2900, 3900)


@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("vectors", BETWEEN)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", OPS)
def test_odd_lengths(op, dtype, vectors, layout):
    check(op, [Inputs(140, vectors * 16 // dtype.itemsize - 1, dtype, layout)])


@pytest.mark.parametrize("layout", [aligned, strided, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("vectors", norms.VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_norms(dtype, vectors, layout):
    """LayerNorm, and RMSNorm with residuals, biases and chosen dtypes."""
    for case in norms.CASES.values():
        for m in norms.rows_of(vectors)[: 3 if layout is aligned else 2]:
            norms.check(case, m, vectors * 16 // dtype.itemsize - (layout is offset), dtype, layout)


@pytest.mark.parametrize("layout", [aligned, strided, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("vectors", masked.VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_masked(dtype, vectors, layout):
    """Softmax and log-softmax with options."""
    for case in masked.CASES.values():
        for queries in masked.queries_of(vectors):
            masked.check(case, queries, vectors * 16 // dtype.itemsize - (layout is offset), dtype, layout)


@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rescale(dtype, layout):
    """What linear_cross_entropy does to its gradient if another upstream gradient comes than was expected."""
    for m, n in (1, 3), (70, 1000), (300, 50257):
        made = Inputs(m, n, dtype).x
        came, expected = (torch.full((), value, device="cuda") for value in (3.0, 0.7))
        for upstream, factor in (None, came), (expected, came / expected):
            x = layout(made.clone())
            torch.ops.gander.rescale_(x, came, upstream)
            assert same_bits(x, (made.float() * factor).to(dtype))
            torch.ops.gander.rescale_(x, expected, expected)  # nothing to correct
            assert same_bits(x, (made.float() * factor).to(dtype))


ACTIVATIONS = {
    "silu": (gander.swiglu, F.silu),
    "gelu": (gander.geglu, F.gelu),
    "gelu_tanh": (partial(gander.geglu, approximate="tanh"), partial(F.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("layout", [aligned, strided, odd_strided, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu(activation, dtype, layout):
    """Gated linear units of two tensors, and with the same bits of the two halves of one."""
    ours, act = ACTIVATIONS[activation]
    packed = {"silu": gander.silu_and_mul, "gelu": gander.gelu_and_mul, "gelu_tanh": gander.gelu_tanh_and_mul}
    for m, n in (1, 1), (3, 8), (300, 11), (129, 1000), (64, 14336), (17, 50257), (2, 1 << 20):
        a = Inputs(m, n, dtype, layout)
        up = layout(Inputs(n, m, dtype).x.view(m, n))
        inputs = [t.detach().requires_grad_() for t in (a.x, up)]
        y = ours(*inputs)
        got = y.detach(), *torch.autograd.grad(y, inputs, a.dy)
        theirs = in_both(lambda gate, up: (act(gate) * up,), *inputs)
        theirs = [(t[0].detach(), *torch.autograd.grad(t[0], inputs, a.dy.to(t[0].dtype))) for t in theirs]
        for what, mine, torchs, exact in zip(("y", "dgate", "dup"), got, *theirs, strict=True):
            assert_accurate(mine, torchs, exact.double(), what)
        x = torch.cat(inputs, -1).detach().requires_grad_()
        half = packed[activation](x)
        assert same_bits(half, got[0])
        assert same_bits(torch.autograd.grad(half, x, a.dy)[0], torch.cat(got[1:], -1))
        gate, out = a.x.clone(), up.clone()
        torch.ops.gander.glu_bwd_(gate, out, a.dy, gelu=activation != "silu", tanh=activation == "gelu_tanh")
        assert same_bits(gate, got[1]) and same_bits(out, got[2])


@pytest.mark.parametrize("layout", rotary.LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rotary(dtype, interleaved, layout):
    """Rotary embeddings of queries and keys, with their gradients and in place."""
    for size in rotary.SIZES:
        rotary.check(size, dtype, layout, interleaved)


@pytest.mark.parametrize("columns, width", [(128, 128), (96, 32), (50, 18)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rotary_positions(dtype, columns, width):
    rotary.check_positions(columns, width, dtype)


@pytest.mark.parametrize("layout", rotary.LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_qk_norm_rotary(dtype, interleaved, layout):
    """Rotary embeddings of normalized queries and keys, with all gradients and in place."""
    for size in qk_norm_rotary.SIZES:
        qk_norm_rotary.check(size, dtype, layout, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_captured_qk_norm_rotary(dtype):
    qk_norm_rotary.check_capture(dtype)


@pytest.mark.parametrize("m", [1, 6, 256, 8192, 100001])
@pytest.mark.parametrize("narrow", [False, True])
def test_combine_token_statistics(m, narrow):
    """What follows the all-gather of statistics of slices: as on the CPU, and the same bits each time."""
    n, slices, each = 40, 8, 4 if narrow else 8
    logits, index = torch.randn(m, slices * n), torch.randint(slices * n, (m,))
    logits[3::5, :n], logits[4::7] = float("-inf"), 1.0
    index[2::7] = -100
    parts = torch.empty(slices, each, m)
    for at, (part, x) in enumerate(zip(parts, logits.chunk(slices, 1), strict=True)):
        to = {"state": part[:3].view(m, 3), "log_prob": part[3]}
        if not narrow:
            predicted = part[6:].view(-1).view(torch.int64)
            to |= {"log_sum_sq_probs": part[4], "mean_logit": part[5], "predicted": predicted}
        torch.ops.gander.token_statistics_out(x, index, **to, first=at * n, classes=slices * n)
    results = []
    for device in "cpu", "cuda", "cuda":
        to = {name: torch.full((m,), 7.0, device=device) for name in ("log_prob", "entropy")}
        to |= {"state": torch.full((m, 3), 7.0, device=device), "local": index.to(device, copy=True)}
        if not narrow:
            to |= {name: to["entropy"].clone() for name in ("log_sum_sq_probs", "mean_logit")}
            to |= {"predicted": to["local"].clone(), "is_top1": to["local"] < 0}
        options = {"first": 3 * n, "classes": slices * n, "narrow": narrow}
        torch.ops.gander.sharded_token_statistics_combine(parts.to(device), index.to(device), **to, **options)
        results.append([t.cpu() for t in to.values()])
    for on_cpu, once, again in zip(*results, strict=True):
        torch.testing.assert_close(once, on_cpu, rtol=4e-6, atol=4e-6, equal_nan=True)
        assert same_bits(once, again)


@pytest.mark.parametrize("m", [1, 6, 256, 8192, 100001])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine_slices(m, weighted):
    """What follows the all-gather of a sharded loss: as on the CPU, to a few units in the last place, and the
    same bits each time."""
    parts = torch.randn(8, 4 if weighted else 3, m)
    target = torch.randint(800, (m,))
    elsewhere = torch.arange(8)[:, None] != target // 100
    parts[:, 1], parts[:, 2] = parts[:, 1].abs(), parts[:, 2].abs().masked_fill(elsewhere, float("nan"))
    parts[:, 3:] = parts[:, 3:].abs().masked_fill(elsewhere[:, None], 0)
    parts[:, 0, 3::5] = (~elsewhere[:, 3::5]) * 30.0
    parts[:, 1, 3::5] = 1e-6
    target[2::7] = -100
    combine = torch.ops.gander.sharded_cross_entropy_combine
    for mean in False, True:
        results = []
        for device in "cpu", "cuda", "cuda":
            outputs = [torch.full((m,), 7.0, device=device) for _ in range(4)]
            loss, denominator = torch.zeros((), device=device), torch.zeros(1, device=device)
            high, log_sum, losses, weights = outputs
            to = high, log_sum, losses, loss, weights, denominator
            options = {"classes": 800, "mean": mean, "weighted": weighted}
            combine(parts.to(device), target.to(device), *to, **options)
            results.append([t.cpu() for t in to])
        for on_cpu, once, again in zip(*results, strict=True):
            torch.testing.assert_close(once, on_cpu, rtol=2e-6, atol=0, equal_nan=True)
            assert same_bits(once, again)
