"""The KV cache of one model for one lane: a trunk of committed tokens, and a scratch tree of draft tokens."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from playground.engine.attention.attention_mask import EMPTY, Focus, Renumbering, Slots, Window
from playground.engine.attention.cascade_attention import PartialAttention
from playground.engine.attention.segment_attention import InTurn, LateSegment, Segment
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
from playground.engine.host_copies import on_device
from playground.engine.recurrent.recurrent_state import RecurrentMemory

OnAttention = Callable[[int, Tensor, Tensor, Tensor], None]
"""on_attention(layer, weights [kv_heads, rows, slots], query positions [rows], key positions [1 or kv_heads, slots])"""

OnQueries = Callable[[int, Tensor, list[int]], None]
"""on_queries(layer, query states after the rotary embedding [kv_heads, group, n, d], query positions [n])"""

Memory = Callable[[int, Tensor, list[int], PartialAttention], Tensor]
"""memory(layer, query states [heads, n, d], query positions [n], attention over the slots) -> attention of both"""

OnQueryHeads = Callable[[int, Tensor, list[int]], None]
"""on_query_heads(layer, weights [kv_heads, group, rows, slots], query positions [rows])"""


class HeadCounts(NamedTuple):
    """What an eviction does to each head of a layer: slots that stay, slots that are freed, and the position of the
    first of these. Only the former if no eviction is reported.
    """

    kept: list[int]
    freed: list[int] = []
    first: list[int] = []


class CacheSizes(NamedTuple):
    """What a KV cache holds and takes. The bytes of the shared prefix and of recurrent states are part of `bytes`."""

    heads: int
    quantised_slots: int
    bytes: int
    common: int
    common_bytes: int
    state_bytes: int


@dataclass
class Attention:
    """Attention weights of the rows of one forward, until it is known which of them are committed.

    Columns are the trunk, then the scratch.
    """

    nodes: list[int]
    layers: dict[int, Tensor]  # [kv_heads, nodes, slots]

    def compact(self, order: Tensor, dead: Tensor, trunk: int, layers: Iterable[int]) -> None:
        """Keep only the columns `order` [1 or kv_heads, n] among the first `trunk` columns of some layers.

        Columns that are `dead`, of the same shape, get no weight.
        """
        for layer in self.layers.keys() & set(layers):
            weights = self.layers[layer]
            index = order[:, None, :].expand(*weights.shape[:2], order.shape[1])
            remaining = weights[:, :, :trunk].gather(2, index).masked_fill_(dead[:, None], 0)
            self.layers[layer] = torch.cat([remaining, weights[:, :, trunk:]], 2)


@dataclass
class KVCache:
    """Key and value states of the tokens of one lane.

    The *trunk* holds committed tokens. A policy may evict some of its slots, different ones in each layer and head. The
    *scratch* follows it: a tree of tokens that have been fed but not committed, such as draft tokens. New rows see the
    live trunk and their own ancestors. Positions are always true positions in the text: eviction renumbers nothing, and
    siblings share a position.

        extend(parents)      new scratch nodes, by the index of their parent (-1: end of the trunk)
        commit(node)         append the path to a node to the trunk; its descendants remain in the scratch
        prune(nodes)         keep only these scratch nodes
        crop_scratch(count)  keep only the first `count` scratch nodes
        roll_back(count)     remove the last tokens of the trunk
        evict(live)          free slots of the trunk, by layer and head
        merge(...)           add states to those of other slots, before their own slots are freed
        quantise(...)        quantise the oldest slots
        evict_from(layer)    from this layer on, only some tokens of the trunk will be read
        start_from(other)    begin with the trunk of another cache, shared or copied
    """

    depth: int  # decoder layers with keys and values
    device: torch.device | str = "cpu"  # of positions and masks, and of what policies get and return
    capacity: Capacity = UNKNOWN
    length: int = 0  # tokens of the trunk, evicted ones included: the true position of the next token
    parents: list[int] = field(default_factory=list)  # of the scratch nodes, within the scratch
    depths: list[int] = field(default_factory=list)  # of the scratch nodes; 0 continues the trunk
    lineage: list[int] = field(default_factory=list)  # of the scratch nodes: itself and its ancestors, one bit each
    window: Window | None = None  # a cache policy's mask by position
    focus: Focus | None = None  # a cache policy's mask by attention weights
    renumbering: Renumbering | None = None  # how a cache policy changes the positions of rows
    memory: Memory | None = None  # adds what a cache policy holds beside the slots
    on_attention: OnAttention | None = None  # receives the attention weights of rows once they are committed
    on_queries: OnQueries | None = None  # receives the query states of rows as they are fed
    on_query_heads: OnQueryHeads | None = None  # receives attention weights by query head as rows are fed
    in_turn: InTurn | None = None  # reads rows of one forward one after the other, so that a policy acts between them
    done: bool = False  # nothing more will be fed, so its memory may be reused
    eager: bool = False  # there was no memory to replay its forwards
    prefix_owner: KVCache | None = None  # the cache that owns its shared prefix, referenced to keep it alive
    recurrent: RecurrentMemory | None = None  # states of the layers without keys and values, if there are any
    reported: int = 0  # trunk tokens whose attention was reported; a token that is fed again is not reported twice
    absent: dict[int, set[int]] = field(default_factory=dict)  # by layer, scratch nodes that left it no states
    freed: FreedSlots | None = None  # what was evicted since `take_freed`; None before it, and after a roll back
    devices: tuple[torch.device, ...] = ()  # of the keys and values of each layer, if they are not all on `device`

    def __post_init__(self) -> None:
        self.keys, self.values = ([KVBuffer(self.capacity) for _ in range(self.depth)] for _ in range(2))
        self.slots = [Slots(torch.empty(1, 0, dtype=torch.long, device=self.device))]  # one for all layers, or one each
        self.attention: list[Attention] = []
        self.slot_bytes: list[int] = []  # key and value states of one slot in full precision, by layer; empty at first
        self.quantises = self.is_ragged = False  # in some layer, slots are quantised, or heads hold unequally many
        self.memory_bytes = 0  # of what `memory` reads

    # --- segments of a forward ---

    def extend(self, parents: list[int]) -> Segment:
        """New scratch nodes and the segment that feeds them. A parent is a scratch node, perhaps a new one, or -1."""
        first = len(self.parents)
        for node, parent in enumerate(parents, first):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} cannot continue node {parent}")
            self._add_node(node, parent)
        return Segment(self, first, len(parents))

    def again(self, count: int) -> Segment:
        """The last `count` scratch nodes again, for layers that have not read them."""
        return Segment(self, len(self.parents) - count, count)

    def late(self, first: int, positions: list[int]) -> LateSegment:
        """Tokens at these positions, of a trunk that `evict_from` reduced, for layers that have not read them.

        They get the slots from `first` on.
        """
        return LateSegment(self, first, len(positions), token_positions=positions)

    def _add_node(self, node: int, parent: int) -> None:
        self.parents.append(parent)
        self.depths.append(0 if parent == -1 else self.depths[parent] + 1)
        self.lineage.append((0 if parent == -1 else self.lineage[parent]) | 1 << node)

    def slots_of(self, layer: int) -> Slots:
        """Positions of the slots of one layer."""
        return self.slots[layer if len(self.slots) > 1 else 0]

    def device_of(self, layer: int) -> torch.device | str:
        """Where the keys and values of a layer are."""
        return self.devices[layer] if self.devices else self.device

    # --- changes to nodes and slots ---

    def start_from(self, other: KVCache, shared: bool) -> None:
        """Begin an empty cache with the whole trunk of another, which must not change any more; shared or copied."""
        for buffer, source in zip((*self.keys, *self.values), (*other.keys, *other.values)):
            buffer.start_from(source.read(other.length), shared)
        self.prefix_owner = other if shared else None
        self.slots = [Slots(other.slots[0].positions)]
        self.length = self.reported = other.length
        if self.recurrent:
            self.recurrent.start_from(other.recurrent)

    def twin_of_layer(self, layer: int, heads: Tensor | None = None) -> KVCache:
        """A cache with the trunk of one layer, at its number, that changes on its own. Other layers are empty.

        Its heads are copies of these heads [n], if they are given.
        """
        own = self.slots_of(layer)
        twin = KVCache(self.depth, self.device, length=self.length, reported=self.length, devices=self.devices)
        for buffers, copies in ((self.keys, twin.keys), (self.values, twin.values)):
            copies[layer] = buffers[layer].twin(own.count, heads)
        twin.slots = [own.twin(heads)]
        return twin

    def commit(self, node: int) -> list[int]:
        """Append the path to scratch node `node` to the trunk; -1 commits nothing and drops the scratch.

        Returns its descendants, which remain in the scratch, renumbered from 0.
        """
        path = self.path(node)
        remaining = self._descendants(node) if node != -1 else []
        self._reorder_scratch([*path, *remaining])
        if self.recurrent:
            self.recurrent.commit(path, remaining)
        self._extend_trunk(len(path))
        if self.in_turn:
            self.in_turn.commit(path, remaining)
        self._update_attention(path, remaining)
        self._renumber(remaining)
        self._settle_absent(path, remaining)
        return remaining

    def prune(self, nodes: list[int]) -> None:
        """Keep only these scratch nodes, ascending. The parent of each must be among them."""
        self._reorder_scratch(nodes)
        if self.recurrent:
            self.recurrent.prune(nodes)
        if self.in_turn:
            self.in_turn.keep_only(nodes)
        self._update_attention([], nodes)
        self._renumber(nodes)
        self._settle_absent([], nodes)

    def leave_out(self, layer: int, nodes: Iterable[int]) -> None:
        """Scratch nodes leave no states in a layer: nobody sees their slots there, which are freed when they are
        committed.
        """
        self.absent.setdefault(layer, set()).update(nodes)

    def _settle_absent(self, path: list[int], remaining: list[int]) -> None:
        """Free the slots of committed nodes that left no states, and renumber those that remain in the scratch."""
        if not self.absent:
            return
        before, renumbered = self.absent, {old: new for new, old in enumerate(remaining)}
        left = {layer: {renumbered[node] for node in nodes if node in renumbered} for layer, nodes in before.items()}
        self.absent = {layer: nodes for layer, nodes in left.items() if nodes}
        live = []
        for layer in range(self.depth):
            held = [node not in before.get(layer, ()) for node in path]
            trunk = torch.ones(self.slots_of(layer).count - len(path), dtype=torch.bool, device=self.device)
            live.append(torch.cat([trunk, on_device(held, self.device, torch.bool)])[None])
        self.evict(live)

    def path(self, node: int) -> list[int]:
        path = []
        while node != -1:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def _descendants(self, node: int) -> list[int]:
        return [other for other, line in enumerate(self.lineage) if other != node and line >> node & 1]

    def _renumber(self, remaining: list[int]) -> None:
        """The scratch nodes `remaining` become 0, 1, ...; a parent that is not among them was committed."""
        renumbered, parents = {old: new for new, old in enumerate(remaining)}, self.parents
        self.parents, self.depths, self.lineage = [], [], []
        for new, old in enumerate(remaining):
            self._add_node(new, renumbered.get(parents[old], -1))

    def crop_scratch(self, count: int = 0) -> None:
        """Drop the scratch except its first `count` nodes."""
        for column in (self.parents, self.depths, self.lineage):
            del column[count:]
        if self.recurrent:
            self.recurrent.crop_scratch(count)
        if self.in_turn:
            self.in_turn.keep_only(list(range(count)))
        if self.absent:
            kept = {layer: {node for node in nodes if node < count} for layer, nodes in self.absent.items()}
            self.absent = {layer: nodes for layer, nodes in kept.items() if nodes}
        self.attention = [recorded for recorded in self.attention if max(recorded.nodes) < count]

    def _reorder_scratch(self, order: list[int]) -> None:
        """Scratch slots in a new order; costs nothing if the first ones stay in place."""
        if order == list(range(len(order))):
            return
        chosen = on_device(order, self.device)
        for layer, buffers in enumerate(zip(self.keys, self.values)):
            for buffer in buffers:
                buffer.reorder(self.slots_of(layer).count, chosen)

    def _extend_trunk(self, count: int) -> None:
        if not count:
            return
        added = torch.arange(self.length, self.length + count, device=self.device)
        for slots in self.slots:
            slots.positions = torch.cat([slots.positions, added.expand(slots.positions.shape[0], count)], 1)
        self.length += count

    def roll_back(self, count: int) -> None:
        """Drop the scratch and the last `count` tokens of the trunk. Raises ValueError if it has fewer.

        If recurrent layers cannot return that far, the whole trunk is dropped and has to be read again.
        """
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot roll back {count} of {self.length} tokens")
        self.crop_scratch()
        self.freed = None  # tokens read later may have the positions of those that are dropped now
        if self.recurrent and not self.recurrent.roll_back(count):
            self.recurrent, count = RecurrentMemory(self.recurrent.layers, self.recurrent.least_chunk), self.length
        length = self.length - count
        self.evict([slots.positions < length for slots in self.slots])
        self.length = length

    def evict(self, live: list[Tensor]) -> int:
        """Free the trunk slots that are not `live`; returns how many, summed over layers and heads.

        `live` is one mask [1 or kv_heads, slots] for all layers, or one for each.
        """
        counts = self._count(live)
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
                self._note(index, slots, live[at], counts[at])
            self._compact(slots, retained, counts[at].kept, layers)
        return before - self.live_slots()

    def _note(self, index: int, slots: Slots, live: Tensor, counts: HeadCounts) -> None:
        """Report an eviction. Where each head frees at most one slot, nothing more has to be read."""
        if max(counts.freed) <= 1:
            self.freed.note_one_each(index, counts.freed, counts.first)
        else:
            self.freed.note(index, slots.positions, slots.among(~live), sum(counts.freed))

    def _count(self, live: list[Tensor]) -> list[HeadCounts] | None:
        """What is kept and freed, by layer; None if no slot is freed. Read in one transfer for all layers."""
        reported = self.freed is not None and self.freed.empty
        counts = [_head_counts(self.slots_of(layer), mask, reported) for layer, mask in enumerate(live)]
        ends = torch.stack([mask.all() for mask in live])
        numbers = torch.cat([*(each.flatten() for each in counts), ends]).tolist()
        if all(numbers[-len(live):]):
            return None
        rest = iter(numbers)
        return [HeadCounts(*([next(rest) for _ in row] for row in each)) for each in counts]

    def take_freed(self) -> FreedSlots | None:
        """What was evicted since the last call; None if that is not known, so that `runs` has to be read instead."""
        freed, self.freed = self.freed, FreedSlots(self.length)
        return freed

    def _compact(self, slots: Slots, live: Tensor, counts: list[int], layers: range | tuple[int, ...]) -> None:
        """Close the holes. Live slots keep their order, and every head has as many slots as the fullest one needs.

        Those that a head lacks take no memory.

        `live` [heads, slots] excludes EMPTY slots; `counts` are those of each head.
        """
        if sum(counts) == slots.live_of(len(counts)):
            return
        order = selected_indices(live, counts)
        shared = SlotOrder(order, counts)
        self.is_ragged = self.is_ragged or shared.is_ragged
        for buffer in (buffer for layer in layers for buffer in (self.keys[layer], self.values[layer])):
            buffer.compact(shared, slots.count, len(self.parents))
        dead = ~live.gather(1, order)
        for recorded in self.attention:
            recorded.compact(order, dead, slots.count, layers)
        slots.positions = slots.positions.expand_as(live).gather(1, order)
        slots.dense, slots.empty = min(counts) == max(counts), len(counts) * max(counts) - sum(counts)
        if not slots.dense:
            slots.positions.masked_fill_(dead, EMPTY)

    def evict_from(self, layer: int, live: Tensor) -> None:
        """Hold only the `live` tokens of the trunk, bool [1, slots], from `layer` on, which has read nothing yet."""
        before = [torch.ones_like(self.slots_of(early).positions, dtype=torch.bool) for early in range(layer)]
        self.evict([*before, *[live] * (self.depth - layer)])

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
        self.quantises, layers = True, list(layers)
        for part, buffers in (("keys", self.keys), ("values", self.values)):
            for layer in layers:
                buffer, used = buffers[layer], self.slots_of(layer).count
                if count := due(part, used - buffer.quantised_slots):
                    buffer.quantise(count, used + len(self.parents), encoder(layer, part))

    # --- recorded attention ---

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Record the attention weights of the watched rows of a segment, [kv_heads, watched, slots]."""
        nodes = [segment.first + row for row in segment.watched]
        if not (self.attention and self.attention[-1].nodes == nodes):
            self.attention.append(Attention(nodes, {}))
        self.attention[-1].layers[layer] = weights.to(self.device)

    def _update_attention(self, path: list[int], remaining: list[int]) -> None:
        """Report the weights of committed rows, and reorder those of `remaining` nodes like the slots.

        Called after the trunk has grown by the path.
        """
        if not self.attention:
            return
        before, self.attention = self.attention, []
        for recorded in before:
            self._report(recorded, path)
            rows = [row for row, node in enumerate(recorded.nodes) if node in remaining]
            if rows:
                layers = {
                    layer: self._reorder_columns(layer, weights[:, rows], len(path), [*path, *remaining])
                    for layer, weights in recorded.layers.items()
                }
                self.attention.append(Attention([remaining.index(recorded.nodes[row]) for row in rows], layers))
        self.reported = max(self.reported, self.length)

    def _report(self, recorded: Attention, path: list[int]) -> None:
        """Pass the weights of the nodes on a committed path to `on_attention`."""
        start = self.length - len(path)
        fresh = path[max(0, self.reported - start):]
        rows = [row for row, node in enumerate(recorded.nodes) if node in fresh]
        if not rows or self.on_attention is None:
            return
        positions = on_device([start + path.index(recorded.nodes[row]) for row in rows], self.device)
        all_rows = len(rows) == len(recorded.nodes)
        for layer, weights in recorded.layers.items():
            columns = self._reorder_columns(layer, weights if all_rows else weights[:, rows], len(path), path)
            self.on_attention(layer, columns, positions, self.slots_of(layer).positions)

    def _reorder_columns(self, layer: int, weights: Tensor, committed: int, order: list[int]) -> Tensor:
        """Weights with their scratch columns in a new order; columns of nodes fed after the rows are zero."""
        trunk = self.slots_of(layer).count - committed
        known = weights.shape[2] - trunk
        if order == list(range(known)):
            return weights
        scratch = weights[:, :, trunk:]
        blank = scratch.new_zeros(*scratch.shape[:2], 1)
        padded = torch.cat([scratch, blank], 2)
        columns = on_device([min(node, known) for node in order], weights.device, torch.long)
        return torch.cat([weights[:, :, :trunk], padded[:, :, columns]], 2)

    # --- sizes and contents ---

    @property
    def heads(self) -> int:
        return next(filter(None, (keys.heads for keys in self.keys)), 0)  # a layer without attention has none

    @property
    def least_chunk(self) -> int:
        """Rows that a forward over a prompt should have at least."""
        return self.recurrent.least_chunk if self.recurrent else 0

    def live_slots(self) -> int:
        """Live trunk slots over all layers and heads."""
        each = self.depth if len(self.slots) == 1 else 1
        return sum(each * slots.live * (self.heads if slots.positions.shape[0] == 1 else 1) for slots in self.slots)

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
        """Oldest slots whose keys are quantised."""
        return self.keys[0].quantised_slots if self.quantises and self.keys else 0

    def runs(self) -> list[list[list[tuple[int, int]]]]:
        """Live true positions as half-open intervals, by layer and head; one entry if all layers or heads agree."""
        gaps = [slots for slots in self.slots if not self._holds_all(slots)]
        found = iter(_intervals(gaps)) if gaps else None
        return [
            [[(0, slots.count)]] if self._holds_all(slots) else [next(found) for _ in slots.positions]
            for slots in self.slots
        ]

    def _holds_all(self, slots: Slots) -> bool:
        return slots.dense and slots.count == self.length


def _head_counts(slots: Slots, live: Tensor, reported: bool) -> Tensor:
    """The numbers of `HeadCounts`, [1 or 3, heads], of a mask [1 or kv_heads, slots]."""
    kept = slots.among(live)
    if not reported:
        return kept.sum(1)[None]
    freed = slots.among(~live)
    first = slots.positions.expand_as(freed).gather(1, freed.byte().argmax(1, keepdim=True))[:, 0]
    return torch.stack([kept.sum(1), freed.sum(1), first])


def _intervals(each: list[Slots]) -> list[list[tuple[int, int]]]:
    """Intervals of live positions of every head, in order. Vectorised: head by head takes as long as a small layer."""
    positions = torch.cat([slots.positions.flatten() for slots in each]).cpu().numpy()
    counts = [slots.count for slots in each for _ in slots.positions]
    live = positions != EMPTY
    heads, positions = numpy.repeat(numpy.arange(len(counts)), counts)[live], positions[live]
    begins = (numpy.diff(positions, prepend=EMPTY) != 1) | (numpy.diff(heads, prepend=-1) != 0)
    intervals = list(zip(positions[begins].tolist(), (positions[numpy.roll(begins, -1)] + 1).tolist()))
    bounds = numpy.searchsorted(heads[begins], numpy.arange(len(counts) + 1)).tolist()
    return [intervals[first:last] for first, last in zip(bounds, bounds[1:])]
