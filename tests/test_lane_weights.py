"""A lane with quantised weights of its own, beside lanes with those of the run."""
from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
from pairs import pair

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Commit, Failed
from playground.ui.components.settings import Settings
from playground.ui.server.model_loader import ModelLoader, ModelRequest


@pytest.fixture(scope="module")
def models() -> Models:
    """Another random model stands in for the quantised target: its text differs for certain."""
    quantized = copy(pair().draft)
    quantized.name, quantized.quantization = pair().target.name, "int8"
    return replace(pair(), quantized={"int8": quantized})


def texts(models: Models, *lanes: LaneConfig) -> tuple[list, list[list[int]], dict[int, str]]:
    """Headers, token ids of every lane, and the messages of failed lanes."""
    session = prepare(models, list(lanes), Prompt("Once upon"), Limits(0, 24))
    while not session.finished:
        session.step()
    trace = session.trace
    ids = [[i for one in trace.events if one.lane == lane and isinstance(one.event, Commit) for i in one.event.ids]
           for lane in range(len(lanes))]
    return session.headers, ids, {one.lane: one.event.message for one in trace.events if isinstance(one.event, Failed)}


@pytest.mark.oracle
def test_a_lane_with_its_own_weights_writes_the_text_of_a_run_with_them(models):
    headers, (plain, own), failed = texts(models, LaneConfig(), LaneConfig(weights="int8"))
    alone = replace(models, target=models.quantized["int8"])
    assert not failed and own == texts(alone, LaneConfig())[1][0]
    assert [header.quantization for header in headers] == ["none", "int8"]
    assert [[part.kind for part in header.parts] for header in headers] == [["decoder"], ["decoder", "weights"]]
    assert plain == texts(models, LaneConfig())[1][0]


@pytest.mark.refuses
def test_a_lane_that_took_the_weights_of_the_run_would_fail_that_comparison(models):
    _, (plain, own), _ = texts(models, LaneConfig(), LaneConfig(weights="int8"))
    assert plain != own


def test_drafts_are_verified_with_the_weights_of_the_lane(models):
    greedy, speculative = texts(models, *(LaneConfig(name, weights="int8") for name in ("greedy", "speculative")))[1]
    assert speculative == greedy


def test_weights_that_are_not_loaded_fail_their_lane_alone(models):
    _, (plain, own), failed = texts(models, LaneConfig(), LaneConfig(weights="nf4"))
    assert plain and not own and list(failed) == [1]
    assert "nf4" in failed[1] and "set the quantisation of the whole run" in failed[1]


def test_weights_of_the_run_need_no_second_model(models):
    alone = replace(models, target=models.quantized["int8"], quantized={})
    headers, _, failed = texts(alone, LaneConfig(weights="int8"))
    assert not failed and [part.kind for part in headers[0].parts] == ["decoder"]


def test_a_link_keeps_the_weights_of_a_lane_and_those_that_there_are_not_are_not_loaded():
    lanes = [{"strategy": "greedy", "weights": name} for name in ("int8", "none", "int9", 4)]
    settings = Settings.from_code(Settings(prompt="x", lanes=lanes).to_code())
    assert [lane.get("weights") for lane in settings.lanes] == ["int8", None, "int9", None]
    assert [config.weights for config in settings.configs()] == ["int8", "", "int9", ""]
    assert settings.own_weights() == ["int8"]


def test_all_quantisations_of_the_newest_model_are_kept():
    loader = ModelLoader(lambda *names, progress, **how: object())
    for quantization in ("none", "int8", "nf4", "fp4"):
        loader.request(ModelRequest("a", quantization=quantization)).ended.wait(10)
    first = loader.request(ModelRequest("a"))
    assert first is loader.request(ModelRequest("a"))
    for name in "bcd":
        loader.request(ModelRequest(name)).ended.wait(10)
    assert loader.request(ModelRequest("a")) is not first
