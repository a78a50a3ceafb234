"""What the slots of a KV cache hold, by layer and head, and what an eviction does to them: read once for all layers."""
from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.engine.attention.attention_mask import EMPTY, Slots, slots_of


class HeadCounts(NamedTuple):
    """What an eviction does to each head of a layer: slots that stay, slots that are freed, and the position of the
    first of these.
    """

    kept: list[int]
    freed: list[int]
    first: list[int]


def counts_of(slots: list[Slots], live: list[Tensor]) -> list[HeadCounts] | None:
    """What is kept and freed if only `live` slots stay, by layer; None if no slot is freed.

    `slots` and the masks `live` [1 or kv_heads, slots] are one for all layers, or one for each. All are counted
    together: on a GPU a few operations for each layer would take longer than the layer.
    """
    each = [slots_of(slots, layer).positions for layer in range(len(live))]
    heads = [max(len(positions), len(mask)) for positions, mask in zip(each, live)]
    positions, stays = _joined(each, heads, EMPTY), _joined(live, heads, False)
    freed = (positions != EMPTY) & ~stays
    first = positions.gather(1, freed.byte().argmax(1, keepdim=True))[:, 0]
    numbers = torch.stack([(stays & (positions != EMPTY)).sum(1), freed.sum(1), first]).tolist()
    if not any(numbers[1]):
        return None
    rest = [iter(row) for row in numbers]
    return [HeadCounts(*(list(islice(row, count)) for row in rest)) for count in heads]


def _joined(parts: list[Tensor], heads: list[int], empty: int | bool) -> Tensor:
    """Tensors [1 or kv_heads, slots] of several layers as one of all their heads, with `empty` slots after the last."""
    widest = max(part.shape[1] for part in parts)
    whole = [part if part.shape[1] == widest else pad(part, (0, widest - part.shape[1]), value=empty) for part in parts]
    return torch.cat([part.expand(count, -1) for part, count in zip(whole, heads)])


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
