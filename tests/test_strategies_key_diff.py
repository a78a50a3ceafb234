"""KeyDiff evicts, in each head, the tokens whose keys are most similar to the mean of the normalised keys."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from playground.contract import Held, find, make
from support.budget_policies import HandRule, best, roomy
from support.eviction import LENGTH, PROMPT, alone, course, models

KeyDiff = find("key_diff")
COLLAPSES = {"key_diff": roomy("key_diff", size=2048)}


# --- the rule by hand ---


def likeness(keys: dict[int, list[float]]) -> dict[int, float]:
    """Cosine similarity of each key to the mean of the normalised keys of its head, in plain Python, by position."""
    unit = {p: [x / math.hypot(*key) for x in key] for p, key in keys.items()}
    mean = [sum(column) / len(unit) for column in zip(*unit.values())]
    return {p: sum(x * m for x, m in zip(key, mean)) / math.hypot(*mean) for p, key in unit.items()}


def staying(keys: dict[int, list[float]], size: int, late: set[int]) -> set[int]:
    """Live positions of one head: the recent ones, and those least similar to the mean."""
    scores = likeness(keys)
    return late | best({p: -score for p, score in scores.items() if p not in late}, size - len(late))


def held(keys: Tensor, positions: list[list[int]] | None = None) -> Held:
    """Slots with these keys, [kv_heads, slots, head_dim], after a commit; by default all heads hold the same tokens."""
    slots = torch.tensor(positions) if positions else torch.arange(keys.shape[1])[None]
    return Held(0, 1, "keep", 0, int(slots.max()) + 1, slots, read=lambda part: keys)


def stays(policy, what: Held) -> list[set[int]]:
    kept = policy.retain(what) & what.live
    return [set(row[chosen].tolist()) for row, chosen in zip(what.positions.expand_as(kept), kept)]


def by_hand(what: Held, size: int, recent: int) -> list[set[int]]:
    keys = what.read("keys").tolist()
    heads = [{p: key for p, key in zip(row, head) if p >= 0}
             for row, head in zip(what.positions.expand(len(keys), -1).tolist(), keys)]
    return [staying(head, size, {p for p in head if p >= what.next - recent}) for head in heads]


def random_keys(seed: int, heads: int = 3, slots: int = 12) -> Tensor:
    """Keys of very different lengths, so that the mean of the keys is not that of the normalised ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.rand(heads, slots, 1, generator=generator, dtype=torch.float64) * 20 + 0.1
    return (torch.randn(heads, slots, 4, generator=generator, dtype=torch.float64) + 0.3) * lengths


def with_gaps(keys: Tensor) -> Held:
    """Heads that hold different tokens; the last slots of the second and third head are empty, and what is in them is
    left over.
    """
    keys = keys.clone()
    keys[1, 10:], keys[2, 7:] = 1e3, float("nan")
    return held(keys, [list(range(12)), [*range(2, 12), -1, -1], [0, 3, 5, 8, 9, 10, 11, *[-1] * 5]])


CASES = [held(random_keys(seed)) for seed in range(5)] + [with_gaps(random_keys(seed)) for seed in range(5, 10)]


@pytest.mark.oracle("key_diff")
@pytest.mark.parametrize("size, recent", [(1, 0), (5, 0), (6, 3), (4, 4), (11, 1), (12, 0)])
def test_live_slots_equal_those_chosen_by_hand(size, recent):
    for what in CASES:
        assert stays(make("key_diff", size=size, recent=recent), what) == by_hand(what, size, recent)


@pytest.mark.oracle("key_diff")
@pytest.mark.parametrize("architecture, size, recent", [("llama", 9, 4), ("qwen3", 5, 0)])
def test_text_and_cache_of_a_run_equal_decoding_by_hand(architecture, size, recent):
    def rule(seen):
        heads = [dict(zip(live, keys.tolist())) for live, keys in zip(seen.live, seen.keys)]
        return [staying(head, size, {p for p in head if p >= seen.read - recent}) for head in heads]

    expected = HandRule(architecture, rule).write(PROMPT, LENGTH)
    assert course(alone(make("key_diff", size=size, recent=recent)), models(architecture)) == expected


class EvictsTheDistinctive(KeyDiff):
    def scores(self, held):
        return -super().scores(held)


class AveragesKeysAsTheyAre(KeyDiff):
    """Keys of larger norm count more in the mean."""

    def scores(self, held):
        keys = held.read("keys").masked_fill(~held.live[..., None], 0.0)
        return -torch.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1)


class ComparesWithAllHeads(KeyDiff):
    def scores(self, held):
        keys = held.read("keys")
        unit = torch.nn.functional.normalize(keys, dim=-1).masked_fill(~held.live[..., None], 0.0)
        return -torch.cosine_similarity(keys, unit.mean((0, 1), keepdim=True), dim=-1)


class ProjectsInsteadOfTheCosine(KeyDiff):
    """Keys of larger norm seem more similar."""

    def scores(self, held):
        keys = held.read("keys").masked_fill(~held.live[..., None], 0.0)
        return -(keys * torch.nn.functional.normalize(keys, dim=-1).mean(1, keepdim=True)).sum(-1)


class CountsEmptySlots(KeyDiff):
    def scores(self, held):
        keys = held.read("keys").nan_to_num(0.0)
        unit = torch.nn.functional.normalize(keys, dim=-1)
        return -torch.cosine_similarity(keys, unit.mean(1, keepdim=True), dim=-1)


@pytest.mark.refuses("key_diff")
@pytest.mark.parametrize("wrong", [EvictsTheDistinctive, AveragesKeysAsTheyAre, ComparesWithAllHeads,
                                   ProjectsInsteadOfTheCosine, CountsEmptySlots])
def test_a_wrong_choice_is_refused(wrong):
    assert any(stays(wrong(size=5), what) != by_hand(what, 5, 0) for what in CASES)


def test_a_dissimilar_key_is_retained_among_similar_ones():
    keys = torch.tensor([[[1.0, 0.1], [5.0, 0.0], [0.0, 1.0], [2.0, 0.2]]])
    assert stays(make("key_diff", size=1), held(keys)) == [{2}]
