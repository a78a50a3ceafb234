"""EAGLE-2: the tree of the most probable paths, by brute force."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find
from support.draft_heads import (
    LibraryAttention,
    differing,
    embed,
    feed_forward,
    head,
    log_probabilities,
    most_probable_tree,
    norm,
    random_weights,
    states,
)
from support.eagle import WithoutRollBack, WrongPositions, features_after
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "eagle_2", {"nodes": 12, "depth": 4, "width": 3}
BRIEF = {"eagle_2": {"weights": "random", "nodes": 5, "depth": 2, "width": 2}}
COLLAPSES = {"eagle_2": collapses("eagle_2", weights="random", nodes=0)}


def expected(proposal):
    weights = random_weights(NAME)
    attention, after = LibraryAttention(weights, "layers.0."), norm(weights, "layers.0.post_attention_layernorm")
    mlp = feed_forward(weights, "layers.0.")
    known = states(proposal.tokens[:-proposal.unread])[-1]

    def run(embeddings, features):
        rows = torch.cat([embeddings, features], -1) @ weights["fc.weight"].T + weights["fc.bias"]
        rows = rows + attention(rows)
        return rows + mlp(after(rows))

    def row(path):
        return log_probabilities(features_after(run, known, embed([*proposal.tokens, *path])))

    return most_probable_tree(row, depth=4, width=3, nodes=12)


@pytest.mark.slow
@pytest.mark.oracle("eagle_2")
@pytest.mark.parametrize("sampled", [False, True])
def test_the_tree_holds_the_most_probable_paths(sampled):
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled)) == []


class ByOwnProbability(find("eagle_2")):
    """Wrong: a node counts by its own probability, not by that of its path."""

    def grow(self, growing, depth):
        growing.add_one = lambda parent, token, logp: (
            growing.scores.append(logp),
            growing.tree.add(token, parent, confidence=0.5),
        )[1]
        return super().grow(growing, depth)


class KeepsDraftTokens(WithoutRollBack, find("eagle_2")):
    """Wrong: the rows of draft tokens stay in the head's cache."""


class PositionsOffByOne(WrongPositions, find("eagle_2")):
    """Wrong: draft tokens have the position of their parent."""


@pytest.mark.refuses("eagle_2")
@pytest.mark.parametrize("wrong", [ByOwnProbability, KeepsDraftTokens, PositionsOffByOne])
def test_wrong_scores_caches_and_positions_are_detected(wrong):
    assert any(proposal for proposal in differing_or_broken(wrong))


def differing_or_broken(wrong) -> list:
    """Proposals that are not those expected; a tree whose parents are missing counts too."""
    try:
        return list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))
    except (KeyError, AssertionError):
        return ["broken"]


@pytest.mark.strategy("eagle_2")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2, width=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
