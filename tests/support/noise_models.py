"""A tiny DiffusionGemma of the library with random weights."""
from __future__ import annotations

import torch
from toys import byte_tokenizer
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from playground.engine.canvas.noise_denoiser import NoiseDenoiser

BLOCK = 6
TEXT = dict(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, global_head_dim=8, max_position_embeddings=128, sliding_window=64,
    num_experts=4, top_k_experts=2, moe_intermediate_size=16, pad_token_id=0, bos_token_id=2, eos_token_id=None,
    layer_types=["sliding_attention", "full_attention"],
)
VISION = dict(
    model_type="gemma4_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8,
)


def network() -> DiffusionGemmaForBlockDiffusion:
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(
        text_config=TEXT, vision_config=VISION, canvas_length=BLOCK, initializer_range=0.4, image_token_id=300,
        boi_token_id=301, eoi_token_id=302,
    )
    made = DiffusionGemmaForBlockDiffusion(config).float().eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1 and "vision" not in name:
                weight.normal_(0, 0.4)
    made.tie_weights()
    return made


def denoiser() -> NoiseDenoiser:
    model = NoiseDenoiser(network(), byte_tokenizer(), "random noise model")
    model.end_ids = frozenset()
    return model
