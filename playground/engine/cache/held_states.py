"""The states that a KV cache holds in slots, for the trunk and then for the scratch, and what they take."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.attention.attention_mask import EMPTY, Slots
from playground.engine.cache.freed_slots import FreedSlots
from playground.engine.cache.kv_buffer import (
    UNKNOWN,
    Capacity,
    Encode,
    KVBuffer,
    MergedTokens,
    MergeMap,
    SlotOrder,
    selected_indices,
)
from playground.engine.cache.noted_attention import Attention
from playground.engine.cache.scratch_tree import ScratchTree
from playground.engine.cache.trunk_slots import HeadCounts, counts_of, runs_of
from playground.engine.host_copies import on_device
from playground.engine.recurrent.recurrent_state import RecurrentMemory


class CacheSizes(NamedTuple):
    """What a KV cache holds and takes. The bytes of the shared prefix and of recurrent states are part of `bytes`."""

    heads: int
    quantised_slots: int
    bytes: int
    common: int
    common_bytes: int
    state_bytes: int


@dataclass
class HeldStates(ScratchTree):
    """Key and value states of committed tokens, the *trunk*, and of the scratch nodes after them.

    Each layer and head may hold other tokens of the trunk: what follows its slots, states and attention weights alike,
    moves here. Positions are always true positions in the text: eviction renumbers nothing.
    """

    depth: int  # decoder layers with keys and values
    device: torch.device | str = "cpu"  # of positions and masks, and of what policies get and return
    capacity: Capacity = UNKNOWN
    length: int = 0  # tokens of the trunk, evicted ones included: the true position of the next token
    prefix_owner: HeldStates | None = None  # the cache that owns its shared prefix, referenced to keep it alive
    recurrent: RecurrentMemory | None = None  # states of the layers without keys and values, if there are any
    freed: FreedSlots | None = None  # what was evicted since `take_freed`; None before it, and after a roll back
    devices: tuple[torch.device, ...] = ()  # of the keys and values of each layer, if they are not all on `device`

    def __post_init__(self) -> None:
        self.keys, self.values = ([KVBuffer(self.capacity) for _ in range(self.depth)] for _ in range(2))
        self.slots = [Slots(torch.empty(1, 0, dtype=torch.long, device=self.device))]  # one for all layers, or one each
        self.attention: list[Attention] = []
        self.slot_bytes: list[int] = []  # key and value states of one slot in full precision, by layer; empty at first
        self.quantises = self.is_ragged = False  # in some layer, slots are quantised, or heads hold unequally many
        self.memory_bytes = 0  # of what a cache policy holds beside the slots

    def slots_of(self, layer: int) -> Slots:
        """Positions of the slots of one layer."""
        return self.slots[layer if len(self.slots) > 1 else 0]

    def device_of(self, layer: int) -> torch.device | str:
        """Where the keys and values of a layer are."""
        return self.devices[layer] if self.devices else self.device

    @property
    def heads(self) -> int:
        return next(filter(None, (keys.heads for keys in self.keys)), 0)  # a layer without attention has none

    # --- eviction ---

    def evict(self, live: list[Tensor]) -> int:
        """Free the trunk slots that are not `live`; returns how many, summed over layers and heads.

        `live` is one mask [1 or kv_heads, slots] for all layers, or one for each.
        """
        counts = counts_of(self.slots, live)
        if counts is None:
            return 0
        before = self.live_slots()
        if self.freed and not self.freed.empty:
            self.freed = None  # slots may be listed differently now, so one eviction between two reports is noted
        if len(live) > len(self.slots):
            self.slots = [Slots(self.slots[0].positions.clone(), self.slots[0].dense) for _ in range(self.depth)]
        for index, slots in enumerate(self.slots):
            layers = range(self.depth) if len(self.slots) == 1 else (index,)
            at = index if len(live) > 1 else 0
            retained = slots.among(live[at])
            if self.freed:
                self._note_freed(index, live[at], counts[at])
            self._compact(slots, retained, counts[at].kept, layers)
        return before - self.live_slots()

    def _note_freed(self, index: int, live: Tensor, counts: HeadCounts) -> None:
        """Report an eviction. Where each head frees at most one slot, nothing more has to be read."""
        slots = self.slots[index]
        if max(counts.freed) <= 1:
            self.freed.note_one_each(index, counts.freed, counts.first)
        else:
            self.freed.note(index, slots.positions, slots.among(~live), sum(counts.freed))

    def _compact(self, slots: Slots, live: Tensor, counts: list[int], layers: range | tuple[int, ...]) -> None:
        """Close the holes. Live slots keep their order, and every head has as many slots as the fullest one needs.

        Those that a head lacks take no memory. `live` [heads, slots] excludes EMPTY slots; `counts` are of each head.
        """
        if sum(counts) == slots.live_of(len(counts)):
            return
        order = selected_indices(live, counts)
        shared = SlotOrder(order, counts)
        self.is_ragged = self.is_ragged or shared.is_ragged
        for buffer in (buffer for layer in layers for buffer in (self.keys[layer], self.values[layer])):
            buffer.compact(shared, slots.count, len(self.parents))
        dead = ~live.gather(1, order)
        for noted in self.attention:
            noted.compact(order, dead, slots.count, layers)
        slots.positions = slots.positions.expand_as(live).gather(1, order)
        slots.dense, slots.empty = min(counts) == max(counts), len(counts) * max(counts) - sum(counts)
        if not slots.dense:
            slots.positions.masked_fill_(dead, EMPTY)

    def evict_from(self, layer: int, live: Tensor) -> None:
        """Hold only the `live` tokens of the trunk, bool [1, slots], from `layer` on, which has read nothing yet."""
        before = [torch.ones_like(self.slots_of(early).positions, dtype=torch.bool) for early in range(layer)]
        self.evict([*before, *[live] * (self.depth - layer)])

    def take_freed(self) -> FreedSlots | None:
        """What was evicted since the last call; None if that is not known, so that `runs` has to be read instead."""
        freed, self.freed = self.freed, FreedSlots(self.length)
        return freed

    # --- other changes to states ---

    def merge(self, layer: int, merges: MergeMap, added: Tensor, kept: Tensor) -> MergedTokens:
        """Merge slots of a layer, keys and values alike; returns which tokens were merged.

        Each target becomes `kept` [k] times itself plus `added` [m] times its sources.
        """
        self.keys[layer].merge(merges, added, kept)
        self.values[layer].merge(merges, added, kept)
        return MergedTokens.of(merges, self.slots_of(layer).positions.expand(self.heads, -1))

    def quantise(
        self, layers: Iterable[int], due: Callable[[str, int], int], encoder: Callable[[int, str], Encode]
    ) -> None:
        """Quantise the oldest slots of layers: due("keys" or "values", slots in full precision) says how many.

        encoder(layer, "keys" or "values") encodes them.
        """
        layers = list(layers)
        for part, buffers in (("keys", self.keys), ("values", self.values)):
            for layer in layers:
                buffer, used = buffers[layer], self.slots_of(layer).count
                if count := due(part, used - buffer.quantised_slots):
                    self.quantises = True
                    buffer.quantise(count, used + len(self.parents), encoder(layer, part))

    def _reorder_scratch(self, order: list[int]) -> None:
        """Move the slots of scratch nodes to a new order."""
        chosen = on_device(order, self.device)
        for layer, buffers in enumerate(zip(self.keys, self.values)):
            for buffer in buffers:
                buffer.reorder(self.slots_of(layer).count, chosen)

    # --- sizes and contents ---

    def live_slots(self) -> int:
        """Live trunk slots over all layers and heads."""
        each = self.depth if len(self.slots) == 1 else 1
        return sum(each * slots.live * (self.heads if slots.positions.shape[0] == 1 else 1) for slots in self.slots)

    def runs(self) -> list[list[list[tuple[int, int]]]]:
        """Live true positions as half-open intervals, by layer and head; one entry if all layers or heads agree."""
        return runs_of(self.slots, self.length)

    def sizes(self) -> CacheSizes:
        """All sizes that are recorded after a commit."""
        return CacheSizes(
            self.heads, self.quantised_slots(), self.bytes(), self.common, self.common_bytes(), self.state_bytes()
        )

    def bytes(self) -> int:
        """Memory of the slots in use, trunk and scratch, of recurrent states, and of what a policy holds beside."""
        return self._slot_memory() + self.state_bytes() + self.memory_bytes

    def state_bytes(self) -> int:
        """Memory of recurrent states and of the layer inputs that other states follow from."""
        return self.recurrent.bytes(len(self.parents)) if self.recurrent else 0

    def _slot_memory(self) -> int:
        if self.quantises or self.is_ragged:
            return sum(buffer.bytes(self.slots_of(layer).count + len(self.parents))
                       for buffers in (self.keys, self.values) for layer, buffer in enumerate(buffers))
        if not self.slot_bytes:
            if not self.heads:
                return 0
            self.slot_bytes = [keys.bytes(1) + values.bytes(1) for keys, values in zip(self.keys, self.values)]
        if len(self.slots) == 1:
            return (self.slots[0].count + len(self.parents)) * sum(self.slot_bytes)
        return sum((slots.count + len(self.parents)) * each for slots, each in zip(self.slots, self.slot_bytes))

    @property
    def common(self) -> int:
        """Slots of the prefix shared with other caches."""
        return 0 if self.prefix_owner is None else self.keys[0].common

    def common_bytes(self) -> int:
        """Memory of the shared prefix, which is part of `bytes`."""
        if self.prefix_owner is None:
            return 0
        return sum(buffer.bytes(buffer.common) for buffer in (*self.keys, *self.values) if buffer.common)

    def quantised_slots(self) -> int:
        """Oldest slots whose keys are quantised, in the layer with most of them."""
        return max(buffer.quantised_slots for buffer in self.keys) if self.quantises and self.keys else 0
