"""Sizes of recorded forwards: few of them, so that a text finds the one it needs recorded already."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of one cache; longer blocks keep a GPU busy without graphs
PLACES = (1, 2, 4, 8)  # caches in one forward
MIN_CAPACITY = 256  # slots


class Bucket(NamedTuple):
    """A size of a recorded forward: rows and slots of each cache, and places for caches."""

    rows: int
    slots: int
    places: int = 1


def buckets(context: int) -> list[Bucket]:
    """All sizes for one cache of up to `context` slots."""
    sizes = [*takewhile(lambda size: size <= context, capacities()), capacity_for(context)]
    return [Bucket(rows, slots) for slots in sizes for rows in BLOCK_SIZES]


def block_size(rows: int) -> int:
    return BLOCK_SIZES[bisect_left(BLOCK_SIZES, rows)]


def places_for(caches: int) -> int:
    return PLACES[bisect_left(PLACES, caches)]


def capacity_for(slots: int) -> int:
    """The smallest capacity for so many slots and a spare one."""
    return next(size for size in capacities() if size > slots)


def capacities() -> Iterator[int]:
    """Two per doubling, so that there are few of them and at most a third of the slots is unused."""
    size = MIN_CAPACITY
    while True:
        yield size
        yield size * 3 // 2
        size *= 2
