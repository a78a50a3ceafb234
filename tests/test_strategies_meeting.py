"""Merging evicted slots into live ones: targets, rows and attention scores."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import CHUNK, RecentAttention, move_scores
from playground.algorithms.kv_cache.slot_merging import NearestSlots, merge_by_mean, merge_sizes, nearest
from playground.contract import Merge
from playground.engine.cache.kv_buffer import KVBuffer, MergedTokens, MergeMap, selected_indices
from support.slot_meetings import by_loop, slots

# --- which slots merge into which ---


def everyone(keys: Tensor) -> Tensor:
    return torch.ones(keys.shape[:2], dtype=torch.bool)


def test_similarity_of_keys_ignores_their_norms():
    keys = torch.tensor([[[1.0, 0.0], [9.0, 9.0], [0.1, 0.01], [-5.0, 0.0]]])
    alike = nearest([keys], slots([0, 1, 1, 0]).bool(), everyone(keys))
    assert alike.targets.tolist() == [[2, 1, 2, 1]]
    assert alike.cosine[0, 0] == pytest.approx(1 / math.sqrt(1.01)) and alike.cosine[0, 3] == pytest.approx(
        -math.sqrt(0.5)
    )


def test_a_zero_key_has_no_similarity_and_gives_no_nan():
    keys = torch.zeros(1, 3, 2)
    assert nearest([keys], slots([1, 1, 0]).bool(), everyone(keys)).cosine.tolist() == [[0.0, 0.0, 0.0]]


def test_a_head_without_retained_slots_has_no_similarities():
    keys = torch.ones(2, 2, 3)
    likeness = nearest([keys], slots([1, 0], [0, 0]).bool(), everyone(keys)).cosine
    assert likeness[1].tolist() == [-math.inf, -math.inf] and likeness[0, 0] == pytest.approx(1)


Nearest = Callable[[Tensor, Tensor, Tensor], NearestSlots]


def by_slot(alike: NearestSlots) -> list[dict[int, tuple[int, float]]]:
    """For each head its slots with a nearest key: its index and similarity."""
    heads = zip(*(part.tolist() for part in alike))
    return [{source: (target, cosine) for source, target, cosine in zip(*head) if cosine > -math.inf} for head in heads]


def seeks(find: Nearest, seed: int, each: int | None = None) -> bool:
    """Whether each seeker finds the key with the largest cosine, one by one, and no one else anything; no seeker in the
    first head, or `each` in all.
    """
    chance = torch.Generator().manual_seed(seed)
    keys, among, seekers = (
        torch.randn(3, 12, 5, generator=chance).double(),
        *(torch.rand(2, 3, 12, generator=chance) < 0.4),
    )
    seekers[0] = False
    if each is not None:
        seekers = torch.rand(3, 12, generator=chance).argsort(1) < each
    cosines = torch.cosine_similarity(keys[:, :, None], keys[:, None], dim=-1)
    expected = [
        {
            source: max(
                (float(cosines[head, source, target]), target) for target in among[head].nonzero()[:, 0].tolist()
            )
            for source in seekers[head].nonzero()[:, 0].tolist()
        }
        for head in range(3)
    ]
    found = by_slot(find(keys, among, seekers))
    return [{source: target for source, (target, _) in head.items()} for head in found] == [
        {source: target for source, (_, target) in head.items()} for head in expected
    ] and all(
        found[head][source][1] == pytest.approx(cosine)
        for head in range(3)
        for source, (cosine, _) in expected[head].items()
    )


def heads_of_one_layer(keys: Tensor, among: Tensor, seekers: Tensor) -> NearestSlots:
    return nearest([keys], among, seekers)


def a_head_in_each_layer(keys: Tensor, among: Tensor, seekers: Tensor) -> NearestSlots:
    return nearest(keys.split(1), among, seekers)


@pytest.mark.parametrize("each", [None, 0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("find", [heads_of_one_layer, a_head_in_each_layer])
def test_each_source_finds_its_most_similar_target(find, seed, each):
    assert seeks(find, seed, each)


def test_sources_may_be_processed_in_chunks(monkeypatch):
    monkeypatch.setattr("playground.algorithms.kv_cache.slot_merging.AT_ONCE", 2)
    assert all(seeks(heads_of_one_layer, seed) for seed in range(4))


def all_slots_are_searched(keys: Tensor, among: Tensor, seekers: Tensor) -> NearestSlots:
    return nearest([keys], among, everyone(keys))


def they_look_among_themselves(keys: Tensor, among: Tensor, seekers: Tensor) -> NearestSlots:
    return nearest([keys], among & seekers, seekers)


def places_are_taken_for_slots(keys: Tensor, among: Tensor, seekers: Tensor) -> NearestSlots:
    right = nearest([keys], among, seekers)
    return right._replace(sources=torch.arange(right.sources.shape[1]).expand_as(right.sources))


def long_keys_count_more(keys: Tensor, among: Tensor, seekers: Tensor) -> NearestSlots:
    targets = (keys @ keys.mT).masked_fill(~among[:, None], -math.inf).argmax(-1)
    right = nearest([keys], among, seekers)
    return right._replace(targets=targets.gather(1, right.sources))


@pytest.mark.parametrize("each", [None, 1])
@pytest.mark.parametrize(
    "wrong", [all_slots_are_searched, they_look_among_themselves, places_are_taken_for_slots, long_keys_count_more]
)
def test_a_wrong_similarity_search_is_detected(wrong, each):
    assert not all(seeks(wrong, seed, each) for seed in range(4))


def test_masked_slots_come_first_in_their_order():
    assert selected_indices(slots([0, 1, 0, 1], [1, 1, 0, 0]).bool()).tolist() == [[1, 3], [0, 1]]
    assert selected_indices(slots([0, 1, 0, 1], [0, 0, 1, 0]).bool()).tolist() == [[1, 3], [2, 0]]
    assert selected_indices(torch.zeros(2, 3).bool()).shape == (2, 0)


def meeting(*heads: dict[int, int], count: int = 4) -> MergeMap:
    """Evicted slots with their targets, head by head."""
    pairs = [(head, source, target) for head, into in enumerate(heads) for source, target in into.items()]
    which, sources, targets = (
        torch.tensor(column, dtype=torch.long) for column in (zip(*pairs) if pairs else ((), (), ()))
    )
    return MergeMap.of((which, sources), targets, count)


def test_sources_merge_into_their_targets():
    alike = NearestSlots(slots([1, 2], [0, 0]), slots([3, 3], [2, 2]), torch.zeros(2, 2))
    found = alike.merge_map(slots([1, 1], [1, 0]).bool(), 4)
    assert [part.tolist() for part in (*found.sources, found.into, *found.targets)] == [
        [0, 0, 1],
        [1, 2, 0],
        [0, 0, 1],
        [0, 1],
        [3, 2],
    ]
    assert alike.merge_map(torch.zeros(2, 2).bool(), 4) is None


def test_weights_of_merged_slots_sum_to_one():
    met = meeting({1: 3, 2: 3}, {0: 2})
    merge = merge_by_mean(met, torch.tensor([2.0, 4.0, 0.0]), torch.tensor([6.0, 0.0]))
    assert merge.source_weights.tolist() == [
        pytest.approx(1 / 6),
        pytest.approx(1 / 3),
        0.5,
    ] and merge.target_weights.tolist() == [
        0.5,
        0.5,
    ]
    assert merge_sizes(met).tolist() == [3, 2]


def some_meeting(chance: torch.Generator) -> Merge:
    """In each of three heads a few of twelve slots merge into others, with random weights."""
    heads = [dict(zip(order[:4], (order[4 + i] for i in torch.randint(0, 3, (4,), generator=chance).tolist())))
             for order in torch.rand(3, 12, generator=chance).argsort(1).tolist()]
    met = meeting(*heads, count=12)
    return Merge(met, *(torch.rand(count, generator=chance).double() for count in (len(met.into), len(met.targets[0]))))


def adds_up(wrong: Callable[[Merge], Merge], seed: int) -> bool:
    """Whether targets become the weighted sums of their sources, and all other rows stay exact."""
    chance = torch.Generator().manual_seed(seed)
    rows, merge = torch.randn(3, 12, 5, generator=chance).double(), some_meeting(chance)
    pool = KVBuffer()
    pool.write(0, torch.cat([rows, rows[:, :2]], 1))  # the last two are the scratch slots
    pool.merge(*wrong(merge))
    untouched = torch.ones(3, 12, dtype=torch.bool)
    untouched[merge.merge_map.targets] = False
    stays = torch.equal(pool.read(12)[untouched], rows[untouched]) and torch.equal(pool.read(14)[:, 12:], rows[:, :2])
    return stays and bool((pool.read(12) - by_loop(rows, merge)).abs().max() < 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_merged_rows_are_weighted_sums_and_others_stay_exact(seed):
    assert adds_up(lambda merge: merge, seed)


def who_takes_them_in_is_forgotten(merge: Merge) -> Merge:
    return merge._replace(target_weights=torch.zeros_like(merge.target_weights))


def shares_are_forgotten(merge: Merge) -> Merge:
    return merge._replace(source_weights=torch.ones_like(merge.source_weights))


def sums_go_to_another_head(merge: Merge) -> Merge:
    heads, into = merge.merge_map.targets
    return merge._replace(merge_map=merge.merge_map._replace(targets=((heads + 1) % 3, into)))


def all_go_into_the_first(merge: Merge) -> Merge:
    return merge._replace(merge_map=merge.merge_map._replace(into=torch.zeros_like(merge.merge_map.into)))


@pytest.mark.parametrize(
    "wrong", [who_takes_them_in_is_forgotten, shares_are_forgotten, sums_go_to_another_head, all_go_into_the_first]
)
def test_a_wrong_weighted_sum_is_detected(wrong):
    assert not any(adds_up(wrong, seed) for seed in range(4))


def test_half_precision_is_accumulated_in_float32():
    pool = KVBuffer()
    pool.write(0, torch.tensor([[[2048.0]] + [[1.0]] * 8]).half())
    pool.merge(meeting(dict.fromkeys(range(1, 9), 0), count=9), torch.ones(8), torch.ones(1))
    assert pool.read(1).item() == 2056 and pool.rows.dtype == torch.half


# --- attention scores of merged slots ---

def test_attention_scores_of_a_merged_token_go_to_its_target():
    votes = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
    found = move_scores(votes, MergedTokens(*slots([0, 1], [0, 1], [3, 2])))
    assert found.tolist() == [[0, 2, 4, 9], [1, 0, 6, 8]]


def test_attention_scores_of_several_rows_move_like_those_of_each():
    votes, chance = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    moving = MergedTokens(
        slots([0, 0, 0, 1, 1])[0], slots([0, 2, 5, 1, 4])[0], torch.randint(0, 6, (5,), generator=chance)
    )
    together = move_scores(votes, moving)
    assert torch.equal(together, torch.stack([move_scores(votes[:, row], moving) for row in range(3)], 1))
    assert not torch.equal(together, votes) and torch.allclose(together.sum(-1), votes.sum(-1))


def test_only_the_latest_rows_are_stored():
    lately = RecentAttention(2)
    lately.add(0, torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]]), torch.tensor([[0, 1, 2]]))
    assert lately.of(0, torch.tensor([[0, 1, 2, 3]])).tolist() == [pytest.approx([0.35, 0.35, 0.3, 0.0])]
    lately.add(0, torch.tensor([[[0.0, 0.4, 0.0, 0.6]]]), torch.tensor([[0, 2, -1, 3]]))
    assert lately.of(0, torch.tensor([[0, 2, -1, 3]])).tolist() == [pytest.approx([0.1, 0.5, 0.0, 0.3])]
    lately.move(0, MergedTokens(*slots([0], [0], [3])))
    assert lately.of(0, torch.tensor([[0, 2, 3]])).tolist() == [pytest.approx([0.0, 0.5, 0.4])]
    assert lately.of(1, torch.tensor([[0]])).tolist() == [[0.0]]


def test_attention_of_the_latest_rows_equals_a_table_of_all_positions():
    """Heads that lose unlike tokens, one after the other, and votes that move on; compared with one table for all
    positions.
    """
    chance, heads, count, length = torch.Generator().manual_seed(0), 3, 4, 2 * CHUNK + 20
    lately, table, slots = RecentAttention(count), torch.zeros(heads, 0, length), torch.arange(6).expand(heads, -1)
    for position in range(6, length):
        slots = torch.cat([slots, torch.full((heads, 1), position)], 1)
        weights = torch.rand(heads, 1, slots.shape[1], generator=chance).masked_fill(slots[:, None] < 0, 0)
        lately.add(0, weights, slots)
        row = torch.zeros(heads, 1, length).scatter_add_(2, slots.clamp(min=0)[:, None], weights)
        table = torch.cat([table, row], 1)[:, -count:]
        loses = torch.stack(
            [
                (head >= 0).nonzero()[:, 0][torch.randint(int((head >= 0).sum()), (1,), generator=chance)]
                for head in slots
            ]
        )
        gone = slots.gather(1, loses)
        moving = MergedTokens(torch.arange(heads), gone[:, 0], slots.amax(1))
        lately.move(0, moving)
        table, slots = move_scores(table, moving), slots.scatter(1, loses, -1)
        if position % 3 == 0:  # holes are closed from time to time; in between, slots are empty
            order = (slots < 0).byte().argsort(dim=1, stable=True)[:, :int((slots >= 0).sum(1).max())]
            slots = slots.gather(1, order)
        there = slots >= 0
        expected = table.mean(1).gather(1, slots.clamp(min=0))
        assert torch.allclose(lately.of(0, slots)[there], expected[there]), position
        # and so much memory it takes, however long the text is
        assert lately._layers[0].weights.shape[2] <= slots.shape[1] + 2 * CHUNK


def test_recorded_attention_shrinks_with_the_cache():
    lately, slots = RecentAttention(4), torch.arange(1000).expand(3, -1)
    lately.add(0, torch.ones(3, 4, 1000), slots)
    left = torch.cat([slots[:, 5:900:100], torch.full((3, 1), 1000 + 2 * CHUNK)], 1)
    lately.add(0, torch.zeros(3, 1, left.shape[1]), left)
    assert lately._layers[0].weights.shape == (3, 4, left.shape[1] + CHUNK)
    assert lately.of(0, left)[0].tolist() == [0.75] * 9 + [0.0]
