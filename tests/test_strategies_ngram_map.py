"""N-gram map: drafts by the engine's own steps over a growing text, wrong variants, and the law."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from tables import distance, law, product_law

from playground.contract import find
from support.laws import AT_ONE, EXACT, tables
from support.speculation import collapses, speculative_lane
from support.wrong_variants import refused

NgramMap = find("ngram_map")
COLLAPSES = {"ngram_map": collapses("ngram_map", depth=0)}


@dataclass
class Engine:
    """The map by exhaustive search: lists [place, count, accepted] of each key, places of continuations."""

    n: int
    depth: int
    rule: str
    least: int
    keys: dict[tuple, dict] = field(default_factory=dict)
    last: list | None = None

    def draft(self, text: list[int]) -> list[int]:
        n, m, self.last = self.n, self.depth, None
        before = len(text) - 1  # the engine's text lacks the token that was just sampled
        if before < 2 * n + m:
            return []
        pattern = tuple(text[before - n + 1:])
        places = [j for j in range(1, before - n - m) if tuple(text[j:j + n]) == pattern]
        if not places:
            return []
        key = self.keys.setdefault(pattern, {"lookups": 0, "from": 0, "values": []})
        key["lookups"] += 1
        value = self.value(key, text, pattern, places[-1])
        if value is None:
            return []
        self.last = value
        return text[places[-1] + n:places[-1] + n + min(m, value[2])]

    def value(self, key: dict, text: list[int], pattern: tuple, place: int) -> list | None:
        n, m, values = self.n, self.depth, key["values"]
        if self.rule == "k":
            if not values:
                values.append([place + n, 0, m])
            return values[0]
        if key["lookups"] < self.least:
            return None
        for i in [i for i in range(key["from"], place + 1) if tuple(text[i:i + n]) == pattern]:
            same = [v for v in values if text[v[0]:v[0] + m] == text[i + n:i + n + m]]
            if not same and len(values) < 4:
                values.append([i + n, 0, m])
                same = values[-1:]
            if same:
                same[0][1] += 1
        key["from"] = place
        counts = [v[1] for v in values]
        best = counts.index(max(counts))
        return values[best] if counts[best] >= 3 * (sum(counts) - counts[best]) else None

    def accept(self, count: int) -> None:
        if self.last is not None:
            self.last[2] = count


def texts(seed: int):
    """Growing texts of few phrases: each step says how much of a draft is right, and what comes then."""
    chance = random.Random(seed)
    phrases = [chance.choices(range(4), k=chance.randint(3, 6)) for _ in range(chance.choice((2, 3, 6)))]
    weights = [8, *[1] * (len(phrases) - 1)]
    return [token for phrase in chance.choices(phrases, weights, k=60) for token in phrase]


def check_map(cls: type) -> None:
    """Rounds of speculation over given texts: the drafts are those of the engine."""
    long = 0
    for seed in range(48):
        knobs = {"n": (1, 2, 3)[seed % 3], "depth": (2, 3, 5)[seed % 2], "rule": ("k", "k4v")[seed // 3 % 2],
                 "least": (1, 3)[seed // 6 % 2]}
        drafter, engine, whole, at = cls(**knobs), Engine(**knobs), texts(seed), 4
        while at < len(whole) - knobs["depth"]:
            found, expected = drafter.look_up(whole[:at], knobs["depth"]), engine.draft(whole[:at])
            assert found == expected
            right = next((i for i, token in enumerate(expected) if token != whole[at + i]), len(expected))
            drafter.observe(expected, None, SimpleNamespace(kept=expected[:right]))
            if expected:
                engine.accept(right)
            long, at = long + len(expected), at + right + 1
    assert long > 300


class NeverLearns(NgramMap):
    def observe(self, tree, rows, verdict):
        """Wrong: what was accepted is forgotten."""


class CountsOnce(NgramMap):
    """Wrong: the latest occurrence is not counted again."""

    def _count(self, key, text, last):
        super()._count(key, text, last)
        key.counted = last + 1


class UpToTheEnd(NgramMap):
    """Wrong: takes an occurrence whose continuation is not complete."""

    def _latest(self, text):
        return self._index.latest(text[-self.n:], len(text) - self.n - 1) or None


class DraftsAnyway(NgramMap):
    """Wrong: also where no continuation is clearly the most frequent one."""

    def _chosen(self, key, text, place):
        found = super()._chosen(key, text, place)
        return found or max(key.continuations, key=lambda each: each.count, default=None)


class ManySlots(NgramMap):
    def _add(self, key, text, place):
        before = len(key.continuations)
        super()._add(key, text, place)
        if before == len(key.continuations) == 4:
            key.continuations[0].count += 1


class NoLeast(NgramMap):
    def _chosen(self, key, text, place):
        key.lookups += 2
        return super()._chosen(key, text, place)


@pytest.mark.oracle("ngram_map")
def test_drafts_are_those_of_the_engines_search():
    check_map(NgramMap)


@pytest.mark.refuses("ngram_map")
@pytest.mark.parametrize("wrong", [NeverLearns, CountsOnce, UpToTheEnd, DraftsAnyway, ManySlots, NoLeast])
def test_another_map_is_refused(wrong):
    refused(check_map, wrong)


def test_nothing_follows_the_end_of_a_text():
    text = [7, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert NgramMap(n=1, depth=4).look_up(text, 4) == [2, 3, 4, 1]
    assert NgramMap(n=1, depth=4).look_up(text, 4, lambda token: token == 3) == [2, 3]
    assert NgramMap(n=1, depth=4).look_up(text, 2) == [2, 3]


@pytest.mark.oracle("ngram_map")
@pytest.mark.parametrize("rule", ["k", "k4v"])
def test_the_law_of_a_lane_is_the_targets(rule):
    models, prompt = tables("abc"), [0, 1, 0, 1, 0, 1, 0]
    found = law(speculative_lane("ngram_map", "rejection", AT_ONE, n=1, depth=2, rule=rule), models, prompt, 3)
    assert distance(found, product_law(models["target"], prompt, 3)) < EXACT
