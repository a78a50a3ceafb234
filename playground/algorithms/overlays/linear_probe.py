"""Linear probes: ridge regression on one-hot labels, in closed form, for several labels at once.

A probe reads from a state what a linear map can find in it. That says nothing of what the network does with it.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

PENALTY = 0.01  # of the squared weights, per example, over standardised states
LEAST = 1e-6  # standard deviation


class LinearProbe(NamedTuple):
    """Scores of all classes of all labels, next to each other."""

    mean: Tensor  # [d], of the states
    scale: Tensor  # [d], one over their standard deviations
    weight: Tensor  # [d, classes]
    bias: Tensor  # [classes]

    @classmethod
    def fit(cls, states: Tensor, labels: Tensor, classes: list[int]) -> LinearProbe:
        """The probe that fits the labels [n, number of labels] of states [n, d] best in squares, in float64."""
        states = states.double()
        mean, scale = states.mean(0), 1 / states.std(0, correction=0).clamp(min=LEAST)
        rows = (states - mean) * scale
        wanted = torch.cat([one_hot(column, count) for column, count in zip(labels.T, classes)], 1).double()
        bias = wanted.mean(0)
        penalty = PENALTY * len(rows) * torch.eye(rows.shape[1], dtype=torch.double)
        return cls(mean, scale, torch.linalg.solve(rows.T @ rows + penalty, rows.T @ (wanted - bias)), bias)

    def read(self, states: Tensor, classes: list[int]) -> Tensor:
        """The class with the highest score, for each label of each state [n, d]: [n, number of labels]."""
        scores = ((states.to(self.mean) - self.mean) * self.scale) @ self.weight + self.bias
        return torch.stack([part.argmax(1) for part in scores.split(classes, 1)], 1)


def accuracy(found: Tensor, labels: Tensor) -> Tensor:
    """Share of states [n, labels] of which each label is right, [labels]."""
    return (found == labels).double().mean(0)
