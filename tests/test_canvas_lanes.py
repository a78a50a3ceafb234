"""Canvas lanes in a session: they share forwards, and a constraint holds where positions are filled from left to right.
"""
from __future__ import annotations

import json
import re

import pytest
import torch

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.session import Session
from playground.engine.canvas.canvas_pass import CanvasPass
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.errors import Refusal
from playground.events import Commit, Done, Fill, Forward, Header, Mask, Stamped
from playground.trace import Trace, check
from support.canvases import MASK, PROMPT, canvas, course, denoiser, fills, forwards, run

ROOM = 8
LANES = [
    LaneConfig("masked_diffusion", {"block_length": 4}), LaneConfig("fast_dllm", {"threshold": 0.2}),
    LaneConfig("elastic_cache", {"window": 3, "threshold": 1.05}), LaneConfig("dkv_cache", {"interval": 3}),
]


def together(model, configs: list[LaneConfig], length: int = ROOM) -> Session:
    runners = []
    for config in configs:
        assembly = assemble(config)
        runners.append(Runner(canvas(model, assembly, length=length), assembly))
    session = Session([Header(lane=i, canvas=length) for i in range(len(runners))], runners)
    for _ in session:
        pass
    return session


def events_of(session: Session, lane: int) -> list:
    return [stamped.event for stamped in session.trace.lane(lane).events]


# --- shared forwards ---

def test_canvases_of_one_model_share_forwards_and_fill_what_each_fills_alone():
    model = denoiser()
    session = together(model, LANES)
    shared = 0
    for number, config in enumerate(LANES):
        events, alone = events_of(session, number), run(model, config.strategy, length=ROOM, **config.knobs)
        assert [(f.positions, f.ids) for f in fills(events)] == [(f.positions, f.ids) for f in fills(alone)]
        pairs = zip(course(events), course(alone))
        assert max(abs(one[2] - other[2]) for one, other in pairs) < 1e-9
        assert [(f.tokens, f.flops) for f in forwards(events)] == [(f.tokens, f.flops) for f in forwards(alone)]
        shared += sum(event.lanes > 1 for event in forwards(events))
    assert shared > 10


def test_states_of_one_lane_in_a_shared_forward_are_not_anothers():
    """A wrong batch, in which the second canvas reads the first one's states, gives other logits."""
    model = denoiser()
    one, other = [*PROMPT, *[None] * 4], [*PROMPT[::-1], *[None] * 6]
    both, _ = model.forward([CanvasPass(one), CanvasPass(other, [5, 7])])
    finite = both[0].isfinite()
    assert float((both[0] - model.denoise(one))[finite].abs().max()) < 1e-9
    assert float((both[1] - model.denoise(other, [5, 7]))[both[1].isfinite()].abs().max()) < 1e-9
    states = model.new_states(len(other))
    changed = CanvasPass([*other[:9], 12, 12], [5, 7], [5, 7, 9, 10], states)
    mixed, _ = model.forward([CanvasPass(other, states=states), changed])
    assert float((mixed[1] - both[1])[both[1].isfinite()].abs().max()) > 1e-3


def test_lanes_over_a_table_share_forwards_and_their_seconds_add_up():
    model = OracleDenoiser.bundled()
    runners = []
    for config in (LaneConfig("masked_diffusion"), LaneConfig("masked_diffusion", {"order": "entropy"})):
        assembly = assemble(config)
        lane = Canvas(model.tokens.encode("the"), {"target": model}, assembly, Limits(), Recorder(model.tokens))
        runners.append(Runner(lane, assembly))
    session = Session([Header(lane=i, canvas=runners[i].lane.length) for i in range(2)], runners)
    for _ in session:
        pass
    for lane, runner in enumerate(runners):
        ran = [event for event in events_of(session, lane) if isinstance(event, Forward)]
        assert {event.lanes for event in ran} == {2} and sum(event.seconds for event in ran) <= runner.clock


# --- constraints ---

LEFT = {"order": "left_to_right"}
DIGITS = ("regex", {"pattern": "[0-9]{2,4}"})


def constrained(extra, knobs: dict = LEFT, strategy: str = "masked_diffusion", length: int = ROOM, seed: int = 0):
    model = denoiser(seed=seed)
    model.end_ids = frozenset([0])  # the tokenizer's own
    assembly = assemble(LaneConfig(strategy, knobs, [extra]))
    runner, events = Runner(canvas(model, assembly, length=length, seed=seed), assembly), []
    while not runner.finished:
        events += runner.advance()
    return model, events


def by_hand(model, length: int, allowed) -> list[int]:
    """The most probable allowed token at each position from left to right, until an end token."""
    canvas, text = [None] * length, ""
    for position in range(length):
        logits = model.denoise([*PROMPT, *canvas])[len(PROMPT) + position]
        fitting = [token for token in range(len(logits)) if token != MASK and allowed(model, text, token)]
        canvas[position] = max(fitting, key=lambda token: float(logits[token]))
        if canvas[position] in model.end_ids:
            break
        text += model.tokens.bytes(canvas[position]).decode()
    return [token for token in canvas if token is not None]


def digits_allowed(model, text: str, token: int) -> bool:
    """Tokens that two to four digits allow next, by their text."""
    if token in model.end_ids:
        return len(text) >= 2
    piece = model.tokens.bytes(token)
    return bool(piece) and not model.tokens.is_special(token) and bool(re.fullmatch(rb"[0-9]+", piece)) and (
        len(text) + len(piece) <= 4)


@pytest.mark.oracle("masked_diffusion")
@pytest.mark.parametrize("seed", range(3))
def test_a_regex_allows_what_its_language_allows_next(seed):
    model, events = constrained(DIGITS, seed=seed)
    found = [token for fill in fills(events) for token in fill.ids]
    expected = by_hand(model, ROOM, digits_allowed)
    assert found[:len(expected)] == expected and set(found[len(expected):]) <= model.end_ids
    (commit,) = [event for event in events if isinstance(event, Commit)]
    assert re.fullmatch("[0-9]{2,4}", commit.text) and events[-1].reason == "end"
    assert check(trace_of(events)) == []


def trace_of(events):
    header = Header(canvas=ROOM, prompt_ids=PROMPT, prompt_pieces=["x"] * len(PROMPT), vocabulary=320)
    return Trace([header], [Stamped(0, number, 0.0, event) for number, event in enumerate(events)])


@pytest.mark.refuses("masked_diffusion")
def test_without_the_constraint_the_text_is_another():
    model, events = constrained(DIGITS)
    plain = run(model, "masked_diffusion", length=ROOM, **LEFT)
    assert course(plain)[0][1] != course(events)[0][1]


@pytest.mark.parametrize("strategy, knobs", [
    ("masked_diffusion", LEFT), ("masked_diffusion", {"block_length": 1}), ("fast_dllm", {"block_length": 1}),
    ("masked_diffusion", LEFT | {"temperature": 1.0, "guidance": 1.0}), ("local_leap", {"block_length": 1}),
])
def test_every_finished_text_fits_the_schema(strategy, knobs):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}
    _, events = constrained(("json_schema", {"source": json.dumps(schema)}), knobs, strategy, length=24)
    (commit,), (done,) = ([e for e in events if isinstance(e, kind)] for kind in (Commit, Done))
    assert done.reason in ("end", "length")
    if done.reason == "end":
        assert isinstance(json.loads(commit.text)["a"], bool)
    masks = [event for event in events if isinstance(event, Mask)]
    assert masks and all(0 < mask.allowed < mask.vocabulary for mask in masks[:3])


def test_a_text_that_the_canvas_cuts_off_ends_by_length():
    _, events = constrained(("regex", {"pattern": "[0-9]{20}"}), length=4)
    assert events[-1].reason == "length"


def refused(strategy: str, knobs: dict, extra=DIGITS) -> str:
    with pytest.raises(Refusal) as refusal:
        assemble(LaneConfig(strategy, knobs, [extra]))
    return str(refusal.value)


@pytest.mark.parametrize("strategy, knobs", [
    ("masked_diffusion", {}), ("masked_diffusion", LEFT | {"steps": 2}),
    ("masked_diffusion", LEFT | {"rule": "threshold"}), ("fast_dllm", {}), ("adablock", {"block_length": 1}),
    ("dream", {}), ("elastic_cache", {}),
])
def test_any_other_order_is_refused_with_the_reason(strategy, knobs):
    said = refused(strategy, knobs)
    assert "judges a text from its beginning" in said and "order left_to_right" in said


def test_a_table_and_a_checker_are_refused():
    oracle, assembly = OracleDenoiser.bundled(), assemble(LaneConfig("masked_diffusion", LEFT, [DIGITS]))
    with pytest.raises(Refusal, match="oracle is a table and takes no constraint"):
        Canvas(oracle.tokens.encode("the"), {"target": oracle}, assembly, Limits(), Recorder(oracle.tokens))


def test_filling_out_of_order_under_a_constraint_is_reported():
    model = denoiser()
    lane = canvas(model, assemble(LaneConfig("masked_diffusion", LEFT, [DIGITS])))
    with pytest.raises(ValueError, match="it fills 0 next"):
        lane.fill([3], [11], [1.0]).go_on()
    assert lane.masked == list(range(lane.length)) and not any(isinstance(e, Fill) for e in lane.events)


def test_a_dead_end_is_reported():
    lane = canvas(denoiser(), assemble(LaneConfig("masked_diffusion", LEFT, [DIGITS])))
    lane.grammar.matcher.mask = lambda: torch.zeros(320, dtype=torch.bool)
    with pytest.raises(Refusal, match="allows no token"):
        lane.rows_of(torch.zeros(lane.length, 320))
