"""Token editing: against a loop of its own, at its ends, on denoisers that change their mind, and wrong variants."""
from __future__ import annotations

import math

import pytest
import torch

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.events import Commit, Header, Stamped
from playground.trace import Trace, check
from strategies.diffusion.token_editing import TokenEditing
from support.canvas_laws import over
from support.canvases import LENGTH, PROMPT, denoiser, difference, fills, forwards, run

A, B, C = 0, 1, 2


# --- against a loop of its own ---

def joint_threshold(model, block_length: int, threshold: float, edit_threshold: float, edits: int, penalty: float):
    """The text that SGLang's rule gives, block by block over full forwards, and its number of forwards that changed it.
    """
    ids, changes = [None] * LENGTH, 0
    for start in range(0, LENGTH, block_length):
        block, after = range(start, min(start + block_length, LENGTH)), 0
        for _ in range(len(block) + edits):
            logits = model.denoise([*PROMPT, *ids])[len(PROMPT):].clone()
            for i in block[1:]:
                if ids[i - 1] is not None:
                    logits[i, ids[i - 1]] -= penalty
            p, x = logits.softmax(-1).max(-1)
            masks = [i for i in block if ids[i] is None]
            after += not masks
            if after > edits:
                break
            chosen = {i for i in masks if p[i] > threshold} or set(sorted(masks, key=lambda i: -p[i])[:1])
            chosen |= {i for i in block if i not in masks and x[i] != ids[i] and p[i] > edit_threshold}
            if not chosen:
                break
            changes += 1
            for i in chosen:
                ids[i] = int(x[i])
    return ids, changes


def text(events) -> list[int]:
    held = {}
    for fill in fills(events):
        held |= dict(zip(fill.positions, fill.ids))
    return [held[i] for i in range(LENGTH)]


@pytest.mark.oracle("token_editing")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("threshold, edit_threshold, penalty", [(0.1, 0.0, 0.0), (0.1, 0.2, 0.0), (0.2, 0.1, 2.0)])
def test_it_writes_what_the_public_rule_writes(shifted, threshold, edit_threshold, penalty):
    model = denoiser(shifted)
    knobs = dict(threshold=threshold, edit_threshold=edit_threshold, penalty=penalty, block_length=7, edits=5)
    events = run(model, "token_editing", **knobs)
    expected, changes = joint_threshold(model, **knobs)
    assert text(events) == expected and len(fills(events)) == changes
    assert sum(len(fill.replaced) for fill in fills(events)) > 0


@pytest.mark.oracle("token_editing")
def test_a_model_that_sees_block_by_block_edits_the_same_with_kept_states():
    model = denoiser(True, block_length=7)  # the prompt has five positions, so the first block has two left
    events = run(model, "token_editing", threshold=0.1, block_length=7, edits=3)
    ids = [None] * LENGTH
    for fill in fills(events):
        logits = model.denoise([*PROMPT, *ids])[len(PROMPT):]
        for position, token, confidence in zip(fill.positions, fill.ids, fill.confidences):
            p = logits[position].softmax(-1)
            assert token == int(p.argmax()) and math.isclose(confidence, float(p.max()), abs_tol=1e-9)
        for position, token in zip(fill.positions, fill.ids):
            ids[position] = token


# --- at its ends ---

@pytest.mark.oracle("token_editing")
@pytest.mark.parametrize("threshold", [0.05, 0.2, 1.0])
def test_edit_threshold_one_is_plain_threshold_decoding(threshold):
    model = denoiser()
    plain = run(model, "masked_diffusion", rule="threshold", threshold=threshold, block_length=7)
    edited = run(model, "token_editing", threshold=threshold, edit_threshold=1.0, block_length=7)
    assert difference(edited, plain) < 1e-9 and len(forwards(edited)) == len(forwards(plain))


# --- denoisers that change their mind ---

class Wrong(TokenEditing):
    """Wrong: an edit asks how probable the old token is."""

    def changed(self, lm, proposed, masked):
        right = super().changed(lm, proposed, masked)
        old = {i: 1 - proposed.confidence[i] for i in right if i not in masked}  # at most this
        return [i for i in right if i in masked or old[i] > self.edit_threshold]


def scripted(answers, strategy: TokenEditing):
    """A run over a denoiser whose probabilities [positions, letters] follow from the canvas."""
    model = over(torch.ones(3, 3, dtype=torch.float64) / 9)
    model.denoise = lambda canvas: torch.tensor(answers(canvas), dtype=torch.float64).log()
    lane = Canvas([], {"target": model}, assemble(LaneConfig("token_editing")), Limits(), Silent(model.tokens))
    assembly = assemble(LaneConfig("token_editing"))
    assembly.decoder = strategy
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    return lane, events


def corrected(canvas):
    """Position 1 is probably b, until position 0 is known to be a: then it is c."""
    return [[0.9, 0.05, 0.05], [0.1, 0.1, 0.8] if canvas[0] == A else [0.3, 0.6, 0.1]]


def test_a_token_is_replaced_once_its_neighbour_says_so():
    lane, events = scripted(corrected, TokenEditing())
    first, second = fills(events)
    assert (first.ids, first.replaced) == ([A, B], {}) and lane.ids == [A, C]
    assert (second.positions, second.ids, second.replaced) == ([1], [C], {1: "b"}) and second.confidences == [0.8]
    assert len(forwards(events)) == 3  # the last one confirms
    (commit,) = [event for event in events if isinstance(event, Commit)]
    assert commit.ids == [A, C]
    stamped = [Stamped(0, number, 0.0, event) for number, event in enumerate(events)]
    assert check(Trace([Header(canvas=2)], stamped)) == []


def test_a_high_edit_threshold_keeps_the_first_token():
    assert scripted(corrected, TokenEditing(edit_threshold=0.8))[0].ids == [A, B]


@pytest.mark.refuses("token_editing")
def test_asking_for_the_old_tokens_probability_keeps_it():
    assert scripted(corrected, Wrong(edit_threshold=0.5))[0].ids == [A, B]
    assert scripted(corrected, TokenEditing(edit_threshold=0.5))[0].ids == [A, C]


def flipping(canvas):
    """Each position wants to differ from what it holds."""
    return [[0.2, 0.8, 0.0] if token == A else [0.8, 0.2, 0.0] for token in canvas]


@pytest.mark.parametrize("edits", [0, 1, 16])
def test_positions_that_flip_for_ever_end_after_the_edits(edits):
    _, events = scripted(flipping, TokenEditing(edits=edits))
    assert len(forwards(events)) == 1 + edits and len(fills(events)) == 1 + edits


def test_the_prompt_and_finished_blocks_are_never_edited():
    events = run(denoiser(), "token_editing", threshold=0.1, block_length=5)
    begun = 0
    for fill in fills(events):
        assert min(fill.positions) // 5 >= begun  # each step is within the block that is being filled, or a later one
        begun = max(begun, min(fill.positions) // 5)
