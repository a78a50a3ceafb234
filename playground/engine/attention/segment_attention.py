"""Segments, the rows of one KV cache in a forward: what they see, and their attention.

The states of new rows are written into the caches first. Caches that share a prefix attend to it together. What a cache
policy does with queries, keys and attention weights happens here too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from playground.engine.attention.attention_mask import (
    CAUSAL,
    EMPTY,
    Chunks,
    Focus,
    PrefixKey,
    Reach,
    Renumbering,
    RowsAndSlots,
    Slots,
    Window,
    as_bias,
)
from playground.engine.attention.cascade_attention import PartialAttention, attend_part, merge
from playground.engine.attention.eager_attention import Scoring, attention_weights, eager_attention, grouped
from playground.engine.attention.line_attention import AttentionLines, attend_lines
from playground.engine.cache.kv_buffer import KVBuffer, selected_indices, write_both
from playground.engine.host_copies import moved, on_device
from playground.engine.recurrent.recurrent_state import RecurrentMemory

QKV = Sequence[Tensor]
"""Query, key and value states of new rows, [heads, rows, d] or [kv_heads, rows, d]."""


class InTurn(Protocol):
    """Reads rows of one forward one after the other, and follows what becomes of the scratch nodes."""

    def applies(self, first: int, rows: int) -> bool:
        """Whether so many rows, of which the first is scratch node `first`, are read in turn."""

    def attend(self, layer: int, segment: Segment, new: QKV, scaling: float, sliding_window: Reach,
               scoring: Scoring | None) -> Tensor:
        """Attention of these rows, [heads, rows, d], as `Segment.attend` gives it."""

    def commit(self, path: list[int], remaining: list[int]) -> None:
        """A path of nodes was committed; the remaining ones are renumbered from 0."""

    def keep_only(self, nodes: list[int]) -> None:
        """Only these nodes, ascending, remain in the scratch; they are renumbered from 0."""


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
    in_turn: InTurn | None
    recurrent: RecurrentMemory | None
    devices: tuple[torch.device, ...]

    def leave_out(self, layer: int, nodes: Iterable[int]) -> None:
        """Scratch nodes leave no states in a layer."""

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Record the attention weights [kv_heads, watched rows, slots] of one layer."""


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
        self.starts = [slots.count + self.first for slots in store.slots]  # the first row's, by entry of the slots
        # what a cache policy does with these rows: it selects slots for some of them by their attention weights,
        self.focused = store.focus is not None and any(map(store.focus.among, self.positions))
        self.renumbers = store.renumbering is not None  # uses their index in the cache as position,
        self.reports_queries = store.on_queries is not None  # reads their query states,
        self.in_turn = store.in_turn is not None and store.in_turn.applies(self.first, self.rows)  # acts between them,
        # or acts on their queries and keys in any way, apart from masks by position
        self.needs_keys = (
            self.focused or self.renumbers or self.reports_queries or self.in_turn or store.memory is not None
        )

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

    def attend(self, layer: int, new: QKV, scaling: float, sliding_window: Reach = None,
               scoring: Scoring | None = None) -> Tensor:
        """Attention of the new rows of a layer over their KV cache, [heads, rows, d]."""
        return _attend_alone(layer, self, new, scaling, sliding_window, scoring)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' key and value states [kv_heads, rows, head_dim]; returns those of all slots up to them."""
        buffers = self.store.keys[layer], self.store.values[layer]
        return write_both(buffers, self.starts[self._own_slots(layer)], (keys, values))

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key and value states of the prefix shared with other caches, [kv_heads, slots, d] each, if there is one."""
        return self.store.keys[layer].prefix, self.store.values[layer].prefix

    def write_suffix(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `write`, but returns what follows the shared prefix."""
        start = self.starts[self._own_slots(layer)]
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
            return self._mask_without(absent, self._slots(layer), sliding_window)
        key = (sliding_window, self._own_slots(layer))
        if key not in self._masks:
            self._masks[key] = self._build_mask(self._slots(layer), sliding_window)
        return self._masks[key]

    def _own_slots(self, layer: int) -> int:
        """Which entry of the slots is the layer's."""
        return layer if len(self.store.slots) > 1 else 0

    def _slots(self, layer: int) -> Slots:
        return self.store.slots[self._own_slots(layer)]

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
        around = RowsAndSlots(
            [numbers[row] for row in rows], self._slot_positions(layer), visible[:, index], self._slots(layer).count
        )
        seen[:, index] = self.store.focus.by_states(layer, query[:, :, index], keys, around)
        return (seen & visible).to(own)

    def _slot_positions(self, layer: int) -> Tensor:
        """True positions of all slots up to these rows, trunk and scratch, [1 or kv_heads, slots]."""
        trunk = self._slots(layer).positions
        return torch.cat([trunk, self._scratch_positions().expand(len(trunk), -1)], 1)

    def _scratch_positions(self) -> Tensor:
        """True positions of the scratch nodes up to these rows, [nodes]."""
        depths = on_device(self.store.depths[:self.end], self.store.device, torch.long)
        return depths + self.store.length

    def _build_mask(self, slots: Slots, sliding_window: Reach) -> Tensor | str | None:
        if self._is_restricted(sliding_window) or not slots.dense:
            return self._explicit_mask(slots, sliding_window)
        if not self.is_chain:
            seen = torch.ones(self.rows, slots.count, dtype=torch.bool, device=self.store.device)
            return torch.cat([seen, self._scratch_mask], 1)
        if self.rows == 1:
            return None
        before = slots.count + self.first
        if not before:
            return CAUSAL
        return torch.ones(self.rows, before + self.rows, dtype=torch.bool, device=self.store.device).tril(before)

    def _is_restricted(self, sliding_window: Reach) -> bool:
        """Whether some row may not see all positions before it."""
        limit = sliding_window.size if isinstance(sliding_window, Chunks) else sliding_window
        return self.store.window is not None or bool(limit and self.store.length + self.end > limit)

    @property
    def is_chain(self) -> bool:
        """Whether each scratch node up to these rows continues the one before it."""
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
        return self._slots(layer).positions[:, :self.end]

    def _build_mask(self, slots: Slots, sliding_window: Reach) -> Tensor | str | None:
        if not self.first and not self._is_restricted(sliding_window):
            return CAUSAL
        query = on_device(self.token_positions, self.store.device)[:, None]
        return self._allowed(query, slots.positions[0, :self.end], sliding_window)


class RunningRows(Protocol):
    """What attention reads of the running forward (`engine.hooks.Call`)."""

    segments: list[Segment]  # in the order of the rows
    prefix_groups: dict[Reach, list[list[int]]]


def attend_all(layer: int, new: QKV, call: RunningRows, scaling: float, sliding_window: Reach = None,
               scoring: Scoring | None = None) -> Tensor:
    """Attention of the new rows of a layer, each over its own KV cache, [heads, rows, d]."""
    groups = _prefix_groups(call, sliding_window) if scoring is None else []
    if len(groups) == 1 and len(groups[0]) == len(call.segments):
        return _attend_shared(layer, call.segments, new, scaling, sliding_window)
    parts, outputs = _split(new, call.segments), {}
    for group in groups:
        segments = [call.segments[index] for index in group]
        joined = [torch.cat(rows, 1) for rows in zip(*(parts[index] for index in group))]
        output = _attend_shared(layer, segments, joined, scaling, sliding_window)
        outputs |= zip(group, output.split([segment.rows for segment in segments], 1))
    each = [
        outputs[index] if index in outputs else segment.attend(layer, part, scaling, sliding_window, scoring)
        for index, (segment, part) in enumerate(zip(call.segments, parts))
    ]
    return each[0] if len(each) == 1 else torch.cat(each, 1)


def _prefix_groups(call: RunningRows, sliding_window: Reach) -> list[list[int]]:
    """Indices of the segments that share a prefix, one list for each prefix; found once for all layers."""
    if sliding_window not in call.prefix_groups:
        prefixes = [segment.shared_prefix(sliding_window) for segment in call.segments]
        call.prefix_groups[sliding_window] = [
            [index for index, own in enumerate(prefixes) if own == prefix]
            for prefix in dict.fromkeys(prefix for prefix in prefixes if prefix)
        ]
    return call.prefix_groups[sliding_window]


def attend_some(layer: int, rows: list[int], new: QKV, call: RunningRows, scaling: float, sliding_window: Reach = None
                ) -> Tensor:
    """Attention of some rows of the only segment, [heads, len(rows), d]; the others leave no states in the layer.

    `new` are the states of these rows.
    """
    (segment,) = call.segments
    segment.leave_out(layer, sorted(set(range(segment.rows)) - set(rows)))
    query, *states = new
    index = torch.tensor(rows, dtype=torch.long, device=query.device)
    keys, values = segment.write(layer, *(_spread(part, index, segment.rows) for part in states))
    mask = segment.mask(layer, sliding_window)[..., index, :]
    return attend(query, keys, values, as_bias(mask, len(query) // len(keys), query.dtype), scaling)


def _spread(states: Tensor, index: Tensor, rows: int) -> Tensor:
    """States [kv_heads, n, d] of some rows among zeros for the others, [kv_heads, rows, d]."""
    return states.new_zeros(states.shape[0], rows, states.shape[2]).index_copy(1, index, states)


def received_attention(layer: int, rows: list[int], query: Tensor, call: RunningRows, scaling: float,
                       sliding_window: Reach = None) -> Tensor:
    """Attention weights of some rows of the only segment, which have just been run, averaged over heads [n, slots]."""
    (segment,) = call.segments
    mask = segment.mask(layer, sliding_window)
    if len(rows) < segment.rows:
        mask = mask[..., rows, :]
    keys = segment.store.keys[layer].read(segment.store.slots_of(layer).count + segment.end)
    return attention_weights(query, keys, mask, list(range(len(rows))), scaling, None).sum(0) / len(query)


def store_all(layer: int, keys: Tensor, values: Tensor, call: RunningRows) -> None:
    """Write the key and value states [kv_heads, rows, d] of rows that do not attend in a layer."""
    counts = [segment.rows for segment in call.segments]
    for segment, new_keys, new_values in zip(call.segments, keys.split(counts, 1), values.split(counts, 1)):
        segment.write(layer, new_keys, new_values)


def _split(new: QKV, segments: list[Segment]) -> list[QKV]:
    """The new rows of each segment."""
    if len(segments) == 1:
        return [new]
    counts = [segment.rows for segment in segments]
    return list(zip(*(rows.split(counts, 1) for rows in new)))


def _attend_shared(layer: int, segments: list[Segment], new: QKV, scaling: float, sliding_window: Reach) -> Tensor:
    """Attention of new rows whose caches share a prefix: over the prefix in one batch, over each suffix separately."""
    prefix = attend_part(new[0], *segments[0].prefix(layer), None, scaling)  # every row sees all of it
    parts = []
    for segment, (query, new_keys, new_values) in zip(segments, _split(new, segments)):
        keys, values = segment.write_suffix(layer, new_keys, new_values)
        bias = segment.suffix_bias(layer, sliding_window, query.shape[0] // len(keys), query.dtype)
        parts.append(attend_part(query, keys, values, bias, scaling))
    suffix = parts[0] if len(parts) == 1 else PartialAttention(*(torch.cat(part, 1) for part in zip(*parts)))
    return merge(prefix, suffix)


def _attend_alone(
    layer: int, segment: Segment, new: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention of the new rows of one KV cache, [heads, rows, d]."""
    query, new_keys, new_values = new
    keys, values = segment.write(layer, new_keys, new_values)
    if segment.in_turn:
        return segment.store.in_turn.attend(layer, segment, new, scaling, sliding_window, scoring)
    if segment.needs_keys:
        segment.report_queries(layer, query.unflatten(0, (len(keys), -1)))
        if segment.renumbers:
            query, keys = segment.renumbered(layer, query, keys)
        if segment.focused:
            return _attend_selected(layer, segment, (query, keys, values), scaling, sliding_window, scoring)
        if segment.store.memory:
            seen = _attend_slots(layer, segment, (query, keys, values), scaling, sliding_window)
            return segment.with_memory(layer, new[0], seen).to(values)
    if len(segment.watched) == segment.rows:
        mask = segment.mask(layer, sliding_window)
        output, weights = eager_attention(query, keys, values, mask, scaling, scoring)
        segment.report_query_heads(layer, weights)
        segment.watch(layer, weights.sum(1))
        return output
    if scoring is None:
        bias = segment.bias(layer, sliding_window, query.shape[0] // len(keys), query.dtype)
        output = attend(query, keys, values, bias, scaling)
    else:
        output, _ = eager_attention(query, keys, values, segment.mask(layer, sliding_window), scaling, scoring)
    if segment.watched:
        mask = segment.mask(layer, sliding_window)
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, scoring))
    return output


def _attend_selected(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention to the slots that a cache policy selects for each row."""
    if segment.store.focus.by_states:
        return _attend_by_states(layer, segment, held, scaling, sliding_window, scoring)
    if segment.chooses_lines:
        return _attend_along_lines(layer, segment, held, scaling, sliding_window, scoring)
    query, keys, values = held
    seen, weights = _focused(layer, query, keys, segment, sliding_window, scaling, scoring)
    if segment.watched:
        segment.watch(layer, weights[:, segment.watched])
    return _attend_masked(query, keys, values, seen, scaling, scoring)


def _focused(layer: int, query: Tensor, keys: Tensor, segment: Segment, sliding_window: Reach, scaling: float,
             scoring: Scoring | None) -> tuple[Tensor, Tensor]:
    """The mask after a cache policy's selection, and the attention weights it was based on.

    Both are [kv_heads, rows, slots].
    """
    mask = segment.mask(layer, sliding_window)
    weights = attention_weights(query, keys, mask, list(range(segment.rows)), scaling, scoring)
    return segment.chosen(layer, weights, grouped(mask, 1, segment.rows, query.device)), weights


def _attend_by_states(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention to what a cache policy selects by query and key states, before any attention is computed.

    Slots that no row selects are not read.
    """
    query, keys, values = held
    mask = segment.mask(layer, sliding_window)
    if segment.watched:
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, scoring))
    states = query.unflatten(0, (len(keys), -1))
    seen = segment.chosen_by_states(layer, states, keys, grouped(mask, 1, segment.rows, query.device))
    return _attend_masked(query, *_selected(keys, values, seen), scaling, scoring)


def _selected(keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of keys and values [kv_heads, m, d] that some row sees, and the mask [kv_heads, n, m] over these."""
    read = seen.any(1)
    counts = read.sum(1).tolist()
    if max(counts) == read.shape[1]:
        return keys, values, seen
    slots = selected_indices(read, counts)
    heads = torch.arange(len(slots), device=slots.device)[:, None]
    return keys[heads, slots], values[heads, slots], seen.gather(2, slots[:, None].expand(-1, seen.shape[1], -1))


def _attend_along_lines(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention of rows of the prompt along the lines that some of them choose by their attention to all slots.

    If there are so many lines that all products are fewer, these are computed and masked.
    """
    query, keys, values = held
    mask, sampled = segment.mask(layer, sliding_window), segment.store.focus.lines.sampled(segment.rows)
    known = sorted({*sampled, *segment.watched})
    weights = attention_weights(query, keys, mask, known, scaling, scoring)
    if segment.watched:
        segment.watch(layer, weights[:, [known.index(row) for row in segment.watched]])
    lines = segment.lines(layer, weights[:, [known.index(row) for row in sampled]], sampled)
    seen = lines.mask(on_device(segment.positions, query.device))
    if mask is not None:
        seen = seen & grouped(mask, 1, segment.rows, query.device)
    if lines.most >= keys.shape[1]:
        return _attend_masked(query, keys, values, seen, scaling, scoring)
    return attend_lines(query, (keys, values), lines, seen, scaling, scoring)


def _attend_slots(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach
) -> PartialAttention:
    """Attention over the slots, for a policy that holds states beside them."""
    query, keys, values = held
    mask = segment.mask(layer, sliding_window)
    if segment.watched:
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, None))
    mask = grouped(mask, 1, segment.rows, query.device)
    bias = None if mask is None else as_bias(mask, len(query) // len(keys), query.dtype)
    return attend_part(query, keys, values, bias, scaling)


def _attend_masked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, scoring: Scoring | None
) -> Tensor:
    """Attention under a mask for this layer only, [kv_heads, rows, slots]."""
    if scoring is not None:
        return eager_attention(query, keys, values, mask, scaling, scoring)[0]
    return attend(query, keys, values, as_bias(mask, len(query) // len(keys), query.dtype), scaling)


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | str | None, scaling: float) -> Tensor:
    """Attention of query [heads, n, d] over keys and values [kv_heads, m, d]; bias as `Segment.bias` makes it."""
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    if isinstance(bias, str):
        keys, values = (x.repeat_interleave(heads // kv_heads, 0)[None] for x in (keys, values))
        return scaled_dot_product_attention(query[None], keys, values, is_causal=True, scale=scaling)[0]
    # the heads of a group become further rows, so no key is copied
    query = query.reshape(1, kv_heads, heads // kv_heads * n, -1)
    return scaled_dot_product_attention(query, keys[None], values[None], bias, scale=scaling).reshape(heads, n, -1)
