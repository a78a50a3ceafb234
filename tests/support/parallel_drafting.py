"""Lanes that draft and verify in parallel."""
from __future__ import annotations

import torch
from tables import TableModel

from playground.contract.lane_config import LaneConfig


def pearl(*samplers: tuple[str, dict], **knobs) -> LaneConfig:
    return LaneConfig("pearl", knobs, list(samplers))


def agreeing(share: int, ends: str = "") -> dict[str, TableModel]:
    """A draft that agrees with the target at all positions except every `share`-th."""
    certain = torch.eye(4, dtype=torch.float64) * 50
    return {
        "target": TableModel("abcd", ends, rule=lambda context: certain[len(context) % 3]),
        "draft": TableModel(
            "abcd", ends, rule=lambda context: certain[3 if len(context) % share == 0 else len(context) % 3]
        ),
    }
