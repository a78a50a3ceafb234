"""Rows of scores as plain lists, and what a sampler keeps of them."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from playground.contract import Sampler
from playground.contract.lane_config import LaneConfig
from support.laws import AT_ONE

AT_TEMPERATURE_ONE = LaneConfig("greedy", {}, [AT_ONE])
REMOVED = -math.inf
V = 12
Row = list[float]


def rows() -> Tensor:
    """Random rows, steep and flat ones, rows with removed tokens, and one of equal scores."""
    scores = torch.randn(40, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = torch.cat([scores * 0.3, scores, scores * 4, torch.zeros(1, V, dtype=torch.float64)])
    scores[1::4, 3:8] = REMOVED
    return scores


def softmax(row: Row) -> Row:
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / sum(weights) for weight in weights]


def kept(sampler: Sampler) -> list[set[int]]:
    left = sampler.apply(rows(), [[]] * len(rows()))
    return [{token for token in range(V) if row[token] > REMOVED} for row in left.tolist()]


def alive(row: Row, keep: set[int]) -> set[int]:
    return {token for token in keep if row[token] > REMOVED}


# --- dynamic temperature ---

def entropy(p: Row) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)
