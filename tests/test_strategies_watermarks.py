"""Watermarks and their detectors, against the transformers library and against the statistics they promise."""
from __future__ import annotations

import pytest
import torch
from runs import figures, run
from tables import TableModel, distance, law

from playground.algorithms.sampling.watermarks import green_detector, tournament_detector, z_score
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from support.laws import AT_ONE, EXACT
from support.watermarked_texts import KEY, KEYS, WIDTH, V, rows, texts

# --- the generators against the library's ---

@pytest.mark.slow
def test_averaged_over_keys_a_tournament_leaves_the_distribution_as_it_is_and_a_green_list_does_not():
    row = rows(1)
    p = row.softmax(-1)[0]
    marked = torch.stack([make("synthid", width=1, keys=f"{key} {key + 7}").apply(row, [[5]]).softmax(-1)[0]
                          for key in range(1500)]).mean(0)
    green = torch.stack([make("green_list", key=key).apply(row, [[5]]).softmax(-1)[0]
                         for key in range(1, 1501)]).mean(0)
    assert (marked - p).abs().max() < 0.03 < (green - p).abs().max()


# --- what they promise ---

DETECTORS = {"green_list": lambda: green_detector(1000, 0.25, KEY), "synthid": lambda: tournament_detector(WIDTH, KEYS)}


@pytest.mark.slow
@pytest.mark.strategy("green_list", "synthid")
@pytest.mark.parametrize("build", DETECTORS.values(), ids=DETECTORS)
def test_without_a_watermark_the_z_score_is_standard_normal(build):
    """Of 200 texts the mean has a standard error of 0.07, the deviation one of 0.05."""
    z = torch.tensor([build().read(text).z for text in texts(200, 50, 1000)])
    assert abs(float(z.mean())) < 0.25 and abs(float(z.std()) - 1) < 0.2


MARKED = {
    "green_list": (LaneConfig("greedy", {}, [("green_list", {}), AT_ONE]), lambda: green_detector(V, 0.25, KEY)),
    "synthid": (LaneConfig("greedy", {}, [("synthid", {}), AT_ONE]),
                lambda: tournament_detector(4, make("synthid")._keys())),
}


@pytest.mark.strategy("green_list", "synthid")
@pytest.mark.parametrize("lane, build", MARKED.values(), ids=MARKED)
def test_with_a_watermark_every_text_is_found_and_without_one_none(lane, build):
    """Uniform rows; with delta 2 the expected z-score of 60 tokens is 8, with nine layers it is about 7."""
    model = {"target": TableModel([chr(33 + i) for i in range(V)], spread=0.5)}
    for seed in range(3):
        for config, found in ((lane, True), (LaneConfig("greedy", {}, [AT_ONE]), False)):
            text = run(config, model, [0, 1], 60, seed)[0].main.written
            assert (build().read(text).z > 4) == found


@pytest.mark.strategy("green_list", "synthid")
@pytest.mark.parametrize("lane, build", MARKED.values(), ids=MARKED)
def test_a_run_records_what_the_detector_sees(lane, build):
    done, events = run(lane, {"target": TableModel([chr(33 + i) for i in range(V)])}, [0, 1], 30, 3)
    seen = build().read(done.main.written)
    assert figures(events, "watermark")[-1]["series"]["z-score"] == pytest.approx(seen.z)
    shades = [data for name in ("green tokens", "won coin flips") for data in figures(events, name)]
    assert all(data["shades"] for data in shades)
    spans = [span for data in shades for span in data["spans"]]
    assert spans and {span[0]: span[3] for span in spans} == {i: v for i, v in enumerate(seen.values) if v is not None}


def test_a_text_read_piece_by_piece_is_the_text_read_at_once():
    text, detector = texts(1, 30, 5)[0], green_detector(V, 0.25, KEY)
    pieces = [detector.read(text[:end]) for end in (1, 7, 7, 30)]
    assert pieces[-1] == green_detector(V, 0.25, KEY).read(text)
    assert detector.read([4, *text]) == green_detector(V, 0.25, KEY).read([4, *text])
    assert z_score(0, 0, 0.25) == 0.0


@pytest.mark.strategy("green_list", "synthid")
def test_drafting_leaves_the_law_of_a_watermark_as_it_is():
    models = {"target": TableModel("abc", seed=1), "draft": TableModel("abc", seed=2)}
    for mark in (("green_list", {}), ("synthid", {"width": 1, "keys": "5 9"})):
        plain, drafted = (LaneConfig(decoder, {}, [*slots, mark, AT_ONE]) for decoder, slots in (
            ("greedy", []), ("speculative", [("draft_model", {"depth": 2}), ("rejection", {})])))
        assert distance(law(plain, models, [0, 1], 2), law(drafted, models, [0, 1], 2)) < EXACT
