"""Which part of a network lies on which GPU, where one GPU has no room for all of it.

The division is accelerate's, which transformers uses for `device_map="auto"`. Consecutive layers share a device, so
that the hidden states move from one GPU to the next, and only one of them computes at a time. Splitting each layer over
the GPUs (tensor parallelism) would use all of them at once. The plans of the transformers library for that need one
process for each GPU, so they do not run in the one process of the page.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import CustomDtype, get_balanced_memory
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from playground.engine.canvas.masked_models import is_noise_model, masking_of
from playground.engine.device_memory import HEADROOM, UNQUANTIZED, gpu_memory
from playground.engine.encoder_decoder.configs import is_encoder_decoder
from playground.engine.recurrent.recurrent_layers import is_recurrent
from playground.errors import Refusal

WEIGHT_TYPES = {"int8": torch.int8, "nf4": CustomDtype.INT4, "fp4": CustomDtype.INT4}


def spread_over_gpus(name: str, config: PretrainedConfig, dtype: str, quantization: str) -> dict[str, str]:
    """The GPU of each part of a network by its name; raises Refusal if it cannot be divided among the GPUs.

    dtype: of the weights that are not quantised, by its name in torch. quantization: int8, nf4, fp4 or none.
    """
    if masking_of(config) is not None or is_noise_model(config):
        raise _refusal(name, "it fills a canvas, which lies on one GPU")
    if is_encoder_decoder(config):
        raise _refusal(name, "its encoder and its decoder lie on one GPU")
    with init_empty_weights():
        network = AutoModelForCausalLM.from_config(config)
    network.tie_weights()  # parts that share weights get one GPU
    if is_recurrent(network):
        raise _refusal(name, "the states of its recurrent layers lie on one GPU")
    room = {index: int(free / HEADROOM) for index, (_, free) in enumerate(gpu_memory())}
    found = _divided(network, room, getattr(torch, dtype), quantization)
    if not all(isinstance(place, int) for place in found.values()):
        raise _refusal(name, "its layers cannot be divided so that each GPU has room for its part")
    return {part: f"cuda:{place}" for part, place in found.items()}


def _divided(
    network: PreTrainedModel, room: Mapping[int, int], dtype: torch.dtype, quantization: str
) -> dict[str, int | str]:
    """Parts by GPU, as evenly as whole layers allow; "disk" for what fits nowhere."""
    whole = {name: dtype for name, _ in network.named_parameters() if any(part in name for part in UNQUANTIZED)}
    sizes = {"dtype": WEIGHT_TYPES.get(quantization, dtype), "special_dtypes": whole}
    blocks = network._no_split_modules
    balanced = get_balanced_memory(network, dict(room), no_split_module_classes=blocks, **sizes)
    return infer_auto_device_map(network, balanced, no_split_module_classes=blocks, **sizes)


def _refusal(name: str, why: str) -> Refusal:
    return Refusal(
        f"{name} does not fit on one GPU and cannot be spread over several, because {why}: choose nf4 weights or a "
        "smaller model, or free memory first.",
        "model",
    )
