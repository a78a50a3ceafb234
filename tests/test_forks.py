"""A fork reruns one lane: the others keep every event, and the text is that of a run of all lanes."""

import base64
import gzip
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from playground.contract.lane_config import LaneConfig
from playground.decoding.forked_session import ForkedSession, Siblings
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.errors import Refusal
from playground.events import Done, Forward
from playground.request_limits import Rules
from playground.trace import Trace, check
from playground.trace.transcript import sequences
from playground.ui.components.settings import Fork, Settings, SwitchedCopy
from playground.ui.play.kept_runs import kept_run
from playground.ui.server.worker import Worker
from support.sessions import MODEL

LANES = [LaneConfig("greedy"), LaneConfig("sample"), LaneConfig("greedy", extras=[("top_k", {"k": 3})])]
LENGTH = 12


def session_of(lanes: list[LaneConfig]) -> Session:
    return prepare(Models(MODEL), lanes, Prompt("abab"), Limits(seed=3, max_new_tokens=LENGTH))


def ran(session: Session | ForkedSession) -> Trace:
    while not session.finished:
        session.advance()
    return session.trace


def ids(trace: Trace, lane: int) -> list[int]:
    return [token.id for token in sequences(trace.lane(lane).events)[0].tokens]


def story(trace: Trace, lane: int) -> list:
    """The events of a lane with their times, without their numbers."""
    return [(stamped.at, stamped.event) for stamped in trace.lane(lane).events]


def forked_lane(parent: LaneConfig, tokens: list[int]) -> LaneConfig:
    return LaneConfig(parent.strategy, parent.knobs, parent.extras, tokens, forked_at=len(tokens) - 1)


@pytest.mark.parametrize("fork, order", [
    (Fork(0, [], 0), ["0", "fork", "1", "2"]), (Fork(2, [], 0), ["0", "1", "2", "fork"]),
    (Fork(1, [], 0, instead_of=2), ["0", "1", "fork"]), (Fork(2, [], 0, instead_of=0), ["1", "2", "fork"]),
    (Fork(1, [], 0, instead_of=1), ["0", "fork", "2"])])
def test_a_fork_goes_beside_its_parent_or_into_its_place(fork, order):
    lanes = [str(lane) for lane in fork.siblings(3)]
    assert [*lanes[:fork.place], "fork", *lanes[fork.place:]] == order
    settings = Settings(lanes=[{"strategy": str(lane)} for lane in range(3)]).with_copy(fork)
    assert [lane.get("forked_at", lane["strategy"]) for lane in settings.lanes] == [
        0 if name == "fork" else name for name in order
    ]


def test_a_fifth_lane_is_refused_unless_it_replaces_one():
    full = Settings(lanes=4 * [{"strategy": "greedy"}])
    with pytest.raises(Refusal, match="choose which of them the fork replaces"):
        full.with_copy(Fork(0, [1], 0))
    assert len(full.with_copy(Fork(0, [1], 0, instead_of=3)).lanes) == 4


OVERLAID = {"strategy": "greedy", "knobs": {}, "seed": 5, "forced": [7],
            "extras": [["temperature", {"t": 0.5}], ["attention_entropy", {}], ["lm_head_neurons", {"z": 4}]]}


def test_a_copy_without_a_part_has_the_lanes_settings_and_no_overlay():
    before = Settings(lanes=[OVERLAID, {"strategy": "sample"}])
    after = before.with_copy(SwitchedCopy(0, "head 0.1"))
    copied = OVERLAID | {"extras": [["temperature", {"t": 0.5}], ["switch_part", {"parts": "head 0.1"}]]}
    assert after.lanes == [OVERLAID, copied, {"strategy": "sample"}] and before.lanes[0] == OVERLAID
    assert after.with_copy(SwitchedCopy(2, "head 0.1", instead_of=1)).lanes[2] == {
        "strategy": "sample", "extras": [["switch_part", {"parts": "head 0.1"}]]}


@pytest.mark.parametrize("part", ["mouth 3.1", "<b>", "feature 1, 2", "head"])
def test_a_copy_without_what_is_no_part_is_refused(part):
    with pytest.raises(Refusal, match="is no part"):
        Settings(lanes=[OVERLAID]).with_copy(SwitchedCopy(0, part))
    with pytest.raises(Refusal, match="choose which of them the copy replaces"):
        Settings(lanes=4 * [OVERLAID]).with_copy(SwitchedCopy(0, "head 0.1"))


def test_the_other_lanes_keep_every_event_and_only_the_fork_is_run():
    before = ran(session_of(LANES))
    tokens = [*ids(before, 0)[:4], 1 + ids(before, 0)[4] % 2]
    fork = forked_lane(LANES[0], tokens)
    after = ran(ForkedSession(session_of([fork]), Siblings(before, (0, 1, 2), 1)))
    for old, new in ((0, 0), (1, 2), (2, 3)):
        assert story(after, new) == story(before, old)
    alone = ran(session_of([fork]))
    assert ids(after, 1) == ids(alone, 0) and ids(after, 1)[:5] == tokens
    count = sum(isinstance(stamped.event, Forward) for stamped in alone.events)
    assert sum(isinstance(stamped.event, Forward) for stamped in after.lane(1).events) == count
    assert [header.lane for header in after.headers] == [0, 1, 2, 3] and after.headers[1].forced == tokens
    assert check(after) == []


def test_a_lane_that_was_still_running_is_shown_as_stopped_with_its_text_so_far():
    session = session_of(LANES)
    for _ in range(4):
        session.advance()
    before = session.trace
    after = ran(ForkedSession(session_of([forked_lane(LANES[1], [1])]), Siblings(before, (0, 2), 1)))
    last = after.lane(0).events[-1].event
    assert isinstance(last, Done) and last.reason == "stopped"
    assert story(after, 0)[:-1] == story(before, 0)


def test_only_the_fork_can_be_stopped():
    before = ran(session_of(LANES))
    session = ForkedSession(session_of([forked_lane(LANES[0], [1])]), Siblings(before, (0, 1, 2), 1))
    session.advance()
    assert session.stop(0) == [] and not session.finished
    assert [stamped.lane for stamped in session.stop(1)] == [1] and session.finished


def begun(lanes: list[LaneConfig], commits: int) -> Session:
    """A session of which every lane has committed a number of times."""
    session = session_of(lanes)
    for _ in range(commits):
        session.step()
    return session


def beside(session: Session, config: LaneConfig, lanes: tuple[int, ...], place: int) -> ForkedSession:
    return ForkedSession(session_of([config]), Siblings(session.trace, lanes, place, session))


def test_running_lanes_go_on_beside_a_fork_and_write_what_they_would_have_written():
    alone = ran(session_of(LANES))
    forked = beside(begun(LANES, 4), forked_lane(LANES[1], [*ids(alone, 1)[:2], 1]), (0, 1, 2), 2)
    after = ran(forked)
    for old, new in ((0, 0), (1, 1), (2, 3)):
        assert ids(after, new) == ids(alone, old)
        last = after.lane(new).events[-1].event
        assert isinstance(last, Done) and last.reason == "length"
    assert ids(after, 2)[:3] == [*ids(alone, 1)[:2], 1] and check(after) == []


def test_the_fork_and_the_lanes_that_go_on_take_turns():
    forked = beside(begun(LANES, 2), forked_lane(LANES[0], [1]), (0, 1, 2), 1)
    forked.advance()
    lanes = [{stamped.lane for stamped in forked.advance()} for _ in range(12)]
    turns = [lanes[0::2], lanes[1::2]]
    fork, others = sorted((set().union(*turn) for turn in turns), key=len)
    assert fork == {1} and others == {0, 2, 3}


def test_a_lane_that_its_fork_replaces_ends_and_its_running_neighbours_do_not():
    session = begun(LANES, 3)
    after = ran(beside(session, forked_lane(LANES[1], [1]), (0, 2), 1))
    assert [header.strategy for header in after.headers] == ["greedy", "sample", "greedy"]
    assert isinstance(session.trace.lane(1).events[-1].event, Done) and len(ids(session.trace, 1)) < LENGTH
    assert [len(ids(after, lane)) for lane in range(3)] == [LENGTH] * 3


def test_a_fork_of_a_run_that_is_itself_a_fork_keeps_all_lanes_running():
    first = beside(begun(LANES[:2], 2), forked_lane(LANES[0], [1]), (0, 1), 1)
    for _ in range(4):
        first.advance()
    second = ForkedSession(session_of([forked_lane(LANES[1], [0])]), Siblings(first.trace, (0, 1, 2), 3, first))
    after = ran(second)
    assert [header.forced for header in after.headers] == [[], [1], [], [0]]
    assert [len(ids(after, lane)) for lane in range(4)] == [LENGTH] * 4 and check(after) == []


def test_a_fork_can_be_stopped_at_once_and_so_can_a_lane_that_goes_on():
    forked = beside(begun(LANES, 2), forked_lane(LANES[0], [1]), (0, 1, 2), 1)
    ended = [stamped.lane for stamped in forked.stop(1) if isinstance(stamped.event, Done)]
    assert ended == [1] and not forked.finished
    assert [stamped.lane for stamped in forked.stop(3)] == [3] and not forked.finished
    after = ran(forked)
    assert [after.lane(lane).events[-1].event.reason for lane in range(4)] == ["length", "stopped", "length", "stopped"]


def test_a_run_hands_its_session_over_and_records_its_lanes_as_stopped():
    run = Worker().take(session_of([LANES[0]] * 2))
    run.hold()
    session = run.hand_over()
    assert run.over and run.session is None and not session.finished
    assert [run.trace.lane(lane).events[-1].event for lane in range(2)] == [Done("stopped")] * 2
    assert check(run.trace) == [] and [stamped.to_json() for stamped in run.trace.events] == run.events
    assert run.hand_over() is None
    assert len(ids(ran(session), 0)) == LENGTH


def kept_event(trace: Trace, made: Settings, **changed) -> SimpleNamespace:
    whole = {"headers": [asdict(header) for header in trace.headers],
             "events": [stamped.to_json() for stamped in trace.events]}
    packed = base64.b64encode(gzip.compress(json.dumps(whole).encode())).decode()
    return SimpleNamespace(**{"run": "ab", "settings": made.to_code(), "kept": packed, **changed})


KEPT = Settings(prompt="abab", seed=3, length=LENGTH, lanes=[{"strategy": "greedy"}, {"strategy": "sample"}])


def test_a_run_that_only_the_browser_has_can_be_forked():
    before = ran(session_of(LANES[:2]))
    kept = kept_run(kept_event(before, KEPT), Rules())
    assert kept.over and kept.hand_over() is None and kept.settings == Settings.read(asdict(KEPT))
    assert kept.trace.to_json() == before.to_json()
    after = ran(ForkedSession(session_of([forked_lane(LANES[1], [1])]), Siblings(kept.trace, (0, 1), 2)))
    assert ids(after, 0) == ids(before, 0) and ids(after, 1) == ids(before, 1) and ids(after, 2)[0] == 1


@pytest.mark.parametrize("changed", [
    {"kept": "no base64!"}, {"kept": base64.b64encode(b"not gzip").decode()},
    {"kept": base64.b64encode(gzip.compress(b"[1]")).decode()},
    {"kept": base64.b64encode(gzip.compress(b'{"headers": [], "events": [{}]}')).decode()},
    {"settings": "?"}, {"settings": Settings(prompt="abab", lanes=[{"strategy": "greedy"}]).to_code()}])
def test_an_earlier_run_that_cannot_be_read_is_refused(changed):
    event = kept_event(ran(session_of(LANES[:2])), KEPT, **changed)
    with pytest.raises(Refusal, match="cannot be read: press Run first"):
        kept_run(event, Rules())


def test_an_earlier_run_is_unpacked_only_up_to_the_limit():
    bomb = base64.b64encode(gzip.compress(bytes(9_000_000))).decode()
    with pytest.raises(Refusal, match="too long to be sent back"):
        kept_run(SimpleNamespace(run="ab", settings=KEPT.to_code(), kept=bomb), Rules.for_visitors())
