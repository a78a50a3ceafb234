"""Greedy matching."""
from playground.algorithms.speculative.verification import certain, match, walk
from playground.contract import Verifier


class GreedyMatch(Verifier):
    """A guess stands if it is the target's most probable token; the first that is not is replaced by it.

    Exact for greedy decoding whatever the drafter does, so it refuses lanes that draw by chance. Stern et al. 2018,
    arXiv 1811.03115.
    """

    name, title, paper, sheet = "greedy_match", "Greedy match", "1811.03115", "speculative/speculative-sampling"
    guarantee = ("greedy_identical",)
    exact_for = ("independent", "without_replacement", "deterministic")
    greedy_only = True

    def judge(self, lm, tree, rows):
        def rule(node, children):
            token = rows.best(node)
            return match(token, children, tree, certain(token, rows.raw[0]))

        return walk(lm, tree, rows, rule)
