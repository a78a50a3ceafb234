"""Recursive speculative decoding with constant branching."""
from collections.abc import Iterator
from math import prod

from playground.algorithms.speculative.drafting import add_distinct, best_of_level, grow, level_distributions, new_tree
from playground.algorithms.speculative.without_replacement import RemainingTokens
from playground.contract import Drafter, Lane, knob
from playground.errors import Refusal

MOST_NODES = 64


class RSDC(Drafter):
    """A draft model drafts a tree with distinct siblings and a fixed number of children at each level.

    Siblings are sampled without replacement, so no draft token is verified twice. After a rejection, the next sibling
    is tested with the residual of p against q renormalised without the rejected tokens. Sampling is sequential, which
    has the same distribution as the paper's Gumbel-Top-k. Under greedy decoding, siblings are the most probable tokens.
    RSD-C of Jeon et al. 2024, arXiv 2402.14160.
    """

    name, title, paper, sheet = "rsd_c", "RSD-C: distinct siblings", "2402.14160", "speculative/rsd"
    needs, drawn, guarantee = ("draft",), "without_replacement", ("collapses",)

    branching: str = knob(
        "3 2 1", help=f"children per node at each level, at most {MOST_NODES} nodes; empty is plain decoding"
    )

    def check(self):
        try:
            widths = self._widths()
        except ValueError:
            widths = [0]
        if not all(1 <= width <= MOST_NODES for width in widths) or self._nodes(widths) > MOST_NODES:
            raise Refusal(
                f"branching must be whole numbers such as 3 2 1, for a tree of at most {MOST_NODES} nodes, "
                f"not {self.branching!r}.",
                "branching",
            )

    def _widths(self) -> list[int]:
        return [int(width) for width in self.branching.replace(",", " ").split()]

    def _nodes(self, widths) -> int:
        return sum(prod(widths[:level + 1]) for level in range(len(widths)))

    def propose(self, lm: Lane, budget) -> Iterator:
        tree, widths = new_tree(lm, self), self._widths()

        def level(rows, leaves, number):
            return self._children(lm, tree, rows, leaves, widths[number])

        return (yield from grow(lm, lm.stream("draft"), tree, min(len(widths), budget), level))

    def _children(self, lm: Lane, tree, rows, leaves, width) -> list[int]:
        leaves, q = level_distributions(lm, tree, rows, leaves)
        if not lm.chain.draws:
            return best_of_level(tree, leaves, q, width)
        each = [(leaf, rows.position(leaf), RemainingTokens(own, copy)) for leaf, own, copy in zip(leaves, q, q.cpu())]
        return [
            add_distinct(lm, tree, remaining, leaf, position)
            for leaf, position, remaining in each for _ in range(min(width, remaining.distinct))
        ]
