"""Every field of a lane reaches the run, wherever the lane was written: programs, shell, API, links, lessons."""
from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import playground
from playground.cli.lane_options import lane_given, lanes_given
from playground.contract.lane_config import LaneConfig
from playground.decoding import program_input
from playground.decoding.lane_checks import judge
from playground.engine.loading.load import QUANTIZATIONS
from playground.errors import Refusal
from playground.lane_fields import untrusted_lane
from playground.ui.components.settings import Settings
from playground.ui.play.lessons import read_lesson
from playground.ui.server.api import settings_of as of_the_api
from playground.weight_changes import QUANTIZED

LANE = LaneConfig(
    strategy="speculative",
    knobs={"drafter": "prompt_lookup"},
    extras=[("top_p", {"p": 0.5}), ("temperature", {"t": 0.7})],
    forced=[5, 6, 7],
    seed=11,
    forked_at=2,
    weights="int8",
)
AS_JSON = json.loads(json.dumps(asdict(LANE)))
ARGUMENTS = {"prompt": "Once", "lanes": [AS_JSON]}
LESSON = """title: A lesson
minutes: 3
about: Something.
remember: One thing.
prompt: Once
lanes: {lanes}

## First
show: prompt

Some words.
"""


def by_lesson(folder: Path) -> LaneConfig:
    (folder / "07-mine.md").write_text(LESSON.format(lanes=json.dumps([AS_JSON])))
    return Settings.read(read_lesson(folder / "07-mine.md").steps[0].settings).configs()[0]


SURFACES = {
    "a LaneConfig of a program": lambda folder: program_input.read_lanes([LANE])[0],
    "a dict of a program": lambda folder: program_input.read_lanes([AS_JSON])[0],
    "run in a shell": lambda folder: lane_given(json.dumps(AS_JSON), [], []),
    "compare in a shell": lambda folder: lanes_given(["greedy", json.dumps(AS_JSON)], [], [])[1],
    "the HTTP API": lambda folder: of_the_api(ARGUMENTS).configs()[0],
    "the storage of a browser, and the gallery": lambda folder: Settings.read(ARGUMENTS).configs()[0],
    "a link, and a kept run": lambda folder: Settings.from_code(Settings.read(ARGUMENTS).to_code()).configs()[0],
    "a lesson": by_lesson,
}


def test_the_lane_of_these_tests_sets_every_field():
    blank = LaneConfig()
    assert [each.name for each in fields(LANE) if getattr(LANE, each.name) == getattr(blank, each.name)] == []


@pytest.mark.parametrize("surface", SURFACES)
def test_every_field_of_a_lane_survives(surface, tmp_path):
    assert SURFACES[surface](tmp_path) == LANE


def test_the_weights_of_a_lane_are_what_a_model_can_be_quantised_to():
    assert ("none", *QUANTIZED) == QUANTIZATIONS


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        ({"strategy": "greedy", "weigths": "int8"}, "no field 'weigths'; did you mean weights?"),
        ({"strategy": "greedy", 3: 4}, "no field 3; its fields are strategy"),
        ({"extras": []}, "names its strategy"),
        ({"strategy": "greedy", "weights": "int3"}, "one of int8, nf4, fp4"),
        ({"strategy": "greedy", "forced": [1], "forked_at": 1}, "index in `forced`"),
    ],
)
def test_what_is_no_lane_is_refused_before_a_model_is_loaded(lane, message):
    with pytest.raises(Refusal, match=message.replace("?", r"\?")):
        playground.compare([lane], "Once")


@pytest.mark.parametrize("read", [lambda lane: of_the_api({"lanes": [lane]}), lambda lane: lane_given(
    json.dumps(lane), [], [])], ids=["the HTTP API", "the shell"])
def test_an_unknown_field_is_refused_with_the_nearest(read):
    with pytest.raises(Refusal, match="did you mean forced?"):
        read({"strategy": "greedy", "forcd": [1]})


@pytest.mark.slow
def test_a_program_gets_the_weights_that_a_lane_asks_for():
    models = playground.load(draft="none", device="cpu", dtype="float32")
    plain, own = playground.compare(
        ["greedy", {"strategy": "greedy", "weights": "int8"}], "Once", models=models, max_new_tokens=4
    )
    alone = playground.load(draft="none", device="cpu", dtype="float32", quantization="int8")
    same = playground.run("greedy", "Once", models=alone, max_new_tokens=4)
    assert [plain.header.quantization, own.header.quantization] == ["none", "int8"]
    assert own.logprobs == same.logprobs != plain.logprobs


@pytest.mark.parametrize("weights", ["{{nonsense", "rtm:bits=4", "int8 + fp3", "x" * 5000])
def test_weights_that_there_are_not_are_refused_at_the_lane_and_not_left_out(weights):
    lane = LaneConfig(**untrusted_lane({"strategy": "greedy", "weights": weights}))
    assert lane.weights == weights[:1001]
    (verdict,) = judge([lane])
    assert verdict["problem"].startswith("The weights of a lane are one of int8") and verdict["about"] == "weights"
