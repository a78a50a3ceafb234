"""The third hook into a model of the transformers library: recurrent layers continue the states of KV caches.

A *mixer* is the part of a recurrent layer that reads a state: a gated delta net, a Mamba mixer, a short convolution.
The library passes it the rows of one text in order. In the playground the rows of one forward belong to several caches
and may be nodes of trees. So each mixer runs once for every batch of chains of equal length, and each chain continues
the state of its own parent. Everything else in a layer treats rows separately.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from playground.engine.recurrent.recurrent_scan import Output, Scan, as_tuple
from playground.engine.recurrent.recurrent_state import BatchState, RecurrentMemory
from playground.errors import Refusal

PROBE = 5  # rows of the forward that finds the mixers
SHORT = 8  # rows that are computed faster one by one than in one call, which pads them to 64 or 256
LONG = 64  # more rows than a draft has
PROMPT = 2048  # rows in one call in which Mamba layers take about a gigabyte of memory


class RunningCall(Protocol):
    """What mixers read of the running forward (`engine.hooks.Call`)."""

    scan: Scan


class Mixer:
    """One mixer, which takes the place of its module's forward."""

    def __init__(self, probe: Probe, number: int, recurrence: Recurrence):
        self.number, self._probe, self._recurrence = number, probe, recurrence
        self._forward = probe.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """The mixer's output for the rows [1, rows, d] of the running forward; the library's own if none is running."""
        if self._recurrence.call is None:
            return self._forward(*args, **kwargs)
        return self._recurrence.call.scan.run(self, args[0] if args else kwargs[self._probe.hidden_name])

    def run(self, hidden: Tensor, states: BatchState) -> Output:
        """The library's forward over chains [B, n, d], which continue `states` and update them."""
        return self._forward(hidden, **self._probe.arguments(states))


class OwnStateMixer(Mixer):
    """A mixer of recurrent_gemma, whose module keeps its states in attributes."""

    def run(self, hidden: Tensor, states: BatchState) -> Output:
        block, known, count = self._probe.module, states.states, hidden.shape[1]
        # at position 0 the layer forgets all before; no other position matters to it
        positions = torch.arange(count, device=hidden.device).expand(len(hidden), count) + bool(known)
        block.conv1d_state, block.rg_lru.recurrent_states = known.get(("conv", 0)), known.get(("recurrent", 0))
        output = self._forward(hidden, position_ids=positions, attention_mask=None, use_cache=True)
        states.states = {("conv", 0): block.conv1d_state, ("recurrent", 0): block.rg_lru.recurrent_states}
        block.conv1d_state = block.rg_lru.recurrent_states = None
        return output


class Recurrence:
    """The recurrent layers of a network, and the forward that they are part of."""

    def __init__(self, network: PreTrainedModel):
        """Finds the mixers. Raises Refusal if some recurrent layer has none."""
        self.call: RunningCall | None = None
        kinds = _layer_kinds(network)
        # by decoder layer, its number among those with keys and values
        attending = [layer for layer, kind in enumerate(kinds) if isinstance(kind, CacheLayerMixin)]
        self.cache_layers = {layer: number for number, layer in enumerate(attending)}
        found, kind_of_mixer = _find_mixers(network), Mixer
        if not found:
            found, kind_of_mixer = _find_own_states(network, kinds), OwnStateMixer
        _check_found(network, kinds, found)
        self.count = len(found)
        mixers = [kind_of_mixer(probe, number, self) for number, probe in enumerate(found)]
        one_of_each = {type(probe.module): (mixer, probe.hidden) for mixer, probe in zip(mixers, found)}
        self.steps = max(_steps(mixer, hidden) for mixer, hidden in one_of_each.values())
        for mixer, probe in zip(mixers, found):
            probe.module.forward = mixer  # an instance attribute: the class is not patched

    def new_memory(self) -> RecurrentMemory:
        """States of an empty text. Layers that continue a state row by row should read a prompt at once."""
        return RecurrentMemory(self.count, PROMPT if self.steps == math.inf else 0)

    @contextmanager
    def running(self, call: RunningCall) -> Iterator[None]:
        """The forward of this call runs. Not every architecture passes keyword arguments on to its mixers."""
        self.call = call
        try:
            yield
        finally:
            self.call = None


def find_recurrence(network: PreTrainedModel) -> Recurrence | None:
    """The recurrent layers of a network; None if it has none. Raises Refusal if they cannot be run."""
    return Recurrence(network) if is_recurrent(network) else None


def is_recurrent(network: PreTrainedModel) -> bool:
    """Whether a network has recurrent layers."""
    return any(isinstance(kind, LinearAttentionCacheLayerMixin) for kind in _layer_kinds(network))


def _layer_kinds(network: PreTrainedModel) -> list[Any]:
    """What the library caches in each decoder layer; nothing is known of networks that it makes no cache for."""
    try:
        return DynamicCache(config=network.config).layers
    except (KeyError, AttributeError, ValueError, TypeError):
        return []


# --- which modules are mixers ---


class Probe(NamedTuple):
    """A mixer and its input in a short forward of the library."""

    module: nn.Module
    hidden_name: str  # its argument for the rows
    cache_name: str  # its argument for the cache
    others: tuple[str, ...]  # its other arguments without a default, such as masks and rotary embeddings: not used
    hidden: Tensor  # [1, PROBE, d]
    states: set[tuple[int, int]]  # those it updates: layer and number of each

    def arguments(self, states: BatchState) -> dict[str, BatchState | None]:
        return {self.cache_name: states, **dict.fromkeys(self.others)}


class _Watched(DynamicCache):
    """A cache of the library that notes which module updates the state of each layer."""

    def __init__(self, network: PreTrainedModel):
        super().__init__(config=network.config)
        self.entered: list[tuple[nn.Module, tuple, dict]] = []  # modules whose forward is running, with arguments
        self.found: dict[nn.Module, Probe] = {}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._note(layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> None:
        """The recurrent state, as minimax calls it."""

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._note(layer_idx)

    def _note(self, layer: int, number: int = 0) -> None:
        module, args, kwargs = self.entered[-1]
        known = signature(module.forward)
        given = known.bind(*args, **kwargs).arguments
        hidden_name, *_ = given
        cache_name = next(name for name, value in given.items() if value is self)
        others = tuple(
            name for name, parameter in known.parameters.items()
            if parameter.default is Parameter.empty and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
            and name not in (hidden_name, cache_name)
        )
        probe = Probe(module, hidden_name, cache_name, others, given[hidden_name], set())
        self.found.setdefault(module, probe).states.add((layer, number))

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.entered.append((module, args, kwargs))

    def leave(self, *_: Any) -> None:
        self.entered.pop()


def _find_mixers(network: PreTrainedModel) -> list[Probe]:
    """The mixers in the order in which they run, found by a short forward of the library with a cache it updates."""
    cache = _Watched(network)
    names = signature(network.forward).parameters
    cache_name = "past_key_values" if "past_key_values" in names else "cache_params"
    handles = [
        handle
        for module in network.modules()
        for handle in (
            module.register_forward_pre_hook(cache.enter, with_kwargs=True),
            module.register_forward_hook(cache.leave, always_call=True),
        )
    ]
    try:
        ids = torch.arange(1, PROBE + 1, device=network.device)[None] % network.config.get_text_config().vocab_size
        network(input_ids=ids, use_cache=False, **{cache_name: cache})
    finally:
        for handle in handles:
            handle.remove()
    return list(cache.found.values())


def _find_own_states(network: PreTrainedModel, kinds: list[Any]) -> list[Probe]:
    """Mixers that keep their states themselves, with arbitrary rows in place of an input."""
    width = network.config.get_text_config().hidden_size
    rows = torch.linspace(-1, 1, PROBE * width, dtype=network.dtype, device=network.device).view(1, PROBE, width)
    modules = [module for module in network.modules() if hasattr(module, "conv1d_state") and hasattr(module, "rg_lru")]
    layers = [layer for layer, kind in enumerate(kinds) if isinstance(kind, LinearAttentionCacheLayerMixin)]
    return [Probe(module, "input_states", "", (), rows, {(layer, 0)}) for layer, module in zip(layers, modules)]


def _check_found(network: PreTrainedModel, kinds: list[Any], found: list[Probe]) -> None:
    """Raise Refusal unless every state of every recurrent layer belongs to exactly one mixer."""
    expected = [
        (layer, number)
        for layer, kind in enumerate(kinds) if isinstance(kind, LinearAttentionCacheLayerMixin)
        for number in range(kind.number_of_states)
    ]
    known = sorted(state for probe in found for state in probe.states)
    shared = any(len({layer for layer, _ in probe.states}) > 1 for probe in found)
    if known != expected or shared:
        raise Refusal(
            f"The playground finds the owners of {len(known)} of the {len(expected)} recurrent states of "
            f"{network.config.model_type} models: choose another model.",
            "model",
        )


def _steps(mixer: Mixer, hidden: Tensor) -> float:
    """Rows up to which a chain after a state is computed row by row.

    That is how the library decodes. Its mixers can mostly compute several rows after a state in one call. Those of
    Mamba then ignore the state; in others, rounding differs so much that only a prompt, which the library reads in one
    call as well, may be computed so. `hidden` are rows [1, PROBE, d] to find that out with.
    """
    whole = _in_calls(mixer, hidden, (PROBE,))
    tolerance, rounding = (1e-3, 1e-5) if hidden.dtype in (torch.float32, torch.float64) else (0.05, 0.05)
    if _differ(_in_calls(mixer, hidden, (2, PROBE - 2)), whole, tolerance):
        return math.inf
    return LONG if _differ(_in_calls(mixer, hidden, (2, *[1] * (PROBE - 2))), whole, rounding) else SHORT


def _in_calls(mixer: Mixer, hidden: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The mixer's output for rows in consecutive calls of these lengths."""
    states = BatchState([{}])
    return torch.cat([as_tuple(mixer.run(part, states))[0] for part in hidden.split(lengths, 1)], 1)


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return not (found - expected).abs().max() <= tolerance * expected.abs().max()
