"""FSPAD: EAGLE-2 with a head that selects a part of the state by the token, and that has two outputs."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, RMSNorm
from torch.nn.functional import linear, silu, smooth_l1_loss

from playground.algorithms.draft_heads.feature_drafter import FeatureDrafter, GrowingTree
from playground.algorithms.draft_heads.feature_networks import FeatureNetwork, shape_of, soft_loss, without_facts
from playground.algorithms.draft_heads.head_layers import (
    EPS,
    GatedFeedForward,
    HeadShape,
    Place,
    SelfAttention,
    WholeTexts,
)
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
from playground.errors import Refusal

TOKEN_LOSS = 0.1  # weight of the loss on tokens beside that on hidden states


class FeatureSampling(Module):
    """What the head's layer reads: of a state, the part that belongs to the token after it.

    To EAGLE's linear map of both, a feed-forward network adds what the token's embedding selects of it: the embedding
    is the input of its gate.
    """

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.fc, self.mlp = Linear(2 * shape.width, shape.width), GatedFeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        mixed, mlp = self.fc(torch.cat([embeddings, states], -1)), self.mlp
        selected = silu(mlp.gate_proj(embeddings)) * mlp.up_proj(self.post_attention_layernorm(mixed))
        return mixed + mlp.down_proj(selected)


class TwoOutputLayer(Module):
    """EAGLE's decoder layer whose feed-forward network has two outputs, each beside the same attention."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(shape), GatedFeedForward(shape)
        self.mlp.down_proj = Linear(shape.inner, 2 * shape.width, bias=False)
        self.post_attention_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, rows: Tensor, place: Place) -> Tensor:
        """Pairs [..., 2 * width] of rows [..., width]."""
        rows = rows + self.self_attn(rows, place)
        return torch.cat([rows, rows], -1) + self.mlp(self.post_attention_layernorm(rows))


class FspadNetwork(FeatureNetwork):
    """The features that it continues are pairs [..., 2 * width]: of the input of the lm_head, and of the state that is
    fed back. Only the second is trained towards the target's state. Parameters are named as in the released code.
    """

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.width = shape.width
        self.fc, self.layers = FeatureSampling(shape), ModuleList([TwoOutputLayer(shape)])

    @torch.no_grad()
    def begin_as(self, eagle: dict[str, Tensor]) -> None:
        """Make it EAGLE: the token selects nothing, and both outputs are equal."""
        down = "layers.0.mlp.down_proj.weight"
        own = {f"fc.{name}" if name.startswith("fc.") else name: part for name, part in eagle.items()}
        self.load_state_dict(self.state_dict() | own | {down: torch.cat([eagle[down], eagle[down]])})
        self.fc.mlp.down_proj.weight.zero_()

    def features(self, states):
        return torch.cat([states, states], -1)

    def forward(self, embeddings, features, place):
        return self.layers[0](self.fc(embeddings, features[..., self.width:]), place)

    def read_out(self, features, lm_head):
        return lm_head(features[..., :self.width])


class Fspad(FeatureDrafter):
    """EAGLE-2 whose head lets the chosen token select its part of the state before, and predicts states and tokens with
    two outputs.

    A state summarises all tokens that could follow. To EAGLE's linear map of state and embedding, a feed-forward
    network adds a part that the embedding of the chosen token selects (feature sampling; nothing is random). The head's
    layer has two outputs: one is read out by the lm_head and imitates only the target's distribution, one is fed back
    and imitates its state (partial alignment). Where the token selects nothing and both outputs are equal, it is
    EAGLE-2, whose tree it grows. The formulas, the losses and their weights are those of the released code. Ours are
    the rate, the texts, and the start, which is the head of EAGLE if one is fitted to the target. nodes = 0 is plain
    decoding. Gui et al. 2024, arXiv 2408.15562.
    """

    name, title, paper, sheet = "fspad", "FSPAD", "2408.15562", "draft-heads/fspad"
    guarantee = ("collapses",)

    width: int = knob(4, 1, 12, step=1, help="paths that are expanded on each level, and children of each")

    @classmethod
    def untrained(cls, width, depth):
        return FspadNetwork(HeadShape.like(width)).state_dict()

    @classmethod
    def build(cls, weights):
        if "fc.fc.weight" not in weights:
            raise Refusal("This FSPAD head has an earlier form: run `python -m playground fit fspad` again.", "weights")
        width = weights["fc.fc.weight"].shape[0]
        network = FspadNetwork(shape_of(weights, "layers.0.", width))
        network.load_state_dict(weights)
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train one output on the next state, the other on the target's distribution there; returns the weights."""
        torch.manual_seed(texts.seed)
        network = FspadNetwork(HeadShape.like(texts.width))
        eagle, published = without_facts(texts.fitted("eagle") or {})
        if eagle and not published:
            network.begin_as(eagle)

        def guesses(batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
            places, labels = ahead(batch, 2)
            yield predicted(network, texts, batch)[0][places], labels[places]

        def losses(batch: HeadBatch) -> list[Tensor]:
            (inputs, states), (places, _) = predicted(network, texts, batch), ahead(batch, 2)
            true = batch.states[texts.depth].roll(-1, 1)[places]
            wrong = soft_loss(linear(inputs[places], texts.lm_head), teacher(texts, batch, 2))
            return [smooth_l1_loss(states[places], true) + TOKEN_LOSS * wrong]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=1e-3, noise=0.1))
        yield measured(texts, 1, guesses).note()
        return network.state_dict()

    def grow(self, growing: GrowingTree, depth: int) -> list[int]:
        return grow_most_probable(growing, depth, self.width, self.nodes)


def predicted(network: FspadNetwork, texts: HeadTexts, batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """Inputs of the lm_head [texts, tokens, width] after the next token, and the states there."""
    following, states = embedded(texts, batch.ids.roll(-1, 1)), batch.states[texts.depth]
    return network(following, network.features(states), WholeTexts(batch.ids.shape[1])).chunk(2, -1)
