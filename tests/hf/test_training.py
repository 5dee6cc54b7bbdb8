"""Trainer, and a loop of one's own."""

import accelerate
import gander.hf
import models
import peft
import pytest
import torch
import transformers
from test_models import F32

ROWS, STEPS = 80, 20


class Rows(torch.utils.data.Dataset):
    """Rows of different lengths, with labels that are ignored."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.rows = []
        for i in range(ROWS):
            ids = torch.randint(3, 120, (6 + i % 9,), generator=generator)
            self.rows.append(dict(input_ids=ids, labels=ids.masked_fill(ids < 10, -100)))

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([r["input_ids"] for r in rows], batch_first=True)
    labels = pad([r["labels"] for r in rows], batch_first=True, padding_value=-100)
    mask = pad([torch.ones_like(r["input_ids"]) for r in rows], batch_first=True)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses += [logs[name] for name in ("loss", "eval_loss", "grad_norm") if name in logs]


def train(model, folder, **options):
    losses = Losses()
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(), eval_dataset=Rows(), data_collator=collate, callbacks=[losses]
    )
    trainer.train()
    return trainer, losses.losses


@pytest.mark.parametrize("kind", ["plain", "lora", "checkpoints in bf16"])
def test_trainer(kind, tmp_path):
    def made():
        model = models.model("Llama", F32)
        if kind != "lora":
            return model
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))

    options = {} if kind in ("plain", "lora") else dict(gradient_checkpointing=True, bf16=True)
    eager, expected = train(made(), tmp_path, **options)
    for loss in "cross_entropy", "linear":
        model = made()
        report = gander.hf.apply(model, loss=loss)
        ours, found = train(model, tmp_path, **options)
        assert any(e.kind == "loss" and (loss == "linear") == ("linear" in e.detail) for e in report.replaced)
        assert len(found) == len(expected) >= 2 * STEPS
        for a, b in zip(expected, found, strict=True):
            assert abs(a - b) <= (2e-2 if "bf16" in kind else 1e-4) * abs(a), (a, b)
        assert_counts_as_before(eager, ours)


def assert_counts_as_before(eager, ours):
    """Trainer sees in both the same signature, labels and parameters."""
    assert ours._loss_shifts_labels and eager._loss_shifts_labels
    assert ours.model_accepts_loss_kwargs and ours.label_names == eager.label_names == ["labels"]
    assert ours.can_return_loss == eager.can_return_loss
    batch, device = [collate([Rows()[i] for i in range(2)])], torch.device("cpu")
    assert torch.equal(*(trainer._get_num_items_in_batch(batch, device) for trainer in (eager, ours)))
    trained, decayed = (
        [
            [name for name, p in trainer.model.named_parameters() if p.requires_grad]
            for trainer in (eager, ours)
        ],
        [trainer.get_decay_parameter_names(trainer.model) for trainer in (eager, ours)],
    )
    assert trained[0] == trained[1] and decayed[0] == decayed[1]


def test_label_smoothing_of_trainer_reads_logits(tmp_path):
    """It takes the labels away from the model, so the head has no task."""
    _, expected = train(models.model("Llama", F32), tmp_path, label_smoothing_factor=0.1)
    model = models.model("Llama", F32)
    gander.hf.apply(model, loss="linear")
    _, found = train(model, tmp_path, label_smoothing_factor=0.1)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_apply_after_accelerator_prepare_takes_the_plain_loss():
    """There a forward of the instance converts outputs, and stands before the class's."""
    accelerate.state.AcceleratorState._reset_state(True)
    model = models.model("Llama", F32)
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    report = gander.hf.apply(model, loss="linear")
    (left,) = report.left
    assert left.detail.startswith("linear_cross_entropy: its forward is not that of its class, but ")
    output = model(**models.batch())
    assert output.logits is not None and models.on_gander(output.loss)
