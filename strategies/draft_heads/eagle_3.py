"""EAGLE-3: a head over three hidden states of the target, trained on its own output."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from playground.algorithms.draft_heads.feature_drafter import FeatureDrafter, GrowingTree
from playground.algorithms.draft_heads.feature_networks import (
    Eagle3Network,
    UnrolledTexts,
    early_middle_late,
    soft_loss,
)
from playground.algorithms.draft_heads.head_layers import HeadShape
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    embedded,
    ranks,
    trained,
)
from playground.algorithms.draft_heads.scored_tree import grow_most_probable
from playground.contract import knob

STEPS, DECAY = 3, 0.8  # levels of a training, and the weight of each further one


class Eagle3(FeatureDrafter):
    """A head of one decoder layer that reads a mixture of three of the target's hidden states: from an early, a middle
    and a late layer.

    It does not have to predict the target's states, only its tokens, and it is trained on its own output for several
    steps, as it is used, so that deep levels of the tree stay accurate. Published heads may have several layers, and
    read out over a smaller draft vocabulary with an lm_head of their own; those trained here use the target's. The tree
    grows as in EAGLE-2. nodes = 0 is plain decoding. Li et al. 2025, arXiv 2503.01840.
    """

    name, title, paper, sheet = "eagle_3", "EAGLE-3", "2503.01840", "draft-heads/public-formats"
    guarantee = ("collapses",)

    width: int = knob(4, 1, 10, step=1, help="paths that are expanded on each level, and children of each")

    def __post_init__(self):
        super().__post_init__()
        self._layers: tuple[int, ...] = ()  # those a published head names

    def begin_fitted(self, weights):
        self._layers = tuple(weights["layers"].tolist()) if "layers" in weights else ()

    def state_layers(self, depth):
        return self._layers or early_middle_late(depth)

    @classmethod
    def untrained(cls, width, depth):
        return Eagle3Network(HeadShape.like(width), 3 * width).state_dict()

    @classmethod
    def build(cls, weights):
        return Eagle3Network.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the head on the target's distributions, for several steps on its own output; returns the weights."""
        torch.manual_seed(texts.seed)
        network = Eagle3Network(HeadShape.like(texts.width), 3 * texts.width)
        layers = cls.state_layers(cls(), texts.depth)

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [
                DECAY**step * soft_loss(linear(network.norm(guess), texts.lm_head), teacher)
                for step, (guess, teacher, _) in enumerate(unrolled(network, texts, batch, layers))
            ]

        yield from trained(network, texts, losses, HeadTraining(epochs=10, rate=2e-3))
        counts = RankCounts(STEPS, 10)
        with torch.no_grad():
            for batch in texts.held_out():
                for step, (guess, _, labels) in enumerate(unrolled(network, texts, batch, layers)):
                    counts.add(step, ranks(network.norm(guess), texts.lm_head, labels))
        yield counts.note()
        return network.state_dict()

    def grow(self, growing: GrowingTree, depth: int) -> list[int]:
        return grow_most_probable(growing, depth, self.width, self.nodes)


def unrolled(
    network: Eagle3Network, texts: HeadTexts, batch: HeadBatch, layers: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each step: the features [n, width] of tokens that the target wrote, its distributions [n, V], and the tokens.

    Row i reads token i + 1 in the first step, and in each further one the token after that.
    """
    features = network.features(torch.cat([batch.states[layer] for layer in layers], -1))
    place = None
    for step in range(min(STEPS, batch.ids.shape[1] - 2)):
        place = UnrolledTexts(place, batch.ids.shape[1])
        features = network(embedded(texts, batch.ids.roll(-1 - step, 1)), features, place)
        places, labels = ahead(batch, step + 2)
        with torch.no_grad():
            teacher = linear(batch.states[texts.depth].roll(-1 - step, 1)[places], texts.lm_head).softmax(-1)
        yield features[places], teacher, labels[places]
