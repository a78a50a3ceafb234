"""EAGLE-2: the head of EAGLE with a tree that grows where the head is confident."""
from __future__ import annotations

from playground.algorithms.draft_heads.feature_drafter import FeatureDrafter, GrowingTree
from playground.algorithms.draft_heads.feature_networks import EagleNetwork
from playground.algorithms.draft_heads.head_layers import HeadShape
from playground.algorithms.draft_heads.scored_tree import grow_most_probable
from playground.contract import knob


class Eagle2(FeatureDrafter):
    """The head of EAGLE, whose draft tree takes its shape from the head's own probabilities in each round.

    A path is about as often accepted as its probability by the head says. On each level the `width` most probable paths
    are expanded, and of all draft tokens the `nodes` most probable are verified. The weights are those of EAGLE: `fit`
    trains one head for both. nodes = 0 is plain decoding. Li et al. 2024, arXiv 2406.16858.
    """

    name, title, paper, sheet = "eagle_2", "EAGLE-2", "2406.16858", "draft-heads/medusa-baseline"
    guarantee, weights_of = ("collapses",), "eagle"

    width: int = knob(4, 1, 10, step=1, help="paths that are expanded on each level, and children of each")

    @classmethod
    def untrained(cls, width, depth):
        return EagleNetwork(HeadShape.like(width)).state_dict()

    @classmethod
    def build(cls, weights):
        return EagleNetwork.of(weights)

    def grow(self, growing: GrowingTree, depth: int) -> list[int]:
        return grow_most_probable(growing, depth, self.width, self.nodes)
