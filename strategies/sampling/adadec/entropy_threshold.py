"""Fit the entropy above which a model's first choice is more likely wrong than right, from reference texts.

Every token of a text gives one pair: the entropy of the model's row, and whether the model ranked that token first. A
logistic regression on the entropy, balanced between right and wrong, turns entropies into probabilities; the cutoff
with the best accuracy on unbalanced validation pairs is converted back to an entropy. This is the procedure of the
released code of AdaDec, He et al.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from playground.algorithms.sampling.token_readings import TokenReading
from playground.engine.sampling import entropy
from playground.errors import Refusal

UNSEEN = 5  # one pair in UNSEEN is for validation
FEWEST = 20  # training pairs of each class
RIDGE = 1.0  # L2 penalty on the weight, which keeps it finite for separable pairs
STEPS = 100  # maximum Newton steps; about ten are taken


@dataclass(frozen=True)
class Threshold:
    """P(first choice right) = sigmoid(weight * entropy + bias), below `cutoff` if the entropy exceeds `tau`."""

    tau: float  # nats
    weight: float
    bias: float
    cutoff: float
    accuracy: float  # of the cutoff on validation pairs
    right: float  # share of first choices that were right


def learn(readings: Iterable[TokenReading], seed: int = 42) -> Threshold:
    """Fit the threshold to a model's outputs on reference texts; raises Refusal if they do not determine one."""
    pairs = [judge(reading) for reading in readings] or [(torch.empty(0), torch.empty(0, dtype=torch.bool))]
    entropies, right = (torch.cat(column) for column in zip(*pairs))
    return threshold(entropies, right, seed)


def judge(reading: TokenReading) -> tuple[Tensor, Tensor]:
    """Entropies in nats [n], and whether the text's token ranked first [n]; on the CPU: Apple GPUs lack float64."""
    own = reading.logits.gather(-1, reading.ids[:, None])
    return entropy(reading.logits).cpu().double(), (reading.logits > own).sum(-1).cpu() == 0


def threshold(entropies: Tensor, right: Tensor, seed: int = 42) -> Threshold:
    """Fit the threshold to pairs of entropies [n] and whether the first choice was right [n]; raises Refusal."""
    chance = torch.Generator().manual_seed(seed)
    unseen, seen = (part.to(right.device) for part in _split(len(right), chance))
    kinds = [seen[right[seen]], seen[~right[seen]]]
    fewest = min(map(len, kinds))
    if fewest < FEWEST:
        raise Refusal(
            f"The model was right {len(kinds[0])} and wrong {len(kinds[1])} times in these texts, and {FEWEST} of each "
            "are needed: give more text.",
            "texts",
        )
    balanced = torch.cat([kind[torch.randperm(len(kind), generator=chance).to(kind.device)[:fewest]] for kind in kinds])
    weight, bias = logistic(entropies[balanced], right[balanced])
    if weight >= 0:
        raise Refusal(
            "In these texts the model is not wrong more often at high entropy, so there is no threshold: "
            "give other texts.",
            "texts",
        )
    cutoff, accuracy = best_cutoff(torch.sigmoid(weight * entropies[unseen] + bias), right[unseen])
    tau = float((torch.logit(torch.tensor(cutoff, dtype=torch.float64)) - bias) / weight)
    return Threshold(max(0.0, tau), weight, bias, cutoff, accuracy, float(right.double().mean()))


def logistic(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Weight and bias of the ridge logistic regression P(y | x) = sigmoid(weight * x + bias) on x, y [n], by Newton."""
    features = torch.stack([x.double(), torch.ones_like(x, dtype=torch.float64)], 1)
    ridge = torch.diag(torch.tensor([RIDGE, 0.0], dtype=torch.float64, device=x.device))
    found = torch.zeros(2, dtype=torch.float64, device=x.device)
    for _ in range(STEPS):
        p = torch.sigmoid(features @ found)
        gradient = features.T @ (p - y.double()) + ridge @ found
        step = torch.linalg.solve(features.T @ (features * (p * (1 - p))[:, None]) + ridge, gradient)
        found = found - step
        if step.abs().max() < 1e-9:
            break
    weight, bias = found.tolist()
    return weight, bias


def best_cutoff(p: Tensor, right: Tensor) -> tuple[float, float]:
    """The cutoff among 0.01, 0.02 ... 0.99 with the best accuracy of predicting right for p [n] at or above it.

    Returns the smallest such cutoff and its accuracy.
    """
    cutoffs = torch.arange(1, 100, device=p.device, dtype=p.dtype) / 100
    accuracies = ((p >= cutoffs[:, None]) == right).double().mean(1)
    best = int((accuracies == accuracies.max()).nonzero()[0])
    return float(cutoffs[best]), float(accuracies[best])


def _split(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=chance)
    return order[:count // UNSEEN], order[count // UNSEEN:]
