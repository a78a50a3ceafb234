"""Reads the weights of a network, which must all be there, all be used, and be quantised as they are stored."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from playground.engine.canvas.masked_models import masking_of, weight_names
from playground.engine.checkpoint.hub_files import first_sentence
from playground.engine.loading.missing_weights import Gaps
from playground.engine.loading.network_class import network_class
from playground.engine.loading.stored_weights import StoredForm, cast_rest
from playground.engine.loading.text_parts import text_names
from playground.engine.loading.unused_weights import check_unused
from playground.errors import Refusal


@dataclass(frozen=True)
class WeightReading:
    """How weights are read.

    places: the device of each part of the network, "" for all of it. quantization: with which they are quantised now.
    form: how they are stored, if quantised. variant: of the file names, such as fp16.
    """

    dtype: torch.dtype
    places: dict[str, str]
    quantization: str = "none"
    form: StoredForm | None = None
    variant: str = ""

    def arguments(self) -> dict[str, Any]:
        """Those for `from_pretrained` that are set: there, None is a value, and replaces what the files say."""
        quantized = self.form.arguments if self.form else _quantization(self.quantization, self.dtype)
        return {**quantized, **({"variant": self.variant} if self.variant else {})}


def read_network(name: str, folder: Path, config: PretrainedConfig, reading: WeightReading) -> PreTrainedModel:
    """The network in evaluation mode; raises Refusal."""
    # bitsandbytes warns of a cast at every int8 layer of every forward
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    try:
        network, report = network_class(config).from_pretrained(
            folder,
            **_renaming(config),
            **reading.arguments(),
            dtype=reading.dtype,
            device_map=reading.places,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as reason:  # a network may fail to be built in any way
        raise Refusal(
            f"{name} cannot be loaded ({first_sentence(reason)}): choose another model or another setting.", "model"
        ) from None
    if gaps := Gaps.of(report):
        raise Refusal(f"The weights of {name} do not belong to its config.json: {gaps.cause(network)}.", "model")
    check_unused(name, network, report["unexpected_keys"], folder)
    if reading.form and reading.form.arguments:
        cast_rest(network, reading.dtype)
    network.config.return_dict = True  # the library itself reads what a network returns by name
    return network.eval()


def _renaming(config: PretrainedConfig) -> dict[str, Any]:
    """Arguments for a network that is stored with another config or under other names; none for all others."""
    if names := text_names(config):
        return {"config": config, "key_mapping": names}
    if masking_of(config) is None:
        return {}
    return {"config": config, "key_mapping": weight_names(config)}


def _quantization(name: str, dtype: torch.dtype) -> dict[str, BitsAndBytesConfig]:
    if name == "none":
        return {}
    if name == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_compute_dtype=dtype
        )
    }
