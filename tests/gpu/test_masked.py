"""What softmax with options promises beside accuracy: the same bits, special rows, attention's own result."""

import math

import gander
import masked
import pytest
import torch
import torch.nn.functional as F

OPS = torch.ops.gander
by_function = pytest.mark.parametrize("function", [gander.softmax, gander.log_softmax])


@pytest.mark.parametrize("n", [64, 1000, 4096, 5376, 16384, 50000, 300000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@by_function
def test_batch_invariant(function, dtype, n):
    x = torch.randn(512, 8, n, device="cuda", dtype=dtype)
    mask = torch.rand(8, n, device="cuda") > 0.3
    every = function(x, scale=0.5, mask=mask, batch_invariant=True)
    dy = torch.randn_like(x)
    options = {"scale": 0.5, "log": function is gander.log_softmax, "batch_invariant": True}
    dx = OPS.masked_softmax_bwd(dy, every, mask, **options)
    for count in 1, 16:
        few = function(x[:count], scale=0.5, mask=mask, batch_invariant=True)
        assert torch.equal(few, every[:count])
        assert torch.equal(OPS.masked_softmax_bwd(dy[:count], few, mask, **options), dx[:count])


@pytest.mark.parametrize("n", [64, 4096, 50001, 300000])
@by_function
def test_same_bits_run_after_run(function, n):
    x = torch.randn(300, n, device="cuda", dtype=torch.bfloat16)
    first = function(x, causal=True)
    assert all(torch.equal(function(x, causal=True), first) for _ in range(5))


@pytest.mark.parametrize("n", [3, 8, 1000, 1024, 20001, 65536, 600000])
@by_function
def test_rows_that_are_not_numbers(function, n):
    """A row is NaN if an element that takes part is NaN or +inf, or if all of them are -inf."""
    x = torch.randn(150, n, device="cuda")
    mask = torch.ones(150, n, dtype=torch.bool, device="cuda")
    x[0, n // 2], x[1, -1], x[2] = math.nan, math.inf, -math.inf
    mask[3], mask[4, 1:] = False, False
    x[3], x[4, 1:] = math.nan, math.nan
    none = -math.inf if function is gander.log_softmax else 0.0
    for whole in "nan", "zero":
        y = function(x, mask=mask, masked=whole)
        assert y[:3].isnan().all()
        assert y[3].isnan().all() if whole == "nan" else (y[3] == none).all()
        assert y[4, 0] == (0.0 if function is gander.log_softmax else 1.0)
        assert (y[4, 1:] == none).all()
        assert y[5:].isfinite().all()


@pytest.mark.parametrize("shape", [(2, 3, 129, 128), (1, 2, 64, 1024), (2, 2, 33, 47)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention(shape, dtype):
    b, h, queries, keys = shape
    q, k, v = (torch.randn(b, h, rows, 64, device="cuda") for rows in (queries, keys, keys))
    mask = torch.rand(b, 1, queries, keys, device="cuda") > 0.3
    mask[..., 0] = True
    scores = (q @ k.mT).to(dtype)
    below = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril()
    for options, theirs, seen in (
        ({"mask": mask}, {"attn_mask": mask}, mask),
        ({"causal": True}, {"is_causal": True}, below),
    ):
        got = gander.softmax(scores, scale=0.125, dtype=torch.float32, **options)
        want = (scores.float() * 0.125).masked_fill(~seen, -math.inf).softmax(-1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        if dtype == torch.float32:
            attended = F.scaled_dot_product_attention(q, k, v, **theirs)
            torch.testing.assert_close(got @ v, attended, rtol=2e-3, atol=2e-3)  # TF32


@by_function
def test_masks_of_any_strides(function):
    x = torch.randn(2, 3, 2, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    for shape in (2, 1, 2, 1, 4, 64), (1, 3, 1, 3, 1, 64), (2, 1, 2, 1, 4, 1), (4, 64):
        mask = torch.rand(shape, device="cuda") > 0.3
        want = function(x, mask=mask.expand_as(x).contiguous(), masked="zero")
        storage = torch.zeros(*shape, 3, dtype=torch.bool, device="cuda")
        storage[..., 1] = mask
        for m in mask, mask.expand_as(x), storage[..., 1], mask.half().log():
            assert torch.equal(function(x, mask=m, masked="zero"), want)


@pytest.mark.parametrize("name", [name for name, case in masked.CASES.items() if case.mask])
@pytest.mark.parametrize("shift", range(1, 8))
def test_masks_at_any_address(name, shift):
    """The mask alone is misaligned."""
    case = masked.CASES[name]

    def moved(x):
        if x.dtype not in (torch.bool, torch.uint8):
            return x.contiguous()
        storage = torch.empty(x.numel() + shift, dtype=x.dtype, device="cuda")
        return storage[shift:].view(x.shape).copy_(x)

    for n in 33, 1024, 5000:
        masked.check(case, 40, n, torch.bfloat16, moved)
