"""Adds a LoRA adapter, as PEFT stores it, to the network of its base model: W becomes W + scale B A.

The weights are merged, so that nothing runs beside the network and every fast path stays; where they are quantised,
scale B A x is added to the layer's output instead, as in training. Everything is compared with the network before
anything is changed. peft is not needed: it would put modules of its own in place of the network's layers, whose names
and types the engine knows, and a few lines read what it stores.

Sources: LoRA, Hu et al. 2021, arXiv 2106.09685; rank-stabilised, Kalajdzievski 2023, arXiv 2312.03732; DoRA, Liu et al.
2024, arXiv 2402.09353; file format of https://github.com/huggingface/peft.
"""
from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from playground.engine.checkpoint.adapter_config import WEIGHTS, AdapterConfig
from playground.engine.loading.stored_weights import is_plain
from playground.errors import Refusal

PREFIX = "base_model.model."
WRAPPERS = re.compile(r"\.(base_layer|modules_to_save|default)(?=\.)")  # modules that peft puts around the network's
PART = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|trainable_tokens_delta"
    r")(?:\.default)?(?P<rest>\.weight|\.bias)?"
)
Parts = dict[str, Tensor]


def add_adapter(network: PreTrainedModel, adapter: AdapterConfig, folder: Path) -> None:
    """Change a network by the adapter in a folder. Raises Refusal."""
    weights = _read(adapter.name, folder)
    _Addition(network, adapter).apply(*_sorted(network, adapter, weights))


class _Addition:
    """Checks every part of an adapter, then adds it."""

    def __init__(self, network: PreTrainedModel, adapter: AdapterConfig):
        self.network, self.adapter = network, adapter

    @torch.no_grad()
    def apply(self, low_rank: dict[str, Parts], whole: dict[str, Tensor]) -> None:
        """`low_rank`: parts by module. `whole`: new values of parameters, by name."""
        whole_first = {name: self._parameter(name, weight) for name, weight in whole.items()}
        changes = [(name, self._module(name), parts) for name, parts in low_rank.items()]
        for name, module, parts in changes:
            self._check(name, module, parts)
        for name, weight in whole_first.items():
            self._replace(name, weight)
        for name, module, parts in changes:
            self._add(name, module, parts)
        if any(self._is_embedding(name) for name in (*low_rank, *(name.rpartition(".")[0] for name in whole))):
            self._settle_embeddings()

    def _module(self, name: str) -> nn.Module:
        try:
            return self.network.get_submodule(name)
        except AttributeError:
            raise self._misfit(f"changes {name}, which the base model does not have") from None

    def _parameter(self, name: str, weight: Tensor) -> Tensor:
        """A whole weight in the dtype and on the device of the one it replaces."""
        path, _, last = name.rpartition(".")
        old = getattr(self._module(path), last, None)
        if not isinstance(old, nn.Parameter):
            raise self._misfit(f"replaces {name}, which the base model does not have")
        grows = weight.shape[1:] == old.shape[1:] and self._is_embedding(path)
        if weight.shape != old.shape and not grows:
            raise self._misfit(f"replaces {name} by {list(weight.shape)} numbers where the base model has "
                               f"{list(old.shape)}")
        if not old.is_floating_point():
            raise Refusal(f"The adapter {self.adapter.name} replaces {name}, which is quantised: choose no "
                          "quantization.", "quantization")
        return weight.to(old.device, old.dtype)

    def _is_embedding(self, path: str) -> bool:
        module = self.network.get_submodule(path)
        return any(module is one for one in (self.network.get_input_embeddings(),
                                             self.network.get_output_embeddings()))

    def _check(self, name: str, module: nn.Module, parts: Parts) -> None:
        if "trainable_tokens_delta" in parts:
            return self._check_tokens(name, module, parts["trainable_tokens_delta"])
        down, up = _factors(parts)
        if down is None or up is None or down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
            raise Refusal(f"The adapter {self.adapter.name} lacks one of the two matrices of {name}: save it again.",
                          "model")
        shape, given = _shape(module), (up.shape[0], down.shape[1])
        if shape is None:
            raise self._misfit(f"changes {name}, which is no linear layer and no embedding of the base model")
        if shape != given:
            raise self._misfit(f"changes {name} by a matrix of {list(given)} where the base model has {list(shape)}")
        if "lora_magnitude_vector" in parts and not isinstance(module, (nn.Linear, Conv1D)):
            raise Refusal(f"The adapter {self.adapter.name} changes the embedding {name} by DoRA, which is not "
                          "supported: merge it with peft.", "model")
        if _is_packed(module) and {"lora_magnitude_vector", "lora_B.bias"} & parts.keys():
            raise Refusal(f"The adapter {self.adapter.name} changes quantised weights by more than a product (DoRA, or "
                          "a bias of its own): choose no quantization.", "quantization")

    def _check_tokens(self, name: str, module: nn.Module, rows: Tensor) -> None:
        ids, weight = self.adapter.token_ids(name), getattr(module, "weight", None)
        fits = weight is not None and rows.shape == (len(ids), *weight.shape[1:]) and max(ids, default=0) < len(weight)
        if not ids or not fits:
            raise self._misfit(f"has {len(rows)} rows for tokens of {name} that do not fit the base model")

    def _add(self, name: str, module: nn.Module, parts: Parts) -> None:
        if "trainable_tokens_delta" in parts:
            weight, rows = module.weight.clone(), parts["trainable_tokens_delta"].to(module.weight)
            weight[self.adapter.token_ids(name)] = rows
            return self._set(module, weight, tied=True)
        down, up = _factors(parts)
        scale = self.adapter.scale(name, len(down))
        if _is_packed(module):
            return _run_beside(module, down, up, scale)
        wide = torch.promote_types(module.weight.dtype, torch.float32)
        down, up, weight = (part.to(module.weight.device, wide) for part in (down, up, module.weight))
        turned = isinstance(module, (Conv1D, nn.Embedding))  # weights as [in, out]
        changed = (weight.T if turned else weight) + scale * up @ down
        if (magnitude := parts.get("lora_magnitude_vector")) is not None:
            changed *= (magnitude.to(changed).flatten() / changed.norm(dim=1))[:, None]
        self._set(module, (changed.T if turned else changed).to(module.weight.dtype), self.adapter.ties)
        if (bias := parts.get("lora_B.bias")) is not None:
            own = 0 if module.bias is None else module.bias
            module.bias = nn.Parameter((own + scale * bias.to(module.weight)), requires_grad=False)

    def _replace(self, name: str, weight: Tensor) -> None:
        path, _, last = name.rpartition(".")
        module = self.network.get_submodule(path)
        if last == "weight":
            return self._set(module, weight, self.adapter.ties)
        setattr(module, last, nn.Parameter(weight, requires_grad=False))

    def _set(self, module: nn.Module, weight: Tensor, tied: bool) -> None:
        """Give a module a weight of its own, as training did: one tied to it stays as it was, unless `tied`."""
        old, new = module.weight, nn.Parameter(weight.contiguous(), requires_grad=False)
        module.weight = new
        for other in (self.network.get_input_embeddings(), self.network.get_output_embeddings()):
            if tied and other is not None and other.weight is old:
                other.weight = new

    def _settle_embeddings(self) -> None:
        """Let the config say what has become of the embeddings: how many rows, and whether the lm_head shares them."""
        embeddings, head = self.network.get_input_embeddings(), self.network.get_output_embeddings()
        if head is None:
            return
        rows = len(embeddings.weight)
        if len(head.weight) != rows:
            raise Refusal(f"The adapter {self.adapter.name} has {rows} embedding rows and {len(head.weight)} rows of "
                          "the lm_head: save it again with both.", "model")
        config = self.network.config.get_text_config(decoder=True)
        config.tie_word_embeddings = embeddings.weight is head.weight
        config.vocab_size = embeddings.num_embeddings = head.out_features = rows

    def _misfit(self, what: str) -> Refusal:
        named = f", {self.adapter.base}," if self.adapter.base else ""
        return Refusal(f"The adapter {self.adapter.name} {what}: it belongs to another base model; choose its own"
                       f"{named} as the base.", "model")


def _read(name: str, folder: Path) -> dict[str, Tensor]:
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError):
        raise Refusal(f"The file {WEIGHTS} of {name} is missing or damaged: save the adapter again as safetensors.",
                      "model") from None
    if not weights:
        raise Refusal(f"The adapter {name} is empty: its {WEIGHTS} holds no weights; save it again.", "model")
    return weights


def _sorted(network: PreTrainedModel, adapter: AdapterConfig, weights: dict[str, Tensor]
            ) -> tuple[dict[str, Parts], dict[str, Tensor]]:
    """Low-rank parts by module, and whole parameters by name, as in the network."""
    low_rank: dict[str, Parts] = defaultdict(dict)
    whole = {}
    for key, weight in weights.items():
        name = WRAPPERS.sub("", key.removeprefix(PREFIX))
        if match := PART.fullmatch(name):
            kind = match["kind"] + (".bias" if match["rest"] == ".bias" else "")
            low_rank[_known(network, match["module"].removesuffix(".token_adapter"))][kind] = weight
        else:
            whole[_known(network, name)] = weight
    return dict(low_rank), whole


def _known(network: PreTrainedModel, name: str) -> str:
    """The network's name for a module or parameter; the text part of a multimodal model has one level less."""
    first = name.split(".language_model.", 1)
    return name if len(first) < 2 or hasattr(network.base_model, "language_model") else ".".join(first)


def _factors(parts: Parts) -> tuple[Tensor | None, Tensor | None]:
    """A [rank, in] and B [out, rank]."""
    kind = "lora_" if "lora_A" in parts or "lora_B" in parts else "lora_embedding_"
    return parts.get(f"{kind}A"), parts.get(f"{kind}B")


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a layer; None for other modules."""
    if isinstance(module, nn.Linear):  # those of bitsandbytes as well
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        return module.weight.shape[1], module.weight.shape[0]
    return (module.embedding_dim, module.num_embeddings) if isinstance(module, nn.Embedding) else None


def _is_packed(module: nn.Module) -> bool:
    """Whether a layer's weights are quantised."""
    plain = type(module) is nn.Linear and is_plain(getattr(module, "weight", None))
    return isinstance(module, nn.Linear) and not plain


def _run_beside(module: nn.Module, down: Tensor, up: Tensor, scale: float) -> None:
    """Add scale B A x to the outputs of a layer whose weights cannot take it."""
    device = next(module.parameters()).device
    down, up = down.to(device), up.to(device)

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inner = nn.functional.linear(inputs[0].to(down.dtype), down)
        return output + (scale * nn.functional.linear(inner, up)).to(output.dtype)

    module.register_forward_hook(add)
