"""Plain greedy decoding, the yardstick of every other lane."""
from collections.abc import Iterator

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder


class Greedy(Decoder):
    """Always take the most probable token: one forward of the model for each token.

    The next token is the largest score of the row, the lowest id where two are equal. Samplers added to the lane may
    turn this into drawing by chance; the loop stays the same. Baseline of all methods here.
    """

    name, title, paper, sheet = "greedy", "Greedy", "baseline", "sampling/sampling-baselines"
    guarantee = ("greedy_identical",)

    def decode(self, lm) -> Iterator:
        return plain(lm)
