"""Medusa: several heads that each guess one of the next tokens."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Sequential

from playground.algorithms.draft_heads.accuracy_tree import Path, best_paths, rank_tree
from playground.algorithms.draft_heads.draft_head import MEASURED, DraftHead
from playground.algorithms.draft_heads.head_layers import ResidualBlock
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    ranks,
    token_loss,
    trained,
)
from playground.contract import Lane, knob
from playground.contract.token_tree import TokenTree
from playground.engine.host_copies import read_lists
from playground.events import Figure

HEADS, RANKS = 4, 10
DECAY = 0.8  # weight of each further head in the loss


class MedusaHeads(Module):
    """Residual blocks on the input of the lm_head, one or more for each head; the lm_head is the target's."""

    def __init__(self, heads: int, blocks: int, width: int):
        super().__init__()
        self.heads = ModuleList(Sequential(*(ResidualBlock(width) for _ in range(blocks))) for _ in range(heads))

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """Inputs of the lm_head, one [..., width] for each head, of hidden [..., width]."""
        return [head(hidden) for head in self.heads]


class Medusa(DraftHead):
    """Several small heads read the target's last hidden state, and each guesses one of the following tokens.

    Head k guesses the token k steps after the next one, without knowing the tokens between. The draft tree combines
    the best tokens of each head: its paths are those with the largest product of the accuracies measured on held-out
    texts, so a node's token depends on its depth and rank only. Each head is a residual block before the target's own
    lm_head, the form of Medusa's second version; the target itself is not trained. With rejection or sample_match the
    text is the target's; typical_acceptance is the paper's rule, which is not lossless. nodes = 0 is plain decoding.
    Cai et al. 2024, arXiv 2401.10774.
    """

    name, title, paper, sheet = "medusa", "Medusa", "2401.10774", "draft-heads/medusa-baseline"
    guarantee = ("collapses",)

    nodes: int = knob(24, 0, 128, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(HEADS, 1, 8, step=1, help="heads that are used, at most those that were trained")
    ranks: int = knob(RANKS, 1, RANKS, step=1, help="tokens per head that may enter the tree; 1 makes the tree a chain")

    @classmethod
    def untrained(cls, width, depth):
        weights = MedusaHeads(HEADS, 1, width).heads.state_dict()
        halving = 0.5 ** torch.arange(1, RANKS + 1)
        return {**weights, MEASURED: torch.stack([halving * DECAY**head for head in range(HEADS)])}

    @classmethod
    def build(cls, weights):
        names = [name.split(".") for name in weights if name != MEASURED]
        heads, blocks = (1 + max(int(name[place]) for name in names) for place in (0, 1))
        network = MedusaHeads(heads, blocks, weights["0.0.linear.bias"].shape[0])
        network.heads.load_state_dict({name: tensor for name, tensor in weights.items() if name != MEASURED})
        network.accuracy = weights[MEASURED].float()  # no buffer: it stays on the host, which plans the tree
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the heads on texts of the target, and measure how often each rank is right; returns the weights."""
        network = MedusaHeads(HEADS, 1, texts.width)

        def losses(batch: HeadBatch) -> list[Tensor]:
            found = guesses(network, batch, texts.depth)
            return [DECAY**k * token_loss(states, texts.lm_head, labels) for k, (states, labels) in enumerate(found)]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=1e-3))
        counts = RankCounts(HEADS, RANKS)
        with torch.no_grad():
            for batch in texts.held_out():
                for k, (states, labels) in enumerate(guesses(network, batch, texts.depth)):
                    counts.add(k, ranks(states, texts.lm_head, labels))
        yield counts.note()
        return {**network.heads.state_dict(), MEASURED: counts.shares}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget):
        states, unread = lm.target.states, lm.target.behind()
        hidden = states.of(lm.depth, states.length - 1)
        wanted = list(self.network.heads[unread - 1:][:min(self.depth, budget)])  # the first skip what is known already
        if not wanted or not self.nodes:
            return TokenTree(self.name)
        logits = lm.read_out(torch.cat([head(hidden) for head in wanted]))
        shares, tokens = read_lists(*logits.softmax(-1).topk(min(self.ranks, lm.vocabulary)))
        accuracy = self.network.accuracy[unread - 1:][:len(wanted), :self.ranks]
        tree, _ = rank_tree(self.name, shares, tokens, _paths(_frozen(accuracy), self.nodes), lm.ends)
        yield self._figure(lm, shares)
        return tree

    def _figure(self, lm: Lane, shares: list[list[float]]) -> Figure:
        series = {f"head {head}": best for head, (best, *_) in enumerate(shares, 1)}
        return Figure("scalar", "probability of each head's best token", {"x": lm.generated, "series": series})


def guesses(network: MedusaHeads, batch: HeadBatch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the inputs of the lm_head [n, width] and the right tokens [n], where the target wrote them."""
    for k, head in enumerate(network.heads):
        places, labels = ahead(batch, k + 2)
        yield head(batch.states[depth][places]), labels[places]


def _frozen(accuracy: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, accuracy.tolist()))


@cache
def _paths(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> list[Path]:
    return best_paths([list(shares) for shares in accuracy], nodes)
