"""Cache policies by keys, values and queries: LagKV, Q-Filters and expected attention, each by hand in plain loops."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from playground.contract import Held, find
from support.budget_policies import best, roomy
from support.eviction import LENGTH, alone, course, models

LagKV, QFilters, Expected = (find(name) for name in ("lag_kv", "q_filters", "expected_attention"))
COLLAPSES = {name: roomy(name, size=2048) for name in ("lag_kv", "q_filters", "expected_attention")}
HEADS, D, GROUP, ROWS = 2, 4, 2, 7
Vector = list[float]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2


def held(seed: int, slots: int = 13) -> Held:
    """Random states; in odd cases the second head holds fewer tokens, and what is in its empty slots is left over."""
    states = {"keys": drawn(seed, HEADS, slots, D) * 3, "values": drawn(seed + 50, HEADS, slots, D)}
    positions = [list(range(slots)), list(range(slots))]
    if seed % 2:
        positions[1] = [*range(1, slots - 2), -1, -1, -1]
        for part in states.values():
            part[1, -3:] = float("nan")
    return Held(0, 1, "keep", slots, slots, torch.tensor(positions), read=states.__getitem__)


CASES = [held(seed) for seed in range(6)]
Scores = Callable[[dict[int, tuple[Vector, Vector]], int], dict[int, float]]
"""scores(states by position: key and value, head) -> score by position."""


def by_hand(what: Held, size: int, scores: Scores) -> list[set[int]]:
    heads = []
    for head, row in enumerate(what.positions.tolist()):
        keys, values = (what.read(part)[head].tolist() for part in ("keys", "values"))
        states = {p: (key, value) for p, key, value in zip(row, keys, values) if p >= 0}
        heads.append(best(scores(states, head), size))
    return heads


def stays(policy, what: Held) -> list[set[int]]:
    kept = policy.retain(what) & what.live
    return [set(row[chosen].tolist()) for row, chosen in zip(what.positions, kept)]


def refused(check: Callable, wrong: type) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b))


# --- LagKV ---


def deviation(xs: Vector) -> float:
    mean = sum(xs) / len(xs)
    return math.sqrt(sum((x - mean) ** 2 for x in xs) / (len(xs) - 1))


def soft(xs: Vector) -> Vector:
    weights = [math.exp(x - max(xs)) for x in xs]
    return [weight / sum(weights) for weight in weights]


def lagged(here: list[Vector], after: list[Vector]) -> Vector:
    """Softmax of the deviations of one stretch, scaled by the next."""
    limits = [(min(channel), max(channel)) for channel in zip(*after)]
    return soft([deviation([(x - low) / (high - low) for x, (low, high) in zip(state, limits)]) for state in here])


def lag_scores(sinks: int, lag: int) -> Scores:
    def scores(states, head):
        order = sorted(states)
        found = dict.fromkeys(order, 2.0)
        stretches = [order[i:i + lag] for i in range(sinks, len(order), lag)]
        for here, after in zip(stretches, [s for s in stretches[1:] if len(s) == lag]):
            parts = ([[states[p][part] for p in stretch] for stretch in (here, after)] for part in (0, 1))
            sums = [sum(pair) for pair in zip(*(lagged(*stretches) for stretches in parts))]
            for i, p in enumerate(here):
                found[p] = sum((other, j) < (sums[i], i) for j, other in enumerate(sums)) / lag
        return found
    return scores


def check_lag(cls: type) -> None:
    for sinks, lag, size in ((1, 3, 8), (2, 4, 9), (0, 2, 10), (4, 4, 6)):
        for what in CASES:
            policy = cls(sinks=sinks, lag=lag, size=size)
            assert stays(policy, what) == by_hand(what, size, lag_scores(sinks, lag)), (sinks, lag)


class ScaledByTheStretchItself(LagKV):
    def scores(self, held):
        from strategies.kv_cache import lag_kv
        right = lag_kv.spread
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lag_kv, "spread", lambda all_: torch.cat([right(one.expand(2, -1, -1)) for one in all_[:-1]]))
            return super().scores(held)


class KeysAlone(LagKV):
    def scores(self, held):
        return super().scores(replace(held, read=lambda part: held.read("keys")))


class NoSinks(LagKV):
    def __post_init__(self):
        self.sinks = 0


@pytest.mark.oracle("lag_kv")
def test_lag_kv_keeps_what_deviates_on_the_scale_of_the_next_stretch():
    check_lag(LagKV)


@pytest.mark.refuses("lag_kv")
@pytest.mark.parametrize("wrong", [ScaledByTheStretchItself, KeysAlone, NoSinks])
def test_a_wrong_lag_kv_is_refused(wrong):
    refused(check_lag, wrong)


# --- Q-Filters ---

QUERIES = drawn(90, HEADS, GROUP, ROWS, D)


def observed(policy):
    """The policy after it has seen the prompt's queries in two pieces."""
    for piece in QUERIES.split([3, ROWS - 3], 2):
        policy.observe_queries(0, piece)
    return policy


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


# --- expected attention ---

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


@pytest.mark.strategy("lag_kv", "q_filters", "expected_attention")
@pytest.mark.parametrize("policy", [LagKV(sinks=2, lag=4, size=10), QFilters(size=10, recent=3),
                                    Expected(size=10, window=6)], ids=lambda policy: policy.name)
def test_a_run_holds_the_budget_and_heads_differ(policy):
    ids, held_after = course(alone(policy), models())
    assert len(ids) == LENGTH and all(len(head) == 10 for layer in held_after[-1] for head in layer)
    assert len({frozenset(head) for layer in held_after[-1] for head in layer}) > 1
