"""Why the files of a checkpoint do not hold the weights that its config.json asks for, from the library's report.

The library fills gaps with random numbers and only logs it, so that a model with any gap is refused.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from playground.engine.loading.unused_weights import SCALE, cause_of

NUMBER = re.compile(r"\.(\d+)\.")
Mismatch = tuple[str, Iterable[int], Iterable[int]]  # name, shape in the files, shape in the network


@dataclass(frozen=True)
class Gaps:
    """What does not fit between files and network. `unused`: names of stored tensors that are left over."""

    missing: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, report: dict[str, Any]) -> Gaps:
        """Of the library's loading report."""
        return cls(sorted(report["missing_keys"]), sorted(report["mismatched_keys"]), sorted(report["unexpected_keys"]))

    def __bool__(self) -> bool:
        return bool(self.missing or self.mismatched)

    def cause(self, network: PreTrainedModel) -> str:
        """Why there are gaps, and what to do: the first cause that is known, otherwise the first gap."""
        return next(self._causes(network))

    def _causes(self, network: PreTrainedModel) -> Iterator[str]:
        if prefix := self._wrapper():
            yield (f"its tensors are named {prefix[:40]}..., as a wrapper such as torch.compile or DataParallel names "
                   "them; save the network inside of the wrapper")
        if cause := cause_of(network, self.unused):
            yield cause
        if scale := next(filter(SCALE.search, self.missing), ""):
            yield (f"its config.json says that the weights are quantised, and they hold no {scale[:120]}; remove "
                   "quantization_config there if they are stored in full precision")
        if layers := _layers_asked(network, self.missing):
            yield layers
        if self.missing and set(self.missing) <= _head_names(network):
            yield (f"they hold no {self.missing[0]}, so they are those of a network without its head; save the whole "
                   "causal language model, or set tie_word_embeddings to true if the embeddings are its head")
        if self.mismatched:
            yield _sizes(network, self.mismatched[0])
        yield f"they hold no {self.missing[0][:120]}; save the model again, or choose another"

    def _wrapper(self) -> str:
        """What stored names have before those that are missing; empty if nothing is."""
        unused = set(self.unused)
        ends = (name[:-len(gap)] for gap in self.missing[:1] for name in unused if name.endswith(f".{gap}"))
        return next((prefix for prefix in ends if all(prefix + gap in unused for gap in self.missing)), "")


def _layers_asked(network: PreTrainedModel, missing: list[str]) -> str:
    """The cause if a list of layers is longer than what is stored of it."""
    for name in missing:
        for match in NUMBER.finditer(name):
            layers, number = _module(network, name[:match.start()]), int(match[1])
            if isinstance(layers, nn.ModuleList) and _is_last_stored(layers, name[:match.start()], number, missing):
                asked = len(layers)
                return f"its config.json asks for {asked} layers and {number} are stored; correct num_hidden_layers"
    return ""


def _is_last_stored(layers: nn.ModuleList, path: str, number: int, missing: list[str]) -> bool:
    """Whether of this layer and all after it nothing is stored, and something is of the one before."""
    gaps = set(missing)

    def is_missing(layer: int) -> bool:
        return all(f"{path}.{layer}.{weight}" in gaps for weight, _ in layers[layer].named_parameters())

    return number > 0 and not is_missing(number - 1) and all(map(is_missing, range(number, len(layers))))


def _module(network: PreTrainedModel, path: str) -> nn.Module | None:
    return dict(network.named_modules()).get(path)


def _head_names(network: PreTrainedModel) -> set[str]:
    head = network.get_output_embeddings()
    return {f"{name}.{weight}" for name, module in network.named_modules() if module is head
            for weight, _ in module.named_parameters()}


def _sizes(network: PreTrainedModel, mismatch: Mismatch) -> str:
    name, stored, asked = mismatch[0], *map(list, mismatch[1:])
    rows = (network.get_input_embeddings(), network.get_output_embeddings())
    about_tokens = any(name == f"{path}.weight" for path, module in network.named_modules() if module in rows)
    entry = "vocab_size" if about_tokens and stored[1:] == asked[1:] else "that size"
    return f"{name[:120]} is {stored} in the files and {asked} by config.json; correct {entry} there"
