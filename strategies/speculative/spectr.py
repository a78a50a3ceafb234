"""SpecTr: several independent draft sequences."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import best, draft_distribution, grow, new_tree, purpose
from playground.contract import Drafter, knob


class SpecTr(Drafter):
    """A draft model samples several sequences independently of each other; the target verifies all of them at once.

    Sequences share the nodes of a common prefix. A node records how often it was drawn, so the verifier knows how many
    sequences contain it. Meant for k_seq, the paper's rule for independent drafts. Under greedy decoding all sequences
    would be equal, so there is only one. Sun et al. 2023, arXiv 2310.15141.
    """

    name, title, paper, sheet = "spectr", "SpecTr: independent drafts", "2310.15141", "speculative/spectr"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)

    rows: int = knob(2, 1, 16, step=1, help="draft sequences")
    length: int = knob(4, 0, 16, step=1, help="draft tokens in each; 0 is plain decoding")

    def propose(self, lm, budget) -> Iterator:
        tree, nodes = new_tree(lm, self), {}

        def level(rows, leaves, number):
            if not number:
                leaves = leaves * (self.rows if lm.chain.draws else 1)
            q = {leaf: draft_distribution(lm, tree, rows, leaf) for leaf in leaves}
            live = [leaf for leaf in leaves if q[leaf] is not None]
            if not lm.chain.draws:
                return [child for leaf in live for child in best(tree, leaf, q[leaf], 1)]
            return [
                self._sample(lm, tree, nodes, leaf, q[leaf], rows.position(leaf), i) for i, leaf in enumerate(live)
            ]

        return (yield from grow(lm, lm.stream("draft"), tree, min(self.length, budget), level))

    def _sample(self, lm, tree, nodes, leaf, q, position, sequence) -> int:
        """Sample the next token of one sequence and return its node; `nodes` maps (parent, token) to existing nodes."""
        token = lm.draw(q, position, purpose(leaf, sequence))
        if (leaf, token) in nodes:
            return tree.again(nodes[leaf, token])
        nodes[leaf, token] = tree.add(token, leaf, q)
        return nodes[leaf, token]
