"""FSPAD: its gate and its two outputs by formula, over the library's layer and without a cache."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find
from playground.errors import Refusal
from support.draft_heads import (
    LibraryAttention,
    differing,
    embed,
    feed_forward,
    head,
    is_greedy,
    log_probabilities,
    most_probable_tree,
    norm,
    proposals,
    proposed,
    random_weights,
    states,
    written,
)
from support.eagle import WithoutRollBack, WrongPositions
from support.head_lessons import Lessons, cross_entropy, differ, first_losses, mean, smooth_l1, targets
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "fspad", {"nodes": 9, "depth": 3, "width": 3}
BRIEF = {"fspad": {"weights": "random", "nodes": 5, "depth": 2, "width": 2}}
COLLAPSES = {"fspad": collapses("fspad", weights="random", nodes=0)}


def weights_of_a_head():
    """Random, but with outputs small enough that no token is certain."""
    small = "down_proj", "o_proj"
    return {name: part * 0.2 if any(each in name for each in small) else part
            for name, part in random_weights(NAME).items()}


def gated(weights, e, f):
    """h + W_down (SiLU(W_gate e) * W_up norm(h)), where h is EAGLE's linear map of [e; f]"""
    h = torch.cat([e, f], -1) @ weights["fc.fc.weight"].T + weights["fc.fc.bias"]
    gate = e @ weights["fc.mlp.gate_proj.weight"].T
    up = norm(weights, "fc.post_attention_layernorm")(h) @ weights["fc.mlp.up_proj.weight"].T
    return h + (gate * torch.sigmoid(gate) * up) @ weights["fc.mlp.down_proj.weight"].T


def layer(weights):
    """The next states and inputs of the lm_head [n, width] of a whole text."""
    attention, after = LibraryAttention(weights, "layers.0."), norm(weights, "layers.0.post_attention_layernorm")
    own = weights["layers.0.mlp.down_proj.weight"]
    halves = [weights | {"layers.0.mlp.down_proj.weight": half} for half in (own[:len(own) // 2], own[len(own) // 2:])]
    for_head, fed_back = (feed_forward(half, "layers.0.") for half in halves)

    def run(e, f):
        rows = gated(weights, e, f)
        rows = rows + attention(rows)
        return rows + fed_back(after(rows)), rows + for_head(after(rows))

    return run


def expected(proposal, known_layer=-1):
    run = layer(weights_of_a_head())
    known = states(proposal.tokens[:-proposal.unread])[known_layer]

    def row(path):
        embeddings, features, inputs = embed([*proposal.tokens, *path]), known, None
        while len(features) < len(embeddings):
            found, inputs = run(embeddings[1:len(features) + 1], features)
            features = torch.cat([features, found[-1:]])
        return log_probabilities(inputs[-1])

    return most_probable_tree(row, depth=3, width=3, nodes=9)


@pytest.mark.oracle("fspad")
def test_the_tree_is_that_of_a_forward_without_a_cache():
    assert not any(differing(head(NAME, weights_of_a_head(), **KNOBS), expected, sampled=True))


class KeepsDraftTokens(WithoutRollBack, find("fspad")):
    """Wrong: the rows of draft tokens stay in the head's cache."""


class PositionsOffByOne(WrongPositions, find("fspad")):
    """Wrong: draft tokens have the position of their parent."""


class FeedsTheInputsOfTheHeadBack(find("fspad")):
    """Wrong: what the lm_head reads is continued."""

    def drafted(self, lm, budget):
        plain = type(self.network).forward
        self.network.forward = lambda *rows: plain(self.network, *rows).chunk(2, -1)[0].repeat(1, 2)
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("fspad")
@pytest.mark.parametrize("wrong", [KeepsDraftTokens, PositionsOffByOne, FeedsTheInputsOfTheHeadBack])
def test_wrong_caches_positions_and_outputs_are_detected(wrong):
    assert any(differing(head(NAME, weights_of_a_head(), wrong, **KNOBS), expected))


@pytest.mark.refuses("fspad")
def test_the_state_of_another_layer_is_detected():
    drafter = head(NAME, weights_of_a_head(), **KNOBS)
    assert any(differing(drafter, lambda proposal: expected(proposal, -2)))


@pytest.mark.strategy("fspad", "eagle_2")
def test_without_a_gate_and_with_equal_outputs_it_is_eagle_2():
    eagle = random_weights("eagle")
    network = find(NAME).build(random_weights(NAME)).double()
    network.begin_as({name: part.double() for name, part in eagle.items()})
    weights = network.state_dict()
    assert proposals(head(NAME, weights, **KNOBS)) == proposals(head("eagle_2", eagle, **KNOBS))


def test_the_token_selects_a_part_of_the_state():
    """A linear map of both, as EAGLE's, adds the same for a token whatever the state is."""
    selects = find(NAME).build(random_weights(NAME)).double().fc
    e, f = torch.randn(2, 2, 32, dtype=torch.float64)
    both = selects(e[0], f[0]) - selects(e[1], f[0]) - selects(e[0], f[1]) + selects(e[1], f[1])
    assert both.abs().max() > 0.1


@pytest.mark.oracle("fspad")
def test_committed_tokens_that_the_target_has_not_read_come_first():
    found = proposed(head(NAME, weights_of_a_head(), **KNOBS), unread=2)
    assert found.prefixes and found.prefixes == expected(found)


def test_a_head_of_an_earlier_form_is_refused():
    with pytest.raises(Refusal, match="fit fspad"):
        find(NAME).build({"fs.wf.weight": torch.zeros(64, 32)})


def test_random_heads_leave_a_greedy_text_unchanged():
    assert is_greedy(written(head(NAME, weights_of_a_head(), **KNOBS)))


def expected_losses(lessons: Lessons, late: int = 0) -> list[float]:
    """The first output imitates the next state, the second the distribution of the token after the next."""
    run, lm_head = layer(random_weights(NAME)), lessons.lm_head.double()
    following = lessons.embeddings.double()[lessons.batch.ids.roll(-1, 1)]
    found = [run(e, f) for e, f in zip(following, lessons.states)]

    def loss(text, t):
        (f, inputs), true = (part[t] for part in found[text]), lessons.states[text, t + 1 - late]
        return smooth_l1(f, true) + 0.1 * cross_entropy(lm_head @ inputs, (lm_head @ true).softmax(-1))

    return [mean([loss(text, t) for text, t in targets(2)])]


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr("playground.algorithms.draft_heads.head_training._noisy", lambda batch, half, chance: batch)


@pytest.mark.oracle("fspad")
@pytest.mark.refuses("fspad")
def test_one_output_is_trained_on_states_and_the_other_on_distributions(without_noise):
    lessons = Lessons(NAME)
    found = first_losses(lessons)
    assert not differ(found, expected_losses(lessons))
    assert differ(found, expected_losses(lessons, late=1))


@pytest.mark.oracle("fspad")
def test_a_training_begins_as_the_head_of_eagle(without_noise):
    """The first loss is then that of EAGLE's own training."""
    eagle = {name: part.float() for name, part in random_weights("eagle").items()}
    lessons, alone = Lessons(NAME), Lessons(NAME)
    lessons.resumed = alone.resumed = lambda: None
    lessons.fitted = {"eagle": eagle}.get
    wanted = first_losses(Lessons("eagle"))
    assert not differ(first_losses(lessons), wanted) and differ(first_losses(alone), wanted)


@pytest.mark.strategy("fspad")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, depth=2, width=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
