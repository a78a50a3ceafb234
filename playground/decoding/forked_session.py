"""A fork of a lane beside the lanes of its run. Only the fork is run; the others stay as they are."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from playground.events import Done, Failed, Header, Stamped
from playground.trace import Trace

if TYPE_CHECKING:
    from playground.decoding.session import Session  # imports torch


@dataclass(frozen=True)
class Siblings:
    """The other lanes: the trace of their run, their numbers in it in display order, and the fork's index among
    them.
    """

    trace: Trace
    lanes: tuple[int, ...]
    place: int


class ForkedSession:
    """A session of one lane, with the interface of a Session. The events of its siblings come first."""

    def __init__(self, session: Session, siblings: Siblings):
        self._session, self._place = session, siblings.place
        kept = [siblings.trace.lane(lane) for lane in siblings.lanes]
        headers = [trace.headers[0] for trace in kept]
        headers.insert(siblings.place, session.headers[0])
        self.trace = Trace([replace(header, lane=lane) for lane, header in enumerate(headers)])
        self._waiting = self._renumbered(kept)

    @property
    def headers(self) -> list[Header]:
        return self.trace.headers

    @property
    def finished(self) -> bool:
        return not self._waiting and self._session.finished

    def advance(self) -> list[Stamped]:
        return self._with_siblings(self._session.advance)

    def step(self) -> list[Stamped]:
        """Run the fork up to its next commit."""
        return self._with_siblings(self._session.step)

    def stop(self, lane: int | None = None) -> list[Stamped]:
        """End the fork if it is the lane to stop; its siblings have ended."""
        return self._with_siblings(self._session.stop if lane in (None, self._place) else list)

    def _with_siblings(self, act: Callable[[], list[Stamped]]) -> list[Stamped]:
        """New events: those of the siblings on the first call, those of the fork afterwards."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            return self._appended(waiting)
        return self._appended([stamped._replace(lane=self._place) for stamped in act()])

    def _appended(self, stamped: Sequence[Stamped]) -> list[Stamped]:
        first = len(self.trace.events)
        fresh = [event._replace(seq=first + i) for i, event in enumerate(stamped)]
        for event in fresh:
            self.trace.append(event)
        return fresh

    def _renumbered(self, kept: list[Trace]) -> list[Stamped]:
        """The events of the siblings in the order of their run, with their new numbers; unfinished lanes are stopped.
        """
        numbers = [number for number in range(len(self.headers)) if number != self._place]
        events = [stamped._replace(lane=number) for number, trace in zip(numbers, kept) for stamped in _ended(trace)]
        return sorted(events, key=lambda stamped: stamped.seq)


def _ended(trace: Trace) -> list[Stamped]:
    """The events of one lane, with Done added if it had not ended."""
    events = trace.events
    if events and isinstance(events[-1].event, (Done, Failed)):
        return events
    last = events[-1] if events else Stamped(trace.headers[0].lane, 0, 0.0, Done("stopped"))
    return [*events, last._replace(event=Done("stopped"))]
