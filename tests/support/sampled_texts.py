"""Texts that are sampled."""
from __future__ import annotations

from playground.contract.lane_config import LaneConfig


def ead(**knobs) -> LaneConfig:
    return LaneConfig("ead", knobs)
