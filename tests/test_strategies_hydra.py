"""Hydra: each head by its formula, with the embeddings of its own path."""
from __future__ import annotations

import pytest
import torch

from playground.algorithms.draft_heads.accuracy_tree import best_paths
from playground.contract import find
from support.draft_heads import differing, embed, head, log_probabilities, proposals, random_weights, states
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "hydra", {"nodes": 9, "depth": 3, "ranks": 3}
BRIEF = {"hydra": {"weights": "random", "nodes": 5, "depth": 2, "ranks": 2}}
COLLAPSES = {"hydra": collapses("hydra", weights="random", nodes=0)}


def logits(weights, proposal, path: tuple[int, ...]):
    """Log-probabilities after a path: the head reads the last state, then the embeddings of all tokens after it."""
    number = proposal.unread - 1 + len(path)
    hidden = states(proposal.tokens[:-proposal.unread])[-1][-1]
    s = torch.cat([hidden, embed([*proposal.tokens[-proposal.unread:], *path]).flatten()])
    name = f"hydra_mlp.{number}.0"
    a = s @ weights[f"{name}.linear.weight"].T + weights[f"{name}.linear.bias"]
    r = s @ weights[f"{name}.res_connection.weight"].T + weights[f"{name}.res_connection.bias"]
    return log_probabilities(r + a * torch.sigmoid(a))


def expected(proposal):
    weights, found = random_weights(NAME), {}
    for path in best_paths(weights["accuracy"][proposal.unread - 1:][:3, :3].tolist(), 9):
        parent = () if len(path) == 1 else found.get(path[:-1])
        if parent is not None:
            found[path] = (*parent, int(logits(weights, proposal, parent).sort(descending=True).indices[path[-1]]))
    return set(found.values())


@pytest.mark.oracle("hydra")
def test_children_follow_from_the_state_and_the_path():
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected)) == []


class ForgetsThePath(find("hydra")):
    """Wrong: every head reads the embedding of the text's last token instead of those of the path."""

    def _extended(self, lm, tree, nodes, inputs, paths):
        known = lm.embed(lm.tokens[-1:])
        return {path: torch.cat([inputs[path[:-1]], known], -1) for path in paths}


class PathInReverse(find("hydra")):
    """Wrong: the newest token comes first."""

    def _extended(self, lm, tree, nodes, inputs, paths):
        found = super()._extended(lm, tree, nodes, inputs, paths)
        width = lm.target_model.width
        return {
            path: torch.cat([rows[:, :width], rows[:, width:].unflatten(1, (-1, width)).flip(1).flatten(1)], 1)
            for path, rows in found.items()
        }


@pytest.mark.slow
@pytest.mark.refuses("hydra")
@pytest.mark.parametrize("wrong", [ForgetsThePath, PathInReverse])
def test_wrong_paths_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


def test_siblings_have_different_children_and_without_embeddings_the_same():
    """With the columns of the embeddings at zero the heads are those of Medusa."""
    def lists(weights):
        found = proposals(head(NAME, weights, nodes=30, depth=2, ranks=3))
        return [
            {frozenset(path[1] for path in each.prefixes if path[:-1] == first)
             for first in {path for path in each.prefixes if len(path) == 1}
             if sum(path[:-1] == first for path in each.prefixes) == 3}
            for each in found if each.unread == 1
        ]

    weights = random_weights(NAME)
    assert any(len(lists_of_children) > 1 for lists_of_children in lists(weights))
    for name in weights:
        if name.endswith(".weight"):
            weights[name][:, 32:] = 0
    assert all(len(lists_of_children) <= 1 for lists_of_children in lists(weights))


@pytest.mark.strategy("hydra")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
