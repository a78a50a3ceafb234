"""Drafters against the law of their first tree, the library's own drafts, and published procedures by hand."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations, product
from random import Random

import pytest
import torch
from tables import Enumerating, Law, distance, product_law, watch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from playground.algorithms.speculative.drafting import independent, independent_level, new_tree
from playground.contract import Drafter, find, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
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

    def _children(self, lm, tree, rows, leaves, width):
        return independent_level(lm, tree, rows, leaves, width)


@pytest.mark.slow
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
