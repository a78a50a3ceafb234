"""Clover: heads in a chain over an augmented state, with an attention decoder between them."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import ModuleList

from playground.algorithms.draft_heads.clover_drafter import (
    AttentionDecoder,
    CloverDrafter,
    CloverNetwork,
    begin_with,
)
from playground.algorithms.draft_heads.feature_networks import shape_of
from playground.algorithms.draft_heads.head_layers import EPS, DecoderLayer, HeadShape, ResidualBlock, WholeTexts
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    ahead,
    measured,
    token_loss,
    trained,
)

HEADS = 3
DECAY = 0.8  # weight of each further head in the loss


class RegressiveHeads(CloverNetwork):
    """One augmenting layer, an attention decoder that all heads share, and a residual block for each head."""

    def __init__(self, heads: int, shape: HeadShape):
        super().__init__()
        self.count = heads
        self.layers = ModuleList([DecoderLayer(shape)])
        self.decoder = AttentionDecoder(shape.width, bias=False)
        self.blocks = ModuleList(ResidualBlock(shape.width) for _ in range(heads))

    def token_vectors(self, lm_head_rows):
        return lm_head_rows * (lm_head_rows.square().mean(-1, keepdim=True) + EPS).rsqrt()

    def augmented(self, states, following, places):
        return self.through(states, places)

    def step(self, number, states, vectors):
        states = self.decoder(states, vectors)
        return states, self.blocks[number](states)


class Clover(CloverDrafter):
    """A chain of small heads, each of which reads the token that the one before it drafted.

    An augmenting block, one decoder layer after the target's last, turns the last states into ones for drafting. From
    head to head an attention decoder adds the drafted token's row of the lm_head to the state, weighted per attention
    head by the cosine of query and key, and a residual block before the target's lm_head reads the state. The tree is
    small, as for large batches: each level adds the likely children and the best paths spend what is left of `nodes`.
    The cosine is our choice, the paper's exact weight could not be verified. nodes = 0 is plain decoding. Xiao et al.
    2024, arXiv 2405.00263.
    """

    name, title, paper, sheet = "clover", "Clover", "2405.00263", "draft-heads/clover"
    guarantee, sure = ("collapses",), "medium"

    @classmethod
    def untrained(cls, width, depth):
        return cls._fresh(HeadShape.like(width)).state_dict()

    @classmethod
    def _fresh(cls, shape: HeadShape) -> RegressiveHeads:
        network = RegressiveHeads(HEADS, shape)
        network.decoder.begin()
        return network

    @classmethod
    def build(cls, weights):
        heads = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        network = RegressiveHeads(heads, shape_of(weights, "layers.0.", weights["decoder.q.weight"].shape[0]))
        network.load_state_dict(weights)
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the block and the heads on true paths; returns the weights."""
        torch.manual_seed(texts.seed)
        network = cls._fresh(HeadShape.like(texts.width))
        begin_with(network.layers[0], texts.last_layer)

        def losses(batch: HeadBatch) -> list[Tensor]:
            found = guesses(network, texts, batch)
            return [DECAY**k * token_loss(rows, texts.lm_head, labels) for k, (rows, labels) in enumerate(found)]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=1e-3))
        yield measured(texts, HEADS, lambda batch: guesses(network, texts, batch)).note()
        return network.state_dict()


def guesses(network: RegressiveHeads, texts: HeadTexts, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the inputs of the lm_head [n, width] and the right tokens [n], after true paths."""
    vectors = network.token_vectors(texts.lm_head)
    following, place = vectors[batch.ids.roll(-1, 1)], WholeTexts(batch.ids.shape[1])
    states = network.augmented(batch.states[texts.depth], following, [place])
    for number in range(HEADS):
        states, rows = network.step(number, states, following.roll(-number, 1))
        places, labels = ahead(batch, number + 2)
        yield rows[places], labels[places]
