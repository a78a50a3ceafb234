"""Draft trees whose nodes are sampled."""
from __future__ import annotations

import torch
from tables import TableModel

from playground.contract.lane_config import LaneConfig
from support.speculation import first_drafts

P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def golden() -> dict[str, TableModel]:
    """Two models with rows P and Q after every text."""
    return {
        "target": TableModel("abc", rule=lambda context: P.log()),
        "draft": TableModel("abc", rule=lambda context: Q.log()),
    }


def tokens_of_first_round(config: LaneConfig, depth: int) -> float:
    return sum(weight * (len(verdict.kept) + 1) for weight, _, verdict in first_drafts(config, golden(), depth + 1))
