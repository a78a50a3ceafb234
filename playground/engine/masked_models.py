"""Recognises masked diffusion models by their config.json, and reads the public ones into the library's own classes.

A masked diffusion model is a Llama or Qwen2 network without a causal mask. The network's config then has the entry
`masked_diffusion` with the fields of `Masking`: models made here store it, and for LLaDA and Dream, whose repositories
bring code of their own, it is derived. That code is never run: LLaDA is the Llama network under other names of its
weights, Dream is the Qwen2 network whose logits at a position predict the next one.
Sources: LLaDA, Nie et al. 2025, arXiv 2502.09992; Dream, Ye et al. 2025, arXiv 2508.15487.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from playground.errors import Refusal

ENTRY = "masked_diffusion"
NETWORKS = ("llama", "qwen2", "qwen3")  # the library's networks that run without a causal mask here
BLOCKWISE = ("sdar", "fast_dllm", "wedlm")  # parts of model types that attend block by block
# names in the files of LLaDA, as regular expressions with one group at most, and in the library's Llama
LLADA_WEIGHTS = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.": r"model.layers.\1.input_layernorm.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"^model\.transformer\.blocks\.(\d+)\.q_proj\.": r"model.layers.\1.self_attn.q_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.k_proj\.": r"model.layers.\1.self_attn.k_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.v_proj\.": r"model.layers.\1.self_attn.v_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.up_proj\.": r"model.layers.\1.mlp.up_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_out\.": r"model.layers.\1.mlp.down_proj.",
}
LLADA_FIXED = dict(  # the only values for which LLaDA's block is Llama's
    block_type="llama", activation_type="silu", layer_norm_type="rms", rope=True, alibi=False,
    attention_layer_norm=False, include_bias=False, include_qkv_bias=False, input_emb_norm=False,
    scale_logits=False,
)


@dataclass(frozen=True)
class Masking:
    """How a network fills masks. shifted: the logits of a position predict the next one, as in Dream."""

    mask_token_id: int
    shifted: bool = False


def masking_of(config: PretrainedConfig) -> Masking | None:
    """How a network of this config fills masks; None if it continues text. Raises Refusal for an unusable entry."""
    entry = getattr(config, ENTRY, None)
    if entry is None:
        return None
    try:
        masking = Masking(**entry)
    except TypeError:
        masking = None
    if not masking or type(masking.mask_token_id) is not int or not 0 <= masking.mask_token_id < config.vocab_size:
        raise Refusal(
            f"The entry {ENTRY} of config.json needs the id of a token as mask_token_id, and may have shifted: "
            "correct it.",
            "model",
        )
    if config.model_type not in NETWORKS:
        raise Refusal(
            f"A {config.model_type} network cannot fill masks here: choose one of {', '.join(NETWORKS)}.", "model"
        )
    return masking


def public_config(name: str, path: Path) -> PretrainedConfig | None:
    """The config of a public masked diffusion model for the library's own network; None for any other config.json.

    Raises Refusal if the model is of such a family, and its network is not one that can be read here.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        kind = str(fields.get("model_type", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if any(part in kind.lower() for part in BLOCKWISE):
        raise Refusal(
            f"{name} fills masks block by block, which is not supported yet: choose LLaDA, Dream or pocket-diffusion.",
            "model",
        )
    return FAMILIES[kind](name, fields) if kind in FAMILIES else None


def weight_names(config: PretrainedConfig) -> dict[str, str]:
    """Names of stored weights as regular expressions, and the library's names for them; empty if they are the same."""
    return LLADA_WEIGHTS if getattr(config, "stored_as", "") == "llada" else {}


def _llada(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    wrong = next((field for field, value in LLADA_FIXED.items() if fields.get(field, value) != value), None)
    if wrong:
        raise _other_network(name, wrong)
    return LlamaConfig(
        vocab_size=_integer(name, fields, "embedding_size", _integer(name, fields, "vocab_size")),
        hidden_size=_integer(name, fields, "d_model"),
        intermediate_size=_integer(name, fields, "mlp_hidden_size"),
        num_hidden_layers=_integer(name, fields, "n_layers"),
        num_attention_heads=_integer(name, fields, "n_heads"),
        num_key_value_heads=_integer(name, fields, "n_kv_heads", _integer(name, fields, "n_heads")),
        max_position_embeddings=_integer(name, fields, "max_sequence_length"),
        rms_norm_eps=fields.get("rms_norm_eps", 1e-5),
        rope_parameters=dict(rope_type="default", rope_theta=fields.get("rope_theta", 10000.0)),
        tie_word_embeddings=bool(fields.get("weight_tying", False)),
        bos_token_id=None,
        eos_token_id=fields.get("eos_token_id"),
        masked_diffusion=dict(mask_token_id=_integer(name, fields, "mask_token_id"), shifted=False),
        stored_as="llada",
    )


def _dream(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    if fields.get("use_sliding_window") or fields.get("hidden_act", "silu") != "silu":
        raise _other_network(name, "use_sliding_window" if fields.get("use_sliding_window") else "hidden_act")
    known = {field: value for field, value in fields.items() if field not in NOT_OF_QWEN2}
    mask = dict(mask_token_id=_integer(name, fields, "mask_token_id"), shifted=True)
    return Qwen2Config(**known, masked_diffusion=mask)


NOT_OF_QWEN2 = ("model_type", "architectures", "auto_map", "mask_token_id", "transformers_version", "torch_dtype")
FAMILIES: dict[str, Callable[[str, dict[str, Any]], PretrainedConfig]] = {"llada": _llada, "Dream": _dream}


def _integer(name: str, fields: dict[str, Any], field: str, default: int | None = None) -> int:
    value = fields.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise Refusal(f"The config.json of {name} needs a whole number as {field}: choose another model.", "model")
    return value


def _other_network(name: str, field: str) -> Refusal:
    return Refusal(
        f"{name} has a value of {field} for which its network is not the library's: choose another model.", "model"
    )
