"""Random checkpoints with layers for multi-token prediction, saved as a hub holds them."""
from __future__ import annotations

from pathlib import Path

import torch
from pairs import VOCABULARY
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

DEPTH, COUNT = 3, 3  # layers of the target, and for multi-token prediction


def save_checkpoint(path: Path) -> None:
    """A checkpoint of an architecture whose published ones ship such layers."""
    config = AutoConfig.for_model(
        "ernie4_5_moe", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=DEPTH,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_layer_start_index=9, moe_layer_end_index=9,
        moe_num_experts=2, moe_k=1, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None, pad_token_id=0, num_mtp_layers=COUNT,
    )  # fmt: skip
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    layers = MtpModel(network, COUNT).state_dict()
    network.save_pretrained(path)
    stored = {f"model.mtp.{name}": tensor.clone() for name, tensor in layers.items() if name.startswith("layers.")}
    file = path / "model.safetensors"
    save_file({**load_file(file), **stored}, file, {"format": "pt"})
