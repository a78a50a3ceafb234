"""Prompts with which several lanes of a session begin: each is read once, and its keys and values are held once.

Lanes that want one wait for the same forwards, and whoever's turn comes first makes them. So a prompt belongs to no
lane: any of them may stop or come late. What follows it is each lane's own, and where lanes go forward together their
rows go over the prompt as one (`engine.prefix`). Nothing is approximated. After Hydragen, Juravsky et al. 2024, arXiv
2402.05099.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from playground.decoding.requests import Feed, Steps
from playground.decoding.stream import CHUNK
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.kv_buffer import Capacity

if TYPE_CHECKING:
    from playground.decoding.lane_state import LaneState
    from playground.decoding.stream import Stream
    from playground.engine.kv_cache import KVCache

# tokens from which on a prompt is held once: a shorter one is copied, for attention in two parts would cost a small
# model more than that
HELD_ONCE = 256


class SharedPrefix:
    """One prompt through one model, as a stream reads it, for all who ask."""

    def __init__(self, stream: Stream):
        self.name, self.model, self.prompt, self.captures = stream.name, stream.model, stream.prompt, stream.captures
        self.store = stream.model.new_store(Capacity(len(self.prompt), len(self.prompt)))
        self._waited_for: Feed | None = None
        self._last: Feed | None = None

    def read(self, lane: LaneState) -> Steps:
        """Wait until all of it is read; returns how many tokens were read without this lane's bearing a part of it."""
        given = self.store.length
        while self.store.length < len(self.prompt):
            feed = self._waited_for = self._waited_for or self._next()
            yield [feed]
            if feed is self._waited_for:  # of those who waited for it this lane goes on first
                self._take_in(feed)
            given += feed.rows if lane not in feed.bearers else 0
        return given

    def _next(self) -> Feed:
        piece = self.prompt[self.store.length:][:CHUNK]
        return Feed(
            self,
            ForwardInput(self.store, piece, list(range(-1, len(piece) - 1)), last_only=True),
            LayerPlan(capture=self.captures),
        )

    def _take_in(self, feed: Feed) -> None:
        self.store.keep(feed.rows - 1)
        self._waited_for, self._last = None, feed

    def begin(self, store: KVCache, captures: frozenset[int]) -> Tensor | None:
        """Let an empty store begin with what was read. Returns the row after it; None where more is captured of rows
        than was of this one.
        """
        store.begin_with(self.store, once=len(self.prompt) >= HELD_ONCE)
        return self._last.answer_with(captures) if captures <= self.captures else None


class SharedPrefixes:
    """Those of a session's lanes."""

    def __init__(self, lanes: Iterable[LaneState] = ()):
        self._readers = Counter((name, *reading) for lane in lanes for name, reading in lane.readings().items())
        self._prefixes: dict[tuple, SharedPrefix] = {}

    def of(self, stream: Stream) -> SharedPrefix | None:
        """What a stream begins with; None where it reads its prompt alone."""
        reading = stream.lane.readings().get(stream.name)
        key = (stream.name, *reading) if reading else None
        if self._readers[key] < 2:
            return None
        if key not in self._prefixes:
            self._prefixes[key] = SharedPrefix(stream)
        return self._prefixes[key]
