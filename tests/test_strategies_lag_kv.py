"""LagKV: what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from playground.contract import find
from support.held_states import CASES, Scores, Vector, by_hand, soft, stays
from support.wrong_variants import refused

LagKV = find("lag_kv")


def deviation(xs: Vector) -> float:
    mean = sum(xs) / len(xs)
    return math.sqrt(sum((x - mean) ** 2 for x in xs) / (len(xs) - 1))


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
