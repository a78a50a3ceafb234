"""Slots that are freed leave something behind: their keys and values are added to those of the most similar slot that stays."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from playground.engine.pool import in_front
from playground.engine.sampling import REMOVED
from playground.engine.scores import products

TINY = 1e-12  # a weight that is still one, so that a mean over nothing but zeros exists


class Merge(NamedTuple):
    """Where the rows of one layer go: slot i is added to slot into[i], times share[i]. What goes nowhere has its own slot there."""

    into: Tensor  # [kv_heads, slots]
    share: Tensor  # [kv_heads, slots]


def nearest(keys: Tensor, among: Tensor, seekers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For each of the keys [kv_heads, slots, d] the most similar one `among` [kv_heads, slots]: their cosine, and its slot, [kv_heads, slots].

    Where a head has none among them, the cosine is -inf. So it is of keys that are not `seekers` [kv_heads, slots], and their
    slot says nothing: when one token comes and one goes, a table of all pairs would take longer than the layer.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    lengths = vector_norm(keys, dim=-1).clamp_(min=TINY)
    if seekers is None:
        return _most_like(keys / lengths[..., None], keys, lengths, among)
    first = in_front(seekers)
    sought = keys.gather(1, first[..., None].expand(-1, -1, keys.shape[2])).div_(lengths.gather(1, first)[..., None])
    likeness, slot = _most_like(sought, keys, lengths, among)
    likeness = keys.new_full(seekers.shape, REMOVED).scatter_(1, first, likeness).masked_fill_(~seekers, REMOVED)
    return likeness, torch.zeros_like(seekers, dtype=torch.long).scatter_(1, first, slot)


def _most_like(sought: Tensor, keys: Tensor, lengths: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """The largest cosine of each row `sought` [kv_heads, n, d] of length 1 with one of the keys [kv_heads, slots, d] among some, and that one's slot.

    Products are divided by the lengths of the keys, [kv_heads, slots], for there are fewer of them than numbers in the keys.
    """
    return products(sought, keys).div_(lengths[:, None]).masked_fill_(~among[:, None], REMOVED).max(-1)


def targets(joins: Tensor, slot: Tensor) -> Tensor:
    """`slot` for those that join another, its own for all others, [kv_heads, slots]."""
    return torch.where(joins, slot, torch.arange(slot.shape[1], device=slot.device))


def averaged(into: Tensor, weight: Tensor) -> Merge:
    """Every slot becomes the mean of all that meet in it, by their weights [kv_heads, slots]."""
    weight = weight.clamp(min=TINY)
    met = torch.zeros_like(weight).scatter_add(1, into, weight)
    return Merge(into, weight / met.gather(1, into))


def company(into: Tensor) -> Tensor:
    """How many slots meet in each one, itself among them, [kv_heads, slots]."""
    return torch.zeros_like(into).scatter_add(1, into, torch.ones_like(into))
