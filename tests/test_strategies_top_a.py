"""Top-a against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from registry import Collapse

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from support.laws import AT_ONE
from support.plain_rows import AT_TEMPERATURE_ONE, V, alive, kept, rows, softmax
from support.wrong_variants import refused

TopA = find("top_a")
COLLAPSES = {"top_a": [Collapse(LaneConfig("greedy", {}, [("top_a", {"a": 0.0}), AT_ONE]), AT_TEMPERATURE_ONE)]}


def check_top_a(cls: type[Sampler]) -> None:
    for a in (0.0, 0.1, 0.4, 1.0):
        expected = []
        for row in rows().tolist():
            p = softmax(row)
            expected.append(alive(row, {t for t in range(V) if p[t] >= a * max(p) ** 2}))
        assert kept(cls(a=a)) == expected, a


class IsMinP(TopA):
    def apply(self, scores, histories):
        return make("min_p", m=self.a).apply(scores, histories)


class SquaresTheFactor(TopA):
    def __post_init__(self):
        self.a = self.a ** 2


@pytest.mark.oracle("top_a")
def test_top_a_keeps_what_reaches_a_times_the_squared_maximum():
    check_top_a(TopA)


@pytest.mark.refuses("top_a")
@pytest.mark.parametrize("wrong", [IsMinP, SquaresTheFactor])
def test_a_wrong_top_a_is_refused(wrong):
    refused(check_top_a, wrong)
