"""What the rows of one forward may attend to: the slots of a KV cache, and the masks of models and cache policies."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = -1  # position of a slot that holds no token
CAUSAL = "causal"  # represents the causal mask, which need not be materialised


@dataclass(frozen=True)
class Chunks:
    """A layer whose rows see only their own chunk of so many positions, as in Llama 4."""

    size: int


Reach = int | Chunks | None
"""How far back the rows of a layer see: a sliding window in positions, chunks, or everything."""

PrefixKey = tuple[int, int]
"""Identifies a prefix that several KV caches share: address of its key states, and its length in slots."""


@dataclass
class Slots:
    """True position of every trunk slot, [1 or kv_heads, n]. Heads with fewer tokens than others have EMPTY slots."""

    positions: Tensor
    dense: bool = True  # no slot is EMPTY
    empty: int | None = None  # EMPTY slots, summed over the heads listed; counted when it is first needed

    @property
    def count(self) -> int:
        return self.positions.shape[1]

    @property
    def live(self) -> int:
        """Slots that hold a token, summed over the heads listed."""
        if not self.dense and self.empty is None:
            self.empty = int((self.positions == EMPTY).sum())
        return self.positions.numel() - (0 if self.dense else self.empty)

    def live_of(self, heads: int) -> int:
        """Slots that hold a token, summed over this many heads: those listed, or those that share the only list."""
        return self.live * (heads // len(self.positions))

    def twin(self, heads: Tensor | None = None) -> Slots:
        """Slots of the same positions that change on their own: all of them, or copies of these heads [n]."""
        if heads is None or len(self.positions) == 1:
            return Slots(self.positions, self.dense, self.empty)
        return Slots(self.positions[heads], self.dense)

    def among(self, mask: Tensor) -> Tensor:
        """The slots of a mask [1 or kv_heads, n] that hold a token, by head."""
        if self.dense:
            return mask.expand(max(len(mask), len(self.positions)), -1)
        return mask & (self.positions != EMPTY)


def slots_of(slots: list[Slots], layer: int) -> Slots:
    """The slots of one layer, given one entry for all layers or one for each."""
    return slots[layer] if len(slots) > 1 else slots[0]


@dataclass
class Window:
    """A cache policy's mask by position: visible(query [n, 1], key [m]) -> bool [n, m].

    It applies to rows from position `start` on.
    """

    visible: Callable[[Tensor, Tensor], Tensor]
    start: int


@dataclass
class Focus:
    """A cache policy's mask by attention: choose(layer, weights [kv_heads, n, m], positions [n]) -> [kv_heads, n, m].

    It applies to rows at positions for which `among` is true. With `by_states` the attention weights need not be known:
    by_states(layer, query states [kv_heads, group, n, d], key states [kv_heads, m, d], RowsAndSlots) -> the same. With
    `lines`, rows of the prompt attend along lines that some of them choose.
    """

    choose: Callable[[int, Tensor, Tensor], Tensor]
    among: Callable[[int], bool]
    by_states: Callable[[int, Tensor, Tensor, RowsAndSlots], Tensor] | None = None
    lines: LineChoice | None = None


class LineChoice(NamedTuple):
    """How the lines of rows before position `end` are chosen.

    sampled(rows) says which of so many rows decide, and choose(layer, weights of these [kv_heads, q, m], which they
    are, positions of all [n]) the lines (`line_attention.AttentionLines`).
    """

    sampled: Callable[[int], list[int]]
    choose: Callable[[int, Tensor, list[int], Tensor], tuple[Tensor, Tensor]]
    end: int


class RowsAndSlots(NamedTuple):
    """Rows, slots, and which of the slots the rows may see."""

    rows: list[int]  # positions of the rows
    slots: Tensor  # positions of the slots, [1 or kv_heads, m]; negative: empty
    visible: Tensor  # bool [1 or kv_heads, n, m]
    committed: int = 0  # of the slots, those whose tokens are committed: the first ones, whose states stay as they are


@dataclass
class Renumbering:
    """Rows from position `start` on use their index in the cache as position, which closes the gap of evicted tokens.

    far(key [..., m]) says which keys lie before the gap, skipped(query [n]) how many positions wide it is, and
    rotate_back(query [heads, n, d], positions [n]) rotates query states back by so many positions.
    """

    skipped: Callable[[Tensor], Tensor]
    far: Callable[[Tensor], Tensor]
    rotate_back: Callable[[Tensor, Tensor], Tensor]
    start: int


def as_bias(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask as an additive bias for all query heads of a group, as further rows.

    [rows, slots] becomes [groups * rows, slots], and [kv_heads, rows, slots] becomes [1, kv_heads, groups * rows,
    slots]. A single row is broadcast instead of repeated.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    if mask.shape[-2] > 1:
        bias = bias.repeat(*[1] * (mask.dim() - 2), groups, 1)
    # torch's fast attention takes two or four dimensions, and is slow with three
    return bias[None] if mask.dim() == 3 else bias
