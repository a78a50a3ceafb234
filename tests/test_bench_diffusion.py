"""The benchmark of masked canvases: what it counts, on a random denoiser and on hand-made answers."""
from __future__ import annotations

import pytest

from playground.bench import canvas_filling
from playground.bench.canvas_filling import BASELINE, LANES, Filled
from playground.cli import main
from playground.decoding.models import Models
from playground.pocket.cards.canvas_scores import ROWS, exam, scores
from support.canvases import denoiser

pytestmark = pytest.mark.bench
FOUND = [
    Filled("lists", BASELINE, 1.0, 10, 10, 200, 2.0), Filled("lists", BASELINE, 0.0, 10, 10, 200, 2.0),
    Filled("lists", "threshold 0.9", 1.0, 12, 3, 60, 0.5), Filled("lists", "threshold 0.9", 0.5, 8, 2, 40, 0.3),
]


def test_rows_divide_sums_by_sums():
    _, base, threshold = canvas_filling._rows(FOUND)
    assert base == [BASELINE, "0.50", "1 of 2", "1.00", "20", "2.00", "1.0"]
    assert threshold == ["threshold 0.9", "0.75", "1 of 2", "4.00", "5", "0.40", "5.0"]


def test_only_questions_that_every_decoder_answered_count():
    assert canvas_filling.complete(FOUND, 2) == FOUND and canvas_filling.complete([], 2) == []
    assert canvas_filling.complete(FOUND[:3], 2) == [FOUND[0], FOUND[2]] and canvas_filling.complete(FOUND, 3) == []


def test_every_decoder_answers_every_question_in_a_rotating_order(monkeypatch):
    monkeypatch.setattr(canvas_filling, "LANES", {name: LANES[name] for name in (BASELINE, "threshold 0.9")})
    monkeypatch.setattr(canvas_filling, "exam", lambda items, seed: {"needle": exam(items, seed)["arithmetic 1"]})
    monkeypatch.setattr(canvas_filling, "score", lambda item, text: 0.0)
    found = list(canvas_filling.answers(Models(denoiser(True)), None, 2, 0))
    assert [one.lane for one in found] == [BASELINE, "threshold 0.9", "threshold 0.9", BASELINE]
    assert all(one.forwards == 16 for one in found if one.lane == BASELINE) and all(one.seconds > 0 for one in found)
    assert canvas_filling.document(found, {})["answers"][0]["task"] == "needle"


def test_only_decoders_that_can_run_on_the_model_are_measured():
    whole, blocks = denoiser(True), denoiser(True)
    blocks.attention = "block"
    assert canvas_filling.runnable(Models(whole)) == list(LANES)
    assert {BASELINE, "threshold 0.9"} < set(canvas_filling.runnable(Models(blocks))) < set(LANES)
    assert "AdaBlock" not in canvas_filling.runnable(Models(blocks))


def test_scores_are_means_over_the_same_held_out_questions():
    assert exam(3)["lists"] == exam(3)["lists"] != exam(3, seed=5)["lists"]
    measured = scores(denoiser(True), "masked_diffusion", {"steps": 1}, 1)
    assert set(measured) == set(ROWS) and all(row["items"] == 1 and row["forwards"] >= 1 for row in measured.values())


def test_a_model_that_continues_text_is_refused(capsys):
    assert main(["bench", "diffusion", "--model", "pocket"]) == 2
    assert "choose a denoiser such as pocket-diffusion" in capsys.readouterr().err
