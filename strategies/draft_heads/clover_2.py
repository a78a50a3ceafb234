"""Clover-2: Clover as a recurrent network over augmenting layers that know the next token."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList, RMSNorm
from torch.nn.functional import linear, smooth_l1_loss

from playground.algorithms.draft_heads.clover_drafter import (
    AttentionDecoder,
    CloverDrafter,
    CloverNetwork,
    begin_with,
)
from playground.algorithms.draft_heads.feature_networks import shape_of, soft_loss
from playground.algorithms.draft_heads.head_layers import EPS, DecoderLayer, HeadShape, WholeTexts
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    ahead,
    measured,
    teacher,
    trained,
)
from playground.contract import knob

HEADS, LAYERS = 5, 2
DECAY = 0.7  # weight of each further head in the loss
STATE_LOSS = 10.0  # weight of the loss on hidden states beside that on distributions


class RecurrentHeads(CloverNetwork):
    """Two augmenting layers over states into which the next token was merged, and heads that share their weights.

    Parameter names are those of the released code.
    """

    ahead = 1

    def __init__(self, heads: int, shape: HeadShape):
        super().__init__()
        self.count, width = heads, shape.width
        self.layers = ModuleList(DecoderLayer(shape) for _ in range(LAYERS))
        self.clover_norm, self.clover_head_norm = RMSNorm(width, EPS), RMSNorm(width, EPS)
        self.clover_head_mlp, self.clover_head_mlp2 = Linear(width, width), Linear(2 * width, width)
        self.clover_head_mlp_rnn, self.clover_head_mlp_rnn2 = (AttentionDecoder(width, bias=True) for _ in range(2))

    def begin(self) -> None:
        """Make all heads read the state alone, as before a training."""
        for decoder in (self.clover_head_mlp_rnn, self.clover_head_mlp_rnn2):
            decoder.begin()
        with torch.no_grad():
            for part in (self.clover_head_mlp, self.clover_head_mlp2):
                part.weight.uniform_(0, 0.01)[:, :len(part.weight)].add_(torch.eye(len(part.weight)))
                part.bias.zero_()

    def augmented(self, states, following, places):
        return self.clover_norm(self.through(self.clover_head_mlp_rnn(states, following), places))

    def step(self, number, states, vectors):
        if number == 0:  # the augmenting layers have read this token
            return states, self.clover_head_norm(self.clover_head_mlp(states))
        states = self.clover_head_mlp_rnn2(states, vectors)
        return states, self.clover_head_norm(self.clover_head_mlp2(torch.cat([states, vectors], -1)))


class Clover2(CloverDrafter):
    """Clover's chain of heads as one recurrent network: all further heads share their weights.

    The next token is merged into the states before two augmenting layers, so they know it everywhere in the text. Each
    head's output imitates the target's state at its position, and its distribution there. The tree adds the likely
    children of every node, level by level, until `nodes` are spent. nodes = 0 is plain decoding. Xiao et al. 2024,
    arXiv 2408.00264.
    """

    name, title, paper, sheet = "clover_2", "Clover-2", "2408.00264", "draft-heads/clover"
    guarantee = ("collapses",)

    nodes: int = knob(20, 0, 64, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(5, 1, 8, step=1, help="heads that are used, at most those that were trained")
    min_ratio: float = knob(0.0, 0.0, 1.0, step=0.05, help="smallest probability of a child, relative to the best")

    @classmethod
    def untrained(cls, width, depth):
        return {**cls._fresh(HeadShape.like(width)).state_dict(), "heads": torch.tensor(HEADS)}

    @classmethod
    def _fresh(cls, shape: HeadShape) -> RecurrentHeads:
        network = RecurrentHeads(HEADS, shape)
        network.begin()
        return network

    @classmethod
    def build(cls, weights):
        width = weights["clover_head_mlp.bias"].shape[0]
        network = RecurrentHeads(int(weights["heads"]), shape_of(weights, "layers.0.", width))
        network.load_state_dict({name: tensor for name, tensor in weights.items() if name != "heads"})
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the network on the target's states and distributions along true paths; returns the weights."""
        torch.manual_seed(texts.seed)
        network = cls._fresh(HeadShape.like(texts.width))
        for layer in network.layers:
            begin_with(layer, texts.last_layer)

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [loss(texts, batch, number, rows) for number, (rows, _) in enumerate(guesses(network, texts, batch))]

        yield from trained(network, texts, losses, HeadTraining(epochs=9, rate=1e-3))
        yield measured(texts, HEADS, lambda batch: guesses(network, texts, batch)).note()
        return {**network.state_dict(), "heads": torch.tensor(HEADS)}


def guesses(network: RecurrentHeads, texts: HeadTexts, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the inputs of the lm_head [n, width] and the right tokens [n], after true paths."""
    following, places = texts.lm_head[batch.ids.roll(-1, 1)], [WholeTexts(batch.ids.shape[1])] * LAYERS
    states = network.augmented(batch.states[texts.depth], following, places)
    for number in range(HEADS):
        states, rows = network.step(number, states, following.roll(-number, 1))
        written, labels = ahead(batch, number + 2)
        yield rows[written], labels[written]


def loss(texts: HeadTexts, batch: HeadBatch, number: int, rows: Tensor) -> Tensor:
    """How far a head's outputs [n, width] are from the target's states and distributions at their positions."""
    places, _ = ahead(batch, number + 2)
    true = batch.states[texts.depth].roll(-1 - number, 1)[places]
    imitated = STATE_LOSS * smooth_l1_loss(rows, true) if len(rows) else rows.sum() * 0
    return DECAY**number * (imitated + soft_loss(linear(rows, texts.lm_head), teacher(texts, batch, number + 2)))
