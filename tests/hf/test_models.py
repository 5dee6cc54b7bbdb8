"""Tiny models of each family on gander, next to the same models without it."""

import gander.hf
import models
import pytest
import torch
import torch._dynamo.testing

ALL = pytest.mark.parametrize("family", models.FAMILIES)
LOSSES = pytest.mark.parametrize("loss", ["cross_entropy", "linear"])
F32 = torch.float32

# What is left, by the class and a part of the reason. In every other family all norms and MLPs are replaced.
LEFT = {
    "Qwen3.5": {("norm", "Qwen3_5RMSNormGated", "missing 1 required positional argument")},
    "Gemma4": {("mlp", "Gemma4TextDecoderLayer", "is no linear layer")},
    "DeepSeek-V3": {("rotary", "DeepseekV3Attention", "apply_rotary_pos_emb_interleave: it takes q, k,")},
    "Llama4": {("rotary", "Llama4TextAttention", "apply_rotary_emb: it takes xq, xk, freqs_cis,")},
    "GptOss": {("mlp", "GptOssExperts", "its gate is none of the known activations")},
}
MAPPED = {"Gemma2": ", softcap ", "Granite": ", scale "}  # what models do to their head's result
FORMS = {
    "rmsnorm, rounded once": {"Gemma4", "Gemma4, experts", "GptOss", "Olmo2"},
    "rmsnorm, times 1 + weight": {"Qwen3.5", "Gemma2", "Gemma3"},
}
WITHOUT_MLP = {"GptOss"}


def form_of(family):
    return next(
        (f for f, families in FORMS.items() if family in families), "rmsnorm, rounded before the weight"
    )


def pair(family, dtype=torch.bfloat16, loss="cross_entropy", **others):
    """The same model twice, the second on gander."""
    eager, ours = (models.model(family, dtype, **others) for _ in range(2))
    gander.hf.apply(ours, loss=loss)
    return eager, ours


def gradients(model, batch, **options):
    model.zero_grad()
    model(**batch, **options).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found, expected, tolerance):
    """The errors are a small part of the largest element."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        error = (found[name].double() - one.double()).abs().max().item()
        assert error <= tolerance * one.double().abs().max().item() + 1e-9, (name, error)


@ALL
def test_the_report_names_what_is_replaced_and_what_is_left(family):
    model = models.model(family)
    names = [*model.state_dict()]
    report = gander.hf.apply(model)
    left = {(e.kind, e.module) for e in report.left}
    assert left == {entry[:2] for entry in LEFT.get(family, set())}
    for kind, module, reason in LEFT.get(family, set()):
        assert any((e.kind, e.module) == (kind, module) and reason in e.detail for e in report.left)
    norms = {e.detail for e in report.replaced if e.kind == "norm"}
    assert norms - {"rmsnorm without a weight"} == {form_of(family)}
    assert any(e.kind == "mlp" for e in report.replaced) == (family not in WITHOUT_MLP)
    assert [e.detail for e in report.replaced if e.kind == "loss"] == ["cross_entropy"]
    assert [*model.state_dict()] == names
    for entry in report.replaced:
        assert entry.module in str(report) and entry.detail in str(report)


@ALL
def test_the_linear_loss_is_taken_where_it_is_the_same(family):
    report = gander.hf.apply(models.model(family), loss="linear")
    details = [e.detail for e in report.replaced if e.kind == "loss"]
    assert len(details) == 1
    assert details[0].startswith("linear_cross_entropy, in the head" + MAPPED.get(family, ""))
    assert ("scale" in details[0] or "softcap" in details[0]) == (family in MAPPED)


@ALL
def test_logits_have_the_bits_of_eager(family):
    """MLPs always. The order of a norm's float32 sum may differ, which rarely changes a bit."""
    equal = 0
    for seed in range(3):
        model, batch = models.model(family, seed=seed).eval(), models.batch(seed=seed)
        with torch.no_grad():
            expected = model(**batch).logits
            gander.hf.apply(model, norms=False, loss=None)
            assert torch.equal(model(**batch).logits, expected), "MLPs"
            gander.hf.apply(model)
            equal += torch.equal(model(**batch).logits, expected)
            gander.hf.undo(model)
            assert torch.equal(model(**batch).logits, expected), "undone"
    assert equal >= 2


@ALL
@LOSSES
def test_loss_and_gradients(family, loss):
    eager, ours = pair(family, F32, loss)
    for options in {}, {"num_items_in_batch": torch.tensor(40)}:
        batch = models.batch()
        a, b = eager(**batch, **options).loss, ours(**batch, **options).loss
        assert b.dtype == a.dtype and abs(a - b) <= 2e-6 * a, (a, b)
        assert_near(gradients(ours, batch, **options), gradients(eager, batch, **options), 5e-5)


@ALL
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_eager(family):
    batch = models.batch(rows=4, length=33)
    eager, ours = pair(family)
    exact = models.model(family, F32)
    exact.load_state_dict(eager.state_dict())
    expected = gradients(exact, batch)

    def error(model):
        found = gradients(model, batch)
        errors = [(found[n].double() - e).norm() / e.norm() for n, e in expected.items() if e.norm() > 0]
        return torch.stack(errors).mean().item()

    assert error(ours) <= 1.1 * error(eager)


@ALL
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(family, cache):
    model = models.model(family, F32).eval()
    prompt = models.batch()["input_ids"][:, :5]
    options = dict(max_new_tokens=8, do_sample=False, cache_implementation=cache, eos_token_id=None)
    options |= dict(attention_mask=torch.ones_like(prompt), disable_compile=True)
    expected = model.generate(prompt, **options)
    gander.hf.apply(model, loss="linear")
    assert torch.equal(model.generate(prompt, **options), expected)


@ALL
@LOSSES
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, loss, reentrant):
    _, ours = pair(family, F32, loss)
    ours.train()
    batch = models.batch()
    expected = gradients(ours, batch)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    assert_near(gradients(ours, batch), expected, 1e-5)


@ALL
def test_autocast(family):
    eager, ours = pair(family, F32)
    batch = models.batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = eager(**batch), ours(**batch)
    assert a.logits.dtype == b.logits.dtype
    scale = a.logits.float().abs().max()
    assert (a.logits.float() - b.logits.float()).abs().max() <= 0.02 * scale
    assert abs(a.loss - b.loss) <= 1e-3 * a.loss


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "Gemma4, experts"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_served_in_a_loop_and_in_batches(family, implementation, monkeypatch):
    model, batch = models.model(family).eval(), models.batch()
    model.set_experts_implementation(implementation)
    experts = next(m for n, m in model.named_modules() if n.endswith("experts") and hasattr(m, "_apply_gate"))
    expected = model(**batch).logits
    gander.hf.apply(model, norms=False)
    assert torch.equal(model(**batch).logits, expected)
    swiglu, geglu, calls = gander.swiglu, gander.geglu, []
    for name, function in ("swiglu", swiglu), ("geglu", geglu):
        monkeypatch.setattr(gander, name, lambda *a, f=function, **kw: (calls.append(1), f(*a, **kw))[1])
    tokens = torch.randn(6, 64, dtype=torch.bfloat16)
    experts(tokens, torch.randint(4, (6, 2)), torch.rand(6, 2, dtype=torch.bfloat16))
    assert len(calls) >= (2 if implementation == "eager" else 1)


@pytest.mark.parametrize(
    "family, loss, order",
    [
        ("Llama", "linear", "before"),
        ("Llama", "cross_entropy", "after"),
        ("Mixtral", "cross_entropy", "before"),
        ("Gemma3", "linear", "before"),
        ("Phi3", "cross_entropy", "before"),
    ],
)
def test_compiled_without_a_break_in_the_graph(family, loss, order):
    eager, ours = (
        models.model(family, F32, num_hidden_layers=1),
        models.model(family, F32, num_hidden_layers=1),
    )
    for model in eager, ours:
        if family == "Mixtral":  # a loop over the experts that are hit is no graph
            model.set_experts_implementation("batched_mm")
        model.config.use_cache = False
    batch = models.batch()
    if order == "before":
        gander.hf.apply(ours, loss=loss)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    if order == "after":
        compiled(**batch)
        gander.hf.apply(compiled, loss=loss)
    found = gradients(compiled, batch)
    text = str(counter.graphs[-1].graph)
    assert "rmsnorm" in text and "glu" in text and "cross_entropy" in text
    expected = gradients(eager, batch)
    assert_near({n.removeprefix("_orig_mod."): g for n, g in found.items()}, expected, 5e-5)


def test_compiled_by_inductor():
    eager, ours = pair("Llama", F32, "linear", num_hidden_layers=1)
    batch = models.batch()
    compiled = torch.compile(ours, fullgraph=True)
    found = gradients(compiled, batch)
    expected = gradients(eager, batch)
    assert_near({n.removeprefix("_orig_mod."): g for n, g in found.items()}, expected, 5e-5)
