"""Lanes side by side: fairness, isolation of failures, and holding, stepping and stopping."""
from __future__ import annotations

import logging
import math

import pytest
import torch
from pairs import pair
from tables import TableModel

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import chain
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.session import Session, prepare
from playground.errors import Refusal
from playground.events import Done, Failed, Header, Note, Step
from playground.trace import check
from support.session_lanes import Raises, last, run, text
from support.sessions import LENGTH, MODEL, side_by_side


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Silences the log of lanes that fail on purpose."""
    caplog.set_level(logging.CRITICAL, logger="playground.decoding.lane_runner")


# --- one lane fails, the others do not ---

class RaisesAtOnce(Decoder):
    def decode(self, lm):
        raise ZeroDivisionError("nothing is left")


class Refuses(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        raise Refusal("This prompt has no question in it: ask one.")


class WantsADraft(Decoder):
    def decode(self, lm):
        yield lm.stream("draft").extend()


class YieldsNonsense(Decoder):
    def decode(self, lm):
        yield "a token"


class ReturnsNothing(Decoder):
    def decode(self, lm):
        lm.prefill()


class ForgetsToYieldPrefill(Decoder):
    def decode(self, lm):
        rows = lm.prefill()
        yield lm.keep(lm.pick(rows))


class ForgetsToYieldKeep(Decoder):
    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            lm.keep(lm.pick(rows))
            rows = yield lm.extend()


class ForgetsToYieldRollBack(Decoder):
    def decode(self, lm):
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))
        lm.roll_back(1)
        yield lm.keep(lm.pick((yield lm.extend())))


class YieldsFromARequest(Decoder):
    def decode(self, lm):
        yield from lm.prefill()


class TakesBackTooMuch(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        yield lm.roll_back(1)


class AsksForANodeThatIsNotThere(Decoder):
    def decode(self, lm):
        rows = yield lm.extend(chain([1, 2], "test"))
        yield lm.keep(lm.pick(rows, 2))


class TalksForEver(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        while True:
            yield Note("and another thing")


class RunsOutOfMemory(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        raise torch.OutOfMemoryError("CUDA out of memory")


FAILURES = {
    Raises: "ZeroDivisionError: nothing is left",
    RaisesAtOnce: "ZeroDivisionError: nothing is left",
    Refuses: "This prompt has no question in it: ask one.",
    WantsADraft: "This strategy needs a draft model in addition to the target: choose one.",
    YieldsNonsense: "a strategy yields events and requests, not str",
    ReturnsNothing: "decode of ReturnsNothing returned NoneType: it has to be a generator",
    ForgetsToYieldPrefill: "write `answer = yield lm.…`",
    ForgetsToYieldKeep: "write `yield lm.keep(…)`",
    ForgetsToYieldRollBack: "`yield lm.roll_back(…)`",
    YieldsFromARequest: "not iterable",
    TakesBackTooMuch: "cannot roll back 1 of 0 generated tokens",
    AsksForANodeThatIsNotThere: "no row for node 2",
    TalksForEver: "events without a request: it may be in an endless loop",
    RunsOutOfMemory: "The device ran out of memory",
}


@pytest.mark.parametrize("broken, message", FAILURES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_lane_that_fails_says_why_and_leaves_the_others_alone(broken, message):
    session = run(side_by_side(make("greedy"), broken(), make("greedy")))
    assert isinstance(last(session, 1), Failed) and message in last(session, 1).message
    alone = run(side_by_side(make("greedy")))
    assert text(session.trace.events, 0) == text(session.trace.events, 2) == text(alone.trace.events)
    assert last(session, 0) == last(session, 2) == Done("length")
    assert check(session.trace) == []


class SpeaksWhileItIsClosed(Decoder):
    def decode(self, lm):
        try:
            yield from plain(lm)
        finally:
            yield Note("one thing more")


class FailsWhileItIsClosed(Decoder):
    def decode(self, lm):
        try:
            yield from plain(lm)
        finally:
            raise ValueError("no")


@pytest.mark.parametrize("stubborn", [SpeaksWhileItIsClosed, FailsWhileItIsClosed])
def test_a_lane_that_does_not_close_is_ended(stubborn):
    finished = run(side_by_side(stubborn(), make("greedy")))
    assert last(finished, 0) == last(finished, 1) == Done("length")
    stopped = side_by_side(stubborn(), make("greedy"))
    stopped.advance(), stopped.advance(), stopped.stop()
    assert stopped.finished and last(stopped, 0) == last(stopped, 1) == Done("stopped")


class SaysNoMore(Decoder):
    def decode(self, lm):
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))


def test_a_strategy_that_returns_ends_its_text():
    session = run(side_by_side(SaysNoMore()))
    assert last(session, 0) == Done("end") and len(text(session.trace.events)) == 1


def test_a_lane_that_cannot_start_reports_its_own_failure():
    session = run(
        prepare(
            Models(pair().target),
            [LaneConfig("greedy"), LaneConfig("speculative"), LaneConfig("gredy"), LaneConfig("greedy", {"k": 1})],
            Prompt("The bird"),
            Limits(max_new_tokens=2),
        )
    )
    assert last(session, 0) == Done("length")
    assert [last(session, lane).message[:30] for lane in (1, 2, 3)] == [
        "This strategy needs a draft mo", "There is no strategy named 'gr", "greedy has no knob 'k'; it has"]
    assert [header.strategy for header in session.headers] == ["greedy", "speculative", "gredy", "greedy"]


@pytest.mark.parametrize("configs, prompt, limits, about", [
    ([], "The bird", Limits(), "lanes"), ([LaneConfig()], "The bird", Limits(max_new_tokens=0), "length"),
    ([LaneConfig()], "  \n", Limits(), "prompt"), ([LaneConfig()], "bird " * 200, Limits(), "prompt"),
], ids=["no lanes", "no length", "no prompt", "too long a prompt"])
def test_a_session_that_cannot_run_is_refused(configs, prompt, limits, about):
    with pytest.raises(Refusal) as refusal:
        prepare(pair(), configs, Prompt(prompt), limits)
    assert refusal.value.about == about and str(refusal.value).endswith(".")


# --- rollback ---

class Hesitates(Decoder):
    """Writes two tokens, rolls both back, and writes again."""

    def decode(self, lm):
        rows = yield lm.prefill()
        for _ in range(3):
            yield lm.keep(lm.pick(rows))
            yield lm.keep(lm.pick((yield lm.extend())))
            yield lm.roll_back(2)
            rows = yield lm.extend()
        yield from plain(lm)


def test_a_rollback_leaves_no_trace_in_text_or_cache():
    session = run(side_by_side(Hesitates(), make("greedy")))
    hesitant, plain_lane = (session._runners[lane].lane for lane in (0, 1))
    assert hesitant.tokens == plain_lane.tokens and hesitant.text == plain_lane.text
    assert hesitant.target.store.keys[0].rows[0, :8, 0].tolist() == hesitant.tokens[:8]
    assert check(session.trace) == []


def test_a_grammar_follows_a_rollback():
    models = {"target": pair().target}
    assembly = assemble(LaneConfig("greedy", {}, [("regex", {"pattern": "[a-c]{9}"})]))
    assembly.decoder = Hesitates()
    runner = Runner(
        Lane([54, 71], models, assembly, Limits(max_new_tokens=12), Recorder(pair().target.tokens)), assembly
    )
    while not runner.finished:
        runner.advance()
    assert len(runner.lane.text) == 9 and set(runner.lane.text) <= set("abc")


class GoesBack(Decoder):
    """Rolls back its tokens."""

    def decode(self, lm):
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))
        yield lm.roll_back(1)


@pytest.mark.parametrize(
    "parts", [{"cache_policy": make("sink_window")}, {"samplers": [make("mirostat")]}], ids=["sink_window", "mirostat"]
)
def test_a_rollback_is_refused_if_a_strategy_cannot_undo_it(parts):
    assembly = Assembly(GoesBack(), **parts)
    lane = Lane([0, 1, 2], {"target": MODEL}, assembly, Limits(max_new_tokens=LENGTH), Recorder(MODEL.tokens))
    message = last(run(Session([Header()], [Runner(lane, assembly)])), 0).message
    assert message.endswith("cannot undo its effect on later positions, so tokens cannot be rolled back: remove it.")


def test_impossible_tokens_add_nothing_to_an_entropy():
    model = TableModel("abc", rule=lambda context: torch.tensor([0.0, 0.0, float("-inf")], dtype=torch.float64))
    lane = Lane(
        [0],
        {"target": model},
        assembly := assemble(LaneConfig("greedy")),
        Limits(max_new_tokens=1),
        Recorder(model.tokens),
    )
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    (step,) = [event for event in events if isinstance(event, Step)]
    assert step.entropy == pytest.approx(math.log(2))
