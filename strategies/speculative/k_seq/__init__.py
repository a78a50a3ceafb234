"""SpecTr's verification rule: accept one of several independent draft tokens."""
from playground.algorithms.speculative.verification import match, walk
from playground.contract import Lane, Verifier
from strategies.speculative.k_seq.optimal_transport import k_seq


class KSeq(Verifier):
    """Test the draft tokens of a node one by one and accept each with probability min(1, p / (rho q)), rho as small as
    possible.

    With rho = 1 a token drafted by several sequences would be accepted too often. The smallest rho that prevents this
    is found at every node by bisection, from p, q and the number of sequences that agree with the text so far. If all
    are rejected, the next token is sampled from the residual, and sequences that drafted this token continue to be
    verified. Sun et al. 2023, arXiv 2310.15141.
    """

    name, title, paper, sheet = "k_seq", "k-SEQ", "2310.15141", "speculative/spectr"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent",)

    def judge(self, lm: Lane, tree, rows):
        def greedy(node, children):
            return match(rows.best(node), children, tree, rows.distribution(node))

        def sampled(node, children):
            position = rows.position(node)
            return k_seq(rows.distribution(node), children, tree, lambda ratio: lm.flip(ratio, position),
                         lambda rest: lm.draw(rest, position, "redraw"))

        return walk(lm, tree, rows, sampled if lm.chain.draws else greedy)
