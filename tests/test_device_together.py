"""Lanes side by side on a stand-in for a GPU: one recorded forward for all, whatever the number of layers."""
from __future__ import annotations

import copy

import pytest
from pairs import TOKENIZER, network

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.engine.model import Model
from playground.events import Commit, Event, Forward
from support.gpu_standin import Standin
from support.recorded_forwards import ENOUGH

PROMPT, LENGTH = Prompt("the red fox, the red fox, the"), 20
FOUR = [
    LaneConfig("greedy"),
    LaneConfig("greedy", extras=[("temperature", {}), ("top_p", {})]),
    LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
    LaneConfig("greedy", extras=[("temperature", {}), ("min_p", {})]),
]


def deep(layers: int):
    """A network whose layers are those of a smaller one, repeated."""
    built = network("llama")
    own = list(built.model.layers)
    for index in range(len(own), layers):
        layer = copy.deepcopy(own[index % len(own)])
        layer.self_attn.layer_idx = index
        built.model.layers.append(layer)
    built.config.num_hidden_layers = layers
    return built


def launched(machine: Standin, model: Model, lanes: list[LaneConfig]) -> tuple[float, Session]:
    """Fewest operations of a step in which all lanes go on, and the session: lanes that draft have longer ones."""
    session, counts = prepare(Models(model), lanes, PROMPT, Limits(0, LENGTH)), []
    while not session.finished:
        before = machine.launched
        if len({stamped.lane for stamped in session.advance()}) == len(lanes):
            counts.append(machine.launched - before)
    return min(counts), session


def texts(session: Session) -> list[list[int]]:
    return [[token for event in of_lane(session, lane, Commit) for token in event.ids]
            for lane in range(len(session.headers))]


def of_lane(session: Session, lane: int, kind: type[Event]) -> list[Event]:
    return [stamped.event for stamped in session.trace.lane(lane).events if isinstance(stamped.event, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [[LaneConfig("greedy")] * 4, FOUR], ids=["alike", "different"])
def test_four_lanes_write_the_cpus_texts_in_recorded_forwards_of_any_depth(lanes):
    plain = prepare(Models(Model(network("llama"), TOKENIZER, "cpu")), lanes, PROMPT, Limits(0, LENGTH))
    list(plain)
    counts = []
    for layers in (len(network("llama").model.layers), 6):
        with Standin() as machine:
            model = Model(machine.move(deep(layers)), TOKENIZER, "gpu")
            model.replay._free_bytes = ENOUGH  # memories stay, as beside the weights of a larger model
            launched(machine, model, lanes)  # forwards of new sizes are recorded
            count, session = launched(machine, model, lanes)
        counts.append(count)
        if layers < 6:
            assert texts(session) == texts(plain)
        assert any(event.lanes == 4 for event in of_lane(session, 0, Forward)), "they were never together"
    assert counts[1] <= counts[0]


SAMPLED = LaneConfig("greedy", extras=[("temperature", {}), ("top_p", {})])
GRAMMAR = LaneConfig("greedy", extras=[("regex", {"pattern": "[a-z ,]{1,400}"})])
CHOOSING = {"greedy": FOUR[:1], "sampled": [SAMPLED], "grammar": [GRAMMAR], "together": [FOUR[0], SAMPLED, GRAMMAR]}


@pytest.mark.slow
@pytest.mark.parametrize("lanes", CHOOSING.values(), ids=CHOOSING)
def test_the_next_forward_is_launched_before_the_host_has_read_the_token(lanes):
    with Standin() as machine:
        model = Model(machine.move(network("llama")), TOKENIZER, "gpu")
        launched(machine, model, lanes)
        session, ahead = prepare(Models(model), lanes, PROMPT, Limits(0, LENGTH)), 0
        while not session.finished:
            session.advance()
            ahead += model.launched_ahead is not None
    assert ahead >= LENGTH - 4, "the first forwards follow the prompt, and what the text goes on with is not known yet"
