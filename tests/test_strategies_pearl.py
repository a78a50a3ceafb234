"""Parallel models: one drafts while the other verifies."""
from __future__ import annotations

import threading
from itertools import product

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, write

from playground.algorithms.speculative.drafting import new_tree
from playground.contract import Verifier, find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Commit, Done, Draft, Failed, Figure, Forward, Switch, Verdict
from playground.trace.result import Result
from playground.trace.validate import check
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.parallel_drafting import agreeing, pearl
from support.speculation import GREEDY, MODEL
from support.speculative_runs import CHAIN, figures, law_distance, of

COLLAPSES = {
    "pearl": [
        Collapse(pearl(gamma=0), GREEDY),
        Collapse(pearl(AT_ONE, gamma=0), MODEL),
        Collapse(pearl(AT_ONE, gamma=3, pre=False, post=False), CHAIN),
        Collapse(pearl(at_once="always"), pearl()),
        Collapse(pearl(AT_ONE, gamma=3, at_once="always"), pearl(AT_ONE, gamma=3)),
    ],
}


def steps(models: dict, config: LaneConfig, length: int = 40) -> tuple[list[Draft], list[Verdict], list]:
    session = prepare(Models(models["target"], models["draft"]), [config], Prompt("abc"), Limits(0, length))
    events = [stamped.event for stamped in session]
    return of(Draft, events), of(Verdict, events), events


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_with_a_perfect_draft_every_forward_verifies_all_draft_tokens_of_the_previous_step(gamma):
    drafts, verdicts, events = steps(agreeing(1000), pearl(gamma=gamma), 41)
    assert [len(verdict.kept) for verdict in verdicts[:-1]] == [1] + [gamma] * (len(verdicts) - 2)
    assert all(verdict.token == -1 for verdict in verdicts[:-1]), "the first new guess has the bonus token's place"
    assert len([event for event in of(Switch, events)]) == (gamma > 1), "once something is pending, something always is"


def test_with_an_always_wrong_draft_every_token_takes_a_target_forward():
    models = agreeing(1)
    _, verdicts, events = steps(models, pearl(), 20)
    assert all(verdict.kept == [] for verdict in verdicts) and not of(Switch, events)
    passes = [event for event in of(Forward, events) if event.stream == "target"]
    assert len(passes) == 20 and {event.tokens for event in passes[1:]} == {1}


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_either_none_or_all_but_the_first_draft_token_of_a_step_are_pending(gamma, samplers):
    """As seen from the text: the draft reads the pending tokens again, with the end of the text, in the forward that
    makes the next draft token.
    """
    pending, session = set(), prepare(pair(), [pearl(*samplers, gamma=gamma)], Prompt("The green bird"), Limits(0, 40))
    while not session.finished:
        lane = session._runners[0].lane
        if lane.generated and not lane.reason and not lane.target.store.parents:
            assert lane.target.behind() <= 1
        for stamped in session.advance():
            if isinstance(stamped.event, Draft) and lane.remaining > 2 * gamma + 1:
                pending.add(len(stamped.event.tokens) - gamma)
    assert pending == {0, gamma - 1}


@pytest.mark.parametrize(
    "knobs",
    [{"pre": pre, "post": post, "gamma": gamma} for pre, post, gamma in product([True, False], [True, False], [1, 4])],
    ids=str,
)
def test_no_unverified_token_is_in_the_text_at_any_time(knobs):
    models = tables("abcde", ends="e", seed=3)
    whole = write(assemble(GREEDY), models, [0, 1], Limits(0, 12), Draws(0)).tokens
    for length in range(1, 13):
        assert write(assemble(pearl(**knobs)), models, [0, 1], Limits(0, length), Draws(0)).tokens == whole[:2 + length]


def test_a_step_takes_gamma_draft_forwards_and_one_target_forward():
    drafts, verdicts, events = steps(agreeing(7), pearl(gamma=3), 60)
    by_stream = {name: [event for event in of(Forward, events) if event.stream == name] for name in ("target", "draft")}
    assert len(by_stream["target"]) == len(verdicts), "the prompt's pass is the first step's"
    assert 3 * (len(drafts) - 3) <= len(by_stream["draft"]) <= 3 * len(drafts), (
        "the last steps have no room for three guesses"
    )


@pytest.mark.slow
@pytest.mark.oracle("pearl")
@pytest.mark.parametrize(
    "knobs, verifier",
    [
        ({"gamma": 3}, "rejection"),
        ({"gamma": 3}, "k_seq"),
        ({"gamma": 2}, "sample_match"),
        ({"gamma": 2, "pre": False}, "rejection"),
        ({"gamma": 3, "post": False}, "rejection"),
        ({"gamma": 3, "at_once": "always"}, "rejection"),
    ],
    ids=str,
)
def test_pearls_output_distribution_is_the_targets(knobs, verifier):
    assert law_distance(LaneConfig("pearl", knobs, [(verifier, {}), AT_ONE]), tables("ab"), 4) < EXACT


@pytest.mark.parametrize("knobs", [{}, {"pre": False}], ids=str)
def test_pearls_output_distribution_is_the_targets_if_pending_draft_tokens_may_end_the_text(knobs):
    assert law_distance(LaneConfig("pearl", {"gamma": 2, **knobs}, [AT_ONE]), tables("ab.", ends="."), 3) < EXACT


class BelievesPending(Verifier):
    """Tests the draft token that has not been read yet, and accepts all pending ones."""

    def judge(self, lm, tree, rows):
        pending = [node for node in range(len(tree)) if not rows.unread(node)]
        first = pending[-1] + 1 if pending else 0
        if first == len(tree):
            return Verdict(kept=pending, token=lm.pick(rows, first - 1).token)
        accepted = lm.flip(
            min(1.0, float(rows.distribution(first - 1)[tree.tokens[first]] / tree.q[first][tree.tokens[first]])),
            rows.position(first - 1),
        )[0]
        return Verdict(kept=pending + [first] * accepted, token=-1 if accepted else lm.pick(rows, first - 1).token)


class BonusBesidePending(find("pearl")):
    """Adds the token after a verified chain, and keeps the draft tokens that were made for its position."""

    def _verified(self, lm, tree, rows, clock):
        rest = yield from super()._verified(lm, tree, rows, clock)
        if len(rest):
            row = yield lm.extend()
            yield lm.keep(lm.choose(row, rest.tokens[0]))
        return new_tree(lm, self)


@pytest.mark.refuses("pearl")
def test_unverified_pending_draft_tokens_change_the_distribution():
    assembly = assemble(pearl(AT_ONE, gamma=3))
    assembly.decoder.verifier = BelievesPending()
    assert law_distance(assembly, tables("ab"), 3) > WRONG


@pytest.mark.refuses("pearl")
def test_committing_a_pending_draft_token_at_once_changes_the_distribution():
    assembly = assemble(pearl(AT_ONE, gamma=2))
    assembly.decoder = BonusBesidePending(assembly.decoder.verifier, gamma=2)
    assert law_distance(assembly, tables("ab"), 3) > WRONG


def test_the_virtual_clock_counts_the_slower_model_of_each_step_and_is_labelled_as_an_estimate():
    _, verdicts, events = steps(agreeing(1000), pearl(gamma=4, cost=4.0), 41)
    *_, last = figures(events, "time so far")
    count = len(verdicts)
    assert last["series"] == {
        "both models in parallel": pytest.approx(4 * (count - 1) + 4, abs=4),
        "plain decoding": 4.0 * 41,
        "the same steps in sequence": pytest.approx(8 * (count - 1) + 8, abs=8),
    }
    clocks = [event.name for event in of(Figure, events) if "clock" in event.name]
    assert clocks and all("simulated, not measured" in name for name in clocks)
    one = figures(events, "one step")[1]
    assert one == {"labels": ["the draft proposes", "the target verifies"], "values": [4, 4.0]}


def test_the_clock_includes_waiting_for_the_other_model():
    times = {
        cost: figures(steps(agreeing(1000), pearl(gamma=4, cost=cost), 41)[2], "time so far")[-2]["series"]
        for cost in (1.0, 4.0, 16.0)
    }
    gain = {
        cost: found["the same steps in sequence"] / found["both models in parallel"] for cost, found in times.items()
    }
    assert gain[4.0] == pytest.approx(2) and gain[1.0] == gain[16.0] == pytest.approx(1.25)


# --- real parallelism ---

class Rings(TableModel):
    """A draft that signals each of its forwards."""

    def __post_init__(self):
        super().__post_init__()
        self.bell = threading.Condition()

    def forward(self, works, plan=None):
        with self.bell:
            self.bell.notify_all()
            return super().forward(works, plan)


class Waits(TableModel):
    """A target whose passes last until the draft begins one after they were set out, or for so many seconds; `met` says
    which, pass by pass.
    """

    def wait_for(self, draft: Rings, patience: float) -> Waits:
        self.draft, self.patience, self.met, self.threads = draft, patience, [], []
        self.worker, self.thread = self.thread, self  # passes of its own thread are submitted to `submit`
        return self

    def submit(self, run, *arguments):
        self.before = self.draft.forwards
        return self.worker.submit(run, *arguments)

    def forward(self, works, plan=None):
        if threading.current_thread() is threading.main_thread():
            self.before = self.draft.forwards
        with self.draft.bell:  # there is no draft before the prefill
            patience = self.patience if self.forwards and all(self.met[1:]) else 0
            self.met.append(self.draft.bell.wait_for(lambda: self.draft.forwards > self.before, patience))
        self.threads.append(threading.current_thread())
        return super().forward(works, plan)


def passes(patience: float, draft_device: str = "cpu", **knobs) -> tuple[list[bool], list[threading.Thread]]:
    """Which passes of the target the draft met, and where each was made."""
    draft = Rings("abc", seed=2)
    draft.device = torch.device(draft_device)  # a table has no file, so any name is accepted
    target = Waits("abc", seed=1).wait_for(draft, patience)
    session = prepare(Models(target, draft), [pearl(gamma=3, **knobs)], Prompt("abc"), Limits(0, 20))
    while session._runners[0].lane.remaining > 8:  # later there is no room for draft tokens
        assert not session.finished, session.trace.events[-1].event
        session.advance()
    met = list(target.met)
    session.stop()
    with draft.bell:  # a forward still running has nothing to wait for any more
        draft.forwards += 1
        draft.bell.notify_all()
    return met, target.threads[:len(met)]


@pytest.mark.parametrize("how", [{"at_once": "always"}, {"draft_device": "cuda:1"}], ids=str)
def test_the_draft_model_drafts_during_the_targets_forward(how):
    (_, *met), (_, *threads) = passes(20.0, **how)
    assert len(met) > 2 and all(met) and threading.main_thread() not in threads, "all but the prompt's"


@pytest.mark.parametrize("how", [{}, {"draft_device": "cuda:1", "at_once": "never"}], ids=str)
def test_on_one_device_or_on_request_the_draft_waits_for_the_target(how):
    met, threads = passes(0.01, **how)
    assert len(met) > 3 and not any(met) and set(threads) == {threading.main_thread()}


@pytest.mark.parametrize(
    "samplers",
    [(), (AT_ONE,), (("regex", {"pattern": "([a-c]{2} and so on; ){4}"}),)],
    ids=["greedy", "drawn", "forced tokens"],
)
def test_parallel_and_sequential_execution_write_the_same_text_in_the_same_steps(samplers):
    def recorded(**knobs):
        session = prepare(pair(), [pearl(*samplers, **knobs)], Prompt("The green bird"), Limits(0, 40))
        events = [stamped.event for stamped in session]
        assert not check(session.trace)
        return events

    def facts(events):
        made = {
            name: [(event.tokens, event.context) for event in of(Forward, events) if event.stream == name]
            for name in ("target", "draft")
        }
        return [(event.text, event.ids) for event in of(Commit, events)], made

    aside, in_turn = recorded(at_once="always"), recorded(at_once="never")
    assert facts(aside) == facts(in_turn)
    assert any(event.meanwhile > 0 for event in of(Forward, aside)) and not any(
        event.meanwhile for event in of(Forward, in_turn)
    )


def test_a_lanes_clock_includes_waiting_time():
    session = prepare(pair(), [pearl(at_once="always")], Prompt("The green bird"), Limits(0, 40))
    stamped = list(session)
    assert stamped[-1].at >= sum(one.event.seconds for one in stamped if isinstance(one.event, Forward))


class Breaks(TableModel):
    """A target that fails in a forward."""

    def forward(self, works, plan=None):
        if self.forwards == 3:
            self.forwards += 1
            raise RuntimeError("out of order")
        return super().forward(works, plan)


def test_a_background_forward_that_fails_fails_its_lane_only():
    models = Models(Breaks("abc", seed=1), TableModel("abc", seed=2))
    events = [
        stamped
        for stamped in prepare(models, [pearl(at_once="always"), LaneConfig("greedy")], Prompt("abc"), Limits(0, 20))
    ]
    failed, done = [of(kind, [stamped.event for stamped in events]) for kind in (Failed, Done)]
    assert len(failed) == len(done) == 1 and "out of order" in failed[0].message


def test_stopping_a_lane_during_a_background_forward_frees_the_model():
    models = pair()
    session = prepare(models, [pearl(at_once="always")], Prompt("The green bird"), Limits(0, 40))
    while not (lane := session._runners[0].lane).generated or not lane.target.store.parents:
        session.advance()
    session.stop()
    again = prepare(models, [pearl(at_once="always"), LaneConfig("greedy")], Prompt("The green bird"), Limits(0, 20))
    assert {stamped.event.reason for stamped in again if isinstance(stamped.event, Done)} == {"length"}
    pearls, plain = (Result(again.trace.lane(lane)).text for lane in (0, 1))
    assert pearls == plain
