"""RMSNorm of heads and rotary embeddings in one pass: qk_norm=True."""

import copy
import io
import pickle

import accelerate
import gander.hf
import models
import peft
import pytest
import torch
import torch._dynamo.testing
from gander.hf import _heads
from test_models import F32, assert_near, gradients
from transformers.models.qwen3 import modeling_qwen3 as qwen3

FAMILIES = pytest.mark.parametrize("family", ["Qwen3", "Qwen3-MoE", "Qwen3.5", "Gemma3"])


@pytest.fixture
def calls(monkeypatch):
    """The casting modes with which qk_norm_rotary was called."""
    found, original = [], gander.qk_norm_rotary

    def called(*args, **options):
        found.append(options["casting_mode"])
        return original(*args, **options)

    monkeypatch.setattr(gander, "qk_norm_rotary", called)
    return found


def on_gander(family, dtype=torch.bfloat16, loss="cross_entropy", **others):
    model = models.model(family, dtype, **others)
    report = gander.hf.apply(model, loss=loss, qk_norm=True)
    (entry,) = [e for e in report.replaced if e.kind == "qk_norm"]
    assert entry.detail == "qk_norm_rotary, for q_norm and k_norm"
    return model


def attentions(model):
    return [m for n, m in model.named_modules() if n.endswith("self_attn")]


@FAMILIES
def test_logits_have_the_bits_of_eager(family, calls):
    equal = 0
    with torch.no_grad():
        for seed in range(3):
            model, batch = models.model(family, seed=seed).eval(), models.batch(seed=seed)
            expected = model(**batch).logits
            report = gander.hf.apply(model, qk_norm=True)
            calls.clear()
            equal += torch.equal(model(**batch).logits, expected)
            assert calls == [("gemma" if family in ("Gemma3", "Qwen3.5") else "llama")] * len(
                attentions(model)
            )
            assert [e.module for e in report.replaced if e.kind == "qk_norm"]
            assert not [e for e in report.left if e.kind == "qk_norm"]
            gander.hf.undo(model)
            assert not any(isinstance(m, _heads.HeadNorm) for m in model.modules())
            calls.clear()
            assert torch.equal(model(**batch).logits, expected) and not calls
    assert equal >= 2  # the order of a norm's float32 sum rarely changes a bit


@FAMILIES
@pytest.mark.parametrize("loss", ["cross_entropy", "linear"])
def test_loss_and_gradients(family, loss):
    eager, ours, batch = models.model(family, F32), on_gander(family, F32, loss), models.batch()
    assert_near(gradients(ours, batch), gradients(eager, batch), 5e-5)


@FAMILIES
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_eager(family):
    batch = models.batch(rows=4, length=33)
    eager, ours, exact = models.model(family), on_gander(family), models.model(family, F32)
    exact.load_state_dict(eager.state_dict())
    expected = gradients(exact, batch)

    def error(model):
        found = gradients(model, batch)
        errors = [(found[n].double() - e).norm() / e.norm() for n, e in expected.items() if e.norm() > 0]
        return torch.stack(errors).mean().item()

    assert error(ours) <= 1.1 * error(eager)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, calls):
    ours, batch = on_gander("Qwen3", F32).train(), models.batch()
    expected = gradients(ours, batch)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    calls.clear()
    assert_near(gradients(ours, batch), expected, 1e-5)
    assert len(calls) == 4


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_compiled_without_a_break_in_the_graph(family):
    eager, ours = models.model(family, F32, num_hidden_layers=1), on_gander(family, F32, num_hidden_layers=1)
    for model in eager, ours:
        model.config.use_cache = False
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    found = gradients(torch.compile(ours, fullgraph=True, backend=counter), models.batch())
    assert counter.frame_count == 1 and "qk_norm_rotary" in str(counter.graphs[-1].graph)
    expected = gradients(eager, models.batch())
    assert_near({n.removeprefix("_orig_mod."): g for n, g in found.items()}, expected, 5e-5)


def test_generate(calls):
    model, prompt = models.model("Qwen3", F32).eval(), models.batch()["input_ids"][:, :5]
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    options |= dict(attention_mask=torch.ones_like(prompt))
    expected = model.generate(prompt, **options)
    gander.hf.apply(model, qk_norm=True)
    calls.clear()
    assert torch.equal(model.generate(prompt, **options), expected)
    assert len(calls) == 2 * 6


def test_autocast(calls):
    """The norm of bfloat16 with a float32 weight is float32, beside tables of that type."""
    eager, ours, batch = models.model("Qwen3", F32), on_gander("Qwen3", F32), models.batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = eager(**batch), ours(**batch)
    assert (a.logits - b.logits).abs().max() <= 0.02 * a.logits.abs().max()


def test_copies_and_pickles_train_their_own_weights(calls):
    model, batch = on_gander("Qwen3", F32), models.batch()
    expected = gradients(model, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    gander.hf.undo(model)
    model.zero_grad()
    for copied in copies:
        calls.clear()
        found = gradients(copied, batch)
        assert len(calls) == 2 and all(torch.equal(found[name], g) for name, g in expected.items())
    assert all(p.grad is None for p in model.parameters())


def test_another_model_of_the_class_stays_as_it_is(calls):
    ours, other = on_gander("Qwen3"), models.model("Qwen3")
    calls.clear()
    other(**models.batch())
    assert not calls and type(other.model.layers[0].self_attn.q_norm).__mro__[1] is torch.nn.Module
    gander.hf.apply(ours)  # which says that they are computed apart
    calls.clear()
    ours(**models.batch())
    assert not calls


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_trains_the_norms_of_heads(order, calls):
    def wrapped(model):
        torch.manual_seed(0)
        targets = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["q_norm", "k_norm"])
        return peft.get_peft_model(model, targets)

    expected = gradients(wrapped(models.model("Qwen3", F32)), models.batch())
    assert any("q_norm" in name for name in expected) and any("lora" in name for name in expected)
    model = models.model("Qwen3", F32)
    if order == "before":
        gander.hf.apply(model, qk_norm=True)
    model = wrapped(model)
    if order == "after":
        report = gander.hf.apply(model, qk_norm=True)
        assert any(e.kind == "qk_norm" for e in report.replaced)
    calls.clear()
    assert_near(gradients(model, models.batch()), expected, 5e-5)
    assert len(calls) == 2


def test_hooks_get_tensors(calls):
    ours, batch, seen = on_gander("Qwen3").eval(), models.batch(), []
    expected = ours(**batch).logits
    calls.clear()
    first, second = attentions(ours)
    first.q_norm.register_forward_hook(lambda module, args, result: seen.append(result))
    second.k_norm.register_forward_pre_hook(lambda module, args: None)
    assert torch.equal(ours(**batch).logits, expected)
    assert [type(result) for result in seen] == [torch.Tensor] and not calls


def test_offloaded_norms(calls):
    """accelerate takes the weights away after the norm's own call."""
    model, batch = models.model("Qwen3", F32).eval(), models.batch()
    expected = model(**batch).logits
    gander.hf.apply(model, qk_norm=True)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    calls.clear()
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert not calls


def test_norms_that_differ_are_computed_apart(calls):
    """Of epsilons and of weights of another type, which may change after apply."""
    for change in (
        lambda attention: setattr(attention.k_norm, "variance_epsilon", 1e-2),
        lambda attention: attention.q_norm.float(),
    ):
        eager, ours = models.model("Qwen3").eval(), on_gander("Qwen3").eval()
        for model in eager, ours:
            change(attentions(model)[0])
        calls.clear()
        batch = models.batch()
        try:
            expected = eager(**batch).logits
        except RuntimeError as error:  # queries and keys of different types
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                ours(**batch)
            continue
        assert torch.equal(ours(**batch).logits, expected)
        assert len(calls) == 1  # of the other layer


def test_whatever_touches_it_gets_the_norm():
    model = on_gander("Qwen3")
    norm = attentions(model)[0].q_norm
    x, other = torch.randn(2, 5, 4, 16).bfloat16(), torch.randn(2, 5, 4, 16).bfloat16()
    expected = norm.norm(x)
    uses = {
        "sum": lambda y: y + other,
        "difference": lambda y: other - y,
        "negative": lambda y: -y,
        "part": lambda y: y[:, 1],
        "method": lambda y: y.reshape(-1, 16),
        "attribute": lambda y: torch.tensor(y.shape),
        "function": lambda y: torch.cat([y, other], -1),
        "keyword": lambda y: torch.stack(tensors=[other, y]),
        "list": lambda y: torch.stack(list(y)),
        "comparison": lambda y: y > other,
        "last dimension": lambda y: y.transpose(-1, 1),
        "other dimensions": lambda y: y.transpose(1, 2).transpose(0, 1) * 2,
        "rows": lambda y: torch.tensor(len(y)),
        "both": lambda y: y @ y.transpose(-1, -2),
    }
    for name, use in uses.items():
        waiting = norm(x)
        assert isinstance(waiting, _heads.Normed)
        assert torch.equal(use(waiting), use(expected)), name
    with pytest.raises(TypeError, match="cannot be written to"):
        norm(x)[0] = other[0]
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(norm(x))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        norm(x).nothing()


def test_what_is_left_has_a_reason():
    reasons = {
        "Llama": "it has no norms that gander computes",
        "Olmo2": "it does not rotate the results of two norms, as they are",
        "Gemma4": "it does not rotate the results of two norms, as they are",
    }
    for family, reason in reasons.items():
        report = gander.hf.apply(models.model(family), qk_norm=True)
        assert {e.detail for e in report.left if e.kind == "qk_norm"} == {reason}
        assert not any(e.kind == "qk_norm" for e in report.replaced)
        assert f"qk_norm  {report.left[-1].module}" in str(report)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class WithFactor(qwen3.Qwen3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (0.5 * self.q_norm(q)).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None


def test_a_factor_between_norm_and_rotary_is_seen():
    model, expected = models.model("Qwen3").eval(), models.model("Qwen3").eval()
    for one in model, expected:
        for attention in attentions(one):
            attention.__class__ = WithFactor
    report = gander.hf.apply(model, qk_norm=True)
    assert {e.detail for e in report.left} == {"it does not rotate the results of two norms, as they are"}
    assert torch.equal(model(**models.batch()).logits, expected(**models.batch()).logits)


def test_a_wrong_rotary_embedding_is_seen(monkeypatch):
    """One pass is compared with the norm's class and the function, one after the other."""
    original = gander.qk_norm_rotary
    monkeypatch.setattr(
        gander, "qk_norm_rotary", lambda *a, **options: original(*a, **options | {"eps": 3.0})
    )
    report = gander.hf.apply(models.model("Qwen3"), qk_norm=True)
    assert {e.detail.partition("(")[0] for e in report.left} == {"qk_norm_rotary computes something else "}


def test_arguments():
    model = models.model("Qwen3")
    with pytest.raises(TypeError, match="qk_norm is 1, expected True or False"):
        gander.hf.apply(model, qk_norm=1)
    for missing in "norms", "rotary":
        with pytest.raises(ValueError, match="expected False without norms and rotary"):
            gander.hf.apply(model, qk_norm=True, **{missing: False})
    with gander.hf.patched(qk_norm=True) as reports:
        models.model("Qwen3")
    assert any(e.kind == "qk_norm" for e in reports[0].replaced)
