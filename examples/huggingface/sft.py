"""Fine-tunes a language model with TRL's SFTTrainer, on gander.

    python sft.py
    python sft.py meta-llama/Llama-3.2-1B-Instruct

It runs on a GPU if torch has one, else on the CPU. Without a name the model is tiny, and takes seconds there.
"""

import sys
import tempfile

import gander.hf
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

STEPS, ROWS = 30, 16
WORDS = ["<pad>", "<end>", "count", "by", *map(str, range(100))]
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)

if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    ids = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None, vocab_size=len(WORDS))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, **ids))

# SFTTrainer computes its loss itself, from hidden states and the head's weight.
report = gander.hf.apply(model, loss=None)
print(report)

order = torch.randperm(96 * 4).tolist()
tasks = [(i % 96, 1 + i // 96) for i in order]
prompts = [f"count by {by}" for _, by in tasks]
answers = [" ".join(str((first + by * i) % 100) for i in range(16)) for first, by in tasks]
with tempfile.TemporaryDirectory() as folder:
    config = SFTConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-5 if len(sys.argv) > 1 else 3e-3,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"prompt": prompts, "completion": [f" {answer}" for answer in answers]})
    trainer = SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]} -> {losses[-1]}")
if not losses[-1] < 0.9 * losses[0]:
    sys.exit(f"wrong: the loss was {losses[0]}, and is {losses[-1]}")
