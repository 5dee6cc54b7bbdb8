"""RMSNorm of each head and rotary position embeddings, in one pass."""

import gander
import numpy as np
import pytest
import torch
from gander._torch.registry import overloads
from test_rotary import per_element, queries, reference, tables
from torch.utils.checkpoint import checkpoint

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def weights(dtype, columns=64):
    return [(1 + torch.randn(columns, dtype=torch.float64) / 2).to(dtype).requires_grad_() for _ in range(2)]


def normalized(x, weight, eps=1e-6, offset=0.0, gemma=False):
    """What transformers' norms compute: Llama's, or Gemma's."""
    h = x if x.dtype == torch.float64 else x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if gemma:
        return (h * (weight.to(h.dtype) + offset)).to(x.dtype)
    return weight * h.to(x.dtype)


def transformers(q, k, q_weight, k_weight, cos, sin, **options):
    pairs = (q, q_weight), (k, k_weight)
    return [reference(normalized(x, w, **options), cos[:, None], sin[:, None]) for x, w in pairs]


@pytest.mark.parametrize("mode", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bits_of_transformers(dtype, mode):
    """The order of a head's sum differs, which rarely changes a bit."""
    q, k, (q_weight, k_weight) = queries(4, dtype), queries(2, dtype), weights(dtype)
    cos, sin = map(per_element, tables(2, 5, 32, dtype=dtype))
    gemma = mode == "gemma"
    want = transformers(q, k, q_weight, k_weight, cos, sin, offset=float(gemma), gemma=gemma)
    got = gander.qk_norm_rotary(
        q, k, q_weight, k_weight, cos, sin, 1e-6, weight_offset=float(gemma), casting_mode=mode
    )
    for a, b in zip(got, want, strict=True):
        assert (a == b).float().mean() > 0.99


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns, rotated", [(64, 64), (48, 12), (9, 4)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error(dtype, columns, rotated, interleaved):
    """Errors of results and gradients are at most those of torch's operators."""
    q, k, (q_weight, k_weight) = (
        queries(3, dtype, columns),
        queries(2, dtype, columns),
        weights(dtype, columns),
    )
    cos, sin = tables(5, rotated // 2, dtype=dtype)
    got = gander.qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, 1e-6, 0.5, interleaved)
    upstream = [torch.randn_like(y) for y in got]
    found = *got, *torch.autograd.grad(got, (q, k, q_weight, k_weight), upstream)

    def by_torch(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, q_weight, k_weight)]
        elements = [per_element(t.to(dtype), interleaved) for t in (cos, sin)]
        norms = (
            normalized(x, w, offset=0.5, gemma=True) for x, w in zip(leaves[:2], leaves[2:], strict=True)
        )
        results = [reference(n, *elements, interleaved) for n in norms]
        return *results, *torch.autograd.grad(results, leaves, [g.to(dtype) for g in upstream])

    for mine, exact, rough in zip(found, by_torch(torch.float64), by_torch(dtype), strict=True):
        error, allowed = ((other.double() - exact).square().mean().sqrt() for other in (mine, rough))
        factor = 1.1 if exact.numel() >= 48 else 1.5  # few errors scatter
        assert error <= factor * allowed + 1e-15 * exact.abs().max()


def test_what_is_wanted():
    """Gradients of some arguments, of one result alone, and without weights."""
    q, k, (q_weight, k_weight) = queries(4, torch.float32), queries(2, torch.float32), weights(torch.float32)
    cos, sin = tables(5, 32)
    given = q, k, q_weight, k_weight
    both = gander.qk_norm_rotary(*given, cos, sin, 1e-6)
    upstream = [torch.randn_like(y) for y in both]
    want = torch.autograd.grad(both, given, upstream)
    for wanted in ([0], [1], [2], [3], [0, 3], [1, 2]):
        leaves = [x if i in wanted else x.detach() for i, x in enumerate(given)]
        results = gander.qk_norm_rotary(*leaves, cos, sin, 1e-6)
        got = torch.autograd.grad(results, [leaves[i] for i in wanted], upstream)
        assert all(torch.equal(g, want[i]) for g, i in zip(got, wanted, strict=True)), wanted
    for index, parts in ((0, (0, 2)), (1, (1, 3))):
        y = gander.qk_norm_rotary(*given, cos, sin, 1e-6)[index]
        got = torch.autograd.grad(y, [given[i] for i in parts], upstream[index])
        assert all(torch.equal(g, want[i]) for g, i in zip(got, parts, strict=True))
    y, nothing = gander.qk_norm_rotary(q, None, None, None, cos, sin, 1e-6)
    assert nothing is None
    ones = torch.ones(64)
    assert torch.equal(y, gander.qk_norm_rotary(q, None, ones, None, cos, sin, 1e-6)[0])
    y.sum().backward()
    assert q.grad is not None


def test_it_is_rmsnorm_and_rotary():
    q, (weight, _) = queries(4, torch.float32).detach(), weights(torch.float32)
    cos, sin = tables(5, 32)
    want = gander.rotary(gander.rmsnorm(q, weight, eps=1e-6), None, cos, sin)[0]
    got = gander.qk_norm_rotary(q, None, weight, None, cos, sin, 1e-6)[0]
    assert torch.allclose(got, want, atol=1e-6)
    again = q.clone(memory_format=torch.preserve_format)
    weight.requires_grad_(False)
    assert gander.qk_norm_rotary(again, None, weight, None, cos, sin, 1e-6, inplace=True)[0] is again
    assert torch.equal(again, got)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    q, k, (q_weight, k_weight) = queries(4, torch.float32), queries(2, torch.float32), weights(torch.float32)
    cos, sin = tables(5, 32)

    def attend(q, k, q_weight, k_weight):
        q, k = gander.qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, 1e-6)
        return q @ k.repeat_interleave(2, 1).transpose(-1, -2)

    given = q, k, q_weight, k_weight
    eager, compiled = attend(*given), torch.compile(attend, fullgraph=True, backend=backend)(*given)
    assert torch.allclose(eager, compiled, atol=1e-5)
    upstream = torch.randn_like(eager)
    for a, b in zip(*(torch.autograd.grad(y, given, upstream) for y in (eager, compiled)), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_transforms_and_checkpoints():
    q, k, (q_weight, k_weight) = queries(4, torch.float32), queries(2, torch.float32), weights(torch.float32)
    cos, sin = tables(5, 32)

    def loss(q, q_weight):
        return (
            gander.qk_norm_rotary(q, k.detach(), q_weight, k_weight.detach(), cos, sin, 1e-6)[0]
            .square()
            .sum()
        )

    want = torch.autograd.grad(loss(q, q_weight), (q, q_weight))
    plain = q.detach(), q_weight.detach()
    assert all(map(torch.equal, torch.func.grad(loss, (0, 1))(*plain), want))
    each = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None))(
        torch.stack([plain[0], -plain[0]]), plain[1]
    )
    assert torch.equal(each[0][0], want[0])
    assert torch.allclose(each[1][1], want[1])
    leaves = [x.detach().requires_grad_() for x in plain]
    checkpoint(loss, *leaves, use_reentrant=False).backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(leaves, want, strict=True))


def test_opcheck():
    q, k = (queries(n, torch.float32).detach().transpose(1, 2).requires_grad_() for n in (4, 2))
    given = q, k, *weights(torch.float32), *tables(5, 32)
    torch.library.opcheck(overloads["qk_norm_rotary"], given, {"needs_k_out": True})
    torch.library.opcheck(overloads["qk_norm_rotary"], (q, None, None, None, *given[4:]))


def test_gradients_are_the_same_every_time():
    """Whatever the number of threads."""
    q, (weight, _) = queries(8, torch.bfloat16, sequences=4, tokens=128), weights(torch.bfloat16)
    cos, sin = tables(128, 32)
    found, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        y = gander.qk_norm_rotary(q, None, weight, None, cos, sin, 1e-6)[0]
        found.append(torch.autograd.grad(y.float().square().sum(), (q, weight)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_arrays():
    x, weight = (
        np.random.default_rng(0).standard_normal((2, 4, 5, 16), np.float32),
        np.full(16, 2, np.float32),
    )
    cos, sin = (t.numpy() for t in tables(5, 8))
    given = x, x[:, :1], weight, None, cos, sin
    got = gander.qk_norm_rotary(*given, eps=1e-6)
    want = gander.qk_norm_rotary(*(a if a is None else torch.from_numpy(a) for a in given), eps=1e-6)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(got, want, strict=True))


REFUSED = {
    "casting_mode is 'half', expected None or 'llama' or 'gemma'": dict(casting_mode="half"),
    "qk_norm_rotary_forward: q_weight has shape (8,), expected (16,): one for each column of q": dict(
        q_weight=torch.ones(8)
    ),
    "qk_norm_rotary_forward: weight_offset is 1 without a weight, expected 0; pass the weights": dict(
        weight_offset=1.0
    ),
    "qk_norm_rotary_forward: eps is -1, expected 0 or more": dict(eps=-1.0),
    "q has shape (3, 4), expected (..., heads, tokens, columns) of rank 3 or more; reshape it": dict(
        q=torch.ones(3, 4)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    given = dict(q=torch.ones(2, 4, 5, 16), k=None, q_weight=None, k_weight=None, eps=1e-6)
    given |= dict(cos=torch.ones(5, 8), sin=torch.ones(5, 8))
    with pytest.raises(ValueError) as error:
        gander.qk_norm_rotary(**given | REFUSED[message])
    assert str(error.value) == message
