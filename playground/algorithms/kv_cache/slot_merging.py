"""Slots that are freed leave something behind: their keys and values are added to those of the most similar slot that
stays.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from playground.contract import Merge
from playground.engine.attention_logits import products
from playground.engine.kv_buffer import MergeMap, in_front
from playground.engine.sampling import REMOVED

# slots whose products with all others are held at a time: those of all slots of a long prompt would take more memory
# than several caches
AT_ONCE = 256
TINY = 1e-12  # a weight that is still one, so that a mean over nothing but zeros exists


class Alike(NamedTuple):
    """Slots, each with the one that is most like it, [kv_heads, m] each: where a head has fewer, or nobody to choose
    from, the cosine is -inf.
    """

    sources: Tensor
    targets: Tensor
    likeness: Tensor  # cosine of their keys

    def meeting(self, joins: Tensor, slots: int) -> MergeMap | None:
        """Those that join theirs, by a mask [kv_heads, m], in a layer of so many slots; None where nobody does."""
        heads, places = joins.nonzero().unbind(1)
        return (
            MergeMap.of((heads, self.sources[heads, places]), self.targets[heads, places], slots)
            if len(heads)
            else None
        )


def nearest(keys: Sequence[Tensor], among: Tensor, seekers: Tensor) -> Alike:
    """For each of the `seekers` the one `among` the slots of its head whose key points most nearly the same way, both
    [heads of all layers, slots].

    The keys are those of one layer or of several, [kv_heads, slots, d] each: where one token comes and one goes, what
    is small is done for all at once, and a table of all pairs would take longer than the layer.
    """
    counts = seekers.sum(1).tolist()
    sources, others = in_front(seekers, counts), (~among)[:, None]
    if not max(counts):
        return Alike(sources, sources, seekers.new_zeros(sources.shape, dtype=torch.float32))
    heads = len(keys[0])
    found = [_most_like(*layer) for layer in zip(keys, sources.split(heads), others.split(heads))]
    likeness, targets = (torch.cat(parts) for parts in zip(*found))
    if min(counts) < max(counts):
        likeness.masked_fill_(~seekers.gather(1, sources), REMOVED)
    return Alike(sources, targets, likeness)


def _most_like(keys: Tensor, sources: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of the `sources` [kv_heads, m] the largest cosine with a key that is none of the `others` [kv_heads, 1,
    slots], and whose key that is.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    lengths = vector_norm(keys, dim=-1).clamp_(min=TINY)
    found = []
    for some in sources.split(AT_ONCE, 1):
        sought = keys.gather(1, some[..., None].expand(-1, -1, keys.shape[2]))
        found.append(products(sought, keys).div_(lengths[:, None]).masked_fill_(others, REMOVED).max(-1))
    likeness, targets = found[0] if len(found) == 1 else (torch.cat(parts, 1) for parts in zip(*found))
    # last, for there are fewer of these than numbers in a key
    return likeness.div_(lengths.gather(1, sources)), targets


def averaged(meeting: MergeMap, brought: Tensor, own: Tensor) -> Merge:
    """Every slot that takes others in becomes the mean of all that meet there, by the weights they bring [m] and its
    own [k].
    """
    brought, own = brought.clamp(min=TINY), own.clamp(min=TINY)
    met = own.index_add(0, meeting.into, brought)
    return Merge(meeting, brought / met[meeting.into], own / met)


def company(meeting: MergeMap) -> Tensor:
    """How many slots meet in each that takes others in, itself among them, [k]."""
    return 1 + meeting.into.bincount(minlength=len(meeting.targets[0]))
