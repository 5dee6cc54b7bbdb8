"""Tiny models of each family, with random parameters."""

import torch
import transformers

SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=120,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)

# The name of the configuration, and what it has besides SIZES.
FAMILIES = {
    "Llama": ("LlamaConfig", {}),
    "Llama, tied": ("LlamaConfig", dict(tie_word_embeddings=True, mlp_bias=True)),
    "Mistral": ("MistralConfig", {}),
    "Mixtral": ("MixtralConfig", EXPERTS),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", dict(head_dim=16)),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | dict(head_dim=16)),
    "Qwen3.5": (
        "Qwen3_5TextConfig",
        dict(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "Gemma2": ("Gemma2Config", dict(head_dim=16, query_pre_attn_scalar=16)),
    "Gemma3": ("Gemma3TextConfig", dict(head_dim=16, query_pre_attn_scalar=16)),
    "Gemma4": ("Gemma4TextConfig", dict(head_dim=16, global_head_dim=16, hidden_size_per_layer_input=8)),
    "Gemma4, experts": (
        "Gemma4TextConfig",
        EXPERTS
        | dict(
            head_dim=16,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            top_k_experts=2,
        ),
    ),
    "GptOss": ("GptOssConfig", EXPERTS | dict(head_dim=16)),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        EXPERTS
        | dict(
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
    ),
    "Phi3": ("Phi3Config", {}),
    "Olmo2": ("Olmo2Config", {}),
    "GLM4": ("Glm4Config", dict(head_dim=16)),
    "Granite": ("GraniteConfig", dict(logits_scaling=2.0)),
    "Llama4": (
        "Llama4TextConfig",
        EXPERTS
        | dict(
            head_dim=16, intermediate_size_mlp=96, moe_layers=[1], no_rope_layers=[1, 0], use_qk_norm=True
        ),
    ),
}


def config(family, **others):
    name, more = FAMILIES[family]
    return getattr(transformers, name)(**SIZES | more | others)


def model(family, dtype=torch.bfloat16, seed=0, attn="eager", **others):
    """The same parameters for the same seed."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(
        config(family, **others), dtype=dtype, attn_implementation=attn
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:  # ones would hide what a norm does with its weight
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "experts" in name:  # some are not initialised
                parameter.normal_(std=0.1)
    return made


def batch(rows=2, length=17, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return dict(input_ids=ids, labels=labels)


def on_gander(loss):
    """Whether gander has computed a loss, or a part that was added last."""
    return "gander" in f"{loss.grad_fn} {loss.grad_fn.next_functions}".lower()
