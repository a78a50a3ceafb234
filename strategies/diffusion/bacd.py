"""BACD: the threshold of a block follows the confidences of what was filled in it."""
from collections.abc import Iterable, Iterator

from playground.algorithms.diffusion.block_loop import BlockDecoder
from playground.algorithms.diffusion.proposals import above, bounded_mean, fill, propose
from playground.contract import knob
from playground.events import Figure


class BACD(BlockDecoder):
    """Fill what reaches the mean confidence of the tokens filled in this block so far, kept between two bounds.

    The first forward of a block uses its largest confidence instead of the mean. The lower bound limits the spread of
    errors, the upper one limits caution; with equal bounds this is threshold decoding. Bounded adaptive confidence
    decoding: Lu et al. 2026, arXiv 2602.09555, written for models that attend block by block; the rule needs
    confidences only.
    """

    name, title, paper, sheet = "bacd", "Bounded adaptive confidence", "2602.09555", "diffusion/block-diffusion-tts"
    guarantee, attention = ("heuristic",), ("full", "block")

    low: float = knob(0.6, 0.0, 1.05, step=0.05, help="lower bound of the threshold")
    high: float = knob(0.9, 0.0, 1.05, step=0.05, help="upper bound of the threshold, at least the lower one")

    def fill_block(self, lm, reader, block: range) -> Iterator:
        filled, step = [], 0  # confidences of what was filled in this block
        while masked := [position for position in lm.masked if position in block]:
            rows = yield reader.read(block, masked, step)
            proposals = propose(lm, rows, masked)
            threshold = self._threshold(filled, proposals.confidence.values())
            chosen = above(proposals, threshold)
            filled += [proposals.confidence[position] for position in chosen]
            yield Figure("scalar", "threshold", {"x": masked[0], "series": {"threshold": threshold}})
            yield fill(lm, proposals, chosen)
            step += 1

    def _threshold(self, filled: list[float], confidences: Iterable[float]) -> float:
        return bounded_mean(filled, confidences, self.low, self.high)
