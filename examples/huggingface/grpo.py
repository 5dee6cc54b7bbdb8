"""Trains a language model with TRL's GRPOTrainer, whose log-probabilities and entropies are gander's.

    python grpo.py
    python grpo.py meta-llama/Llama-3.2-1B-Instruct

It runs on a GPU if torch has one, else on the CPU. Without a name the model is tiny, and takes seconds there.
"""

import sys
import tempfile

import gander.hf
import gander.rl
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

STEPS, PROMPTS, SAMPLES = 15, 4, 8
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


def even_numbers(completions, **_):
    """The reward: the part of the words that are even numbers."""
    rows = [text.split() for text in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in row) / max(len(row), 1) for row in rows]


print(gander.hf.apply(model, loss=None))  # norms, rotary embeddings and MLPs
with tempfile.TemporaryDirectory() as folder, gander.rl.trl() as swap:
    print(swap)  # TRL's functions that it has replaced
    config = GRPOConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=8,
        learning_rate=1e-6 if len(sys.argv) > 1 else 1e-2,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"prompt": [f"count by {by}" for by in range(96)]})
    trainer = GRPOTrainer(model, even_numbers, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()

rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
print(f"reward {first:.2f} -> {last:.2f}")
if not last > 1.2 * first:
    sys.exit(f"wrong: the reward was {first}, and is {last}")
