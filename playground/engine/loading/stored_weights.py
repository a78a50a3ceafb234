"""Weights that are stored quantised: with which method, whether they can be read here, and how they compute then.

The quantizers of the transformers library decide. Each of them names the package or the device that it lacks, and
whether it dequantises the weights while it reads them.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from huggingface_hub.utils import TensorInfo
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig, HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.utils import is_kernels_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from playground.engine.checkpoint.hub_files import first_sentence
from playground.engine.device_memory import stored_bytes
from playground.errors import Refusal

ALSO = {"gptq": "gptqmodel"}  # the library asks for a GPU where this package is missing, which runs on the CPU too
CALLED = {"bitsandbytes_8bit": "int8"}
PACKED = ("I64", "I32", "I16", "U8")  # types of tensors that hold several numbers of less than 8 bits in one
FULL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes of weights that are not quantised
CURVED = 1e-4  # measured: 5e-7 where inputs are not rounded, 5e-3 where to bfloat16, 1e-2 and more where to 8 bits
BITS = {"I64": 64, "I32": 32, "I16": 16, "U8": 8}


@dataclass(frozen=True)
class StoredForm:
    """How the weights of a checkpoint are quantised, and what the library makes of them on a device."""

    method: str
    bits: int  # of a number; 8 where the config names none
    dense: bool  # dequantised when they are read, or by the first forward: they take the memory of the dtype
    arguments: dict[str, Any] = field(default_factory=dict, compare=False)  # for `from_pretrained`

    @property
    def name(self) -> str:
        """As headers, traces and the page show it."""
        return f"{self.method} (stored)"

    @property
    def weights(self) -> str:
        """The setting of `Loading` whose weights take about as much: "none", "int8" or "nf4"."""
        return "none" if self.dense else "int8" if self.bits == 8 else "nf4"

    def bytes(self, tensors: dict[str, TensorInfo], dtype: str) -> int:
        """What the tensors take in memory, in bytes."""
        if not self.dense:
            return stored_bytes(tensors)
        return self.parameters(tensors) * getattr(torch, dtype).itemsize

    def parameters(self, tensors: dict[str, TensorInfo]) -> int:
        """How many numbers the tensors hold, scales included."""
        return sum(tensor.parameter_count * self._numbers(tensor.dtype) for tensor in tensors.values())

    def _numbers(self, dtype: str) -> int:
        return max(1, BITS[dtype] // self.bits) if dtype in PACKED and self.bits < 8 else 1


def stored_form(name: str, config: PretrainedConfig, device: str) -> StoredForm | None:
    """The form of quantised weights, None for all others; raises Refusal where they cannot be read on the device."""
    stored = stored_quantization(config)
    if stored is None:
        return None
    method = _method(name, stored)
    quantizer = _quantizer(name, method, stored, device)
    quantization = quantizer.quantization_config
    bits = _bits(stored, quantization)
    dense = bool(getattr(quantization, "dequantize", False)) or _decompresses(quantizer)
    forced = dense and isinstance(quantization, (FineGrainedFP8Config, Mxfp4Config))
    return StoredForm(
        _called(method, stored, bits), bits or 8, dense, {"quantization_config": quantization} if forced else {}
    )


def stored_quantization(config: PretrainedConfig) -> Any:
    """The entry of a config.json that says how its weights are quantised; None if there is none."""
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(decoder=True), "quantization_config", None) or None


def is_quantised(network: nn.Module) -> bool:
    """Whether a network computes with quantised weights. Their tensors may call themselves float32."""
    return bool(getattr(network, "is_quantized", False))


def is_plain(weight: Any) -> bool:
    """Whether a weight is a plain tensor of floats. One of torchao wraps others, and calls itself float32."""
    wraps = hasattr(type(weight), "__tensor_flatten__")
    return isinstance(weight, Tensor) and not wraps and weight.dtype in FULL


def parameter_count(network: PreTrainedModel) -> int:
    """Parameters of a network, each weight counted once, however many of them share a number of a quantised tensor."""
    if not is_quantised(network):
        return network.num_parameters()
    counts = {}
    for module in network.modules():
        if _has_weights(module):
            counts[id(getattr(module, "weight", module))] = module.in_features * module.out_features
            biases = [getattr(module, "bias", None)]
        else:
            biases = list(module.parameters(recurse=False))
        counts |= {id(weights): weights.numel() for weights in biases if weights is not None}
    return sum(counts.values())


def weight_bytes(network: PreTrainedModel) -> int:
    """What parameters and buffers take, those of torchao by the tensors behind them."""
    return sum(map(_held_bytes, chain(network.parameters(), network.buffers())))


def _held_bytes(weight: Tensor) -> int:
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.numel() * weight.element_size()
    return sum(_held_bytes(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])


def cast_rest(network: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters that were not quantised, which the library leaves as stored beside dequantised ones."""
    kept = {*(network._keep_in_fp32_modules or ()), *(network._keep_in_fp32_modules_strict or ())}
    for name, weights in network.named_parameters():
        if is_plain(weights) and weights.dtype != dtype and not any(part in name for part in kept):
            weights.data = weights.data.to(dtype)


@torch.inference_mode()
def rounds_inputs(network: nn.Module) -> bool:
    """Whether quantised layers round their inputs as well, as int8 and FP8 kernels do, and nf4 on CPUs with bfloat16.

    Found by asking whether each layer is linear. The last bits of what such a layer reads depend on how many rows a
    forward has, and a step of the rounding makes more of them.
    """
    layers = filter(_has_weights, network.modules())
    return is_quantised(network) and any(_is_curved(layer, network.dtype) for layer in layers)


def _has_weights(module: nn.Module) -> bool:
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return all(isinstance(size, int) for size in sizes) and not list(module.children())


def _is_curved(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether f(a + b) differs from f(a) + f(b) - f(0) by more than rounding in float32 explains."""
    held, draws = chain(layer.parameters(), layer.buffers()), torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, layer.in_features, generator=draws).to(next(held).device, dtype)
    both, first, second, none = (layer(rows).float() for rows in (a + b, a, b, torch.zeros_like(a)))
    return bool((both - first - second + none).abs().max() > CURVED * both.abs().max())


def _method(name: str, stored: Any) -> str:
    """The library's name of the method; raises Refusal for one that it does not know: it would skip it."""
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    for entry, bits in (("load_in_8bit", "8bit"), ("load_in_4bit", "4bit")):
        if isinstance(stored, dict) and stored.get(entry):
            method = f"bitsandbytes_{bits}"
    if not isinstance(method, str) or method not in AUTO_QUANTIZER_MAPPING:
        bare = " without load_in_8bit or load_in_4bit" if method == "bitsandbytes" else ""
        said = f"{str(method)[:40]!r}{bare}" if method else "no method"
        raise Refusal(
            f"The weights of {name} are stored quantised, and the quantization_config of its config.json names {said}, "
            "which the transformers library does not read: choose another form of the model.",
            "model",
        )
    return method


def _quantizer(name: str, method: str, stored: dict[str, Any], device: str) -> HfQuantizer:
    """The library's quantizer for a device; raises Refusal if it lacks a package or the device."""
    try:
        quantization = AutoQuantizationConfig.from_dict(dict(stored))
        if _lacks_kernels(quantization, device):
            quantization.dequantize = True
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except Exception as reason:  # each quantizer has its own way to say what it lacks
        needs = f" It needs {ALSO[method]} as well." if method in ALSO else ""
        raise Refusal(
            f"The weights of {name} are stored in the form {_called(method, stored, _bits(stored))}, which cannot be "
            f"read here ({first_sentence(reason)}): install the package or choose the device that is named, or choose "
            f"another form of the model.{needs}",
            "model",
        ) from None
    return quantizer


def _lacks_kernels(quantization: QuantizationConfigMixin, device: str) -> bool:
    """Whether a form that only kernels of a GPU compute with must be dequantised. The library looks at what the machine
    has, not at the device that is chosen, and misses the package only in the first forward.
    """
    if not isinstance(quantization, (FineGrainedFP8Config, Mxfp4Config)):
        return False
    return not device.startswith("cuda") or not is_kernels_available()


def _decompresses(quantizer: HfQuantizer) -> bool:
    """Whether the first forward replaces the stored weights by dense ones."""
    return isinstance(quantizer, CompressedTensorsHfQuantizer) and not quantizer.use_fp8_kernel


def _bits(stored: dict[str, Any], quantization: QuantizationConfigMixin | None = None) -> int:
    """Bits of a number as the config says, the fewest of several groups; 0 if it says nothing."""
    if isinstance(quantization, Mxfp4Config) or stored.get("load_in_4bit"):
        return 4
    groups = stored.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    said = [entry.get("num_bits") for entry in weights if isinstance(entry, dict)]
    said += [stored.get("bits"), stored.get("w_bit")]
    return min((bits for bits in said if isinstance(bits, int) and 1 <= bits <= 8), default=0)


def _called(method: str, stored: dict[str, Any], bits: int) -> str:
    """The method in the words of its users: "nf4", "gptq 4-bit", "compressed-tensors pack-quantized 4-bit"."""
    if method == "bitsandbytes_4bit":
        return "nf4" if stored.get("bnb_4bit_quant_type") == "nf4" else "fp4"
    layout = str(stored.get("format", "")) if method == "compressed-tensors" else ""
    layout = layout if re.fullmatch(r"[a-z0-9-]{1,40}", layout) else ""
    shown = f"{bits}-bit" if bits and not re.search(r"\d$", method) else ""
    return " ".join(part for part in (CALLED.get(method, method), layout, shown) if part)
