"""CaM: the values that kvpress leaves behind, a run by hand with the library, chances, and wrong variants."""
from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from registry import Collapse

from playground.algorithms.kv_cache.drawn_numbers import DrawnNumbers
from playground.contract import Held, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from strategies.kv_cache.cam import Following, merge_chance, with_added_values
from support.budget_policies import TREE, Seen, best, roomy, with_policy
from support.eviction import alone, course, models
from support.kvpress_scores import HEADS, OUT, ROOM, SPREADS, TOKENS, WIDTH, received, states, uniform
from support.merging_policies import BY_HAND, room, room_by_hand, the_same
from support.wrong_variants import variants_of

CaM = find("cam")
SMALL = {"heavy": 5, "recent": 4}
TIGHT = {**SMALL, "spread": 3}
COLLAPSES = {
    "cam": roomy("cam", heavy=1024, recent=1024) + [
        Collapse(with_policy(plain, "cam", coin="never", **SMALL), with_policy(plain, "h2o", **SMALL))
        for plain in (LaneConfig("greedy"), TREE)
    ]
}
REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))["cam"]


def kept_and_gone() -> tuple[torch.Tensor, torch.Tensor]:
    stays = torch.zeros(HEADS, TOKENS, dtype=torch.bool).scatter(1, received().topk(ROOM).indices, True)
    return stays, ~stays


# --- the library's values ---


@pytest.mark.oracle("cam")
@pytest.mark.parametrize("spread", SPREADS)
def test_values_of_the_tokens_that_stay_are_those_of_kvpress(spread):
    stays, goes = kept_and_gone()
    after = Following.of(stays, goes, spread)
    coins = uniform().gather(1, after.sources) < merge_chance(received(), after)
    found = with_added_values(states("values"), coins, after)[stays].view(HEADS, ROOM, WIDTH)
    assert 0 < coins.sum() < coins.numel()
    assert torch.allclose(found, torch.tensor(REFERENCE[str(spread)]), atol=2e-6)


# --- by hand, with the library alone ---


@dataclass
class CaMByHand:
    """The paper's step for one head and one evicted token; the coins are the policy's."""

    heavy: int = 5
    recent: int = 4
    spread: int = 3
    votes: dict = field(default_factory=dict)
    hand: object = None

    def __call__(self, seen: Seen) -> list[set[int]]:
        cast = seen.weights.unflatten(0, (len(seen.live), -1)).sum((1, 2)).tolist()
        return [self._head(seen, head, cast[head]) for head in range(len(seen.live))]

    def _head(self, seen: Seen, head: int, cast: list[float]) -> set[int]:
        live, votes = seen.live[head], self.votes.setdefault((seen.layer, head), {})
        for position, vote in zip(live, cast):
            votes[position] = votes.get(position, 0.0) + vote
        late = {p for p in live if p >= seen.read - self.recent}
        stays = late | best({p: votes[p] for p in live if p not in late}, self.heavy)
        gone = [p for p in live if p not in stays]
        for position in gone if len(gone) == 1 else []:  # the prompt's many are evicted without a trace
            self._add(seen, head, position, sorted(p for p in stays if p > position)[:self.spread])
        return stays

    def _add(self, seen: Seen, head: int, position: int, after: list[int]) -> None:
        values, place = self.hand.cache.layers[seen.layer].values[0][head], seen.live[head].index
        votes = self.votes[seen.layer, head]
        chance = min(1.0, votes[position] * len(after) / sum(votes[p] for p in after))
        if coin(seen.layer, len(seen.live), head, position) < chance:
            for p in after:
                values[place(p)] += values[place(position)] / len(after)


def coin(layer: int, heads: int, head: int, position: int) -> float:
    """The random number of a token."""
    slots = Held(layer, 3, "keep", 0, 100, torch.arange(100)[None], read=None)
    return float(DrawnNumbers(0).of(slots, heads)[head, position])


def check(cls: type, architecture: str = "llama") -> None:
    by_hand = room_by_hand(architecture, CaMByHand())
    assert the_same(room(alone(cls(**TIGHT)), architecture), by_hand)


@pytest.mark.oracle("cam")
@pytest.mark.parametrize("architecture", BY_HAND)
def test_text_keys_and_values_equal_those_by_hand(architecture):
    check(CaM, architecture)


class BeforeIt(CaM):
    """Wrong: the tokens before the evicted one get its value."""

    def evicting(self, held, stays):
        def first(kept, gone, right):
            return (kept[:, None] < gone[..., None]).sum(-1) - self.spread

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "searchsorted", first)
            super().evicting(held, stays)


class Undivided(CaM):
    """Wrong: each of the next tokens gets the whole value."""

    def evicting(self, held, stays):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Following, "counts", property(lambda after: torch.ones_like(after.exist.sum(-1))))
            super().evicting(held, stays)


class FromThePromptToo(CaM):
    def evicting(self, held, stays):
        held.__dict__["prompt"] = 0
        super().evicting(held, stays)


class KeysToo(CaM):
    def evicting(self, held, stays):
        super().evicting(held, stays)
        held.write("keys", held.read("keys") * 1.001)


class NoCoin(CaM):
    def evicting(self, held, stays):
        self.coin = "always"
        super().evicting(held, stays)


@pytest.mark.refuses("cam")
@pytest.mark.parametrize("wrong", variants_of(CaM, __name__), ids=lambda cls: cls.__name__)
def test_other_merges_are_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


# --- coins ---


def test_the_average_over_coins_adds_each_value_by_its_chance():
    """400 coins for each of 3 x 17 tokens: means within 5 of their deviations, at most 0.025 each."""
    stays, goes = kept_and_gone()
    after = Following.of(stays, goes, 4)
    chance = merge_chance(received(), after)
    draws = torch.rand(400, *chance.shape, generator=torch.Generator().manual_seed(0)) < chance
    ours = torch.stack([with_added_values(torch.ones(HEADS, TOKENS, 1), each, after) for each in draws]).mean(0)
    expected = with_added_values(torch.ones(HEADS, TOKENS, 1, dtype=torch.float64), chance, after)
    assert torch.allclose(ours.double()[stays], expected[stays], atol=5 * 0.025 * 2)
    assert torch.allclose(expected[stays].sum(), HEADS * ROOM + (chance * after.exist.any(-1)).sum().double())


def test_a_token_that_nothing_attended_to_is_never_merged_and_a_strong_one_always():
    stays, goes = torch.tensor([[1, 0, 0, 1, 1]]).bool(), torch.tensor([[0, 1, 1, 0, 0]]).bool()
    after = Following.of(stays, goes, 2)
    assert after.targets.tolist() == [[[3, 4], [3, 4]]] and after.exist.all()
    assert merge_chance(torch.tensor([[1.0, 0.0, 9.0, 1.0, 2.0]]), after).tolist() == [[0.0, 1.0]]


def test_drafts_do_not_change_the_text():
    decoder = make("speculative", drafter="prompt_lookup", verifier="greedy_match")
    drafted = course(Assembly(decoder, cache_policy=CaM(**TIGHT)), models())
    assert drafted[0] == course(alone(CaM(**TIGHT)), models())[0]


def test_no_token_at_all_is_refused():
    with pytest.raises(Refusal, match="raise one of them"):
        make("cam", heavy=0, recent=0)
