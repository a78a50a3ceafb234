"""Block drafters that make a tree of the distributions of one forward."""
from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from playground.algorithms.draft_heads.blocks.block_drafter import BlockDrafter
from playground.algorithms.draft_heads.blocks.marginal_trees import Marginals
from playground.algorithms.draft_heads.scored_tree import ScoredTree, paths_figure
from playground.contract import Lane, knob
from playground.contract.token_tree import TokenTree


class BlockTreeDrafter(BlockDrafter):
    """A block drafter whose tree grows from its marginals; subclasses say how, and have the weights of `dflash`."""

    weights_of = "dflash"

    nodes: int = knob(24, 0, 128, step=1, help="draft tokens in the tree; 0 is plain decoding")

    def grow(self, growing: ScoredTree, marginals: Marginals) -> None:
        """Add at most `nodes` draft tokens."""
        raise NotImplementedError

    def ranks(self) -> int:
        """How many tokens of a depth may be drafted."""
        raise NotImplementedError

    def drafted(self, lm: Lane, budget) -> Iterator:
        return (yield from super().drafted(lm, budget if self.nodes else 0))

    def draft(self, lm: Lane, hidden: Tensor, rows: range, tree: TokenTree) -> Iterator:
        growing, logits = ScoredTree(lm, tree), self.network.read_out(hidden[rows.start:rows.stop], lm.read_out)
        self.grow(growing, Marginals.of(logits, self.ranks(), self.network.target_ids))
        yield paths_figure(growing, list(range(len(tree))), "as a product over depths")
