"""Rows that contrasts are computed from."""
from __future__ import annotations

import math
from collections.abc import Callable

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


def logs(row: Row) -> Row:
    return [math.log(p) for p in softmax(row)]


def same_laws(found: Tensor, expected: list[Row], within: float = 1e-9) -> None:
    """Both rows of scores have the same probabilities."""
    law = torch.tensor([softmax(row) for row in expected], dtype=torch.float64)
    assert (found.softmax(-1) - law).abs().max() < within


# --- context-aware decoding ---

def amplified(cls: type[Sampler], strength: Callable[[Row, Row], float], **knobs) -> None:
    """Scores are z + alpha (z - z'), z with the context and z' without it."""
    rows = {"target": drawn(0), "without_context": drawn(1)}
    expected = []
    for z, other in zip(*(row.tolist() for row in rows.values())):
        alpha = strength(softmax(z), softmax(other))
        expected.append([a + alpha * (a - b) for a, b in zip(z, other)])
    same_laws(cls(**knobs).mix(rows), expected)


class SwapsTheStreams:
    def mix(self, rows):
        return super().mix({"target": rows["without_context"], "without_context": rows["target"]})


# --- contrasts among plausible tokens ---

def check_contrasted(found: Tensor, better: Tensor, scores: list[Row], share: float) -> None:
    """Only tokens with a share of the best one's probability are candidates, ranked by these scores."""
    expected = []
    for z, score in zip(better.tolist(), scores):
        p = softmax(z)
        competing = [chance >= share * max(p) * (1 - 1e-12) for chance in p]
        expected.append([value if allowed else -math.inf for value, allowed in zip(score, competing)])
    same_laws(found, expected, 1e-4)  # a tie is broken by a millionth of the model's own log-probability
