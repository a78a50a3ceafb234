"""WINO: fill many positions at once, and mask again those that the rest of the block does not confirm."""
from collections.abc import Iterator

from playground.algorithms.diffusion.block_loop import end_block
from playground.algorithms.diffusion.finished_blocks import ShadowedReader
from playground.algorithms.diffusion.proposals import Proposals, propose
from playground.contract import CanvasDecoder, knob
from playground.engine.sampling import in_float64
from playground.events import Figure

SHARE, FEWEST, MOST = 0.7, 5, 20  # of the masks, how many are filled at most in one forward
FIRST = 30  # the number of positions that count as filled before the first forward of a block


class WINO(CanvasDecoder):
    """Fill every mask above a low threshold, then take back the tokens that the others do not support.

    Beside the block every forward reads a shadow of it: masks at the same positions, which see everything except the
    real token of their own position, and which no real position sees. So a shadow says how probable a filled token is
    given all the others. Where more than one mask was filled in a forward, earlier tokens of the block below the second
    threshold become masks again, fewer than were filled in the forward before, so the block is done after at most one
    forward per position. At most 70 % of the masks are filled at once, between 5 and 20. Second threshold 0 takes
    nothing back. A forward without filled positions reads no shadow, which changes nothing. Wide-In, Narrow-Out: Hong
    et al. 2025, arXiv 2507.18578.
    """

    name, title, paper, sheet = "wino", "WINO", "2507.18578", "diffusion/token-editing"
    guarantee, attention = ("heuristic",), ("full", "block")

    threshold: float = knob(0.6, 0.0, 1.0, step=0.05, help="probability above which a mask is filled; 1 one at a time")
    threshold_back: float = knob(
        0.9, 0.0, 1.0, step=0.05, help="probability given the others below which a token is masked again; 0 none"
    )
    block_length: int = knob(128, 1, 128, step=1, help="positions in a block; blocks are filled from left to right")

    def decode(self, lm) -> Iterator:
        reader = ShadowedReader(lm, self.block_length)
        for block in lm.blocks(self.block_length):
            yield from self._settle(lm, reader, block)
            yield from end_block(lm, block)
        yield lm.complete()

    def _settle(self, lm, reader, block: range) -> Iterator:
        """Run forwards until no position of the block is masked."""
        before = FIRST
        while masked := [position for position in block if lm.ids[position] is None]:
            watched = [position for position in block if lm.ids[position] is not None]
            rows = yield reader.read(block, masked, watched)
            proposed, support = propose(lm, rows, masked), _support(lm, rows, reader.shadows(block, watched))
            if support:
                yield _supported(lm, support)
            filled = self.filled(proposed)
            revoked = self.revoked(support, before) if len(filled) > 1 else []
            kept = proposed.of(filled)
            yield lm.revise(kept.tokens, kept.confidence, revoked)
            before = len(filled)

    def filled(self, proposed: Proposals) -> list[int]:
        """The masks to fill, the most confident of them if they are too many, or the most confident one."""
        most = min(max(int(SHARE * len(proposed.tokens)), FEWEST), MOST)
        sure = [i for i in proposed.ranked if proposed.confidence[i] > self.threshold]
        return sure[:most] or proposed.ranked[:1]

    def revoked(self, support: dict[int, float], before: int) -> list[int]:
        """The filled positions to mask again, the least supported ones first and fewer than `before`."""
        doubted = [i for i in sorted(support, key=support.get) if support[i] < self.threshold_back]
        return doubted[:before - 1]


def _support(lm, rows, shadows: list[int]) -> dict[int, float]:
    """The probability of each filled token at its shadow, by position."""
    p = in_float64(rows.raw[lm.length:]).softmax(-1)
    return {
        position: float(row[lm.ids[position]])
        for position, row in zip(shadows, p, strict=True) if lm.ids[position] is not None
    }


def _supported(lm, support: dict[int, float]) -> Figure:
    labels = [f"{position + 1} {lm.piece(lm.ids[position]).strip()}" for position in support]
    return Figure("bars", "probability of each token given all others", {
        "labels": labels, "values": list(support.values()),
    })
