"""Hydra++: its prefix layer over the whole text with the library's modules, then each head by its formula."""
from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import silu

from playground.algorithms.draft_heads.accuracy_tree import best_paths
from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows
from playground.contract import find
from support.draft_heads import (
    decoder_layer,
    differing,
    embed,
    head,
    is_greedy,
    log_probabilities,
    norm,
    proposed,
    random_weights,
    states,
    written,
)
from support.head_lessons import Lessons, cross_entropy, differ, first_losses, mean, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "hydra_plus_plus", {"nodes": 9, "depth": 3, "ranks": 3}
BRIEF = {"hydra_plus_plus": {"weights": "random", "nodes": 5, "depth": 2, "ranks": 2}}
COLLAPSES = {"hydra_plus_plus": collapses("hydra_plus_plus", weights="random", nodes=0)}
LAYER = "prefix_embeding_layer."


def prefix(weights, rows):
    """The layer and its norm, over a whole text."""
    return norm(weights, f"{LAYER}norm")(decoder_layer(weights, f"{LAYER}layers.0.")(rows))


def output(weights, number: int, s):
    """R s + r + SiLU(A s + a), then three times x + SiLU(B x + b) with the same B and b."""
    def affine(name, x):
        return x @ weights[f"hydra_mlp.{number}.{name}.weight"].T + weights[f"hydra_mlp.{number}.{name}.bias"]

    x = affine("0.res_connection", s) + silu(affine("0.linear", s))
    for _ in range(3):
        x = x + silu(affine("1.linear", x))
    return x


def expected(proposal):
    weights, found = random_weights(NAME), {}
    known, unread = states(proposal.tokens[:-proposal.unread])[-1], proposal.tokens[-proposal.unread:]
    h = prefix(weights, known)[-1]
    for path in best_paths(weights["accuracy"][proposal.unread - 1:][:3, :3].tolist(), 9):
        parent = () if len(path) == 1 else found.get(path[:-1])
        if parent is not None:
            s = torch.cat([h, embed([*unread, *parent]).flatten()])
            logits = log_probabilities(output(weights, proposal.unread - 1 + len(parent), s))
            found[path] = (*parent, int(logits.sort(descending=True).indices[path[-1]]))
    return set(found.values())


@pytest.mark.oracle("hydra_plus_plus")
def test_children_follow_from_the_whole_text_and_the_path():
    assert not any(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled=True))


class ForgetsEarlierRounds(find("hydra_plus_plus")):
    """Wrong: the layer reads the newest state alone."""

    def state(self, lm):
        last = lm.target.states.length - 1
        place = NewRows(HeadCache(), torch.tensor([last]))
        return self.network.prefix_embeding_layer(lm.target.states.of(lm.depth, last), place)


class RestartsPositions(find("hydra_plus_plus")):
    """Wrong: in every round positions are counted from 0."""

    def state(self, lm):
        layer = self.network.prefix_embeding_layer.layers[0].self_attn
        layer.states = lambda rows, positions: type(layer).states(layer, rows, positions - positions[0])
        return super().state(lm)


class StateOfAnotherLayer(find("hydra_plus_plus")):
    """Wrong: the layer reads the input of the target's last layer."""

    def state_layers(self, depth):
        return depth - 1, depth

    def state(self, lm):
        return super().state(_OneLayerEarlier(lm))


class _OneLayerEarlier:
    def __init__(self, lm):
        self.tokens, self.target, self.target_model, self.depth = lm.tokens, lm.target, lm.target_model, lm.depth - 1


class AppliesTheSecondBlockOnce(find("hydra_plus_plus")):
    """Wrong: heads of two blocks."""

    def drafted(self, lm, budget):
        self.network.repeats = 1
        return (yield from super().drafted(lm, budget))


WRONG = [ForgetsEarlierRounds, RestartsPositions, StateOfAnotherLayer, AppliesTheSecondBlockOnce]


@pytest.mark.refuses("hydra_plus_plus")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_states_positions_and_blocks_are_detected(wrong):
    assert any(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.oracle("hydra_plus_plus")
def test_committed_tokens_that_the_target_has_not_read_come_first():
    found = proposed(head(NAME, random_weights(NAME), **KNOBS), unread=2)
    assert found.prefixes and found.prefixes == expected(found)


def test_random_heads_leave_a_greedy_text_unchanged():
    assert is_greedy(written(head(NAME, random_weights(NAME), **KNOBS)))


def expected_losses(lessons: Lessons, late: int = 0) -> list[float]:
    """Cross-entropy of each head with the target's distribution one token before the one it predicts."""
    weights, losses = random_weights(NAME), []
    ids, embeddings, lm_head = lessons.batch.ids, lessons.embeddings.double(), lessons.lm_head.double()
    h = [prefix(weights, rows) for rows in lessons.states]
    for i in range(4):
        losses.append(mean([
            cross_entropy(
                lm_head @ output(weights, i, torch.cat([h[text][t], embeddings[ids[text, t + 1:t + 2 + i]].flatten()])),
                (lm_head @ lessons.states[text, t + 1 + i - late]).softmax(-1),
            )
            for text, t in targets(i + 2)
        ]))
    return losses


@pytest.mark.oracle("hydra_plus_plus")
@pytest.mark.refuses("hydra_plus_plus")
def test_heads_are_trained_on_the_targets_distributions_at_their_depth(monkeypatch):
    monkeypatch.setattr(sys.modules[find(NAME).__module__], "DROPOUT", 0.0)
    lessons = Lessons(NAME)
    found = first_losses(lessons)
    assert not differ(found, expected_losses(lessons))
    assert differ(found, expected_losses(lessons, late=1))


@pytest.mark.strategy("hydra_plus_plus")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
