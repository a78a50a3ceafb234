"""Presence penalty against the library or by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.contract import Sampler, find
from support.repeating_texts import CountsThePrompt, WindowOneShort, check_counts
from support.wrong_variants import refused

Frequency = find("frequency_penalty")
Presence = find("presence_penalty")


def check_presence(cls: type[Sampler]) -> None:
    check_counts(cls, lambda count: min(count, 1))


class PresenceWithAShortWindow(WindowOneShort, Presence): ...


class PresenceInThePrompt(CountsThePrompt, Presence): ...


@pytest.mark.oracle("presence_penalty")
def test_the_presence_penalty_is_paid_once():
    check_presence(Presence)


@pytest.mark.refuses("presence_penalty")
@pytest.mark.parametrize("wrong", [Frequency, PresenceWithAShortWindow, PresenceInThePrompt])
def test_a_wrong_presence_penalty_is_refused(wrong):
    refused(check_presence, wrong)
