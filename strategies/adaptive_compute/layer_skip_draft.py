"""The model's own first layers as drafter."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import grow, independent, new_tree
from playground.contract import Drafter, knob


class LayerSkipDraft(Drafter):
    """The model's own first layers guess: no second model, and the rest of the layers only has to check.

    The last norm and the head read what leaves an inner layer, token after token. Keys, values and hidden states of
    those layers are the whole model's own, so checking starts where guessing stopped and runs once for all guesses.
    Exact with any model; worth its while with one whose early layers were trained to be read like that. Elhoushi et al.
    2024, arXiv
    2404.16710, there with a fixed number of layers where this takes a share of them.
    """

    name, title, paper, sheet = (
        "layer_skip_draft",
        "First layers as drafter",
        "2404.16710",
        "adaptive-compute/layer-skip-draft",
    )
    drawn, guarantee = "independent", ("collapses",)

    exit: float = knob(0.5, 0.05, 1.0, step=0.05, help="share of the layers that guess; at 1 every guess stands")
    depth: int = knob(4, 0, 12, step=1, help="tokens guessed one after another; 0 is plain decoding")

    def propose(self, lm, budget) -> Iterator:
        tree = new_tree(lm, self)

        def level(rows, leaves, number):
            return independent(lm, tree, rows, leaves[0], 1)

        if not lm.target.behind():  # the row after the text is known, as after the prompt: its token costs nothing
            return tree
        early = lm.exit(max(1, round(self.exit * lm.depth)))
        return (yield from grow(lm, early, tree, min(self.depth, budget), level))
