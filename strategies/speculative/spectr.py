"""SpecTr: several independent draft sequences."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import best_of_level, grow, level_distributions, new_tree, purpose
from playground.contract import Drafter, Lane, knob


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

    def propose(self, lm: Lane, budget) -> Iterator:
        tree, nodes = new_tree(lm, self), {}

        def level(rows, leaves, number):
            if not number:
                leaves = leaves * (self.rows if lm.chain.draws else 1)
            found, q = level_distributions(lm, tree, rows, list(dict.fromkeys(leaves)))
            if not lm.chain.draws:
                return best_of_level(tree, found, q, 1)
            live = [leaf for leaf in leaves if leaf in found]
            keys = [[(purpose(leaf, i), rows.position(leaf))] for i, leaf in enumerate(live)]
            each = q[rows.index([found.index(leaf) for leaf in live])]
            drawn = lm.draw_each(each, keys) if live else []
            return [self._add(tree, nodes, leaf, own, *token) for leaf, own, (token,) in zip(live, each, drawn)]

        return (yield from grow(lm, lm.stream("draft"), tree, min(self.length, budget), level))

    def _add(self, tree, nodes, leaf, q, token, share) -> int:
        """The node of a sequence's next token; `nodes` maps (parent, token) to existing nodes."""
        if (leaf, token) in nodes:
            return tree.again(nodes[leaf, token])
        nodes[leaf, token] = tree.add(token, leaf, q, share)
        return nodes[leaf, token]
