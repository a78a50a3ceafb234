"""Chimera: its layer over states and trigram states, computed anew with the library's modules for every path."""
from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from playground.contract import find
from support.draft_heads import (
    decoder_layer,
    differing,
    embed,
    head,
    is_greedy,
    log_probabilities,
    most_probable_tree,
    proposed,
    random_weights,
    states,
    written,
)
from support.head_lessons import Lessons, cross_entropy, differ, first_losses, mean, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "chimera", {"nodes": 9, "depth": 3, "width": 3}
BRIEF = {"chimera": {"weights": "random", "nodes": 5, "depth": 2, "width": 2}}
COLLAPSES = {"chimera": collapses("chimera", weights="random", nodes=0)}


def trigram(weights, embeddings, place: int):
    """The state for the token at a place, of the embeddings of all tokens; the start of a text is padded."""
    e = embeddings
    three = [e[0], e[0], e[0]] if place == 0 else [e[0], e[1], e[1]] if place == 1 else [*e[place - 2:place + 1]]
    x = torch.cat(three)
    x = x + silu(weights["trigram.block.linear.weight"] @ x + weights["trigram.block.linear.bias"])
    return weights["trigram.out.weight"] @ x


def output(weights, known, embeddings):
    """The lm_head's input after all tokens, of which `known` [n, width] are the states of the first."""
    first = len(known)
    rows = torch.cat([known, torch.stack([trigram(weights, embeddings, j) for j in range(first, len(embeddings))])])
    fused = decoder_layer(weights, "layer.")(rows)[-1]
    return weights[f"heads.{len(embeddings) - first - 1}.weight"] @ torch.cat([known[-1], fused])


def expected(proposal, known_layer=-1):
    weights = random_weights(NAME)
    known = states(proposal.tokens[:-proposal.unread])[known_layer]

    def row(path):
        return log_probabilities(output(weights, known, embed([*proposal.tokens, *path])))

    return most_probable_tree(row, depth=min(3, 5 - proposal.unread), width=3, nodes=9)


@pytest.mark.slow
@pytest.mark.oracle("chimera")
def test_the_tree_is_that_of_a_forward_without_a_cache():
    assert not any(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled=True))


class KeepsTrigramStates(find("chimera")):
    """Wrong: the rows of draft tokens stay in the layer's cache as if they were text."""

    def _catch_up(self, lm):
        super()._catch_up(lm)
        cache = self._rows.caches[0]
        cache.crop = lambda length: setattr(cache, "length", cache.rows)


class PositionsOffByOne(find("chimera")):
    """Wrong: trigram states stand one position too early, beside the state of the token before."""

    def drafted(self, lm, budget):
        own = self.network.layer.self_attn
        first = lm.target.states.length
        own.states = lambda rows, positions: type(own).states(own, rows, positions - (positions >= first).long())
        return (yield from super().drafted(lm, budget))


class WindowOffByOne(find("chimera")):
    """Wrong: trigrams end before the token they stand for."""

    def drafted(self, lm, budget):
        encoder, width = self.network.trigram, lm.target_model.width
        encoder.forward = lambda windows: type(encoder).forward(encoder, windows.roll(width, -1))
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("chimera")
@pytest.mark.parametrize("wrong", [KeepsTrigramStates, PositionsOffByOne, WindowOffByOne])
def test_wrong_caches_positions_and_windows_are_detected(wrong):
    assert any(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.refuses("chimera")
def test_the_state_of_another_layer_is_detected():
    drafter = head(NAME, random_weights(NAME), **KNOBS)
    assert any(differing(drafter, lambda proposal: expected(proposal, -2)))


@pytest.mark.oracle("chimera")
def test_committed_tokens_that_the_target_has_not_read_come_first():
    found = proposed(head(NAME, random_weights(NAME), **KNOBS), unread=2)
    assert found.prefixes and found.prefixes == expected(found)


def test_random_heads_leave_a_greedy_text_unchanged():
    assert is_greedy(written(head(NAME, random_weights(NAME), **KNOBS)))


def test_before_a_training_a_head_adds_the_last_state_and_the_layers_output():
    network = find(NAME).build(find(NAME).untrained(32, 3))
    h, f = torch.randn(2, 32)
    assert torch.allclose(network.output(2, h, f), h + f)


def expected_losses(lessons: Lessons, late: int = 0) -> list[float]:
    """For each head the cross-entropy with the right token, and a tenth of that with the target's distribution; a head
    reads what those before it found most probable.
    """
    weights, lm_head, table = random_weights(NAME), lessons.lm_head.double(), lessons.embeddings.double()
    losses, one_hot = [[] for _ in range(4)], torch.eye(len(lm_head), dtype=torch.float64)
    for text, t in sorted({place for number in range(4) for place in targets(number + 2)}):
        tokens = lessons.batch.ids[text, :t + 2].tolist()
        for number in range(4):
            logits = lm_head @ output(weights, lessons.states[text, :t + 1], table[tokens])
            tokens.append(int(logits.argmax()))
            if (text, t) in targets(number + 2):
                right = one_hot[lessons.batch.ids[text, t + 2 + number - late]]
                teacher = (lm_head @ lessons.states[text, t + 1 + number]).softmax(-1)
                losses[number].append(cross_entropy(logits, right) + 0.1 * cross_entropy(logits, teacher))
    return [mean(each) for each in losses]


@pytest.mark.slow
@pytest.mark.oracle("chimera")
@pytest.mark.refuses("chimera")
def test_heads_are_trained_after_the_guesses_before_them():
    lessons = Lessons(NAME)
    found = first_losses(lessons)
    assert not differ(found, expected_losses(lessons))
    assert differ(found, expected_losses(lessons, late=1))


@pytest.mark.strategy("chimera")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2, width=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
