"""The library's class that reads the weights of a config."""
from __future__ import annotations

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DiffusionGemmaForBlockDiffusion,
    PretrainedConfig,
    PreTrainedModel,
)

from playground.engine.canvas.masked_models import is_noise_model
from playground.engine.encoder_decoder.configs import is_encoder_decoder


def network_class(config: PretrainedConfig) -> type:
    """The class whose `from_pretrained` reads the weights."""
    if is_noise_model(config):
        return DiffusionGemmaForBlockDiffusion
    return AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM


def built_network(config: PretrainedConfig) -> PreTrainedModel:
    """A network of this config with random weights, on the meta device if the caller chose it."""
    kind = network_class(config)
    return kind(config) if issubclass(kind, PreTrainedModel) else kind.from_config(config, trust_remote_code=False)
