"""Clover-2: the augmenting layers over the whole text with the library's modules, then one recurrent head."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find
from support.clover import level_tree, similar
from support.draft_heads import (
    decoder_layer,
    differing,
    head,
    is_greedy,
    library,
    log_probabilities,
    norm,
    proposed,
    random_weights,
    states,
    written,
)
from support.head_lessons import Lessons, cross_entropy, differ, first_losses, mean, smooth_l1, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "clover_2", {"nodes": 9, "depth": 4, "width": 3, "top_p": 0.7}
BRIEF = {"clover_2": {"weights": "random", "nodes": 4, "depth": 2}}
COLLAPSES = {"clover_2": collapses("clover_2", weights="random", nodes=0)}


def merged(weights, name, state, e):
    """s + a v, where `a` is the cosine of q and k; all three maps have a bias."""
    def affine(part, x):
        return weights[f"{name}.{part}.weight"] @ x + weights[f"{name}.{part}.bias"]

    with_norm = norm(weights, f"{name}.input_layernorm")(state)
    return state + similar(affine("q", with_norm), affine("k", e)) * affine("v", e)


def augmented(weights, rows, following):
    """The states of a text, each with the next token merged into it, after two layers and a norm."""
    rows = torch.stack([merged(weights, "clover_head_mlp_rnn", *each) for each in zip(rows, following)])
    for layer in ("layers.0.", "layers.1."):
        rows = decoder_layer(weights, layer)(rows)
    return norm(weights, "clover_norm")(rows)


def output(weights, state, following):
    """The lm_head's input after a path; `following` are the rows of the lm_head of its tokens but the first."""
    x = weights["clover_head_mlp.weight"] @ state + weights["clover_head_mlp.bias"]
    for e in following:
        state = merged(weights, "clover_head_mlp_rnn2", state, e)
        x = weights["clover_head_mlp2.weight"] @ torch.cat([state, e]) + weights["clover_head_mlp2.bias"]
    return norm(weights, "clover_head_norm")(x)


def expected(proposal, known_layer=-1):
    weights, keys = random_weights(NAME), library().lm_head.weight
    read = len(proposal.tokens) - proposal.unread
    known = states(proposal.tokens[:read])[known_layer]
    state = augmented(weights, known, keys[proposal.tokens[1:read + 1]])[-1]

    def row(path):
        return log_probabilities(output(weights, state, keys[[*proposal.tokens[read + 1:], *path]]))

    return level_tree(row, depth=min(4, 6 - proposal.unread), budget=9, width=3, top_p=0.7, ratio=0.0)


@pytest.mark.oracle("clover_2")
def test_the_tree_is_that_of_a_recurrence_without_a_cache():
    assert not any(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled=True))


class KeepsStaleRows(find("clover_2")):
    """Wrong: the caches of the augmenting layers are never rolled back, so the last row is read twice."""

    def _state(self, lm):
        super()._state(lm)
        for cache in self._rows.caches:
            cache.crop = lambda length: None
        return super()._state(lm)


class RestartsPositions(find("clover_2")):
    """Wrong: in every round positions are counted from 0."""

    def _state(self, lm):
        for layer in self.network.layers:
            own = layer.self_attn
            own.states = lambda rows, positions, own=own: type(own).states(own, rows, positions - positions[0])
        return super()._state(lm)


class OneTokenLate(find("clover_2")):
    """Wrong: every state is merged with its own token instead of the next."""

    def _state(self, lm):
        plain = type(self.network).augmented
        self.network.augmented = lambda states, following, places: plain(
            self.network, states, following.roll(1, 0), places
        )
        return super()._state(lm)


class FeedsOutputsBack(find("clover_2")):
    """Wrong: the recurrent state is the input of the lm_head."""

    def drafted(self, lm, budget):
        plain = type(self.network).step
        self.network.step = lambda *rows: (plain(self.network, *rows)[1],) * 2
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("clover_2")
@pytest.mark.parametrize("wrong", [KeepsStaleRows, RestartsPositions, OneTokenLate, FeedsOutputsBack])
def test_wrong_caches_positions_tokens_and_states_are_detected(wrong):
    assert any(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.refuses("clover_2")
def test_the_state_of_another_layer_is_detected():
    drafter = head(NAME, random_weights(NAME), **KNOBS)
    assert any(differing(drafter, lambda proposal: expected(proposal, -2)))


@pytest.mark.oracle("clover_2")
def test_committed_tokens_that_the_target_has_not_read_come_first():
    found = proposed(head(NAME, random_weights(NAME), **KNOBS), unread=2)
    assert found.prefixes and found.prefixes == expected(found)


def test_random_heads_leave_a_greedy_text_unchanged():
    assert is_greedy(written(head(NAME, random_weights(NAME), **KNOBS)))


def expected_losses(lessons: Lessons, late: int = 0) -> list[float]:
    """For head k, weights 0.7^k: ten times the distance to the target's state at its position, and the cross-entropy
    with the target's distribution there.
    """
    weights, ids, keys = random_weights(NAME), lessons.batch.ids, lessons.lm_head.double()
    g = [augmented(weights, rows, keys[own.roll(-1)]) for rows, own in zip(lessons.states, ids)]

    def loss(k, text, t):
        found = output(weights, g[text][t], keys[ids[text, t + 2:t + 2 + k]])
        true = lessons.states[text, t + 1 + k - late]
        return 10 * smooth_l1(found, true) + cross_entropy(keys @ found, (keys @ true).softmax(-1))

    return [0.7**k * mean([loss(k, text, t) for text, t in targets(k + 2)]) for k in range(5)]


@pytest.mark.oracle("clover_2")
@pytest.mark.refuses("clover_2")
def test_heads_are_trained_on_the_targets_states_and_distributions():
    lessons = Lessons(NAME)
    found = first_losses(lessons)
    assert not differ(found, expected_losses(lessons))
    assert differ(found, expected_losses(lessons, late=1))


@pytest.mark.strategy("clover_2")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
