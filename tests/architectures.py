"""Random networks of many real architectures, tiny and in float64, for tests of the engine."""
from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
SPECIAL: dict[str, dict] = {
    "gpt2": dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0),
    "gemma2": SIZES | dict(sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=4.0),
    "gemma3_text": SIZES | dict(sliding_window=6, query_pre_attn_scalar=8),
    "mistral": SIZES | dict(sliding_window=6),
    "mixtral": SIZES | dict(num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
    "qwen3_moe": SIZES
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager"),
    "olmoe": SIZES | dict(num_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
}
ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "gpt2",
    "smollm3",
    "olmo2",
    "granite",
    "cohere",
    "starcoder2",
    "glm4",
    "mixtral",
    "qwen3_moe",
    "olmoe",
)


def tiny(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Three random layers, large enough weights that every token matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **SPECIAL.get(architecture, SIZES), initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()
