"""Recursive speculative decoding with constant branching."""
from collections.abc import Iterator
from math import prod

from playground.algorithms.speculative.drafting import best, distinct, grow, guess_row, new_tree
from playground.algorithms.speculative.without_replacement import Urn
from playground.contract import Drafter, knob
from playground.errors import Refusal

MOST_NODES = 64


class RSDC(Drafter):
    """A draft model guesses a tree whose siblings are all different, with as many children at each level as you say.

    Siblings are drawn without replacement, so no guess is spent twice; a refused one takes its probability out of the
    draft as well, and the next is held against what is left of both. Drawn one after another from what is left of q,
    which in law is the paper's Gumbel-Top-k. Where the lane leaves nothing to chance, siblings are the most probable
    tokens. RSD-C of Jeon et al. 2024, arXiv 2402.14160.
    """

    name, title, paper, sheet = "rsd_c", "RSD-C: distinct siblings", "2402.14160", "speculative/rsd"
    needs, drawn, guarantee = ("draft",), "without_replacement", ("collapses",)

    branching: str = knob(
        "3 2 1", help=f"children of each node, level by level; {MOST_NODES} nodes at most; empty is plain decoding"
    )

    def check(self):
        try:
            widths = self._widths()
        except ValueError:
            widths = [0]
        if not all(1 <= width <= MOST_NODES for width in widths) or self._nodes(widths) > MOST_NODES:
            raise Refusal(
                f"branching must be whole numbers such as 3 2 1 whose tree has at most {MOST_NODES} nodes, not {self.branching!r}.",
                "branching",
            )

    def _widths(self) -> list[int]:
        return [int(width) for width in self.branching.replace(",", " ").split()]

    def _nodes(self, widths) -> int:
        return sum(prod(widths[:level + 1]) for level in range(len(widths)))

    def propose(self, lm, budget) -> Iterator:
        tree, widths = new_tree(lm, self), self._widths()

        def level(rows, leaves, number):
            return [child for leaf in leaves for child in self._children(lm, tree, rows, leaf, widths[number])]

        return (yield from grow(lm, lm.stream("draft"), tree, min(len(widths), budget), level))

    def _children(self, lm, tree, rows, leaf, width) -> list[int]:
        q = guess_row(lm, tree, rows, leaf)
        if q is None:
            return []
        if not lm.chain.draws:
            return best(tree, leaf, q, width)
        urn, position = Urn(q), rows.position(leaf)
        return [tree.add(distinct(lm, urn, leaf, position), leaf, q) for _ in range(min(width, urn.distinct))]
