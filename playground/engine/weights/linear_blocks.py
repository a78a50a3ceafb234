"""The linear layers of a network, decoder layer by decoder layer, with the inputs that calibration texts give them.

Decoder layers run one at a time: each reads what the layers before it put out, as they have become by then. So a change
that goes through the blocks in order sees the inputs that its layers will have.
"""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.engine.hooks import decoder_layers
from playground.engine.weights.expert_matrices import ExpertMatrix, RouterReading, expert_matrices, routed_rows
from playground.errors import Refusal

ROUTER = re.compile(r"(^|\.)(router|gate)$")  # of a mixture of experts; a small error there chooses other experts
Layer = nn.Linear | ExpertMatrix
UNCHANGED_BITS = 16.0  # of a weight that no change has touched, as checkpoints usually store it


@dataclass
class LinearBlocks:
    """A network whose linear layers may be given other weights. texts: token ids, on which changes are calibrated."""

    network: PreTrainedModel
    texts: list[list[int]] = field(default_factory=list)
    progress: Progress = unseen
    bits: dict[str, float] = field(default_factory=dict)  # of each weight that was changed, on average, by layer

    def __post_init__(self) -> None:
        self.layers = linear_layers(self.network)
        self.blocks = [LinearBlock(self, index, module) for index, module in enumerate(decoder_layers(self.network))]
        self._states: list[Tensor] = []  # [1, n, d] for each text, the input of the block below
        self._at = -1  # no block has its input yet

    def __iter__(self) -> Iterator[LinearBlock]:
        """The blocks in order."""
        for block in self.blocks:
            self.progress(block.index / len(self.blocks), f"Changing layer {block.index + 1} of {len(self.blocks)}")
            yield block

    def weight(self, name: str) -> Tensor:
        """The weights of a layer in float32, [out, in]."""
        return self.layers[name].weight.detach().float()

    def put(self, name: str, weight: Tensor, bits: float) -> None:
        """Give a layer other weights [out, in] that take so many bits each, with all that belongs to them.

        A layer whose weights stay as they are keeps its tensor.
        """
        layer, self.bits[name] = self.layers[name], bits
        new = weight.to(layer.weight)
        if not torch.equal(new, layer.weight):
            layer.weight = nn.Parameter(new.contiguous(), requires_grad=False)

    def logits(self, ids: list[int], weights: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """After each token of a text, [n, V] in float32, with other weights [out, in] for some layers, for which
        gradients flow.
        """
        replaced = _parameters(self.network, self.layers, weights)
        given = {"input_ids": torch.tensor([ids], device=self.network.device), "use_cache": False}
        return functional_call(self.network, replaced, (), given).logits[0].float()

    def states(self, index: int) -> list[Tensor]:
        """What a block reads, [1, n, d] for each text."""
        if self._at < 0:
            self._catch()
        while self._at < index:
            self._states = [self.blocks[self._at].run(states, text) for text, states in enumerate(self._states)]
            self._at += 1
        return self._states

    @torch.no_grad()
    def _catch(self) -> None:
        """Read the texts once, for the input of the first block and the other arguments of all."""
        with _caught([block.module for block in self.blocks]) as found:
            for ids in self.texts:
                self.network.base_model(input_ids=torch.tensor([ids], device=self.network.device), use_cache=False)
        self._states = [states.clone() for states, _, _ in found[0]]
        for block, calls in zip(self.blocks, found):
            block.arguments = [(args, kwargs) for _, args, kwargs in calls]
        self._at = 0


@dataclass
class LinearBlock:
    """A decoder layer. arguments: beside the hidden states, of its call for each text."""

    whole: LinearBlocks
    index: int
    module: nn.Module
    arguments: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)

    @property
    def layers(self) -> list[str]:
        """The names of its linear layers."""
        inside = set(map(id, self.module.modules()))
        return [name for name, layer in self.whole.layers.items() if id(_module(layer)) in inside]

    def run(self, states: Tensor, text: int, weights: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """What it puts out for one text, [1, n, d], with the weights that it has now, or with other ones [out, in] for
        some layers, for which gradients flow.
        """
        args, kwargs = self.arguments[text]
        replaced = _parameters(self.module, self.whole.layers, weights)
        with torch.set_grad_enabled(bool(weights) and torch.is_grad_enabled()):
            out = functional_call(self.module, replaced, (states, *args), kwargs)
        return out[0] if isinstance(out, tuple) else out

    def logits(self, text: int, weights: Mapping[str, Tensor]) -> Tensor:
        """The network's logits [n, V] after a text with other weights [out, in] for some layers of this block or later
        ones. Earlier blocks are not run again.
        """
        with giving((block.module for block in self.whole.blocks[:self.index]), self.whole.states(self.index)[text]):
            return self.whole.logits(self.whole.texts[text], weights)

    def inputs(self) -> dict[str, Tensor]:
        """What its linear layers read, [n, in] over all texts in float32, by name; a layer that reads nothing is left
        out.
        """
        states = self.whole.states(self.index)
        names = {id(self.whole.layers[name]): name for name in self.layers}
        found: dict[str, list[Tensor]] = defaultdict(list)
        with read_by(self.whole.layers[name] for name in self.layers) as seen:
            for text, rows in enumerate(states):
                self.run(rows, text)
                for layer, given in seen.items():
                    found[names[layer]] += given
                    given.clear()
        shared: dict[tuple[int, ...], Tensor] = {}  # query, key and value projections read the same
        return {name: _joined(parts, shared) for name, parts in found.items()}

    def routed(self) -> RouterReading | None:
        """What its router does with all texts; None if it has no experts."""
        states = self.whole.states(self.index)
        matrices = {name: layer for name in self.layers if isinstance(layer := self.whole.layers[name], ExpertMatrix)}
        return routed_rows(self.module, matrices, lambda: [self.run(rows, text) for text, rows in enumerate(states)]
                           ) if matrices else None


def linear_layers(network: PreTrainedModel) -> dict[str, Layer]:
    """The linear layers within decoder layers, by name, and the matrices of experts. Raises Refusal if there is none.
    """
    inside = {id(module) for layer in decoder_layers(network) for module in layer.modules()}
    found: dict[str, Layer] = {name: module for name, module in network.named_modules()
                               if id(module) in inside and type(module) is nn.Linear and not ROUTER.search(name)}
    found |= {name: matrix for name, matrix in expert_matrices(network).items() if id(_module(matrix)) in inside}
    if not found:
        kind = network.config.model_type
        raise Refusal(f"The layers of {kind} models are not linear layers whose weights can be changed: choose another "
                      "model.", "weights")
    return found


@contextmanager
def read_by(layers: Iterator[Layer]) -> Iterator[dict[int, list[Tensor]]]:
    """What layers read while this is open, by their ids."""
    seen: dict[int, list[Tensor]] = defaultdict(list)
    handles = [_watch(layer, seen) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _watch(layer: Layer, seen: dict[int, list[Tensor]]) -> RemovableHandle:
    if isinstance(layer, ExpertMatrix):
        return layer.watch(lambda rows: seen[id(layer)].append(rows))
    return layer.register_forward_pre_hook(lambda module, given: seen[id(module)].append(given[0].detach()))


def _module(layer: Layer) -> nn.Module:
    """The module whose forward reads a layer's weights."""
    return layer.experts.module if isinstance(layer, ExpertMatrix) else layer


def _parameters(module: nn.Module, layers: Mapping[str, Layer], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a module, by its own names for them, that have other weights [out, in] for some layers."""
    names = {id(part): name for name, part in module.named_modules()}
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer, own = layers[name], names[id(_module(layers[name]))]
        if isinstance(layer, ExpertMatrix):
            key = f"{own}.{layer.part}"
            found[key] = layer.among(found.get(key, getattr(layer.experts.module, layer.part)), weight)
        else:
            found[f"{own}.weight"] = weight.to(layer.weight)
    return found


@contextmanager
def giving(modules: Iterable[nn.Module], states: Tensor) -> Iterator[None]:
    """Decoder layers that put out these states [1, n, d] at once while this is open."""
    skipped = list(modules)
    try:
        for module in skipped:
            module.forward = lambda *args, **kwargs: states
        yield
    finally:
        for module in skipped:
            module.__dict__.pop("forward", None)


@contextmanager
def _caught(modules: list[nn.Module]) -> Iterator[list[list[tuple[Tensor, tuple, dict[str, Any]]]]]:
    """The calls of decoder layers while this is open: hidden states, and the arguments after them."""
    calls: list[list[tuple[Tensor, tuple, dict[str, Any]]]] = [[] for _ in modules]

    def catching(own: list, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        rest = dict(kwargs)
        states = args[0] if args else rest.pop("hidden_states")
        own.append((states, args[1:], rest))

    handles = [module.register_forward_pre_hook(_with(catching, own), with_kwargs=True)
               for module, own in zip(modules, calls)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _with(catching: Any, own: list) -> Any:
    return lambda module, args, kwargs: catching(own, module, args, kwargs)


def _joined(parts: list[Tensor], shared: dict[tuple[int, ...], Tensor]) -> Tensor:
    key = tuple(part.data_ptr() for part in parts)
    if key not in shared:
        shared[key] = torch.cat([part.flatten(0, -2).float() for part in parts])
    return shared[key]
