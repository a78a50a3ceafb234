"""Makes tests/block_denoiser_reference.json: logits of SDAR, Fast-dLLM v2 and WeDLM by their public code.

    python tests/support/public_block_denoisers.py FOLDER sdar fast_dllm
    python tests/support/public_block_denoisers.py FOLDER wedlm wedlm_qwen2

FOLDER holds the public code as packages, each with an empty __init__.py: `sdar` (configuration_sdar.py and
modeling_sdar.py of a JetLM/SDAR checkpoint), `fast_dllm` (configuration.py and modeling.py of
Efficient-Large-Model/Fast_dLLM_v2_7B) and `wedlm` (hf_compat of Tencent/WeDLM). That code is run here only, never by
the playground, and needs the transformers version it was written for: 4.53 and einops for the first two, 4.57 for
WeDLM. SDAR imports GPU kernels; here torch computes what they compute. Weights are computed from their names, so that a
test makes the same.
"""
from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from public_denoisers import CANVASES, _rounded, weights

OUT = Path(__file__).parents[1] / "block_denoiser_reference.json"
BLOCK = 4
SIZES = dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=48,
    vocab_size=64, max_position_embeddings=32, rope_theta=1000000.0, rms_norm_eps=1e-6, hidden_act="silu",
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0, use_sliding_window=False,
    sliding_window=None, rope_scaling=None, attention_dropout=0.0, max_window_layers=2, mask_token_id=63,
)
CONFIGS = dict(
    sdar=SIZES | dict(model_type="sdar", head_dim=8, attention_bias=False, block_size=BLOCK, fuse_cross_entropy=True,
                      debug=False, ep_size=1, attn_implementation="flex_attention"),
    fast_dllm=SIZES | dict(model_type="Fast_dLLM_Qwen", bd_size=BLOCK, layer_types=["full_attention"] * 2),
    wedlm=SIZES | dict(model_type="wedlm", head_dim=8, qk_norm=True, attention_bias=False),
    wedlm_qwen2=SIZES | dict(model_type="wedlm", qk_norm=False, attention_bias=True),
)


def reference(network: torch.nn.Module, family: str, read) -> dict:
    """Config, names and shapes of the weights, and the logits of every canvas; read(network, canvas) -> [n, V]."""
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    network.float().eval().load_state_dict(weights(shapes))
    with torch.inference_mode():
        logits = [_rounded(read(network, canvas)) for canvas in CANVASES]
    return dict(config=CONFIGS[family], shapes=shapes, canvases=CANVASES, logits=logits)


def without_kernels() -> None:
    """Modules in place of the GPU kernels that SDAR imports."""
    for name in ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm",
                 "flash_attn.bert_padding", "sdar.fused_linear_diffusion_cross_entropy"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["flash_attn.ops.triton.layer_norm"].rms_norm_fn = rms_norm
    sys.modules["flash_attn"].flash_attn_func = attention
    sys.modules["flash_attn"].flash_attn_varlen_func = None
    for name in ("index_first_axis", "pad_input", "unpad_input"):
        setattr(sys.modules["flash_attn.bert_padding"], name, None)
    sys.modules["sdar.fused_linear_diffusion_cross_entropy"].FusedLinearDiffusionCrossEntropyLoss = None


def rms_norm(states: torch.Tensor, weight: torch.Tensor, bias: None, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(states, weight.shape, weight, eps)


def attention(queries, keys, values, causal: bool, softmax_scale: float) -> torch.Tensor:
    """Full attention of states [batch, positions, heads, head_dim]."""
    queries, keys, values = (states.transpose(1, 2) for states in (queries, keys, values))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return mixed.transpose(1, 2)


def sdar() -> dict:
    without_kernels()
    from sdar.configuration_sdar import SDARConfig
    from sdar.modeling_sdar import SDARForCausalLM
    config = {name: value for name, value in CONFIGS["sdar"].items() if name != "attn_implementation"}
    return reference(SDARForCausalLM(SDARConfig(**config)), "sdar", _sdar_logits)


def _sdar_logits(network: torch.nn.Module, canvas: list[int]) -> torch.Tensor:
    """With the mask that SDAR's own generation makes: blocks of the whole text, each repeated for its positions."""
    blocks = torch.ones(-(-len(canvas) // BLOCK), -(-len(canvas) // BLOCK)).tril()
    mask = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:len(canvas), :len(canvas)]
    return network(torch.tensor([canvas]), attention_mask=mask[None, None]).logits[0]


def fast_dllm() -> dict:
    from fast_dllm.configuration import Fast_dLLM_QwenConfig
    from fast_dllm.modeling import Fast_dLLM_QwenForCausalLM
    network = Fast_dLLM_QwenForCausalLM(Fast_dLLM_QwenConfig(**CONFIGS["fast_dllm"]))
    return reference(network, "fast_dllm", lambda network, canvas: network(
        torch.tensor([canvas]), block_size=BLOCK).logits[0])


def wedlm(family: str = "wedlm") -> dict:
    from wedlm.configuration_wedlm import WeDLMConfig
    from wedlm.modeling_wedlm import WeDLMForCausalLM
    return reference(WeDLMForCausalLM(WeDLMConfig(**CONFIGS[family])), family, _wedlm_logits)


def _wedlm_logits(network: torch.nn.Module, canvas: list[int]) -> torch.Tensor:
    """In the order of WeDLM's own generation, and back in the order of the text."""
    ids, places = torch.tensor(canvas), torch.arange(len(canvas))
    ids, places = network._efficient_reorder_sequence(ids, ids == 63, places)
    found = network(ids[None], position_ids=places[None], attention_mask=torch.ones(1, len(canvas))).logits[0]
    return torch.empty_like(found).index_copy(0, places, found)


MAKERS = dict(sdar=sdar, fast_dllm=fast_dllm, wedlm=wedlm, wedlm_qwen2=lambda: wedlm("wedlm_qwen2"))

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    made = stored | {family: MAKERS[family]() for family in sys.argv[2:]}
    OUT.write_text(json.dumps({family: made[family] for family in sorted(made)}) + "\n", encoding="utf-8")
