"""D2O: eviction that merges, with budgets by layer, compared with an independent implementation on the library's cache.
"""
from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from pairs import pair
from tables import write

from playground.algorithms.kv_cache.slot_merging import merge_by_mean, nearest
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.cache.kv_buffer import MergedTokens, MergeMap
from playground.events import Cache, Figure
from playground.trace import check
from playground.trace.cache_contents import contents
from strategies.kv_cache.d2o import D2O, budget_shares, unevenness
from support.budget_policies import TEXT, TREE, HandRule, Seen, best, roomy, with_policy
from support.eviction import LENGTH, PROMPT, ByHand, alone, course, heavy_hitters, models
from support.merging_policies import (
    ALL_LAYERS,
    BY_HAND,
    D2O_TIGHT,
    alike_in_weight,
    cosine,
    mixed,
    room,
    room_by_hand,
    the_same,
)
from support.wrong_variants import variants_of

COLLAPSES = {
    "d2o": roomy("d2o", first=64) + roomy("d2o", last=64),
}


# --- by hand, with the library alone ---


@dataclass
class D2OByHand:
    """The rule as its authors give it, a head and a token at a time."""

    heavy: float = 0.4
    recent: float = 0.14
    sinks: int = 7
    memory: float = 0.5
    weights: str = "paper"
    compared: str = "heads"
    first: int = 0
    last: int = 0
    layers: int = 3
    votes: dict = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    thresholds: dict = field(default_factory=dict)
    spreads: dict = field(default_factory=dict)  # by layer, of the attention received from each query head
    rooms: list = field(default_factory=list)
    hand: HandRule | None = None

    def __call__(self, seen: Seen) -> list[set[int]]:
        cast = seen.weights.unflatten(0, (len(seen.live), -1)).sum((1, 2)).tolist()
        if seen.read == len(PROMPT):
            self.spreads[seen.layer] = [statistics.variance(head) for head in seen.weights.sum(1).tolist()]
        elif not self.rooms:
            self.rooms = self._deal()
        for head, live in enumerate(seen.live):
            for position, vote in zip(live, cast[head]):
                self.votes[seen.layer, head][position] += vote
        whole = seen.layer < self.first or seen.layer >= self.layers - self.last
        if seen.read == len(PROMPT) or whole:
            return [set(live) for live in seen.live]
        return [self._head(seen, head) for head in range(len(seen.live))]

    def _deal(self) -> list[tuple[int, int]]:
        spreads = [self.spreads[layer] for layer in range(self.layers)]
        by_heads = self.compared == "heads" and len(spreads[0]) > 2
        rivals = spreads if by_heads else list(zip(*spreads))
        scaled = [[(v - min(row)) / (max(row) - min(row) + 1e-6) for v in row] for row in rivals]
        uneven = [statistics.mean(row) for row in (scaled if by_heads else zip(*scaled))]
        total, length = sum(math.exp(-f) for f in uneven), len(PROMPT) + 1
        ratios = [min(1.0, max(0.01, math.exp(-f) / total * self.layers * (self.heavy + self.recent))) for f in uneven]
        split = self.heavy / (self.heavy + self.recent)
        return [
            (math.floor(length * ratio * split), max(1, math.floor(length * ratio * (1 - split)))) for ratio in ratios
        ]

    def _head(self, seen: Seen, head: int) -> set[int]:
        heavy, recent = self.rooms[seen.layer]
        live, votes = seen.live[head], self.votes[seen.layer, head]
        late = {p for p in live if p >= seen.read - recent}
        stays = late | best({p: math.inf if p < self.sinks else votes[p] for p in live if p not in late}, heavy)
        if goes := [p for p in live if p not in stays]:
            self._compensate(seen, head, goes, sorted(stays))
        return stays

    def _compensate(self, seen: Seen, head: int, goes: list[int], stays: list[int]) -> None:
        keys, place = seen.keys[head], {p: slot for slot, p in enumerate(seen.live[head])}
        near = {p: max((cosine(keys[place[p]], keys[place[q]]), q) for q in stays) for p in goes}
        mean, before = statistics.mean(m for m, _ in near.values()), self.thresholds.get((seen.layer, head))
        tau = self.thresholds[seen.layer, head] = (
            mean if before is None else self.memory * before + (1 - self.memory) * mean
        )
        parts = [keys, self.hand.cache.layers[seen.layer].values[0][head]]
        for kept in stays if self.weights != "none" else []:
            joins = [p for p, (m, q) in near.items() if q == kept and m >= tau - 1e-12]
            if joins:
                mixed(
                    parts,
                    place[kept],
                    [place[kept], *(place[p] for p in joins)],
                    self._shares([near[p][0] for p in joins]),
                )

    def _shares(self, alike: list[float]) -> list[float]:
        if self.weights == "released":
            return [share / (1 + len(alike)) for share in (1.0, *alike)]
        z = math.e + sum(map(math.exp, alike))
        return [math.e / z, *(math.exp(m) / z for m in alike)]


D2OS = [
    {},
    {"weights": "released"},
    {"weights": "none", "sinks": 0},
    {"memory": 1.0},
    {"memory": 0.0, "sinks": 1, "heavy": 0.2},
    {"first": 1, "last": 1},
    {"compared": "layers"},
]


@pytest.mark.oracle("d2o")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", D2OS, ids=str)
def test_d2o_text_and_cache_equal_decoding_by_hand(architecture, knobs):
    found = room(alone(make("d2o", **{**D2O_TIGHT, **knobs})), architecture)
    assert the_same(found, room_by_hand(architecture, D2OByHand(**knobs)))


class NearestByProduct(D2O):
    def merge(self, held, stays, goes):
        keys, merge = held.read("keys"), super().merge(held, stays, goes)
        if merge is None:
            return None
        sources, slot = merge.merge_map.sources, (keys @ keys.mT).masked_fill(~stays[:, None, :], -math.inf).argmax(-1)
        return alike_in_weight(MergeMap.of(sources, slot[sources], stays.shape[1]))


class AllCountAlike(D2O):
    def merge(self, held, stays, goes):
        merge = super().merge(held, stays, goes)
        return merge and alike_in_weight(merge.merge_map)


class EverythingIsMerged(D2O):
    def merge(self, held, stays, goes):
        alike = nearest([held.read("keys")], stays, goes)
        found = alike.cosine > -math.inf
        meeting = alike.merge_map(found, stays.shape[1])
        return merge_by_mean(
            meeting, alike.cosine[found].exp(), alike.cosine.new_full((len(meeting.targets[0]),), math.e)
        )


class TheThresholdStandsStill(D2O):
    def _update_thresholds(self, layer, alike):
        return self.thresholds[layer] if layer in self.thresholds else super()._update_thresholds(layer, alike)


class HeadsShareAThreshold(D2O):
    def _update_thresholds(self, layer, alike):
        moved_ = super()._update_thresholds(layer, alike)
        return [statistics.mean(moved_)] * len(moved_)


class UnevenLayersGetMore(D2O):
    """Swaps small and large variances."""

    def _layer_budgets(self, held):
        self._received = {layer: received / received.var(1, keepdim=True) for layer, received in self._received.items()}
        return super()._layer_budgets(held)


class TheMergedLeaveTheirVotes(D2O):
    def merge(self, held, stays, goes):
        merge = super().merge(held, stays, goes)
        if merge:
            self.attention.move(held.layer, MergedTokens.of(merge.merge_map, held.positions.expand(len(stays), -1)))
        return merge


class TheFirstCutComesEarly(D2O):
    def retain(self, held):
        return super().retain(replace(held, next=max(held.next, held.prompt + 1)))


class NoSinks(D2O):
    def retain(self, held):
        self.sinks = 0
        return super().retain(held)


@pytest.mark.refuses("d2o")
@pytest.mark.parametrize("wrong", variants_of(D2O, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_compensation_is_detected(wrong):
    """With four heads per layer: two would compare in their variance alike in every layer."""
    expected = room_by_hand("gpt_neox", D2OByHand())
    assert the_same(room(alone(D2O(**D2O_TIGHT)), "gpt_neox"), expected)
    found = room(alone(wrong(**D2O_TIGHT)), "gpt_neox")
    assert found.course != expected.course or found.off(expected) > 1e-3


# --- layer budgets and the threshold ---

def test_the_layer_with_the_largest_variance_gets_the_smallest_budget():
    spread = torch.tensor([[3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 1.0, 1.0], [0.0, 9.0, 9.0, 9.0]])
    assert unevenness(spread, "heads").tolist() == pytest.approx([0, 0.5, 0.75], abs=1e-4)
    assert unevenness(spread, "layers").tolist() == pytest.approx([(1 + 1 / 3 + 2 / 8 + 2 / 8) / 4, 0, 0.75], abs=1e-4)
    two = torch.tensor([[1.0, 7.0], [5.0, 4.0]])  # two heads would always be 0 and 1, in every layer
    assert torch.equal(unevenness(two, "heads"), unevenness(two, "layers"))
    assert unevenness(torch.tensor([[1.0, 7.0], [5.0, 9.0]]), "heads").tolist() == pytest.approx([0, 1], abs=1e-4)
    shares = budget_shares(torch.tensor([0.2, 0.9, 0.5]))
    assert shares.argsort().tolist() == [1, 2, 0] and float(shares.mean()) == pytest.approx(1)


@pytest.mark.parametrize("architecture, heads", [("llama", 2), ("gpt2", 4)])
def test_layers_get_different_budgets_whether_two_key_value_heads_or_four_share_the_query_heads(architecture, heads):
    policy = make("d2o", **D2O_TIGHT | {"sinks": 0, "heavy": 0.5, "recent": 0.5})
    lane = write(alone(policy), models(architecture), PROMPT, Limits(0, 2), Draws(0))
    assert lane.target.store.heads == heads and len(set(lane.assembly.cache_policy._budgets)) > 1


def test_a_prompt_of_one_token_has_budgets_too():
    lane = write(alone(make("d2o", **ALL_LAYERS)), models(), PROMPT[:1], Limits(0, 4), Draws(0))
    assert lane.generated == 4


def test_a_threshold_converges_on_constant_similarities_and_stays_without_any():
    policy = make("d2o")
    for _ in range(5):
        threshold = policy._update_thresholds(0, [[0.2, 0.4], []])
    assert threshold == [pytest.approx(0.3), math.inf]
    assert policy._update_thresholds(0, [[], [0.7, 0.1]]) == pytest.approx([0.3, 0.4])


def delayed(rule: Callable) -> Callable:
    return lambda votes, live, read: set(live) if read == len(PROMPT) else rule(votes, live, read)


class EvenRooms(D2O):
    """D2O without merging and without layer budgets."""

    def _layer_budgets(self, held):
        return [(5, 4)] * held.layers


@pytest.mark.parametrize("architecture", BY_HAND)
def test_d2o_without_merging_sinks_and_layer_budgets_is_h2o(architecture):
    expected = ByHand(architecture, delayed(heavy_hitters(5, 4))).write(PROMPT, LENGTH)
    assert course(alone(EvenRooms(weights="none", sinks=0, **ALL_LAYERS)), models(architecture)) == expected
    assert course(alone(EvenRooms(weights="paper", sinks=0, **ALL_LAYERS)), models(architecture)) != expected


@pytest.mark.parametrize("config", [LaneConfig("greedy"), TREE], ids=["greedy", "tree"])
def test_after_the_prefill_no_layer_exceeds_its_budget(config):
    session = prepare(pair(), [with_policy(config, "d2o", **D2O_TIGHT)], Prompt(TEXT), Limits(max_new_tokens=12))
    events = [stamped.event for stamped in session]
    (figure,) = [event for event in events if isinstance(event, Figure) and event.shape == "bars"]
    caches = [event for event in events if isinstance(event, Cache)]
    cut = [live for cache, live in zip(caches, contents(caches)) if cache.evicted]
    assert len(cut) > 1 and check(session.trace) == []
    for live in cut:
        held = [max(sum(stop - start for start, stop in runs) for runs in layer) for layer in live]
        assert all(slots <= most for slots, most in zip(held, figure.data["values"]))


def test_a_budget_of_the_whole_prompt_is_not_the_full_cache():
    """Budgets depend on the prompt, so generated tokens cause evictions."""
    whole = room(alone(make("d2o", heavy=0.5, recent=0.5, **ALL_LAYERS)))
    assert any(len(head) < len(PROMPT) + LENGTH - 1 for layer in whole.course[-1] for head in layer)
