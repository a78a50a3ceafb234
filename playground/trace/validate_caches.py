"""Checks the consistency of Cache events. Imports neither torch nor gradio."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from playground.events import Cache, Runs
from playground.trace.cache_contents import CacheContents, Eviction, Live, paired, read_layers, without

Listed = Sequence[tuple[Runs, Sequence]]
"""Live ranges and the entries listed for them, head by head"""


def cache_problems(cache: Cache, replay: CacheContents) -> Iterator[str]:
    """Inconsistencies of an event with itself and with the previous ones, which `replay` has seen; advances it."""
    if not cache.live and not replay.live:
        yield "it lists what changed in a cache whose contents were never listed"
        return
    if not cache.live and cache.length < replay.length:
        yield f"the cache shrinks from {replay.length} to {cache.length} tokens, but what is left is not listed"
    evicted = read_layers(cache.dropped)
    listings = (cache.live, evicted, cache.joined)
    if any(not _fits(listing, cache) for listing in listings if listing):
        yield f"live slots are not listed for {cache.layers} layers of {cache.heads} heads"
        return
    yield from _unordered(cache)
    before = replay.before(cache)
    yield from _never_live(_by_head(before, evicted), cache.length)
    live = replay.advance(cache)
    yield from _merge_problems(cache, [*_by_head(live, cache.joined), *_by_head(live, _pairs(evicted))])


def _fits(listing: list[list], cache: Cache) -> bool:
    return len(listing) in (1, cache.layers) and all(len(layer) in (1, cache.heads) for layer in listing)


def _by_head(live: Live, listing: list[list]) -> Listed:
    """What is listed for a head, with its live ranges. One layer or head may represent all."""
    return [pair for layers in paired(live, listing) for pair in paired(*layers)] if listing else []


def _unordered(cache: Cache) -> Iterator[str]:
    for runs in (runs for layer in cache.live for runs in layer):
        edges = [edge for run in runs for edge in run]
        if (
            any(stop <= start for start, stop in runs)
            or edges != sorted(edges)
            or not all(0 <= e <= cache.length for e in edges)
        ):
            yield f"the ranges {runs} are not ascending within {cache.length} positions"


def _never_live(listed: Listed, length: int) -> Iterator[str]:
    for runs, evictions in listed:
        for start, stop, _ in evictions:
            if stop > length or without([(start, stop)], [Eviction(*run) for run in _near(runs, start, stop)]):
                yield f"positions {start} to {stop - 1} are evicted, but not all of them were live"


def _near(runs: Runs, start: int, stop: int) -> Runs:
    """The ranges that may overlap positions start to stop - 1."""
    first = max(0, bisect_right(runs, (start, start)) - 1)
    return runs[first:bisect_right(runs, (stop, stop))]


def _pairs(evicted: list[list[list[Eviction]]]) -> list[list[list[tuple[int, int]]]]:
    """The merges among evictions, (position, position it was merged into), as `Cache.joined` lists them."""
    return [
        [[(start, into) for start, _, into in head if into is not None] for head in layer] for layer in evicted
    ]


def _merge_problems(cache: Cache, listed: Listed) -> Iterator[str]:
    for runs, pairs in listed:
        for evicted, target in pairs:
            if _live(evicted, runs) or not _live(target, runs):
                yield f"position {evicted} was merged into {target}, but the live ranges are {runs}"
    count = sum(len(pairs) for _, pairs in listed)
    if count and not count == cache.merged <= cache.evicted:
        yield f"{count} merged slots are listed, {cache.merged} were counted, and {cache.evicted} were evicted"


def _live(position: int, runs: Runs) -> bool:
    return any(start <= position < stop for start, stop in _near(runs, position, position + 1))
