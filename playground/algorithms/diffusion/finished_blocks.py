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

    def __init__(self, lm, shadows: int = 0):
        self.lm, self.states = lm, lm.new_states(shadows)
        self.settled = lm.everything.start  # everything before this position has its final states

    def read(self, block: range, masked: list[int], step: int, supposed: Mapping[int, int] = MappingProxyType({})):
        """The request of a forward that predicts masked positions of the block. step: forwards in this block so far;
        supposed: tokens read in place of masks.
        """
        return self.lm.read(masked, self.computed(block, masked), self.states, supposed)

    def computed(self, block: range, masked: list[int]) -> list[int]:
        """The positions that the next forward computes, ascending."""
        own = self.lm.block_of(block.start)
        computed = {*range(self.settled, own.stop), *self.lm.sources(masked)}
        self.settled = max(self.settled, own.start)
        return sorted(computed)

    def shown(self) -> Iterator[Figure]:
        """Nothing: what is reused is exact."""
        yield from ()

    def predicted(self, masked: list[int]) -> list[int]:
        """The masked positions that the last forward predicted."""
        return masked


class ShadowedReader:
    """Reads a block beside its shadow (`CanvasPass.shadows`): the whole canvas, or, of a model that sees block by
    block, what `FinishedBlocks` computes. `most`: shadows at most, each with a copy of the token before it.
    """

    def __init__(self, lm, most: int):
        self.lm, self.finished = lm, FinishedBlocks(lm, 2 * most) if lm.block_length else None

    def read(self, block: range, masked: list[int], watched: list[int]):
        """The request of a forward that predicts masked positions of the block, and shadows of the watched ones."""
        shadows = self.shadows(block, watched)
        if self.finished is None:
            return self.lm.read(masked, shadows=shadows)
        return self.lm.read(masked, self.finished.computed(block, masked), self.finished.states, shadows=shadows)

    def shadows(self, block: range, watched: list[int]) -> list[int]:
        """The positions with a shadow: those that are watched, or, where shadows see each other, the block with them.
        """
        if not watched or getattr(self.lm.model, "shifted", False):
            return watched
        return list(block)
