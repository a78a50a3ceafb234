"""Segments, the rows of one KV cache in a forward, and their attention.

The states of new rows are written into the caches first. Caches that share a prefix attend to it together. What the
rows may see is in `segment_masks.py`, what a cache policy does with queries, keys and weights in `policy_rows.py`.
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

from playground.engine.attention.attention_mask import PrefixKey, Reach, as_bias
from playground.engine.attention.cascade_attention import PartialAttention, attend_part, merge
from playground.engine.attention.eager_attention import Scoring, attention_weights, eager_attention, grouped
from playground.engine.attention.line_attention import attend_lines
from playground.engine.attention.policy_rows import PolicyHooks, PolicyRows
from playground.engine.attention.segment_masks import MaskedSlots, SegmentMasks, is_restricted
from playground.engine.cache.kv_buffer import KVBuffer, selected_indices, write_both
from playground.engine.host_copies import on_device
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


class SlotStore(MaskedSlots, PolicyHooks, Protocol):
    """What a segment reads of the KV cache it belongs to (`engine.cache.kv_cache.KVCache`)."""

    common: int
    lineage: list[int]
    quantises: bool  # slots of some layer are quantised
    keys: list[KVBuffer]
    values: list[KVBuffer]
    on_attention: Callable | None
    on_cross_attention: Callable | None
    source: int  # slots that hold what cross-attention reads
    in_turn: InTurn | None
    recurrent: RecurrentMemory | None

    def leave_out(self, layer: int, nodes: Iterable[int]) -> None:
        """Scratch nodes leave no states in a layer."""

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Note the attention weights [kv_heads, watched rows, slots] of one layer."""


@dataclass
class Segment:
    """Rows of one KV cache in one forward: scratch nodes `first` to `first + rows`.

    The attention weights of the rows in `watched` are recorded.
    """

    store: SlotStore
    first: int
    rows: int
    watched: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = self.store
        self.positions = self._true_positions()  # of each row
        self.starts = [slots.count + self.first for slots in store.slots]  # the first row's, by entry of the slots
        self._biases: dict[tuple, Tensor | str | None] = {}
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

    def ancestors(self) -> numpy.ndarray:
        """Which scratch nodes each row descends from, itself included, [rows, scratch] of 0 and 1."""
        return self.store.ancestors(self.first, self.end)

    @cached_property
    def masks(self) -> SegmentMasks:
        """What the rows may see."""
        return SegmentMasks(self.store, self.first, self.positions)

    @cached_property
    def under_policy(self) -> PolicyRows:
        """What a cache policy does with the rows, apart from masks by position."""
        return PolicyRows(self.store, self.masks)

    def is_plain(self, sliding_window: Reach) -> bool:
        """Whether each row sees the whole trunk and its own ancestors in every layer, and no slot is quantised."""
        store = self.store
        uniform = (
            len(store.slots) == 1
            and store.slots[0].dense
            and not (self.needs_keys or is_restricted(store, self.end, sliding_window))
        )
        return uniform and not (self.watched or store.quantises)

    def attend(self, layer: int, new: QKV, scaling: float, sliding_window: Reach = None,
               scoring: Scoring | None = None) -> Tensor:
        """Attention of the new rows of a layer over their KV cache, [heads, rows, d]."""
        return _attend_alone(layer, self, new, scaling, sliding_window, scoring)

    # --- states ---

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' key and value states [kv_heads, rows, head_dim]; returns those of all slots up to them."""
        buffers = self.store.keys[layer], self.store.values[layer]
        return write_both(buffers, self.starts[self._own_slots(layer)], (keys, values))

    def _own_slots(self, layer: int) -> int:
        """Which entry of the slots is the layer's."""
        return layer if len(self.store.slots) > 1 else 0

    def leave_out(self, layer: int, rows: list[int]) -> None:
        """These rows leave no states in a layer."""
        self.store.leave_out(layer, [self.first + row for row in rows])

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
        if keys is None or self.watched or self.needs_keys or is_restricted(self.store, self.end, sliding_window):
            return None
        return keys.data_ptr(), keys.shape[1]

    def watch(self, layer: int, weights: Tensor) -> None:
        """Record the attention weights of the watched rows in a layer, [kv_heads, watched, slots]."""
        self.store.watch(self, layer, weights)

    # --- masks ---

    def bias(self, layer: int, sliding_window: Reach, groups: int, dtype: torch.dtype) -> Tensor | str | None:
        """The mask as an additive bias for all heads of a group, as `as_bias` makes it; CAUSAL and None as they are.

        Layers with the same mask share one bias, which is materialised once per forward.
        """
        if layer in self.store.absent:  # a mask of its own, which nobody holds
            return _bias_of(self.masks.of(layer, sliding_window), groups, dtype)
        device = self.store.devices[layer] if self.store.devices else None
        key = (sliding_window, self._own_slots(layer), device, groups, dtype)
        if key not in self._biases:
            self._biases[key] = _bias_of(self.masks.of(layer, sliding_window), groups, dtype)
        return self._biases[key]

    def suffix_bias(self, layer: int, sliding_window: Reach, groups: int, dtype: torch.dtype) -> Tensor | None:
        """As `bias`, for what follows a prefix that all rows see."""
        bias = self.bias(layer, sliding_window, groups, dtype)
        return None if bias is None else bias[..., self.store.common:]


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
        if segment.reports_queries:
            segment.under_policy.report_queries(layer, query.unflatten(0, (len(keys), -1)))
        if segment.renumbers:
            query, keys = segment.under_policy.renumbered(layer, query, keys)
        if segment.focused:
            return _attend_selected(layer, segment, (query, keys, values), scaling, sliding_window, scoring)
        if segment.store.memory:
            seen = _attend_slots(layer, segment, (query, keys, values), scaling, sliding_window)
            return segment.under_policy.with_memory(layer, new[0], seen).to(values)
    if len(segment.watched) == segment.rows:
        mask = segment.masks.of(layer, sliding_window)
        output, weights = eager_attention(query, keys, values, mask, scaling, scoring)
        if segment.store.on_query_heads:
            segment.under_policy.report_heads(layer, weights)
        segment.watch(layer, weights.sum(1))
        return output
    if scoring is None:
        bias = segment.bias(layer, sliding_window, query.shape[0] // len(keys), query.dtype)
        output = attend(query, keys, values, bias, scaling)
    else:
        output, _ = eager_attention(query, keys, values, segment.masks.of(layer, sliding_window), scaling, scoring)
    if segment.watched:
        mask = segment.masks.of(layer, sliding_window)
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, scoring))
    return output


def _attend_selected(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention to the slots that a cache policy selects for each row."""
    if segment.store.focus.by_states:
        return _attend_by_states(layer, segment, held, scaling, sliding_window, scoring)
    if segment.under_policy.chooses_lines:
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
    mask = segment.masks.of(layer, sliding_window)
    weights = attention_weights(query, keys, mask, list(range(segment.rows)), scaling, scoring)
    return segment.under_policy.chosen(layer, weights, grouped(mask, 1, segment.rows, query.device)), weights


def _attend_by_states(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention to what a cache policy selects by query and key states, before any attention is computed.

    Slots that no row selects are not read.
    """
    query, keys, values = held
    mask = segment.masks.of(layer, sliding_window)
    if segment.watched:
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, scoring))
    states = query.unflatten(0, (len(keys), -1))
    seen = segment.under_policy.chosen_by_states(layer, states, keys, grouped(mask, 1, segment.rows, query.device))
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
    mask, sampled = segment.masks.of(layer, sliding_window), segment.store.focus.lines.sampled(segment.rows)
    known = sorted({*sampled, *segment.watched})
    weights = attention_weights(query, keys, mask, known, scaling, scoring)
    if segment.watched:
        segment.watch(layer, weights[:, [known.index(row) for row in segment.watched]])
    lines = segment.under_policy.lines(layer, weights[:, [known.index(row) for row in sampled]], sampled)
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
    mask = segment.masks.of(layer, sliding_window)
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


def _bias_of(mask: Tensor | str | None, groups: int, dtype: torch.dtype) -> Tensor | str | None:
    return as_bias(mask, groups, dtype) if isinstance(mask, Tensor) else mask
