"""Sample and match."""
from playground.algorithms.speculative.verification import match, walk
from playground.contract import Verifier


class SampleMatch(Verifier):
    """Draw the target's own token first; a guess stands if it is that token.

    The drawn token is never drawn again: it is either a child, and the walk goes on there, or it is the next token
    itself. So the text is token for token what plain sampling with the same seed writes. Exact for any tree that was
    built without looking at the draw. SpecInfer's naive sampling, Miao et al. 2023, arXiv 2305.09781; the rule of the
    transformers library for guesses without probabilities.
    """

    name, title, paper, sheet = "sample_match", "Sample and match", "2305.09781", "speculative/speculative-sampling"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent", "without_replacement", "deterministic")

    def judge(self, lm, tree, rows):
        def rule(node, children):
            return match(lm.pick(rows, node).token, children, tree, rows.chances(node))

        return walk(lm, tree, rows, rule)
