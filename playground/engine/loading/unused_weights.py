"""Stored tensors that a network leaves unused: which of them change what it computes.

The library reports them and drops them. A tensor under a module of the network means that the config.json describes
another network than the files hold, so it is refused. Parts beside the language model are not needed for text.
"""
from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from huggingface_hub.utils import TensorInfo
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from playground.engine.checkpoint.model_files import WEIGHTS
from playground.engine.loading.mtp_layers import count_of
from playground.errors import Refusal

ADAPTER = re.compile(r"(^|\.)(lora_|ia3_|hada_|oft_|modules_to_save\.|base_layer\.|ranknum)")
SCALE = re.compile(r"(scale|scales|scale_inv|zeros|zero_point|absmax|quant_map|quant_state\.[^.]+|qweight|qzeros|g_idx"
                   r"|SCB|weight_format|weight_packed|weight_shape|blocks)$")
PACKED = re.compile(r"\.(qweight|qzeros|weight_packed|SCB|weight\.(absmax|quant_state\.[^.]+))$|_proj_blocks$")
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
BITSANDBYTES = ("int8", "nf4", "fp4")
# buffers of older releases, and scales of a quantised KV cache, which servers use
BUFFER = re.compile(r"((^|\.)(inv_freq|cos_cached|sin_cached|position_ids|num_batches_tracked|_float_tensor|version)"
                    r"|\.[qkv]_scale|\.kv_scale|\.[kv]_proj\.output_scale|\.attention_mask)$")
MASK = re.compile(r"\.(masked_)?bias$")
# parts beside the language model: heads of other tasks, multi-token prediction, images and sound
BESIDE = re.compile(r"^(mtp|nextn|eagle|medusa|vis|vit|image|img|video|audio|speech|sound|multi_modal|mm_|talker"
                    r"|code2wav|token2wav|connector|projector|aligner|resampler|perceiver|embed_(vision|audio|image)|encoder"
                    r"|pooler|cls|score|classifier|v_head|value_head|reward|regression)")
log = logging.getLogger(__name__)


def check_plain(name: str, tensors: dict[str, TensorInfo]) -> None:
    """Raise Refusal for packed or integer weights among the tensors of a checkpoint whose config says nothing of
    quantised ones: the library would take the integers for the weights themselves.
    """
    integers = (key for key, tensor in tensors.items() if key.endswith(".weight") and tensor.dtype in INTEGERS)
    if packed := next(chain(filter(PACKED.search, tensors), integers), ""):
        raise Refusal(
            f"The weights of {name} are stored quantised (there is {packed[:120]}), and its config.json has no "
            "quantization_config that says how: save it together with the weights.",
            "model",
        )


def check_quantised(name: str, method: str, tensors: dict[str, TensorInfo]) -> None:
    """Raise Refusal for a config that says the weights are quantised where they are stored in full precision: with
    bitsandbytes the library would read them as if they were packed.
    """
    if method in BITSANDBYTES:
        is_quantised = any(map(PACKED.search, tensors))
    else:
        is_quantised = method != "fp8" or any(tensor.dtype.startswith("F8") for tensor in tensors.values())
    if not is_quantised:
        raise Refusal(
            f"The config.json of {name} says that its weights are stored as {method}, and its files hold them in full "
            "precision, as after an adapter was merged: remove quantization_config there.",
            "model",
        )


def check_unused(name: str, network: PreTrainedModel, keys: Iterable[str], folder: Path) -> None:
    """Raise Refusal for a stored tensor that belongs to a module of the network and is not used.

    keys: `unexpected_keys` of the library's report.
    """
    unused = sorted(keys)
    if not unused:
        return
    stored = _Stored(folder)
    wrong = [key for key in unused if not _is_harmless(network, key, stored)]
    if wrong:
        cause = cause_of(network, wrong) or "correct its config.json, or choose another"
        raise Refusal(
            f"{len(wrong)} tensors in the files of {name}, such as {wrong[0][:120]}, would be left unused, so the text "
            f"would be that of another model: {cause}.",
            "model",
        )
    log.warning("%s: %d stored tensors are not part of the language model, such as %s", name, len(unused), unused[0])


def cause_of(network: PreTrainedModel, keys: Iterable[str]) -> str:
    """Why stored tensors do not belong to a network, and what to do; empty if nothing is known of any."""
    return next((cause for key in sorted(keys) if (cause := _cause(network, key))), "")


class _Stored:
    """Shapes and values of stored tensors by name. Where the library renames tensors, those are not found."""

    def __init__(self, folder: Path):
        self._files = {}
        for path in sorted(folder.glob(WEIGHTS)):
            with safe_open(path, "pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def is_mask(self, key: str) -> bool:
        """Whether it has the shape of a causal mask, [1, 1, n, n], or of the number behind one."""
        if key not in self._files:
            return False
        with safe_open(self._files[key], "pt") as file:
            return len(file.get_slice(key).get_shape()) in (0, 4)

    def is_zero(self, key: str) -> bool:
        if key not in self._files:
            return False
        with safe_open(self._files[key], "pt") as file:
            return not file.get_tensor(key).any()


def _is_harmless(network: PreTrainedModel, key: str, stored: _Stored) -> bool:
    if ADAPTER.search(key):
        return False
    if BUFFER.search(key) or (MASK.search(key) and (stored.is_mask(key) or stored.is_zero(key))):
        return True
    module, rest = _place(network, key)
    if isinstance(module, nn.ModuleList) and rest[0].isdigit():
        return len(module) <= int(rest[0]) < len(module) + _predicting(network)
    inner = getattr(network, network.base_model_prefix, network)
    # unknown parts of the whole network are beside the language model; inside of it only those known to be
    return module is network or (module is inner and bool(BESIDE.match(rest[0])))


def _predicting(network: PreTrainedModel) -> int:
    """Layers for multi-token prediction, which DeepSeek-V3 and GLM store after the others."""
    return count_of(network) or getattr(network.config.get_text_config(), "num_nextn_predict_layers", None) or 0


def _place(network: PreTrainedModel, key: str) -> tuple[nn.Module, list[str]]:
    """The innermost module of the network that a tensor's name leads to, and the names that are left."""
    return min(_places(network, key), key=lambda place: len(place[1]))


def _places(network: PreTrainedModel, key: str) -> Iterator[tuple[nn.Module, list[str]]]:
    """From the whole network, and from the part without lm_head, whose files leave out its name."""
    for module in (network, getattr(network, network.base_model_prefix, network)):
        rest = key.split(".")
        while len(rest) > 1 and isinstance(child := module._modules.get(rest[0]), nn.Module):
            module, rest = child, rest[1:]
        yield module, rest


def _cause(network: PreTrainedModel, key: str) -> str:
    module, rest = _place(network, key)
    if ADAPTER.search(key):
        return "they are an adapter that is not merged; merge it into the weights (merge_and_unload of peft) first"
    if isinstance(module, nn.ModuleList) and rest[0].isdigit():
        return f"its config.json asks for {len(module)} of the stored layers; correct num_hidden_layers"
    if SCALE.search(key):
        return "the weights are quantised in a way that its config.json does not say; correct quantization_config there"
    if rest[-1] == "bias":
        return "its config.json asks for layers without biases; correct it, for example attention_bias or mlp_bias"
    return ""
