"""The target's own first layers as drafter."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import grow, independent, new_tree
from playground.contract import Drafter, Lane, knob


class LayerSkipDraft(Drafter):
    """Draft with the target's own first layers, without a second model; the remaining layers only verify.

    Draft tokens come from the final norm and lm_head applied to the hidden state of an inner layer. The KV cache and
    hidden states of the first layers are shared, so verification resumes where drafting stopped and takes one forward
    for all draft tokens. Exact with any model; a speed-up needs one trained with early-exit loss. The paper exits at a
    fixed layer, here `exit` is a share of the layers. Elhoushi et al. 2024, arXiv 2404.16710.
    """

    name, title, paper, sheet = (
        "layer_skip_draft",
        "First layers as drafter",
        "2404.16710",
        "adaptive-compute/layer-skip-draft",
    )
    drawn, guarantee, exits_early = "independent", ("collapses",), True

    exit: float = knob(0.5, 0.05, 1.0, step=0.05, help="share of the layers that draft; at 1 every token is accepted")
    depth: int = knob(4, 0, 12, step=1, help="draft tokens per round; 0 is plain decoding")

    def propose(self, lm: Lane, budget) -> Iterator:
        tree = new_tree(lm, self)

        def level(rows, leaves, number):
            return independent(lm, tree, rows, leaves[0], 1)

        if not lm.target.behind():  # the next row is already known, as after prefill: its token needs no forward
            return tree
        early = lm.exit(max(1, round(self.exit * lm.depth)))
        return (yield from grow(lm, early, tree, min(self.depth, budget), level))
