"""Trains a language model of transformers in a plain loop, on gander.

    python loop.py
    python loop.py meta-llama/Llama-3.2-1B

It runs on a GPU if torch has one, else on the CPU. Without a name the model is tiny, and takes seconds there.
"""

import sys

import gander.hf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS, ROWS, TOKENS = 30, 16, 32
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
model = model.to(device).train()

report = gander.hf.apply(model, loss="linear")  # the loss is computed in the head, which keeps no logits
print(report)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if len(sys.argv) > 1 else 3e-3)
losses = []
for step in range(STEPS):
    # Numbers that grow by the same step, which can be learned.
    first, by = torch.randint(100, (ROWS, 1)), torch.randint(1, 5, (ROWS, 1))
    ids = ((first + by * torch.arange(TOKENS)) % 100).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {losses[-1]:.4f}")

if not losses[-1] < 0.9 * losses[0]:
    sys.exit(f"wrong: the loss was {losses[0]}, and is {losses[-1]}")
