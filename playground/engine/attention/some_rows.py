"""Attention where a compute policy decides: of some rows, of rows that only leave states, and weights to read."""
from __future__ import annotations

import torch
from torch import Tensor

from playground.engine.attention.attention_mask import Reach, as_bias
from playground.engine.attention.eager_attention import attention_weights
from playground.engine.attention.segment_attention import QKV, RunningRows, attend


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
    mask = segment.masks.of(layer, sliding_window)[..., index, :]
    return attend(query, keys, values, as_bias(mask, len(query) // len(keys), query.dtype), scaling)


def _spread(states: Tensor, index: Tensor, rows: int) -> Tensor:
    """States [kv_heads, n, d] of some rows among zeros for the others, [kv_heads, rows, d]."""
    return states.new_zeros(states.shape[0], rows, states.shape[2]).index_copy(1, index, states)


def received_attention(layer: int, rows: list[int], query: Tensor, call: RunningRows, scaling: float,
                       sliding_window: Reach = None) -> Tensor:
    """Attention weights of some rows of the only segment, which have just been run, averaged over heads [n, slots]."""
    (segment,) = call.segments
    mask = segment.masks.of(layer, sliding_window)
    if len(rows) < segment.rows:
        mask = mask[..., rows, :]
    keys = segment.store.keys[layer].read(segment.store.slots_of(layer).count + segment.end)
    return attention_weights(query, keys, mask, list(range(len(rows))), scaling, None).sum(0) / len(query)


def store_all(layer: int, keys: Tensor, values: Tensor, call: RunningRows) -> None:
    """Write the key and value states [kv_heads, rows, d] of rows that do not attend in a layer."""
    counts = [segment.rows for segment in call.segments]
    for segment, new_keys, new_values in zip(call.segments, keys.split(counts, 1), values.split(counts, 1)):
        segment.write(layer, new_keys, new_values)
