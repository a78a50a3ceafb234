"""How a measured number varied from round to round."""
from __future__ import annotations

from statistics import median
from typing import NamedTuple


class Spread(NamedTuple):
    """Of the measured rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))
