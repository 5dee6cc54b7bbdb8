"""Rotary position embeddings: what functions compute is found by running them, and one attention changes."""

import copy
import pickle

import gander.hf
import models
import pytest
import torch
import torch._dynamo.testing
from gander.hf import _rotary
from gander.hf._probe import Left
from transformers.models.llama import modeling_llama as llama

ALL = pytest.mark.parametrize("family", models.FAMILIES)
ONLY = dict(norms=False, mlp=False, loss=None)


@ALL
def test_logits_have_the_bits_of_eager(family):
    model, batch = models.model(family).eval(), models.batch()
    with torch.no_grad():
        expected = model(**batch).logits
        report = gander.hf.apply(model, **ONLY)
        assert torch.equal(model(**batch).logits, expected)
        assert {e.kind for e in report.replaced} == (set() if family == "Llama4" else {"rotary"})
        gander.hf.undo(model)
        assert torch.equal(model(**batch).logits, expected)


def test_globals_of_a_copy_name_no_module():
    """By that name Dynamo of torch 2.10 and 2.11 finds the module's function in place of the copy's. Then it
    fails on guards, or computes what eager does."""
    model = models.model("Llama")
    gander.hf.apply(model, **ONLY)
    function = type(model.model.layers[0].self_attn).forward
    while "apply_rotary_pos_emb" not in function.__code__.co_names:
        function = function.__wrapped__
    assert function.__globals__["apply_rotary_pos_emb"] is not llama.apply_rotary_pos_emb
    assert "__name__" not in function.__globals__


@pytest.mark.parametrize("family", ["Llama", "GLM4", "GptOss", "Gemma4"])
def test_gradients_have_the_bits_of_eager(family):
    eager, ours = (models.model(family) for _ in range(2))
    gander.hf.apply(ours, **ONLY)
    for model in eager, ours:
        model(**models.batch()).loss.backward()
    for (name, a), (_, b) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name


def test_it_is_called(monkeypatch):
    """The attention of one model calls rotary, and that of another transformers' function, as before."""
    calls, original = [], gander.rotary
    monkeypatch.setattr(
        gander, "rotary", lambda *given, **options: calls.append(1) or original(*given, **options)
    )
    ours, other, batch = models.model("Llama"), models.model("Llama"), models.batch()
    function = llama.apply_rotary_pos_emb
    gander.hf.apply(ours, **ONLY)
    probing = len(calls)
    ours(**batch)
    assert len(calls) - probing == 2
    other(**batch)
    assert len(calls) - probing == 2
    assert llama.apply_rotary_pos_emb is function
    assert type(other.model.layers[0].self_attn) is llama.LlamaAttention
    copied = copy.deepcopy(ours)
    gander.hf.undo(ours)
    ours(**batch)
    assert len(calls) - probing == 2
    copied(**batch)
    assert len(calls) - probing == 4
    pickle.loads(pickle.dumps(copied))(**batch)
    assert len(calls) - probing == 6


def test_compiled():
    model, batch = models.model("Qwen3").eval(), models.batch()
    gander.hf.apply(model, **ONLY)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        expected = model(**batch).logits
        got = torch.compile(model, backend=counter, fullgraph=True)(**batch).logits
    assert torch.allclose(got, expected, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 1


def half_turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def scaled(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return tuple(2 * (x * cos + half_turned(x) * sin) for x in (q, k))


def once(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t.unsqueeze(unsqueeze_dim).float() for t in (cos, sin))
    return tuple((x.float() * cos + half_turned(x.float()) * sin).to(x.dtype) for x in (q, k))


def doubled(q, k, cos, sin, unsqueeze_dim=1):
    """Tables for pairs, or for elements."""
    if cos.shape[-1] != q.shape[-1]:
        cos, sin = (torch.cat([t, t], -1) for t in (cos, sin))
    return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def only_q(q, k, cos, sin, unsqueeze_dim=1):
    return once(q, k, cos, sin)[0], k


def complex_numbers(xq, xk, freqs_cis):
    return xq, xk


def broken(q, k, cos, sin, unsqueeze_dim=1):
    raise KeyError("no such table")


def flat(q, k, cos, sin, unsqueeze_dim=1):
    return q.flatten(), k.flatten()


def test_what_a_function_computes():
    assert _rotary._find(llama.apply_rotary_pos_emb) == {4: "halves"}
    assert _rotary._find(once) == {4: "halves, rounded once"}
    assert _rotary._find(doubled) == {4: "halves", 2: "pairs"}
    for function, reason in {
        scaled: "it computes none of the known forms",
        only_q: "it computes none of the known forms",
        complex_numbers: "it takes xq, xk, freqs_cis, expected q, k, cos, sin, unsqueeze_dim",
        broken: "it raises KeyError: 'no such table'",
        flat: "it returns other shapes than it takes",
    }.items():
        with pytest.raises(Left, match=reason):
            _rotary._find(function)


def test_other_calls_keep_their_results():
    """Tables of another dtype or with a gradient: the function itself is called."""
    rotate = _rotary._replacement(llama.apply_rotary_pos_emb).function
    q, k = torch.randn(2, 4, 5, 16).bfloat16(), torch.randn(2, 2, 5, 16).bfloat16()
    for tables in (
        torch.randn(2, 2, 5, 16),  # float32: so is the result
        torch.randn(2, 2, 5, 16).bfloat16().requires_grad_(),
    ):
        want, got = (f(q, k, *tables) for f in (llama.apply_rotary_pos_emb, rotate))
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert want[0].requires_grad == got[0].requires_grad
    for one, tables in (
        (q[:, :, :1], torch.randn(2, 2, 5, 16).bfloat16()),  # which are broadcast
        (q, torch.randn(2, 2, 1, 16).bfloat16()),
        (q[:1], torch.randn(2, 2, 5, 16).bfloat16()),
    ):
        want, got = (f(one, one, *tables) for f in (llama.apply_rotary_pos_emb, rotate))
        assert all(map(torch.equal, want, got))
    with pytest.raises(RuntimeError):  # as the function does
        rotate(q, k, *torch.randn(2, 2, 5, 8).bfloat16())
    cos, sin = torch.randn(2, 2, 5, 16).bfloat16()
    turned = q.transpose(1, 2), k.transpose(1, 2)
    want, got = (f(*turned, cos, sin, unsqueeze_dim=2) for f in (llama.apply_rotary_pos_emb, rotate))
    assert all(map(torch.equal, want, got))
    with pytest.raises(RuntimeError):
        rotate(q, k, cos, sin, 3)
