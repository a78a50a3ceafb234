"""A smaller model as drafter."""
from collections.abc import Iterator

from playground.parts.tree import ROOT, TokenTree
from playground.strategy import Drafter, knob


class DraftModel(Drafter):
    """A smaller model with the same vocabulary guesses the next tokens, one after another or several side by side.

    Every guess comes from the smaller model's own row, which passed the same masks and samplers as the target's. Where the
    lane draws by chance, guesses are drawn independently, so siblings may repeat: the tree of SpecInfer, arXiv 2305.09781.
    Where it does not, siblings are the most probable tokens. Width 1 is the chain of Leviathan et al. 2023, arXiv 2211.17192.
    """

    name, title, paper, sheet = "draft_model", "Draft model", "2211.17192", "speculative/speculative-sampling"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)

    depth: int = knob(5, 0, 16, step=1, help="tokens guessed one after another; 0 is plain decoding")
    width: int = knob(1, 1, 4, step=1, help="guesses side by side at each branching level")
    branching: int = knob(2, 0, 2, step=1, help="levels that branch; further down each branch is a chain")

    def propose(self, lm, budget) -> Iterator:
        tree = TokenTree(self.name, self.drawn if lm.chain.draws else "deterministic")
        leaves, draft = [ROOT], lm.stream("draft")
        for level in range(min(self.depth, budget)):
            rows = yield draft.extend(tree)
            width = self.width if level < self.branching else 1
            leaves = [child for leaf in leaves for child in self._grow(lm, tree, rows, leaf, width)]
            if not leaves:
                break
        return tree

    def _grow(self, lm, tree, rows, leaf, width) -> list[int]:
        """Children of a leaf, from its row. A guess that ends the text has none, nor has one the grammar cannot continue."""
        if leaf != ROOT and lm.ends(tree.tokens[leaf]):
            return []
        q = rows.scores[rows.row(leaf)].softmax(-1)
        if not lm.chain.draws:
            best = q.topk(width)
            return [tree.add(token, leaf, confidence=p) for p, token in zip(best.values.tolist(), best.indices.tolist()) if p > 0]
        if q.isnan().any():
            return []
        return [tree.add(lm.draw(q, rows.position(leaf), f"draft/{leaf}/{i}"), leaf, q) for i in range(width)]
