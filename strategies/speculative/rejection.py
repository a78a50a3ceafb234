"""The exact rejection rule."""
from playground.algorithms.speculative.verification import reject, walk
from playground.contract import Verifier


class Rejection(Verifier):
    """Accept a guess x with probability min(1, p(x)/q(x)); redraw a refused one from what p has more than q.

    Whatever the drafter is, the text then follows p exactly: what q offers too often is refused just often enough, and
    the leftover max(p - q, 0) makes up for what it offers too seldom. With several children the leftover takes p's
    place for the next one. Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318; trees: arXiv
    2305.09781.
    """

    name, title, paper, sheet = "rejection", "Rejection sampling", "2211.17192", "speculative/speculative-sampling"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent", "without_replacement", "deterministic")

    def judge(self, lm, tree, rows):
        def rule(node, children):
            position = rows.position(node)
            return reject(rows.chances(node), children, tree, lambda ratio: lm.flip(ratio, position),
                          lambda rest: lm.draw(rest, position, "redraw"))

        return walk(lm, tree, rows, rule)
