"""Model folders on disk, as written by `save_pretrained`, for tests that start from a path."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from toys import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, CONTEXT, WIDTH = 319, 128, 64  # the intermediate width


@dataclass(frozen=True)
class Saved:
    target: str
    draft: str  # agrees with the target often, not always
    stranger: str  # another vocabulary


def save_models(folder: Path) -> Saved:
    """A target, a copy with noise on its weights, and a model with another vocabulary."""
    return Saved(
        _save(folder / "target", 0.0), _save(folder / "draft", 0.05), _save(folder / "stranger", 0.0, merges=40)
    )


def _save(folder: Path, noise: float, merges: int = 60) -> str:
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=259 + merges,
            hidden_size=32,
            intermediate_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for weights in network.parameters():
            weights += torch.randn_like(weights) * weights.std().nan_to_num() * noise
        network.lm_head.weight[0] = 0  # the end token is never the largest, so lengths are known
    network.save_pretrained(folder)
    byte_tokenizer(merges).save_pretrained(folder)
    return str(folder)
