"""Expected attention: what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from playground.contract import find
from support.held_states import CASES, GROUP, HEADS, QUERIES, D, by_hand, dot, observed, soft, stays
from support.wrong_variants import refused

Expected = find("expected_attention")
WINDOW = 5


def expected(states, head):
    """Mean over the group of the softmax of m k / sqrt d + k S k / 2d, times the length of the value."""
    found = dict.fromkeys(states, 0.0)
    for queries in QUERIES[head].tolist():
        last = queries[-WINDOW:]
        mean = [sum(column) / WINDOW for column in zip(*last)]
        logs = {p: dot(mean, key) / math.sqrt(D)
                + sum((dot(q, key) - dot(mean, key)) ** 2 for q in last) / WINDOW / (2 * D)
                for p, (key, _) in states.items()}
        for p, share in zip(logs, soft(list(logs.values()))):
            found[p] += share / GROUP * math.hypot(*states[p][1])
    return found


def check_expected(cls: type) -> None:
    for size in (1, 5, 9):
        for what in CASES:
            assert stays(observed(cls(size=size, window=WINDOW)), what) == by_hand(what, size, expected)


class WithoutTheCovariance(Expected):
    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, query_states)
        self._queries[layer] = self._queries[layer].mean(2, keepdim=True)


class WithoutTheValues(Expected):
    def scores(self, held):
        return super().scores(replace(held, read=lambda part: torch.ones(HEADS, held.positions.shape[1], D)
                                      .double() if part == "values" else held.read(part)))


class AllQueries(Expected):
    def __post_init__(self):
        super().__post_init__()
        self.window = 999


@pytest.mark.oracle("expected_attention")
def test_expected_attention_keeps_what_gaussian_queries_would_attend_to():
    check_expected(Expected)


@pytest.mark.refuses("expected_attention")
@pytest.mark.parametrize("wrong", [WithoutTheCovariance, WithoutTheValues, AllQueries])
def test_a_wrong_expectation_is_refused(wrong):
    refused(check_expected, wrong)
