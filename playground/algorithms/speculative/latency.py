"""The time of a forward as a function of what goes into it, fitted to measured forwards."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy

Times = Mapping[tuple[int, int], float]
"""Seconds of a forward, by its rows and by the tokens before them."""


class Latency(NamedTuple):
    """Time of a forward: reading the weights, and a part for each input token and for each token of context."""

    fixed: float
    row: float
    slot: float

    def of(self, rows: float, context: float) -> float:
        """Time with so many input tokens and tokens of context, over all sequences."""
        return self.fixed + self.row * rows + self.slot * context


def fitted(times: Times) -> Latency:
    """The latency with the smallest squared error relative to the measured times; no part is negative."""
    sizes = numpy.array([[1.0, rows, context] for rows, context in times])
    seconds = numpy.array(list(times.values()))
    scaled = sizes / seconds[:, None]  # so that a relative error counts as much at few rows as at many
    candidates = [_solved(scaled, list(part)) for size in (3, 2, 1) for part in combinations(range(3), size)]
    valid = [each for each in candidates if (each >= 0).all()]
    return Latency(*map(float, min(valid, key=lambda each: float(((scaled @ each - 1) ** 2).sum()))))


def _solved(scaled: numpy.ndarray, part: list[int]) -> numpy.ndarray:
    """Least squares with some of the three parts, the others being 0, [3]."""
    found = numpy.zeros(3)
    found[part] = numpy.linalg.lstsq(scaled[:, part], numpy.ones(len(scaled)), rcond=None)[0]
    return found


def deviation(latency: Latency, times: Times) -> float:
    """Mean relative difference of measured times from the fitted ones."""
    return sum(abs(latency.of(*size) / seconds - 1) for size, seconds in times.items()) / len(times)


def seconds_by_rows(times: Times) -> dict[int, float]:
    """Seconds of forwards over the shortest context, by rows in ascending order; more rows never take less time.

    Where a measurement says so, neighbours are averaged until none does.
    """
    context = min(context for _, context in times)
    blocks: list[list[tuple[int, float]]] = []
    for rows in sorted(rows for rows, other in times if other == context):
        blocks.append([(rows, times[rows, context])])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return {rows: _mean(block) for block in blocks for rows, _ in block}


def _mean(block: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in block) / len(block)


def at(seconds: Mapping[int, float], rows: int) -> float:
    """Seconds of a forward with so many rows, on the line between the two measured sizes around it.

    Beyond the sizes it is the line through the last two, or in proportion if there is one only.
    """
    known = list(seconds)
    place = min(max(1, bisect_left(known, rows)), len(known) - 1)
    if len(known) < 2:
        return seconds[known[0]] * max(1.0, rows / known[0])
    low, high = known[place - 1], known[place]
    return seconds[low] + (seconds[high] - seconds[low]) * (rows - low) / (high - low)
