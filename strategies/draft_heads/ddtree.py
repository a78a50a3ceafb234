"""DDTree: the most probable paths through the distributions of a block drafter."""
from __future__ import annotations

from playground.algorithms.draft_heads.blocks.marginal_trees import grow_best_prefixes
from playground.algorithms.draft_heads.blocks.tree_drafter import BlockTreeDrafter


class DDTree(BlockTreeDrafter):
    """One forward of DFlash gives a distribution at every depth; the most probable paths through all of them make a
    tree, where DFlash takes the best token of each depth only.

    The depths are taken to be independent, so a path is as probable as the product of its tokens, and the tree has the
    `nodes` paths with the largest products. Some of them combine tokens that no text has together: they cost rows of
    the target's forward and are rejected. The head is that of `dflash`, fitted or given with `--draft`. nodes = 0 is
    plain decoding. Ringel and Romano 2026, arXiv 2604.12989.
    """

    name, title, paper, sheet = "ddtree", "DDTree", "2604.12989", "draft-heads/block-trees"
    guarantee, new_in = ("collapses",), "2026"

    def ranks(self):
        return self.nodes

    def grow(self, growing, marginals):
        grow_best_prefixes(growing, marginals, self.nodes)
