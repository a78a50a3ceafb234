"""The exact cache of block diffusion: states of finished blocks, which nothing that is filled later changes."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from playground.events import Figure


class FinishedBlocks:
    """Computes the model's current block, and, once each, the blocks finished since; the prompt at first.

    The states of a finished block must come from a forward that read all its tokens. That forward is the first one of
    the next block, which computes both. Blocks must be filled in order.
    """

    def __init__(self, lm):
        self.lm, self.states = lm, lm.new_states()
        self.settled = lm.everything.start  # everything before this position has its final states

    def read(self, block: range, masked: list[int], step: int, supposed: Mapping[int, int] = MappingProxyType({})):
        """The request of a forward that predicts masked positions of the block. step: forwards in this block so far;
        supposed: tokens read in place of masks.
        """
        own = self.lm.block_of(block.start)
        computed = {*range(self.settled, own.stop), *self.lm.sources(masked)}
        self.settled = max(self.settled, own.start)
        return self.lm.read(masked, sorted(computed), self.states, supposed)

    def shown(self) -> Iterator[Figure]:
        """Nothing: what is reused is exact."""
        yield from ()

    def predicted(self, masked: list[int]) -> list[int]:
        """The masked positions that the last forward predicted."""
        return masked
