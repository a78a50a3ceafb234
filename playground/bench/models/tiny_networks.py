"""A tiny random network of every causal type of the transformers library, built from its config class alone.

Every size in a config is replaced by a small one of the same name, in nested configs too. What a type needs beyond
that is in OVERRIDES.
"""
from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, LAYERS, WINDOW = 128, 4, 6

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "unpadded_vocab_size": VOCABULARY,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim_model_base", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dff", "dim_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "intermediate_size_mlp"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "dense_intermediate_size", "ffn_hidden_size"), 48),
    "d_inner": 48,
    "embedding_dim": 32,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_head", "kv_channels", "dim_head", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "original_max_position_embeddings"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("attention_window_size", "local_attention_window_len", "window_size", "keep_window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    "is_decoder": True,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=4)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
INDEXER = dict(index_head_dim=8, index_n_heads=4, index_topk=8)
SHARED_KV = dict(layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2)
SINGLE_PRECISION = ("inkling2_text", "inkling_text", "xglm", "xlnet")  # the library computes parts of them in float32
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": INDEXER,
    "bailing_hybrid": dict(linear_num_heads=4, linear_head_dim=8),
    "bamba": MAMBA | dict(attn_layer_indices=[1, 3]),
    "codegen": dict(rotary_dim=4),
    "cohere_compass_text": dict(layer_types=["sliding_attention", "full_attention"] * 2,
                                rope_parameters={kind: dict(rope_type="default", rope_theta=10000.0)
                                                 for kind in ("sliding_attention", "full_attention")}),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=32, hidden_size=32),
    ),
    "deepseek_v2": dict(num_experts_per_tok=2, n_group=1, topk_group=1),
    "deepseek_v32": INDEXER,
    "dots1": dict(first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "dots3_note_text": INDEXER | dict(per_layer_config=None) | dict(num_key_value_heads=4),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=64),
    "gemma3n_text": SHARED_KV
    | dict(hidden_size_per_layer_input=8, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4),
    "gemma4_assistant": dict(text_config=dict(hidden_size_per_layer_input=0)),
    "glm_moe_dsa": INDEXER,
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "gptj": dict(rotary_dim=4),
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"] * 2),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "kimi_linear": dict(linear_num_heads=4, linear_head_dim=8),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "ministral": dict(head_dim=8, num_key_value_heads=2),
    "nemotron": dict(num_key_value_heads=2),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=4),
    "roc_bert": dict(shape_vocab_size=128, pronunciation_vocab_size=128),
    "phi4_multimodal": dict(audio_config={}, vision_config={}),
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=4),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_next": DELTA,
    "olmo_hybrid": DELTA,
    "reformer": dict(is_decoder=True, axial_pos_shape=[8, 16], axial_pos_embds_dim=[16, 16]),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(layers_block_type=["linear_attention", "hybrid"] * 2),
    "zamba2": dict(layers_block_type=["linear_attention", "hybrid"] * 2, mamba_headdim=8),
    "zaya": dict(num_experts_per_tok=1),
}


def causal_types() -> list[str]:
    """Every model type of the library that has a causal language model, in its order."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config of a tiny network of this type; raises whatever the library raises for one it cannot make."""
    default = CONFIG_MAPPING[model_type]
    return default(**_shrunk(default, OVERRIDES.get(model_type, {})))


def tiny_network(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A random network with weights so large that every token matters, in float64 where the library can."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(tiny_config(model_type), experts_implementation="eager")
    network.generation_config.eos_token_id = network.generation_config.forced_eos_token_id = None  # no text ends early
    network.config.eos_token_id = network.config.get_text_config().eos_token_id = None
    return network.to(torch.float32 if model_type in SINGLE_PRECISION else torch.float64).eval()


def _shrunk(default: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    given = default().to_dict()
    small = {name: SIZES[name] for name, value in given.items() if name in SIZES and value is not None}
    if "kv_lora_rank" in small:  # latent attention: every head has separate key and value states
        small["num_key_value_heads"] = small["num_attention_heads"]
    if kinds := given.get("layer_types"):
        small["layer_types"] = _few(kinds)
    for name, inner in getattr(default, "sub_configs", {}).items():
        if isinstance(given.get(name), dict):
            kind = CONFIG_MAPPING[given[name]["model_type"]] if inner is AutoConfig else inner
            small[name] = _shrunk(kind, OVERRIDES.get(kind.model_type, {})) | overrides.get(name, {})
    return small | {name: value for name, value in overrides.items() if name not in getattr(default, "sub_configs", {})}


def _few(kinds: list[str]) -> list[str]:
    """Every kind of layer in turn, until there are LAYERS."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[index % len(distinct)] for index in range(LAYERS)]
