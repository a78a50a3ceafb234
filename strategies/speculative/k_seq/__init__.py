"""SpecTr's rule: one of several independent guesses."""
from playground.algorithms.speculative.verification import match, walk
from playground.contract import Verifier
from strategies.speculative.k_seq.optimal_transport import k_seq


class KSeq(Verifier):
    """Try the guesses of a node one by one and accept each with probability min(1, p / (rho q)); rho is as small as can
    be.

    With rho = 1 a token that several rows guess would come too often; the smallest rho that prevents it is found anew
    at every node by halving, from p, q and the number of rows that are still in step with the text. Where all are
    refused, what p has left is drawn from, and rows that guessed the same token stay in step. Sun et al. 2023, arXiv
    2310.15141.
    """

    name, title, paper, sheet = "k_seq", "k-SEQ", "2310.15141", "speculative/spectr"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent",)

    def judge(self, lm, tree, rows):
        def greedy(node, children):
            return match(rows.best(node), children, tree, rows.chances(node))

        def drawn(node, children):
            position = rows.position(node)
            return k_seq(rows.chances(node), children, tree, lambda ratio: lm.flip(ratio, position),
                         lambda rest: lm.draw(rest, position, "redraw"))

        return walk(lm, tree, rows, drawn if lm.chain.draws else greedy)
