"""Trains a language model whose parameters FSDP2 divides among processes, on gander.

    torchrun --standalone --nproc-per-node 2 fsdp.py
    torchrun --standalone --nproc-per-node 8 fsdp.py meta-llama/Llama-3.1-8B

Each process has a GPU if torch has one, else they share the CPU. Without a name the model is tiny, and takes
seconds there.
"""

import os
import sys

import gander.hf
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS, ROWS, TOKENS = 30, 8, 32
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
model = model.to(device).train()

report = gander.hf.apply(model, loss="linear")  # before fully_shard or after it
if dist.get_rank() == 0:
    print(report)

for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)

torch.manual_seed(1 + dist.get_rank())  # each process has rows of its own
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
    mean = loss.detach()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step:2}: loss {losses[-1]:.4f}")

dist.destroy_process_group()
if not losses[-1] < 0.9 * losses[0]:
    sys.exit(f"wrong: the loss was {losses[0]}, and is {losses[-1]}")
