"""The exact rejection rule."""
from playground.algorithms.speculative.foreseen_verdict import foresee
from playground.algorithms.speculative.verification import match, reject, walk
from playground.contract import Lane, Verifier


class Rejection(Verifier):
    """Accept a draft token x with probability min(1, p(x)/q(x)); after a rejection, sample from the residual
    distribution.

    The output distribution is then exactly p, whatever the drafter. The residual is max(p - q, 0), renormalised. With
    several children, the residual replaces p when the next child is tested. Leviathan et al. 2023, arXiv 2211.17192;
    Chen et al. 2023, arXiv 2302.01318; trees: arXiv 2305.09781.
    """

    name, title, paper, sheet = "rejection", "Rejection sampling", "2211.17192", "speculative/speculative-sampling"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent", "without_replacement", "deterministic")

    def judge(self, lm: Lane, tree, rows):
        if not lm.chain.draws:
            return walk(lm, tree, rows, lambda node, children: match(rows.best(node), children, tree))
        seen = foresee(lm, tree, rows)

        def rule(node, children):
            position = rows.position(node)
            ruling = reject(rows.distribution(node), children, tree, lambda ratio: lm.flip(ratio, position),
                            lambda rest: seen.redraw(lm, rest, node, position), seen.chances)
            return seen.completed(ruling, node)

        return walk(lm, tree, rows, rule)
