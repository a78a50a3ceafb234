"""EAGLE: its layer computed anew with the library's modules, without a cache, for every draft token."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find
from support.draft_heads import (
    LibraryAttention,
    chosen,
    differing,
    embed,
    feed_forward,
    head,
    log_probabilities,
    norm,
    random_weights,
    states,
)
from support.eagle import WithoutRollBack, WrongPositions, features_after
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "eagle", {"nodes": 25, "depth": 4}
BRIEF = {"eagle": {"weights": "random", "nodes": 5, "depth": 2}}
COLLAPSES = {"eagle": collapses("eagle", weights="random", nodes=0)}
PAPER = [
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
]  # fmt: skip


def layer(weights):
    """EAGLE-1's layer: a Llama layer without the norm before its attention, after a linear map of both inputs."""
    attention, after = LibraryAttention(weights, "layers.0."), norm(weights, "layers.0.post_attention_layernorm")
    mlp = feed_forward(weights, "layers.0.")

    def run(embeddings, features):
        rows = torch.cat([embeddings, features], -1) @ weights["fc.weight"].T + weights["fc.bias"]
        rows = rows + attention(rows)
        return rows + mlp(after(rows))

    return run


def expected(proposal):
    """Every path of ranks that is at most four deep, computed from the text on."""
    run, found = layer(random_weights(NAME)), {}
    known = states(proposal.tokens[:-proposal.unread])[-1]
    for path in (path for path in PAPER if len(path) <= 4):
        parent = () if len(path) == 1 else found[path[:-1]]
        features = features_after(run, known, embed([*proposal.tokens, *parent]))
        found[path] = (*parent, chosen(log_probabilities(features), path[-1] + 1)[-1][1])
    return set(found.values())


@pytest.mark.slow
@pytest.mark.oracle("eagle")
@pytest.mark.parametrize("sampled", [False, True])
def test_the_tree_is_that_of_a_forward_without_a_cache(sampled):
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled)) == []


class StateOfAnotherLayer(find("eagle")):
    """Wrong: continues the input of the last layer."""

    def state_layers(self, depth):
        return (depth - 1,)


class KeepsDraftTokens(WithoutRollBack, find("eagle")):
    """Wrong: the rows of draft tokens stay in the head's cache."""


class PositionsOffByOne(WrongPositions, find("eagle")):
    """Wrong: draft tokens have the position of their parent."""


@pytest.mark.slow
@pytest.mark.refuses("eagle")
@pytest.mark.parametrize("wrong", [StateOfAnotherLayer, KeepsDraftTokens, PositionsOffByOne])
def test_wrong_states_caches_and_positions_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


def test_the_tree_is_that_of_the_released_code():
    counts = __import__(find("eagle").__module__, fromlist=["children"]).children(25)
    assert sorted((*path, rank) for path, count in counts.items() for rank in range(count)) == sorted(PAPER)


@pytest.mark.strategy("eagle")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
