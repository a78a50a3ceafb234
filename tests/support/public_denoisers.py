"""Makes tests/denoiser_reference.json: logits of LLaDA and Dream by their public code, on tiny random weights.

    python tests/support/public_denoisers.py FOLDER

FOLDER holds the packages `llada` and `dream` of a checkout of NVlabs/Fast-dLLM (their `model` folders, renamed), which
carry the modelling code of both repositories. That code is run here only, never by the playground, and needs the
transformers version it was written for (4.46) and einops. Weights are computed from their names, so that a test makes
the same.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from zlib import crc32

import torch

OUT = Path(__file__).parents[1] / "denoiser_reference.json"
CANVASES = [[5, 17, 3, 63, 63, 9, 63, 30], [63] * 5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
LLADA = dict(
    model_type="llada", d_model=32, n_heads=4, n_kv_heads=2, n_layers=2, mlp_hidden_size=48, vocab_size=64,
    embedding_size=64, max_sequence_length=32, rope=True, rope_theta=500000.0, rms_norm_eps=1e-5,
    layer_norm_type="rms", activation_type="silu", block_type="llama", weight_tying=False, include_bias=False,
    attention_layer_norm=False, flash_attention=False, alibi=False, mask_token_id=63, eos_token_id=0, pad_token_id=0,
)
DREAM = dict(
    model_type="Dream", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    intermediate_size=48, vocab_size=64, max_position_embeddings=32, rope_theta=1000000.0, rms_norm_eps=1e-6,
    hidden_act="silu", tie_word_embeddings=False, mask_token_id=63, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    use_sliding_window=False,
)


def weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Random weights that depend on name and shape alone; those of norms are near 1."""
    return {name: _weight(name, shape) for name, shape in shapes.items()}


def _weight(name: str, shape: list[int]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return 1 + 0.2 * drawn if "norm" in name or "ln_f" in name else 0.3 * drawn


def reference(network: torch.nn.Module, config: dict) -> dict:
    """Config, names and shapes of the weights, and the logits of every canvas."""
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    network.load_state_dict(weights(shapes))
    with torch.inference_mode():
        logits = [_rounded(network(torch.tensor([canvas])).logits[0]) for canvas in CANVASES]
    return dict(config=config, shapes=shapes, canvases=CANVASES, logits=logits)


def _rounded(logits: torch.Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in logits.tolist()]


def llada() -> dict:
    from llada.configuration_llada import LLaDAConfig
    from llada.modeling_llada import LLaDAModelLM
    return reference(LLaDAModelLM(LLaDAConfig(**LLADA), init_params=True).float().eval(), LLADA)


def dream() -> dict:
    from dream.configuration_dream import DreamConfig
    from dream.modeling_dream import DreamModel
    return reference(DreamModel(DreamConfig(**DREAM)).float().eval(), DREAM)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    OUT.write_text(json.dumps(dict(llada=llada(), dream=dream())) + "\n", encoding="utf-8")
