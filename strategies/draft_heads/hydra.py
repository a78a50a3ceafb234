"""Hydra: Medusa heads that know the draft tokens before theirs."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from playground.algorithms.draft_heads.draft_head import MEASURED
from playground.algorithms.draft_heads.head_training import HeadBatch, HeadTexts, HeadTraining, token_loss
from playground.algorithms.draft_heads.path_drafter import (
    HALVING,
    HEADS,
    PathDrafter,
    PathHeads,
    guesses,
    trained_paths,
)


class Hydra(PathDrafter):
    """Medusa heads that also read the embeddings of the draft tokens before theirs, so a node's children depend on its
    path.

    The heads run one after the other, each on all nodes of its level at once. The tree has the shape of the paths with
    the largest product of accuracies measured on held-out texts, as in Medusa. The heads end in the target's own
    lm_head; the paper gives each an lm_head of its own. nodes = 0 is plain decoding. Ankner et al. 2024, arXiv
    2402.05109.
    """

    name, title, paper, sheet = "hydra", "Hydra", "2402.05109", "draft-heads/hydra"
    guarantee = ("collapses",)

    @classmethod
    def untrained(cls, width, depth):
        return {**PathHeads(HEADS, width).state_dict(), MEASURED: HALVING.repeat(HEADS, 1)}

    @classmethod
    def build(cls, weights):
        heads = 1 + max(int(name.split(".")[1]) for name in weights if name != MEASURED)
        return cls.loaded(PathHeads(heads, weights["hydra_mlp.0.0.linear.bias"].shape[0]), weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the heads on true paths, and measure how often each rank is right; returns the weights."""
        torch.manual_seed(texts.seed)
        network = PathHeads(HEADS, texts.width)

        def losses(batch: HeadBatch) -> list[Tensor]:
            found = guesses(network, texts, batch, batch.states[texts.depth])
            return [token_loss(guess, texts.lm_head, labels) for guess, labels in found]

        training = HeadTraining(epochs=15, rate=2e-3, decay=0.1)
        shares = yield from trained_paths(network, texts, losses, training, lambda batch: batch.states[texts.depth])
        return {**network.state_dict(), MEASURED: shares}
