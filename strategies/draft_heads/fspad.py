"""FSPAD: EAGLE-2 with a head that selects a part of the state by the token, and whose two outputs may differ."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict, ModuleList
from torch.nn.functional import linear, silu, smooth_l1_loss

from playground.algorithms.draft_heads.feature_drafter import FeatureDrafter, GrowingTree
from playground.algorithms.draft_heads.feature_networks import FeatureLayer, FeatureNetwork, shape_of, soft_loss
from playground.algorithms.draft_heads.head_layers import HeadShape, WholeTexts
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    ahead,
    embedded,
    measured,
    teacher,
    trained,
)
from playground.algorithms.draft_heads.scored_tree import grow_most_probable
from playground.contract import knob

EXPANSION = 2  # width of the space in which a token selects, relative to the target's
TOKEN_LOSS = 1.0  # weight of the loss on tokens beside that on hidden states


class FeatureSampling(Module):
    """What the head's layer reads: of a state, the part that belongs to the token after it.

    The token's embedding gates the state in a wider space; beside that EAGLE's linear map of both.
    """

    def __init__(self, width: int, wide: int):
        super().__init__()
        self.wf, self.we = Linear(width, wide, bias=False), Linear(width, wide, bias=False)
        self.wo, self.wr = Linear(wide, width, bias=False), Linear(2 * width, width)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        selected = silu(self.we(embeddings)) * self.wf(states)
        return self.wo(selected) + self.wr(torch.cat([embeddings, states], -1))


class TwoOutputs(FeatureNetwork):
    """The features that it continues are pairs [..., 2 * width]: of the state that is fed back, and of the input of the
    lm_head. Only the first is trained towards the target's state.
    """

    def __init__(self, shape: HeadShape, wide: int):
        super().__init__()
        self.width = shape.width
        self.fs, self.layers = FeatureSampling(shape.width, wide), ModuleList([FeatureLayer(shape)])
        self.pa = ModuleDict({name: Linear(shape.width, shape.width, bias=False) for name in ("pf", "pl")})

    def begin(self) -> None:
        """Make it EAGLE's network, as before a training."""
        with torch.no_grad():
            self.fs.wo.weight.zero_()
            for part in self.pa.values():
                part.weight.copy_(torch.eye(self.width))

    def features(self, states):
        return torch.cat([states, states], -1)

    def forward(self, embeddings, features, place):
        rows = self.layers[0](self.fs(embeddings, features[..., :self.width]), place)
        return torch.cat([self.pa["pf"](rows), self.pa["pl"](rows)], -1)

    def read_out(self, features, lm_head):
        return lm_head(features[..., self.width:])


class Fspad(FeatureDrafter):
    """EAGLE-2 whose head lets the chosen token select its part of the state before, and predicts states and tokens with
    two outputs.

    A state summarises all tokens that could follow. The embedding of the one that was chosen gates the state in a wider
    space (feature sampling; nothing is random), beside EAGLE's linear map. Of the two outputs, one is fed back and
    imitates the target's state, and one is read out by the lm_head and imitates only its distribution (partial
    alignment). With the gate's output at zero and both outputs equal it is EAGLE-2. The tree grows as in EAGLE-2. Both
    parts are our reading of the paper's abstract and differ from the released code, for which the bundled head was not
    trained. nodes = 0 is plain decoding. Gui et al. 2024, arXiv 2408.15562.
    """

    name, title, paper, sheet = "fspad", "FSPAD-style", "2408.15562", "draft-heads/fspad"
    guarantee, reconstruction, sure = ("collapses",), True, "low"

    width: int = knob(4, 1, 12, step=1, help="paths that are expanded on each level, and children of each")

    @classmethod
    def _fresh(cls, width: int) -> TwoOutputs:
        network = TwoOutputs(HeadShape.like(width), EXPANSION * width)
        network.begin()
        return network

    @classmethod
    def untrained(cls, width, depth):
        return cls._fresh(width).state_dict()

    @classmethod
    def build(cls, weights):
        wide, width = weights["fs.wf.weight"].shape
        network = TwoOutputs(shape_of(weights, "layers.0.", width), wide)
        network.load_state_dict(weights)
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train one output on the next state, the other on the target's distribution there; returns the weights."""
        torch.manual_seed(texts.seed)
        network = cls._fresh(texts.width)

        def guesses(batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
            places, labels = ahead(batch, 2)
            yield predicted(network, texts, batch)[1][places], labels[places]

        def losses(batch: HeadBatch) -> list[Tensor]:
            (states, inputs), (places, _) = predicted(network, texts, batch), ahead(batch, 2)
            true = batch.states[texts.depth].roll(-1, 1)[places]
            wrong = soft_loss(linear(inputs[places], texts.lm_head), teacher(texts, batch, 2))
            return [smooth_l1_loss(states[places], true) + TOKEN_LOSS * wrong]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=1e-3, noise=0.1))
        yield measured(texts, 1, guesses).note()
        return network.state_dict()

    def grow(self, growing: GrowingTree, depth: int) -> list[int]:
        return grow_most_probable(growing, depth, self.width, self.nodes)


def predicted(network: TwoOutputs, texts: HeadTexts, batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """States [texts, tokens, width] after the next token, and the inputs of the lm_head there."""
    following, states = embedded(texts, batch.ids.roll(-1, 1)), batch.states[texts.depth]
    return network(following, network.features(states), WholeTexts(batch.ids.shape[1])).chunk(2, -1)
