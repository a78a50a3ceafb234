"""FLASH: its head computed anew with the library's attention over whole texts, block by block."""
from __future__ import annotations

from math import ceil

import pytest
import torch
from torch.nn.functional import silu

from playground.algorithms.draft_heads.head_training import ahead
from playground.contract import find
from strategies.speculative.flash import LATENTS, OFFSETS, FlashNetwork, offsets_of
from support.draft_heads import (
    PROMPT,
    LibraryAttention,
    differing,
    embed,
    head,
    log_probabilities,
    proposals,
    random_weights,
    states,
)
from support.laws import AT_ONE, EXACT, off, tables
from support.small_head_texts import SmallTexts, trained
from support.speculation import collapses, speculative_lane

NAME = "flash"
BRIEF = {"flash": {"weights": "random", "depth": 2}}
COLLAPSES = {"flash": collapses("flash", weights="random", depth=0)}
KNOBS = {"depth": 5, "block": 3}


def attentive() -> dict:
    """Random weights, with an attention that sees many tokens, and states that do not grow from block to block."""
    weights = random_weights(NAME)
    scales = {"self_attn.q_proj.weight": 0.02, "self_attn.o_proj.weight": 6.0, "mlp.2.weight": 0.001}
    return weights | {name: weights[name] * scale for name, scale in scales.items()}


def output(embeddings, features, span: int, whole):
    """The head's output after the last row, [offsets, width]; the first `span` rows are seen through averages."""
    weights = attentive()
    rows = torch.cat([embeddings, features], -1) @ weights["fc.weight"].T + weights["fc.bias"]
    mixed = (weights["queries"] @ whole[:span].T).softmax(-1) @ whole[:span] if span else whole[:0]
    places = torch.tensor([*range(len(mixed)), *range(span, len(rows))])
    attended = attention(torch.cat([mixed, rows[span:]]), places)[-1]
    inner = silu((rows[-1] + attended) @ weights["mlp.0.weight"].T + weights["mlp.0.bias"])
    return (inner @ weights["mlp.2.weight"].T + weights["mlp.2.bias"]).unflatten(-1, (OFFSETS, -1))


@torch.no_grad()
def attention(rows, places):
    """The library's attention at these positions."""
    library = LibraryAttention(attentive(), "")
    mask = torch.full((len(rows), len(rows)), float("-inf"), dtype=rows.dtype).triu(1)[None, None]
    return library.attention(rows[None], library.rotary(rows[None], places[None]), mask)[0][0]


def expected(block: int, depth: int, span: int = 0):
    def prefixes(proposal):
        tokens, path = list(proposal.tokens), []
        known = features = states(tokens[:-proposal.unread])[-1]
        while len(path) < depth:
            found = output(embed(tokens)[1:len(features) + 1], features, span, known)
            if len(features) < len(tokens) - 1:  # a token that the target has not read
                features = torch.cat([features, found[:1]])
                continue
            found = found[:min(block, depth - len(path))]
            new = log_probabilities(found).argmax(-1).tolist()
            path, tokens, features = path + new, tokens + new, torch.cat([features, found])
        return {tuple(path[:length]) for length in range(1, depth + 1)}

    return prefixes


@pytest.mark.oracle("flash")
@pytest.mark.parametrize("block", [1, 3])
def test_every_block_is_that_of_a_forward_without_a_cache(block):
    drafter = head(NAME, attentive(), depth=5, block=block)
    assert list(differing(drafter, expected(block, 5))) == []


@pytest.mark.oracle("flash")
def test_a_compressed_prompt_is_seen_through_its_averages(monkeypatch):
    monkeypatch.setattr("support.draft_heads.PROMPT", PROMPT * 3)
    drafter = head(NAME, attentive(), **KNOBS, span="prompt", window=6)
    assert list(differing(drafter, expected(3, 5, span=3 * len(PROMPT) - 6))) == []
    assert drafter._text.span == 15 and len(drafter._text.compressed[0][0]) == LATENTS


class OffsetsByOne(FlashNetwork):
    """Wrong: the second block of the output is read first."""

    def forward(self, embeddings, features, place):
        return super().forward(embeddings, features, place).roll(-self.width, -1)


class StateOfAnotherLayer(find(NAME)):
    """Wrong: continues the input of the last layer."""

    def drafted(self, lm, budget):
        self.state_layers = lambda depth: (depth - 1,)
        of, depth = lm.target.states.of, lm.depth
        lm.target.states.of = lambda layer, start=0: of(depth, start) * 0.5
        try:
            return (yield from super().drafted(lm, budget))
        finally:
            lm.target.states.of = of


class KeepsPredictedStates(find(NAME)):
    """Wrong: rows of draft tokens stay in the head's cache after verification."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        self._text.cache.commit()
        self._text.cache.crop = lambda length: None
        return tree


class CountsEveryBlockAnew(find(NAME)):
    """Wrong: the rows of a block that is read back stand at the first positions."""

    def drafted(self, lm, budget):
        if self._text is not None:
            feed = type(self._text).feed
            self._text.feed = lambda lm, tokens, features, start: feed(self._text, lm, tokens, features, 0)
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("flash")
@pytest.mark.parametrize("wrong", [StateOfAnotherLayer, KeepsPredictedStates, CountsEveryBlockAnew])
def test_other_states_stale_rows_and_wrong_positions_are_detected(wrong):
    assert list(differing(head(NAME, attentive(), wrong, depth=5, block=1), expected(1, 5)))


@pytest.mark.refuses("flash")
def test_an_offset_off_by_one_is_detected():
    drafter = head(NAME, attentive(), **KNOBS)
    drafter.network.__class__ = OffsetsByOne
    assert list(differing(drafter, expected(3, 5)))


@pytest.mark.parametrize("block", [2, 5])
def test_a_round_takes_as_many_forwards_as_it_has_blocks(block):
    drafter, calls = head(NAME, attentive(), depth=5, block=block), []
    forward = drafter.network.forward
    drafter.network.forward = lambda *given: calls.append(1) or forward(*given)
    found = proposals(drafter)
    assert len(calls) == sum(ceil(max(map(len, proposal.prefixes)) / block) for proposal in found)


@pytest.mark.slow
@pytest.mark.strategy("flash")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2, block=2)
    assert off(lane, tables("ab"), [0, 1, 0], 4) < EXACT


def test_every_offset_learns_its_own_token():
    texts = SmallTexts(length=8, epoch=12)
    weights, _ = trained(NAME, texts)
    with torch.no_grad():
        found = list(offsets_of(FlashNetwork.of(weights), texts, texts.batch, compressed=False))
    for offset, (guess, _, labels) in enumerate(found):
        places, expected_labels = ahead(texts.batch, offset + 2)
        assert torch.equal(labels, expected_labels[places])
        best = (guess @ texts.lm_head.T).argmax(-1)
        right, late = ((best == wanted).float().mean() for wanted in (labels, texts.follows[labels]))
        assert right > 0.5 > late, f"offset {offset}"


def test_training_and_drafting_compress_alike():
    texts, network = SmallTexts(length=40, prompt=30), FlashNetwork.of(find(NAME).untrained(16, 3))
    with torch.no_grad():
        whole, compressed = (
            [guess for guess, _, _ in offsets_of(network, texts, texts.batch, flag)] for flag in (False, True)
        )
    assert all(torch.isfinite(guess).all() for guess in compressed)
    assert not torch.allclose(whole[0], compressed[0])
