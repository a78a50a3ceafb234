"""Rows of two streams."""
from __future__ import annotations

import math

import torch
from torch import Tensor

V = 9
Row = list[float]


def drawn(seed: int) -> Tensor:
    return torch.randn(8, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def softmax(row: Row) -> Row:
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / sum(weights) for weight in weights]
