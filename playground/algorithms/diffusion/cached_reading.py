"""Readers that compute some positions of a canvas and take key and value states of the others from earlier forwards.

They differ in which positions they compute. With full attention every state depends on every token, so all of these are
approximations, except in a forward that computes everything.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from playground.events import Figure

SHOWN = 24  # forwards in the picture
REUSED = 0.0


class CachedReader:
    """Base of readers with states. `refresh` computes everything in every n-th forward of a block; 0 does so only where
    the method itself does.
    """

    def __init__(self, lm, refresh: int = 0):
        self.lm, self.refresh, self.states = lm, refresh, lm.new_states()
        self._computed: set[int] | None = None  # None is all
        self._courses: list[list[float]] = []  # by forward, whether each position of the answer was computed
        self._before: list[tuple[Tensor, Tensor]] = []  # keys and values of every layer before a forward over all

    def read(self, block: range, masked: list[int], step: int):
        """The request of a forward that predicts masked positions of the block. step: forwards in this block so far."""
        self._computed = None
        if not self.is_full(step):
            self._computed = set(self.computed(block, masked, step))
            if not self.predicted(masked):  # nothing left that could be predicted
                self._computed = None
        self._before = self._copies() if self._computed is None and self._courses else []
        self._courses.append([float(self._computed is None or i in self._computed) for i in range(self.lm.length)])
        wanted = self.predicted(masked)
        return self.lm.read(wanted, None if self._computed is None else sorted(self._computed), self.states)

    def shown(self) -> Iterator[Figure]:
        """After a forward: which positions were computed, and how the states that were reused compare with fresh ones.
        """
        first = max(0, len(self._courses) - SHOWN)
        yield Figure("matrix", "positions: 1 computed in this forward, 0 reused", {
            "rows": [f"forward {number + 1}" for number in range(first, len(self._courses))],
            "columns": [str(position + 1) for position in range(self.lm.length)], "values": self._courses[first:],
        })
        reused = [place for place, course in enumerate(self._courses[-2] if self._before else ()) if course == REUSED]
        if reused:
            yield Figure("bars", "reused states against fresh ones, cosine by layer", {
                "labels": [f"layer {layer + 1}" for layer in range(len(self._before))],
                "values": [self._likeness(layer, reused) for layer in range(len(self._before))],
            })

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        return [(keys.clone(), values.clone()) for keys, values in zip(self.states.keys, self.states.values)]

    def _likeness(self, layer: int, places: list[int]) -> float:
        """Mean cosine similarity of the keys and values of some positions of the answer before and after a forward."""
        at = torch.tensor(places) - self.lm.everything.start
        now = self.states.keys[layer], self.states.values[layer]
        pairs = zip(self._before[layer], now)
        return float(torch.stack([torch.cosine_similarity(old[:, at], new[:, at], -1) for old, new in pairs]).mean())

    def is_full(self, step: int) -> bool:
        """Whether this forward computes everything."""
        return step == 0 or bool(self.refresh) and step % self.refresh == 0

    def computed(self, block: range, masked: list[int], step: int) -> Iterable[int]:
        """Positions to compute in any other forward."""
        raise NotImplementedError

    def predicted(self, masked: list[int]) -> list[int]:
        """The masked positions that the last forward predicted."""
        if self._computed is None:
            return masked
        return [position for position, source in zip(masked, self.lm.sources(masked)) if source in self._computed]


class PrefixReader(CachedReader):
    """Computes from the block on; what is before it keeps the states of the block's first forward."""

    def computed(self, block: range, masked: list[int], step: int) -> Iterable[int]:
        return {*range(block.start, self.lm.length), *self.lm.sources(block[:1])}


class DualReader(CachedReader):
    """Computes the block alone; what is before and after it keeps the states of the block's first forward."""

    def computed(self, block: range, masked: list[int], step: int) -> Iterable[int]:
        return {*block, *self.lm.sources(block[:1])}
