"""EAGLE-3: its layer computed anew with the library's modules, from three hidden states of the target."""
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

NAME, KNOBS = "eagle_3", {"nodes": 12, "depth": 4, "width": 3}
BRIEF = {"eagle_3": {"weights": "random", "nodes": 5, "depth": 2, "width": 2}}
COLLAPSES = {"eagle_3": collapses("eagle_3", weights="random", nodes=0)}
LAYERS = (2, 1, 0)  # of a target with three layers: the third, the middle one, and the third from the end


def expected(proposal, vocabulary=None):
    """`vocabulary`: the target's ids of the draft vocabulary, whose rows are those of the head's own lm_head."""
    weights = draft_vocabulary(vocabulary) if vocabulary else random_weights(NAME)
    attention, mlp = LibraryAttention(weights, "midlayer.", reads=64), feed_forward(weights, "midlayer.")
    embedding, hidden, after, last = (
        norm(weights, name)
        for name in (*(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")), "norm")
    )
    read = states(proposal.tokens[:-proposal.unread])
    known = torch.cat([read[layer] for layer in LAYERS], -1) @ weights["fc.weight"].T

    def run(embeddings, features):
        rows = features + attention(torch.cat([embedding(embeddings), hidden(features)], -1))
        return rows + mlp(after(rows))

    def row(path):
        features = last(features_after(run, known, embed([*proposal.tokens, *path])))
        if not vocabulary:
            return log_probabilities(features)
        found = torch.full((320,), float("-inf"), dtype=torch.float64)
        found[vocabulary] = (features @ weights["lm_head.weight"].T).log_softmax(-1)
        return found

    return most_probable_tree(row, depth=4, width=3, nodes=12)


def draft_vocabulary(ids: list[int]) -> dict:
    """Weights with an lm_head of their own, over these tokens of the target."""
    chance = torch.Generator().manual_seed(5)
    own = {
        "lm_head.weight": torch.randn(len(ids), 32, generator=chance).double(),
        "d2t": torch.tensor([token - place for place, token in enumerate(ids)]),
    }
    return {**random_weights(NAME), **own}


@pytest.mark.slow
@pytest.mark.oracle("eagle_3")
@pytest.mark.parametrize("sampled", [False, True])
def test_the_tree_is_that_of_a_forward_without_a_cache(sampled):
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled)) == []


SOME = [3, 9, 54, 71, 90, 120, 200, 310]


@pytest.mark.slow
@pytest.mark.oracle("eagle_3")
def test_a_head_with_a_draft_vocabulary_proposes_the_targets_tokens():
    drafter = head(NAME, draft_vocabulary(SOME), **KNOBS)
    assert list(differing(drafter, lambda proposal: expected(proposal, SOME))) == []


class StatesInAnotherOrder(find("eagle_3")):
    """Wrong: the late state takes the place of the early one."""

    def state_layers(self, depth):
        return super().state_layers(depth)[::-1]


class LayersOffByOne(find("eagle_3")):
    """Wrong: the states after the layers, not before them."""

    def state_layers(self, depth):
        return tuple(layer + 1 for layer in super().state_layers(depth))


class KeepsDraftTokens(WithoutRollBack, find("eagle_3")):
    """Wrong: the rows of draft tokens stay in the head's cache."""


class PositionsOffByOne(WrongPositions, find("eagle_3")):
    """Wrong: draft tokens have the position of their parent."""


@pytest.mark.slow
@pytest.mark.refuses("eagle_3")
@pytest.mark.parametrize("wrong", [StatesInAnotherOrder, LayersOffByOne, KeepsDraftTokens, PositionsOffByOne])
def test_wrong_states_caches_and_positions_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.slow
@pytest.mark.refuses("eagle_3")
def test_a_draft_vocabulary_off_by_one_is_detected():
    weights = draft_vocabulary(SOME)
    weights["d2t"] = weights["d2t"] + 1
    assert list(differing(head(NAME, weights, **KNOBS), lambda proposal: expected(proposal, SOME)))


@pytest.mark.strategy("eagle_3")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2, width=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
