"""Cache events list what changed, from which the contents of the cache are restored."""
from __future__ import annotations

import json
import random

import pytest
import torch
from pairs import pair
from toys import byte_tokenizer

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder, Settled
from playground.decoding.session import prepare
from playground.engine.cache.kv_cache import KVCache
from playground.engine.text.tokens import Tokens
from playground.events import Cache, Stamped
from playground.trace.cache_contents import (
    base36,
    contents,
    live_counts,
    read_head,
    spans,
    without,
    write_head,
)

TEXT = "The green bird sings, and the red fox listens."
TIGHT = {
    "h2o": {"heavy": 5, "recent": 3},
    "sink_window": {"sinks": 2, "window": 7},
    "key_norm": {"size": 8, "recent": 2},
    "d2o": {"heavy": 0.2, "recent": 0.2},
}


class Watching(Recorder):
    """Records the contents that the cache reports, whenever an event is recorded."""

    seen: list = []

    def cache(self, store, drafted, settled):
        self.seen.append(store.runs())
        return super().cache(store, drafted, settled)


def every(live, cache: Cache) -> list:
    """A listing with an entry for each layer and head, without adjacent ranges."""
    layers = live * cache.layers if len(live) == 1 else live
    return [[_joined(runs) for runs in (heads * cache.heads if len(heads) == 1 else heads)] for heads in layers]


def _joined(runs) -> list[int]:
    return [position for start, stop in runs for position in range(start, stop)]


@pytest.mark.parametrize("decoder", ["greedy", "speculative", "beam_search"])
@pytest.mark.parametrize("name", [*TIGHT, None])
def test_the_contents_restored_from_events_are_those_of_the_cache(name, decoder):
    Watching.seen = []
    toggles = [(name, TIGHT[name])] if name else []
    lane = LaneConfig(decoder, {}, toggles)
    session = prepare(pair(), [lane], Prompt(TEXT), Limits(max_new_tokens=8), Watching)
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    restored = [every(live, cache) for live, cache in zip(contents(caches), caches)]
    assert restored == [every(live, cache) for live, cache in zip(Watching.seen, caches)]
    assert [max(counts) for counts in live_counts(caches)] == [
        max(len(head) for layer in live for head in layer) for live in restored
    ]


def large_cache(layers: int = 32, heads: int = 8, slots: int = 1200) -> KVCache:
    """A cache from which heads have evicted different tokens of a long text."""
    store = KVCache(layers)
    for buffer in (*store.keys, *store.values):
        buffer.write(0, torch.zeros(heads, slots, 1))
    store.extend(list(range(-1, slots - 1)))
    store.commit(slots - 1)
    return store


def test_an_eviction_in_every_head_takes_one_kilobyte_and_no_listing_of_the_cache():
    store, recorder = large_cache(), Recorder(Tokens(byte_tokenizer(), 256))
    recorder.cache(store, 0, Settled())
    chooser = random.Random(0)
    lines = []
    for _ in range(3):
        live = torch.ones(32, 8, store.slots[0].count, dtype=torch.bool)
        for layer in range(32):
            for head in range(8):
                live[layer, head, chooser.randrange(store.slots[0].count)] = False
        freed = store.evict(list(live))
        (event,) = recorder.cache(store, 0, Settled(freed))
        lines.append(len(json.dumps(Stamped(0, 1, 0.0, event).to_json())))
    assert max(lines) < 1400


def test_a_rollback_reports_the_whole_cache_again():
    store, recorder = large_cache(2, 2, 10), Recorder(Tokens(byte_tokenizer(), 256))
    events = recorder.cache(store, 0, Settled())
    store.roll_back(4)
    store.extend([-1])
    store.commit(0)
    events += recorder.cache(store, 0, Settled())
    assert [live for live in contents(events)][-1] == [[[(0, 7)]]]


def test_two_evictions_between_two_events_are_both_reported():
    store, recorder = large_cache(2, 2, 10), Recorder(Tokens(byte_tokenizer(), 256))
    events = recorder.cache(store, 0, Settled())
    store.evict([torch.arange(10)[None] != 3])
    store.evict([torch.arange(9)[None] != 0, torch.arange(9)[None] != 8])
    events += recorder.cache(store, 0, Settled())
    assert list(contents(events))[-1] == [[[(1, 3), (4, 10)]], [[(0, 3), (4, 9)]]]


def test_evictions_are_read_as_written_and_remove_their_positions():
    chooser = random.Random(1)
    for _ in range(200):
        live = sorted(chooser.sample(range(60), 30))
        gone = sorted(chooser.sample(live, 9))
        targets = {p: chooser.choice(live) for p in gone if chooser.random() < 0.3}
        evictions = spans(gone, targets)
        assert read_head(write_head(evictions)) == evictions
        runs = [(start, stop) for start, stop, _ in spans(live, {})]
        assert _joined(without(runs, evictions)) == [p for p in live if p not in gone]


def test_the_format_is_the_documented_one():
    assert write_head(spans([10, 11, 12, 14], {14: 3})) == "a+2 1>3"
    assert [int(base36(number), 36) for number in (0, 35, 36, 32767)] == [0, 35, 36, 32767]


def test_full_listings_of_older_traces_are_read():
    listings = {4: [[[(0, 4)]]], 5: [[[(1, 5)]]]}
    older = [Cache(length=length, layers=1, heads=1, live=live) for length, live in listings.items()]
    assert list(contents(older)) == [[[[(0, 4)]]], [[[(1, 5)]]]]
    assert list(live_counts(older)) == [[4], [4]]
