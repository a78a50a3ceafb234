"""Pseudo queries (DapQ): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pairs import network
from tables import write

from playground.contract import make
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.kv_cache.dapq import DapQ
from support.budget_policies import BY_HAND, HandRule, Seen, best
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.wrong_variants import variants_of


@torch.inference_mode()
def cast_by(architecture: str, pretended: list[int]) -> list[torch.Tensor]:
    """Attention the prompt gets from tokens that follow it, summed over them, by layer [heads, prompt]."""
    library = network(architecture)
    library.set_attn_implementation("eager")
    layers = library(input_ids=torch.tensor([PROMPT + pretended]), use_cache=False, output_attentions=True).attentions
    return [weights[0, :, len(PROMPT):, :len(PROMPT)].sum(1) for weights in layers]


def by_the_answer(
    architecture: str, pretended: list[int], capacity: int, recent: int = 0
) -> Callable[[Seen], list[set[int]]]:
    """The prompt is compressed by what such an answer would attend to; the rest is unchanged."""
    votes, cut = cast_by(architecture, pretended), len(PROMPT) - recent

    def rule(seen):
        if seen.read > len(PROMPT):
            return [set(live) for live in seen.live]
        heads = votes[seen.layer].unflatten(0, (len(seen.live), -1)).sum(1).tolist()
        return [best(dict(enumerate(head[:cut])), capacity - recent) | set(range(cut, len(PROMPT))) for head in heads]
    return rule


REHEARSED = [
    (dict(pretending=6, first=2), PROMPT[:2] + PROMPT[-4:]),
    (dict(pretending=1, first=0), PROMPT[-1:]),
    (dict(pretending=3, first=8), PROMPT[:3]),
    (dict(pretending=4, content="repeated"), PROMPT[-1:] * 4),
    (dict(pretending=128), PROMPT),
    (dict(pretending=5, recent=4), PROMPT[:2] + PROMPT[-3:]),
]


@pytest.mark.oracle("dapq")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs, pretended", REHEARSED, ids=lambda value: str(value)[:40])
def test_dapq_retains_what_its_pseudo_answer_attends_to_and_discards_that_answer(
    architecture, knobs, pretended
):
    expected = HandRule(architecture, by_the_answer(architecture, pretended, 9, knobs.get("recent", 0))).write(
        PROMPT, LENGTH
    )
    assert make("dapq", capacity=9, **knobs).probe_tokens(PROMPT) == pretended
    assert course(alone(make("dapq", capacity=9, **knobs)), models(architecture)) == expected


class TheFirstOneSpeaksForAll(DapQ):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights[:, :1], key_positions)


class OnlySharesOfThePromptCount(DapQ):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights / weights.sum(-1, keepdim=True), key_positions)


class TheStartLendsTheMost(DapQ):
    def probe_tokens(self, text):
        return text[:self.pretending - self.first] + text[-self.first:]


class ReadOnePlaceLate(DapQ):
    """The right tokens, but after one more of them."""

    def probe_tokens(self, text):
        return super().probe_tokens(text)[:1] + super().probe_tokens(text)


@pytest.mark.refuses("dapq")
@pytest.mark.parametrize("wrong", variants_of(DapQ, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_pseudo_answer_is_detected(wrong):
    expected = HandRule("llama", by_the_answer("llama", PROMPT[:2] + PROMPT[-6:], 9)).write(PROMPT, LENGTH)
    assert course(alone(DapQ(capacity=9, pretending=8)), models()) == expected
    assert course(alone(wrong(capacity=9, pretending=8)), models()) != expected


def test_a_pseudo_answer_stays_within_the_context_and_a_short_prompt_needs_none():
    model = models("gpt2")["target"]
    long = [7, 9, 54] * (model.context // 3)
    lane = write(alone(make("dapq", capacity=16)), models("gpt2"), long[:model.context - 3], Limits(0, 50), Draws(0))
    assert (lane.generated, lane.reason) == (3, "length")
    assert make("dapq", capacity=9).probe_tokens(PROMPT[:9]) == [] != make("dapq", capacity=9).probe_tokens(PROMPT[:10])


def test_a_fork_places_its_pseudo_answer_after_the_prefix():
    _, found = course(alone(make("dapq", capacity=9)), models(), forced=(5, 6, 7))
    given = set(range(len(PROMPT), len(PROMPT) + 3))
    assert all(
        given <= head and len([p for p in head if p < len(PROMPT)]) == 9 for layer in found[-1] for head in layer
    )
