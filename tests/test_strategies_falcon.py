"""Falcon: its LSTM by formula and its layer with the library's modules, over the whole text for every path."""
from __future__ import annotations

import sys

import pytest
import torch

from playground.algorithms.draft_heads.accuracy_tree import best_paths
from playground.contract import find
from support.draft_heads import (
    LibraryAttention,
    differing,
    embed,
    feed_forward,
    head,
    is_greedy,
    log_probabilities,
    norm,
    proposed,
    random_weights,
    states,
    written,
)
from support.head_lessons import ENDS, STARTS, Lessons, cross_entropy, differ, first_losses, mean, smooth_l1, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "falcon", {"nodes": 14, "passes": 2, "ranks": 3}
BRIEF = {"falcon": {"weights": "random", "nodes": 5, "passes": 1, "ranks": 2}}
COLLAPSES = {"falcon": collapses("falcon", weights="random", passes=0) + collapses("falcon", weights="random", nodes=0)}


def recurrent(weights, rows):
    """Two layers of an LSTM over a whole sequence, gate by gate."""
    for layer in (0, 1):
        h, c, found = torch.zeros(32).double(), torch.zeros(32).double(), []
        for x in rows:
            gates = sum(weights[f"lstm.weight_{kind}h_l{layer}"] @ part + weights[f"lstm.bias_{kind}h_l{layer}"]
                        for kind, part in (("i", x), ("h", h)))
            i, f, g, o = gates.chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(h)
        rows = torch.stack(found)
    return rows


def outputs(weights, embeddings, features, groups: list[int]):
    """The network's outputs [n, width]; `groups` has the number of each row's block."""
    attention, after = LibraryAttention(weights, "layers.0."), norm(weights, "layers.0.post_attention_layernorm")
    rows = recurrent(weights, torch.cat([embeddings, features], -1))
    groups = torch.tensor(groups)
    rows = rows + attention(rows, groups[:, None] >= groups[None])
    return rows + feed_forward(weights, "layers.0.")(after(rows))


def grouped(known: int, drafted: int) -> list[int]:
    """Blocks of two from the start of the text, a single row if its length is odd, the newest two, then the draft's."""
    old = [row // 2 for row in range(known - 2)]
    return old + [known + row // 2 for row in range(2 + drafted)]


def block(weights, proposal, drafted: list[int], known_layer=-1):
    """Log-probabilities of the tokens that follow the unread ones and whole blocks, at the places of the next block."""
    features = known = states(proposal.tokens[:-proposal.unread])[known_layer]
    embeddings = embed([*proposal.tokens[:len(known) + 1], *drafted])
    while True:
        count = len(features) - len(known)
        found = outputs(weights, embeddings[1:len(features) + 1], features, grouped(len(known), count))[-2:]
        if count == len(drafted):
            return [log_probabilities(row) for row in found]
        features = torch.cat([features, found])


def expected(proposal, known_layer=-1):
    """Ranks of a static list; a token's rank is that at its place in the block, after all tokens before its block.
    Committed tokens that the target has not read take the first places but are no draft tokens.
    """
    weights, found, rows = random_weights(NAME), {(): proposal.tokens[len(proposal.tokens) - proposal.unread + 1:]}, {}
    accuracy, skipped = weights["accuracy"][:, :3].tolist(), proposal.unread - 1
    for path in best_paths([accuracy[level % 2] for level in range(skipped, 4)], 14):
        level = skipped + len(path) - 1
        before = tuple(found[path[:-1]][:level // 2 * 2])
        rows[before] = rows.get(before) or block(weights, proposal, list(before), known_layer)
        token = int(rows[before][level % 2].sort(descending=True).indices[path[-1]])
        found[path] = [*found[path[:-1]], token]
    return {tuple(tokens[skipped:]) for path, tokens in found.items() if path}


@pytest.mark.slow
@pytest.mark.oracle("falcon")
def test_the_tree_is_that_of_whole_forwards_without_a_cache():
    assert not any(differing(head(NAME, random_weights(NAME), **KNOBS), expected, sampled=True))


class CausalWithinBlocks(find("falcon")):
    """Wrong: the first row of a block does not see the second."""

    def drafted(self, lm, budget):
        layer = self.network.layers[0].self_attn
        layer.forward = lambda rows, place: type(layer).forward(layer, rows, _causal(place, len(rows)))
        return (yield from super().drafted(lm, budget))


def _causal(place, count: int):
    later = place.positions[:, None] < place.positions[None]
    place.ancestors[:, -count:] &= ~later
    return place


class KeepsDraftTokens(find("falcon")):
    """Wrong: the rows of draft tokens stay in the head's cache."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        self._text.cache.length = self._text.cache.rows
        self._text.cache.crop = lambda length: None
        return tree


class PositionsOffByOne(find("falcon")):
    """Wrong: blocks of draft tokens stand one position too late."""

    def drafted(self, lm, budget):
        own, count = self.network.layers[0].self_attn, lm.target.states.length
        own.states = lambda rows, positions: type(own).states(own, rows, positions + (positions >= count).long())
        return (yield from super().drafted(lm, budget))


class ForgetsTheText(find("falcon")):
    """Wrong: the LSTM begins anew with every block of draft tokens."""

    def drafted(self, lm, budget):
        plain = type(self.network).forward
        self.network.forward = lambda embeddings, rows, place, memory=None: plain(
            self.network, embeddings, rows, place, None if embeddings.dim() == 3 else memory
        )
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("falcon")
@pytest.mark.parametrize("wrong", [CausalWithinBlocks, KeepsDraftTokens, PositionsOffByOne, ForgetsTheText])
def test_wrong_masks_caches_positions_and_memories_are_detected(wrong):
    assert any(differing(head(NAME, random_weights(NAME), wrong, **KNOBS), expected))


@pytest.mark.refuses("falcon")
def test_the_state_of_another_layer_is_detected():
    drafter = head(NAME, random_weights(NAME), **KNOBS)
    assert any(differing(drafter, lambda proposal: expected(proposal, -2)))


@pytest.mark.oracle("falcon")
def test_committed_tokens_that_the_target_has_not_read_come_first():
    found = proposed(head(NAME, random_weights(NAME), **KNOBS), unread=2)
    assert found.prefixes and found.prefixes == expected(found)


def test_random_heads_leave_a_greedy_text_unchanged():
    assert is_greedy(written(head(NAME, random_weights(NAME), **KNOBS)))


# --- training ---

def module():
    return sys.modules[find(NAME).__module__]


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr("playground.algorithms.draft_heads.head_training._noisy", lambda batch, half, chance: batch)


def expected_losses(lessons: Lessons, glances=None, late: int = 0) -> list[float]:
    """Row t imitates the state two tokens later, and there the target's distribution and its token. A row that glances
    reads what row t + 2 would, and is left out.
    """
    weights, lm_head, ids = random_weights(NAME), lessons.lm_head.double(), lessons.batch.ids
    one_hot, losses = torch.eye(len(lm_head), dtype=torch.float64), []
    glances = torch.zeros(ids.shape, dtype=torch.bool) if glances is None else glances
    for text in range(2):
        e, f = lessons.embeddings.double()[ids[text].roll(-1)], lessons.states[text]
        e, f = (torch.where(glances[text][:, None], part.roll(-2, 0), part) for part in (e, f))
        found = outputs(weights, e, f, [row // 2 for row in range(len(e))])
        for t in (t for own, t in targets(3) if own == text and not glances[text, t]):
            true = lessons.states[text, t + 2 - late]
            soft = cross_entropy(lm_head @ found[t] / 0.95, (lm_head @ true / 0.95).softmax(-1))
            hard = cross_entropy(lm_head @ found[t], one_hot[ids[text, t + 3 - late]])
            losses.append(smooth_l1(found[t], true) + 0.1 * (0.9 * soft + 0.1 * hard))
    return [mean(losses)]


@pytest.mark.oracle("falcon")
@pytest.mark.refuses("falcon")
def test_rows_are_trained_on_the_state_a_block_later(monkeypatch, without_noise):
    monkeypatch.setattr(module(), "GLANCES", (0.0, 0.0))
    lessons = Lessons(NAME)
    found = first_losses(lessons)
    assert not differ(found, expected_losses(lessons))
    assert differ(found, expected_losses(lessons, late=1))


@pytest.mark.oracle("falcon")
def test_rows_that_glance_read_the_answer_and_are_not_trained(monkeypatch, without_noise):
    glances = torch.zeros(2, 9, dtype=torch.bool)
    glances[0, [2, 4]] = glances[1, 3] = True
    monkeypatch.setattr(module(), "glanced", lambda *given: glances)
    lessons = Lessons(NAME)
    assert not differ(first_losses(lessons), expected_losses(lessons, glances))


def test_fewer_rows_glance_as_the_training_goes_on():
    lessons = Lessons(NAME)
    network = find(NAME).build({name: part.float() if part.is_floating_point() else part
                                for name, part in random_weights(NAME).items()})

    def count(share: float):
        batch = lessons.batch._replace(share=share)
        return module().glanced(network, lessons, batch, module().pairs(lessons, batch)).sum(1)

    rows = torch.tensor([ends - starts for starts, ends in zip(STARTS, ENDS)])
    assert (count(0.0) <= (0.45 * rows).round()).all() and count(0.0).sum() > count(1.0).sum()


@pytest.mark.strategy("falcon")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, passes=1)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
