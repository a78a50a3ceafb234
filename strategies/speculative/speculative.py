"""Speculative decoding, over chains and trees."""
from collections.abc import Iterator

from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Decoder, Drafter, Lane, Verifier, slot


class Speculative(Decoder):
    """Draft several tokens cheaply, verify them all in one forward of the target, and commit those it accepts.

    The drafter proposes a chain or tree of draft tokens, and one forward of the target yields a row for every node. The
    verifier walks down from the root, accepts draft tokens by its rule, and adds a token after the last accepted one.
    The output distribution is the target's own. Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318; trees: SpecInfer, arXiv 2305.09781.
    """

    name, title, paper, sheet = "speculative", "Speculative decoding", "2211.17192", "speculative/speculative-sampling"
    guarantee = ("greedy_identical", "distribution_identical")
    known_by = "drafter"

    drafter: Drafter = slot("draft_model")
    verifier: Verifier = slot("rejection")

    def decode(self, lm: Lane) -> Iterator:
        return rounds(lm, self.drafter, self.verifier)
