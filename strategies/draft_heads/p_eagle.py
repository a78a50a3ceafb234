"""P-EAGLE: the head of EAGLE-3 reads masks in place of what it has not drafted yet, so that one pass drafts all."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_drafter import FollowedText
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
    ahead,
    embedded,
    measured,
    teacher,
    trained,
)
from playground.algorithms.draft_heads.scored_tree import add_chain, chain_figure
from playground.contract import Lane, knob
from playground.contract.token_tree import TokenTree

DEPTHS, DECAY = 5, 0.8  # of a training: the tokens that a pass drafts, and the weight of each further one
MASK = 0  # the token whose embedding stands for one that is not known, where a head does not say


class PEagleNetwork(Eagle3Network):
    """EAGLE-3 with a learned vector in place of the target's states of a token that is not known yet."""

    def __init__(self, shape: HeadShape, reads: int, *others, **layer):
        super().__init__(shape, reads, *others, **layer)
        self.mask_hidden = Parameter(torch.zeros(1, 1, reads))

    def masked(self, count: int) -> Tensor:
        """Features [count, width] of tokens that are not known."""
        return self.features(self.mask_hidden[0].expand(count, -1))


class PEagle(DraftHead):
    """EAGLE-3 drafts one token in each pass of its head; here one pass drafts them all. No head is bundled: fit one, or
    give a published one.

    The rows after the text read a mask in place of the token and a learned vector in place of the target's states. Each
    sees the text and the masks before it, so no guess knows the others: later ones are right less often than those of
    `eagle_3`, whose head runs once for each. Masks leave nothing in the head's cache. How rows are laid out is taken
    from the training mask of vLLM's `speculators`. depth = 0 is plain decoding. vLLM 2026, pull request 32887.
    """

    name, title, paper, sheet = "p_eagle", "P-EAGLE", "vLLM 2026", "draft-heads/p-eagle"
    guarantee, new_in = ("collapses",), "2026"

    depth: int = knob(DEPTHS, 0, 16, step=1, help="draft tokens of a pass; 0 is plain decoding")

    def __post_init__(self):
        super().__post_init__()
        self._layers: tuple[int, ...] = ()  # those a published head names
        self._mask, self._text = MASK, None

    def begin_fitted(self, weights):
        self._layers = tuple(weights["layers"].tolist()) if "layers" in weights else ()
        self._mask = int(weights["mask_token_id"])

    def state_layers(self, depth):
        return self._layers or early_middle_late(depth)

    @classmethod
    def untrained(cls, width, depth):
        return PEagleNetwork(HeadShape.like(width), 3 * width).state_dict() | {"mask_token_id": torch.tensor(MASK)}

    @classmethod
    def build(cls, weights):
        return PEagleNetwork.of({name: tensor for name, tensor in weights.items() if name != "mask_token_id"})

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train all depths of a pass on the target's distributions; returns the weights. Begins with the head of
        `eagle_3` where one is fitted, whose first token it drafts.
        """
        torch.manual_seed(texts.seed)
        network = PEagleNetwork(HeadShape.like(texts.width), 3 * texts.width)
        if (begun := texts.fitted("eagle_3")) is not None:
            network.load_state_dict(begun, strict=False)

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [
                DECAY**k * soft_loss(linear(rows, texts.lm_head), teacher(texts, batch, k + 2))
                for k, (rows, _) in enumerate(guesses(network, texts, batch))
            ]

        yield from trained(network, texts, losses, HeadTraining(epochs=6, rate=1e-3))
        yield measured(texts, DEPTHS, lambda batch: guesses(network, texts, batch)).note()
        return network.state_dict() | {"mask_token_id": torch.tensor(MASK)}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, depth = TokenTree(self.name), min(self.depth, budget)
        if depth > 0:
            self._text = self._text or FollowedText(self.network, self.state_layers(lm.depth))
            rows = self._text.catch_up(lm)
            if depth > 1:
                rows = torch.cat([rows, self._masks(lm, depth - 1)])
            add_chain(lm, tree, self.network.read_out(rows, lm.read_out), self.network.target_ids)
            yield chain_figure(lm, tree)
        return tree

    def _masks(self, lm: Lane, count: int) -> Tensor:
        """Outputs [count, width] of masks after the text, whose last token was read in row len(text) - 2."""
        return self._text.feed(lm, [self._mask] * count, self.network.masked(count), len(lm.tokens) - 1)


def guesses(network: PEagleNetwork, texts: HeadTexts, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each depth the inputs of the lm_head [n, width] and the right tokens [n], where the target wrote them.

    The row of depth k sees the text up to its own first row, and the masks between: those of `UnrolledTexts`.
    """
    layers, (count, length) = early_middle_late(texts.depth), batch.ids.shape
    place = UnrolledTexts(None, length)
    features = network.features(torch.cat([batch.states[layer] for layer in layers], -1))
    rows = network(embedded(texts, batch.ids.roll(-1, 1)), features, place)
    masks = embedded(texts, torch.full_like(batch.ids, MASK))
    for depth in range(min(DEPTHS, length - 2)):
        if depth:
            place = UnrolledTexts(place, length)
            rows = network(masks, network.masked(length).expand(count, -1, -1), place)
        written, labels = ahead(batch, depth + 2)
        yield network.norm(rows)[written], labels[written]
