"""Random labels that turn acceptance probabilities into a rule.

Every draft token gets a label in [0, 1] such that all labels together are uniform; then the smallest of k labels has
density k (1 - t)^(k - 1). A token is accepted if it has the smallest label, below the limit. So token x is accepted
with probability a(x) if the mean of this density over its labels, 0 from the limit on, is a(x) / q(x).

Few levels suffice: a token whose ratio a / q lies between two levels takes its labels from either, in the proportion
that gives its ratio. A level is a set of labels with its ratio as mean of the density and the mass of its tokens as
length. Levels are assigned one by one: from the free labels, laid end to end, each takes the interval with its length
and mean. That is possible, in any order, if and only if the levels with the largest ratios never need more than the
smallest labels offer (Strassen 1965; the intervals are shadows of atoms, Beiglboeck and Juillet 2016, arXiv
1208.1509). Splitting tokens between levels needs more than the tokens alone, so levels are added until it is possible;
with a level for each ratio it always is.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy
import torch
from torch import Tensor

from strategies.speculative.exact_transport.transport_plan import TransportPlan

Intervals = list[tuple[float, float]]
FEW = 4  # levels at first, besides those at the cut
POSSIBLE = 1e-12  # rounding of sums of probabilities
ROUNDS = 80  # of the search for an interval, every second of which halves it
ROUNDING = 1e-15


@dataclass
class Levels:
    """Ratios, ascending; `upper[x]` is the level at or above the ratio of token x, and `share[x]` how much of its
    labels are there: the others are one level below.
    """

    ratios: Tensor  # [levels]
    masses: Tensor  # [levels], 1 in all
    upper: Tensor  # [V]
    share: Tensor  # [V]

    def possible(self, plan: TransportPlan) -> bool:
        """Whether labels with these masses and means exist."""
        masses, needed = self.masses.flip(0).cumsum(0), (self.masses * self.ratios).flip(0).cumsum(0)
        return bool((needed <= plan.below(masses.clamp(max=1.0)) + POSSIBLE).all())


def levels_of(plan: TransportPlan) -> Levels:
    """As few levels as possible, doubled until the labels exist."""
    ratios, count = _ratios(plan), FEW
    while not (found := _levels(plan, ratios, count)).possible(plan) and count < len(plan.order):
        count *= 2
    return found


def _ratios(plan: TransportPlan) -> Tensor:
    """a / q of all tokens, [V]; 0 where q is 0."""
    return torch.where(plan.q > 0, plan.accepted / plan.q, 0.0)


def _levels(plan: TransportPlan, ratios: Tensor, count: int) -> Levels:
    """Levels at the cut, at the ends, and at equal steps of q in the order of ratios."""
    last = len(plan.order) - 1
    steps = torch.searchsorted(plan.q[plan.order].cumsum(0), torch.arange(1, count) / count)
    whole = torch.arange(last + 1) if count > last else steps.clamp(max=last)
    places = torch.cat([whole, torch.tensor([0, plan.cut, min(plan.cut + 1, last), last])])
    chosen = ratios[plan.order[places]].unique()
    upper = torch.searchsorted(chosen, ratios).clamp(max=len(chosen) - 1)
    lower = (upper - 1).clamp(min=0)
    width = chosen[upper] - chosen[lower]
    share = torch.where(width > 0, (ratios - chosen[lower]) / width, 1.0).clamp(0, 1)
    masses = torch.zeros_like(chosen).index_add(0, upper, plan.q * share).index_add(0, lower, plan.q * (1 - share))
    return Levels(chosen, masses, upper, share)


class FreeLabels:
    """The labels not assigned yet: disjoint intervals in ascending order."""

    def __init__(self, plan: TransportPlan):
        self.plan, self.intervals = plan, [(0.0, 1.0)]

    def take(self, length: float, integral: float) -> Intervals:
        """Remove an interval of the free labels, laid end to end, with this length and integral of the density; returns
        its parts.
        """
        below = self.plan.below
        lengths = [0.0, *accumulate(end - start for start, end in self.intervals)]
        integrals = [0.0, *accumulate(below(end) - below(start) for start, end in self.intervals)]

        def integral_before(place: float) -> float:
            i = min(bisect_right(lengths, place), len(self.intervals)) - 1
            start = self.intervals[i][0]
            return integrals[i] + below(start + place - lengths[i]) - below(start)

        def surplus(place: float) -> float:
            return integral_before(min(place + length, lengths[-1])) - integral_before(place) - integral

        start = _root(surplus, max(0.0, lengths[-1] - length))
        return self._remove(start, start + length)

    def _remove(self, start: float, end: float) -> Intervals:
        """Remove what lies between two places of the free labels, laid end to end."""
        taken, left, place = [], [], 0.0
        for low, high in self.intervals:
            first, last = (min(max(low + edge - place, low), high) for edge in (start, end))
            place += high - low
            taken += [(first, last)] if last > first else []
            pieces = [(low, first), (last, high)] if last > first else [(low, high)]
            left += [(a, b) for a, b in pieces if b > a]
        self.intervals = left
        return taken


def _root(function, high: float) -> float:
    """Where a falling function on [0, high] is 0; an end of the interval if it is nowhere."""
    low, at_low, at_high = 0.0, function(0.0), function(high)
    if at_low <= 0 or at_high >= 0:
        return low if at_low <= 0 else high
    for number in range(ROUNDS):
        share = 0.5 if number % 2 else at_low / (at_low - at_high)
        middle = low + share * (high - low)
        value = function(middle)
        if abs(value) < ROUNDING or not low < middle < high:
            return middle
        low, at_low, high, at_high = (middle, value, high, at_high) if value > 0 else (low, at_low, middle, value)
    return (low + high) / 2


def labels_of(plan: TransportPlan, levels: Levels) -> list[Intervals]:
    """The labels of every level."""
    free = FreeLabels(plan)
    sizes = zip(levels.masses.tolist(), (levels.masses * levels.ratios).tolist())
    return [free.take(length, integral) if length > 0 else [] for length, integral in sizes]


class DraftLabels:
    """The levels of a plan with their labels."""

    def __init__(self, plan: TransportPlan):
        self.plan, self.levels = plan, levels_of(plan)
        labels = labels_of(plan, self.levels)
        self._lengths = [sum(end - start for start, end in parts) for parts in labels]
        self._parts = sorted((*part, level) for level, parts in enumerate(labels) for part in parts)

    def accepted_given(self, drafted: Sequence[int]) -> dict[int, float]:
        """The probability that each drafted token is accepted, given all drafted tokens, repeats included."""
        weights = _weights(self.levels, drafted)  # of every draft token at every level, [k, levels]
        left, chances = numpy.ones(len(drafted)), numpy.zeros(len(drafted))  # left: share of its labels not passed yet
        for start, end, level in self._parts:
            if start >= self.plan.limit:
                break
            passed = weights[:, level] * (min(end, self.plan.limit) - start) / self._lengths[level]
            chances += _smallest(left, passed)
            left = (left - passed).clip(min=0)
        by_token: dict[int, float] = defaultdict(float)
        for token, chance in zip(drafted, chances.tolist()):
            by_token[token] += chance
        return by_token


def _weights(levels: Levels, drafted: Sequence[int]) -> numpy.ndarray:
    weights = numpy.zeros((len(drafted), len(levels.ratios)))
    for place, token in enumerate(drafted):
        upper, share = int(levels.upper[token]), float(levels.share[token])
        weights[place, upper] += share
        weights[place, max(upper - 1, 0)] += 1 - share
    return weights


def _smallest(left: numpy.ndarray, passed: numpy.ndarray) -> numpy.ndarray:
    """The probability that each draft token has the smallest label, and within a stretch of labels: `passed` is the
    probability that its own label is there, and `left` that it is there or later.

    That is the integral over s in [0, 1] of passed_i times the product of (left_j - passed_j s) over the others, a
    polynomial of degree k - 1, for which the quadrature is exact.
    """
    points, sizes = quadrature(len(left) // 2 + 1)
    later = left[:, None] - passed[:, None] * (points + 1) / 2
    others = [numpy.delete(later, place, 0).prod(0) for place in range(len(left))]
    return passed * (numpy.array(others) @ sizes) / 2


@cache
def quadrature(points: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Places and weights of Gauss and Legendre on [-1, 1], exact for polynomials of degree 2 points - 1."""
    return numpy.polynomial.legendre.leggauss(points)
