"""The contents of KV caches over a run: from the differences in Cache events to live positions, and back.

A Cache event lists what was evicted since the previous one (`dropped`), one string for each layer, or one for all of
them. A string has the evicted positions of every KV head, separated by commas; one entry applies to all heads. An entry
consists of items, separated by spaces: `gap`, `gap+more` or `gap>into`, all in base 36. `gap` is the number of
positions since the previous item, or since 0; `more` is how many positions directly after this one are evicted, too;
`into` is the position that the token was merged into. "a+2 1>3" evicts positions 10 to 12 and merges 14 into 3.

Imports neither torch nor gradio.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple

from playground.events import Cache, Runs

Live = list[list[Runs]]
"""live[layer][head]: half-open ranges of positions; one entry if all layers, or all heads, are equal"""

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Eviction(NamedTuple):
    """Positions start to stop - 1 of one head, and the position they were merged into, if any."""

    start: int
    stop: int
    into: int | None = None


@lru_cache(1 << 16)
def base36(number: int) -> str:
    """A number that is not negative, in the digits that `int(text, 36)` reads."""
    higher, digit = divmod(number, 36)
    return (base36(higher) if higher else "") + DIGITS[digit]


def write_head(evictions: Iterable[Eviction]) -> str:
    """The string of one head; evictions are in ascending order."""
    items, end = [], 0
    for start, stop, into in evictions:
        more = f"+{base36(stop - start - 1)}" if stop - start > 1 else ""
        items.append(base36(start - end) + more + ("" if into is None else f">{base36(into)}"))
        end = stop
    return " ".join(items)


def read_head(text: str) -> list[Eviction]:
    """The inverse of `write_head`."""
    evictions, end = [], 0
    for item in text.split():
        span, _, into = item.partition(">")
        gap, _, more = span.partition("+")
        start = end + int(gap, 36)
        end = start + 1 + (int(more, 36) if more else 0)
        evictions.append(Eviction(start, end, int(into, 36) if into else None))
    return evictions


def write_layers(layers: list[list[str]]) -> list[str]:
    """`dropped` of a Cache event from the strings of all heads, layer by layer; empty if nothing was evicted."""
    if not any(any(heads) for heads in layers):
        return []
    return [",".join(heads) if any(heads) else "" for heads in layers]


def read_layers(dropped: list[str]) -> list[list[list[Eviction]]]:
    """The evictions of every layer and head of an event; one entry if all layers, or all heads, are equal."""
    return [[read_head(head) for head in layer.split(",")] for layer in dropped]


def holes(runs: Runs, length: int) -> list[Eviction]:
    """What is not live among the first `length` positions."""
    edges = [0, *(edge for run in runs for edge in run), length]
    return [Eviction(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if stop > start]


def spans(positions: list[int], targets: dict[int, int]) -> list[Eviction]:
    """Ascending positions as evictions, with the targets of those that were merged."""
    found: list[Eviction] = []
    for position in positions:
        into = targets.get(position)
        if into is None and found and found[-1].stop == position and found[-1].into is None:
            found[-1] = Eviction(found[-1].start, position + 1)
        else:
            found.append(Eviction(position, position + 1, into))
    return found


def with_targets(evictions: list[Eviction], targets: dict[int, int]) -> list[Eviction]:
    """The same evictions, with the targets of the positions that were merged."""
    if not targets:
        return evictions
    return spans([position for start, stop, _ in evictions for position in range(start, stop)], targets)


def without(runs: Runs, evictions: list[Eviction]) -> Runs:
    """Live ranges after evictions; positions that are not live are ignored."""
    remaining = list(runs)
    for start, stop, _ in evictions:
        first = max(0, bisect_right(remaining, (start, start)) - 1)
        last = bisect_right(remaining, (stop - 1, stop), lo=first)
        if last < len(remaining) and remaining[last][0] < stop:
            last += 1
        cut = [part for low, high in remaining[first:last]
               for part in ((low, min(high, start)), (max(low, stop), high)) if part[1] > part[0]]
        remaining[first:last] = cut
    return remaining


def extended(runs: Runs, start: int, stop: int) -> Runs:
    """Live ranges after positions start to stop - 1 were added behind them."""
    if stop <= start:
        return runs
    if runs and runs[-1][1] == start:
        return [*runs[:-1], (runs[-1][0], stop)]
    return [*runs, (start, stop)]


class CacheContents:
    """The live positions of one stream's cache after the events seen so far."""

    def __init__(self) -> None:
        self.live: Live = []
        self.length = 0

    def advance(self, cache: Cache) -> Live:
        """Apply one event; returns what is live after it. Lists that were returned earlier do not change."""
        before = self.before(cache)
        self.length = cache.length
        evicted = read_layers(cache.dropped)
        self.live = _combined(before, evicted) if evicted else before
        return self.live

    def before(self, cache: Cache) -> Live:
        """What an event evicts from: its own listing, or the previous contents and what was read since."""
        return cache.live or [[extended(runs, self.length, cache.length) for runs in layer] for layer in self.live]


def contents(caches: Iterable[Cache]) -> Iterator[Live]:
    """What is live after each Cache event, for the events of one stream in order."""
    replay = CacheContents()
    return (replay.advance(cache) for cache in caches)


def live_counts(caches: Iterable[Cache]) -> Iterator[list[int]]:
    """Live positions of each layer and head after each Cache event, without the positions themselves.

    One entry if all layers, or all heads, are equal.
    """
    counts: list[list[int]] = []
    length = 0
    for cache in caches:
        if cache.live:
            counts = [[sum(stop - start for start, stop in runs) for runs in layer] for layer in cache.live]
        else:
            counts = [[count + cache.length - length for count in layer] for layer in counts]
        freed = [[_count(head) for head in layer.split(",")] for layer in cache.dropped]
        counts = [[count - less for count, less in paired(*layers)] for layers in paired(counts, freed or [[0]])]
        length = cache.length
        yield [count for layer in counts for count in layer]


def _count(head: str) -> int:
    """How many positions the string of one head evicts."""
    if "+" in head:
        return sum(stop - start for start, stop, _ in read_head(head))
    return head.count(" ") + 1 if head else 0


def _combined(live: Live, evicted: list[list[list[Eviction]]]) -> Live:
    return [
        [without(runs, gone) if gone else runs for runs, gone in paired(*layers)] for layers in paired(live, evicted)
    ]


def paired(first: list, second: list) -> Iterator[tuple]:
    """Entries of two lists, each of which may have one entry that applies to all."""
    return zip(first, cycle(second)) if len(first) > 1 else zip(cycle(first), second)
