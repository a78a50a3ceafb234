"""Speculative decoding, over chains and trees."""
from collections.abc import Iterator

from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Decoder, Drafter, Verifier, slot


class Speculative(Decoder):
    """Guess ahead with something cheap, check all guesses in one forward of the model, keep what stands.

    The drafter proposes a chain or a tree of tokens; the target gives a row for every node at once; the verifier walks
    down from the root, accepts guesses by its rule and names the token after the last one. The text follows the target
    exactly. Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318; trees: SpecInfer, arXiv
    2305.09781.
    """

    name, title, paper, sheet = "speculative", "Speculative decoding", "2211.17192", "speculative/speculative-sampling"
    guarantee = ("greedy_identical", "distribution_identical")

    drafter: Drafter = slot("draft_model")
    verifier: Verifier = slot("rejection")

    def decode(self, lm) -> Iterator:
        yield from rounds(lm, self.drafter, self.verifier)
