"""Tiny random networks with recurrent layers, of every such type in the transformers library, in float64."""
from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)
EXPERTS = dict(
    num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, experts_implementation="eager"
)
ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]
DELTA_NET = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    shared_expert_intermediate_size=16, layer_types=["linear_attention", "linear_attention", "full_attention"],
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
PLAIN_MAMBA = dict(vocab_size=96, hidden_size=32, num_hidden_layers=3, state_size=8, bos_token_id=0, eos_token_id=0,
                   pad_token_id=0)
CONV = dict(layer_types=["conv", "full_attention", "conv"])
LATENT = dict(
    kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
    num_key_value_heads=4, layer_types=ALTERNATING, mlp_layer_types=["dense", "sparse", "dense"],
)
BY_TYPE: dict[str, dict] = {
    "qwen3_next": SIZES | EXPERTS | DELTA_NET,
    "qwen3_5_text": SIZES | DELTA_NET,
    "qwen3_5_moe_text": SIZES | EXPERTS | DELTA_NET,
    "granitemoehybrid": SIZES | EXPERTS | MAMBA
    | dict(shared_intermediate_size=16, layer_types=ALTERNATING),
    "bamba": SIZES | MAMBA | dict(attn_layer_indices=[1]),
    "falcon_h1": SIZES | MAMBA | dict(mamba_d_ssm=64),
    "nemotron_h": SIZES | EXPERTS
    | dict(layers_block_type=["mamba", "attention", "mlp", "mamba", "moe"], ssm_state_size=8, mamba_num_heads=8,
           mamba_head_dim=8, n_groups=2, chunk_size=8, n_routed_experts=4, moe_shared_expert_intermediate_size=16),
    "lfm2": SIZES | CONV,
    "lfm2_moe": SIZES | EXPERTS | CONV | dict(num_dense_layers=1),
    "lfm3": SIZES | CONV,
    "mamba": PLAIN_MAMBA,
    "mamba2": PLAIN_MAMBA | dict(num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "falcon_mamba": PLAIN_MAMBA,
    "jamba": SIZES | EXPERTS | dict(attn_layer_period=3, attn_layer_offset=1, mamba_d_state=8),
    "zamba": SIZES | dict(attn_layer_period=3, attn_layer_offset=1, mamba_d_state=8, num_hidden_layers=5),
    "zamba2": SIZES
    | dict(layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"], num_hidden_layers=4,
           mamba_d_state=8, n_mamba_heads=8, chunk_size=8, num_key_value_heads=4),
    "kimi_linear": SIZES | EXPERTS | LATENT | dict(linear_head_dim=8, linear_num_heads=4),
    "olmo_hybrid": SIZES | dict(layer_types=["linear_attention", "linear_attention", "full_attention"]),
    "bailing_hybrid": SIZES | EXPERTS | LATENT | dict(num_mtp_layers=0),
    "minimax": SIZES | EXPERTS | dict(layer_types=ALTERNATING, block_size=8),
    "recurrent_gemma": SIZES | dict(block_types=["recurrent", "recurrent", "attention"], attention_window_size=16),
    "zaya": SIZES | EXPERTS | dict(num_experts_per_tok=1, router_hidden_size=16),
}


def recurrent(architecture: str, seed: int = 0, **more: int | bool | None) -> PreTrainedModel:
    """Random layers with weights so large that every token matters; `more` are settings of the config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **{**BY_TYPE[architecture], **more}, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).double().eval()
