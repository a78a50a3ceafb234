"""EMS: eviction, then merging, with a mix of scores in each head, compared with decoding by hand with the library's own
cache.
"""
from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
import torch
from registry import Collapse

from playground.algorithms.kv_cache.attention_scores import AttentionScores
from playground.algorithms.kv_cache.slot_merging import nearest
from playground.contract import make
from playground.engine.cache.kv_buffer import MergeMap
from strategies.kv_cache.ems import EMS, shares
from support.budget_policies import TREE, HandRule, Seen, best, roomy, with_policy
from support.ems_settings import EMS_TIGHT
from support.eviction import alone
from support.merging_policies import BY_HAND, alike_in_weight, cosine, mixed, room, room_by_hand, the_same
from support.wrong_variants import variants_of

CUT = {"size": 9, "window": 3, "kernel": 1}
COLLAPSES = {
    "ems": [
        *roomy("ems", size=2048),
        Collapse(with_policy(TREE, "ems", likeness=1.1, **CUT), with_policy(TREE, "ems", candidates=0.0, **CUT)),
    ],
}


@dataclass
class EMSByHand:
    """Head by head, with loops over tokens in place of the class that is merged into nothing."""

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
        parts = [keys, self.hand.cache.layers[seen.layer].values[0][head]]
        near = {
            p: max((math.prod(cosine(part[place[p]], part[place[c]]) for part in parts), c) for c in centres)
            for p in chosen
        }
        for centre in centres:
            joins = [p for p, (r, c) in near.items() if c == centre and r >= self.likeness]
            if joins:
                total = sum(matters[p] for p in (centre, *joins))
                mixed(
                    parts,
                    place[centre],
                    [place[p] for p in (centre, *joins)],
                    [matters[p] / total for p in (centre, *joins)],
                )
            for tally in (self.ever[seen.layer, head], *self.lately[seen.layer, head]):
                tally[centre] += sum(tally.pop(p, 0.0) for p in joins)


EMSS = [
    {},
    {"likeness": -1.0},
    {"likeness": 1.1},
    {"candidates": 0.0},
    {"candidates": 2.0, "likeness": 0.6},
    {"window": 6, "kernel": 1},
    {"size": 14},
]


@pytest.mark.oracle("ems")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs", EMSS, ids=str)
def test_ems_text_and_cache_equal_decoding_by_hand(architecture, knobs):
    found = room(alone(make("ems", **{**EMS_TIGHT, **knobs})), architecture)
    assert the_same(found, room_by_hand(architecture, EMSByHand(**knobs)))
    assert all(len(head) == {**EMS_TIGHT, **knobs}["size"] for held in found.course for layer in held for head in layer)


class TheWindowTakesInToo(EMS):
    def merge(self, held, stays, goes):
        merge = super().merge(held, stays, goes)
        if merge is None:
            return None
        sources, alike = merge.merge_map.sources, nearest([held.read("keys")], stays, torch.ones_like(stays))
        return alike_in_weight(MergeMap.of(sources, alike.targets[sources], stays.shape[1]))


class CentresMatterAsBefore(EMS):
    def merge(self, held, stays, goes):
        self.attention.move, self.recent_attention.move = (lambda *about: None,) * 2
        return super().merge(held, stays, goes)


class OldTokensAreFavoured(EMS):
    def importance(self, held, positions, others):
        return shares(torch.cat([self.attention.of(layer.layer, layer.positions) for layer in held]), others)


class OnlyTheLatestCount(EMS):
    def importance(self, held, positions, others):
        return shares(torch.cat([self.recent_attention.of(layer.layer, layer.positions) for layer in held]), others)


class OnlyKeysAreCompared(EMS):
    def _pair(self, held, importance, centres, candidates):
        alike = [replace(layer, read=lambda part, layer=layer: layer.read("keys")) for layer in held]
        super()._pair(alike, importance, centres, candidates)


class NobodyIsLost(EMS):
    def merge(self, held, stays, goes):
        self.likeness = -1.0
        return super().merge(held, stays, goes)


class EveryoneIsACandidate(EMS):
    def retain_all(self, held):
        self.candidates = 4.0
        return super().retain_all(held)


class TheNearestCountMost(EMS):
    def merge(self, held, stays, goes):
        merge = super().merge(held, stays, goes)
        return merge and alike_in_weight(merge.merge_map)


class LayersAreAskedOneByOne(EMS):
    """Not a wrong variant: all layers at once give the same."""

    def retain_all(self, held):
        return [self.retain(layer) for layer in held]


def test_selection_over_all_layers_at_once_equals_selection_layer_by_layer():
    one_by_one = room(alone(LayersAreAskedOneByOne(**EMS_TIGHT)))
    assert (
        the_same(room(alone(EMS(**EMS_TIGHT))), one_by_one)
        and len({tuple(map(tuple, heads)) for heads in one_by_one.course[-1]}) > 1
    )


WRONG = [cls for cls in variants_of(EMS, __name__) if cls is not LayersAreAskedOneByOne]


@pytest.mark.refuses("ems")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda cls: cls.__name__)
def test_a_wrong_mix_is_detected(wrong):
    knobs = {**EMS_TIGHT, "likeness": 0.5}
    expected = room_by_hand("llama", EMSByHand(likeness=0.5))
    assert the_same(room(alone(EMS(**knobs))), expected)
    found = room(alone(wrong(**knobs)))
    assert found.course != expected.course or found.off(expected) > 1e-3


def test_uniform_attention_favours_no_position():
    """Mean over the rows that could see a token is flat for random rows, a sum over all rows is not; 4000 rows, 5
    standard errors of a mean.
    """
    n, rounds, chance = 20, 200, torch.Generator().manual_seed(0)
    rows = torch.rand(rounds, n, n, generator=chance).tril()
    # a row that sees twice as many gives each as much
    rows = (rows / rows.sum(-1, keepdim=True)) * torch.arange(1, n + 1)[:, None]
    votes = AttentionScores()
    votes.add(0, rows.sum(0, keepdim=True) / rounds, torch.arange(n)[None])
    means = votes.of(0, torch.arange(n)[None])[0] / (n - torch.arange(n))
    assert float((means[:-3] - 1).abs().max()) < 5 * 0.6 / math.sqrt(rounds * 4)
    assert float(votes.of(0, torch.tensor([[0, n - 1]]))[0, 0]) > 10
