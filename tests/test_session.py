"""Lanes side by side: fairness, isolation of failures, and holding, stepping and stopping."""
from __future__ import annotations

import itertools
import logging
import math
import random

import pytest
import torch
from pairs import pair
from tables import TableModel

import playground.decoding.session
import playground.engine.forward_timer
from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.contract.token_tree import chain
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.session import LEAD, Models, Prompt, Runner, Session, prepare
from playground.errors import Refusal
from playground.events import Commit, Done, Failed, Forward, Header, Note, Stamped, Step
from playground.trace import check
from support.sessions import LENGTH, MODEL, Clock, side_by_side


def run(session: Session) -> Session:
    for _ in session:
        pass
    return session


def last(session: Session, lane: int):
    return session.trace.lane(lane).events[-1].event


def text(stamped: list[Stamped], lane: int = 0) -> str:
    return "".join(s.event.text for s in stamped if s.lane == lane and isinstance(s.event, Commit))


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Silences the log of lanes that fail on purpose."""
    caplog.set_level(logging.CRITICAL, logger="playground.decoding.session")


# --- one lane fails, the others do not ---

class Raises(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        raise ZeroDivisionError("nothing is left")


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


@pytest.mark.parametrize("recipes, prompt, limits, about", [
    ([], "The bird", Limits(), "lanes"), ([LaneConfig()], "The bird", Limits(max_new_tokens=0), "max_new_tokens"),
    ([LaneConfig()], "  \n", Limits(), "prompt"), ([LaneConfig()], "bird " * 200, Limits(), "prompt"),
], ids=["no lanes", "no length", "no prompt", "too long a prompt"])
def test_a_session_that_cannot_run_is_refused(recipes, prompt, limits, about):
    with pytest.raises(Refusal) as refusal:
        prepare(pair(), recipes, Prompt(prompt), limits)
    assert refusal.value.about == about and str(refusal.value).endswith(".")


# --- fairness ---

class Spendthrift(Decoder):
    """Reads fifty trees before it writes a token."""

    def decode(self, lm):
        yield lm.prefill()
        while True:
            for _ in range(50):
                rows = yield lm.extend(chain([1], "test"))
            yield lm.keep(lm.pick(rows))


def time_with(monkeypatch, clock) -> None:
    for module in (playground.decoding.session, playground.engine.forward_timer):
        monkeypatch.setattr(module, "perf_counter", clock)


def test_a_lane_with_fifty_forwards_per_token_does_not_starve_another(monkeypatch):
    time_with(monkeypatch, Clock())
    session = run(side_by_side(Spendthrift(), make("greedy"), length=8))
    ended = next(i for i, s in enumerate(session.trace.events) if s.lane == 1 and isinstance(s.event, Done))
    before = [s for s in session.trace.events[:ended] if s.lane == 0 and isinstance(s.event, Forward)]
    assert len(before) <= 2 * 8 + 2, "the other lane's tokens wait for no more than their share"
    assert text(session.trace.events, 0) == text(session.trace.events, 1)


def test_the_lane_with_the_least_work_is_served_next():
    session = side_by_side(Spendthrift(), make("greedy"), make("greedy"), length=20)
    for _ in range(60):
        session.advance()
        work = [runner.work for runner in session._runners]
        assert max(work) - min(work) <= LEAD + 3, "at most one forward of three rows ahead"


@pytest.mark.parametrize("seed", range(2))
def test_which_lanes_share_a_forward_does_not_depend_on_how_long_forwards_take(monkeypatch, seed):
    def shared(clock) -> list[tuple]:
        time_with(monkeypatch, clock)
        events = run(side_by_side(make("greedy"), Spendthrift(), make("greedy"), length=8)).trace.events
        return [(s.lane, s.event.lanes) for s in events if isinstance(s.event, Forward)]

    times, now = random.Random(seed), itertools.count()
    assert shared(lambda: next(now) * times.random()) == shared(Clock())


def test_a_lanes_clock_is_the_sum_of_its_own_requests(monkeypatch):
    time_with(monkeypatch, Clock())
    alone, among = (
        run(side_by_side(make("greedy"))),
        run(side_by_side(make("greedy"), Spendthrift(), Raises(), model=None)),
    )
    assert [s.at for s in among.trace.lane(0).events] == [s.at for s in alone.trace.events]


def test_a_long_prompt_is_read_in_chunks_so_that_others_do_not_wait():
    model = TableModel("abcde", context=4096, rule=lambda context: torch.arange(5.0).double())
    assembly = Assembly(make("greedy"))
    runner = Runner(
        Lane([0, 1, 2] * 400, {"target": model}, assembly, Limits(max_new_tokens=1), Recorder(model.tokens)), assembly
    )
    pieces = []
    while not runner.finished:
        pieces.append([event.tokens for event in runner.advance() if isinstance(event, Forward)])
    assert max(map(len, pieces)) == 1 and [tokens for piece in pieces for tokens in piece] == [512, 512, 176]


class AsksBothAtOnce(Decoder):
    """Reads a row of both models, and reports the target's probability of the draft's argmax."""

    def decode(self, lm):
        while True:
            ours, theirs = yield lm.together(lm.extend(), lm.stream("draft").extend())
            assert (ours.stream, theirs.stream) == ("target", "draft")
            yield lm.keep(lm.pick(ours))


def test_concurrent_requests_share_a_forward():
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    assembly = Assembly(AsksBothAtOnce())
    runner, forwards = (
        Runner(
            Lane([0, 1, 2], models, assembly, Limits(max_new_tokens=LENGTH), Recorder(models["target"].tokens)),
            assembly,
        ),
        [],
    )
    while not runner.finished:
        forwards.append([event.stream for event in runner.advance() if isinstance(event, Forward)])
    assert [streams for streams in forwards if streams] == [["target", "draft"]] * LENGTH


class GoesOnMeanwhile(Decoder):
    """Lets the draft read the prompt and a draft token, concurrently or not, and drafts another before it uses the
    rows.
    """

    def __init__(self, aside: bool):
        super().__init__()
        self.aside = aside

    def decode(self, lm):
        rows, tree = (yield lm.prefill()), chain([1], "test")
        request = lm.stream("draft").extend(tree)
        answer = (yield lm.aside(request)) if self.aside else (yield request)
        tree.add(2, 0, confidence=1.0)
        self.seen = (yield answer) if self.aside else answer
        yield lm.keep(lm.pick(rows))


def test_rows_of_a_request_submitted_concurrently_are_those_of_the_tree_as_it_was_then():
    seen = []
    for decoder in (GoesOnMeanwhile(aside=True), GoesOnMeanwhile(aside=False)):
        models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
        runner = Runner(
            Lane([0, 1, 2], models, Assembly(decoder), Limits(max_new_tokens=1), Recorder(models["target"].tokens)),
            Assembly(decoder),
        )
        while not runner.finished:
            runner.advance()
        seen.append(decoder.seen.raw)
    assert seen[0].shape == (2, 5) and torch.equal(*seen), "after the prompt, and after the first guess"


# --- lanes that share a model share its forwards ---

def test_four_plain_lanes_over_one_model_take_as_many_forwards_as_one():
    alone, shared = TableModel("abcde"), TableModel("abcde")
    one = run(side_by_side(make("greedy"), model=alone))
    four = run(side_by_side(*[make("greedy") for _ in range(4)], model=shared))
    assert shared.forwards == alone.forwards == LENGTH
    assert {text(four.trace.events, lane) for lane in range(4)} == {text(one.trace.events)}


def test_the_seconds_of_a_shared_forward_are_divided_by_rows(monkeypatch):
    time_with(monkeypatch, Clock())
    session = run(side_by_side(make("greedy"), make("greedy"), make("greedy")))
    shared = [s.event for s in session.trace.events if isinstance(s.event, Forward) and s.event.lanes == 3]
    assert len(shared) == 3 * LENGTH and all(event.seconds == pytest.approx(1 / 3) for event in shared)


class FailsOnThree(TableModel):
    """Has memory for the rows of two lanes, not of three."""

    def forward(self, works, plan=None):
        if len(works) > 2:
            raise torch.OutOfMemoryError("three are too many")
        return super().forward(works, plan)


def test_lanes_that_do_not_fit_in_one_forward_run_separately():
    session = run(side_by_side(make("greedy"), make("greedy"), make("greedy"), model=FailsOnThree("abcde")))
    assert [last(session, lane) for lane in range(3)] == [Done("length")] * 3


class Narrow(TableModel):
    """Fails for inputs with many rows."""

    def forward(self, works, plan=None):
        if any(len(work.tokens) > 3 for work in works):
            raise torch.OutOfMemoryError("too many rows")
        return super().forward(works, plan)


class GuessesWide(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        yield lm.extend(chain([1, 2, 3, 4, 0], "wide"))


def test_an_excessive_request_to_a_shared_model_fails_its_lane_only():
    session = run(side_by_side(make("greedy"), GuessesWide(), make("greedy"), model=Narrow("abcde")))
    assert isinstance(last(session, 1), Failed) and [last(session, lane) for lane in (0, 2)] == [Done("length")] * 2


# --- hold, step, stop ---

def test_a_session_that_is_not_driven_does_nothing():
    model = TableModel("abcde")
    session = side_by_side(make("greedy"), model=model)
    assert model.forwards == 0 and session.trace.events == [] and not session.finished


def test_a_step_takes_each_lane_to_its_next_commit():
    session = side_by_side(make("greedy"), Spendthrift())
    for count in range(1, LENGTH + 1):
        stamped = session.step()
        assert [sum(isinstance(s.event, Commit) for s in stamped if s.lane == lane) for lane in (0, 1)] == [1, 1]
        assert len(text(session.trace.events, 0)) == len(text(session.trace.events, 1)) == count
    assert session.finished and session.step() == [] and session.advance() == []


def test_a_step_skips_a_failed_lane():
    session = side_by_side(Raises(), make("greedy"))
    session.step()
    assert isinstance(last(session, 0), Failed) and len(text(session.trace.events, 1)) == 1


def test_stop_ends_all_lanes_at_once_and_no_forward_follows():
    model = TableModel("abcde")
    session = side_by_side(Spendthrift(), make("greedy"), model=model)
    for _ in range(7):
        session.advance()
    done = model.forwards
    assert [stamped.event for stamped in session.stop()] == [Done("stopped")] * 2
    assert session.finished and session.advance() == [] and list(session) == [] and model.forwards == done


def test_stopping_one_lane_leaves_the_others_running():
    session = side_by_side(Spendthrift(), make("greedy"))
    session.advance(), session.advance()
    assert [stamped.event for stamped in session.stop(0)] == [Done("stopped")]
    run(session)
    assert last(session, 1) == Done("length") and session.stop() == []


def test_a_refused_lane_can_be_stopped():
    session = prepare(pair(), [LaneConfig("gredy")], Prompt("The bird"), Limits())
    assert [type(stamped.event) for stamped in session.stop()] == [Failed]
    assert session.finished and session.stop() == []


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
