"""Greedy matching."""
from playground.algorithms.speculative.verification import match, walk
from playground.contract import Lane, Verifier


class GreedyMatch(Verifier):
    """Accept a draft token if it is the target's most probable token; the first one that is not is replaced by it.

    Exact for greedy decoding with any drafter. Lanes that sample are refused. Stern et al. 2018, arXiv 1811.03115.
    """

    name, title, paper, sheet = "greedy_match", "Greedy match", "1811.03115", "speculative/speculative-sampling"
    guarantee = ("greedy_identical",)
    exact_for = ("independent", "without_replacement", "deterministic")
    greedy_only = True

    def judge(self, lm: Lane, tree, rows):
        return walk(lm, tree, rows, lambda node, children: match(rows.best(node), children, tree))
