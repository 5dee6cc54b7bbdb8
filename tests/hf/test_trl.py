"""TRL's SFTTrainer, which computes its loss itself, and reads logits for some of its options."""

import copy

import datasets
import gander.hf
import models
import peft
import pytest
import torch
import trl
from test_models import F32
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

STEPS = 6


def tokenizer():
    words = {"<pad>": 0, "<end>": 2, **{f"w{i}": i for i in range(3, 120)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def rows():
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 120, (9 + i % 5,), generator=generator).tolist() for i in range(16)]
    masks = [[0] * 4 + [1] * (len(row) - 4) for row in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "completion_mask": masks})


def trainer(model, folder, **options):
    more = {name: options.pop(name) for name in ("peft_config", "compute_loss_func") if name in options}
    config = trl.SFTConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    return trl.SFTTrainer(
        model, config, train_dataset=rows(), eval_dataset=rows(), processing_class=tokenizer(), **more
    )


def trained(made):
    torch.manual_seed(0)
    made.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss", "eval_entropy")
    return [entry[name] for entry in made.state.log_history for name in names if name in entry]


def assert_same(found, expected):
    assert len(found) == len(expected) > 4 * STEPS
    assert found == pytest.approx(expected, rel=1e-4)


def from_logits(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / (num_items_in_batch or (labels[:, 1:] != -100).sum())  # no number in evaluation


LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
OPTIONS = {
    "its own loss": {},
    "dft": dict(loss_type="dft"),
    "label smoothing": dict(label_smoothing_factor=0.1),
    "a loss of logits": dict(compute_loss_func=from_logits),
    "checkpoints": dict(gradient_checkpointing=True),
    "lora": dict(peft_config=LORA),
}


@pytest.mark.parametrize("loss", [None, "cross_entropy", "linear"])
@pytest.mark.parametrize("name", OPTIONS)
def test_sft(name, loss, tmp_path):
    def options():
        return {"gradient_checkpointing": False, **copy.deepcopy(OPTIONS[name])}

    torch.manual_seed(0)
    expected = trained(trainer(models.model("Qwen3", F32), tmp_path, **options()))
    model = models.model("Qwen3", F32)
    report = gander.hf.apply(model, loss=loss, qk_norm=True)
    assert not report.left
    torch.manual_seed(0)
    assert_same(trained(trainer(model, tmp_path, **options())), expected)


def test_apply_after_the_trainer_was_made(tmp_path):
    expected = trained(trainer(models.model("Llama", F32), tmp_path, gradient_checkpointing=False))
    made = trainer(models.model("Llama", F32), tmp_path, gradient_checkpointing=False)
    report = gander.hf.apply(made.model, loss="linear")
    (left,) = report.left
    assert left.detail.startswith("linear_cross_entropy: its forward is not that of its class, but ")
    assert {"norm", "rotary", "mlp"} <= {e.kind for e in report.replaced}
    assert_same(trained(made), expected)


def test_undone_under_the_trainer(tmp_path):
    """TRL keeps the forward that the model had."""
    expected = trained(trainer(models.model("Llama", F32), tmp_path, gradient_checkpointing=False))
    model = models.model("Llama", F32)
    gander.hf.apply(model, loss="linear")
    made = trainer(model, tmp_path, gradient_checkpointing=False)
    gander.hf.undo(model)
    assert_same(trained(made), expected)
    output = model.train()(**models.batch())
    assert output.logits is not None and not models.on_gander(output.loss)
