"""Medusa: each head by its formula, the tree by its accuracies."""
from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from playground.algorithms.draft_heads.accuracy_tree import best_paths
from playground.contract import find
from support.draft_heads import differing, head, log_probabilities, proposals, random_weights, states
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "medusa", {"nodes": 9, "depth": 3, "ranks": 3}
BRIEF = {"medusa": {"weights": "random", "nodes": 5, "depth": 2, "ranks": 2}}
COLLAPSES = {"medusa": collapses("medusa", weights="random", nodes=0)}


def expected(proposal):
    """The tree from the formula of the paper: head k reads the state of the last token that the target has read."""
    weights = random_weights(NAME)
    hidden = states(proposal.tokens[:-proposal.unread])[-1][-1]
    ranked = []
    for k in range(proposal.unread - 1, 3):
        linear = hidden @ weights[f"{k}.0.linear.weight"].T + weights[f"{k}.0.linear.bias"]
        logits = log_probabilities(hidden + linear * torch.sigmoid(linear))
        ranked.append(logits.sort(descending=True).indices[:3].tolist())
    shares = weights["accuracy"][:, :3].tolist()
    paths = brute_force(shares[: len(ranked)], 9)
    return {tuple(ranked[depth][rank] for depth, rank in enumerate(path)) for path in paths}


def brute_force(accuracy: list[list[float]], nodes: int) -> set[tuple[int, ...]]:
    """The paths with the largest products, of all paths there are; ties are broken as in a heap."""
    paths = [
        path
        for depth in range(1, len(accuracy) + 1)
        for path in product(*(range(len(ranks)) for ranks in accuracy[:depth]))
    ]
    return set(sorted(paths, key=lambda path: (-prod(accuracy[d][r] for d, r in enumerate(path)), path))[:nodes])


@pytest.mark.oracle("medusa")
def test_the_tree_combines_the_best_tokens_of_each_head():
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected)) == []


class StateOfTheTokenBefore(find("medusa")):
    """Wrong: the heads read the state one position too early."""

    def drafted(self, lm, budget):
        of = lm.target.states.of
        lm.target.states.of = lambda layer, start: of(layer, start - 1)[:1]
        try:
            return (yield from super().drafted(lm, budget))
        finally:
            del lm.target.states.of


class StateOfAnotherLayer(find("medusa")):
    """Wrong: the heads read the input of the last layer."""

    def state_layers(self, depth):
        return depth - 1, depth

    def drafted(self, lm, budget):
        of = lm.target.states.of
        lm.target.states.of = lambda layer, start: of(layer - 1, start)
        try:
            return (yield from super().drafted(lm, budget))
        finally:
            del lm.target.states.of


class HeadsOffByOne(find("medusa")):
    """Wrong: the second head drafts the first token."""

    @classmethod
    def build(cls, weights):
        network = super().build(weights)
        network.heads = network.heads[1:]
        return network


@pytest.mark.refuses("medusa")
@pytest.mark.parametrize("wrong", [StateOfTheTokenBefore, StateOfAnotherLayer, HeadsOffByOne])
def test_wrong_states_and_heads_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [1, 7, 40])
def test_the_paths_are_those_with_the_largest_products(seed, nodes):
    accuracy = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    accuracy = accuracy.sort(descending=True).values.tolist()
    found = best_paths(accuracy, nodes)
    assert set(found) == brute_force(accuracy, nodes)
    assert all(path[:-1] in found[:place] or len(path) == 1 for place, path in enumerate(found))


def test_no_rank_that_was_never_right_enters_the_tree():
    assert best_paths([[0.5, 0.0]], 5) == [(0,)]


@pytest.mark.strategy("medusa")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT


def test_nothing_is_drafted_deeper_than_the_text_may_grow():
    found = proposals(head(NAME, random_weights(NAME), nodes=40))
    assert all(max(map(len, proposal.prefixes)) <= proposal.budget for proposal in found)
    assert found[-1].budget < 4
