"""The loop of semi-autoregressive decoders: blocks from left to right, each filled in several forwards.

A decoder says how a block is read (`reader`) and which proposals are filled in one forward (`choose`); it may choose
the blocks itself. LLaDA: Nie et al. 2025, arXiv 2502.09992.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from playground.algorithms.diffusion.finished_blocks import FinishedBlocks
from playground.algorithms.diffusion.proposals import Proposals, fill, propose
from playground.contract import CanvasDecoder, Strategy, knob, make
from playground.events import Event, Note

NOTHING: Mapping[int, int] = MappingProxyType({})


class FullReader:
    """Reads the whole canvas in every forward."""

    def __init__(self, lm):
        self.lm = lm

    def read(self, block: range, masked: list[int], step: int, supposed: Mapping[int, int] = NOTHING):
        """The request of a forward that predicts masked positions of the block. step: forwards in this block so far;
        supposed: tokens read in place of masks.
        """
        return self.lm.read(wanted=masked, supposed=supposed)

    def predicted(self, masked: list[int]) -> list[int]:
        """The masked positions that the last forward predicted."""
        return masked

    def shown(self) -> Iterator[Event]:
        """What to show after a forward."""
        yield from ()


def exact_reader(lm):
    """The cheapest reader that changes no logits: states of finished blocks are kept if the model sees block by block.
    """
    return FinishedBlocks(lm) if lm.block_length else FullReader(lm)


class BlockDecoder(CanvasDecoder):
    """Base of decoders that fill one block after the other."""

    block_length: int = knob(32, 1, 128, step=1, help="positions in a block; blocks are filled from left to right")
    temperature: float = knob(0.0, 0.0, 1.5, step=0.05, help="0 takes the top token; 1 samples from the model")

    @property
    def left_to_right(self) -> bool:
        return self.block_length == 1

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def reader(self, lm):
        """How the canvas is read, for one run."""
        return exact_reader(lm)

    def choose(self, lm, proposals: Proposals, block: range) -> list[int]:
        """Positions to fill now."""
        raise NotImplementedError

    def decode(self, lm) -> Iterator:
        reader = self.reader(lm)
        for block in lm.blocks(self.block_length):
            yield from self.fill_block(lm, reader, block)
            yield from end_block(lm, block)

    def fill_block(self, lm, reader, block: range) -> Iterator:
        """Run forwards until no position of the block is masked."""
        step = 0
        while masked := [position for position in lm.masked if position in block]:
            rows = yield reader.read(block, masked, step)
            yield from reader.shown()
            proposals = propose(lm, rows, reader.predicted(masked))
            yield fill(lm, proposals, self.choose(lm, proposals, block))
            step += 1


def end_block(lm, block: range) -> Iterator:
    """After a block: an end token in it fills all later positions, without a forward."""
    ends = [lm.ids[position] for position in block if lm.ends(lm.ids[position])]
    if ends and lm.masked:
        yield Note("This block contains an end token: it fills all later positions, without a forward.")
        yield lm.fill(lm.masked, [ends[0]] * len(lm.masked), [1.0] * len(lm.masked))
