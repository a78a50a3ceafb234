"""Readers that compute some positions of a canvas and take key and value states of the others from earlier forwards.

They differ in which positions they compute. With full attention every state depends on every token, so all of these are
approximations, except in a forward that computes everything.
"""
from __future__ import annotations

from collections.abc import Iterable


class CachedReader:
    """Base of readers with states. `refresh` computes everything in every n-th forward of a block; 0 does so only where
    the method itself does.
    """

    def __init__(self, lm, refresh: int = 0):
        self.lm, self.refresh, self.states = lm, refresh, lm.new_states()
        self._computed: set[int] | None = None  # None is all

    def read(self, block: range, masked: list[int], step: int):
        """The request of a forward that predicts masked positions of the block. step: forwards in this block so far."""
        self._computed = None
        if not self.is_full(step):
            self._computed = set(self.computed(block, masked, step))
            if not self.predicted(masked):  # nothing left that could be predicted
                self._computed = None
        wanted = self.predicted(masked)
        return self.lm.read(wanted, None if self._computed is None else sorted(self._computed), self.states)

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
