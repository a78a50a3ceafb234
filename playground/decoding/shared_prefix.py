"""Prompts shared by several lanes of a session: each is read once, and its keys and values are stored once.

The lanes wait for the same forwards, and the first one that is scheduled runs them. The prefix belongs to no lane, so
any of them may stop or start late. After the prefix each lane has its own slots. In batched forwards the rows of all
lanes attend to the prefix together (`engine.cascade_attention`). Attention stays exact. After Hydragen, Juravsky et al.
2024, arXiv 2402.05099.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.decoding.requests import Feed, Steps
from playground.decoding.stream import answer_of, chunk_of
from playground.engine.cache.kv_buffer import Capacity
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan

if TYPE_CHECKING:
    from playground.decoding.lane.lane_state import LaneState
    from playground.decoding.stream import Stream
    from playground.engine.cache.kv_cache import KVCache

# prompt length in tokens from which it is stored once; a shorter one is copied, which costs a small model less than
# attention in two parts
STORED_ONCE = 256


PrefixReading = tuple[str, int, tuple[int, ...]]
"""What reads which prompt: name of the stream, its model (by id), and the prompt."""


class SharedPrefix:
    """One prompt read by one model, for all streams that start with it."""

    reads_again = False

    def __init__(self, stream: Stream, state_layers: frozenset[int]):
        """`state_layers` are those whose inputs some lane reads for the whole prompt."""
        self.name, self.model, self.prompt, self.captures = stream.name, stream.model, stream.prompt, stream.captures
        self._state_layers = state_layers
        self._states: list[dict[int, Tensor]] = []
        self.store = stream.model.new_store(Capacity(len(self.prompt), len(self.prompt)))
        self._pending: Feed | None = None
        self._last: Feed | None = None

    def read(self, lane: LaneState) -> Steps:
        """Wait until the prompt is read; returns how many tokens were read without cost to this lane."""
        given = self.store.length
        while self.store.length < len(self.prompt):
            feed = self._pending = self._pending or self._next()
            yield [feed]
            if feed is self._pending:  # this lane is the first to continue after the forward
                self._add(feed)
            given += feed.rows if lane not in feed.lanes else 0
        return given

    def _next(self) -> Feed:
        chunk = self.prompt[self.store.length:][:max(chunk_of(self.model), self.store.least_chunk)]
        return Feed(
            self,
            ForwardInput(self.store, chunk, list(range(-1, len(chunk) - 1)), last_only=True),
            LayerPlan(capture=self.captures | self._state_layers),
        )

    def _add(self, feed: Feed) -> None:
        self.store.commit(feed.rows - 1)
        self._pending, self._last = None, feed
        if self._state_layers:
            self._states.append({layer: feed.captured[layer] for layer in self._state_layers})

    def begin(self, store: KVCache, captures: frozenset[int]) -> Tensor | None:
        """Start an empty cache with the prefix.

        Returns the row after it, [1, V + captured]; None if `captures` includes layers that were not captured.
        """
        store.start_from(self.store, shared=len(self.prompt) >= STORED_ONCE)
        return answer_of(self._last, captures) if self._last and captures <= self.captures else None

    def captured(self, layers: tuple[int, ...]) -> dict[int, Tensor] | None:
        """Hidden states [prompt, hidden_size] before these layers; None if some were not captured."""
        if not self._state_layers.issuperset(layers) or not layers:
            return None
        return {layer: torch.cat([part[layer] for part in self._states]) for layer in layers}


class SharedPrefixes:
    """The prefixes that at least two lanes of a session share."""

    def __init__(self, lanes: Iterable[LaneState] = ()):
        self._readers: Counter[PrefixReading] = Counter()
        self._state_layers: defaultdict[PrefixReading, frozenset[int]] = defaultdict(frozenset)
        for lane in lanes:
            for name, reading in lane.readings().items():
                self._readers[name, *reading] += 1
                self._state_layers[name, *reading] |= frozenset(lane.state_layers(name))
        self._prefixes: dict[PrefixReading, SharedPrefix] = {}

    def of(self, stream: Stream) -> SharedPrefix | None:
        """The prefix that a stream starts with; None if no other lane shares its prompt."""
        reading = stream.lane.readings().get(stream.name)
        if reading is None or self._readers[key := (stream.name, *reading)] < 2:
            return None
        if key not in self._prefixes:
            self._prefixes[key] = SharedPrefix(stream, self._state_layers[key])
        return self._prefixes[key]
