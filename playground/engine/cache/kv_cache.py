"""The KV cache of one model for one lane: a trunk of committed tokens, and a scratch tree of draft tokens."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from playground.engine.attention.attention_mask import Focus, Renumbering, Slots, Window
from playground.engine.attention.cascade_attention import PartialAttention
from playground.engine.attention.late_segment import LateSegment
from playground.engine.attention.segment_attention import InTurn, Segment
from playground.engine.cache.held_states import HeldStates
from playground.engine.cache.kv_buffer import chosen_rows
from playground.engine.cache.noted_attention import Attention
from playground.engine.host_copies import index_on, on_device
from playground.engine.recurrent.recurrent_state import RecurrentMemory

OnAttention = Callable[[int, Tensor, Tensor, Tensor], None]
"""on_attention(layer, weights [kv_heads, rows, slots], query positions [rows], key positions [1 or kv_heads, slots])"""

OnQueries = Callable[[int, Tensor, list[int]], None]
"""on_queries(layer, query states after the rotary embedding [kv_heads, group, n, d], query positions [n])"""

OnCrossAttention = Callable[[int, Tensor], None]
"""on_cross_attention(layer, weights [heads, rows, source]), the row of the mark first in a text that begins"""

Memory = Callable[[int, Tensor, list[int], PartialAttention], Tensor]
"""memory(layer, query states [heads, n, d], query positions [n], attention over the slots) -> attention of both"""

OnQueryHeads = Callable[[int, Tensor, list[int]], None]
"""on_query_heads(layer, weights [kv_heads, group, rows, slots], query positions [rows])"""


@dataclass
class KVCache(HeldStates):
    """Key and value states of the tokens of one lane, as its text grows.

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

    window: Window | None = None  # a cache policy's mask by position
    focus: Focus | None = None  # a cache policy's mask by attention weights
    renumbering: Renumbering | None = None  # how a cache policy changes the positions of rows
    memory: Memory | None = None  # adds what a cache policy holds beside the slots
    on_attention: OnAttention | None = None  # receives the attention weights of rows once they are committed
    on_queries: OnQueries | None = None  # receives the query states of rows as they are fed
    on_query_heads: OnQueryHeads | None = None  # receives attention weights by query head as rows are fed
    on_cross_attention: OnCrossAttention | None = None  # receives what rows of a decoder read of the source
    in_turn: InTurn | None = None  # reads rows of one forward one after the other, so that a policy acts between them
    done: bool = False  # nothing more will be fed, so its memory may be reused
    eager: bool = False  # there was no memory to replay its forwards
    whole_prompt: int = 0  # of an encoder-decoder model, whose encoder reads the prompt in one forward: its longest
    source: int = 0  # its tokens, whose slots hold what the decoder's cross-attention reads
    reported: int = 0  # trunk tokens whose attention was reported; a token that is fed again is not reported twice

    # --- segments of a forward ---

    def extend(self, parents: list[int]) -> Segment:
        """New scratch nodes and the segment that feeds them. A parent is a scratch node, perhaps a new one, or -1."""
        return Segment(self, self._add_nodes(parents), len(parents))

    def again(self, count: int) -> Segment:
        """The last `count` scratch nodes again, for layers that have not read them."""
        return Segment(self, len(self.parents) - count, count)

    def late(self, first: int, positions: list[int]) -> LateSegment:
        """Tokens at these positions, of a trunk that `evict_from` reduced, for layers that have not read them.

        They get the slots from `first` on.
        """
        return LateSegment(self, first, len(positions), token_positions=positions)

    @property
    def least_chunk(self) -> int:
        """Rows that a forward over a prompt should have at least."""
        return self.recurrent.least_chunk if self.recurrent else self.whole_prompt

    # --- the text grows ---

    def start_from(self, other: KVCache, shared: bool) -> None:
        """Begin an empty cache with the whole trunk of another, which must not change any more; shared or copied."""
        for buffer, source in zip((*self.keys, *self.values), (*other.keys, *other.values)):
            buffer.start_from(source.read(other.length), shared)
        self.prefix_owner = other if shared else None
        self.slots = [Slots(other.slots[0].positions)]
        self.length = self.reported = other.length
        self.source = other.source
        if self.recurrent:
            self.recurrent.start_from(other.recurrent)

    def twin_of_layer(self, layer: int, heads: Tensor | None = None) -> KVCache:
        """A cache with the trunk of one layer, at its number, that changes on its own. Other layers are empty.

        Its heads are copies of these heads [n], if they are given.
        """
        own, twin = self.slots_of(layer), self._without_layers()
        for buffers, copies in ((self.keys, twin.keys), (self.values, twin.values)):
            copies[layer] = buffers[layer].twin(own.count, heads)
        twin.slots, twin.quantises = [own.twin(heads)], self.quantises
        return twin

    def twin_with_token(self, layer: int, heads: Tensor, tokens: Tensor) -> KVCache:
        """As `twin_of_layer`, with the states of one scratch token for each of the heads, tokens [n], behind the trunk.

        They are in place of those of a node of the scratch, which the caller adds.
        """
        own, twin = self.slots_of(layer), self._without_layers()
        trunk = index_on(range(own.count), self.device).expand(len(heads), -1)
        columns = torch.cat([trunk, (own.count + tokens)[:, None]], 1)
        for buffers, copies in ((self.keys, twin.keys), (self.values, twin.values)):
            copies[layer] = chosen_rows(buffers[layer], own.count + len(self.parents), heads, columns)
        twin.slots = [own.twin(heads)]
        return twin

    def _without_layers(self) -> KVCache:
        """A cache of the same text whose layers hold nothing."""
        return KVCache(self.depth, self.device, length=self.length, reported=self.length, devices=self.devices)

    def commit(self, node: int) -> list[int]:
        """Append the path to scratch node `node` to the trunk; -1 commits nothing and drops the scratch.

        Returns its descendants, which remain in the scratch, renumbered from 0.
        """
        absent = self.absent
        path, remaining = self._take_path(node)
        self._move_slots([*path, *remaining])
        if self.recurrent:
            self.recurrent.commit(path, remaining)
        self._extend_trunk(len(path))
        if self.in_turn:
            self.in_turn.commit(path, remaining)
        self._update_attention(path, remaining)
        if absent:
            self._free_absent(path, absent)
        return remaining

    def prune(self, nodes: list[int]) -> None:
        """Keep only these scratch nodes, ascending. The parent of each must be among them."""
        self._move_slots(nodes)
        if self.recurrent:
            self.recurrent.prune(nodes)
        if self.in_turn:
            self.in_turn.keep_only(nodes)
        self._update_attention([], nodes)
        self._keep_nodes(nodes)

    def crop_scratch(self, count: int = 0) -> None:
        """Drop the scratch except its first `count` nodes."""
        self._crop_nodes(count)
        if self.recurrent:
            self.recurrent.crop_scratch(count)
        if self.in_turn:
            self.in_turn.keep_only(list(range(count)))
        self.attention = [noted for noted in self.attention if max(noted.nodes) < count]

    def roll_back(self, count: int) -> None:
        """Drop the scratch and the last `count` tokens of the trunk. Raises ValueError if it has fewer.

        If recurrent layers cannot return that far, or a source would be cut, the whole trunk is dropped and has to be
        read again.
        """
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot roll back {count} of {self.length} tokens")
        self.crop_scratch()
        self.freed = None  # tokens read later may have the positions of those that are dropped now
        if self.recurrent and not self.recurrent.roll_back(count):
            self.recurrent, count = RecurrentMemory(self.recurrent.layers, self.recurrent.least_chunk), self.length
        count = self.length if self.length - count < self.source else count
        length = self.length - count
        self.evict([slots.positions < length for slots in self.slots])
        self.length = length

    def _move_slots(self, order: list[int]) -> None:
        """Scratch slots in a new order; costs nothing if the first ones stay in place."""
        if order != list(range(len(order))):
            self._reorder_scratch(order)

    def _extend_trunk(self, count: int) -> None:
        if not count:
            return
        added = torch.arange(self.length, self.length + count, device=self.device)
        for slots in self.slots:
            slots.positions = torch.cat([slots.positions, added.expand(slots.positions.shape[0], count)], 1)
        self.length += count

    def _free_absent(self, path: list[int], absent: dict[int, set[int]]) -> None:
        """Free the slots of nodes that were committed now and left no states in some layers."""
        live = []
        for layer in range(self.depth):
            held = [node not in absent.get(layer, ()) for node in path]
            trunk = torch.ones(self.slots_of(layer).count - len(path), dtype=torch.bool, device=self.device)
            live.append(torch.cat([trunk, on_device(held, self.device, torch.bool)])[None])
        self.evict(live)

    # --- noted attention ---

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Note the attention weights of the watched rows of a segment, [kv_heads, watched, slots]."""
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
        for noted in before:
            self._report(noted, path)
            if rows := [row for row, node in enumerate(noted.nodes) if node in remaining]:
                nodes = [remaining.index(noted.nodes[row]) for row in rows]
                layers = {layer: self._columns(noted, layer, rows, path, remaining) for layer in noted.layers}
                self.attention.append(Attention(nodes, layers))
        self.reported = max(self.reported, self.length)

    def _report(self, noted: Attention, path: list[int]) -> None:
        """Pass the weights of the nodes on a committed path to `on_attention`."""
        start = self.length - len(path)
        fresh = path[max(0, self.reported - start):]
        rows = [row for row, node in enumerate(noted.nodes) if node in fresh]
        if not rows or self.on_attention is None:
            return
        positions = index_on([start + path.index(noted.nodes[row]) for row in rows], self.device)
        for layer in noted.layers:
            weights = self._columns(noted, layer, rows, path, [])
            self.on_attention(layer, weights, positions, self.slots_of(layer).positions)

    def _columns(
        self, noted: Attention, layer: int, rows: list[int], path: list[int], remaining: list[int]
    ) -> Tensor:
        """Weights of rows with the columns of the path as the end of the trunk, and those of `remaining` after it."""
        trunk = self.slots_of(layer).count - len(path)
        return noted.columns(layer, rows, trunk, [*path, *remaining])
