"""Writes a fitted draft head in the format of vLLM's `speculators`, which vLLM and the playground itself read.

Of the heads that are trained here the format knows EAGLE-3 and DFlash.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from playground.algorithms.draft_heads.blocks.block_network import SETTINGS
from playground.algorithms.draft_heads.feature_networks import shape_of
from playground.algorithms.draft_heads.head_layers import EPS, THETA, HeadShape
from playground.engine.model import Model
from playground.errors import Refusal

Weights = dict[str, Tensor]
KNOWN = {"eagle_3": "eagle3", "dflash": "dflash"}  # what the format calls the strategies it knows
VERSION = "0.9.0"  # of the format
DRAFTED = 5  # draft tokens per round that the config proposes to vLLM


def check_folder(strategy: str, folder: Path) -> None:
    """Raise Refusal if the format does not know the strategy, or if the folder exists."""
    if strategy not in KNOWN:
        raise Refusal(
            f"The format of `speculators` has no {strategy} heads, only {', '.join(KNOWN)}: leave out --to.", "to"
        )
    if folder.exists():
        raise Refusal(f"{folder} exists: name a new folder with --to.", "to")


def write_folder(folder: Path, strategy: str, weights: Weights, layers: tuple[int, ...], model: Model) -> None:
    """Write config.json and model.safetensors of a head whose states are the inputs of these layers. Raises Refusal.

    The format has embeddings and an lm_head in every head, so the target's are written along.
    """
    check_folder(strategy, folder)
    own = {name: tensor for name, tensor in weights.items() if name not in SETTINGS}
    named = {name.replace("midlayer.", "layers.0.", 1): tensor.contiguous() for name, tensor in own.items()}
    copies = {
        "embed_tokens.weight": model.embed(list(range(model.vocabulary))), "lm_head.weight": model.lm_head_weights,
    }
    copies = {name: tensor.to(weights["fc.weight"]).clone() for name, tensor in copies.items()}
    kind = KNOWN[strategy]
    config = {**_config(kind, model), **OWN_CONFIGS[kind](named, weights, layers, model)}
    try:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file({**copies, **named}, folder / "model.safetensors")
    except OSError as reason:
        raise Refusal(
            f"{folder} cannot be written ({reason}): free some space, or name another folder.", "to"
        ) from None


def _config(kind: str, model: Model) -> dict[str, Any]:
    """What the configs of all kinds have."""
    return {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": model.vocabulary,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTED}],
            "verifier": {"name_or_path": model.name, "architectures": [type(model.network).__name__]},
        },
    }


def _eagle_3(named: Weights, weights: Weights, layers: tuple[int, ...], model: Model) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": [*layers],
        "norm_before_residual": False,
        "transformer_layer_config": _layer("llama", shape_of(named, "layers.0.", model.width), model),
    }


def _dflash(named: Weights, weights: Weights, layers: tuple[int, ...], model: Model) -> dict[str, Any]:
    head_dim = named["layers.0.self_attn.q_norm.weight"].shape[0]
    shape, count = shape_of(named, "layers.0.", model.width, head_dim), sum("q_norm" in name for name in named)
    return {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [*layers],
        "block_size": int(weights["block_size"]),
        "mask_token_id": int(weights["mask_token_id"]),
        "sample_from_anchor": False,
        "transformer_layer_config": _layer("qwen3", shape, model, count),
    }


def _layer(kind: str, shape: HeadShape, model: Model, count: int = 1) -> dict[str, Any]:
    """The config of a head's layers as the library has it."""
    return {
        "model_type": kind,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": count,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.context,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "tie_word_embeddings": False,
    }


OWN_CONFIGS = {"eagle3": _eagle_3, "dflash": _dflash}
