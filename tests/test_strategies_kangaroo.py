"""Kangaroo: the adapter computed anew over the states after the first layers, for every draft token."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find
from support.draft_heads import LibraryAttention, differing, head, log_probabilities, norm, random_weights, states
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, ETA = "kangaroo", 0.02
KNOBS = {"eta": ETA, "depth": 5}  # chains of one to five tokens
BRIEF = {"kangaroo": {"weights": "random", "depth": 2}}
COLLAPSES = {"kangaroo": collapses("kangaroo", weights="random", depth=0)}
EXIT = 1  # of three layers


def row(tokens: list[int], layer: int = EXIT):
    """Log-probabilities of the adapter after a text, in a forward over the whole text."""
    weights = random_weights(NAME)
    attention = LibraryAttention(weights, "")
    rows = states(tokens)[layer]
    return log_probabilities(norm(weights, "norm")(rows + attention(norm(weights, "input_layernorm")(rows)))[-1])


def expected(proposal):
    """Drafting stops after the first token whose probability is below eta, which is verified as well."""
    path: list[int] = []
    for _ in range(5):
        logp = row([*proposal.tokens, *path])
        path.append(int(logp.argmax()))
        if logp.max().exp() < ETA:
            break
    return {tuple(path[:length]) for length in range(1, len(path) + 1)}


@pytest.mark.oracle("kangaroo")
def test_the_chain_is_that_of_a_forward_without_a_cache():
    assert list(differing(head(NAME, random_weights(NAME), **KNOBS), expected)) == []


class StateOfAnotherLayer(find("kangaroo")):
    """Wrong: the adapter reads the text's states before the first layer."""

    def _catch_up(self, lm, layer):
        super()._catch_up(lm, 0)

    def state_layers(self, depth):
        return 0, 1


class KeepsDraftTokens(find("kangaroo")):
    """Wrong: the adapter's cache keeps the rows of draft tokens."""

    def drafted(self, lm, budget):
        self._cache.crop = lambda length: None
        return (yield from super().drafted(lm, budget))


class PositionsOffByOne(find("kangaroo")):
    """Wrong: every row stands one position too late while it drafts."""

    def _adapted(self, rows, start):
        return super()._adapted(rows, start + (len(rows) == 1))


class DropsTheUncertain(find("kangaroo")):
    """Wrong: the token at which drafting stops is not proposed, unless it is the first."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        return tree.only(list(range(max(1, len(tree) - 1))))


@pytest.mark.refuses("kangaroo")
@pytest.mark.parametrize("wrong", [StateOfAnotherLayer, KeepsDraftTokens, PositionsOffByOne, DropsTheUncertain])
def test_wrong_states_caches_positions_and_stops_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


def test_eta_zero_drafts_chains_of_fixed_length():
    found = [p for p in differing(head(NAME, random_weights(NAME), eta=0.0, depth=3), lambda proposal: None)]
    assert {len(p.prefixes) for p in found} == {3}


@pytest.mark.strategy("kangaroo")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT


def test_random_weights_are_reproducible():
    one, same = (random_weights(NAME) for _ in range(2))
    assert all(torch.equal(one[name], same[name]) for name in one)
