"""Lanes share forwards, are served fairly, and can be held, stepped and stopped."""
from __future__ import annotations

import itertools
import logging
import random

import pytest
import torch
from pairs import pair
from tables import TableModel

import playground.decoding.lane_runner
import playground.engine.forward_timer
from playground.contract import Decoder, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.contract.token_tree import chain
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.session import LEAD, prepare
from playground.events import Commit, Done, Failed, Forward
from support.session_lanes import Raises, last, run, text
from support.sessions import LENGTH, Clock, side_by_side


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Silences the log of lanes that fail on purpose."""
    caplog.set_level(logging.CRITICAL, logger="playground.decoding.lane_runner")


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
    for module in (playground.decoding.lane_runner, playground.engine.forward_timer):
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
