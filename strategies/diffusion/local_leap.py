"""LocalLeap: around a confident prediction a lower confidence is enough."""
from playground.algorithms.diffusion.block_loop import BlockDecoder
from playground.algorithms.diffusion.proposals import Proposals
from playground.contract import knob


class LocalLeap(BlockDecoder):
    """Fill confident positions (anchors), and near an anchor also less confident ones.

    An anchor is a masked position of the block whose confidence reaches the threshold. Within the radius of an anchor
    the relaxed threshold is enough; positions filled thereby are no anchors in the same forward. The most confident
    position is always filled. Without an anchor, or with equal thresholds, this is plain threshold decoding. LocalLeap:
    Kong et al. 2025, arXiv 2510.07081.
    """

    name, title, paper, sheet = "local_leap", "LocalLeap", "2510.07081", "diffusion/localleap"
    guarantee, attention = ("heuristic",), ("full", "block")

    threshold: float = knob(0.9, 0.0, 1.05, step=0.05, help="confidence of an anchor; above 1 one position at a time")
    relaxed: float = knob(0.75, 0.0, 1.05, step=0.05, help="confidence that is enough near an anchor")
    radius: int = knob(4, 0, 16, step=1, help="distance from an anchor, in positions")

    def choose(self, lm, proposals: Proposals, block: range) -> list[int]:
        anchors = [i for i, c in proposals.confidence.items() if c >= self.threshold]
        best = proposals.ranked[0]
        return [
            position for position, confidence in proposals.confidence.items()
            if position == best or confidence >= self._needed(position, anchors)
        ]

    def _needed(self, position: int, anchors: list[int]) -> float:
        near = any(abs(position - anchor) <= self.radius for anchor in anchors)
        return min(self.relaxed, self.threshold) if near else self.threshold
