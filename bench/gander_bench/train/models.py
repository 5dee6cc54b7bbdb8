"""The models that are trained: transformers' Llama and Qwen3 made from a config, and a stand-in in torch
alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..demo.training import rotate

EPS = 1e-5
IGNORED = -100  # the target of the last token, which has no next one


@dataclass(frozen=True)
class Preset:
    layers: int
    width: int
    hidden: int  # of the MLPs
    heads: int
    vocabulary: int
    tied: bool  # whether the embedding is the head's weight too
    dtype: torch.dtype  # of everything: parameters, activations and the optimizer's state
    batch: int
    sequence: int
    transformers: bool = True
    family: str = "Llama"  # of transformers
    kv_heads: int | None = None  # as many as heads if None
    theta: float = 10000.0  # of the rotary embeddings
    clipped: bool = True  # whether a step clips gradients
    runs: int = 1  # in which the contestants take turns
    contestants: tuple[str, ...] | None = None  # by default; None: all


# Who the targets of whole models are about: without torch.compile, but for torch's own.
_WHOLE = ("torch", "torch.compile", "liger", "liger-linear", "gander-hf", "gander-hf-linear")
_WHOLE_QWEN3 = (*_WHOLE, "gander-hf-qk", "gander-hf-linear-qk")
# Half of the layers of the models that they are named after, which with the optimizer's state fill a GPU of
# 80 GB. Gradients are not clipped, which reads each of them once more for all contestants alike.
_HALF = dict(kv_heads=8, clipped=False, runs=3)

# tiny, tiny-qwen3 and stand-in are checks of the command, in float32 so that the loss curves agree closely.
PRESETS = {
    "small": Preset(16, 1024, 3072, 16, 128256, True, torch.bfloat16, 8, 2048),
    "medium": Preset(24, 2048, 5632, 32, 32000, False, torch.bfloat16, 8, 2048),
    "llama3-8b": Preset(
        *(16, 4096, 14336, 32, 128256, False, torch.bfloat16, 1, 8192),
        **_HALF,
        theta=500000.0,
        contestants=_WHOLE,
    ),
    "qwen3-8b": Preset(
        *(16, 4096, 12288, 32, 151936, False, torch.bfloat16, 1, 8192),
        **_HALF,
        theta=1000000.0,
        family="Qwen3",
        contestants=_WHOLE_QWEN3,
    ),
    "tiny": Preset(2, 64, 192, 4, 512, True, torch.float32, 2, 64),
    "tiny-qwen3": Preset(
        *(2, 64, 192, 4, 512, False, torch.float32, 1, 128),
        family="Qwen3",
        kv_heads=2,
        clipped=False,
        runs=3,
        contestants=_WHOLE_QWEN3,
    ),
    "stand-in": Preset(2, 64, 192, 4, 512, True, torch.float32, 2, 64, transformers=False),
}


def build(preset: Preset, device: str, seed: int) -> nn.Module:
    """The model with random weights, which follow from the seed and the kind of device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = _of_transformers(preset) if preset.transformers else StandIn(preset).to(preset.dtype)
    return model.train()


def _attend(module, query, key, value, attention_mask, **options):
    """transformers' attention by F.scaled_dot_product_attention, which is causal where it gets no mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None:
        raise RuntimeError(
            "transformers has made an attention mask, which fast attention kernels do not take"
        )
    return sdpa_attention_forward(module, query, key, value, None, **options)


def _register_attention() -> str:
    """Gives transformers an attention under a name for which it knows no masks, so that it makes none.

    Beside "sdpa" it leaves the mask out (`_ignore_causal_mask_sdpa` of its masking_utils.py), but not while
    torch.compile traces with torch before 2.14, to which that looks like an export: it then makes the (S, S)
    mask, for which torch has no flash attention, and attention takes several times as long as uncompiled.
    """
    from transformers import AttentionInterface

    name = "gander_bench_causal"
    AttentionInterface.register(name, _attend)
    return name


def _of_transformers(preset: Preset) -> nn.Module:
    import transformers

    heads = preset.width // preset.heads
    config = getattr(transformers, f"{preset.family}Config")(
        vocab_size=preset.vocabulary,
        hidden_size=preset.width,
        intermediate_size=preset.hidden,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads or preset.heads,
        head_dim=heads,
        rope_parameters={"rope_type": "default", "rope_theta": preset.theta},
        max_position_embeddings=preset.sequence,
        rms_norm_eps=EPS,
        tie_word_embeddings=preset.tied,
    )
    attention = _register_attention()
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=preset.dtype, attn_implementation=attention
    )


def targets(labels: Tensor) -> Tensor:
    """labels: (batch, length). The next token of each, in one dimension."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()


# ---- The stand-in. Names and signatures are those of transformers' Llama that the contestants use. ----


class StandInRMSNorm(nn.Module):
    """With both roundings of transformers' LlamaRMSNorm: before the weight is applied, and after."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = EPS

    def forward(self, x):
        rows = x.float()
        rstd = (rows.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * (rows * rstd).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class _Block(nn.Module):
    def __init__(self, preset: Preset):
        super().__init__()
        self.heads = preset.heads
        self.input_layernorm = StandInRMSNorm(preset.width)
        self.post_attention_layernorm = StandInRMSNorm(preset.width)
        self.query_key_value = _linear(preset.width, 3 * preset.width)
        self.out = _linear(preset.width, preset.width)
        self.gate, self.up = (_linear(preset.width, preset.hidden) for _ in range(2))
        self.down = _linear(preset.hidden, preset.width)

    def forward(self, x, rotation):
        batch, length, width = x.shape
        heads = self.query_key_value(self.input_layernorm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.post_attention_layernorm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Hidden(NamedTuple):
    last_hidden_state: Tensor


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class _Body(nn.Module):
    def __init__(self, preset: Preset):
        super().__init__()
        self.embed_tokens = nn.Embedding(preset.vocabulary, preset.width)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(_Block(preset) for _ in range(preset.layers))
        self.norm = StandInRMSNorm(preset.width)
        half = preset.width // preset.heads // 2
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(half) / half))

    def forward(self, input_ids, use_cache=False):
        x = self.embed_tokens(input_ids)
        angles = torch.outer(torch.arange(input_ids.shape[1], device=x.device), self.frequencies)
        rotation = torch.stack((angles.cos(), angles.sin())).to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        return Hidden(self.norm(x))


def _torch_loss(logits, labels, vocab_size):
    return F.cross_entropy(logits.float().view(-1, vocab_size), targets(labels), ignore_index=IGNORED)


class StandIn(nn.Module):
    def __init__(self, preset: Preset):
        super().__init__()
        self.model = _Body(preset)
        self.lm_head = _linear(preset.width, preset.vocabulary)
        if preset.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss_function = _torch_loss

    def forward(self, input_ids, labels, use_cache=False):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return Output(self.loss_function(logits, labels, logits.shape[-1]), logits)
