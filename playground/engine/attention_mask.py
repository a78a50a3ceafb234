"""What the rows of one forward may attend to: segments of a KV cache and their masks."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from playground.engine.cascade_attention import PartialAttention
from playground.engine.host_copies import moved, on_device
from playground.engine.kv_buffer import KVBuffer, write_both
from playground.engine.recurrent_state import RecurrentMemory

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

    def among(self, mask: Tensor) -> Tensor:
        """The slots of a mask [1 or kv_heads, n] that hold a token, by head."""
        if self.dense:
            return mask.expand(max(len(mask), len(self.positions)), -1)
        return mask & (self.positions != EMPTY)


def slots_of(slots: list[Slots], layer: int) -> Slots:
    """The slots of one layer, given one entry for all layers or one for each."""
    return slots[layer] if len(slots) > 1 else slots[0]


class SlotStore(Protocol):
    """What a segment reads of the KV cache it belongs to (`engine.kv_cache.KVCache`)."""

    device: torch.device | str
    length: int
    common: int
    parents: list[int]
    depths: list[int]
    lineage: list[int]
    absent: dict[int, set[int]]
    slots: list[Slots]
    keys: list[KVBuffer]
    values: list[KVBuffer]
    window: Window | None
    focus: Focus | None
    renumbering: Renumbering | None
    memory: Callable | None
    on_attention: Callable | None
    on_queries: Callable | None
    on_query_heads: Callable | None
    recurrent: RecurrentMemory | None
    devices: tuple[torch.device, ...]

    def leave_out(self, layer: int, nodes: Iterable[int]) -> None:
        """Scratch nodes leave no states in a layer."""

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Record the attention weights [kv_heads, watched rows, slots] of one layer."""


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
    by_states(layer, query states [kv_heads, group, n, d], key states [kv_heads, m, d], RowsAndSlots) -> the same.
    """

    choose: Callable[[int, Tensor, Tensor], Tensor]
    among: Callable[[int], bool]
    by_states: Callable[[int, Tensor, Tensor, RowsAndSlots], Tensor] | None = None


class RowsAndSlots(NamedTuple):
    """Rows, slots, and which of the slots the rows may see."""

    rows: list[int]  # positions of the rows
    slots: Tensor  # positions of the slots, [1 or kv_heads, m]; negative: empty
    visible: Tensor  # bool [1 or kv_heads, n, m]


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


@dataclass
class Segment:
    """Rows of one KV cache in one forward: scratch nodes `first` to `first + rows`.

    The attention weights of the rows in `watched` are recorded.
    """

    store: SlotStore
    first: int
    rows: int
    watched: list[int] = field(default_factory=list)
    _masks: dict = field(default_factory=dict)
    _biases: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        store = self.store
        self.positions = self._true_positions()  # of each row
        # what a cache policy does with these rows: it selects slots for some of them by their attention weights,
        self.focused = store.focus is not None and any(map(store.focus.among, self.positions))
        self.renumbers = store.renumbering is not None  # uses their index in the cache as position,
        self.reports_queries = store.on_queries is not None  # reads their query states,
        # or acts on their queries and keys in any way, apart from masks by position
        self.needs_keys = self.focused or self.renumbers or self.reports_queries or store.memory is not None

    def _true_positions(self) -> list[int]:
        return [self.store.length + depth for depth in self.store.depths[self.first:self.end]]

    @property
    def end(self) -> int:
        return self.first + self.rows

    def is_plain(self, sliding_window: Reach) -> bool:
        """Whether each row sees the whole trunk and its own ancestors in every layer, and no slot is quantised."""
        store = self.store
        uniform = (
            len(store.slots) == 1
            and store.slots[0].dense
            and not (self._is_restricted(sliding_window) or self.needs_keys)
        )
        buffers = (*store.keys, *store.values)
        return uniform and not self.watched and not any(buffer.quantised_rows for buffer in buffers)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' key and value states [kv_heads, rows, head_dim]; returns those of all slots up to them."""
        buffers = self.store.keys[layer], self.store.values[layer]
        return write_both(buffers, slots_of(self.store.slots, layer).count + self.first, (keys, values))

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value states of the prefix shared with other caches, [kv_heads, slots, d] each, if there is one."""
        return self.store.keys[layer].prefix, self.store.values[layer].prefix

    def write_suffix(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `write`, but returns what follows the shared prefix."""
        start = slots_of(self.store.slots, layer).count + self.first
        return self.store.keys[layer].write_suffix(start, keys), self.store.values[layer].write_suffix(start, values)

    def shared_prefix(self, sliding_window: Reach) -> PrefixKey | None:
        """The prefix shared with other caches.

        None if there is none, if some row does not see all of it, or if weights over prefix and suffix are needed.
        """
        keys = self.store.keys[0].prefix if self.store.keys else None
        if keys is None or self.watched or self.needs_keys or self._is_restricted(sliding_window):
            return None
        return keys.data_ptr(), keys.shape[1]

    def watch(self, layer: int, weights: Tensor) -> None:
        """Record the attention weights of the watched rows in a layer, [kv_heads, watched, slots]."""
        self.store.watch(self, layer, weights)

    def report_query_heads(self, layer: int, weights: Tensor) -> None:
        """Report the attention weights of all rows by query head, [kv_heads, group, rows, slots], as they are fed."""
        if self.store.on_query_heads:
            self.store.on_query_heads(layer, weights.to(self.store.device), self.positions)

    def report_queries(self, layer: int, query: Tensor) -> None:
        """Report the query states of all rows, [kv_heads, group, rows, d], as they are fed."""
        if self.reports_queries:
            self.store.on_queries(layer, query.to(self.store.device), self.positions)

    def with_memory(self, layer: int, query: Tensor, seen: PartialAttention) -> Tensor:
        """Attention of query states [heads, rows, d] over the slots and what a policy holds beside them."""
        first = self.store.device
        return self.store.memory(layer, query.to(first), self.positions, seen.to(first))

    def mask(self, layer: int, sliding_window: Reach) -> Tensor | str | None:
        """What the rows may see in a layer: [rows, slots], [kv_heads, rows, slots], CAUSAL, or None for everything.

        It is on the layer's device.
        """
        if not self.store.devices:
            return self._store_mask(layer, sliding_window)
        device = self.store.devices[layer]
        key = (sliding_window, self._own_slots(layer), device)
        if layer in self.store.absent:
            return self._store_mask(layer, sliding_window).to(device)
        if key not in self._masks:
            mask = self._store_mask(layer, sliding_window)
            self._masks[key] = mask.to(device) if isinstance(mask, Tensor) else mask
        return self._masks[key]

    def _store_mask(self, layer: int, sliding_window: Reach) -> Tensor | str | None:
        """The mask of a layer on the device of the KV cache."""
        if absent := self.store.absent.get(layer):
            return self._mask_without(absent, slots_of(self.store.slots, layer), sliding_window)
        key = (sliding_window, self._own_slots(layer))
        if key not in self._masks:
            self._masks[key] = self._build_mask(slots_of(self.store.slots, layer), sliding_window)
        return self._masks[key]

    def _own_slots(self, layer: int) -> int:
        """Which entry of the slots is the layer's."""
        return layer if len(self.store.slots) > 1 else 0

    def leave_out(self, layer: int, rows: list[int]) -> None:
        """These rows leave no states in a layer."""
        self.store.leave_out(layer, [self.first + row for row in rows])

    def _mask_without(self, absent: set[int], slots: Slots, sliding_window: Reach) -> Tensor:
        """The mask of a layer in which some scratch nodes left no states, [rows, slots] or [kv_heads, rows, slots]."""
        mask = self._explicit_mask(slots, sliding_window).clone()
        mask[..., [slots.count + node for node in absent if node < self.end]] = False
        return mask

    def bias(self, layer: int, sliding_window: Reach, groups: int, dtype: torch.dtype) -> Tensor | str | None:
        """The mask as an additive bias for all heads of a group, as `as_bias` makes it; CAUSAL and None as they are.

        Layers with the same mask share one bias, which is materialised once per forward.
        """
        mask = self.mask(layer, sliding_window)
        if mask is None or isinstance(mask, str):
            return mask
        if layer in self.store.absent:  # a mask of its own, which nobody holds
            return as_bias(mask, groups, dtype)
        key = (id(mask), groups, dtype)
        if key not in self._biases:
            self._biases[key] = as_bias(mask, groups, dtype)
        return self._biases[key]

    def suffix_bias(self, layer: int, sliding_window: Reach, groups: int, dtype: torch.dtype) -> Tensor | None:
        """As `bias`, for what follows a prefix that all rows see."""
        bias = self.bias(layer, sliding_window, groups, dtype)
        return None if bias is None else bias[..., self.store.common:]

    def chosen(self, layer: int, weights: Tensor, mask: Tensor | None) -> Tensor:
        """The mask after the policy's selection by attention weights, bool [kv_heads, rows, slots].

        `weights` [kv_heads, rows, slots] are those under `mask` [1 or kv_heads, rows, slots]; None is no mask.
        """
        (rows, positions), choose = self._selected_rows, self.store.focus.choose
        received = weights.to(self.store.device)
        if len(rows) == self.rows:
            seen = choose(layer, received, positions)
        else:
            seen = torch.ones_like(received, dtype=torch.bool)
            seen[:, rows] = choose(layer, received[:, rows], positions)
        seen = seen.to(weights.device)
        return seen if mask is None else seen & mask

    @cached_property
    def _selected_rows(self) -> tuple[list[int], Tensor]:
        """The rows a policy selects slots for, and their positions."""
        found = [(row, position) for row, position in enumerate(self.positions) if self.store.focus.among(position)]
        return [row for row, _ in found], on_device([position for _, position in found], self.store.device)

    def renumbered(self, layer: int, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key states [heads, n, 2 d] whose products are those of rows at their index in the cache.

        Each row has two queries, for keys before the gap and after it. Each key is zero in the half that does not
        apply to it.
        """
        renumbering, at = self.store.renumbering, on_device(self.positions, self.store.device)
        skipped = renumbering.skipped(at).masked_fill(at < renumbering.start, 0)
        far = renumbering.far(self._slot_positions(layer))[..., None].to(keys.device)
        return torch.cat([query, renumbering.rotate_back(query, skipped)], -1), torch.cat([keys * ~far, keys * far], -1)

    def chosen_by_states(self, layer: int, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """As `chosen`, by query states [kv_heads, group, rows, d] and key states [kv_heads, slots, d]."""
        first, own = self.store.device, keys.device
        query, keys, mask = query.to(first), keys.to(first), None if mask is None else mask.to(first)
        rows, positions = self._selected_rows
        whole, numbers = len(rows) == self.rows, self.positions
        seen = torch.ones(len(keys), self.rows, keys.shape[1], dtype=torch.bool, device=keys.device)
        visible = seen[:1] if mask is None else mask.expand(-1, self.rows, -1) if mask.dim() == 3 else mask[None]
        index = slice(None) if whole else on_device(rows, first, torch.long)
        around = RowsAndSlots([numbers[row] for row in rows], self._slot_positions(layer), visible[:, index])
        seen[:, index] = self.store.focus.by_states(layer, query[:, :, index], keys, around)
        return (seen & visible).to(own)

    def _slot_positions(self, layer: int) -> Tensor:
        """True positions of all slots up to these rows, trunk and scratch, [1 or kv_heads, slots]."""
        trunk = slots_of(self.store.slots, layer).positions
        return torch.cat([trunk, self._scratch_positions().expand(len(trunk), -1)], 1)

    def _scratch_positions(self) -> Tensor:
        """True positions of the scratch nodes up to these rows, [nodes]."""
        depths = on_device(self.store.depths[:self.end], self.store.device, torch.long)
        return depths + self.store.length

    def _build_mask(self, slots: Slots, sliding_window: Reach) -> Tensor | str | None:
        if self._is_restricted(sliding_window) or not slots.dense:
            return self._explicit_mask(slots, sliding_window)
        before = slots.count + self.first
        if not self._is_chain():
            seen = torch.ones(self.rows, slots.count, dtype=torch.bool, device=self.store.device)
            return torch.cat([seen, self._scratch_mask], 1)
        if self.rows == 1:
            return None
        if not before:
            return CAUSAL
        return torch.ones(self.rows, before + self.rows, dtype=torch.bool, device=self.store.device).tril(before)

    def _is_restricted(self, sliding_window: Reach) -> bool:
        """Whether some row may not see all positions before it."""
        limit = sliding_window.size if isinstance(sliding_window, Chunks) else sliding_window
        return self.store.window is not None or bool(limit and self.store.length + self.end > limit)

    def _is_chain(self) -> bool:
        return self.store.parents[:self.end] == list(range(-1, self.end - 1))

    def _explicit_mask(self, slots: Slots, sliding_window: Reach) -> Tensor:
        trunk, own = slots.positions[:, None, :], self._scratch_mask  # [1 or heads, 1, n]
        seen = trunk != EMPTY
        if self._is_restricted(sliding_window):
            query = on_device(self.positions, self.store.device)[:, None]
            seen = seen & self._allowed(query, trunk, sliding_window)
            own = own & self._allowed(query, self._scratch_positions(), sliding_window)
        mask = torch.cat([seen.expand(-1, self.rows, -1), own.expand(len(seen), -1, -1)], 2)
        return mask[0] if len(mask) == 1 else mask

    def _allowed(self, query: Tensor, key: Tensor, sliding_window: Reach) -> Tensor:
        allowed = query >= key
        if isinstance(sliding_window, Chunks):
            allowed = allowed & (query // sliding_window.size == key // sliding_window.size)
        elif sliding_window:
            allowed = allowed & (query - key < sliding_window)
        if window := self.store.window:
            allowed = allowed & ((query < window.start) | window.visible(query, key))
        return allowed

    @cached_property
    def _scratch_mask(self) -> Tensor:
        """Which scratch nodes each row sees in every layer, bool [rows, scratch]."""
        return moved(torch.from_numpy(self.ancestors()).bool(), self.store.device)

    def ancestors(self) -> numpy.ndarray:
        """Which scratch nodes each row descends from, itself included, [rows, scratch] of 0 and 1."""
        lines = self.store.lineage[self.first:self.end]
        size = -(-self.end // 8)
        packed = numpy.frombuffer(b"".join(line.to_bytes(size, "little") for line in lines), numpy.uint8)
        return numpy.unpackbits(packed.reshape(self.rows, size), axis=1, count=self.end, bitorder="little")


@dataclass
class LateSegment(Segment):
    """Trunk tokens that earlier layers have read and later layers read now, after a policy shortened the prompt.

    They are written to the slots from `first` on, at their true positions. Each sees the tokens before it that
    reached these layers.
    """

    token_positions: list[int] = field(default_factory=list)  # true positions, ascending

    def _true_positions(self) -> list[int]:
        return self.token_positions

    def is_plain(self, sliding_window: Reach) -> bool:
        return False

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.keys[layer].write(self.first, keys), self.store.values[layer].write(self.first, values)

    def watch(self, layer: int, weights: Tensor) -> None:
        """Report the attention at once, because the tokens are committed already."""
        if self.store.on_attention:
            watched = on_device([self.token_positions[row] for row in self.watched], self.store.device)
            weights = weights.to(self.store.device)
            self.store.on_attention(layer, weights, watched, self._slot_positions(layer))

    def _slot_positions(self, layer: int) -> Tensor:
        return slots_of(self.store.slots, layer).positions[:, :self.end]

    def _build_mask(self, slots: Slots, sliding_window: Reach) -> Tensor | str | None:
        if not self.first and not self._is_restricted(sliding_window):
            return CAUSAL
        query = on_device(self.token_positions, self.store.device)[:, None]
        return self._allowed(query, slots.positions[0, :self.end], sliding_window)


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
