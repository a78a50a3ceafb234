"""Predicting acceptance: a trained head on the draft model's hidden states, and a calibration of draft probabilities.

The head is that of SpecDec++, Huang et al. 2024, arXiv 2405.19715: residual blocks e + SiLU(W e + b) and two logits,
rejected and accepted. The paper applies one block repeatedly with shared weights; here each block has its own.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import logsigmoid, silu

from playground.errors import Refusal
from playground.events import Figure, Note

BINS = 10  # of equal width, over probabilities 0 to 1
PRIOR = 2.0  # pseudo-observations in each bin, accepted as often as predicted
REJECTED, ACCEPTED = 0, 1
HELD_OUT = 10  # one text in this many is held out
FEW = 20  # texts


class DraftSamples(NamedTuple):
    """Draft tokens sampled along one text of the target, with their probability of acceptance."""

    states: Tensor  # [n, width], input of the draft's lm_head after the draft token
    chances: Tensor  # [n], min(1, p / q): acceptance if all earlier draft tokens are accepted


@dataclass(frozen=True)
class Training:
    """Hyperparameters, the paper's if it states them. Epochs and rate suit about ten thousand draft tokens."""

    blocks: int = 3  # 0 to 4
    weight: float = 6.0  # of rejections in the loss, 1 to 12: most draft tokens are accepted
    epochs: int = 12
    rate: float = 1e-3  # cosine decay to 0
    batch: int = 256  # draft tokens


class AcceptanceHead(Module):
    """Predicts from the draft's hidden states [n, width] whether the draft tokens read there will be accepted."""

    def __init__(self, width: int, blocks: int, generator: torch.Generator | None = None):
        super().__init__()
        self.blocks, self.read = ModuleList(Linear(width, width) for _ in range(blocks)), Linear(width, 2)
        with torch.no_grad():
            for weights in self.parameters():  # residual blocks start as the identity
                weights.zero_()
            self.read.weight.normal_(std=width ** -0.5, generator=generator)

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> AcceptanceHead:
        """The head with these weights, named as in `state_dict`."""
        blocks = sum(name.startswith("blocks.") and name.endswith(".weight") for name in weights)
        head = cls(weights["read.weight"].shape[1], blocks)
        head.load_state_dict(weights)
        return head.requires_grad_(False)

    def forward(self, states: Tensor) -> Tensor:
        """Log-odds of acceptance, [n]."""
        for block in self.blocks:
            states = states + silu(block(states))
        logits = self.read(states)
        return logits[..., ACCEPTED] - logits[..., REJECTED]

    def chances(self, states: Tensor) -> Tensor:
        """Probability of acceptance, [n]."""
        weights = self.read.weight
        return self(states.to(weights)).sigmoid()


def loss(log_odds: Tensor, chances: Tensor, weight: float = 1.0) -> Tensor:
    """Weighted mean cross-entropy of log-odds [n] with target probabilities [n]; rejections count `weight` times."""
    rejected = weight * (1 - chances)
    return -(chances * logsigmoid(log_odds) + rejected * logsigmoid(-log_odds)).sum() / (chances + rejected).sum()


def constant_loss(chances: Tensor) -> float:
    """Unweighted loss of the best constant prediction, the mean of the chances [n]."""
    mean = chances.mean().clamp(1e-6, 1 - 1e-6)
    return float(loss(mean.logit().expand_as(chances), chances))


def learn(texts: list[DraftSamples], training: Training, seed: int) -> Iterator[Figure | Note]:
    """Train a head and return its weights by name; yields its loss on held-out texts. Deterministic for a seed.

    Raises Refusal if there are fewer than `FEW` texts.
    """
    if len(texts) < FEW:
        raise Refusal(
            f"Training a head needs draft tokens from at least {FEW} texts, and there are {len(texts)}: give more.",
            "texts",
        )
    train = _joined([text for i, text in enumerate(texts) if i % HELD_OUT])
    held_out = _joined(texts[::HELD_OUT])
    generator = torch.Generator().manual_seed(seed)
    head = AcceptanceHead(train.states.shape[1], training.blocks, generator)
    yield _loss_figure(0, head, held_out)
    for epoch, _ in enumerate(_epochs(head, train, training, generator), 1):
        yield _loss_figure(epoch, head, held_out, training.weight)
    with torch.no_grad():
        # undo the shift that weighting rejections causes, so that predictions are calibrated
        head.read.bias[ACCEPTED] += log(training.weight)
    yield _summary(head, train, held_out)
    return head.requires_grad_(False).state_dict()


def _joined(texts: list[DraftSamples]) -> DraftSamples:
    return DraftSamples(*(torch.cat(part).float() for part in zip(*texts)))


def _epochs(
    head: AcceptanceHead, train: DraftSamples, training: Training, generator: torch.Generator
) -> Iterator[None]:
    optimiser = torch.optim.AdamW(head.parameters(), training.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, training.epochs)
    for _ in range(training.epochs):
        for batch in torch.randperm(len(train.chances), generator=generator).split(training.batch):
            loss(head(train.states[batch]), train.chances[batch], training.weight).backward()
            optimiser.step()
            optimiser.zero_grad()
        schedule.step()
        yield


def _loss_figure(epoch: int, head: AcceptanceHead, held_out: DraftSamples, weight: float = 1.0) -> Figure:
    """Unweighted loss on held-out draft tokens, after correcting the log-odds for the training weight."""
    with torch.no_grad():
        held_out_loss = float(loss(head(held_out.states) + log(weight), held_out.chances))
    data = {"x": epoch, "axis": "epoch", "series": {"held-out loss": held_out_loss},
            "lines": {"best constant": constant_loss(held_out.chances)}}
    return Figure("scalar", "loss of the head", data)


def _summary(head: AcceptanceHead, train: DraftSamples, held_out: DraftSamples) -> Note:
    with torch.no_grad():
        held_out_loss = float(loss(head(held_out.states), held_out.chances))
    return Note(
        f"Trained on {len(train.chances)} draft tokens, of which {float(train.chances.mean()):.0%} are accepted. "
        f"On {len(held_out.chances)} held-out ones the loss is {held_out_loss:.3f} nats; the best constant prediction "
        f"has {constant_loss(held_out.chances):.3f}."
    )


class HeadCalibration:
    """Acceptance rate by predicted probability: the prediction itself at first, observed rates later."""

    def __init__(self):
        self.tested, self.accepted = [0] * BINS, [0] * BINS

    def chance(self, predicted: float) -> float:
        """Calibrated probability of acceptance."""
        index = self._bin(predicted)
        return (PRIOR * predicted + self.accepted[index]) / (PRIOR + self.tested[index])

    def learn(self, predicted: float, accepted: bool) -> None:
        """Count one verified draft token."""
        index = self._bin(predicted)
        self.tested[index] += 1
        self.accepted[index] += accepted

    def figure(self, by: str) -> Figure:
        """Acceptance rate of each non-empty bin; `by` names the prediction."""
        known = [index for index in range(BINS) if self.tested[index]]
        labels = [
            f"{100 * index // BINS} to {100 * (index + 1) // BINS} % ({self.tested[index]} draft tokens)"
            for index in known
        ]
        return Figure("bars", f"acceptance rate, by {by}",
                      {"labels": labels, "values": [self.accepted[index] / self.tested[index] for index in known]})

    def _bin(self, predicted: float) -> int:
        return min(BINS - 1, int(predicted * BINS))
