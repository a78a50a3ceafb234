"""Drafters against the law of their first tree, the library's own drafts, and published procedures by hand."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations, product
from math import log, sqrt
from random import Random

import pytest
import torch
from tables import Enumerating, Law, TableModel, distance, product_law, watch, write
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from playground.algorithms.speculative.drafting import independent, new_tree
from playground.contract import Drafter, find, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.sampling import largest
from playground.events import Verdict
from strategies.speculative.aded import TriGrams
from support.speculation_oracles import AT_ONE, EXACT, NAMES, Recording, argmax, assert_refused, speculation, tables


def first_trees(drafter: Drafter, models: dict, length: int,
                *samplers: tuple[str, dict]) -> Iterator[tuple[float, TokenTree]]:
    """Every tree that may be proposed first after a prompt of one token, with its probability."""
    draws = Enumerating()
    for _ in draws.runs():
        seen = Recording(make("sample_match"))
        for lane in watch(speculation(drafter, seen, *samplers), models, [0], Limits(0, length), draws):
            if lane.generated:
                break
        yield draws.weight, seen.rounds[0][1]


def law_of_first_trees(drafter: Drafter, models: dict, length: int, describe: Callable[[TokenTree], tuple]) -> Law:
    found: Law = defaultdict(float)
    for weight, tree in first_trees(drafter, models, length, AT_ONE):
        found[describe(tree)] += weight
    return dict(found)


# --- drafters that sample: the distribution of their first tree ---

def chain_of(tree: TokenTree) -> tuple[int, ...]:
    return tuple(tree.tokens)


def siblings_of(tree: TokenTree) -> tuple[int, ...]:
    return tuple(tree.tokens[node] for node in tree.children(ROOT))


def check_draft_model(drafter: type[Drafter]) -> None:
    """Chains have the draft's distribution and every q is the row of its token; greedily they are its argmaxes."""
    models = tables()
    draft = models["draft"]
    assert distance(law_of_first_trees(drafter(depth=2), models, 3, chain_of), product_law(draft, [0], 2)) < EXACT
    p = draft.scores((0,)).softmax(-1).tolist()
    pairs = law_of_first_trees(drafter(depth=1, width=2), models, 3, siblings_of)
    assert distance(pairs, {(a, b): p[a] * p[b] for a, b in product(range(3), repeat=2)}) < EXACT
    for _, tree in first_trees(drafter(depth=2), models, 3, AT_ONE):
        rows = [draft.scores((0, *tree.prefix(parent))).softmax(-1) for parent in tree.parents]
        assert all(torch.allclose(q, row) for q, row in zip(tree.q, rows, strict=True))
    ((_, tree),) = first_trees(drafter(depth=3), models, 4)
    assert tree.tokens == [argmax(draft, [0, *tree.tokens[:i]]) for i in range(3)]


class DrawsEveryTokenFromOneRow(find("draft_model")):
    """The second token does not depend on the first."""

    def propose(self, lm, budget):
        tree = new_tree(lm, self)
        rows = yield lm.stream("draft").extend()
        for _ in range(min(self.depth, budget)):
            independent(lm, tree, rows, ROOT, 1)
        tree.parents = list(range(ROOT, len(tree) - 1))
        return tree


class TellsASofterRow(find("draft_model")):
    """q is not the distribution the token was sampled from."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        tree.q = [q if q is None else (q.log() / 2).softmax(-1) for q in tree.q]
        return tree


@pytest.mark.oracle("draft_model")
def test_chains_and_siblings_have_the_draft_models_distribution():
    check_draft_model(find("draft_model"))


@pytest.mark.refuses("draft_model")
@pytest.mark.parametrize("wrong", [DrawsEveryTokenFromOneRow, TellsASofterRow], ids=NAMES)
def test_a_wrong_draft_chain_is_detected(wrong):
    assert_refused(check_draft_model, wrong)


def without_replacement(chances: Law, count: int) -> Law:
    """Distribution of `count` outcomes sampled one after another without replacement."""
    found = {}
    for order in permutations(chances, count):
        found[order], left = 1.0, 1.0
        for outcome in order:
            found[order] *= chances[outcome] / left
            left -= chances[outcome]
    return found


def check_rsd_c(drafter: type[Drafter]) -> None:
    """The siblings of the first level, and those below the first of them."""
    models = tables()
    expected = without_replacement(product_law(models["draft"], [0], 1), 2)
    found = law_of_first_trees(drafter(branching="2"), models, 3, siblings_of)
    assert distance(found, {(a, b): chance for ((a,), (b,)), chance in expected.items()}) < EXACT
    below = law_of_first_trees(drafter(branching="1 2"), models, 3, chain_of)
    first = models["draft"].scores((0,)).softmax(-1).tolist()
    pairs = {a: without_replacement(product_law(models["draft"], [0, a], 1), 2) for a in range(3)}
    both = {(a, b, c): first[a] * chance for a in range(3) for ((b,), (c,)), chance in pairs[a].items()}
    assert distance(below, both) < EXACT


class DrawsWithReplacement(find("rsd_c")):
    """Siblings may repeat."""

    def _children(self, lm, tree, rows, leaf, width):
        return independent(lm, tree, rows, leaf, width)


@pytest.mark.oracle("rsd_c")
def test_siblings_of_rsd_c_are_sampled_without_replacement():
    check_rsd_c(find("rsd_c"))


@pytest.mark.refuses("rsd_c")
def test_siblings_sampled_with_replacement_have_another_distribution():
    assert_refused(check_rsd_c, DrawsWithReplacement)


def check_rsd_s(drafter: type[Drafter]) -> None:
    """A beam of two continuations of two tokens is sampled without replacement among all four."""
    models = tables("ab")

    def leaves(tree: TokenTree) -> tuple:
        return tuple(tuple(tree.prefix(node)) for node in range(len(tree)) if len(tree.path(node)) == 2)

    found = law_of_first_trees(drafter(width=2, depth=2), models, 3, leaves)
    assert distance(found, without_replacement(product_law(models["draft"], [0], 2), 2)) < EXACT


class ForgetsWhatWasTaken(find("rsd_s")):
    """A branch keeps its weight after a child was sampled from it."""

    def _weights(self, branches, begun, alive):
        weights = [branch.mass * (branch.remaining.left > 0) for branch in branches[:begun]]
        return weights + super()._weights(branches, begun, alive)[begun:]


class FollowsEveryBranchAlike(find("rsd_s")):
    """Gives each path one child in turn, regardless of its probability."""

    def _weights(self, branches, begun, alive):
        return [1.0 * (index == begun) for index in range(min(begun + 1, len(branches)))]


@pytest.mark.oracle("rsd_s")
def test_the_beam_of_rsd_s_is_sampled_without_replacement_among_continuations():
    check_rsd_s(find("rsd_s"))


@pytest.mark.refuses("rsd_s")
@pytest.mark.parametrize("wrong", [ForgetsWhatWasTaken, FollowsEveryBranchAlike], ids=NAMES)
def test_a_wrong_stochastic_beam_has_another_distribution(wrong):
    assert_refused(check_rsd_s, wrong)


def check_spectr(drafter: type[Drafter]) -> None:
    """Two rows of two tokens are two independent continuations; `order` names the node of each row, level by level."""
    models = tables("ab")

    def continuations(tree: TokenTree) -> tuple:
        return tuple(tuple(tree.prefix(node)) for node in tree.order[2:])

    one = product_law(models["draft"], [0], 2)
    found = law_of_first_trees(drafter(rows=2, length=2), models, 3, continuations)
    assert distance(found, {(a, b): one[a] * one[b] for a, b in product(one, repeat=2)}) < EXACT


class ForgetsRepeats(find("spectr")):
    """Loses how often a node was sampled."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        tree.order = list(dict.fromkeys(tree.order))
        return tree


@pytest.mark.oracle("spectr")
def test_rows_of_spectr_are_independent_continuations():
    check_spectr(find("spectr"))


@pytest.mark.refuses("spectr")
def test_dropping_repeated_rows_has_another_distribution():
    assert_refused(check_spectr, ForgetsRepeats)


# --- prompt lookup, as the library proposes ---

def check_prompt_lookup(drafter: type[Drafter]) -> None:
    chance, end = Random(0), 4
    for _ in range(300):
        text = [chance.randrange(5) for _ in range(chance.randrange(2, 16))]
        n_max, count = chance.randrange(1, 5), chance.randrange(1, 6)
        library = PromptLookupCandidateGenerator(torch.tensor([end]), count, n_max, max_length=1000)
        expected = library.get_candidates(torch.tensor([text]))[0][0, len(text):].tolist()
        assert drafter(n_max=n_max).look_up(text, count, lambda token: token == end) == expected


class PrefersShortEndings(find("prompt_lookup")):
    def look_up(self, text, count, ends=lambda token: False):
        found = (type(self).__base__(n_max=n, n_min=n).look_up(text, count, ends) for n in range(1, self.n_max + 1))
        return next(filter(None, found), [])


class TakesTheLatest(find("prompt_lookup")):
    def _find(self, text, n, count):
        return next((i for i in reversed(range(len(text) - n)) if text[i:i + n] == text[-n:]), None)


class GuessesTheEnd(find("prompt_lookup")):
    """Does not stop before a token that ends the text."""

    def look_up(self, text, count, ends=lambda token: False):
        return super().look_up(text, count)


@pytest.mark.oracle("prompt_lookup")
def test_prompt_lookup_proposes_what_the_library_proposes():
    check_prompt_lookup(find("prompt_lookup"))


@pytest.mark.refuses("prompt_lookup")
@pytest.mark.parametrize("wrong", [PrefersShortEndings, TakesTheLatest, GuessesTheEnd], ids=NAMES)
def test_a_wrong_lookup_differs_from_the_library(wrong):
    assert_refused(check_prompt_lookup, wrong)


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
