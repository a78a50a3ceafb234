"""CriticalKV: half of a budget by attention, half by attention times the projected value."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from torch import Tensor

from playground.contract import Held, find, make
from playground.contract.lane_config import LaneConfig
from playground.engine.attention.attention_parts import Projections
from support.budget_policies import TREE, best, roomy, with_policy
from support.eviction import alone, course, models
from support.wrong_variants import variants_of

CriticalKV = find("critical_kv")
HEADS, GROUP, SLOTS, WINDOW, WIDTH, D = 2, 3, 18, 3, 5, 4
CUT = {"window": WINDOW, "capacity": 9}
COLLAPSES = {
    "critical_kv": [
        *roomy("critical_kv", capacity=2048),
        *(Collapse(with_policy(plain, "critical_kv", first=1.0, **CUT), with_policy(plain, "snapkv", **CUT))
          for plain in (LaneConfig("greedy"), TREE)),
    ]
}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Parts:
    """A layer whose output projection is random."""

    def __init__(self, seed: int):
        self.output = numbers(WIDTH, HEADS * GROUP * D, seed=seed)

    def attention_projections(self, layer: int) -> Projections:
        return Projections(None, None, None, self.output)


def attention(seed: int) -> Tensor:
    """Of the window's rows, summed over the query heads of a group, [heads, rows, slots]."""
    return (numbers(HEADS, WINDOW, SLOTS, seed=seed) * 3).softmax(-1) * GROUP


def by_hand(seed: int, first: float) -> list[set[int]]:
    weights, output = attention(seed).tolist(), Parts(seed).output
    values = numbers(HEADS, SLOTS, D, seed=seed + 50).tolist()
    kept, share, early = [], CUT["capacity"] - WINDOW, range(SLOTS - WINDOW)
    for head in range(HEADS):
        mean = {p: sum(row[p] for row in weights[head]) / (WINDOW * GROUP) for p in early}
        sizes = {}
        for p in early:
            norms = []
            for member in range(head * GROUP, (head + 1) * GROUP):
                rows = output[:, member * D:(member + 1) * D].tolist()
                norms.append(sum(abs(sum(w * x for w, x in zip(row, values[head][p]))) for row in rows))
            sizes[p] = sum(norms) / GROUP
        stage = best(mean, int(first * share))
        rest = {p: (mean[p] + 1e-4) * sizes[p] for p in early if p not in stage}
        kept.append(stage | best(rest, share - len(stage)) | set(range(SLOTS - WINDOW, SLOTS)))
    return kept


def stays(cls: type, seed: int, first: float) -> list[set[int]]:
    policy, positions = cls(kernel=1, first=first, **CUT), torch.arange(SLOTS)[None]
    policy.begin(Parts(seed))
    policy.text_length = SLOTS
    policy.observe_attention(0, attention(seed), torch.arange(SLOTS - WINDOW, SLOTS), positions)
    values = numbers(HEADS, SLOTS, D, seed=seed + 50)
    kept = policy.retain(Held(0, 1, "prefill", SLOTS, SLOTS, positions, read=lambda part: values))
    return [set(row.nonzero()[:, 0].tolist()) for row in kept]


def check(cls: type) -> None:
    for seed in range(8):
        for first in (0.0, 0.5, 1.0):
            assert stays(cls, seed, first) == by_hand(seed, first)


class SizesOfValuesThemselves(CriticalKV):
    def _value_sizes(self, held):
        return held.read("values").abs().sum(-1), super()._value_sizes(held)[1]


class OneStage(CriticalKV):
    def retain(self, held):
        self.first = 0.0
        return super().retain(held)


class HeadsInAnotherOrder(CriticalKV):
    def begin(self, parts):
        parts.output = parts.output.unflatten(1, (GROUP, HEADS, D)).transpose(1, 2).flatten(1)
        super().begin(parts)


@pytest.mark.oracle("critical_kv")
def test_both_stages_keep_what_the_formula_keeps():
    check(CriticalKV)


@pytest.mark.refuses("critical_kv")
@pytest.mark.parametrize("wrong", variants_of(CriticalKV, __name__), ids=lambda cls: cls.__name__)
def test_wrong_sizes_or_stages_are_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_a_run_holds_its_capacity_and_what_it_wrote():
    _, held = course(alone(make("critical_kv", **CUT)), models())
    assert all(len(head) == 9 + n for n, layers in enumerate(held) for layer in layers for head in layer)
