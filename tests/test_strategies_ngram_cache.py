"""N-gram caches (llama.cpp): what it accepts, by enumeration, and wrong variants against the same check."""
from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from tables import distance, law, product_law

from playground.contract import find
from strategies.speculative.ngram_cache import Runs
from support.laws import AT_ONE, EXACT, tables
from support.speculation import collapses, speculative_lane
from support.wrong_variants import refused

Cache = find("ngram_cache")
COLLAPSES = {"ngram_cache": collapses("ngram_cache", length=0)}
LIMITS = {"context": [(2, 66), (2, 50), (1, 50), (1, 50)], "dynamic": [(4, 75), (3, 66), (2, 66), (2, 66)]}


def followers(text: list[int], ngram: list[int]) -> Counter:
    n = len(ngram)
    return Counter(text[i + n] for i in range(len(text) - n) if text[i:i + n] == ngram)


def by_hand(text: list[int], earlier: list[int], corpus: list[int], count: int) -> list[int]:
    drafted: list[int] = []
    while len(drafted) < count and (token := next_by_hand(text, earlier, corpus, drafted)) is not None:
        drafted.append(token)
    return drafted


def next_by_hand(text: list[int], earlier: list[int], corpus: list[int], drafted: list[int]) -> int | None:
    recent = [*text, *drafted][-4:]
    static = followers(corpus, recent[-2:]) if len(recent) > 1 else Counter()
    for cache, source in (("context", text), ("dynamic", earlier)):
        for n in range(min(4, len(recent)), 0, -1):
            counts, (least, percent) = followers(source, recent[-n:]), LIMITS[cache][n - 1]
            total = sum(counts.values())
            if total and total >= least:
                best = max(counts, key=lambda t, c=counts: c[t] * (100 * static[t] if static[t] else 1))
                if 100 * counts[best] >= percent * total:
                    return best
    total = sum(static.values())
    best = max(static, key=static.get, default=None)
    return best if total >= 2 and 100 * static[best] >= 50 * total else None


def random_cases(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    chance = random.Random(3)
    return [tuple(chance.choices(range(chance.choice((3, 5))), k=size) for size in (chance.randint(1, 20), 40, 40))
            for _ in range(count)]


def drafted_by(drafter, text: list[int], earlier: list[int], corpus: list[int]) -> list[int]:
    runs = Runs()
    runs.current.read(earlier)
    lm = SimpleNamespace(tokens=text, generated=1, spell=lambda words: corpus, ends=lambda token: False,
                         memory=lambda name, build: runs)
    steps = drafter.propose(lm, 8)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value.tokens


def check_caches(cls: type) -> None:
    for case in random_cases(150):
        assert drafted_by(cls(length=6, corpus="x"), *case) == by_hand(*case, 6)


class ShortestFirst(Cache):
    def _next(self, recent):
        found = [super(ShortestFirst, self)._next(recent[-n:]) for n in range(1, len(recent) + 1)]
        return next((each for each in found if each[0] is not None), (None, ""))


class NeverAsksTheStaticCache(Cache):
    def __post_init__(self):
        self.static = False


class ForgetsEarlierRuns(Cache):
    def __post_init__(self):
        self.dynamic = False


@pytest.mark.oracle("ngram_cache")
def test_drafts_are_the_favourites_that_counting_finds():
    check_caches(Cache)


@pytest.mark.refuses("ngram_cache")
@pytest.mark.parametrize("wrong", [ShortestFirst, NeverAsksTheStaticCache, ForgetsEarlierRuns])
def test_wrong_caches_are_refused(wrong):
    refused(check_caches, wrong)


@pytest.mark.oracle("ngram_cache")
def test_the_law_of_a_lane_with_ngram_caches_is_the_targets():
    models = tables("abc")
    found = law(speculative_lane("ngram_cache", "rejection", AT_ONE, corpus="abcabcaab"), models, [0, 1], 3)
    assert distance(found, product_law(models["target"], [0, 1], 3)) < EXACT
