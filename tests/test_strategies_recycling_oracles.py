"""Token recycling, STAND and ADED against their procedures replayed by hand."""
from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from math import log, sqrt
from random import Random

import pytest
import torch
from tables import TableModel, write

from playground.contract import Drafter, find, make
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.sampling import largest
from playground.events import Verdict
from strategies.speculative.aded import TriGrams
from support.speculation_oracles import AT_ONE, NAMES, Recording, assert_refused, speculation

# --- token recycling: the matrix of successors replayed by hand ---

# the seven likeliest paths of the paper's tree, as ranks among the successors
RANKS = [ranks for depth in range(1, 4) for ranks in product(range(3), repeat=depth) if sum(ranks) + depth <= 3]


def recycled_paths(known: dict[int, list[int]], token: int) -> set[tuple[int, ...]]:
    """Paths of tokens along RANKS after a token."""
    found = set()
    for ranks in RANKS:
        path: list[int] = []
        for rank in ranks:
            followers = known.get(path[-1] if path else token, [])
            if rank >= len(followers):
                break
            path.append(followers[rank])
        else:
            found.add(tuple(path))
    return found


def check_token_recycling(drafter: type[Drafter]) -> None:
    model, seen, known = TableModel("abcdefgh", seed=5, spread=3), Recording(make("greedy_match")), {}
    write(speculation(drafter(nodes=len(RANKS), k=3), seen), {"target": model}, [0, 1], Limits(0, 60), Draws(0))
    for text, tree, _ in seen.rounds[:-4]:  # the last trees are cut off at the length of the text
        assert {tuple(tree.prefix(node)) for node in range(len(tree))} == recycled_paths(known, text[-1])
        for node in range(ROOT, len(tree)):
            path = tree.prefix(node)
            scores = model.scores((*text, *path)).tolist()
            known[path[-1] if path else text[-1]] = sorted(range(8), key=lambda token: -scores[token])[:3]
    assert len(known) > 5


class KeepsTheFirstSuccessors(find("token_recycling")):
    """Never replaces what was learned once."""

    def observe(self, tree, rows, verdict):
        before = dict(self._memory.known)
        super().observe(tree, rows, verdict)
        self._memory.known.update(before)


class LearnsFromAcceptedTokens(find("token_recycling")):
    def observe(self, tree, rows, verdict):
        nodes = [ROOT, *verdict.kept]
        tokens = [rows.committed[-1], *(tree.tokens[node] for node in verdict.kept)]
        self._memory.learn(tokens, rows.raw[[node + 1 for node in nodes]], self.k)


class LearnsARowLate(find("token_recycling")):
    """Takes the row before a token for the row after it."""

    def observe(self, tree, rows, verdict):
        self._memory.learn([rows.committed[-1], *tree.tokens], rows.raw.roll(1, 0), self.k)


@pytest.mark.oracle("token_recycling")
def test_recycled_trees_equal_those_of_a_matrix_updated_by_hand():
    check_token_recycling(find("token_recycling"))


@pytest.mark.refuses("token_recycling")
@pytest.mark.parametrize("wrong", [KeepsTheFirstSuccessors, LearnsFromAcceptedTokens, LearnsARowLate], ids=NAMES)
def test_a_wrong_adjacency_matrix_is_detected(wrong):
    assert_refused(check_token_recycling, wrong)


# --- STAND: means of all rows, stored separately ---

def remembered_row(rows: dict[tuple, list[torch.Tensor]], text: list[int], orders: int) -> torch.Tensor | None:
    """Mean of the rows after the longest known suffix."""
    known = (rows[tuple(text[-n:])] for n in range(orders, 0, -1) if tuple(text[-n:]) in rows)
    return next((torch.stack(found).mean(0) for found in known), None)


def check_stand(drafter: type[Drafter]) -> None:
    """Every q is the mean of the rows after the same suffix; wherever one is known there is a draft."""
    model, seen, rows, orders = TableModel("abc", seed=2), Recording(make("rejection")), defaultdict(list), 2
    assembly = speculation(drafter(nodes=6, orders=orders), seen, AT_ONE)
    write(assembly, {"target": model}, [0, 1], Limits(0, 40), Draws(0))
    drafted = 0
    for text, tree, verdict in seen.rounds[:-1]:
        assert bool(len(tree)) == (remembered_row(rows, text, orders) is not None)
        for node, parent in enumerate(tree.parents):
            assert torch.allclose(tree.q[node], remembered_row(rows, text + tree.prefix(parent), orders))
            drafted += 1
        for node in (ROOT, *verdict.kept):
            context = text + tree.prefix(node)
            for n in range(1, orders + 1):
                rows[tuple(context[-n:])].append(model.scores(tuple(context)).softmax(-1))
    assert drafted > 20


class LearnsWhatWasRejected(find("stand")):
    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, Verdict(kept=list(range(len(tree)))))


class AsksTheShortestEnding(find("stand")):
    def propose(self, lm, budget):
        self.orders, orders = 1, self.orders
        tree = yield from super().propose(lm, budget)
        self.orders = orders
        return tree


class RemembersTheLastRow(find("stand")):
    """Replaces the stored row of a suffix instead of averaging."""

    def observe(self, tree, rows, verdict):
        for node in (ROOT, *verdict.kept):
            context = rows.committed[-self.orders:] + tree.prefix(node)
            p = self._final(rows, node)
            top = largest(p, min(self.stored, len(p)))
            likely = dict(zip(top.indices.tolist(), top.values.tolist()))
            for n in range(1, self.orders + 1):
                self._memory.known[tuple(context[-n:])] = (likely, 1)


@pytest.mark.oracle("stand")
def test_stand_samples_drafts_from_the_mean_of_all_rows_after_a_suffix():
    check_stand(find("stand"))


@pytest.mark.refuses("stand")
@pytest.mark.parametrize("wrong", [LearnsWhatWasRejected, AsksTheShortestEnding, RemembersTheLastRow], ids=NAMES)
def test_a_wrong_row_memory_is_detected(wrong):
    assert_refused(check_stand, wrong)


# --- ADED: the published search over paths in place of linked nodes ---

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
