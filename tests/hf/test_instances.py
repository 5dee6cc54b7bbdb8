"""One instance changes, in every way that a model is copied, wrapped, saved and loaded."""

import copy
import io
import pickle
import threading

import accelerate
import gander.hf
import models
import peft
import pytest
import torch
import transformers
from gander.hf import _mlp, _norms
from test_models import F32, LOSSES, assert_near, gradients, pair

KINDS = pytest.mark.parametrize("family", ["Llama", "Qwen3-MoE", "Gemma3"])


def classes(model):
    return [type(module) for module in model.modules()]


def test_another_model_of_the_class_stays_as_it_is():
    first, second = models.model("Qwen3"), models.model("Qwen3")
    before = classes(second)
    gander.hf.apply(first, loss="linear")
    assert classes(second) == before and second.loss_function is not first.loss_function
    gander.hf.apply(second)
    gander.hf.undo(first)
    assert classes(first) == before
    assert not any(a is b for a, b in zip(classes(second), before, strict=True) if "Norm" in b.__name__)


@KINDS
@LOSSES
def test_undo_leaves_nothing(family, loss):
    model = models.model(family)
    before = classes(model), [set(vars(m)) for m in model.modules()], model.loss_function
    gander.hf.apply(model, loss=loss)
    model(**models.batch())
    assert classes(model) != before[0]
    assert gander.hf.undo(model) is model
    assert (classes(model), [set(vars(m)) for m in model.modules()], model.loss_function) == before
    gander.hf.undo(model)


def test_apply_again_changes_to_what_it_says():
    model = models.model("Llama")
    before = classes(model)
    first = gander.hf.apply(model, loss="linear")
    assert str(gander.hf.apply(model, loss="linear")) == str(first)
    report = gander.hf.apply(model, norms=False, loss=None, rotary=False, mlp=False)
    assert (report.replaced, report.left) == ((), ()) and classes(model) == before


@KINDS
@LOSSES
def test_copies_train_their_own_parameters(family, loss):
    _, ours = pair(family, F32, loss)
    copied, batch = copy.deepcopy(ours), models.batch()
    expected = gradients(ours, batch)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert_near(gradients(copied, batch), expected, 0)
    gander.hf.undo(ours)
    assert models.on_gander(copied(**batch).loss)


@KINDS
@LOSSES
def test_a_pickle_is_on_gander(family, loss):
    _, ours = pair(family, F32, loss)
    batch, file = models.batch(), io.BytesIO()
    torch.save(ours, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert classes(loaded) == classes(ours) == classes(pickle.loads(pickle.dumps(ours)))
    assert_near(gradients(loaded, batch), gradients(ours, batch), 0)
    gander.hf.undo(loaded)
    assert classes(loaded) == classes(models.model(family))


@KINDS
@LOSSES
def test_saved_and_loaded(family, loss, tmp_path):
    eager, ours = pair(family, F32, loss)
    eager.save_pretrained(tmp_path / "eager")
    ours.save_pretrained(tmp_path / "ours")
    for name in "config.json", "model.safetensors":
        assert (tmp_path / "eager" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    with gander.hf.patched(loss=loss) as reports:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert classes(loaded) == classes(ours) and len(reports) == 1 and reports[0].replaced
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert classes(again) == classes(eager)
    batch = models.batch()
    # It has another implementation of attention.
    assert_near(gradients(loaded.train(), batch), gradients(ours, batch), 5e-5)


def test_patched_is_of_this_thread_and_ends():
    loaders = [vars(transformers.PreTrainedModel)[name] for name in ("from_pretrained", "_from_config")]
    seen = []
    with gander.hf.patched(rotary=False, mlp=False) as outer:
        with gander.hf.patched(norms=False) as inner:
            thread = threading.Thread(target=lambda: seen.append(models.model("Llama")))
            thread.start()
            thread.join()
            models.model("Llama")
        models.model("Llama")
    assert {e.kind for e in inner[0].replaced} == {"rotary", "mlp", "loss"} and len(inner) == 1
    assert {e.kind for e in outer[0].replaced} == {"norm", "loss"} and len(outer) == 1
    assert classes(seen[0]) == classes(models.model("Llama"))
    assert [vars(transformers.PreTrainedModel)[n] for n in ("from_pretrained", "_from_config")] == loaders


def test_outputs_have_logits_where_they_are_wanted():
    eager, ours = pair("Llama", F32, "linear")
    batch = models.batch()
    trained = ours(**batch)
    assert trained.logits is None and "logits" not in trained and len(trained) == 2  # with the cache
    for options in dict(logits_to_keep=1), dict(logits_to_keep=torch.tensor([3])):
        without = {"input_ids": batch["input_ids"]} | options
        torch.testing.assert_close(ours(**without).logits, eager(**without).logits)
    a, b = eager(**batch, return_dict=False), ours(**batch, return_dict=False)
    torch.testing.assert_close(a[:2], b[:2])
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, eager(**batch).logits)
    torch.testing.assert_close(ours.eval()(**batch).logits, eager(**batch).logits)


def test_shifted_labels_and_an_ignored_class():
    eager, ours = pair("Llama", F32, "linear")
    ids = models.batch()["input_ids"]
    shifted = ids.roll(-1, 1)
    for options in dict(shift_labels=shifted), dict(ignore_index=5), dict(num_items_in_batch=7):
        a, b = (model(input_ids=ids, labels=ids, **options).loss for model in (eager, ours))
        torch.testing.assert_close(a, b)


LORA = dict(r=4, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])


@LOSSES
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head", "norm"]}, {"head": True}], ids=str)
def test_peft(loss, order, more):
    def wrapped(model):
        targets = LORA["target_modules"] + ["lm_head"] * ("head" in more)
        saved = more.get("modules_to_save")
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved))

    def start(model):
        torch.manual_seed(3)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
            elif "lora_A" in name:
                torch.nn.init.normal_(parameter)

    eager, ours = models.model("Llama", F32), models.model("Llama", F32)
    eager = wrapped(eager)
    if order == "before":
        report = gander.hf.apply(ours, loss=loss)
        ours = wrapped(ours)
    else:
        ours = wrapped(ours)
        report = gander.hf.apply(ours, loss=loss)
        if loss == "linear" and more:
            refusal = next(e.detail for e in report.left if e.kind == "loss")
            assert refusal.startswith("linear_cross_entropy: its head is ")
    start(eager)
    start(ours)
    batch = models.batch()
    expected, found = gradients(eager, batch), gradients(ours, batch)
    assert any("lm_head" in name for name in found) == bool(more)
    assert_near(found, expected, 5e-5)
    assert sum(e.kind == "mlp" for e in report.replaced) == 1
    gander.hf.undo(ours)
    assert classes(ours) == classes(eager)


@LOSSES
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["cpu_offload", "dispatch"])
def test_accelerate_hooks(loss, order, kind):
    eager, ours = models.model("Llama", F32), models.model("Llama", F32)
    batch = models.batch()
    expected = gradients(eager, batch)

    def hooked(model):
        if kind == "cpu_offload":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(io_same_device=True))
            for module in model.modules():
                if module is not model:
                    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook("cpu"))

    if order == "before":
        gander.hf.apply(ours, loss=loss)
        hooked(ours)
    else:
        hooked(ours)
        report = gander.hf.apply(ours, loss=loss)
        assert not report.left
    loss_of = ours(**batch).loss
    assert models.on_gander(loss_of)
    if kind == "dispatch":  # offloaded parameters are not trained
        assert_near(gradients(ours, batch), expected, 5e-5)
    gander.hf.undo(ours)
    assert not models.on_gander(ours(**batch).loss)
    accelerate.hooks.remove_hook_from_module(ours, recurse=True)
    assert not models.on_gander(ours(**batch).loss)


@LOSSES
def test_loaded_with_a_device_map(loss, tmp_path):
    models.model("Llama", F32).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    offloaded = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.embed_tokens": "cpu"}
    offloaded |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = load(tmp_path, device_map=offloaded, offload_folder=tmp_path / "offload")
    assert any(p.is_meta for p in model.parameters())
    batch = models.batch()
    expected = model(**batch)
    report = gander.hf.apply(model, loss=loss)
    assert not report.left
    torch.testing.assert_close(model(**batch).logits, expected.logits)
    assert models.on_gander(model.train()(**batch).loss) or loss == "linear"
    torch.testing.assert_close(model(**batch).loss, expected.loss)


def test_a_class_is_tried_once(monkeypatch):
    """Not each of the 70B model's 161 norms and 80 MLPs, so that it takes no longer than a small one."""
    tried = []
    for module, name in ((_norms, "_find"), (_mlp, "_Small")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, f=original, n=name: tried.append(n) or f(*given))
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    report = gander.hf.apply(model, loss="linear")
    assert tried.count("_find") == 1 and tried.count("_Small") <= 4, tried
    assert [len(e.names) for e in report.replaced] == [80, 161, 80, 1] and not report.left
    assert all(p.is_meta for p in model.parameters())


def test_vision_and_language():
    text = models.config("Llama").to_dict() | dict(model_type="llama")
    vision = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    vision |= dict(num_attention_heads=2, image_size=16, patch_size=8, projection_dim=32)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=3, image_seq_length=4
    )
    torch.manual_seed(0)
    eager = transformers.LlavaForConditionalGeneration._from_config(config, dtype=F32)
    ours = copy.deepcopy(eager)
    for loss in "cross_entropy", "linear":
        report = gander.hf.apply(ours, loss=loss)
        assert next(e.module for e in report.replaced if e.kind == "loss") == "LlavaForConditionalGeneration"
        batch = models.batch()
        batch["input_ids"][batch["input_ids"] == 3] = 4
        batch["input_ids"][:, :4] = 3
        batch["pixel_values"] = torch.randn(2, 3, 16, 16)
        assert_near(gradients(ours, batch), gradients(eager, batch), 5e-5)
    assert any(e.kind == "loss" and e.detail.startswith("linear") for e in report.replaced)


def test_a_quantised_head_has_the_plain_loss():
    model = models.model("Llama", F32)
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear.from_float(_with_qconfig(model.lm_head))
    report = gander.hf.apply(model, loss="linear")
    assert any(
        "its head is Linear" in e.detail or "expected torch.nn.Linear" in e.detail for e in report.left
    )
    assert model(**models.batch()).loss.isfinite()


def _with_qconfig(linear):
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return linear


def test_other_losses_are_left():
    config = models.config("Llama", num_labels=3)
    classifier = transformers.LlamaForSequenceClassification(config)
    report = gander.hf.apply(classifier)
    (left,) = report.left
    assert left.kind == "loss" and "ForSequenceClassificationLoss, expected ForCausalLMLoss" in left.detail
    (left,) = gander.hf.apply(transformers.LlamaModel(models.config("Llama"))).left
    assert left.detail == "it takes no labels"
    (left,) = gander.hf.apply(torch.nn.Sequential()).left
    assert left.detail == "it contains no PreTrainedModel"
    model = models.model("Llama")
    model.loss_function = mine = lambda **kwargs: None
    (left,) = gander.hf.apply(model).left
    assert left.detail == "its loss is <lambda>, expected ForCausalLMLoss" and model.loss_function is mine
    gander.hf.undo(model)
    assert model.loss_function is mine


class Shifted(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden) + self.shift(hidden.shape[1])
        loss = (
            None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        )
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    def shift(self, tokens):
        return torch.linspace(-1, 1, self.config.vocab_size if tokens > 4 else 16)


def test_logits_that_are_changed_otherwise_have_the_plain_loss():
    model, batch = Shifted(models.model("Llama", F32).config), models.batch()
    expected = model(**batch).loss
    report = gander.hf.apply(model, loss="linear")
    assert any("by more than a cap and a scale" in entry.detail for entry in report.left)
    torch.testing.assert_close(model(**batch).loss, expected)


def test_arguments():
    model = models.model("Llama")
    for function in gander.hf.apply, gander.hf.undo:
        with pytest.raises(TypeError, match=r"model is list, expected a torch\.nn\.Module"):
            function([])
    with pytest.raises(TypeError, match="norms is 1, expected True or False"):
        gander.hf.apply(model, norms=1)
    with pytest.raises(TypeError, match="mlp is None, expected True or False"):
        gander.hf.apply(model, mlp=None)
    with pytest.raises(ValueError, match="loss is True, expected 'cross_entropy', 'linear' or None"):
        gander.hf.apply(model, loss=True)
    with pytest.raises(ValueError, match="loss is 'l'"), gander.hf.patched(loss="l"):
        pass
    model.lm_head.weight.ds_id = 0
    with pytest.raises(NotImplementedError, match="model has parameters that DeepSpeed's ZeRO-3 divides"):
        gander.hf.apply(model)
