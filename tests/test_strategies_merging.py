"""Cache policies that merge what they evict: which tokens meet in which, held against decoding by hand with the library's own cache."""
from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, watch, write
from test_strategies_budgets import TEXT, TREE, HandRule, Seen, best, roomy, with_policy
from test_strategies_eviction import LENGTH, PROMPT, ByHand, Lives, Wrong, alone, course, heavy_hitters, lives, models
from torch import Tensor

from playground.draws import Draws
from playground.engine.pool import Meeting, Pool, in_front
from playground.errors import Refusal
from playground.events import Cache, Figure
from playground.lane import Limits
from playground.parts.merging import averaged, company, nearest, targets
from playground.parts.votes import STRETCH, Lately, Moving, Votes, moved
from playground.recipe import Assembly, Recipe
from playground.session import Prompt, prepare
from playground.strategy import CachePolicy, make
from playground.trace import check
from strategies.kv_cache.d2o import D2O, dealt, unevenness
from strategies.kv_cache.ems import EMS, shares

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
NEAR = 1e-9
ALL_LAYERS = {"first": 0, "last": 0}
D2O_TIGHT = {**ALL_LAYERS, "heavy": 0.4, "recent": 0.14, "sinks": 7}
EMS_TIGHT = {"size": 9, "window": 3, "kernel": 3, "likeness": 0.2}
CUT = {"size": 9, "window": 3, "kernel": 1}
COLLAPSES = {
    "d2o": roomy("d2o", first=64) + roomy("d2o", last=64),
    "ems": [*roomy("ems", size=2048), Collapse(with_policy(TREE, "ems", likeness=1.1, **CUT), with_policy(TREE, "ems", candidates=0.0, **CUT))],
}


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


# --- by hand, with the library alone ---

@dataclass
class Room:
    """What a lane held at the end: positions as everywhere, keys and values by layer, [kv_heads, slots, d]."""

    ids: list[int]
    course: list[Lives]
    rows: list[Tensor]

    def off(self, other: Room) -> float:
        """Largest difference of a number, where both hold the same tokens."""
        return max(float((ours - theirs).abs().max()) for ours, theirs in zip(self.rows, other.rows))


def room(assembly: Assembly, architecture: str = "llama") -> Room:
    found: list[Lives] = []
    for lane in watch(assembly, models(architecture), PROMPT, Limits(0, LENGTH), Draws(0)):
        if lane.generated > len(found):
            found += [lives(lane)] * (lane.generated - len(found))
    store = lane.target.store
    held = [pools[layer].read(store.slots_of(layer).count) for pools in (store.keys, store.values) for layer in range(store.depth)]
    return Room(lane.tokens[len(PROMPT):], found, held)


def room_by_hand(architecture: str, rule: Callable) -> Room:
    hand = HandRule(architecture, rule)
    rule.hand = hand
    ids, held = hand.write(PROMPT, LENGTH)
    layers = hand.cache.layers
    return Room(ids, held, [layer.keys[0] for layer in layers] + [layer.values[0] for layer in layers])


def the_same(one: Room, other: Room) -> bool:
    return one.ids == other.ids and one.course == other.course and one.off(other) < NEAR


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def mixed(parts: list[Tensor], slot: int, sources: list[int], weights: list[float]) -> None:
    """The rows of a slot become a sum over sources, of keys and values alike."""
    for rows in parts:
        rows[slot] = sum(weight * rows[source] for source, weight in zip(sources, weights))


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
    rooms: list = field(default_factory=list)
    hand: HandRule | None = None

    def __call__(self, seen: Seen) -> list[set[int]]:
        cast = seen.weights.unflatten(0, (len(seen.live), -1)).sum((1, 2)).tolist()
        if seen.read > len(PROMPT) and not self.rooms:
            self.rooms = self._deal(len(seen.live))
        for head, live in enumerate(seen.live):
            for position, vote in zip(live, cast[head]):
                self.votes[seen.layer, head][position] += vote
        whole = seen.layer < self.first or seen.layer >= self.layers - self.last
        if seen.read == len(PROMPT) or whole:
            return [set(live) for live in seen.live]
        return [self._head(seen, head) for head in range(len(seen.live))]

    def _deal(self, heads: int) -> list[tuple[int, int]]:
        spreads = [[statistics.variance(self.votes[layer, head].values()) for head in range(heads)] for layer in range(self.layers)]
        rivals = spreads if self.compared == "heads" else list(zip(*spreads))
        scaled = [[(v - min(row)) / (max(row) - min(row) + 1e-6) for v in row] for row in rivals]
        uneven = [statistics.mean(row) for row in (scaled if self.compared == "heads" else zip(*scaled))]
        total, length = sum(math.exp(-f) for f in uneven), len(PROMPT) + 1
        ratios = [min(1.0, max(0.01, math.exp(-f) / total * self.layers * (self.heavy + self.recent))) for f in uneven]
        split = self.heavy / (self.heavy + self.recent)
        return [(math.floor(length * ratio * split), max(1, math.floor(length * ratio * (1 - split)))) for ratio in ratios]

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
        tau = self.thresholds[seen.layer, head] = mean if before is None else self.memory * before + (1 - self.memory) * mean
        parts = [keys, self.hand.cache.layers[seen.layer].values[0][head]]
        for kept in stays if self.weights != "none" else []:
            joins = [p for p, (m, q) in near.items() if q == kept and m >= tau - 1e-12]
            if joins:
                mixed(parts, place[kept], [place[kept], *(place[p] for p in joins)], self._shares([near[p][0] for p in joins]))

    def _shares(self, alike: list[float]) -> list[float]:
        if self.weights == "released":
            return [share / (1 + len(alike)) for share in (1.0, *alike)]
        z = math.e + sum(map(math.exp, alike))
        return [math.e / z, *(math.exp(m) / z for m in alike)]


D2OS = [{}, {"weights": "released"}, {"weights": "none", "sinks": 0}, {"memory": 1.0}, {"memory": 0.0, "sinks": 1, "heavy": 0.2}, {"first": 1, "last": 1},
        {"compared": "layers"}]


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", D2OS, ids=str)
def test_d2o_writes_and_holds_what_decoding_by_hand_does(architecture, knobs):
    found = room(alone(make("d2o", **{**D2O_TIGHT, **knobs})), architecture)
    assert the_same(found, room_by_hand(architecture, D2OByHand(**knobs)))


class NearestByProduct(D2O):
    def merge(self, held, stays, goes):
        keys = held.read("keys")
        _, slot = super_nearest_by_product(keys, stays)
        merge = super().merge(held, stays, goes)
        own = torch.arange(slot.shape[1])
        return averaged(torch.where(merge.into != own, slot, own), torch.ones_like(merge.share))


def super_nearest_by_product(keys: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    return (keys @ keys.mT).masked_fill(~among[:, None, :], -math.inf).max(-1)


class AllCountAlike(D2O):
    def merge(self, held, stays, goes):
        return averaged(super().merge(held, stays, goes).into, torch.ones(goes.shape))


class EverythingIsMerged(D2O):
    def merge(self, held, stays, goes):
        likeness, slot = nearest(held.read("keys"), stays)
        return averaged(targets(goes, slot), torch.where(goes, likeness, 1.0).exp())


class TheThresholdStandsStill(D2O):
    def _moved(self, layer, alike):
        return self.thresholds[layer] if layer in self.thresholds else super()._moved(layer, alike)


class HeadsShareAThreshold(D2O):
    def _moved(self, layer, alike):
        moved_ = super()._moved(layer, alike)
        return [statistics.mean(moved_)] * len(moved_)


@dataclass
class Upside:
    """Votes whose variance is small where it was large."""

    votes: Votes

    def of(self, layer: int, positions: Tensor) -> Tensor:
        found = self.votes.of(layer, positions)
        return found / found.var(1, keepdim=True)


class UnevenLayersGetMore(D2O):
    def _dealt(self, held):
        received = self.votes
        self.votes = Upside(received)
        try:
            return super()._dealt(held)
        finally:
            self.votes = received


class TheMergedLeaveTheirVotes(D2O):
    def merge(self, held, stays, goes):
        merge = super().merge(held, stays, goes)
        positions = held.positions.expand_as(merge.into)
        self.votes.move(held.layer, Moving.of(positions, positions.gather(1, merge.into)))
        return merge


class TheFirstCutComesEarly(D2O):
    def retain(self, held):
        return super().retain(replace(held, next=max(held.next, held.prompt + 1)))


class NoSinks(D2O):
    def retain(self, held):
        self.sinks = 0
        return super().retain(held)


@pytest.mark.parametrize("wrong", D2O.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_compensation_is_found_out(wrong):
    """With four heads to a layer: how two compare in their variance is the same in every layer."""
    expected = room_by_hand("gpt_neox", D2OByHand())
    assert the_same(room(alone(D2O(**D2O_TIGHT)), "gpt_neox"), expected)
    found = room(alone(wrong(**D2O_TIGHT)), "gpt_neox")
    assert found.course != expected.course or found.off(expected) > 1e-3


# --- a judge of its own: how much room a layer gets, and what a threshold does ---

def test_the_layer_whose_heads_differ_most_gets_the_least_room():
    spread = torch.tensor([[3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 1.0, 1.0], [0.0, 9.0, 9.0, 9.0]])
    assert unevenness(spread, "heads").tolist() == pytest.approx([0, 0.5, 0.75], abs=1e-4)
    assert unevenness(spread, "layers").tolist() == pytest.approx([(1 + 1 / 3 + 2 / 8 + 2 / 8) / 4, 0, 0.75], abs=1e-4)
    assert unevenness(torch.tensor([[1.0, 7.0], [5.0, 4.0]]), "heads").tolist() == pytest.approx([0.5, 0.5], abs=1e-4)
    shares = dealt(torch.tensor([0.2, 0.9, 0.5]))
    assert shares.argsort().tolist() == [1, 2, 0] and float(shares.mean()) == pytest.approx(1)


def test_a_threshold_that_hears_the_same_forever_stays_and_one_that_hears_nothing_too():
    policy = make("d2o")
    for _ in range(5):
        threshold = policy._moved(0, [[0.2, 0.4], []])
    assert threshold == [pytest.approx(0.3), math.inf]
    assert policy._moved(0, [[], [0.7, 0.1]]) == pytest.approx([0.3, 0.4])


def delayed(rule: Callable) -> Callable:
    return lambda votes, live, read: set(live) if read == len(PROMPT) else rule(votes, live, read)


class EvenRooms(D2O):
    """What is to be had without merging and without a say for layers."""

    def _dealt(self, held):
        return [(5, 4)] * held.layers


@pytest.mark.parametrize("architecture", BY_HAND)
def test_d2o_that_merges_nothing_with_even_rooms_and_no_sinks_is_h2o(architecture):
    expected = ByHand(architecture, delayed(heavy_hitters(5, 4))).write(PROMPT, LENGTH)
    assert course(alone(EvenRooms(weights="none", sinks=0, **ALL_LAYERS)), models(architecture)) == expected
    assert course(alone(EvenRooms(weights="paper", sinks=0, **ALL_LAYERS)), models(architecture)) != expected


@pytest.mark.parametrize("recipe", [Recipe("greedy"), TREE], ids=["greedy", "tree"])
def test_once_the_prompt_is_read_no_layer_holds_more_than_its_room(recipe):
    session = prepare(pair(), [with_policy(recipe, "d2o", **D2O_TIGHT)], Prompt(TEXT), Limits(max_new_tokens=12))
    events = [stamped.event for stamped in session]
    (figure,) = [event for event in events if isinstance(event, Figure) and event.shape == "bars"]
    cut = [event for event in events if isinstance(event, Cache) and event.evicted]
    assert len(cut) > 1 and check(session.trace) == []
    for cache in cut:
        held = [max(sum(stop - start for start, stop in runs) for runs in layer) for layer in cache.live]
        assert all(slots <= most for slots, most in zip(held, figure.data["values"]))


def test_room_for_the_whole_prompt_is_not_the_full_cache():
    """Budgets are settled by the prompt, so what is generated pushes something out."""
    whole = room(alone(make("d2o", heavy=0.5, recent=0.5, **ALL_LAYERS)))
    assert any(len(head) < len(PROMPT) + LENGTH - 1 for layer in whole.course[-1] for head in layer)


# --- evict, then merge ---

@dataclass
class EMSByHand:
    """A head at a time, with loops over tokens in place of the class of nothing."""

    size: int = 9
    window: int = 3
    kernel: int = 3
    candidates: float = 1.0
    likeness: float = 0.2
    ever: dict = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    lately: dict = field(default_factory=lambda: defaultdict(list))
    hand: HandRule | None = None

    def __call__(self, seen: Seen) -> list[set[int]]:
        cast = seen.weights.unflatten(0, (len(seen.live), -1)).sum(1)
        return [self._head(seen, head, cast[head].tolist()) for head in range(len(seen.live))]

    def _head(self, seen: Seen, head: int, rows: list[list[float]]) -> set[int]:
        live, at = seen.live[head], (seen.layer, head)
        for row in rows:
            self.lately[at] = [*self.lately[at], defaultdict(float, zip(live, row))][-self.window:]
            for position, weight in zip(live, row):
                self.ever[at][position] += weight
        late = {p for p in live if p >= seen.read - self.window}
        early = [p for p in live if p not in late]
        matters = self._matters(at, early, seen.read)
        centres = best(matters, self.size - self.window)
        rest = {p: matters[p] for p in early if p not in centres}
        chosen = best(rest, round(self.candidates * (self.size - self.window)))
        self._join(seen, head, sorted(chosen), sorted(centres), matters)
        return late | centres

    def _matters(self, at: tuple[int, int], early: list[int], read: int) -> dict[int, float]:
        overall = {p: self.ever[at][p] / (read - p) for p in early}
        means = [statistics.mean(row[p] for row in self.lately[at]) for p in early]
        reach = self.kernel // 2
        lately = {p: sum(means[max(0, i - reach):i + reach + 1]) / self.kernel for i, p in enumerate(early)}
        one, other = sum(overall.values()), sum(lately.values())
        return {p: max(overall[p] / one, lately[p] / other) for p in early}

    def _join(self, seen: Seen, head: int, chosen: list[int], centres: list[int], matters: dict[int, float]) -> None:
        keys, place = seen.keys[head], {p: slot for slot, p in enumerate(seen.live[head])}
        near = {p: max((cosine(keys[place[p]], keys[place[c]]), c) for c in centres) for p in chosen}
        parts = [keys, self.hand.cache.layers[seen.layer].values[0][head]]
        for centre in centres:
            joins = [p for p, (r, c) in near.items() if c == centre and r >= self.likeness]
            if joins:
                total = sum(matters[p] for p in (centre, *joins))
                mixed(parts, place[centre], [place[p] for p in (centre, *joins)], [matters[p] / total for p in (centre, *joins)])
            for tally in (self.ever[seen.layer, head], *self.lately[seen.layer, head]):
                tally[centre] += sum(tally.pop(p, 0.0) for p in joins)


EMSS = [{}, {"likeness": -1.0}, {"likeness": 1.1}, {"candidates": 0.0}, {"candidates": 2.0, "likeness": 0.6}, {"window": 6, "kernel": 1}, {"size": 14}]


@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", EMSS, ids=str)
def test_ems_writes_and_holds_what_decoding_by_hand_does(architecture, knobs):
    found = room(alone(make("ems", **{**EMS_TIGHT, **knobs})), architecture)
    assert the_same(found, room_by_hand(architecture, EMSByHand(**knobs)))
    assert all(len(head) == {**EMS_TIGHT, **knobs}["size"] for held in found.course for layer in held for head in layer)


class TheWindowTakesInToo(EMS):
    def merge(self, held, stays, goes):
        merge = super().merge(held, stays, goes)
        _, slot = nearest(held.read("keys"), stays)
        return averaged(targets(merge.into != torch.arange(slot.shape[1]), slot), torch.ones_like(merge.share))


class CentresMatterAsBefore(EMS):
    def merge(self, held, stays, goes):
        self.ever.move, self.lately.move = (lambda *about: None,) * 2
        return super().merge(held, stays, goes)


class OldTokensAreFavoured(EMS):
    def importance(self, held, late):
        return shares(self.ever.of(held.layer, held.positions), late | ~held.live)


class OnlyTheLatestCount(EMS):
    def importance(self, held, late):
        return shares(self.lately.of(held.layer, held.positions), late | ~held.live)


class NobodyIsLost(EMS):
    def merge(self, held, stays, goes):
        self.likeness = -1.0
        return super().merge(held, stays, goes)


class EveryoneIsACandidate(EMS):
    def merge(self, held, stays, goes):
        self.candidates = 4.0
        return super().merge(held, stays, goes)


class TheNearestCountMost(EMS):
    def merge(self, held, stays, goes):
        return averaged(super().merge(held, stays, goes).into, torch.ones(goes.shape))


@pytest.mark.parametrize("wrong", EMS.__subclasses__(), ids=lambda cls: cls.__name__)
def test_a_wrong_mix_is_found_out(wrong):
    knobs = {**EMS_TIGHT, "likeness": 0.5}
    expected = room_by_hand("llama", EMSByHand(likeness=0.5))
    assert the_same(room(alone(EMS(**knobs))), expected)
    found = room(alone(wrong(**knobs)))
    assert found.course != expected.course or found.off(expected) > 1e-3


def test_attention_that_falls_anywhere_favours_no_age():
    """Mean over the rows that could see a token is flat for random rows, a sum over all rows is not; 4000 rows, 5 standard errors of a mean."""
    n, rounds, chance = 20, 200, torch.Generator().manual_seed(0)
    rows = torch.rand(rounds, n, n, generator=chance).tril()
    rows = (rows / rows.sum(-1, keepdim=True)) * torch.arange(1, n + 1)[:, None]  # a row that sees twice as many gives each as much
    votes = Votes()
    votes.add(0, rows.sum(0, keepdim=True) / rounds, torch.arange(n)[None])
    means = votes.of(0, torch.arange(n)[None])[0] / (n - torch.arange(n))
    assert float((means[:-3] - 1).abs().max()) < 5 * 0.6 / math.sqrt(rounds * 4)
    assert float(votes.of(0, torch.tensor([[0, n - 1]]))[0, 0]) > 10


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


# --- what it means for a lane ---

TIGHT = {"d2o": D2O_TIGHT, "ems": EMS_TIGHT}
each = pytest.mark.parametrize("name", TIGHT)


@each
@pytest.mark.parametrize("recipe", [Recipe("greedy"), TREE, Recipe("sample")], ids=["greedy", "tree", "sample"])
def test_a_lane_tells_what_was_merged_into_what(name, recipe):
    session = prepare(pair(), [with_policy(recipe, name, **TIGHT[name])], Prompt(TEXT), Limits(max_new_tokens=10))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    assert check(session.trace) == []
    told = [cache for cache in caches if cache.joined]
    assert told and all(cache.merged == sum(len(pairs) for layer in cache.joined for pairs in layer) > 0 for cache in told)
    assert len(told[0].joined) == told[0].layers and len(told[0].joined[0]) == told[0].heads


@each
def test_a_rejected_guess_is_merged_into_nothing(name):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    guessing = room(Assembly(decoder, cache_policy=make(name, **TIGHT[name])))
    assert the_same(guessing, room(alone(make(name, **TIGHT[name]))))


@each
def test_merged_values_stay_between_those_they_are_made_of(name):
    plain = room(alone(make("h2o", heavy=1024)))
    bounds = [(rows.amin(1), rows.amax(1)) for rows in plain.rows[3:]]
    for (low, high), rows in zip(bounds, before_generating(make(name, **{**TIGHT[name]}))):
        assert (rows >= low[:, None] - NEAR).all() and (rows <= high[:, None] + NEAR).all()


def before_generating(policy: CachePolicy) -> list[Tensor]:
    """Values of the prompt's slots, by layer, after the first cut; the texts of two lanes may differ afterwards."""
    for lane in watch(alone(policy), models(), PROMPT, Limits(0, LENGTH), Draws(0)):
        store = lane.target.store
        if store.live_slots() < store.depth * store.heads * store.length:
            break
    return [store.values[layer].read(store.slots_of(layer).count) for layer in range(store.depth)]


@each
@pytest.mark.parametrize("weights", ["paper", "released"])
def test_a_duplicate_that_goes_leaves_the_one_that_stays_as_it_was(name, weights):
    keys = torch.tensor([[[1.0, 2.0], [1.0, 2.0], [5.0, -1.0], [0.0, 3.0]]])
    policy = make("d2o", weights=weights) if name == "d2o" else make("ems", size=17, likeness=0.9)
    held = of_keys(keys)
    policy.retain(held)
    merge = policy.merge(held, slots([0, 1, 1, 1]).bool(), slots([1, 0, 0, 0]).bool())
    if name == "d2o":
        assert merge.into.tolist() == [[1, 1, 2, 3]]
    assert (by_loop(keys, merge.into, merge.share)[0, 1] - keys[0, 1]).abs().max() < 1e-6


def of_keys(keys: Tensor):
    from playground.retention import Held
    count = keys.shape[1]
    return Held(0, 1, "keep", count, count + 20, torch.arange(count)[None], read=lambda part: keys)


@each
def test_a_prompt_read_in_pieces_is_merged_as_one_read_at_once(name, monkeypatch):
    whole = room(alone(make(name, **TIGHT[name])))
    monkeypatch.setattr("playground.stream.WATCHED_CHUNK", 5)
    assert the_same(room(alone(make(name, **TIGHT[name]))), whole)


@each
def test_a_table_that_pays_no_attention_goes_on(name):
    lane = write(alone(make(name, **TIGHT[name])), {"target": TableModel("abc")}, [0, 1, 2] * 8, Limits(0, 6), Draws(0))
    assert lane.generated == 6 and len(lives(lane)[0][0]) < 24


@pytest.mark.parametrize("knobs, says", [(dict(size=16, window=16), "raise size above it"), (dict(kernel=4), "take 5")])
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make("ems", **knobs)
    assert str(refusal.value).count(".") == 1
