"""What the rows of a segment may see: the masks of its layers."""
from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy
import torch
from torch import Tensor

from playground.engine.attention.attention_mask import CAUSAL, EMPTY, Chunks, Reach, Slots, Window
from playground.engine.host_copies import moved, on_device


class MaskedSlots(Protocol):
    """What masks read of a KV cache."""

    device: torch.device | str
    devices: tuple[torch.device, ...]
    length: int
    parents: list[int]
    depths: list[int]
    absent: dict[int, set[int]]
    slots: list[Slots]
    window: Window | None

    def ancestors(self, first: int, end: int) -> numpy.ndarray:
        """Which scratch nodes each node from `first` to `end` descends from, [end - first, end] of 0 and 1."""


class SegmentMasks:
    """Masks of the rows of one segment, scratch nodes `first` to `end`, built when a layer first asks.

    Layers with the same slots share one.
    """

    def __init__(self, store: MaskedSlots, first: int, positions: list[int]):
        self.store, self.first, self.end, self.positions = store, first, first + len(positions), positions
        self._built: dict[tuple, Tensor | str | None] = {}

    def of(self, layer: int, reach: Reach) -> Tensor | str | None:
        """What the rows may see in a layer: [rows, slots], [kv_heads, rows, slots], CAUSAL, or None for everything.

        It is on the layer's device.
        """
        if not self.store.devices:
            return self._on_store(layer, reach)
        device = self.store.devices[layer]
        if layer in self.store.absent:
            return self._on_store(layer, reach).to(device)
        key = (reach, self._entry(layer), device)
        if key not in self._built:
            mask = self._on_store(layer, reach)
            self._built[key] = mask.to(device) if isinstance(mask, Tensor) else mask
        return self._built[key]

    @property
    def is_chain(self) -> bool:
        """Whether each scratch node up to these rows continues the one before it."""
        return self.store.parents[:self.end] == list(range(-1, self.end - 1))

    def slot_positions(self, layer: int) -> Tensor:
        """True positions of all slots up to these rows, trunk and scratch, [1 or kv_heads, slots]."""
        trunk = self.store.slots[self._entry(layer)].positions
        return torch.cat([trunk, self._scratch_positions().expand(len(trunk), -1)], 1)

    def _on_store(self, layer: int, reach: Reach) -> Tensor | str | None:
        """The mask of a layer on the device of the KV cache."""
        slots = self.store.slots[self._entry(layer)]
        if absent := self.store.absent.get(layer):
            return self._without(absent, slots, reach)
        key = (reach, self._entry(layer))
        if key not in self._built:
            self._built[key] = self._build(slots, reach)
        return self._built[key]

    def _entry(self, layer: int) -> int:
        """Which entry of the slots is the layer's."""
        return layer if len(self.store.slots) > 1 else 0

    def _without(self, absent: set[int], slots: Slots, reach: Reach) -> Tensor:
        """The mask of a layer in which some scratch nodes left no states, [rows, slots] or [kv_heads, rows, slots]."""
        mask = self._explicit(slots, reach).clone()
        mask[..., [slots.count + node for node in absent if node < self.end]] = False
        return mask

    def _build(self, slots: Slots, reach: Reach) -> Tensor | str | None:
        rows = len(self.positions)
        if is_restricted(self.store, self.end, reach) or not slots.dense:
            return self._explicit(slots, reach)
        if not self.is_chain:
            seen = torch.ones(rows, slots.count, dtype=torch.bool, device=self.store.device)
            return torch.cat([seen, self._scratch], 1)
        if rows == 1:
            return None
        before = slots.count + self.first
        if not before:
            return CAUSAL
        return torch.ones(rows, before + rows, dtype=torch.bool, device=self.store.device).tril(before)

    def _explicit(self, slots: Slots, reach: Reach) -> Tensor:
        trunk, own = slots.positions[:, None, :], self._scratch  # [1 or heads, 1, n]
        seen = trunk != EMPTY
        if is_restricted(self.store, self.end, reach):
            query = on_device(self.positions, self.store.device)[:, None]
            seen = seen & self._allowed(query, trunk, reach)
            own = own & self._allowed(query, self._scratch_positions(), reach)
        mask = torch.cat([seen.expand(-1, len(self.positions), -1), own.expand(len(seen), -1, -1)], 2)
        return mask[0] if len(mask) == 1 else mask

    def _allowed(self, query: Tensor, key: Tensor, reach: Reach) -> Tensor:
        allowed = query >= key
        if isinstance(reach, Chunks):
            allowed = allowed & (query // reach.size == key // reach.size)
        elif reach:
            allowed = allowed & (query - key < reach)
        if window := self.store.window:
            allowed = allowed & ((query < window.start) | window.visible(query, key))
        return allowed

    def _scratch_positions(self) -> Tensor:
        """True positions of the scratch nodes up to these rows, [nodes]."""
        depths = on_device(self.store.depths[:self.end], self.store.device, torch.long)
        return depths + self.store.length

    @cached_property
    def _scratch(self) -> Tensor:
        """Which scratch nodes each row sees in every layer, bool [rows, scratch]."""
        return moved(torch.from_numpy(self.store.ancestors(self.first, self.end)).bool(), self.store.device)


class LateMasks(SegmentMasks):
    """Masks of trunk tokens that are written to the slots from `first` on: each sees those before it."""

    def slot_positions(self, layer: int) -> Tensor:
        return self.store.slots[self._entry(layer)].positions[:, :self.end]

    def _build(self, slots: Slots, reach: Reach) -> Tensor | str | None:
        if not self.first and not is_restricted(self.store, self.end, reach):
            return CAUSAL
        query = on_device(self.positions, self.store.device)[:, None]
        return self._allowed(query, slots.positions[0, :self.end], reach)


def is_restricted(store: MaskedSlots, end: int, reach: Reach) -> bool:
    """Whether some row of a segment that ends before scratch node `end` may not see all positions before it."""
    limit = reach.size if isinstance(reach, Chunks) else reach
    return store.window is not None or bool(limit and store.length + end > limit)
