"""Attention of the new rows of a forward, each over its own KV cache.

The states of new rows are written into the caches first. Caches that share a prefix attend to it together. What a cache
policy does with queries, keys and attention weights happens here too.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from playground.engine.attention_logits import attention_logits
from playground.engine.attention_mask import as_bias
from playground.engine.cascade_attention import PartialAttention, attend_part, merge

if TYPE_CHECKING:
    from playground.engine.attention_mask import Reach, Segment

QKV = Sequence[Tensor]
"""Query, key and value states of new rows, [heads, rows, d] or [kv_heads, rows, d]."""


class RunningRows(Protocol):
    """What attention reads of the running forward (`engine.hooks.Call`)."""

    segments: list[Segment]  # in the order of the rows
    prefix_groups: dict[Reach, list[list[int]]]


class Scoring(NamedTuple):
    """What a model does to attention scores beyond scaling them."""

    softcap: float | None = None  # scores are squashed into (-softcap, softcap)
    sinks: Tensor | None = None  # [heads], a further score in each head's softmax that belongs to no key


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
        outputs[index] if index in outputs else _attend_alone(layer, segment, part, scaling, sliding_window, scoring)
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
        output, weights = _eager_attention(query, keys, values, mask, scaling, scoring)
        segment.report_query_heads(layer, weights)
        segment.watch(layer, weights.sum(1))
        return output
    if scoring is None:
        bias = segment.bias(layer, sliding_window, query.shape[0] // len(keys), query.dtype)
        output = attend(query, keys, values, bias, scaling)
    else:
        output, _ = _eager_attention(query, keys, values, segment.mask(layer, sliding_window), scaling, scoring)
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
    return segment.chosen(layer, weights, _grouped(mask, 1, segment.rows, query.device)), weights


def _attend_by_states(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None
) -> Tensor:
    """Attention to what a cache policy selects by query and key states, before any attention is computed."""
    query, keys, values = held
    mask = segment.mask(layer, sliding_window)
    if segment.watched:
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, scoring))
    states = query.unflatten(0, (len(keys), -1))
    seen = segment.chosen_by_states(layer, states, keys, _grouped(mask, 1, segment.rows, query.device))
    return _attend_masked(query, keys, values, seen, scaling, scoring)


def _attend_slots(
    layer: int, segment: Segment, held: QKV, scaling: float, sliding_window: Reach
) -> PartialAttention:
    """Attention over the slots, for a policy that holds states beside them."""
    query, keys, values = held
    mask = segment.mask(layer, sliding_window)
    if segment.watched:
        segment.watch(layer, attention_weights(query, keys, mask, segment.watched, scaling, None))
    mask = _grouped(mask, 1, segment.rows, query.device)
    bias = None if mask is None else as_bias(mask, len(query) // len(keys), query.dtype)
    return attend_part(query, keys, values, bias, scaling)


def _attend_masked(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, scoring: Scoring | None
) -> Tensor:
    """Attention under a mask for this layer only, [kv_heads, rows, slots]."""
    if scoring is not None:
        return _eager_attention(query, keys, values, mask, scaling, scoring)[0]
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


def _eager_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | str | None, scaling: float,
                     scoring: Scoring | None) -> tuple[Tensor, Tensor]:
    """Attention and its weights, [kv_heads, group, n, m], with a mask as `Segment.mask` makes it.

    Used if all rows are watched, and for scores that torch's fused attention does not support.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    mask = _grouped(mask, heads // kv_heads, n, query.device)
    weights = _softmax(query.reshape(kv_heads, heads // kv_heads * n, -1), keys, mask, scaling, scoring)
    output = (weights.to(values.dtype) @ values).reshape(heads, n, -1)
    return output, weights.reshape(kv_heads, heads // kv_heads, n, -1)


def _grouped(mask: Tensor | str | None, groups: int, n: int, device: torch.device) -> Tensor | None:
    """A mask repeated for the query heads of a group."""
    if mask is None:
        return None
    if isinstance(mask, str):
        mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    return _repeated(mask, groups)


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """A mask [..., rows, slots] repeated for groups * rows rows; a single row is broadcast instead."""
    return mask if groups == 1 or mask.shape[-2] == 1 else mask.repeat(*[1] * (mask.dim() - 2), groups, 1)


def attention_weights(
    query: Tensor, keys: Tensor, mask: Tensor | str | None, rows: list[int], scaling: float, scoring: Scoring | None
) -> Tensor:
    """Attention weights of some rows, summed over the query heads of a group, [kv_heads, len(rows), m].

    Computed separately, so that the output can still come from fused attention, which does not return weights.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    mask = _grouped(mask, 1, n, query.device)
    if len(rows) < n:
        query, mask = query[:, rows], None if mask is None else mask[..., rows, :]
    mask = None if mask is None else _repeated(mask, heads // kv_heads)
    weights = _softmax(query.reshape(kv_heads, heads // kv_heads * len(rows), -1), keys, mask, scaling, scoring)
    return weights.reshape(kv_heads, heads // kv_heads, len(rows), -1).sum(1)


def _softmax(query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float, scoring: Scoring | None) -> Tensor:
    scores = attention_logits(query, keys) * scaling
    if scoring is not None and scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if scoring is None or scoring.sinks is None:
        return scores.softmax(-1, dtype=wide)
    sinks = scoring.sinks.view(len(keys), -1).repeat_interleave(query.shape[1] * len(keys) // len(scoring.sinks), 1)
    return torch.cat([scores, sinks[..., None].to(scores.dtype)], -1).softmax(-1, dtype=wide)[..., :-1]
