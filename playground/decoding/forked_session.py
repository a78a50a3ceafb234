"""A fork of a lane beside the lanes of its run. Only the fork is started; the others stay as they are, or go on."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from playground.events import Done, Failed, Header, Stamped
from playground.trace import Trace

if TYPE_CHECKING:
    from playground.decoding.session import Session  # imports torch


@dataclass(frozen=True)
class Siblings:
    """The other lanes: the trace of their run, their numbers in it in display order, and the fork's index among
    them. session: that of their run, if some of them have not ended and are to go on.
    """

    trace: Trace
    lanes: tuple[int, ...]
    place: int
    session: Session | ForkedSession | None = None


class SessionPart(NamedTuple):
    """A session of which some lanes are shown: their numbers here by their numbers there."""

    session: Session
    numbers: dict[int, int]

    def renumbered(self, numbers: dict[int, int]) -> SessionPart:
        """The same with the numbers replaced; lanes whose number is not replaced are stopped."""
        for lane in [lane for lane, number in self.numbers.items() if number not in numbers]:
            self.session.stop(lane)
        kept = {lane: numbers[number] for lane, number in self.numbers.items() if number in numbers}
        return SessionPart(self.session, kept)

    def named(self, stamped: Iterable[Stamped]) -> list[Stamped]:
        """Events of the session, with the lanes' numbers here."""
        return [event._replace(lane=self.numbers[event.lane]) for event in stamped if event.lane in self.numbers]

    def stop(self, lane: int | None) -> list[Stamped]:
        """End one lane by its number here, or all of them."""
        chosen = [inner for inner, number in self.numbers.items() if lane in (None, number)]
        return self.named([event for inner in chosen for event in self.session.stop(inner)])


class ForkedSession:
    """A session with the interface of a Session. The events of the siblings so far come first; then the fork and the
    session of those that go on take turns.
    """

    def __init__(self, session: Session, siblings: Siblings):
        trace = siblings.trace if siblings.session else stopped(siblings.trace)
        kept = [trace.lane(lane) for lane in siblings.lanes]
        headers = [one.headers[0] for one in kept]
        headers.insert(siblings.place, session.headers[0])
        self.trace = Trace([replace(header, lane=lane) for lane, header in enumerate(headers)])
        others = [lane for lane in range(len(headers)) if lane != siblings.place]
        self.parts = deque([SessionPart(session, {0: siblings.place})])
        if siblings.session:
            self.parts += _parts_of(siblings.session, dict(zip(siblings.lanes, others)))
        self._waiting = self._appended(_renumbered(kept, others))

    @property
    def headers(self) -> list[Header]:
        return self.trace.headers

    @property
    def finished(self) -> bool:
        return not self._waiting and all(part.session.finished for part in self.parts)

    def advance(self) -> list[Stamped]:
        """The siblings' events so far, on the first call; afterwards those of one step of the next part."""
        if self._waiting or self.finished:
            return self._emitted([])
        self.parts.rotate(-1)
        while self.parts[-1].session.finished:
            self.parts.rotate(-1)
        part = self.parts[-1]
        return self._emitted(part.named(part.session.advance()))

    def step(self) -> list[Stamped]:
        """Run every live lane up to its next commit."""
        return self._emitted(chain.from_iterable(part.named(part.session.step()) for part in self.parts))

    def cache_bytes(self) -> int:
        """Memory of the KV caches of all lanes that go on."""
        return sum(part.session.cache_bytes() for part in self.parts)

    def stop(self, lane: int | None = None) -> list[Stamped]:
        """End one lane, or all of them."""
        return self._emitted(chain.from_iterable(part.stop(lane) for part in self.parts))

    def _emitted(self, stamped: Iterable[Stamped]) -> list[Stamped]:
        """The events that were not returned yet."""
        waiting, self._waiting = self._waiting, []
        return [*waiting, *self._appended(stamped)]

    def _appended(self, stamped: Iterable[Stamped]) -> list[Stamped]:
        first = len(self.trace.events)
        fresh = [event._replace(seq=first + i) for i, event in enumerate(stamped)]
        self.trace.extend(fresh)
        return fresh


def _parts_of(session: Session | ForkedSession, numbers: dict[int, int]) -> list[SessionPart]:
    """The live parts of a session, with new numbers of its lanes; lanes without one are stopped."""
    if isinstance(session, ForkedSession):
        parts: Iterable[SessionPart] = session.parts
    else:
        parts = [SessionPart(session, {header.lane: header.lane for header in session.headers})]
    return [part.renumbered(numbers) for part in parts if not part.session.finished]


def _renumbered(kept: list[Trace], numbers: list[int]) -> list[Stamped]:
    """The events of the siblings in the order of their run, with their new numbers."""
    events = [stamped._replace(lane=number) for number, trace in zip(numbers, kept) for stamped in trace.events]
    return sorted(events, key=lambda stamped: stamped.seq)


def stopped(trace: Trace) -> Trace:
    """The same trace, ended: Done is added to every lane that had not ended."""
    ended = {stamped.lane for stamped in trace.events if isinstance(stamped.event, (Done, Failed))}
    clocks = {header.lane: 0.0 for header in trace.headers} | {stamped.lane: stamped.at for stamped in trace.events}
    first = trace.events[-1].seq + 1 if trace.events else 0
    open_lanes = [lane for lane in clocks if lane not in ended]
    stops = [Stamped(lane, first + i, clocks[lane], Done("stopped")) for i, lane in enumerate(open_lanes)]
    return Trace(trace.headers, [*trace.events, *stops])
