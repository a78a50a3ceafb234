"""What is evicted may meet what stays: which tokens meet in which, what becomes of their rows, and where their votes go."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from playground.engine.pool import Meeting, Pool, in_front
from playground.parts.merging import averaged, company, nearest, targets
from playground.parts.votes import STRETCH, Lately, Moving, moved

# --- what meets in what ---

def slots(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_the_most_similar_key_points_the_same_way_however_long_it_is():
    keys = torch.tensor([[[1.0, 0.0], [9.0, 9.0], [0.1, 0.01], [-5.0, 0.0]]])
    likeness, slot = nearest(keys, slots([0, 1, 1, 0]).bool())
    assert slot.tolist() == [[2, 1, 2, 1]]
    assert likeness[0, 0] == pytest.approx(1 / math.sqrt(1.01)) and likeness[0, 3] == pytest.approx(-math.sqrt(0.5))


def test_a_key_of_length_zero_is_like_nothing_and_no_number_is_lost():
    likeness, _ = nearest(torch.zeros(1, 3, 2), slots([1, 1, 0]).bool())
    assert likeness.tolist() == [[0.0, 0.0, 0.0]]


def test_nothing_is_like_a_head_that_keeps_nothing():
    likeness, _ = nearest(torch.ones(2, 2, 3), slots([1, 0], [0, 0]).bool())
    assert likeness[1].tolist() == [-math.inf, -math.inf] and likeness[0, 0] == pytest.approx(1)


Nearest = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def seeks_alone(find: Nearest, seed: int, each: int | None = None) -> bool:
    """Whether seekers find what they would if all slots sought, and the others nothing; no seeker in the first head, or `each` of them in all heads."""
    chance = torch.Generator().manual_seed(seed)
    keys, among, seekers = torch.randn(3, 12, 5, generator=chance).double(), *(torch.rand(2, 3, 12, generator=chance) < 0.4)
    seekers[0] = False
    if each is not None:
        seekers = torch.rand(3, 12, generator=chance).argsort(1) < each
    (likeness, slot), (expected, expected_slot) = find(keys, among, seekers), nearest(keys, among)
    found = torch.equal(slot[seekers], expected_slot[seekers]) and torch.allclose(likeness[seekers], expected[seekers], rtol=0, atol=1e-12)
    return found and bool((likeness[~seekers] == -math.inf).all())


@pytest.mark.parametrize("each", [None, 0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_those_that_seek_find_what_they_would_if_all_did_and_the_others_nothing(seed, each):
    assert seeks_alone(nearest, seed, each)


def all_are_told(keys: Tensor, among: Tensor, seekers: Tensor) -> tuple[Tensor, Tensor]:
    return nearest(keys, among)


def they_look_among_themselves(keys: Tensor, among: Tensor, seekers: Tensor) -> tuple[Tensor, Tensor]:
    return nearest(keys, among & seekers, seekers)


def answers_stay_in_the_order_of_the_seekers(keys: Tensor, among: Tensor, seekers: Tensor) -> tuple[Tensor, Tensor]:
    first = seekers.int().argsort(dim=1, descending=True, stable=True)
    likeness, slot = nearest(keys, among, seekers)
    return torch.where(seekers, likeness.gather(1, first), -math.inf), slot.gather(1, first)


@pytest.mark.parametrize("each", [None, 1])
@pytest.mark.parametrize("wrong", [all_are_told, they_look_among_themselves, answers_stay_in_the_order_of_the_seekers])
def test_a_wrong_search_for_those_that_seek_is_found_out(wrong, each):
    assert not all(seeks_alone(wrong, seed, each) for seed in range(4))


def test_slots_of_a_mask_come_in_front_in_their_order():
    assert in_front(slots([0, 1, 0, 1], [1, 1, 0, 0]).bool()).tolist() == [[1, 3], [0, 1]]
    assert in_front(slots([0, 1, 0, 1], [0, 0, 1, 0]).bool()).tolist() == [[1, 3], [2, 0]]
    assert in_front(torch.zeros(2, 3).bool()).shape == (2, 0)


def test_shares_of_what_meets_add_up_to_one():
    into = targets(slots([0, 1, 1, 0], [1, 0, 0, 0]).bool(), slots([3, 3, 0, 0], [2, 2, 2, 2]))
    assert into.tolist() == [[0, 3, 0, 3], [2, 1, 2, 3]]
    merge = averaged(into, torch.tensor([[1.0, 2.0, 3.0, 6.0], [1.0, 1.0, 0.0, 5.0]]))
    assert merge.share.tolist() == [[0.25, 0.25, 0.75, 0.75], [1.0, 1.0, pytest.approx(0), 1.0]]
    assert company(into).tolist() == [[2, 0, 0, 2], [0, 1, 2, 1]]


def by_loop(rows: Tensor, into: Tensor, share: Tensor) -> Tensor:
    """Merged rows, a number at a time; those to which nothing is added are left."""
    made = rows.clone()
    for head, heading in enumerate(into.tolist()):
        for slot in {target for source, target in enumerate(heading) if target != source}:
            made[head, slot] = sum(share[head, i] * rows[head, i] for i, target in enumerate(heading) if target == slot)
    return made


def adds_up(meet: Callable[[Tensor, Tensor], Meeting], seed: int) -> bool:
    """Whether rows become the sums of what meets in them, and all others stay bit for bit."""
    chance = torch.Generator().manual_seed(seed)
    rows, share = torch.randn(3, 12, 5, generator=chance).double(), torch.rand(3, 12, generator=chance).double()
    into = targets(torch.rand(3, 12, generator=chance) < 0.3, torch.randint(0, 12, (3, 12), generator=chance))
    pool = Pool()
    pool.write(0, torch.cat([rows, rows[:, :2]], 1))  # the last two stand for the scratch
    pool.merge(meet(into, share))
    expected = by_loop(rows, into, share)
    untouched = company(targets(into != torch.arange(12), into)) == (into == torch.arange(12)).long()
    assert untouched.any() and not untouched.all()
    stays = torch.equal(pool.read(12)[untouched], rows[untouched]) and torch.equal(pool.read(14)[:, 12:], rows[:, :2])
    return stays and bool((pool.read(12) - expected).abs().max() < 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_added_by_their_shares_and_all_others_stay_bit_for_bit(seed):
    assert adds_up(Meeting.of, seed)


def every_row_is_weighed(into: Tensor, share: Tensor) -> Meeting:
    """Those to which nothing is added lose what is not their share."""
    everywhere = torch.ones_like(into, dtype=torch.bool).nonzero().unbind(1)
    return Meeting(everywhere, share.reshape(-1, 1), (into + into.shape[1] * torch.arange(len(into))[:, None]).flatten(), everywhere)


def who_receives_is_forgotten(into: Tensor, share: Tensor) -> Meeting:
    right = Meeting.of(into, share)
    come = (into != torch.arange(into.shape[1]))[right.sources]
    return Meeting(tuple(place[come] for place in right.sources), right.share[come], right.sums[come], right.targets)


def shares_are_forgotten(into: Tensor, share: Tensor) -> Meeting:
    right = Meeting.of(into, share)
    return replace(right, share=torch.ones_like(right.share))


def sums_go_to_another_head(into: Tensor, share: Tensor) -> Meeting:
    right = Meeting.of(into, share)
    return replace(right, targets=((right.targets[0] + 1) % len(into), right.targets[1]))


@pytest.mark.parametrize("wrong", [every_row_is_weighed, who_receives_is_forgotten, shares_are_forgotten, sums_go_to_another_head])
def test_a_wrong_sum_of_what_meets_is_found_out(wrong):
    assert not any(adds_up(wrong, seed) for seed in range(4))


def test_short_numbers_are_added_in_longer_ones():
    pool = Pool()
    pool.write(0, torch.tensor([[[2048.0]] + [[1.0]] * 8]).half())
    pool.merge(Meeting.of(torch.zeros(1, 9, dtype=torch.long), torch.ones(1, 9)))
    assert pool.read(1).item() == 2056 and pool.rows.dtype == torch.half


# --- votes that move on ---

def test_votes_of_a_merged_token_count_for_the_one_it_is_merged_into():
    votes = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
    found = moved(votes, Moving.of(torch.tensor([[0, 1, 3], [1, 2, -1]]), torch.tensor([[3, 1, 3], [2, 2, -1]])))
    assert found.tolist() == [[0, 2, 4, 9], [1, 0, 6, 8]]


def test_votes_of_several_rows_move_as_those_of_each_do():
    votes, chance = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    sources, targets_ = torch.tensor([[0, 2, 5], [1, 4, -1]]), torch.randint(0, 6, (2, 3), generator=chance)
    moving = Moving.of(sources, targets_)
    together = moved(votes, moving)
    assert torch.equal(together, torch.stack([moved(votes[:, row], moving) for row in range(3)], 1))
    assert not torch.equal(together, votes) and torch.allclose(together.sum(-1), votes.sum(-1))


def test_the_latest_rows_are_remembered_and_no_more():
    lately = Lately(2)
    lately.add(0, torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]]), torch.tensor([[0, 1, 2]]))
    assert lately.of(0, torch.tensor([[0, 1, 2, 3]])).tolist() == [pytest.approx([0.35, 0.35, 0.3, 0.0])]
    lately.add(0, torch.tensor([[[0.0, 0.4, 9.0, 0.6]]]), torch.tensor([[0, 2, -1, 3]]))
    assert lately.of(0, torch.tensor([[0, 2, -1, 3]])).tolist() == [pytest.approx([0.1, 0.5, 0.0, 0.3])]
    lately.move(0, Moving.of(torch.tensor([[0]]), torch.tensor([[3]])))
    assert lately.of(0, torch.tensor([[0, 2, 3]])).tolist() == [pytest.approx([0.0, 0.5, 0.4])]
    assert lately.of(1, torch.tensor([[0]])).tolist() == [[0.0]]


def test_what_the_latest_rows_saw_is_what_a_table_of_all_positions_would_say():
    """Heads that lose unlike tokens, one after the other, and votes that move on; held against one table for all positions."""
    chance, heads, count, length = torch.Generator().manual_seed(0), 3, 4, 2 * STRETCH + 20
    lately, table, slots = Lately(count), torch.zeros(heads, 0, length), torch.arange(6).expand(heads, -1)
    for position in range(6, length):
        slots = torch.cat([slots, torch.full((heads, 1), position)], 1)
        weights = torch.rand(heads, 1, slots.shape[1], generator=chance)
        lately.add(0, weights, slots)
        row = torch.zeros(heads, 1, length).scatter_add_(2, slots.clamp(min=0)[:, None], weights.masked_fill(slots[:, None] < 0, 0))
        table = torch.cat([table, row], 1)[:, -count:]
        loses = torch.stack([(head >= 0).nonzero()[:, 0][torch.randint(int((head >= 0).sum()), (1,), generator=chance)] for head in slots])
        gone = slots.gather(1, loses)
        moving = Moving.of(gone, slots.amax(1, keepdim=True))
        lately.move(0, moving)
        table, slots = moved(table, moving), slots.scatter(1, loses, -1)
        if position % 3 == 0:  # the holes are closed now and then; in between slots stand empty
            order = (slots < 0).byte().argsort(dim=1, stable=True)[:, :int((slots >= 0).sum(1).max())]
            slots = slots.gather(1, order)
        there = slots >= 0
        expected = table.mean(1).gather(1, slots.clamp(min=0))
        assert torch.allclose(lately.of(0, slots)[there], expected[there]), position
        assert lately._layers[0].weights.shape[2] <= slots.shape[1] + 2 * STRETCH  # and so much memory it takes, however long the text is


def test_once_a_cache_is_cut_what_was_heard_takes_no_more_memory_than_what_is_left():
    lately, slots = Lately(4), torch.arange(1000).expand(3, -1)
    lately.add(0, torch.ones(3, 4, 1000), slots)
    left = torch.cat([slots[:, 5:900:100], torch.full((3, 1), 1000 + 2 * STRETCH)], 1)
    lately.add(0, torch.zeros(3, 1, left.shape[1]), left)
    assert lately._layers[0].weights.shape == (3, 4, left.shape[1] + STRETCH)
    assert lately.of(0, left)[0].tolist() == [0.75] * 9 + [0.0]
