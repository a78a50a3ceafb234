"""WINO: its shadows against the library's own forward, its loop against one over that forward, and wrong variants."""
from __future__ import annotations

import pytest
import torch

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.engine.canvas import denoiser as engine
from playground.engine.canvas.canvas_pass import CanvasPass
from playground.engine.canvas.shadows import visible
from playground.events import Header, Stamped
from playground.trace import Trace, check
from strategies.diffusion.wino import WINO
from support.canvas_laws import over, proposals
from support.canvases import LENGTH, MASK, PROMPT, canvas, denoiser, fills, forwards, run

START = len(PROMPT)
EXACT = 1e-9
HELD = {0: 12, 2: 40, 3: 201}  # positions of the answer that are filled


def library(model, held: dict[int, int], block: range) -> torch.Tensor:
    """Logits of the library's own forward over prompt, answer and a shadow of the block, with the mask spelt out."""
    size = START + LENGTH
    answer = [held.get(i, MASK) for i in range(LENGTH)]
    places = [*range(size), *(START + i for i in block)]
    allowed = torch.zeros(len(places), len(places), dtype=torch.bool)
    for query in range(len(places)):
        for key in range(len(places)):
            if query < size:
                allowed[query, key] = key < size
            else:
                allowed[query, key] = key >= size or places[key] != places[query]
    added = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    with torch.no_grad():
        logits = model.network(
            input_ids=torch.tensor([[*PROMPT, *answer, *[MASK] * len(block)]]), attention_mask=added[None, None],
            position_ids=torch.tensor([places]),
        ).logits[0]
    logits[:, MASK] = float("-inf")
    return logits


def tokens_of(held: dict[int, int]) -> list[int | None]:
    return [*PROMPT, *(held.get(i) for i in range(LENGTH))]


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    finite = one.isfinite()
    return float((one[finite] - other[finite]).abs().max())


# --- shadows ---

@pytest.mark.oracle("wino")
def test_a_shadowed_forward_is_the_librarys_with_the_mask_spelt_out():
    model, block = denoiser(), range(7)
    expected = library(model, HELD, block)
    (found,), _ = model.forward([CanvasPass(tokens_of(HELD), shadows=[START + i for i in block])])
    assert largest(found, expected) < EXACT
    assert largest(found[:START + LENGTH], model.denoise(tokens_of(HELD))) < EXACT  # no position sees a shadow


@pytest.mark.oracle("wino")
@pytest.mark.parametrize("masking", [{}, {"block_length": 8}])
@pytest.mark.parametrize("shifted", [False, True])
def test_with_one_layer_a_shadow_is_a_forward_in_which_that_position_alone_is_masked(shifted, masking):
    model = denoiser(shifted, **masking)
    model.network.model.layers = model.network.model.layers[:1]
    for position in HELD:
        one = CanvasPass(tokens_of(HELD), shadows=[START + position], copied=shifted)
        alone = {i: token for i, token in HELD.items() if i != position}
        assert largest(model.forward([one])[0][0][-1], model.denoise(tokens_of(alone))[START + position]) < EXACT


def test_shadows_of_a_shifted_model_do_not_see_each_other():
    model, places = denoiser(True), [START + i for i in HELD]
    (together,), _ = model.forward([CanvasPass(tokens_of(HELD), shadows=places, copied=True)])
    for row, place in zip(together[-len(places):], places):
        (alone,), _ = model.forward([CanvasPass(tokens_of(HELD), shadows=[place], copied=True)])
        assert largest(alone[-1], row) < EXACT


def test_a_table_says_of_a_shadow_what_all_other_tokens_say():
    table = torch.zeros(3, 3, 3, dtype=torch.float64)
    table[0, 0, 0], table[1, 1, 1], table[0, 1, 1] = 0.5, 0.3, 0.2
    model = over(table)
    (rows,), _ = model.forward([CanvasPass([0, 1, 1], shadows=[0, 1])])
    assert torch.allclose(rows[3].exp(), torch.tensor([0.4, 0.6]).double())  # given (·, 1, 1)
    assert rows[4].exp().tolist()[1] == 1.0  # given (0, ·, 1)


# --- the loop ---

def by_hand(model, threshold: float, back: float) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """The text and the steps of the public rule over the library's forward, in one block."""
    held: dict[int, int] = {}
    steps, before = [], 30
    while len(held) < LENGTH:
        p = library(model, held, range(LENGTH)).softmax(-1)
        masks = [i for i in range(LENGTH) if i not in held]
        best = {i: float(p[START + i].max()) for i in masks}
        most = min(max(int(len(masks) * 0.7), 5), 20)
        ranked = sorted(masks, key=lambda i: -best[i])
        chosen = [i for i in ranked if best[i] > threshold][:most] or ranked[:1]
        q = {i: float(p[START + LENGTH + i, token]) for i, token in held.items()}
        doubted = sorted((i for i in q if q[i] < back), key=q.get) if len(chosen) > 1 else []
        if len(doubted) >= before:
            doubted = doubted[:before - 1]
        held |= {i: int(p[START + i].argmax()) for i in chosen}
        held = {i: token for i, token in held.items() if i not in doubted}
        steps.append((chosen, doubted))
        before = len(chosen)
    return [held[i] for i in range(LENGTH)], steps


@pytest.mark.oracle("wino")
@pytest.mark.parametrize("seed", range(3))
def test_it_fills_and_revokes_what_the_public_rule_does(seed):
    model = denoiser(seed=seed)
    text, steps = by_hand(model, 0.1, 0.2)
    events = run(model, "wino", threshold=0.1, threshold_back=0.2, block_length=LENGTH)
    assert [(sorted(f.positions), sorted(f.remasked)) for f in fills(events)] == [
        (sorted(filled), sorted(revoked)) for filled, revoked in steps
    ]
    assert any(revoked for _, revoked in steps)
    held = {}
    for fill in fills(events):
        held |= dict(zip(fill.positions, fill.ids))
    assert [held[i] for i in range(LENGTH)] == text


def test_the_bounds_on_what_is_filled_and_revoked():
    rule = WINO()
    assert len(rule.filled(proposals(*[0.7] * 10))) == 7 and len(rule.filled(proposals(*[0.7] * 100))) == 20
    assert len(rule.filled(proposals(*[0.7] * 6))) == 5 and rule.filled(proposals(0.2, 0.5, 0.6)) == [2]
    assert rule.filled(proposals(0.9, 0.5, 0.7)) == [0, 2]
    assert rule.revoked({4: 0.8, 1: 0.1, 2: 0.95, 9: 0.3}, 3) == [1, 9] and rule.revoked({4: 0.8}, 1) == []
    assert rule.revoked({4: 0.8, 1: 0.1, 2: 0.95, 9: 0.3}, 30) == [1, 9, 4]


def test_without_a_second_threshold_nothing_is_taken_back():
    model = denoiser()
    events = run(model, "wino", threshold=0.1, threshold_back=0.0, block_length=5)
    plain = run(model, "masked_diffusion", rule="threshold", threshold=0.1, block_length=5)  # no more than five at once
    assert [sorted(f.positions) for f in fills(events)] == [sorted(f.positions) for f in fills(plain)]
    assert not any(fill.remasked for fill in fills(events))


@pytest.mark.parametrize("masking", [{}, {"block_length": 8}])
@pytest.mark.parametrize("shifted", [False, True])
def test_it_ends_after_at_most_one_forward_per_position(shifted, masking):
    events = run(denoiser(shifted, **masking), "wino", threshold=0.05, threshold_back=1.0)
    assert len(forwards(events)) <= LENGTH and any(fill.remasked for fill in fills(events))
    stamped = [Stamped(0, number, 0.0, event) for number, event in enumerate(events)]
    header = Header(canvas=LENGTH, prompt_ids=PROMPT, prompt_pieces=["x"] * START, vocabulary=320)
    assert check(Trace([header], stamped)) == []


@pytest.mark.oracle("wino")
def test_kept_states_of_finished_blocks_change_nothing():
    model = denoiser(True, block_length=8)
    events = run(model, "wino", threshold=0.05, threshold_back=0.3)
    held: dict[int, int] = {}
    for fill in fills(events):
        logits = model.denoise(tokens_of(held))[START:]
        for position, token, confidence in zip(fill.positions, fill.ids, fill.confidences):
            assert abs(float(logits[position].softmax(-1)[token]) - confidence) < EXACT
        held |= dict(zip(fill.positions, fill.ids))
        held = {i: token for i, token in held.items() if i not in fill.remasked}


# --- wrong variants ---

@pytest.mark.refuses("wino")
def test_shadows_that_positions_see_change_the_proposals(monkeypatch):
    model, places = denoiser(), [START + i for i in range(7)]
    right = model.denoise(tokens_of(HELD))

    def all_seen(one, device):
        return torch.ones_like(visible(one, device))

    monkeypatch.setattr(engine, "visible", all_seen)
    (wrong,), _ = model.forward([CanvasPass(tokens_of(HELD), shadows=places)])
    assert largest(wrong[:START + LENGTH], right) > 1e-3


class Unlimited(WINO):
    """Wrong: as many are masked again as are doubted."""

    def revoked(self, support, before):
        return super().revoked(support, 99)


@pytest.mark.refuses("wino")
def test_taking_back_without_a_bound_never_settles():
    assert forwards_until_done(WINO(threshold=0.0, threshold_back=1.0)) <= LENGTH
    assert forwards_until_done(Unlimited(threshold=0.0, threshold_back=1.0)) > 4 * LENGTH


def forwards_until_done(strategy: WINO) -> int:
    assembly = assemble(LaneConfig("wino"))
    assembly.decoder = strategy
    runner, ran = Runner(canvas(denoiser(), assembly), assembly), 0
    while not runner.finished and ran <= 4 * LENGTH:
        ran += len(forwards(runner.advance()))
    return ran


# --- requests ---

def lane():
    model = over(torch.ones(3, 3, dtype=torch.float64) / 9)
    return Canvas([], {"target": model}, assemble(LaneConfig("wino")), Limits(), Silent(model.tokens))


@pytest.mark.parametrize("tokens, remasked, said", [
    ({}, [], "cannot be revised"), ({5: 1}, [], "cannot be revised"), ({0: 1}, [0], "listed once"),
    ({0: 1}, [1], "cannot be masked again"),
])
def test_a_revision_that_cannot_be_is_reported(tokens, remasked, said):
    with pytest.raises(ValueError, match=said):
        lane().revise(tokens, dict.fromkeys(tokens, 1.0), remasked).go_on()


def test_a_text_with_masks_is_not_complete():
    with pytest.raises(ValueError, match="not complete"):
        lane().complete()
