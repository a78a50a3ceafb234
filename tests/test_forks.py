"""A fork reruns one lane: the others keep every event, and the text is that of a run of all lanes."""

import pytest

from playground.contract.lane_config import LaneConfig
from playground.decoding.forked_session import ForkedSession, Siblings
from playground.decoding.limits import Limits
from playground.decoding.session import Models, Prompt, Session, prepare
from playground.errors import Refusal
from playground.events import Done, Forward
from playground.trace import Trace, check
from playground.trace.transcript import sequences
from playground.ui.settings import Fork, Settings
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
    settings = Settings(lanes=[{"strategy": str(lane)} for lane in range(3)]).forked(fork)
    assert [lane.get("forked_at", lane["strategy"]) for lane in settings.lanes] == [
        0 if name == "fork" else name for name in order
    ]


def test_a_fifth_lane_is_refused_unless_it_replaces_one():
    full = Settings(lanes=4 * [{"strategy": "greedy"}])
    with pytest.raises(Refusal, match="choose which of them the fork replaces"):
        full.forked(Fork(0, [1], 0))
    assert len(full.forked(Fork(0, [1], 0, instead_of=3)).lanes) == 4


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
