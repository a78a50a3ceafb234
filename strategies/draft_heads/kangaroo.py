"""Kangaroo: the target's first layers and a small adapter draft, and stop where they are uncertain."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module, RMSNorm
from torch.nn.functional import linear

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_networks import shape_of_attention, soft_loss
from playground.algorithms.draft_heads.head_layers import (
    EPS,
    HeadCache,
    HeadShape,
    NewRows,
    Place,
    SelfAttention,
    WholeTexts,
)
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    ranks,
    trained,
)
from playground.contract import Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import read_lists
from playground.events import Figure

CHUNK = 512  # tokens of the text that the adapter reads at once
SHARE = 0.25  # of the layers that draft: two of eight


class Adapter(Module):
    """One attention block without a feed-forward block: from the state after the first layers to the lm_head's input.
    """

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(shape.width, EPS), SelfAttention(shape)
        self.norm = RMSNorm(shape.width, EPS)

    def forward(self, rows: Tensor, place: Place) -> Tensor:
        return self.norm(rows + self.self_attn(self.input_layernorm(rows), place))


class Kangaroo(DraftHead):
    """The target's own first layers draft with a trained adapter, and drafting stops at the first uncertain token.

    The adapter is one attention block; it turns the state after the first layers into the input of the target's
    lm_head. Both early exits are exact: the uncertain token is still verified, and verification resumes where the first
    layers stopped, so nothing is computed twice. eta = 0 drafts chains of fixed length; depth = 0 is plain decoding.
    Liu et al. 2024, arXiv 2404.18911.
    """

    name, title, paper, sheet = "kangaroo", "Kangaroo", "2404.18911", "speculative/kangaroo"
    guarantee, exits_early = ("collapses",), True

    eta: float = knob(0.6, 0.0, 1.0, step=0.05, help="probability of a draft token below which drafting stops")
    depth: int = knob(6, 0, 12, step=1, help="maximum draft tokens per round; 0 is plain decoding")

    def __post_init__(self):
        super().__post_init__()
        self._cache, self._read = HeadCache(), []  # the tokens whose states the adapter has read

    def state_layers(self, depth):
        return (exit_layer(depth),)

    @classmethod
    def untrained(cls, width, depth):
        return Adapter(HeadShape.like(width)).state_dict()

    @classmethod
    def build(cls, weights):
        network = Adapter(shape_of_attention(weights, "", weights["norm.weight"].shape[0]))
        network.load_state_dict(weights)
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the adapter on the target's own distributions; returns the weights."""
        torch.manual_seed(texts.seed)
        network, layer = Adapter(HeadShape.like(texts.width)), exit_layer(texts.depth)

        def losses(batch: HeadBatch) -> list[Tensor]:
            places, _ = ahead(batch, 1)
            with torch.no_grad():
                teacher = linear(batch.states[texts.depth][places], texts.lm_head).softmax(-1)
            found = network(batch.states[layer], WholeTexts(batch.ids.shape[1]))[places]
            return [soft_loss(linear(found, texts.lm_head), teacher)]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=2e-3))
        counts = RankCounts(1, 10)
        with torch.no_grad():
            for batch in texts.held_out():
                places, labels = ahead(batch, 1)
                found = network(batch.states[layer], WholeTexts(batch.ids.shape[1]))[places]
                counts.add(0, ranks(found, texts.lm_head, labels[places]))
        yield counts.note()
        return network.state_dict()

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree = TokenTree(self.name)
        if not self.depth:
            return tree
        early, layer = lm.exit(exit_layer(lm.depth)), exit_layer(lm.depth)
        self._catch_up(lm, layer)
        last = ROOT
        for _ in range(min(self.depth, budget)):
            yield early.extend(tree)
            found = self._adapted(early.hidden, len(self._read) + self._cache.rows - self._cache.length)
            share, token = read_lists(*lm.read_out(found[-1:])[0].softmax(-1).max(-1))
            last = tree.add(token, last, confidence=share)
            if lm.ends(token) or tree.confidence[last] < self.eta:
                break
        if len(tree):
            labels = list(map(lm.piece, tree.tokens))
            data = {"labels": labels, "values": list(tree.confidence)}
            yield Figure("bars", "probability of each draft token, by the adapter", data)
        return tree

    def _catch_up(self, lm: Lane, layer: int) -> None:
        """Let the adapter read the states of tokens that the target has read, and forget what is no longer in the text.
        """
        states = lm.target.states
        known = lm.tokens[:states.length]
        same = next((i for i, pair in enumerate(zip(known, self._read)) if pair[0] != pair[1]), len(self._read))
        same = min(same, len(known))
        self._cache.crop(same)
        rows = states.of(layer, same)
        for first in range(0, len(rows), CHUNK):
            self._adapted(rows[first:first + CHUNK], states.length - len(rows) + first)
            self._cache.commit()
        self._read = known

    def _adapted(self, rows: Tensor, start: int) -> Tensor:
        """The lm_head's inputs [n, width] for states [n, width] of tokens from position `start` on."""
        positions = torch.arange(start, start + len(rows), device=rows.device)
        return self.network(rows, NewRows(self._cache, positions))


def exit_layer(depth: int) -> int:
    """How many of the target's layers draft."""
    return max(1, round(SHARE * depth)) if depth > 1 else 1
