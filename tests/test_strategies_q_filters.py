"""Q-Filters: what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest

from playground.contract import find
from support.held_states import CASES, HEADS, QUERIES, D, Vector, by_hand, dot, observed, stays
from support.wrong_variants import refused

QFilters = find("q_filters")


def main_direction(queries: list[Vector]) -> Vector:
    """The eigenvector of the largest eigenvalue of the sum of q q^T, by power iteration, turned to the mean query."""
    found = [1.0] * D
    for _ in range(500):
        found = [sum(dot(q, found) * q[i] for q in queries) for i in range(D)]
        length = math.hypot(*found)
        found = [x / length for x in found]
    sign = 1 if sum(dot(q, found) for q in queries) > 0 else -1
    return [sign * x for x in found]


def projections(states, head):
    queries = [query for group in QUERIES[head].tolist() for query in group]
    direction = main_direction(queries)
    return {p: dot(key, direction) for p, (key, _) in states.items()}


def check_q_filters(cls: type) -> None:
    for size in (1, 5, 9):
        for what in CASES:
            assert stays(observed(cls(size=size)), what) == by_hand(what, size, projections)


class PointsAway(QFilters):
    def scores(self, held):
        return -super().scores(held)


class OneDirectionForAllHeads(QFilters):
    def scores(self, held):
        super().scores(held)
        self._directions[0] = self._directions[0][:1].expand(HEADS, -1)
        return super().scores(held)


class LengthOfTheKey(QFilters):
    def scores(self, held):
        return held.read("keys").norm(dim=-1)


@pytest.mark.slow
@pytest.mark.oracle("q_filters")
def test_q_filters_keep_the_largest_projections_on_the_main_direction_of_the_queries():
    check_q_filters(QFilters)


@pytest.mark.refuses("q_filters")
@pytest.mark.parametrize("wrong", [PointsAway, OneDirectionForAllHeads, LengthOfTheKey])
def test_a_wrong_filter_is_refused(wrong):
    refused(check_q_filters, wrong)
