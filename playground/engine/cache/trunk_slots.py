"""What the slots of a KV cache hold, by layer and head, and what an eviction does to them: read once for all layers."""
from __future__ import annotations

from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from playground.engine.attention.attention_mask import EMPTY, Slots, slots_of


class HeadCounts(NamedTuple):
    """What an eviction does to each head of a layer: slots that stay, slots that are freed, and the position of the
    first of these. Only the former if no eviction is reported.
    """

    kept: list[int]
    freed: list[int] = []
    first: list[int] = []


def counts_of(slots: list[Slots], live: list[Tensor], reported: bool) -> list[HeadCounts] | None:
    """What is kept and freed if only `live` slots stay, by layer; None if no slot is freed.

    `slots` and the masks `live` [1 or kv_heads, slots] are one for all layers, or one for each.
    """
    counts = [_head_counts(slots_of(slots, layer), mask, reported) for layer, mask in enumerate(live)]
    ends = torch.stack([mask.all() for mask in live])
    numbers = torch.cat([*(each.flatten() for each in counts), ends]).tolist()
    if all(numbers[-len(live):]):
        return None
    rest = iter(numbers)
    return [HeadCounts(*([next(rest) for _ in row] for row in each)) for each in counts]


def _head_counts(slots: Slots, live: Tensor, reported: bool) -> Tensor:
    """The numbers of `HeadCounts`, [1 or 3, heads], of a mask [1 or kv_heads, slots]."""
    kept = slots.among(live)
    if not reported:
        return kept.sum(1)[None]
    freed = slots.among(~live)
    first = slots.positions.expand_as(freed).gather(1, freed.byte().argmax(1, keepdim=True))[:, 0]
    return torch.stack([kept.sum(1), freed.sum(1), first])


def runs_of(each: list[Slots], length: int) -> list[list[list[tuple[int, int]]]]:
    """Live true positions as half-open intervals, by layer and head, of a trunk of `length` tokens.

    One entry if all layers or heads agree.
    """
    gaps = [slots for slots in each if not _holds_all(slots, length)]
    found = iter(_intervals(gaps)) if gaps else None
    return [
        [[(0, slots.count)]] if _holds_all(slots, length) else [next(found) for _ in slots.positions] for slots in each
    ]


def _holds_all(slots: Slots, length: int) -> bool:
    return slots.dense and slots.count == length


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
