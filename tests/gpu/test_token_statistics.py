"""Statistics of tokens beside torch and float64: every kernel of them."""

import gander
import pytest
import torch
from gander._functions.token_statistics import STATISTICS
from grid import DTYPES, IGNORED, Inputs, aligned, name, offset
from test_loss_options import VECTORS
from tolerance import assert_accurate

OPTIONS = {"plain": {}, "temperature": {"temperature": 0.7}, "cap": {"softcap": 4.0, "scale": 0.5}}
options = pytest.mark.parametrize("more", OPTIONS.values(), ids=OPTIONS)

pytestmark = pytest.mark.usefixtures("record_kernels")


def of_torch(x, index, temperature=1.0, scale=1.0, softcap=None):
    """log_prob, entropy, log_sum_sq_probs, mean_logit; indices out of range are taken for class 0."""
    z = (x * scale if softcap is None else softcap * torch.tanh(x * scale / softcap)) / temperature
    log_p = torch.log_softmax(z, -1)
    log_prob = log_p.gather(-1, index.clamp(0, x.shape[-1] - 1)[:, None])[:, 0]
    return log_prob, torch.special.entr(log_p.exp()).sum(-1), (2 * log_p).logsumexp(-1), z.mean(-1)


def gradient_of_torch(x, index, mask, upstream, more):
    leaf = x.detach().clone().requires_grad_()
    log_prob, entropy, *_ = of_torch(leaf, index, **more)
    a, b = (torch.where(mask, u, 0).to(x.dtype) for u in upstream)
    return torch.autograd.grad((log_prob * a + entropy * b).sum(), leaf)[0]


@options
@pytest.mark.parametrize("layout", [aligned, offset], ids=lambda f: f.__name__)
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_statistics_and_gradients(dtype, vectors, layout, more):
    n = vectors * 16 // dtype.itemsize
    for m in (3, 140) if vectors < 20000 else (3,):
        for odd in (0, 1) if n > 1 else (0,):
            check(Inputs(m, n - odd, dtype, layout), more)


def check(a, more):
    m, n = a.x.shape
    index = a.target.clone()
    index[1::11] = n  # no class
    inside = (index >= 0) & (index < n)
    row_mask = torch.arange(m, device="cuda") % 5 != 2
    counts = row_mask & (index != IGNORED)
    leaf = a.x.clone().requires_grad_()
    how = {"row_mask": row_mask, "ignore_index": IGNORED, **more}
    found = gander.token_statistics(leaf, index, outputs=STATISTICS, **how)
    few = gander.token_statistics(a.x, index, **how)
    exact, theirs = of_torch(a.x.double(), index, **more), of_torch(a.x.float(), index, **more)
    steep = 4 if "softcap" in more else 1  # logits of 16-bit rows are off by 2^-23 of the cap
    for got, wide, single, what in zip(found, exact, theirs, STATISTICS, strict=False):
        rows = counts & inside if what == "log_prob" else counts
        extra = (wide.abs()[rows] + steep) * 2**-20
        assert_accurate(got.detach()[rows], single[rows], wide[rows], what, extra=extra)
        assert (got[~counts] == 0).all()
    assert found.log_prob[counts & ~inside].isnan().all() and not (found.log_prob > 0).any()
    for short, full in zip(few, found, strict=False):
        torch.testing.assert_close(short, full.detach(), rtol=4e-6, atol=4e-6, equal_nan=True)
    largest = a.x.float().amax(-1, keepdim=True) == a.x.float()
    first = torch.where(largest, torch.arange(n, device="cuda"), n).amin(-1)
    if "softcap" not in more:  # a cap makes ties
        assert torch.equal(found.predicted[counts], first[counts])
    assert (found.predicted[~counts] == -1).all()
    assert torch.equal(found.is_top1, counts & (found.predicted == index))
    upstream = torch.arange(m, device="cuda").sin(), torch.arange(m, device="cuda").cos()
    (dx,) = torch.autograd.grad((found.log_prob, found.entropy), leaf, upstream)
    valid = counts & inside
    exact_dx = gradient_of_torch(a.x.double(), index, valid, upstream, more)
    their_dx = gradient_of_torch(a.x.float(), index, valid, upstream, more).to(dx.dtype)
    terms = exact_dx.abs().max() * 2**-20 * steep + 2**-22
    assert_accurate(dx[valid], their_dx[valid], exact_dx[valid], "dx", extra=terms)
    assert (dx[~counts] == 0).all() and dx[counts & ~inside].isnan().all()


@pytest.mark.parametrize("n", [64, 1000, 4096, 12001, 40960])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_first_of_what_a_cap_makes_equal(dtype, n):
    """Logits far beyond the cap are mapped to one number."""
    columns = n // 3, n // 2, n - 1
    for m in (3, 300):
        x = torch.zeros(m, n, device="cuda", dtype=dtype)
        x[:, columns] = torch.tensor([300.0, 500.0, 400.0], device="cuda", dtype=dtype)
        for column in columns:
            index = torch.full((m,), column, device="cuda")
            found = gander.token_statistics(x, index, softcap=2.0, outputs=STATISTICS)
            assert (found.predicted == columns[0]).all()
            assert (found.is_top1 == (column == columns[0])).all()
            exact = of_torch(x.double(), index, softcap=2.0)
            for got, wide in zip(found, exact, strict=False):
                torch.testing.assert_close(got.double(), wide, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("n", [96, 4096, 50257])
def test_same_bits(n):
    """On every run; and with batch_invariant, of a row alone."""
    a = Inputs(300, n, torch.bfloat16)
    how = {"outputs": STATISTICS, "ignore_index": IGNORED, "batch_invariant": True}
    first, again = (gander.token_statistics(a.x, a.target, **how) for _ in range(2))
    few = gander.token_statistics(a.x[:7], a.target[:7], **how)
    for one, other, part in zip(first, again, few, strict=True):
        assert torch.equal(one.nan_to_num(2), other.nan_to_num(2))
        assert torch.equal(one[:7].nan_to_num(2), part.nan_to_num(2))
    every = gradient_of(a.x, a.target, batch_invariant=True)
    for m in (1, 7, 256):
        assert torch.equal(gradient_of(a.x[:m], a.target[:m], batch_invariant=True), every[:m])


def gradient_of(logits, index, **options):
    """Of log-probabilities and entropies, by weights that differ from row to row."""
    leaf = logits.detach().requires_grad_()
    log_prob, entropy = gander.token_statistics(leaf, index, ignore_index=IGNORED, **options)
    by_row = torch.linspace(0.5, 2, 300, device=leaf.device)[: len(leaf)]
    return torch.autograd.grad((log_prob * by_row + entropy).sum(), leaf)[0].nan_to_num(2)
