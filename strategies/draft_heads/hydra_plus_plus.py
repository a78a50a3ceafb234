"""Hydra++: Hydra heads over a decoder layer that reads the whole text again."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, RMSNorm
from torch.nn.functional import linear

from playground.algorithms.draft_heads.committed_rows import CommittedRows
from playground.algorithms.draft_heads.draft_head import MEASURED
from playground.algorithms.draft_heads.feature_networks import shape_of, soft_loss
from playground.algorithms.draft_heads.head_layers import EPS, DecoderLayer, HeadShape, Place, WholeTexts
from playground.algorithms.draft_heads.head_training import HeadBatch, HeadTexts, HeadTraining, teacher
from playground.algorithms.draft_heads.path_drafter import (
    HALVING,
    HEADS,
    PathDrafter,
    PathHeads,
    guesses,
    trained_paths,
)
from playground.contract import Lane

REPEATS = 3  # of the second block of a head: four blocks in all
DROPOUT = 0.2


class PrefixLayer(Module):
    """A Llama layer with a norm after it, which reads the target's last states in place of embeddings."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.layers, self.norm = ModuleList([DecoderLayer(shape)]), RMSNorm(shape.width, EPS)

    def forward(self, states: Tensor, place: Place) -> Tensor:
        return self.norm(self.layers[0](states, place))


class PrefixHeads(PathHeads):
    """The heads of Hydra++ and their prefix layer."""

    def __init__(self, heads: int, shape: HeadShape):
        super().__init__(heads, shape.width, REPEATS, DROPOUT)
        self.prefix_embeding_layer = PrefixLayer(shape)  # spelt as in the published files


class HydraPlusPlus(PathDrafter):
    """Hydra whose heads read the text through a decoder layer of their own, and imitate the target's distributions.

    The layer runs over the target's last states with its own KV cache, which only committed tokens enter. Each head has
    four blocks, the last three with the same weights, and is trained on the target's distribution at its depth instead
    of the token that followed. The heads end in the target's own lm_head; the paper gives each an lm_head of its own.
    nodes = 0 is plain decoding. Ankner et al. 2024, arXiv 2402.05109.
    """

    name, title, paper, sheet = "hydra_plus_plus", "Hydra++", "2402.05109", "draft-heads/hydra"
    guarantee = ("collapses",)

    def __post_init__(self):
        super().__post_init__()
        self._rows = CommittedRows()

    @classmethod
    def untrained(cls, width, depth):
        return {**PrefixHeads(HEADS, HeadShape.like(width)).state_dict(), MEASURED: HALVING.repeat(HEADS, 1)}

    @classmethod
    def build(cls, weights):
        heads = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("hydra_mlp."))
        width = weights["hydra_mlp.0.0.linear.bias"].shape[0]
        return cls.loaded(PrefixHeads(heads, shape_of(weights, "prefix_embeding_layer.layers.0.", width)), weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the layer and the heads on the target's own distributions; returns the weights."""
        torch.manual_seed(texts.seed)
        network = PrefixHeads(HEADS, HeadShape.like(texts.width))

        def read(batch: HeadBatch) -> Tensor:
            return network.prefix_embeding_layer(batch.states[texts.depth], WholeTexts(batch.ids.shape[1]))

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [
                soft_loss(linear(guess, texts.lm_head), teacher(texts, batch, number + 2))
                for number, (guess, _) in enumerate(guesses(network, texts, batch, read(batch)))
            ]

        training = HeadTraining(epochs=12, rate=2e-3, decay=0.1)
        shares = yield from trained_paths(network, texts, losses, training, read)
        return {**network.state_dict(), MEASURED: shares}

    def state(self, lm: Lane):
        """The prefix layer's output for the newest token that the target has read."""
        def read(span: range, places: list[Place]) -> Tensor:
            states = lm.target.states.of(lm.depth, span.start)[:len(span)]
            return self.network.prefix_embeding_layer(states, places[0])

        return self._rows.catch_up(lm, read)
