"""Draft trees: distinct siblings, stochastic beams, independent drafts, and the overhead of a large tree."""
from __future__ import annotations

from collections import defaultdict
from itertools import permutations, product
from math import prod

import pytest
from registry import Collapse, title
from tables import Enumerating, TableModel, distance, product_law

from playground.algorithms.speculative.drafting import best_of_level, level_distributions
from playground.algorithms.speculative.verification import Ruling, reject
from playground.algorithms.speculative.without_replacement import RemainingTokens
from playground.contract import find, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import residual_distribution
from playground.errors import Refusal
from strategies.speculative.k_seq import optimal_transport as transport
from support.draft_trees import P, tokens_of_first_round
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import Judged, collapses, divided_by, first_drafts, off, speculative_lane

CHAIN = speculative_lane("draft_model", "rejection", AT_ONE, depth=3)
COLLAPSES = {
    "rsd_c": [
        *collapses("rsd_c", branching=""),
        Collapse(speculative_lane("rsd_c", "rejection", AT_ONE, branching="1 1 1"), CHAIN),
    ],
    "rsd_s": [
        *collapses("rsd_s", depth=0),
        Collapse(speculative_lane("rsd_s", "rejection", AT_ONE, width=1, depth=3), CHAIN),
    ],
    "spectr": [
        *collapses("spectr", length=0),
        Collapse(speculative_lane("spectr", "rejection", AT_ONE, rows=1, length=3), CHAIN),
        Collapse(speculative_lane("spectr", "k_seq", AT_ONE, rows=1, length=3), CHAIN),
    ],
}


# --- sampling without replacement ---

def test_samples_without_replacement_have_the_order_of_sequential_sampling():
    draws, found = Enumerating(), defaultdict(float)
    for _ in draws.runs():
        remaining = RemainingTokens(P)
        found[tuple(remaining.take(lambda rest: draws.pick(rest, "remaining", 0)) for _ in range(3))] += draws.weight
        assert remaining.left == remaining.distinct == 0
    expected = {order: float(P[order[0]] * P[order[1]] / (1 - P[order[0]])) for order in permutations(range(3))}
    assert distance(found, expected) < 1e-12


def sequences_without_replacement(model: TableModel, prompt: list[int], width: int, length: int) -> dict[tuple, float]:
    """Distribution of the ordered beam by the chain rule: `width` continuations sampled without replacement."""
    chance = product_law(model, prompt, length)

    def drawn(order: tuple) -> float:
        return prod(chance[text] / (1 - sum(chance[before] for before in order[:i])) for i, text in enumerate(order))

    return {order: drawn(order) for order in permutations(chance, width)}


@pytest.mark.slow
@pytest.mark.oracle("rsd_s")
@pytest.mark.parametrize("width, depth", [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_the_beam_of_rsd_s_samples_whole_continuations_without_replacement(width, depth):
    models, found = tables("ab" if width == 3 else "abc"), defaultdict(float)
    config = speculative_lane("rsd_s", "sample_match", AT_ONE, width=width, depth=depth)
    for weight, tree, _ in first_drafts(config, models, depth + 1):
        leaves = [tuple(tree.prefix(node)) for node in range(len(tree)) if len(tree.path(node)) == depth]
        found[tuple(leaves)] += weight
    assert distance(found, sequences_without_replacement(models["draft"], [0], width, depth)) < EXACT


def test_a_beam_of_full_width_holds_every_continuation():
    for _, tree, _ in first_drafts(speculative_lane("rsd_s", "greedy_match", width=9, depth=2), tables("abc"), 3):
        assert {tuple(tree.prefix(node)) for node in range(len(tree))} == {
            *product(range(3)),
            *product(range(3), repeat=2),
        }


def test_greedily_the_beam_of_rsd_s_is_that_of_beam_search():
    models = tables("abcd", seed=3)
    ((_, tree, _),) = first_drafts(speculative_lane("rsd_s", "greedy_match", width=2, depth=2), models, 3)
    first = sorted(product_law(models["draft"], [0], 1).items(), key=lambda item: -item[1])[:2]
    both = product_law(models["draft"], [0], 2)
    second = sorted((text for text in both if text[:1] in dict(first)), key=lambda text: -both[text])[:2]
    assert [tuple(tree.prefix(node)) for node in range(len(tree))] == [text for text, _ in first] + second


@pytest.mark.parametrize("branching, levels", [("3 2", [3, 6]), ("2,2,1", [2, 4, 4]), ("9", [4])])
def test_rsd_c_has_the_requested_number_of_distinct_children(branching, levels):
    for _, tree, _ in first_drafts(speculative_lane("rsd_c", "greedy_match", branching=branching), tables("abcd"), 4):
        assert [
            sum(len(tree.path(node)) == level for node in range(len(tree))) for level in range(1, tree.depth() + 1)
        ] == levels
        assert len({tuple(tree.prefix(node)) for node in range(len(tree))}) == len(tree)


@pytest.mark.parametrize("branching", ["8 8", "0", "two", "2 -1", "65"])
def test_an_impossible_tree_is_refused_in_one_sentence(branching):
    with pytest.raises(Refusal, match=r"^branching must be whole numbers.*\.$"):
        make("rsd_c", branching=branching)


@pytest.mark.parametrize("branching, tokens", [("1", 1.7), ("2", 1.808571), ("3", 2.0)])
def test_distinct_siblings_have_the_acceptance_rate_of_the_recursive_rule(branching, tokens):
    assert tokens_of_first_round(
        speculative_lane("rsd_c", "rejection", AT_ONE, branching=branching), 1
    ) == pytest.approx(tokens, abs=1e-6)
    assert tokens_of_first_round(
        speculative_lane("rsd_s", "rejection", AT_ONE, width=int(branching)), 1
    ) == pytest.approx(tokens, abs=1e-6)


@pytest.mark.slow
def test_with_as_many_nodes_distinct_siblings_are_accepted_more_often_than_independent_ones():
    distinct = speculative_lane("rsd_c", "rejection", AT_ONE, branching="2 1")
    independent = speculative_lane("draft_model", "rejection", AT_ONE, depth=2, width=2, branching=1)
    assert tokens_of_first_round(distinct, 2) > tokens_of_first_round(independent, 2) + 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        speculative_lane("rsd_c", "rejection", AT_ONE, branching="2 1"),
        speculative_lane("rsd_s", "rejection", AT_ONE, width=2),
        speculative_lane("spectr", "k_seq", AT_ONE),
    ],
    ids=title,
)
def test_if_the_draft_is_the_target_the_first_path_is_accepted_entirely(config):
    twin = TableModel("abc")
    for _, tree, verdict in first_drafts(config, {"target": twin, "draft": twin}, 3):
        assert verdict.kept == [tree.order[0], tree.children(tree.order[0])[0]] and verdict.origin == "bonus"


# --- wrong ways to sample and verify siblings ---

class MostProbable(find("rsd_c")):
    """Siblings that were chosen, declared as sampled."""

    def _children(self, lm, tree, rows, leaves, width):
        leaves, q = level_distributions(lm, tree, rows, leaves)
        nodes = best_of_level(tree, leaves, q, width)
        for node in nodes:
            tree.q[node] = q[leaves.index(tree.parents[node])]
        return nodes


class Pruned(find("rsd_c")):
    """Feeds only the most probable of the sampled siblings."""

    def _children(self, lm, tree, rows, leaves, width):
        return [self._child(lm, tree, leaf, q, width) for leaf, q in zip(*level_distributions(lm, tree, rows, leaves))]

    def _child(self, lm, tree, leaf, q, width):
        remaining = RemainingTokens(q)
        tokens = [remaining.take(lambda rest: lm.draw(rest, 0, "draft")) for _ in range(width)]
        return tree.add(max(tokens, key=lambda token: float(q[token])), leaf, q)


class Merged(find("spectr")):
    """Loses how often a node was sampled."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        tree.order = list(dict.fromkeys(tree.order))
        return tree


def turned_round(p, children, tree, flip, draw) -> Ruling:
    return reject(p, children[::-1], tree, flip, draw)


def against_q_as_it_was(p, children, tree, flip, draw) -> Ruling:
    r = p
    for child in children:
        token, q = tree.tokens[child], tree.q[child]
        if flip(min(1.0, float(r[token] / q[token])))[0]:
            return Ruling(child)
        r = residual_distribution(r, q)
    return Ruling(None, draw(r))


WRONG_WAYS = {
    "the most probable siblings taken for drawn ones": (MostProbable("2"), Judged(reject)),
    "the best of the drawn siblings fed alone": (Pruned("2"), Judged(reject)),
    "siblings judged in another order than drawn": (make("rsd_c", branching="2"), Judged(turned_round)),
    "a stochastic beam judged in another order than drawn": (make("rsd_s", width=2), Judged(turned_round)),
    "ratios against q as it was before the first sibling": (make("rsd_c", branching="2"), Judged(against_q_as_it_was)),
    "k-SEQ that divides by nothing": (make("spectr", rows=2), Judged(divided_by(lambda k: 1.0))),
    "k-SEQ over distinct siblings": (make("rsd_c", branching="2"), Judged(transport.k_seq)),
    "k-SEQ over rows that were merged without a count": (Merged(2, 4), Judged(transport.k_seq)),
}
RIGHT_WAYS = {
    "rsd_c": (make("rsd_c", branching="2"), Judged(reject)),
    "rsd_s": (make("rsd_s", width=2), Judged(reject)),
    "k-SEQ": (make("spectr", rows=2), Judged(transport.k_seq)),
    "k-SEQ that divides by more than it has to": (make("spectr", rows=2), Judged(divided_by(float))),
}


@pytest.mark.refuses("rsd_c", "spectr", "k_seq")
@pytest.mark.parametrize("drafter, verifier", WRONG_WAYS.values(), ids=WRONG_WAYS)
def test_a_wrong_drafter_or_verifier_is_detected(drafter, verifier):
    assert off(drafter, verifier) > WRONG


@pytest.mark.oracle("rsd_c", "rsd_s", "spectr")
@pytest.mark.parametrize("drafter, verifier", RIGHT_WAYS.values(), ids=RIGHT_WAYS)
def test_correct_drafters_and_verifiers_keep_the_targets_distribution(drafter, verifier):
    assert off(drafter, verifier) < EXACT


def test_a_text_is_followed_to_the_last_of_its_tokens_that_the_tree_has():
    tree = TokenTree()
    first = tree.add(5)
    second = tree.add(6, first)
    other = tree.add(7, first)
    blend = tree.blend([8, 9], [0.9, 0.1], other)
    assert tree.follow([5, 7, 1], len(tree)) == other and tree.follow([1], len(tree)) == ROOT
    assert tree.follow([5, 7], other) == first, "the other child is not among the first nodes"
    assert tree.follow([5, 7, 8], len(tree)) == other, "a node for several tokens is none of them"
    assert tree.families() == {ROOT: [first], first: [second, other], other: [blend]}
