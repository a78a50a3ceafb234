"""Cache policies by attention scores: which positions stay live, compared with decoding by hand with the library's own
cache.
"""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tables import TableModel, write

from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.contract import make
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from support.eviction import LENGTH, alone, course, live_positions, models

# --- by hand, with the library alone ---

def test_layers_and_heads_hold_different_positions():
    """Otherwise the tests above could not tell them apart."""
    for policy in (make("h2o", heavy=5, recent=4), make("snapkv", window=3, capacity=9)):
        _, held = course(alone(policy), models())
        assert len({frozenset(head) for layer in held[-1] for head in layer}) > 3
        assert held[0] != held[-1]


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


@pytest.mark.parametrize("name, knobs", [("h2o", dict(heavy=6, recent=4)), ("snapkv", dict(window=7, capacity=12)),
                                         ("d2o", dict(first=0, last=0, heavy=0.3, sinks=0))])
def test_chunked_prefill_evicts_what_a_single_prefill_evicts(name, knobs, monkeypatch):
    whole = course(alone(make(name, **knobs)), models())
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    assert course(alone(make(name, **knobs)), models()) == whole


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
