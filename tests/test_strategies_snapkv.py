"""Prompt snapshot (SnapKV): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from registry import unchanged_by

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import make
from strategies.kv_cache.snapkv import SnapKV
from support.eviction import BY_HAND, LENGTH, PROMPT, ByHand, Rule, alone, course, models, stays
from support.wrong_variants import variants_of

COLLAPSES = {"snapkv": unchanged_by("snapkv", capacity=2048)}


# --- by hand, with the library alone ---

def snapshot(prompt: int, window: int, capacity: int, kernel: int, pool: Callable) -> Rule:
    def rule(votes, live, read):
        if read > prompt:
            return set(live)
        early, reach = range(prompt - window), kernel // 2
        around = {p: [votes[q] if q in early else 0.0 for q in range(p - reach, p + reach + 1)] for p in early}
        best = sorted(early, key=lambda p: (pool(around[p]), p), reverse=True)[:capacity - window]
        return set(best) | set(range(prompt - window, prompt))
    return rule


@pytest.mark.oracle("snapkv")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize(
    "knobs",
    [
        dict(window=3, capacity=9, kernel=3),
        dict(window=1, capacity=6, kernel=1),
        dict(window=4, capacity=10, kernel=5, pooling="max"),
    ],
    ids=str,
)
def test_snapkv_text_and_cache_equal_decoding_by_hand(architecture, knobs):
    pool = max if knobs.get("pooling") else sum
    rule = snapshot(len(PROMPT), knobs["window"], knobs["capacity"], knobs["kernel"], pool)
    expected = ByHand(architecture, rule, knobs["window"]).write(PROMPT, LENGTH)
    assert course(alone(make("snapkv", **knobs)), models(architecture)) == expected


# --- wrong variants ---

class TheWindowHasNoPlaceOfItsOwn(SnapKV):
    def retain(self, held):
        if held.next > held.prompt:
            return held.live
        return top_slots(self.attention.of(held.layer, held.positions), self.capacity, held.live)


class EveryRowOfThePromptVotes(SnapKV):
    def wants_attention(self, position, prompt):
        return position < prompt


class NothingIsPooled(SnapKV):
    def _pooled(self, held, late):
        return self.attention.of(held.layer, held.positions)


@pytest.mark.refuses("snapkv")
@pytest.mark.parametrize("wrong", variants_of(SnapKV, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_prompt_compression_is_detected(wrong):
    _, expected = ByHand("llama", snapshot(len(PROMPT), 3, 9, 5, sum), 3).write(PROMPT, LENGTH)
    assert course(alone(wrong(window=3, capacity=9, kernel=5)), models())[1] != expected


# --- attention scores, in small worked examples ---

@pytest.mark.parametrize("knobs, kept", [
    (dict(kernel=1), [1, 6, 8, 9]), (dict(kernel=3), [5, 6, 8, 9]), (dict(kernel=3, pooling="max"), [1, 2, 8, 9]),
])
def test_snapkv_pools_the_scores_of_neighbours(knobs, kept):
    policy = make("snapkv", window=2, capacity=4, **knobs)
    policy.observe_attention(
        0, torch.tensor([[[0, 7, 0, 0, 0, 4, 5, 1, 99, 99]]]).float(), torch.tensor([8, 9]), torch.arange(10)[None]
    )
    assert stays(policy, [list(range(10))], 10, prompt=10) == [kept]


def test_snapkv_scores_by_the_last_prompt_rows_alone():
    policy = make("snapkv", window=3)
    assert [position for position in range(12) if policy.wants_attention(position, 9)] == [6, 7, 8]


# --- effects on a lane ---

def test_snapkv_compresses_the_prompt_once_and_retains_generated_tokens():
    for decoder in ("greedy", "speculative"):
        ids, found = course(alone(make("snapkv", window=3, capacity=9), decoder), models())
        first = [[{p for p in head if p < len(PROMPT)} for head in layer] for layer in found[0]]
        assert all(len(head) == 9 for layer in first for head in layer)
        read = max(max(head) for layer in found[-1] for head in layer) + 1
        assert len(PROMPT) + len(ids) - read <= 1
        assert found[-1] == [[head | set(range(len(PROMPT), read)) for head in layer] for layer in first]


def test_a_fork_does_not_change_what_is_evicted():
    ids, plain = course(alone(make("snapkv", window=3, capacity=9)), models())
    forked, found = course(alone(make("snapkv", window=3, capacity=9)), models(), forced=tuple(ids[:4]))
    assert forked[:4] == ids[:4] and len(found) == len(plain)
    early = [
        [[{p for p in head if p < len(PROMPT)} for head in layer] for layer in held[-1]] for held in (found, plain)
    ]
    assert early[0] == early[1]
    assert all(set(range(len(PROMPT), len(PROMPT) + 4)) <= head for layer in found[-1] for head in layer)
