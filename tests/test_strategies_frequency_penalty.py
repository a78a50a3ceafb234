"""Frequency penalty against the library or by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Sampler, find
from support.repeating_texts import CountsThePrompt, WindowOneShort, check_counts
from support.wrong_variants import refused

Frequency = find("frequency_penalty")
Presence = find("presence_penalty")


def check_frequency(cls: type[Sampler]) -> None:
    check_counts(cls, lambda count: count)


class Divides:
    def apply(self, scores, histories):
        kept = super().apply(scores, histories) == scores
        return torch.where(kept, scores, scores / (1 + self.penalty))


class FrequencyWithAShortWindow(WindowOneShort, Frequency): ...


class FrequencyOfThePrompt(CountsThePrompt, Frequency): ...


class FrequencyThatDivides(Divides, Frequency): ...


@pytest.mark.oracle("frequency_penalty")
def test_the_frequency_penalty_is_paid_for_each_occurrence():
    check_frequency(Frequency)


@pytest.mark.refuses("frequency_penalty")
@pytest.mark.parametrize("wrong", [Presence, FrequencyWithAShortWindow, FrequencyOfThePrompt, FrequencyThatDivides])
def test_a_wrong_frequency_penalty_is_refused(wrong):
    refused(check_frequency, wrong)
