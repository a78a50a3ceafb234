"""Networks with the shapes of well-known instruct models and random weights, built on the device and never stored.

The time of a forward depends on shapes, not on learnt weights. The tokenizer is the bundled one; ids beyond its
vocabulary decode to nothing. Shapes are those of the published configurations:
    huggingface.co/Qwen/Qwen2.5-0.5B-Instruct
    huggingface.co/Qwen/Qwen2.5-1.5B-Instruct
    huggingface.co/meta-llama/Llama-3.1-8B-Instruct
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from playground.bench.speed.baselines import TwinModels, twin
from playground.bench.speed.speed_defaults import SHAPES
from playground.engine.checkpoint.catalogue import BUNDLED, local_folder
from playground.engine.device_memory import free_bytes, size_text
from playground.engine.loading.load import HEADROOM, Loading
from playground.engine.model import Model
from playground.errors import Refusal

SEED = 0


@dataclass(frozen=True)
class Shape:
    """A network's configuration: its class and arguments."""

    kind: type[PreTrainedConfig]
    numbers: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        return self.kind(**self.numbers)


QWEN = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
KNOWN = {
    "0.5b": Shape(
        Qwen2Config,
        {**QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    ),
    "1.5b": Shape(
        Qwen2Config,
        {**QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    ),
    "8b": Shape(
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
}


def build(name: str, loading: Loading) -> TwinModels:
    """Build one of SHAPES by name; raises Refusal if it does not fit on the device or cannot be quantised there."""
    loading = loading.resolve()
    check(name, loading)
    return assemble(KNOWN[name].config(), SHAPES[name], loading)


def check(name: str, loading: Loading) -> None:
    """Raise Refusal for a shape that cannot be built, before anything is; `loading` is resolved."""
    if loading.quantization not in ("none", "nf4"):
        raise Refusal(
            f"Networks with random weights are not built in {loading.quantization}: choose nf4, or no quantization.",
            "quantization",
        )
    if loading.quantization == "nf4" and not loading.device.startswith("cuda"):
        raise Refusal(
            "Networks with random weights are quantised to nf4 on a CUDA device only: choose no quantization here.",
            "quantization",
        )
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(KNOWN[name].config()).num_parameters()
    needed, free = parameters * getattr(torch, loading.dtype).itemsize * HEADROOM, free_bytes(loading.device)
    if needed > free:
        raise Refusal(
            f"{SHAPES[name]} takes about {size_text(needed)} in {loading.dtype}, and {size_text(free)} are free on "
            f"{loading.device}: choose a smaller shape.",
            "shapes",
        )


def assemble(config: PreTrainedConfig, title: str, loading: Loading) -> TwinModels:
    """A network of random weights twice, as `load_twice` returns a stored one; `loading` is resolved."""
    torch.manual_seed(SEED)
    with torch.device(loading.device):
        network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, loading.dtype)).eval()
    if loading.quantization == "nf4":
        _quantise(network)
    untouched = twin(network)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(local_folder(BUNDLED[0].name))
    return TwinModels(Model(network, tokenizer, title, "random weights", loading.quantization), untouched)


def _quantise(network: PreTrainedModel) -> None:
    """Quantise all linear layers except the lm_head to 4 bits, as the library loads them."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    linear = [
        (parent, name, part)
        for parent in network.model.modules()
        for name, part in parent.named_children()
        if type(part) is nn.Linear
    ]
    for parent, name, part in linear:
        with torch.device("meta"):
            small = Linear4bit(
                part.in_features, part.out_features, bias=False, compute_dtype=part.weight.dtype, quant_type="nf4"
            )
        quantised = Params4bit(part.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4").to(
            part.weight.device
        )
        small.weight, small.bias = quantised, part.bias
        setattr(parent, name, small)
    network.is_loaded_in_4bit = True  # makes the library count unpacked weights
