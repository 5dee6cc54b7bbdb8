"""Trains a language model with Hugging Face's Trainer, on gander.

    python trainer.py
    python trainer.py meta-llama/Llama-3.2-1B

It runs on a GPU if torch has one, else on the CPU. Without a name the model is tiny, and takes seconds there.
"""

import sys
import tempfile

import gander.hf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

STEPS, ROWS, TOKENS = 30, 8, 32
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
torch.manual_seed(0)

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))

report = gander.hf.apply(model)  # before Trainer, which may wrap the model
print(report)

# Numbers that grow by the same step, which can be learned.
first, by = torch.randint(100, (512, 1)), torch.randint(1, 5, (512, 1))
rows = (first + by * torch.arange(TOKENS)) % 100
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        learning_rate=1e-5 if len(sys.argv) > 1 else 3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = [dict(input_ids=row, labels=row) for row in rows]
    trainer = Trainer(model, arguments, train_dataset=dataset)
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]} -> {losses[-1]}")
if not losses[-1] < 0.9 * losses[0]:
    sys.exit(f"wrong: the loss was {losses[0]}, and is {losses[-1]}")
