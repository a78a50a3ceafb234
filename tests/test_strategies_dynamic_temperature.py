"""Dynamic temperature against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import alone

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.plain_rows import REMOVED, entropy, rows, softmax
from support.wrong_variants import refused

Dynamic = find("dynamic_temperature")
COLLAPSES = {
    "dynamic_temperature": [
        Collapse(alone("dynamic_temperature", low=0.7, high=0.7), alone("temperature", t=0.7)),
        Collapse(alone("dynamic_temperature", low=0.0, high=0.0), LaneConfig("greedy")),
    ],
}


def check_dynamic(cls: type[Sampler]) -> None:
    for low, high, exponent in ((0.3, 1.3, 1.0), (0.5, 2.0, 3.0), (1.0, 1.0, 0.5)):
        found = cls(low=low, high=high, exponent=exponent).apply(rows(), [[]] * len(rows()))
        for row, new in zip(rows().tolist(), found.tolist()):
            left = [score for score in row if score > REMOVED]
            share = entropy(softmax(left)) / math.log(len(left))
            t = low + (high - low) * share**exponent
            assert new == pytest.approx([score / t for score in row])


class ByTheWholeVocabulary(Dynamic):
    def temperatures(self, scores):
        return super().temperatures(scores.clamp(min=-1e4))


class HotWhereCertain(Dynamic):
    def temperatures(self, scores):
        return self.low + self.high - super().temperatures(scores)


@pytest.mark.oracle("dynamic_temperature")
def test_the_temperature_rises_with_the_entropy_of_what_is_left():
    check_dynamic(Dynamic)


@pytest.mark.refuses("dynamic_temperature")
@pytest.mark.parametrize("wrong", [ByTheWholeVocabulary, HotWhereCertain])
def test_a_wrong_temperature_is_refused(wrong):
    refused(check_dynamic, wrong)


def test_a_row_of_one_token_stays_finite_and_crossed_limits_are_refused():
    row = torch.tensor([[1.0, REMOVED, REMOVED]])
    assert Dynamic(low=0.0).apply(row, [[]]).isfinite().sum() == 1
    with pytest.raises(Refusal, match="low must not exceed high"):
        make("dynamic_temperature", low=2.0, high=1.0)
