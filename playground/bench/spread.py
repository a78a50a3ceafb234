"""Median and range of a number that was measured in several rounds."""
from __future__ import annotations

from statistics import median
from typing import NamedTuple


class Spread(NamedTuple):
    """Median, lowest and highest value over the measured rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def as_json(spread: Spread | None) -> dict[str, float] | None:
    return spread and spread._asdict()
