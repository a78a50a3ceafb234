"""LongSpec: the drafter from the library's own parts, over a window of tokens and the library's own KV cache."""
from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from pairs import greedy_text, pair
from tables import write
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from playground.algorithms.draft_heads.window_attention import TreeRows, WindowCache
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.draft_heads.longspec import anchored_positions, starting_weights
from support.draft_heads import (
    PROMPT,
    WIDTH,
    LibraryAttention,
    chosen,
    differing,
    embed,
    feed_forward,
    head,
    library,
    log_probabilities,
    norm,
    proposals,
)
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, W = "longspec", 16
KNOBS = {"depth": 3, "first": 2, "width": 3, "window": W}
BRIEF = {"longspec": {"weights": "random", "depth": 2, "first": 2, "width": 2}}
COLLAPSES = {"longspec": collapses("longspec", weights="random", depth=0)}
HEADS, HEAD_DIM = 4, 8  # of the target


@cache
def weights():
    chance = torch.Generator().manual_seed(0)
    shapes = starting_weights(WIDTH, HEADS, HEAD_DIM)
    return {
        name: tensor if name == "cross_head_dim" else torch.randn(tensor.shape, generator=chance).double() * 0.5
        for name, tensor in shapes.items()
    }


@torch.no_grad()
def cross_attention(row, position: int, read: list[int]):
    """The library's attention of one row over the keys and values of the last layer for the tokens that were read."""
    held = DynamicCache()
    library()(input_ids=torch.tensor([read]), past_key_values=held)
    keys, values = (repeat_kv(part, 2) for part in (held.layers[-1].keys, held.layers[-1].values))
    query = row @ weights()["cross_attn.q_proj.weight"].T + weights()["cross_attn.q_proj.bias"]
    query = query.view(1, HEADS, 1, HEAD_DIM)
    cos, sin = library().model.rotary_emb(row[None, None], torch.tensor([[position]]))
    query, _ = apply_rotary_pos_emb(query, query, cos, sin)
    attended = (query @ keys.transpose(-1, -2) * HEAD_DIM**-0.5).softmax(-1) @ values
    return attended.flatten() @ weights()["cross_attn.o_proj.weight"].T


def after(tokens: list[int], unread: int, path: list[int], cross: bool = True):
    """Log-probabilities [V] after a path: self-attention over the last tokens of the text and the path."""
    rows = embed([*tokens[-W:], *path])
    attention = LibraryAttention(weights(), "", bias=True)
    row = (rows + attention(norm(weights(), "input_layernorm")(rows)))[-1]
    if cross:
        normed = norm(weights(), "post_self_attention_layernorm")(row)
        row = row + cross_attention(normed, len(tokens) + len(path) - 1, tokens[:-unread])
    return log_probabilities(row + feed_forward(weights(), "")(norm(weights(), "post_cross_attention_layernorm")(row)))


def expected(proposal, cross: bool = True):
    """Each level keeps the most probable of all continued paths."""
    level, found = {(): 0.0}, set()
    for width in (2, 3, 3):
        grown = {
            (*path, token): score + logp
            for path, score in level.items()
            for logp, token in chosen(after(proposal.tokens, proposal.unread, list(path), cross), width)
        }
        best = sorted(grown, key=lambda path: -grown[path])[:width]
        level = {path: grown[path] for path in best}
        found |= set(best)
    return found


@pytest.mark.slow
@pytest.mark.oracle("longspec")
@pytest.mark.parametrize("cross", [True, False])
def test_the_tree_is_that_of_the_librarys_layers(cross):
    drafter = head(NAME, weights(), cross=cross, **KNOBS)
    assert list(differing(drafter, lambda proposal: expected(proposal, cross))) == []


class QueriesWithoutPositions(find("longspec")):
    """Wrong: the queries of the cross-attention are not rotated, as the keys are."""

    def _cross(self, lm, place):
        return super()._cross(SimpleNamespace(target_model=SimpleNamespace(rotate=lambda query, at: query)), place)


class AnotherLayersKeys(find("longspec")):
    """Wrong: the cross-attention reads the first layer of the target."""

    def _check_heads(self, lm):
        store = lm.target.store
        self._target = self._target._replace(keys=store.keys[0].read(store.length))


class KeepsDraftTokens(find("longspec")):
    """Wrong: the window holds the draft tokens of the round before in place of the text."""

    def _grown(self, lm, tree, levels):
        scores = super()._grown(lm, tree, levels)
        self._cache.keys = self._cache.keys.roll(1, 1)
        return scores


@pytest.mark.slow
@pytest.mark.refuses("longspec")
@pytest.mark.parametrize("wrong", [QueriesWithoutPositions, AnotherLayersKeys, KeepsDraftTokens])
def test_wrong_positions_layers_and_windows_are_detected(wrong):
    assert list(differing(head(NAME, weights(), wrong, **KNOBS), expected))


@pytest.mark.strategy("longspec")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2, first=2, width=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT


@pytest.mark.strategy("longspec")
def test_random_weights_leave_greedy_text_unchanged():
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = head(NAME, weights(), **KNOBS)
    lane = write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 16), Draws(0))
    assert lane.tokens[len(PROMPT):] == greedy_text("llama", PROMPT, 16)


def test_width_one_drafts_a_chain():
    found = proposals(head(NAME, weights(), depth=3, first=1, width=1))
    assert all(len(proposal.prefixes) == min(3, proposal.budget) for proposal in found)


# --- memory and attention ---


def project(tokens, positions):
    """Key and value states that tell tokens and positions apart."""
    states = torch.stack([torch.tensor(tokens).double(), positions.double()], 1)[None]
    return states, -states


@pytest.mark.parametrize("text", [
    [list(range(n)) for n in (3, 4, 9, 12, 13)],  # grows, by more than the window too
    [[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6]],  # rolled back, with another token
    [[1] * 9, [1] * 4],
])  # fmt: skip
def test_the_window_holds_the_last_tokens_of_the_text_and_no_more(text):
    window = WindowCache(4)
    for tokens in text:
        window.follow(tokens, project, torch.device("cpu"))
        start = max(0, len(tokens) - 4)
        keys, values = project(tokens[start:], torch.arange(start, len(tokens)))
        assert torch.equal(window.keys, keys) and torch.equal(window.values, values)


def test_window_and_tree_together_are_one_masked_attention():
    chance = torch.Generator().manual_seed(0)
    def states(*size):
        return torch.randn(*size, generator=chance, dtype=torch.float64)
    window, seen = WindowCache(5), torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()
    window.keys, window.values = states(2, 5, 8), states(2, 5, 8)
    query, keys, values, rows = states(4, 3, 8), states(2, 3, 8), states(2, 3, 8), TreeRows(window)
    rows.place(torch.tensor([5, 5, 6]), seen)
    found = rows.attend(query, keys, values)
    mask = torch.cat([torch.ones(3, 5, dtype=torch.bool), seen], 1)
    pairs = (window.keys, keys), (window.values, values)
    keys, values = (torch.cat(pair, 1).repeat_interleave(2, 0) for pair in pairs)
    scores = (query @ keys.transpose(1, 2) * 8**-0.5).masked_fill(~mask, float("-inf"))
    assert (found - scores.softmax(-1) @ values).abs().max() < 1e-9


# --- training ---


def test_the_first_tokens_keep_their_positions_and_all_others_are_shifted_alike():
    for seed in range(20):
        positions = anchored_positions(10, 40, torch.Generator().manual_seed(seed))
        offset = int(positions[-1]) - 9
        anchors = int((positions == torch.arange(10)).sum()) if offset else 0
        assert anchors <= 4 and 0 <= offset <= 30
        assert positions[anchors:].tolist() == [place + offset for place in range(anchors, 10)]


def test_a_drafter_for_keys_of_another_size_is_refused_with_both_sizes():
    drafter = head(NAME, {**starting_weights(WIDTH, HEADS, 16)})
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = drafter
    with pytest.raises(AssertionError, match="reads keys of size 16, and those of llama have 8"):
        write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 8), Draws(0))
