"""LayerSkip: self-speculation."""
from collections.abc import Iterator

from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Drafter, Lane, Preset, Verifier, slot
from playground.errors import Refusal


class LayerSkip(Preset):
    """Self-speculative decoding: the model's first layers draft, its remaining layers verify all draft tokens at once.

    Drafted positions have already passed through the first layers, so verifying them only runs the remaining layers.
    The output distribution is the model's own. Elhoushi et al. 2024, arXiv 2404.16710.
    """

    name, title, paper, sheet = "layer_skip", "LayerSkip", "2404.16710", "adaptive-compute/layer-skip-draft"
    guarantee = ("greedy_identical", "distribution_identical")

    drafter: Drafter = slot("layer_skip_draft")
    verifier: Verifier = slot("rejection")

    def check(self):
        if self.drafter.name != "layer_skip_draft":
            raise Refusal(
                f"{self.title} drafts with the model's own first layers: for {self.drafter.title} choose Speculative "
                "decoding.",
                "drafter",
            )

    def decode(self, lm: Lane) -> Iterator:
        return rounds(lm, self.drafter, self.verifier)
