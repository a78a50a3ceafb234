"""A smaller model as drafter."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import grow_independent, new_tree
from playground.contract import Drafter, Lane, knob


class DraftModel(Drafter):
    """A smaller model with the same vocabulary drafts a chain or a tree of tokens.

    The draft model's logits pass through the same masks and samplers as the target's. If the lane samples, siblings are
    drawn independently and may repeat: the tree of SpecInfer, arXiv 2305.09781. Under greedy decoding siblings are the
    most probable tokens. Width 1 is the chain of Leviathan et al. 2023, arXiv 2211.17192.
    """

    name, title, paper, sheet = "draft_model", "Draft model", "2211.17192", "speculative/speculative-sampling"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)

    depth: int = knob(5, 0, 16, step=1, help="levels of the draft tree; 0 is plain decoding")
    width: int = knob(1, 1, 4, step=1, help="children per node at each branching level")
    branching: int = knob(2, 0, 2, step=1, help="levels that branch; below them each branch is a chain")

    def propose(self, lm: Lane, budget) -> Iterator:
        levels = range(min(self.depth, budget))
        widths = [self.width if number < self.branching else 1 for number in levels]
        return grow_independent(lm, lm.stream("draft"), new_tree(lm, self), widths)
