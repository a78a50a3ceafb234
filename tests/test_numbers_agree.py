"""Numbers that describe the same thing agree to the last digit: in the events, in the exports and on the page."""
from __future__ import annotations

import csv
import math
from functools import partial

import pytest
from pairs import VOCABULARY, pair

from playground.contract.lane_config import LaneConfig, assemble, check_context
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.session import prepare
from playground.engine.checkpoint.hub_files import first_sentence
from playground.errors import Refusal
from playground.events import Branches, Commit, Step
from playground.trace import Trace
from playground.trace.csv_export import to_csv
from playground.ui.server.site import ASSETS
from support.live_runs import RUN

LANES = {
    "greedy": LaneConfig("greedy"),
    "greedy under a grammar": LaneConfig("greedy", {}, [("regex", {"pattern": "[a-z ]{30}"})]),
    "greedy with a penalty": LaneConfig("greedy", {}, [("repetition_penalty", {"penalty": 1.5})]),
    "sampling": LaneConfig("sample", {"temperature": 0.7, "top_p": 0.9}),
    "speculative": LaneConfig("speculative", {}, [("draft_model", {}), ("greedy_match", {})]),
}


def steps_of(lane: LaneConfig) -> list[Step]:
    """The steps of a short run, with every token of the vocabulary as a candidate."""
    session = prepare(pair(), [lane], Prompt("The red fox"), Limits(0, 4), partial(Recorder, top=VOCABULARY))
    return [stamped.event for stamped in session if isinstance(stamped.event, Step)]


def entropy_of(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities if p)


# --- the distribution after masks and processors ---

@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_the_entropy_after_processors_is_that_of_the_displayed_probabilities(lane):
    steps = steps_of(lane)
    assert len(steps) == 4
    for step in steps:
        finals = [candidate.final for candidate in step.top]
        assert sum(finals) == pytest.approx(1, abs=1e-3)
        assert step.final_entropy == pytest.approx(entropy_of(finals), abs=5e-3)  # finals have six digits


def test_without_processors_both_probabilities_are_the_same_and_under_a_grammar_they_are_renormalised():
    plain, masked = steps_of(LANES["greedy"])[0], steps_of(LANES["greedy under a grammar"])[0]
    assert all(candidate.raw == candidate.final for candidate in plain.top)
    allowed = [candidate for candidate in masked.top if candidate.fell is None and candidate.raw > 1e-4]
    left = sum(candidate.raw for candidate in masked.top if candidate.fell is None)
    assert len(allowed) > 1 and all(c.final == pytest.approx(c.raw / left, rel=0.02) for c in allowed)
    assert masked.chosen == max(masked.top, key=lambda candidate: candidate.final).id


def test_the_recorded_example_is_consistent():
    for stamped in Trace.load(ASSETS / "traces" / "first_view.jsonl").events:
        if isinstance(stamped.event, Step) and any(candidate.final == 1 for candidate in stamped.event.top):
            assert stamped.event.final_entropy < 1e-4


# --- exports ---

def test_lanes_are_counted_from_one_in_the_csv_as_on_the_page():
    assert [row["lane"] for row in csv.DictReader(to_csv(RUN).splitlines()) if row["position"] == "0"] == ["1", "2"]


# --- beams ---

@pytest.mark.parametrize("name", ["beam_search", "diverse_beam_search"])
def test_a_normalised_score_is_shown_with_its_sum(name):
    lane = LaneConfig(name, {"beams": 2, "length_exponent": 1.0})
    session = prepare(pair(), [lane], Prompt("The red fox"), Limits(0, 4))
    written, lengths = {}, {}
    for event in (stamped.event for stamped in session):
        if isinstance(event, Branches):
            lengths |= {child: lengths.get(parent, 0) for child, parent in event.born}
            assert event.scores.keys() == event.sums.keys()
            written |= {number: (event.sums[number], lengths[number], score) for number, score in event.scores.items()}
        elif isinstance(event, Commit) and event.sequence:
            lengths[event.sequence] = event.position + len(event.ids)
    assert written and all(score == pytest.approx(total / length) for total, length, score in written.values())


# --- sentences ---

def test_errors_name_a_strategy_as_the_page_does_and_no_number_of_the_system():
    with pytest.raises(Refusal, match="^Context-aware decoding needs a context"):
        check_context(assemble(LaneConfig("greedy", {}, [("cad", {})])), "")
    assert first_sentence(OSError(-2, "Name or service not known")) == "Name or service not known"
