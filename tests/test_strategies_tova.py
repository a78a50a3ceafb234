"""TOVA against decoding by hand with the library, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from playground.contract import make
from strategies.kv_cache.tova import Tova
from support.budget_policies import BY_HAND, HandRule, Seen, best, roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.wrong_variants import variants_of

COLLAPSES = {"tova": roomy("tova", size=2048)}


def least_attended_goes(size: int) -> Callable[[Seen], list[set[int]]]:
    def rule(seen):
        shared = dict(zip(seen.live[0], seen.weights[:, -1].mean(0).tolist()))
        return [best(shared, size)] * len(seen.live)
    return rule


@pytest.mark.oracle("tova")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("size", [1, 6, 13])
def test_tova_text_and_cache_equal_decoding_by_hand(architecture, size):
    expected = HandRule(architecture, least_attended_goes(size)).write(PROMPT, LENGTH)
    assert course(alone(make("tova", size=size)), models(architecture)) == expected


class EachHeadForItself(Tova):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.replace(layer, weights[:, -1:], key_positions)


class VotesAddUp(Tova):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights[:, -1:].sum(0, keepdim=True), key_positions)


class TheNewestIsSafe(Tova):
    recent = 1


class TheWholePromptCutsItself(Tova):
    def wants_attention(self, position, prompt):
        return True

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.replace(layer, weights.sum((0, 1), keepdim=True), key_positions)


@pytest.mark.refuses("tova")
@pytest.mark.parametrize("wrong", variants_of(Tova, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_selection_rule_is_detected(wrong):
    _, expected = HandRule("llama", least_attended_goes(13)).write(PROMPT, LENGTH)
    assert course(alone(Tova(size=13)), models())[1] == expected
    assert course(alone(wrong(size=13)), models())[1] != expected
