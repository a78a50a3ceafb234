"""SpecTr's drafts: several independent continuations."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import best, grow, guess_row, new_tree, purpose
from playground.contract import Drafter, knob


class SpecTr(Drafter):
    """A draft model writes several continuations, independently of each other; the target checks all of them at once.

    Rows that begin alike share their nodes, and how often a node was drawn is kept with it, so the verifier still knows
    how many rows guessed it. Goes with k_seq, the paper's rule for independent guesses. Where the lane leaves nothing
    to chance all rows would be the same, so there is one. Sun et al. 2023, arXiv 2310.15141.
    """

    name, title, paper, sheet = "spectr", "SpecTr: independent drafts", "2310.15141", "speculative/spectr"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)

    rows: int = knob(2, 1, 16, step=1, help="continuations guessed side by side")
    length: int = knob(4, 0, 16, step=1, help="tokens of each; 0 is plain decoding")

    def propose(self, lm, budget) -> Iterator:
        tree, nodes = new_tree(lm, self), {}

        def level(rows, leaves, number):
            if not number:
                leaves = leaves * (self.rows if lm.chain.draws else 1)
            guesses = {leaf: guess_row(lm, tree, rows, leaf) for leaf in leaves}
            going_on = [leaf for leaf in leaves if guesses[leaf] is not None]
            if not lm.chain.draws:
                return [child for leaf in going_on for child in best(tree, leaf, guesses[leaf], 1)]
            return [
                self._guess(lm, tree, nodes, leaf, guesses[leaf], rows.position(leaf), i)
                for i, leaf in enumerate(going_on)
            ]

        return (yield from grow(lm, lm.stream("draft"), tree, min(self.length, budget), level))

    def _guess(self, lm, tree, nodes, leaf, q, position, row) -> int:
        """The node of one row's next token; `nodes` are those there are, by parent and token."""
        token = lm.draw(q, position, purpose(leaf, row))
        if (leaf, token) in nodes:
            return tree.again(nodes[leaf, token])
        nodes[leaf, token] = tree.add(token, leaf, q)
        return nodes[leaf, token]
