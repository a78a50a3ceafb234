"""What a cache policy does with the rows of a segment, apart from masks by position."""
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from playground.engine.attention.attention_mask import Focus, Renumbering, RowsAndSlots, slots_of
from playground.engine.attention.cascade_attention import PartialAttention
from playground.engine.attention.line_attention import AttentionLines
from playground.engine.attention.segment_masks import SegmentMasks
from playground.engine.host_copies import on_device


class PolicyHooks(Protocol):
    """What a cache policy connected to a KV cache (`engine.cache.kv_cache.KVCache`)."""

    device: torch.device | str
    focus: Focus | None
    renumbering: Renumbering | None
    memory: Callable | None
    on_queries: Callable | None
    on_query_heads: Callable | None


class PolicyRows:
    """The rows of one segment, for the policy of its KV cache."""

    def __init__(self, store: PolicyHooks, masks: SegmentMasks):
        self.store, self.masks, self.positions = store, masks, masks.positions

    def report_heads(self, layer: int, weights: Tensor) -> None:
        """Report the attention weights of all rows by query head, [kv_heads, group, rows, slots], as they are fed."""
        self.store.on_query_heads(layer, weights.to(self.store.device), self.positions)

    def report_queries(self, layer: int, query: Tensor) -> None:
        """Report the query states of all rows, [kv_heads, group, rows, d], as they are fed."""
        self.store.on_queries(layer, query.to(self.store.device), self.positions)

    def with_memory(self, layer: int, query: Tensor, seen: PartialAttention) -> Tensor:
        """Attention of query states [heads, rows, d] over the slots and what the policy holds beside them."""
        first = self.store.device
        return self.store.memory(layer, query.to(first), self.positions, seen.to(first))

    def renumbered(self, layer: int, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key states [heads, n, 2 d] whose products are those of rows at their index in the cache.

        Each row has two queries, for keys before the gap and after it. Each key is zero in the half that does not
        apply to it.
        """
        renumbering, at = self.store.renumbering, on_device(self.positions, self.store.device)
        skipped = renumbering.skipped(at).masked_fill(at < renumbering.start, 0)
        far = renumbering.far(self.masks.slot_positions(layer))[..., None].to(keys.device)
        return torch.cat([query, renumbering.rotate_back(query, skipped)], -1), torch.cat([keys * ~far, keys * far], -1)

    def chosen(self, layer: int, weights: Tensor, mask: Tensor | None) -> Tensor:
        """The mask after the policy's selection by attention weights, bool [kv_heads, rows, slots].

        `weights` [kv_heads, rows, slots] are those under `mask` [1 or kv_heads, rows, slots]; None is no mask.
        """
        (rows, positions), choose = self._selected_rows, self.store.focus.choose
        received = weights.to(self.store.device)
        if len(rows) == len(self.positions):
            seen = choose(layer, received, positions)
        else:
            seen = torch.ones_like(received, dtype=torch.bool)
            seen[:, rows] = choose(layer, received[:, rows], positions)
        seen = seen.to(weights.device)
        return seen if mask is None else seen & mask

    @property
    def chooses_lines(self) -> bool:
        """Whether the rows attend along lines of the attention matrix, as rows of the prompt may."""
        lines = self.store.focus.lines
        return lines is not None and self.positions[-1] < lines.end

    def lines(self, layer: int, weights: Tensor, sampled: list[int]) -> AttentionLines:
        """The lines that the policy chooses by the attention weights [kv_heads, q, m] of the sampled rows."""
        first = self.store.device
        chosen = self.store.focus.lines.choose(layer, weights.to(first), sampled, on_device(self.positions, first))
        return AttentionLines(*(part.to(weights.device) for part in chosen))

    def chosen_by_states(self, layer: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """As `chosen`, by query states [kv_heads, group, rows, d] and key states [kv_heads, slots, d]."""
        first, own, numbers = self.store.device, keys.device, self.positions
        query, keys, mask = query.to(first), keys.to(first), None if mask is None else mask.to(first)
        rows, _ = self._selected_rows
        seen = torch.ones(len(keys), len(numbers), keys.shape[1], dtype=torch.bool, device=keys.device)
        visible = seen[:1] if mask is None else mask.expand(-1, len(numbers), -1) if mask.dim() == 3 else mask[None]
        index = slice(None) if len(rows) == len(numbers) else on_device(rows, first, torch.long)
        slots, committed = self.masks.slot_positions(layer), slots_of(self.masks.store.slots, layer).count
        around = RowsAndSlots([numbers[row] for row in rows], slots, visible[:, index], committed)
        seen[:, index] = self.store.focus.by_states(layer, query[:, :, index], keys, around)
        return (seen & visible).to(own)

    @cached_property
    def _selected_rows(self) -> tuple[list[int], Tensor]:
        """The rows the policy selects slots for, and their positions."""
        found = [(row, position) for row, position in enumerate(self.positions) if self.store.focus.among(position)]
        return [row for row, _ in found], on_device([position for _, position in found], self.store.device)
