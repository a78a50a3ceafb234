"""Recognises masked diffusion models by their config.json, and reads the public ones into the library's own classes.

A masked diffusion model is a Llama, Qwen2 or Qwen3 network with another attention mask. The network's config then has
the entry `masked_diffusion` with the fields of `Masking`: models made here store it, and for the public families, whose
repositories bring code of their own, it is derived. That code is never run:

- LLaDA is the Llama network with full attention, under other names of its weights.
- Dream is the Qwen2 network with full attention, whose logits at a position predict the next one.
- SDAR, and TraDo, which is trained from it, is the Qwen3 network, causal between blocks of 4 positions.
- Fast-dLLM v2 is the Qwen2 network, causal between blocks of 32, whose logits at a position predict the next one.
- WeDLM is the Qwen2 or Qwen3 network with causal attention, known tokens before masked ones.

Sources: LLaDA, Nie et al. 2025, arXiv 2502.09992; Dream, Ye et al. 2025, arXiv 2508.15487; SDAR, Cheng et al. 2025,
arXiv 2510.06303; Fast-dLLM v2, Wu et al. 2025, arXiv 2509.26328; WeDLM, Liu et al. 2025, arXiv 2512.22737.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from playground.errors import Refusal

ENTRY = "masked_diffusion"
NETWORKS = ("llama", "qwen2", "qwen3")  # the library's networks that run without a causal mask here
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
    """How a network fills masks.

    shifted: the logits of a position predict the next one, as in Dream. block_length: a position sees its block of so
    many positions, counted from the start of the text, and what is before it; 0 for full attention. known_first: causal
    attention, known tokens before masked ones, as in WeDLM.
    """

    mask_token_id: int
    shifted: bool = False
    block_length: int = 0
    known_first: bool = False

    def usable(self, vocabulary: int) -> bool:
        """Whether the fields have values that a network of so many tokens can have."""
        whole = type(self.mask_token_id) is int and type(self.block_length) is int
        flags = type(self.shifted) is bool and type(self.known_first) is bool
        if not whole or not flags:
            return False
        return 0 <= self.mask_token_id < vocabulary and self.block_length >= 0 and not (
            self.known_first and (self.block_length or self.shifted)
        )


def masking_of(config: PretrainedConfig) -> Masking | None:
    """How a network of this config fills masks; None if it continues text. Raises Refusal for an unusable entry."""
    entry = getattr(config, ENTRY, None)
    if entry is None:
        return None
    try:
        masking = Masking(**entry)
    except TypeError:
        masking = None
    if not masking or not masking.usable(config.vocab_size):
        raise Refusal(
            f"The entry {ENTRY} of config.json needs the id of a token as mask_token_id, and may have shifted and "
            "block_length, or known_first: correct it.",
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
    if any(part in kind for part in MIXTURES):
        raise Refusal(
            f"{name} is a mixture of experts that fills masks, which is not supported: choose a dense SDAR.", "model"
        )
    if kind not in FAMILIES:
        return None
    config = FAMILIES[kind](name, fields)
    if fields.get("quantization_config"):
        config.quantization_config = fields["quantization_config"]
    return config


def is_noise_model(config: PretrainedConfig) -> bool:
    """Whether a network of this config is DiffusionGemma, which the library carries: noise instead of masks."""
    return config.model_type == "diffusion_gemma"


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
    return _qwen(Qwen2Config, name, fields, mask_token_id=_integer(name, fields, "mask_token_id"), shifted=True)


def _sdar(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    mask = _integer(name, fields, "mask_token_id", 151669)
    return _qwen(
        Qwen3Config, name, fields, mask_token_id=mask, block_length=_integer(name, fields, "block_size", 4) or 1
    )


def _fast_dllm(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    mask, length = _integer(name, fields, "mask_token_id", 151665), _integer(name, fields, "bd_size", 32) or 1
    return _qwen(Qwen2Config, name, fields, mask_token_id=mask, shifted=True, block_length=length)


def _wedlm(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    """Qwen3 with normed queries and keys and without biases, or else Qwen2 with biases."""
    normed, biased = bool(fields.get("qk_norm", False)), bool(fields.get("attention_bias", True))
    if normed == biased:
        raise _other_network(name, "attention_bias")
    mask = _integer(name, fields, "mask_token_id", 151665)
    if not normed:
        return _qwen(Qwen2Config, name, fields, mask_token_id=mask, known_first=True)
    heads = _integer(name, fields, "num_attention_heads") or 1
    width = _integer(name, fields, "head_dim", _integer(name, fields, "hidden_size") // heads)
    return _qwen(Qwen3Config, name, fields | dict(head_dim=width), mask_token_id=mask, known_first=True)


def _qwen(
    network: type[PretrainedConfig], name: str, fields: dict[str, Any], **masking: Any
) -> PretrainedConfig:
    """The config of the library's Qwen network with these fields, except those of the public code alone."""
    if fields.get("use_sliding_window") or fields.get("hidden_act", "silu") != "silu":
        raise _other_network(name, "use_sliding_window" if fields.get("use_sliding_window") else "hidden_act")
    known = {field: value for field, value in fields.items() if field not in NOT_OF_QWEN}
    return network(**known, masked_diffusion=masking)


NOT_OF_QWEN = (  # fields of the public repositories that the library's networks do not have
    "model_type", "architectures", "auto_map", "mask_token_id", "transformers_version", "torch_dtype", "block_size",
    "bd_size", "qk_norm", "attn_implementation",
)
MIXTURES = ("sdar_moe", "llada2_moe", "llada_moe")  # parts of model types
FAMILIES: dict[str, Callable[[str, dict[str, Any]], PretrainedConfig]] = {
    "llada": _llada, "Dream": _dream, "sdar": _sdar, "Fast_dLLM_Qwen": _fast_dllm, "wedlm": _wedlm,
}


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
