"""Clover: its heads in a chain, computed anew for every path with the library's modules and without a cache."""
from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows
from playground.contract import find
from support.clover import level_tree, similar
from support.draft_heads import (
    decoder_layer,
    differing,
    head,
    is_greedy,
    library,
    log_probabilities,
    proposed,
    random_weights,
    states,
    written,
)
from support.head_lessons import Lessons, cross_entropy, differ, first_losses, mean, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "clover", {"nodes": 7, "depth": 3, "width": 4, "top_p": 0.6, "min_ratio": 0.2}
BRIEF = {"clover": {"weights": "random", "depth": 2}}
COLLAPSES = {"clover": collapses("clover", weights="random", nodes=0)}


def vectors(lm_head, tokens):
    """Rows of the lm_head, divided by the root of their mean square."""
    rows = lm_head.double()[tokens]
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def outputs(weights, augmented, path_vectors) -> list:
    """The lm_head's inputs after each token of a path; all heads share one attention decoder."""
    state, found = augmented, []
    for number, e in enumerate(path_vectors):
        q, k, v = (weights[f"decoder.{part}.weight"].double() for part in "qkv")
        state = state + similar(q @ normed(weights, state), k @ e) * (v @ e)
        x, block = state, f"blocks.{number}.linear."
        found.append(x + silu(weights[f"{block}weight"] @ x + weights[f"{block}bias"]))
    return found


def normed(weights, state):
    return weights["decoder.input_layernorm.weight"] * state / (state.square().mean() + 1e-5).sqrt()


def expected(proposal, known_layer=-1):
    weights = random_weights(NAME)
    g = decoder_layer(weights, "layers.0.")(states(proposal.tokens[:-proposal.unread])[known_layer])[-1]
    lm_head, unread = library().lm_head.weight, proposal.tokens[-proposal.unread:]

    def row(path):
        return log_probabilities(outputs(weights, g, vectors(lm_head, [*unread, *path]))[-1])

    return level_tree(row, depth=min(3, 4 - proposal.unread), budget=7, width=4, top_p=0.6, ratio=0.2)


@pytest.mark.oracle("clover")
def test_the_tree_is_that_of_a_chain_of_heads_without_a_cache():
    assert not any(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled=True))


class ForgetsEarlierRounds(find("clover")):
    """Wrong: the augmenting block reads the newest state alone."""

    def _state(self, lm):
        last = lm.target.states.length - 1
        place = NewRows(HeadCache(), torch.tensor([last]))
        return self.network.augmented(lm.target.states.of(lm.depth, last), None, [place])


class RestartsPositions(find("clover")):
    """Wrong: in every round positions are counted from 0."""

    def _state(self, lm):
        layer = self.network.layers[0].self_attn
        layer.states = lambda rows, positions: type(layer).states(layer, rows, positions - positions[0])
        return super()._state(lm)


class ReadsInputEmbeddings(find("clover")):
    """Wrong: heads read the input embeddings of draft tokens instead of their rows of the lm_head."""

    def drafted(self, lm, budget):
        plain, table = type(self.network).token_vectors, library().get_input_embeddings().weight
        tokens = {tuple(row): token for token, row in enumerate(lm.lm_head_weight.tolist())}
        self.network.token_vectors = lambda rows: plain(
            self.network, table[[tokens[tuple(row)] for row in rows.tolist()]]
        )
        return (yield from super().drafted(lm, budget))


class SoftmaxOverOneKey(find("clover")):
    """Wrong: the weight of the only key is always 1."""

    def drafted(self, lm, budget):
        self.network.decoder.similarity = lambda states, embeddings: torch.ones(len(states), 1, dtype=states.dtype)
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("clover")
@pytest.mark.parametrize("wrong", [ForgetsEarlierRounds, RestartsPositions, ReadsInputEmbeddings, SoftmaxOverOneKey])
def test_wrong_states_positions_tokens_and_weights_are_detected(wrong):
    assert any(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.refuses("clover")
def test_the_state_of_another_layer_is_detected():
    drafter = head(NAME, random_weights(NAME), **KNOBS)
    assert any(differing(drafter, lambda proposal: expected(proposal, -2)))


@pytest.mark.oracle("clover")
def test_committed_tokens_that_the_target_has_not_read_come_first():
    found = proposed(head(NAME, random_weights(NAME), **KNOBS), unread=2)
    assert found.prefixes and found.prefixes == expected(found)


def test_random_heads_leave_a_greedy_text_unchanged():
    assert is_greedy(written(head(NAME, random_weights(NAME), **KNOBS)))


def expected_losses(lessons: Lessons, late: int = 0) -> list[float]:
    """Cross-entropy of head k with the token after those that it reads; weights 0.8^k."""
    weights, ids = random_weights(NAME), lessons.batch.ids
    g = [decoder_layer(weights, "layers.0.")(rows) for rows in lessons.states]
    one_hot = torch.eye(len(lessons.lm_head), dtype=torch.float64)

    def loss(k, text, t):
        found = outputs(weights, g[text][t], vectors(lessons.lm_head, ids[text, t + 1:t + 2 + k]))[-1]
        return cross_entropy(lessons.lm_head.double() @ found, one_hot[ids[text, t + 2 + k - late]])

    return [0.8**k * mean([loss(k, text, t) for text, t in targets(k + 2)]) for k in range(3)]


@pytest.mark.oracle("clover")
@pytest.mark.refuses("clover")
def test_heads_are_trained_on_the_token_after_the_one_they_are_told():
    lessons = Lessons(NAME)
    found = first_losses(lessons)
    assert not differ(found, expected_losses(lessons))
    assert differ(found, expected_losses(lessons, late=1))


def test_before_a_training_every_head_repeats_the_augmented_state():
    network = find(NAME).build(find(NAME).untrained(32, 3))
    state = torch.randn(1, 32)
    for number in range(3):
        after, output = network.step(number, state, torch.randn(1, 32))
        assert torch.equal(after, state) and torch.equal(output, state)


@pytest.mark.strategy("clover")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
