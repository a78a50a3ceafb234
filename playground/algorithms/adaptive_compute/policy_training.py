"""Training of what a compute policy decides with, on texts that the unchanged target reads as well.

`algorithms.draft_heads.head_training.trained` is the loop, with seed, schedule and checkpoints.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from playground.contract import LayerSteps


class TextBatch(NamedTuple):
    """Texts of token ids, padded at the end."""

    ids: Tensor  # [texts, n]
    real: Tensor  # bool [texts, n]: a token that is learned from, neither padding nor only read
    share: float = 0.0  # of the training that is done
    chance: torch.Generator | None = None  # for random choices of a training; held-out texts have none

    @property
    def predicting(self) -> Tensor:
        """Positions whose next token is in the text, bool [texts, n]."""
        return torch.cat([self.real[:, 1:], torch.zeros_like(self.real[:, :1])], 1)


class PolicyTexts(Protocol):
    """Texts of one target, as `training.calibration` makes them."""

    seed: int
    epochs: int  # passes over the texts in place of a phase's own number; 0: its own number

    def forward(self, ids: Tensor, steps: LayerSteps) -> Tensor:
        """Logits [texts, n, V] with gradients for what `steps` puts into the network."""

    def phase(self, name: str) -> PolicyTexts:
        """The same texts, with a checkpoint for one phase of a training."""

    def in_new_form(self, task: str) -> PolicyTexts:
        """Questions of one task of the small world, whose answers in another form than usual are what is trained on."""

    def batches(self, epoch: int) -> Iterator[TextBatch]:
        """The texts that are trained on."""

    def held_out(self) -> Iterator[TextBatch]:
        """Texts that are not trained on."""


def distillation(texts: PolicyTexts, batch: TextBatch, steps: LayerSteps) -> Tensor:
    """Mean KL divergence of the changed network from the unchanged one, in nats per token."""
    return divergence(texts, batch, texts.forward(batch.ids, steps))


def divergence(texts: PolicyTexts, batch: TextBatch, logits: Tensor) -> Tensor:
    """Mean KL divergence of logits [texts, n, V] from those of the unchanged network, in nats per token."""
    with torch.no_grad():
        wanted = texts.forward(batch.ids, LayerSteps())[batch.real].log_softmax(-1)
    found = logits[batch.real].log_softmax(-1)
    return kl_div(found, wanted, log_target=True, reduction="sum") / len(found)


def next_token_loss(logits: Tensor, batch: TextBatch) -> Tensor:
    """Mean cross-entropy of the tokens that follow, in nats."""
    labels = batch.ids[:, 1:][batch.real[:, 1:]]
    return cross_entropy(logits[batch.predicting], labels)


@torch.no_grad()
def held_out_mean(texts: PolicyTexts, measure: Callable[[TextBatch], Tensor]) -> Tensor:
    """Mean over held-out batches of a measure, weighted by their tokens."""
    found = [(measure(batch), int(batch.real.sum())) for batch in texts.held_out()]
    return sum(value * count for value, count in found) / sum(count for _, count in found)
