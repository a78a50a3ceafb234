"""Greedy decoding, the baseline of every other lane."""
from collections.abc import Iterator

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, Lane


class Greedy(Decoder):
    """Always commit the most probable token, with one forward per token.

    The next token has the largest score of the row; ties go to the lowest id. Samplers added to the lane may turn this
    into sampling; the loop stays the same. Baseline of all methods here.
    """

    name, title, paper, sheet = "greedy", "Greedy", "baseline", "sampling/sampling-baselines"
    guarantee = ("greedy_identical",)

    def decode(self, lm: Lane) -> Iterator:
        return plain(lm)
