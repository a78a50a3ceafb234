"""Merge the keys and values of evicted slots into the most similar live slots."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from playground.contract import Merge
from playground.engine.attention.attention_logits import attention_logits
from playground.engine.cache.kv_buffer import MergeMap, selected_indices
from playground.engine.sampling import REMOVED

# slots compared with all others at a time: the products of all pairs of a long prompt would exceed several caches
AT_ONCE = 256
TINY = 1e-12  # smallest weight, so that a mean of weights that are all zero is defined


class NearestSlots(NamedTuple):
    """Slots, each with the most similar other slot, [kv_heads, m] each.

    The cosine is -inf for the padding of a head with fewer slots, and if a head has no candidate. Where values are
    compared, too, it is the product of both cosines.
    """

    sources: Tensor
    targets: Tensor
    cosine: Tensor  # of their keys, or of keys times that of values

    def merge_map(self, merged: Tensor, slots: int) -> MergeMap | None:
        """The merges selected by the mask `merged` [kv_heads, m], in a layer of `slots` slots; None if there are none.
        """
        heads, index = merged.nonzero().unbind(1)
        if not len(heads):
            return None
        return MergeMap.of((heads, self.sources[heads, index]), self.targets[heads, index], slots)


def nearest(
    key_states: Sequence[Tensor], among: Tensor, sources: Tensor, value_states: Sequence[Tensor] = ()
) -> NearestSlots:
    """The slot in the mask `among` with the largest cosine of keys, for each slot in the mask `sources`. With values,
    that with the largest product of the cosines of keys and values.

    Both masks are [heads of all layers, slots]; states are those of each layer, [kv_heads, slots, d]. Several layers at
    once save kernel launches when one token is appended and one evicted.
    """
    counts = sources.sum(1).tolist()
    indices, excluded = selected_indices(sources, counts), (~among)[:, None]
    if not max(counts):
        return NearestSlots(indices, indices, sources.new_zeros(indices.shape, dtype=torch.float32))
    heads, compared = len(key_states[0]), zip(key_states, value_states) if value_states else zip(key_states)
    found = [_nearest(*layer) for layer in zip(compared, indices.split(heads), excluded.split(heads))]
    cosine, targets = (torch.cat(parts) for parts in zip(*found))
    if min(counts) < max(counts):
        cosine.masked_fill_(~sources.gather(1, indices), REMOVED)
    return NearestSlots(indices, targets, cosine)


def _nearest(compared: Sequence[Tensor], sources: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """The largest cosine of each source slot [kv_heads, m] with a slot not `excluded` [kv_heads, 1, slots], and which.

    The product of the cosines of all states that are compared, [kv_heads, slots, d] each.
    """
    wide = [states.to(torch.promote_types(states.dtype, torch.float32)) for states in compared]
    norms = [vector_norm(states, dim=-1).clamp_(min=TINY) for states in wide]
    found = []
    for some in sources.split(AT_ONCE, 1):
        parts = [_projections(states, some).div_(norm[:, None]) for states, norm in zip(wide, norms)]
        found.append(math.prod(parts[1:], start=parts[0]).masked_fill_(excluded, REMOVED).max(-1))
    cosine, targets = found[0] if len(found) == 1 else (torch.cat(parts, 1) for parts in zip(*found))
    # the sources are normalised last: there are fewer maxima than numbers in their states
    return cosine.div_(math.prod(norms[1:], start=norms[0]).gather(1, sources)), targets


def _projections(states: Tensor, sources: Tensor) -> Tensor:
    """Products of the states [kv_heads, slots, d] of source slots [kv_heads, m] with all states, [kv_heads, m, slots].
    """
    return attention_logits(states.gather(1, sources[..., None].expand(-1, -1, states.shape[2])), states)


def merge_by_mean(merge_map: MergeMap, source_weights: Tensor, target_weights: Tensor) -> Merge:
    """Each target becomes the mean of itself and its sources, weighted by target weights [k] and source weights [m]."""
    source_weights, target_weights = source_weights.clamp(min=TINY), target_weights.clamp(min=TINY)
    total = target_weights.index_add(0, merge_map.into, source_weights)
    return Merge(merge_map, source_weights / total[merge_map.into], target_weights / total)


def merge_sizes(merge_map: MergeMap) -> Tensor:
    """Number of slots merged into each target, itself included, [k]."""
    return 1 + merge_map.into.bincount(minlength=len(merge_map.targets[0]))
