"""Temperature against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from transformers import TemperatureLogitsWarper

from playground.contract import Sampler, find
from support.truncation_oracles import REMOVED, agrees, applied, awkward_rows
from support.wrong_variants import refused

Temperature = find("temperature")


def check_temperature(cls: type[Sampler]) -> None:
    agrees(cls, "t", TemperatureLogitsWarper, [0.05, 0.7, 1.0, 2.0], awkward_rows())
    cold = applied(cls, awkward_rows(), t=0.0)
    assert [(row > REMOVED).nonzero().flatten().tolist() for row in cold] == [
        [row.tolist().index(max(row.tolist()))] for row in awkward_rows()
    ]


class Multiplies(Temperature):
    def apply(self, scores, histories):
        return scores * self.t if self.t else super().apply(scores, histories)


class KeepsTiesWhenCold(Temperature):
    def apply(self, scores, histories):
        return (
            super().apply(scores, histories)
            if self.t
            else scores.masked_fill(scores < scores.amax(-1, keepdim=True), REMOVED)
        )


class IgnoresZero(Temperature):
    def apply(self, scores, histories):
        return super().apply(scores, histories) if self.t else scores


@pytest.mark.oracle("temperature")
def test_temperature_is_the_librarys_and_at_zero_the_first_largest_score():
    check_temperature(Temperature)


@pytest.mark.refuses("temperature")
@pytest.mark.parametrize("wrong", [Multiplies, KeepsTiesWhenCold, IgnoresZero])
def test_a_wrong_temperature_is_refused(wrong):
    refused(check_temperature, wrong)
