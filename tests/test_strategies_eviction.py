"""Cache policies by attention scores: which positions stay live, compared with decoding by hand with the library's own
cache.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pairs import pair
from registry import unchanged_by
from tables import TableModel, write

from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.contract import make
from playground.contract.lane_config import Assembly, LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Cache
from playground.trace.cache_contents import contents
from strategies.kv_cache.h2o import H2O
from strategies.kv_cache.snapkv import SnapKV
from support.eviction import (
    LENGTH,
    PROMPT,
    ByHand,
    Rule,
    Wrong,
    alone,
    course,
    heavy_hitters,
    live_positions,
    models,
    stays,
)
from support.wrong_variants import variants_of

COLLAPSES = {
    "h2o": unchanged_by("h2o", heavy=0, recent=1024) + unchanged_by("h2o", heavy=1024, recent=0),
    "snapkv": unchanged_by("snapkv", capacity=2048),
}
BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")


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


@pytest.mark.oracle("h2o")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("heavy, recent", [(5, 4), (8, 0), (3, 9), (0, 6)])
def test_h2o_text_and_cache_equal_decoding_by_hand(architecture, heavy, recent):
    expected = ByHand(architecture, heavy_hitters(heavy, recent)).write(PROMPT, LENGTH)
    assert course(alone(make("h2o", heavy=heavy, recent=recent)), models(architecture)) == expected
    assert all(len(head) == heavy + recent for held in expected[1] for layer in held for head in layer)


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


def test_layers_and_heads_hold_different_positions():
    """Otherwise the tests above could not tell them apart."""
    for policy in (make("h2o", heavy=5, recent=4), make("snapkv", window=3, capacity=9)):
        _, held = course(alone(policy), models())
        assert len({frozenset(head) for layer in held[-1] for head in layer}) > 3
        assert held[0] != held[-1]


# --- wrong variants ---

class OnlyTheLastRowVotes(H2O):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention._layers.pop(layer, None)
        self.attention.add(layer, weights[:, -1:], key_positions)


class ThePromptHasNoVote(H2O):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights if len(query_positions) == 1 else weights[:, :0], key_positions)


class VotesAreMeans(H2O):
    def retain(self, held):
        recent = held.positions >= held.next - self.recent
        means = self.attention.of(held.layer, held.positions) / (held.next - held.positions)
        return recent | top_slots(means, self.heavy, held.live & ~recent)


class OneHeadSpeaksForAll(H2O):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights[:1].expand_as(weights), key_positions)


class RecentTokensTakePlacesOfHeavyOnes(H2O):
    def retain(self, held):
        return (held.positions >= held.next - self.recent) | top_slots(
            self.attention.of(held.layer, held.positions), self.heavy, held.live
        )


class PositionsAreSlots(H2O):
    """Counts by slot index, which changes when an earlier slot is evicted."""

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, torch.arange(key_positions.shape[1])[None])

    def retain(self, held):
        recent = held.positions >= held.next - self.recent
        return recent | top_slots(
            self.attention.of(held.layer, torch.arange(held.positions.shape[1])[None]), self.heavy, held.live & ~recent
        )


@pytest.mark.refuses("h2o")
@pytest.mark.parametrize("wrong", variants_of(H2O, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_attention_score_is_detected(wrong):
    _, expected = ByHand("llama", heavy_hitters(12, 7)).write(PROMPT, LENGTH)
    assert course(alone(H2O(heavy=12, recent=7)), models())[1] == expected
    assert course(alone(wrong(heavy=12, recent=7)), models())[1] != expected


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


def test_attention_scores_accumulate_over_rows_and_follow_their_positions():
    votes = AttentionScores()
    votes.add(0, torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]]), torch.tensor([[0, 1, 2]]))
    votes.add(0, torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[0, 2, 3]]))
    assert votes.of(0, torch.tensor([[0, 1, 2, 3, 4]])).tolist() == [[1.25, 0.75, 0.75, 0.25, 0.0]]
    assert votes.of(1, torch.tensor([[0, 1]])).tolist() == [[0.0, 0.0]]


def test_an_empty_slot_adds_no_attention_to_the_first_token():
    votes = AttentionScores()
    votes.add(0, torch.tensor([[[1, 1, 0]], [[1, 1, 1]]]), torch.tensor([[0, 4, -1], [1, 2, 4]]))
    assert votes.of(0, torch.arange(5)[None]).tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 1]]
    assert votes.of(0, torch.tensor([[4, 0], [4, 1]])).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "scores, count, among, kept",
    [
        ([3, 1, 2, 0], 2, [1, 1, 1, 1], [0, 2]),
        ([1, 1, 1, 1], 2, [1, 1, 1, 1], [2, 3]),
        ([2, 1, 1, 0], 2, [1, 1, 1, 1], [0, 2]),
        ([3, 1, 2, 0], 2, [0, 1, 0, 1], [1, 3]),
        ([3, 1, 2, 0], 3, [0, 1, 0, 0], [1]),
        ([3, 1], 0, [1, 1], []),
        ([3, 1], 9, [1, 1], [0, 1]),
    ],
)
def test_of_equal_scores_the_later_position_is_kept(scores, count, among, kept):
    found = top_slots(torch.tensor([scores], dtype=torch.float32), count, torch.tensor([among], dtype=torch.bool))
    assert found[0].nonzero().flatten().tolist() == kept


def keeps_the_best(choose: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor], seed: int) -> bool:
    """Whether the top k of rows with many ties equals sorting by score and position, for any k."""
    chance = torch.Generator().manual_seed(seed)
    scores, among = torch.randint(0, 3, (4, 7), generator=chance).float(), torch.rand(4, 7, generator=chance) < 0.7
    rooms = [(scores, count, among) for count in range(8)]
    ranked = [
        sorted(there.nonzero().flatten().tolist(), key=lambda place: (float(row[place]), place))
        for row, there in zip(scores, among)
    ]
    return all(
        [row.nonzero().flatten().tolist() for row in choose(*room)]
        == [sorted(order[max(0, len(order) - room[1]) :]) for order in ranked]
        for room in rooms
    )


@pytest.mark.parametrize("seed", range(5))
def test_however_many_slots_exceed_the_budget_the_best_and_latest_stay(seed):
    assert keeps_the_best(top_slots, seed)


def the_latest_of_equals_goes(scores: torch.Tensor, count: int, among: torch.Tensor) -> torch.Tensor:
    return top_slots(scores.flip(1), count, among.flip(1)).flip(1)


def those_outside_are_weighed_too(scores: torch.Tensor, count: int, among: torch.Tensor) -> torch.Tensor:
    return top_slots(scores, count, torch.ones_like(among)) & among


def every_row_loses_one(scores: torch.Tensor, count: int, among: torch.Tensor) -> torch.Tensor:
    return top_slots(scores, among.sum(1) - 1, among)


@pytest.mark.parametrize("wrong", [the_latest_of_equals_goes, those_outside_are_weighed_too, every_row_loses_one])
def test_a_wrong_top_k_selection_is_detected(wrong):
    assert not any(keeps_the_best(wrong, seed) for seed in range(5))


def test_heads_with_separate_budgets_retain_what_each_would_alone():
    scores = torch.randint(0, 4, (5, 9), generator=torch.Generator().manual_seed(0)).float()  # many are equal
    counts, among = torch.tensor([0, 2, 5, 9, 12]), scores < 3
    found = top_slots(scores, counts, among)
    assert torch.equal(
        found, torch.cat([top_slots(scores[[i]], int(count), among[[i]]) for i, count in enumerate(counts)])
    )
    assert found.sum(1).tolist() == [min(int(count), int(there)) for count, there in zip(counts, among.sum(1))]


def test_h2o_retains_heavy_hitters_of_each_head_and_recent_tokens():
    policy = make("h2o", heavy=2, recent=2)
    policy.observe_attention(
        0, torch.tensor([[[4, 1, 2, 3, 9, 9]], [[1, 2, 2, 2, 9, 9]]]).float(), torch.tensor([5]), torch.arange(6)[None]
    )
    assert stays(policy, [[0, 1, 2, 3, 4, 5]], 6) == [[0, 3, 4, 5], [2, 3, 4, 5]]
    assert stays(policy, [[0, 3, 4, 5, 6], [2, 3, 4, 5, 6]], 7) == [[0, 4, 5, 6], [3, 4, 5, 6]]


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

@pytest.mark.parametrize("recent", [1, 5])
@pytest.mark.parametrize(
    "speakers",
    [models(), {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}],
    ids=["network", "table"],
)
def test_h2o_without_heavy_hitters_is_a_window_that_includes_the_current_row(recent, speakers):
    prompt = [i * i % 5 for i in range(20)]
    ours = course(alone(make("h2o", heavy=0, recent=recent)), speakers, prompt=prompt)
    window = course(alone(make("sink_window", sinks=0, window=recent + 1)), speakers, prompt=prompt)
    assert ours == window
    assert ours[1][-1][0][0] == set(range(20 + LENGTH - 1 - recent, 20 + LENGTH - 1))


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


@pytest.mark.parametrize("name, knobs", [("h2o", dict(heavy=6, recent=4)), ("snapkv", dict(window=7, capacity=12)),
                                         ("d2o", dict(first=0, last=0, heavy=0.3, sinks=0))])
def test_chunked_prefill_evicts_what_a_single_prefill_evicts(name, knobs, monkeypatch):
    whole = course(alone(make(name, **knobs)), models())
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    assert course(alone(make(name, **knobs)), models()) == whole


@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_events_report_evicted_slots_and_memory_decreases(decoder):
    config = LaneConfig(decoder, {}, [("h2o", {"heavy": 5, "recent": 3})])
    session = prepare(
        pair(), [config], Prompt("The green bird sings, and the red fox listens."), Limits(max_new_tokens=12)
    )
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    store = session._runners[0].lane.target.store
    whole = len(session.headers[0].prompt_ids) * store.depth * store.heads
    assert caches[0].evicted == whole - 8 * store.depth * store.heads
    # 8 slots of 8 numbers of 8 bytes
    assert {cache.bytes for cache in caches} == {2 * store.depth * store.heads * 8 * 8 * 8}
    live = list(contents(caches))
    assert all(sum(stop - start for start, stop in head) == 8 for held in live for layer in held for head in layer)
    assert len(live[-1]) == store.depth and len(live[-1][0]) == store.heads


def test_a_rejected_draft_token_adds_no_attention_score():
    """Speculation with rejected drafts retains what plain decoding retains, whatever the draft tokens attended to."""
    plain = course(alone(make("h2o", heavy=5, recent=4)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make("h2o", heavy=5, recent=4)), models()) == plain


@pytest.mark.parametrize(
    "name, knobs, says",
    [
        ("h2o", dict(heavy=0, recent=0), "raise one of them"),
        ("snapkv", dict(window=8, capacity=8), "raise capacity above it"),
        ("snapkv", dict(kernel=4), "take 5"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(name, knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make(name, **knobs)
    assert str(refusal.value).count(".") == 1


def test_a_model_without_attention_weights_keeps_to_the_budget():
    for name, knobs in (("h2o", dict(heavy=3, recent=2)), ("snapkv", dict(window=2, capacity=5))):
        lane = write(alone(make(name, **knobs)), {"target": TableModel("abc")}, [0, 1, 2] * 5, Limits(0, 6), Draws(0))
        assert len(live_positions(lane)[0][0]) <= make(name, **knobs).budget(6)
