"""Cache policies with a token budget per head: which slots stay live, compared with the library's own attention, and
the bound for all of them.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, watch, write

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import Held, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Cache
from playground.trace.cache_contents import contents
from strategies.kv_cache.key_norm import KeyNorm
from strategies.kv_cache.random_keep import RandomKeep
from strategies.kv_cache.tova import Tova
from support.budget_policies import (
    BY_HAND,
    ROW_WISE,
    TEXT,
    TIGHT,
    TREE,
    HandRule,
    Seen,
    best,
    cache_positions,
    roomy,
    with_policy,
)
from support.eviction import LENGTH, PROMPT, Wrong, alone, course, live_positions, models
from support.wrong_variants import variants_of

BUDGETED = [name for name in TIGHT if "budget_respected" in make(name).guarantee]
every_policy = pytest.mark.parametrize("name, knobs", TIGHT.items(), ids=TIGHT)


ALIKE = {"window": 3, "capacity": 4, "kernel": 3}


COLLAPSES = {
    "tova": roomy("tova", size=2048),
    "key_norm": roomy("key_norm", size=2048),
    "random_keep": roomy("random_keep", size=2048),
    "pyramidkv": [
        *roomy("pyramidkv", capacity=2048),
        Collapse(with_policy(TREE, "pyramidkv", beta=1, **ALIKE), with_policy(TREE, "snapkv", **ALIKE)),
    ],
    "dapq": roomy("dapq", capacity=2048),
    "prefixkv": roomy("prefixkv", keep=1.0),
    "oracle_keep": [
        *roomy("oracle_keep", size=2048),
        Collapse(with_policy(LaneConfig("beam_search"), "oracle_keep", size=2048), LaneConfig("beam_search")),
    ],
}


# --- by hand, with the library alone ---


def least_attended_goes(size: int) -> Callable[[Seen], list[set[int]]]:
    def rule(seen):
        shared = dict(zip(seen.live[0], seen.weights[:, -1].mean(0).tolist()))
        return [best(shared, size)] * len(seen.live)
    return rule


def long_keys_go(size: int, recent: int) -> Callable[[Seen], list[set[int]]]:
    def rule(seen):
        late = {p for p in seen.live[0] if p >= seen.read - recent}
        lengths = [dict(zip(live, (keys ** 2).sum(-1).tolist())) for live, keys in zip(seen.live, seen.keys)]
        return [
            late | best({p: -length for p, length in head.items() if p not in late}, size - recent) for head in lengths
        ]

    return rule


@pytest.mark.oracle("tova")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("size", [1, 6, 13])
def test_tova_text_and_cache_equal_decoding_by_hand(architecture, size):
    expected = HandRule(architecture, least_attended_goes(size)).write(PROMPT, LENGTH)
    assert course(alone(make("tova", size=size)), models(architecture)) == expected


@pytest.mark.oracle("key_norm")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("size, recent", [(1, 0), (9, 0), (9, 4), (5, 5)])
def test_key_norm_text_and_cache_equal_decoding_by_hand(architecture, size, recent):
    expected = HandRule(architecture, long_keys_go(size, recent)).write(PROMPT, LENGTH)
    assert course(alone(make("key_norm", size=size, recent=recent)), models(architecture)) == expected


class EachHeadForItself(Tova):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.replace(layer, weights[:, -1:], key_positions)


class VotesAddUp(Tova):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights[:, -1:].sum(0, keepdim=True), key_positions)


class TheNewestIsSafe(Tova):
    def retain(self, held):
        newest = held.positions == held.next - 1
        return newest | top_slots(self.attention.of(held.layer, held.positions), self.size - 1, held.live & ~newest)


class TheWholePromptCutsItself(Tova):
    def wants_attention(self, position, prompt):
        return True

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.replace(layer, weights.sum((0, 1), keepdim=True), key_positions)


class LongKeysStay(KeyNorm):
    def retain(self, held):
        return top_slots(held.read("keys").norm(dim=-1), self.size, held.live)


class ValuesAreMeasured(KeyNorm):
    def retain(self, held):
        return top_slots(-held.read("values").norm(dim=-1), self.size, held.live)


class OneHeadIsMeasured(KeyNorm):
    def retain(self, held):
        return top_slots(-held.read("keys").norm(dim=-1)[:1], self.size, held.live)


@pytest.mark.refuses("tova", "key_norm")
@pytest.mark.parametrize(
    "wrong", [*variants_of(Tova, __name__), *variants_of(KeyNorm, __name__)], ids=lambda cls: cls.__name__
)
def test_a_wrong_selection_rule_is_detected(wrong):
    right = wrong.__base__
    rule = least_attended_goes(13) if right is Tova else long_keys_go(13, 0)
    _, expected = HandRule("llama", rule).write(PROMPT, LENGTH)
    assert course(alone(right(size=13)), models())[1] == expected
    assert course(alone(wrong(size=13)), models())[1] != expected


# --- randomness ---

def at_random(policy: RandomKeep, heads: int, length: int) -> torch.Tensor:
    """How often each position stayed live in a text that grew token by token, over all heads, [length]."""
    positions = torch.arange(policy.size)[None].expand(heads, -1)
    for next_position in range(policy.size + 1, length + 1):
        positions = torch.cat([positions, torch.full((heads, 1), next_position - 1)], 1)
        held = Held(0, 1, "keep", 0, next_position, positions, read=lambda part: torch.zeros(heads, 1, 1))
        positions = positions[policy.retain(held)].view(heads, -1)
    return torch.bincount(positions.flatten(), minlength=length)


def unevenness(kind: type[RandomKeep]) -> float:
    """Chi-square of 32 positions over 600 heads, 31 degrees of freedom, where a quarter of the text stays.

    For an even sample 31 with a deviation of 8; an unevenness of a tenth of a position's chances adds 600 * 0.25 * 0.01
    / 0.75 for each, 64 in all.
    """
    counts = sum(at_random(kind(size=8, dice=dice), 6, 32) for dice in range(100)).float()
    return float(((counts - 150) ** 2 / (150 * 0.75)).sum() * 31 / 32)


class DrawnAnewForEveryKeep(RandomKeep):
    """Older tokens have to survive more random evictions."""

    def scores(self, held):
        chance = torch.Generator().manual_seed(self.dice * 1000 + held.next)
        return torch.rand(held.positions.shape, generator=chance)


class LateOnesAreLuckier(RandomKeep):
    def scores(self, held):
        return super().scores(held) + held.positions / held.next / 4


@pytest.mark.oracle("random_keep")
def test_randomly_retained_tokens_are_a_uniform_sample_of_the_text():
    assert unevenness(RandomKeep) < 31 + 5 * 8


@pytest.mark.refuses("random_keep")
@pytest.mark.parametrize("wrong", variants_of(RandomKeep, __name__), ids=lambda cls: cls.__name__)
def test_a_biased_sample_is_detected(wrong):
    assert unevenness(wrong) > 31 + 5 * 8


def test_heads_layers_and_seeds_differ_and_a_run_is_reproducible():
    _, held = course(alone(make("random_keep", size=8)), models())
    assert len({frozenset(head) for layer in held[-1] for head in layer}) == 6
    assert course(alone(make("random_keep", size=8)), models())[1] == held
    assert course(alone(make("random_keep", size=8, dice=1)), models())[1] != held


def test_random_retention_does_not_depend_on_the_chunk_size():
    policy = make("random_keep", size=5)

    def kept(positions: list[int]) -> list[int]:
        at = Held(
            0, 1, "keep", 0, max(positions) + 1, torch.tensor([positions]), read=lambda part: torch.zeros(1, 1, 1)
        )
        return at.positions[policy.retain(at)].tolist()

    one_by_one = list(range(5))
    for position in range(5, 300):
        one_by_one = kept([*one_by_one, position])
    assert one_by_one == kept(list(range(300)))


# --- properties of all of them ---

@pytest.mark.parametrize("name, knobs", [(name, TIGHT[name]) for name in BUDGETED], ids=BUDGETED)
def test_no_layer_or_head_exceeds_the_budget_however_many_tokens_are_committed(name, knobs):
    budget = make(name, **knobs).budget
    for lane in (LaneConfig("greedy"), TREE):
        found, generated = [], 0
        for state in watch(assemble(with_policy(lane, name, **knobs)), models(), PROMPT, Limits(0, LENGTH), Draws(0)):
            if state.generated > generated:
                generated = state.generated
                found.append(live_positions(state))
                assert max(len(head) for layer in found[-1] for head in layer) <= budget(generated)
        assert max(len(head) for layer in found[0] for head in layer) < len(PROMPT), "the prompt was not cut"
        assert found[0] != found[-1], "nothing changed while the text grew"


@every_policy
def test_a_rejected_draft_token_leaves_no_trace(name, knobs):
    plain = course(alone(make(name, **knobs)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make(name, **knobs)), models()) == plain


@every_policy
def test_chunked_prefill_evicts_what_a_single_prefill_evicts(name, knobs, monkeypatch):
    whole = course(alone(make(name, **knobs)), models())
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    monkeypatch.setattr("playground.decoding.stream.forwards.CHUNK", 5)
    assert course(alone(make(name, **knobs)), models()) == whole


@every_policy
@pytest.mark.parametrize("lane", [LaneConfig("greedy"), TREE], ids=lambda lane: lane.strategy)
def test_events_report_live_and_evicted_slots_of_every_layer_and_head(name, knobs, lane):
    session = prepare(pair(), [with_policy(lane, name, **knobs)], Prompt(TEXT), Limits(max_new_tokens=12))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    held = [cache_positions(cache, live) for cache, live in zip(caches, contents(caches))]
    for (before, after), (old, new) in zip(pairwise(caches), pairwise(held)):
        readable = [head | set(range(before.length, after.length)) for head in old]
        assert all(now <= then for now, then in zip(new, readable))
        assert sum(len(then - now) for now, then in zip(new, readable)) == after.evicted
    assert held[-1] == [head for layer in live_positions(session._runners[0].lane) for head in layer]


def test_lanes_that_share_forwards_retain_what_each_retains_alone():
    configs = [with_policy(LaneConfig("greedy"), name, **knobs) for name, knobs in {**TIGHT, **ROW_WISE}.items()]

    def run(*together: LaneConfig) -> list:
        session = prepare(pair(), list(together), Prompt(TEXT), Limits(max_new_tokens=10))
        shared = sum(getattr(stamped.event, "lanes", 1) > 1 for stamped in session)
        assert bool(shared) == (len(together) > 1)
        return [(runner.lane.tokens, live_positions(runner.lane)) for runner in session._runners]

    alone = [run(config)[0] for config in configs]
    assert [run(*configs[at:at + 4]) for at in (0, 4)] == [alone[0:4], alone[4:8]]


@pytest.mark.parametrize("name, knobs", [(name, TIGHT[name]) for name in BUDGETED], ids=BUDGETED)
def test_a_model_without_attention_weights_keeps_to_the_budget(name, knobs):
    lane = write(alone(make(name, **knobs)), {"target": TableModel("abc")}, [0, 1, 2] * 5, Limits(0, 6), Draws(0))
    assert len(live_positions(lane)[0][0]) <= make(name, **knobs).budget(6)


@pytest.mark.parametrize("name, knobs, says", [
    ("key_norm", dict(size=4, recent=5), "raise size"), ("random_keep", dict(size=4, recent=5), "raise size"),
    ("dapq", dict(capacity=8, recent=9), "raise capacity"),
    ("pyramidkv", dict(window=8, capacity=8), "raise capacity above it"), ("pyramidkv", dict(kernel=4), "take 5"),
])
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(name, knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make(name, **knobs)
    assert str(refusal.value).count(".") == 1
