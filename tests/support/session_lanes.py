"""Sessions over models that count their forwards."""
from __future__ import annotations

from playground.contract import Decoder
from playground.decoding.session import Session
from playground.events import Commit, Stamped


def run(session: Session) -> Session:
    for _ in session:
        pass
    return session


def last(session: Session, lane: int):
    return session.trace.lane(lane).events[-1].event


def text(stamped: list[Stamped], lane: int = 0) -> str:
    return "".join(s.event.text for s in stamped if s.lane == lane and isinstance(s.event, Commit))


class Raises(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        raise ZeroDivisionError("nothing is left")
