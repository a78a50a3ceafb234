"""Sample and match."""
from playground.algorithms.speculative.verification import match, walk
from playground.contract import Lane, Verifier


class SampleMatch(Verifier):
    """Sample the target's token first; a draft token is accepted if it equals that token.

    If the sampled token is a child, the walk continues there; otherwise it becomes the next token. So the text is
    identical to plain sampling with the same seed. Exact for any tree built independently of the sampled token. Naive
    sampling in SpecInfer, Miao et al. 2023, arXiv 2305.09781; the transformers library uses this rule for draft tokens
    without probabilities.
    """

    name, title, paper, sheet = "sample_match", "Sample and match", "2305.09781", "speculative/speculative-sampling"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent", "without_replacement", "deterministic")

    def judge(self, lm: Lane, tree, rows):
        def rule(node, children):
            return match(lm.pick(rows, node).token, children, tree, rows.distribution(node))

        return walk(lm, tree, rows, rule)
