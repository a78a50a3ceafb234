"""Dynamic tokenization: merges against a pair count written out, and texts against the library fed with embeddings."""
from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from runs import figures

from playground.contract import find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.events import Commit, Note
from strategies.adaptive_compute import dynamic_tokens
from strategies.adaptive_compute.dynamic_tokens import PromptPiece, merge, mergeable
from support.laws import AT_ONE
from support.speculation import GREEDY

Dynamic = find("dynamic_tokens")
COLLAPSES = {"dynamic_tokens": [Collapse(LaneConfig("dynamic_tokens", {"merges": 0}, added),
                                         replace(GREEDY, extras=added)) for added in ([], [AT_ONE])]}
PROMPT = "The green bird sings to the green tree, and the green bird sings to the fox and the fox listens."
WRITTEN = 8


def decoded(decoder, prompt: str = PROMPT):
    target, assembly = pair("llama").target, Assembly(decoder)
    lane = Lane(target.tokens.encode(prompt), {"target": target}, assembly, Limits(0, WRITTEN),
                Recorder(target.tokens))
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    return lane, events


def groups_by_hand(lane, merges: int, kept: int) -> list[list[int]]:
    """Byte-pair merges of the prompt within words, with lists and a plain count."""
    ids = lane.tokens[:lane.prompt_length]
    groups, free = [[token] for token in ids], len(ids) - kept
    text = lambda group: b"".join(map(lane.bytes, group)).decode(errors="replace")  # noqa: E731
    ends = [False] * free + [True] * kept

    def fits(at: int) -> bool:
        inner = text(groups[at] + groups[at + 1]).removeprefix(" ")
        return not (ends[at] or ends[at + 1]) and (not inner.strip(" ") or " " not in inner)

    for _ in range(merges):
        counts: dict[str, int] = {}
        for at in range(len(groups) - 1):
            if fits(at):
                counts[str(groups[at:at + 2])] = counts.get(str(groups[at:at + 2]), 0) + 1
        if not counts or max(counts.values()) < 2:
            break
        best, at = next(name for name in counts if counts[name] == max(counts.values())), 0
        while at < len(groups) - 1:
            if fits(at) and str(groups[at:at + 2]) == best:
                groups[at:at + 2], ends[at:at + 2] = [groups[at] + groups[at + 1]], [False]
            at += 1
    return groups


@torch.no_grad()
def check_text(cls, **knobs) -> None:
    """Text and log-probabilities are the library's greedy ones after mean embeddings of the groups."""
    lane, events = decoded(cls(merges=6, kept=3, **knobs))
    library = network("llama")
    groups, own = groups_by_hand(lane, 6, 3), lane.tokens[lane.prompt_length:]
    assert len(groups) < lane.prompt_length
    table = library.get_input_embeddings().weight
    rows = [torch.stack([table[token] for token in group]).mean(0) for group in groups]
    logprobs = [each for event in events if isinstance(event, Commit) for each in event.logprobs]
    for token, logprob in zip(own, logprobs, strict=True):
        logits = library(inputs_embeds=torch.stack(rows)[None], use_cache=False).logits[0, -1]
        assert int(logits.argmax()) == token
        assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
        rows.append(table[token])


class SumsEmbeddings(Dynamic):
    def decode(self, lm):
        own = dynamic_tokens.embedded
        dynamic_tokens.embedded = lambda lm, piece: own(lm, piece) * (
            len(piece.tokens) if len(piece.tokens) > 1 else 1)
        try:
            yield from super().decode(lm)
        finally:
            dynamic_tokens.embedded = own


class MergesOnce(Dynamic):
    def decode(self, lm):
        self.merges = 1
        yield from super().decode(lm)


@pytest.mark.oracle("dynamic_tokens")
def test_the_text_is_the_librarys_after_mean_embeddings_of_the_merged_pieces():
    check_text(Dynamic)


@pytest.mark.refuses("dynamic_tokens")
@pytest.mark.parametrize("wrong", [SumsEmbeddings, MergesOnce])
def test_other_embeddings_and_merges_are_noticed(wrong):
    with pytest.raises(AssertionError):
        check_text(wrong)


def test_pieces_always_spell_the_prompt_and_shrink_by_the_merges():
    chance = Random(0)
    for _ in range(100):
        data = "".join(chance.choice("ab é🙂1,. \n") for _ in range(60)).encode()
        pieces = [PromptPiece((byte,), bytes([byte]), chance.random() < 0.1) for byte in data]
        for boundary in dynamic_tokens.BOUNDARIES:
            found, done = merge(pieces, 8, boundary)
            assert b"".join(piece.bytes for piece in found) == data and done <= 8
            assert [token for piece in found for token in piece.tokens] == list(data)
            assert all(len(piece.tokens) == 1 for piece in found if piece.fixed)


@pytest.mark.parametrize(("left", "right", "within"), [
    ("gre", "en", "pre-token"), (" gre", "en", "pre-token"), ("a", "1", "word"), ("a", ",", "word"),
    ("the", " tree", "sentence"), ("  ", "  ", "pre-token"), ("end.", " Next", None), ("a", "\n", None),
])
def test_merged_pieces_stay_within_their_boundary(left, right, within):
    parts = [PromptPiece((0,), part.encode(), False) for part in (left, right)]
    allowed = [boundary for boundary in dynamic_tokens.BOUNDARIES if mergeable(*parts, boundary)]
    assert allowed == (list(dynamic_tokens.BOUNDARIES[dynamic_tokens.BOUNDARIES.index(within):]) if within else [])


def test_the_lengths_are_shown_and_a_prompt_without_repeats_is_read_as_it_is():
    lane, events = decoded(Dynamic(merges=5))
    (lengths,) = figures(events, "length of the prompt")
    assert lengths["values"][0] == lane.prompt_length > lengths["values"][1]
    _, events = decoded(Dynamic(), "fox")
    assert [event.text for event in events if isinstance(event, Note)] == [
        "No pair of neighbours occurs twice within the boundary: the prompt is read as it is."]
