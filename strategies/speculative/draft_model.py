"""A smaller model as drafter."""
from collections.abc import Iterator

from playground.parts.tree import ROOT, TokenTree
from playground.strategy import Drafter, knob


class DraftModel(Drafter):
    """A smaller model with the same vocabulary guesses the next tokens, one after another or several side by side.

    It draws every guess from its own row, which passed the same masks and samplers as the target's. With `width` above 1
    each of the first `branching` levels draws that many children independently, so they may repeat: the tree of
    SpecInfer, arXiv 2305.09781. Width 1 is the chain of Leviathan et al. 2023, arXiv 2211.17192.
    """

    name, title, paper, sheet = "draft_model", "Draft model", "2211.17192", "speculative/speculative-sampling"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)

    depth: int = knob(5, 0, 16, step=1, help="tokens guessed one after another; 0 is plain decoding")
    width: int = knob(1, 1, 4, step=1, help="guesses side by side at each branching level")
    branching: int = knob(2, 0, 4, step=1, help="levels that branch; further down each branch is a chain")

    def propose(self, lm, budget) -> Iterator:
        tree = TokenTree(source=self.name, drawn=self.drawn)
        leaves, draft = [ROOT], lm.stream("draft")
        for level in range(min(self.depth, budget)):
            rows = yield draft.extend(tree)
            leaves = [child for leaf in leaves for child in self._grow(lm, tree, rows, leaf, level)]
            if not leaves:
                break
        return tree

    def _grow(self, lm, tree, rows, leaf, level) -> list[int]:
        """Children of a leaf, drawn from its row; a guess that ends the text has none."""
        if leaf != ROOT and lm.ends(tree.tokens[leaf]):
            return []
        q = rows.p[rows.row(leaf)]
        if not q.any():  # the grammar ends here
            return []
        count = self.width if level < self.branching and rows.chain.draws else 1
        return [tree.add(lm.draw(q, rows.position(leaf), f"draft/{leaf}/{i}"), leaf, q) for i in range(count)]
