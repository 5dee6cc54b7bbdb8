"""Rotary position embeddings: rotary and apply_rotary_emb."""

import gander
import numpy as np
import pytest
import torch
from gander._torch.registry import overloads
from torch.utils.checkpoint import checkpoint

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


def half_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def pairs_turned(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def reference(x, cos, sin, interleaved=False):
    """What transformers computes, of x's first columns. cos and sin have a number for each element."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    y = turned * cos + (pairs_turned if interleaved else half_turned)(turned) * sin
    return torch.cat([y, rest], -1)


def per_element(table, interleaved=False):
    """A table with a number for each element, from one with a number for each pair."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def tables(*shape, dtype=torch.float32):
    angles = torch.randn(shape, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def queries(heads, dtype, columns=64, sequences=2, tokens=5):
    """As models have them: a view with heads before tokens."""
    x = torch.randn(sequences, tokens, heads, columns, dtype=torch.float64).to(dtype)
    return x.transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_of_transformers(dtype, interleaved):
    """casting_mode llama has the bits of torch's operators, and so have its gradients."""
    q, k = queries(4, dtype), queries(2, dtype)
    cos, sin = (per_element(t, interleaved) for t in tables(2, 5, 32, dtype=dtype))
    results = gander.rotary(q, k, cos, sin, interleaved, casting_mode="llama")
    expected = [reference(x, cos[:, None], sin[:, None], interleaved) for x in (q, k)]
    upstream = [torch.randn_like(y) for y in expected]
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.contiguous().transpose(1, 2).contiguous().transpose(1, 2).stride()
    assert all(
        map(
            torch.equal,
            torch.autograd.grad(results, (q, k), upstream),
            torch.autograd.grad(expected, (q, k), upstream),
        )
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns, rotated", [(64, 64), (48, 12), (9, 4)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error(dtype, columns, rotated, interleaved):
    """Rounded once, errors are at most those of torch's operators. Tables are for pairs, or for elements."""
    q, k = queries(3, dtype, columns), queries(1, dtype, columns)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    for_pairs = tables(5, rotated // 2, dtype=table)
    for_elements = [per_element(t, interleaved) for t in for_pairs]
    results = gander.rotary(q, k, *for_pairs, interleaved)
    again = gander.rotary(q, k, *(t.expand(1, *t.shape) for t in for_elements), interleaved)
    assert all(map(torch.equal, results, again))
    for x, y in zip((q, k), results, strict=True):
        exact = reference(x.double(), *(t.double() for t in for_elements), interleaved)
        rough = reference(x, *(t.to(dtype) for t in for_elements), interleaved)
        error, rough = ((other.double() - exact).square().mean().sqrt() for other in (y, rough))
        assert error <= 1.1 * rough + 1e-15
        upstream = torch.randn_like(y)
        (gradient,) = torch.autograd.grad(y, x, upstream, retain_graph=True)  # of both
        exact = torch.autograd.grad((exact * upstream.double()).sum(), x)[0]
        assert torch.allclose(gradient.double(), exact.double(), rtol=2.0**-7, atol=1e-2)


def test_one_result_alone():
    """Only the loss of q, or of k, and gradients of one of them alone."""
    q, k = queries(4, torch.float32), queries(2, torch.float32)
    cos, sin = tables(5, 32)
    both = gander.rotary(q, k, cos, sin)
    gy = [torch.randn_like(y) for y in both]
    wanted = torch.autograd.grad(both, (q, k), gy)
    for index in (0, 1):
        y = gander.rotary(q, k, cos, sin)[index]
        assert torch.equal(torch.autograd.grad(y, (q, k)[index], gy[index])[0], wanted[index])
        given = [x if i == index else x.detach() for i, x in enumerate((q, k))]
        y = gander.rotary(*given, cos, sin)[index]
        assert torch.equal(torch.autograd.grad(y, given[index], gy[index])[0], wanted[index])
    y, nothing = gander.rotary(q, None, cos, sin)
    assert nothing is None
    assert torch.equal(torch.autograd.grad(y, q, gy[0])[0], wanted[0])


def test_inplace():
    q, k = (queries(n, torch.bfloat16).detach() for n in (4, 2))
    cos, sin = tables(5, 32)
    want = gander.rotary(q, k, cos, sin)
    got = gander.rotary(q, k, cos, sin, inplace=True)
    assert got[0] is q
    assert got[1] is k
    assert all(map(torch.equal, got, want))
    fused = torch.randn(2, 5, 6, 64)  # a projection's result: heads of q, then of k
    q, k = fused[:, :, :4], fused[:, :, 4:]
    want = gander.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    gander.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, inplace=True)
    assert torch.equal(q.transpose(1, 2), want[0])
    assert torch.equal(k.transpose(1, 2), want[1])
    with pytest.raises(NotImplementedError, match="rotary_ expected no gradient, and q requires one"):
        gander.rotary(queries(1, torch.float32), None, cos, sin, inplace=True)


def test_strides():
    """Heads before tokens, slices of a buffer and expanded tables are read where they are."""
    q, k = (torch.randn(2, 5, 12, 64)[:, :, at : at + n].transpose(1, 2) for at, n in ((0, 8), (8, 4)))
    cos, sin = (per_element(t).expand(2, 5, 64) for t in tables(5, 32))
    q_out, k_out = (torch.empty(2, 5, n, 64) for n in (8, 4))
    for name, x in {"q": q, "k": k, "cos": cos, "sin": sin}.items():
        x.requires_grad_(False)
        assert not x.is_contiguous(), name
    want = [reference(x, cos[:, None], sin[:, None]) for x in (q, k)]
    got = gander.rotary(q, k, cos, sin)
    for y, z in zip(got, want, strict=True):
        assert torch.allclose(y, z, atol=1e-6)
    for x, out in ((q, q_out), (k, k_out)):  # the results have the strides of transposed (B, S, H, D)
        assert gander.rotary(x, None, cos, sin)[0].stride() == out.transpose(1, 2).stride()


def emb(x, cos, sin, positions):
    """apply_rotary_emb of tokens (N, H, D) at these positions; -1 copies."""
    rows = per_element(cos)[positions][:, None], per_element(sin)[positions][:, None]
    turned = reference(x, *(row.to(x.dtype) for row in rows))
    return torch.where((torch.tensor(positions) < 0)[:, None, None], x, turned)


def test_apply_rotary_emb():
    x, (cos, sin) = torch.randn(2, 4, 3, 16), tables(12, 8)
    for offsets, per_sequence in (
        (None, (0, 0)),
        (3, (3, 3)),
        (torch.tensor([2, 5]), (2, 5)),
        (torch.tensor([2, 5], dtype=torch.int32), (2, 5)),
    ):
        y = gander.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
        for i, start in enumerate(per_sequence):
            assert torch.allclose(y[i], emb(x[i], cos, sin, [*range(start, start + 4)]), atol=1e-6)
        z = x.clone()
        assert gander.apply_rotary_emb(z, cos, sin, inplace=True, seqlen_offsets=offsets) is z
        assert torch.equal(z, y)


def test_cu_seqlens():
    x, (cos, sin) = torch.randn(9, 3, 16, requires_grad=True), tables(12, 8)
    ends = torch.tensor([1, 4, 4, 8], dtype=torch.int32)
    y = gander.apply_rotary_emb(x, cos, sin, cu_seqlens=ends, max_seqlen=4)
    want = emb(x, cos, sin, [-1, 0, 1, 2, 0, 1, 2, 3, -1])
    assert torch.allclose(y, want, atol=1e-6)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, x, upstream)[0]
    assert torch.allclose(got, torch.autograd.grad(want, x, upstream)[0], atol=1e-6)
    offsets = torch.tensor([2, 0, 1])
    y = gander.apply_rotary_emb(x, cos, sin, cu_seqlens=ends, seqlen_offsets=offsets)
    assert torch.allclose(y, emb(x, cos, sin, [-1, 2, 3, 4, 1, 2, 3, 4, -1]), atol=1e-6)


def test_beyond_the_table():
    """A position that only the device knows: NaN, and the neighbours' elements are right."""
    x, (cos, sin) = torch.randn(2, 4, 1, 8), tables(4, 4)
    y = gander.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([0, 1]))
    assert torch.equal(y[0], gander.apply_rotary_emb(x, cos, sin)[0])
    assert y[1].isnan().flatten(1).any(1).tolist() == [False, False, False, True]
    message = "cos has 4 positions, expected those of the tokens, 1 to 4 with seqlen_offsets 1"
    with pytest.raises(ValueError, match=message):
        gander.apply_rotary_emb(x, cos, sin, seqlen_offsets=1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    q, k = queries(4, torch.bfloat16), queries(2, torch.bfloat16)
    cos, sin = map(per_element, tables(2, 5, 32, dtype=torch.bfloat16))

    def attend(q, k):
        q, k = gander.rotary(q, k, cos, sin, casting_mode="llama")
        return q @ k.repeat_interleave(2, 1).transpose(-1, -2)

    eager, compiled = attend(q, k), torch.compile(attend, fullgraph=True, backend=backend)(q, k)
    assert torch.allclose(eager, compiled, rtol=1e-2, atol=1e-2)
    upstream = torch.randn_like(eager)
    for a, b in zip(*(torch.autograd.grad(y, (q, k), upstream) for y in (eager, compiled)), strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-2)
    alone = torch.compile(lambda q, k: gander.rotary(q, k, cos, sin)[1], fullgraph=True, backend=backend)
    want = torch.autograd.grad(gander.rotary(q, k, cos, sin)[1].sum(), k)[0]
    assert torch.equal(torch.autograd.grad(alone(q, k).sum(), k)[0], want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphs_take_any_offset(backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, (cos, sin) = queries(4, torch.float32).detach().transpose(1, 2).requires_grad_(), tables(30, 32)

    def rotate(x, offset):
        return gander.apply_rotary_emb(x, cos, sin, seqlen_offsets=offset)

    compiled, upstream = torch.compile(rotate, fullgraph=True, backend=backend), torch.randn_like(x)
    for offset in range(2, 9):
        want, got = rotate(x, offset), compiled(x, offset)
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (got, want)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # of the first offset, and of any
    with pytest.raises(RuntimeError, match="cos has 30 positions, expected those of the tokens"):
        compiled(x, 29)


def test_exported():
    class Rotate(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return gander.rotary(q, k, cos, sin)

    given = *(queries(n, torch.float32).detach() for n in (4, 2)), *tables(5, 32)
    program = torch.export.export(
        Rotate(),
        given,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}, None, None),
    )
    assert any("rotary" in str(node.target) for node in program.graph.nodes)
    more = [torch.cat([x, -x, x]) for x in given[:2]]
    assert all(map(torch.equal, program.module()(*more, *given[2:]), gander.rotary(*more, *given[2:])))


def test_checkpointed():
    q, (cos, sin) = queries(2, torch.float32), tables(5, 32)
    want = torch.autograd.grad(gander.rotary(q, None, cos, sin)[0].square().sum(), q)[0]
    for reentrant in (False, True):
        leaf = q.detach().requires_grad_()
        y = checkpoint(lambda q: gander.rotary(q, None, cos, sin)[0], leaf, use_reentrant=reentrant)
        y.square().sum().backward()
        assert torch.equal(leaf.grad, want)


def test_transforms():
    """vmap, of all arguments or of some, and func.grad."""
    q, k = queries(4, torch.float32).detach(), queries(2, torch.float32).detach()
    cos, sin = (per_element(t) for t in tables(2, 5, 32))
    want = [
        torch.stack(y)
        for y in zip(*(gander.rotary(*x, cos, sin) for x in ((q, k), (-q, 2 * k))), strict=True)
    ]
    pair = torch.stack([q, -q]), torch.stack([k, 2 * k])
    for f, given, dims in (
        (gander.rotary, (*pair, cos, sin), (0, 0, None, None)),
        (gander.rotary, (*pair, *(t.expand(2, *t.shape) for t in (cos, sin))), 0),
    ):
        assert all(map(torch.equal, torch.func.vmap(f, dims)(*given), want))

    def loss(q):
        return gander.rotary(q, k, cos, sin)[0].square().sum()

    x = q.clone().requires_grad_()
    want = torch.autograd.grad(loss(x), x)[0]
    assert torch.equal(torch.func.grad(loss)(q), want)
    each = torch.func.vmap(torch.func.grad(loss))(pair[0])
    assert torch.equal(each[0], want)


def test_opcheck():
    q, k = (
        queries(4, torch.float32).detach().transpose(1, 2),
        queries(2, torch.float32).detach().transpose(1, 2),
    )
    cos, sin = tables(5, 32)
    for given, options in (
        ((q.clone().requires_grad_(), k.clone().requires_grad_(), cos, sin), {"needs_k_out": True}),
        ((q.clone().requires_grad_(), None, cos, sin), {"interleaved": True}),
        ((q, k, cos, sin, torch.tensor([0, 0])), {"round_products": True}),
    ):
        torch.library.opcheck(overloads["rotary"], given, options)
    torch.library.opcheck(overloads["rotary_"], (q.contiguous(), k.contiguous(), cos, sin))


def test_no_gradient_of_tables():
    q, (cos, sin) = queries(2, torch.float32), tables(5, 32)
    with pytest.raises(NotImplementedError, match="cos requires a gradient, but rotary has none for it"):
        gander.rotary(q, None, cos.requires_grad_(), sin)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        y = gander.rotary(q, None, cos.detach(), sin)[0]
        (g,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
        g.sum().backward()


def test_arrays():
    x, (cos, sin) = np.random.default_rng(0).standard_normal((2, 4, 5, 16), np.float32), tables(5, 8)
    k = np.ascontiguousarray(x[:, :2])
    want = gander.rotary(torch.from_numpy(x), torch.from_numpy(k), cos, sin)
    got = gander.rotary(x, k, cos.numpy(), sin.numpy())
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, np.ndarray)
        assert np.array_equal(a, b.numpy())
    turned = np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2)
    assert np.array_equal(gander.rotary(turned, None, cos.numpy(), sin.numpy())[0], want[0].numpy())
    assert gander.rotary(turned, None, cos.numpy(), sin.numpy(), inplace=True)[0] is turned
    assert np.array_equal(turned, want[0].numpy())
    y = gander.apply_rotary_emb(
        x, np.tile(cos.numpy(), (2, 1)), np.tile(sin.numpy(), (2, 1)), seqlen_offsets=1
    )
    assert y.shape == x.shape


REFUSED = {
    "q has shape (3, 4), expected (..., heads, tokens, columns) of rank 3 or more; reshape it": dict(
        q=torch.ones(3, 4)
    ),
    "k has shape (2, 2, 4, 16), expected (2, any, 5, 16), with any number of heads, as q": dict(
        k=torch.ones(2, 2, 4, 16)
    ),
    "rotary_forward: cos has 4 positions, expected those of the tokens, 0 to 4": dict(
        cos=torch.ones(4, 8), sin=torch.ones(4, 8)
    ),
    "rotary_forward: sin has shape (4, 8), expected (5, 8) as cos": dict(sin=torch.ones(4, 8)),
    "casting_mode is 'half', expected None or 'llama'": dict(casting_mode="half"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    given = dict(q=torch.ones(2, 4, 5, 16), k=None, cos=torch.ones(5, 8), sin=torch.ones(5, 8))
    with pytest.raises(ValueError) as error:
        gander.rotary(**given | REFUSED[message])
    assert str(error.value) == message
    with pytest.raises(TypeError, match=r"q is None, expected a torch\.Tensor"):
        gander.rotary(**given | dict(q=None))
    with pytest.raises(TypeError, match="k has dtype float64, expected float32"):
        gander.rotary(**given | dict(k=torch.ones(2, 4, 5, 16, dtype=torch.float64)))


def test_empty():
    cos, sin = tables(5, 32)
    for shape in ((0, 4, 5, 64), (2, 4, 0, 64), (2, 0, 5, 64)):
        q = torch.ones(shape, requires_grad=True)
        y, k = gander.rotary(q, q, cos, sin)
        assert y.shape == k.shape == q.shape
        y.sum().backward()
        assert q.grad.shape == q.shape
