"""JetSpec: fans of children after the most probable paths of a block drafter."""
from __future__ import annotations

from playground.algorithms.draft_heads.blocks.marginal_trees import grow_fans
from playground.algorithms.draft_heads.blocks.tree_drafter import BlockTreeDrafter
from playground.contract import knob


class JetSpec(BlockTreeDrafter):
    """The tree of JetSpec over one forward of a block drafter: the most probable path gets a fan of children, again and
    again. The bundled head is that of `dflash`, which was not trained with the causal mask that JetSpec trains with.

    `ddtree` adds paths one by one; here all `width` best tokens of the next depth are added at once, so the tree is
    broader near the text. A head that was trained as the paper says is given with `--draft`, and `causal` lets a row of
    the block see none after it, as in that training; with the head of `dflash` it shows what the mask is worth without
    one. nodes = 0 is plain decoding. Hu et al. 2026, arXiv 2606.18394.
    """

    name, title, paper, sheet = "jetspec", "JetSpec", "2606.18394", "draft-heads/block-trees"
    guarantee, new_in = ("collapses",), "2026"
    reconstruction, sure = True, "medium"

    width: int = knob(7, 1, 32, step=1, help="children that a path gets at once; 1 makes the tree a chain")
    causal: bool = knob(False, help="a row of the block sees none after it, as heads of JetSpec are trained")

    def ranks(self):
        return self.width

    def grow(self, growing, marginals):
        grow_fans(growing, marginals, self.nodes, self.width)

    def _load(self, lm):
        yield from super()._load(lm)
        if self.causal:
            self.network.see_before_only()
