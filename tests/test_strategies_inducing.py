"""Contrast with an induced stream: ICD, and LOL, which adds layers. Compared with an independent computation."""
from __future__ import annotations

import pytest
from runs import alone, figures, recorded

from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from playground.events import Done

GREEDY = LaneConfig("greedy")
SAID = Prompt("The green bird")


@pytest.mark.parametrize("chat", [False, True])
def test_the_second_stream_has_the_instruction_before_the_question(chat):
    prompt = Prompt("The green bird", chat=chat, context="A bird.")
    whole = prompt.instructed("Sing.").whole()
    assert whole.endswith("Sing. The green bird" if chat else "Sing.\nThe green bird") and "A bird." in whole
    assert prompt.instructed("  ") == prompt


def test_the_instruction_changes_the_text_and_without_one_it_is_greedy():
    greedy = recorded(GREEDY, SAID)[0]
    assert recorded(alone("icd", instruction=""), SAID)[0] == greedy != recorded(alone("icd"), SAID)[0]
    for gamma in (-1.0, 0.0, 2.0):  # an empty instruction changes nothing, however it is amplified
        assert recorded(alone("lol", refocus="", gamma=gamma, omega=0.0), SAID)[0] == recorded(alone("icd"), SAID)[0]


def test_samplers_that_read_different_layers_do_not_interfere():
    both = LaneConfig("greedy", {}, [("dola", {"layers": "low"}), ("lol", {"rho": 1.0})])
    _, events = recorded(both, SAID)
    assert isinstance(events[-1], Done)
    assert {
        label.split(":")[0]
        for data in figures(events, "first choice of each layer, by divergence")
        for label in data["labels"]
    } == {"layer 0"}
