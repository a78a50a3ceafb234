"""ADED: tri-gram search: its tree against one by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections import Counter
from itertools import product
from math import log, sqrt
from random import Random

import pytest

from playground.contract import Drafter, find
from strategies.speculative.aded import TriGrams
from support.speculation_oracles import NAMES, assert_refused

Table = dict[tuple[int, int], dict[int, float]]
STEPS, LENGTH, C1, C2 = 60, 4, 4.0, 8.0


def expected_weight(known: Table, pair_: tuple[int, int], steps: int) -> float:
    """Expected sum of weights of a random path of at most so many tokens, each sampled by its weight."""
    row = known.get(pair_, {}) if steps else {}
    total = sum(row.values())
    rest = {token: expected_weight(known, (pair_[1], token), steps - 1) for token in row}
    return sum(weight / total * (weight + rest[token]) for token, weight in row.items())


def searched_by_paths(known: Table, start: tuple[int, int]) -> Counter:
    """Visits of every path of tokens after the pair `start`, by PUCT as the paper writes it."""
    visits, scores, expanded = Counter(), Counter(), set()

    def row(path: tuple[int, ...]) -> dict[int, float]:
        return known.get((*start, *path)[-2:], {})

    def promise(path: tuple[int, ...], token: int, weight: float) -> float:
        child, n = (*path, token), visits[path]
        if not visits[child]:
            return float("inf")
        return scores[child] / visits[child] + (C1 + log((n + C2 + 1) / C2)) * weight * sqrt(n) / (1 + visits[child])

    for _ in range(STEPS):
        path: tuple[int, ...] = ()
        while path in expanded and row(path) and len(path) + 1 < LENGTH:
            path = (*path, max(row(path), key=lambda token: promise(path, token, row(path)[token])))
        if path not in expanded and len(path) + 1 < LENGTH:
            expanded.add(path)
            path = (*path, *list(row(path))[-1:])
        weights = sum(row(path[:i])[token] for i, token in enumerate(path))
        score = 1 + weights + expected_weight(known, (*start, *path)[-2:], LENGTH - 1 - len(path))
        for end in range(len(path) + 1):
            visits[path[:end]] += 1
            scores[path[:end]] += score
    return visits


def visits_of(place, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: place.visits}
    for child in place.children or []:
        found |= visits_of(child, (*path, child.pair[1]))
    return {path: visits for path, visits in found.items() if visits}


def random_table(chance: Random) -> Table:
    """Up to three of four tokens after every pair; no two weights are equal."""
    rows = {pair_: chance.sample(range(4), chance.randrange(4)) for pair_ in product(range(4), repeat=2)}
    return {pair_: {token: chance.choice([0.04, 0.5, 1.0, 2.0]) + 1e-3 * chance.random() for token in row}
            for pair_, row in rows.items() if row}


def check_aded(drafter: type[Drafter]) -> None:
    """Visits of the search, and the resulting paths, on random tables."""
    for seed in range(6):
        known = random_table(Random(seed))
        searching = drafter(iterations=STEPS, length=LENGTH, c1=C1, c2=C2, paths=200)
        searching._table = TriGrams()
        searching._table.known = known
        root, expected = searching.search((0, 1)), searched_by_paths(known, (0, 1))
        assert visits_of(root) == dict(expected)
        rows = {path: known.get((0, 1, *path)[-2:], {}) for path in expected if path}
        longer = {(*path, *sorted(row, key=row.get)[-1:]) for path, row in rows.items()}
        assert set(map(tuple, searching.most_visited(root))) == longer


class IgnoresTheWeights(find("aded")):
    """Explores every child alike, whatever its probability in the table."""

    def _select(self, place):
        return min(place.children, key=lambda child: child.visits)


class NeverExplores(find("aded")):
    """Uses the mean score alone."""

    def _select(self, place):
        return max(place.children, key=lambda child: child.score / child.visits if child.visits else float("inf"))


class CountsTheRestTwice(find("aded")):
    def _expected_weight(self, pair, steps, averages):
        return 2 * super()._expected_weight(pair, steps, averages)


@pytest.mark.oracle("aded")
def test_adeds_search_visits_the_paths_of_the_formula():
    check_aded(find("aded"))


@pytest.mark.refuses("aded")
@pytest.mark.parametrize("wrong", [IgnoresTheWeights, NeverExplores, CountsTheRestTwice], ids=NAMES)
def test_a_wrong_search_is_detected(wrong):
    assert_refused(check_aded, wrong)
