"""Which choice each matrix takes within a budget that all of them share."""
from __future__ import annotations

import math

import torch
from torch import Tensor

UNITS = 20_000  # into which a budget is divided at most


def cheapest(choices: list[list[tuple[float, int]]], budget: float) -> list[int]:
    """Which choice of (error, size) each matrix takes, so that the sum of errors is least and that of sizes within the
    budget; empty if no choices fit. Of equally good ones the first. Sizes are rounded up to a common unit, so that the
    budget holds.
    """
    unit = max(math.gcd(*(size for own in choices for _, size in own)), math.ceil(budget / UNITS), 1)
    most = int(budget // unit)
    best, taken = torch.zeros(most + 1, dtype=torch.double), []
    for own in choices:
        options = torch.full((len(own), most + 1), math.inf, dtype=torch.double)
        for row, (error, size) in zip(options, own):
            units = -(-size // unit)
            if units <= most:
                row[units:] = best[:most + 1 - units] + error
        best, number = options.min(0)
        taken.append((own, number))
    return _traced(taken, most, unit) if best[most].isfinite() else []


def _traced(taken: list[tuple[list[tuple[float, int]], Tensor]], left: int, unit: int) -> list[int]:
    """The choices behind the best sum, from the last matrix to the first."""
    found = []
    for own, number in reversed(taken):
        found.append(int(number[left]))
        left -= -(-own[found[-1]][1] // unit)
    return found[::-1]
