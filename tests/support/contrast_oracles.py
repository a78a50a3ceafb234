"""Rows that contrasts are computed from."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from playground.contract import Sampler, find

CAAD, CAD, DoLa, ICD, KNNLM, LOL, AdaCAD = (
    find(name) for name in ("caad", "cad", "dola", "icd", "knn_lm", "lol", "adacad")
)
V, WIDTH = 12, 4
Row = list[float]


def drawn(seed: int, count: int = 12, size: int = V) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def softmax(row: Row) -> Row:
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / sum(weights) for weight in weights]


def refused(check: Callable, wrong: type[Sampler]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)
