"""AdaBlock-dLLM: a block ends where the model expects a line to end."""
from __future__ import annotations

from collections.abc import Iterator

from playground.algorithms.diffusion.block_loop import BlockDecoder, end_block
from playground.algorithms.diffusion.proposals import Proposals, above, fill, propose
from playground.contract import knob
from playground.events import Figure

DELIMITERS = {"newline": ("\n",), "sentence": ("\n", ".", "!", "?")}


class AdaBlock(BlockDecoder):
    """Let each block end at the delimiter of which the model is most confident, if it is confident enough.

    Before each block one forward predicts the whole rest. Among the next positions, at most a share of the canvas, the
    most confident one that proposes a delimiter ends the block; otherwise it has the default length. The same forward
    fills the first positions, and the block goes on as threshold decoding. A delimiter threshold above 1 gives blocks
    of one length. AdaBlock-dLLM: Lu et al. 2025, arXiv 2509.26432.
    """

    name, title, paper, sheet = "adablock", "AdaBlock-dLLM", "2509.26432", "diffusion/adablock"
    guarantee = ("heuristic",)

    threshold: float = knob(0.9, 0.0, 1.05, step=0.05, help="confidence to fill a position; above 1 one at a time")
    delimiter_threshold: float = knob(
        0.3, 0.0, 1.05, step=0.05, help="confidence at which a delimiter ends a block; above 1 never"
    )
    share: float = knob(0.25, 0.05, 1.0, step=0.05, help="share of the canvas that is searched for a delimiter")
    delimiters: str = knob("newline", choices=(*DELIMITERS,), help="what ends a block: a line, or also a sentence")

    left_to_right = False  # a block of one position does not bind it

    def decode(self, lm) -> Iterator:
        start, reader = 0, self.reader(lm)
        while start < lm.length:
            rows = yield lm.read()
            proposals = propose(lm, rows, lm.masked)
            block = range(start, start + self._length(lm, proposals, start))
            yield _border(block)
            inside = proposals.of(block)
            yield fill(lm, inside, self.choose(lm, inside, block))
            yield from self.fill_block(lm, reader, block)
            yield from end_block(lm, block)
            start = block.stop if lm.masked else lm.length

    def _length(self, lm, proposals: Proposals, start: int) -> int:
        """Length of the block that begins at `start`."""
        left = lm.length - start
        window = range(start, start + min(int(self.share * lm.length), left))
        candidates = [i for i in proposals.of(window).ranked if self._delimits(lm, proposals.tokens[i])]
        if candidates and proposals.confidence[candidates[0]] >= self.delimiter_threshold:
            return candidates[0] - start + 1
        return min(self.block_length, left)

    def _delimits(self, lm, token: int) -> bool:
        return any(mark in lm.piece(token) for mark in DELIMITERS[self.delimiters])

    def choose(self, lm, proposals: Proposals, block: range) -> list[int]:
        return above(proposals, self.threshold)


def _border(block: range) -> Figure:
    return Figure("scalar", "length of each block", {"x": block.start, "series": {"positions": len(block)}})
