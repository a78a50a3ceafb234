"""Retention of visitors' sessions in Gradio 6.31, and limits on its queue.

Gradio deletes the state values of a session an hour after its page was closed, but keeps the session itself, a quarter
of a megabyte, until `state_session_capacity` others have been created. Unread messages stay too. `Sweeper` deletes both
earlier.
"""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic

from fastapi import HTTPException

from playground.ui.guard.loop_time import LoopTime, timed
from playground.ui.guard.uploads import StoredFiles
from playground.ui.server.admission_queue import Visitor, address_of

PERIOD = 10.0  # seconds between two sweeps
UNREAD = 60.0  # seconds that messages of a finished stream wait to be fetched
ANALYTICS = 50  # events in Gradio's statistics
EVENT = 0.01  # seconds of the event loop, at most, that are charged for an event: frames have limits of their own
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Seconds a session is kept after its page was closed and after its last use; maximum number of sessions, in all
    and of one address, which may be a whole school.
    """

    closed: float = 600.0
    idle: float = inf
    sessions: int = 2000
    address: int = 2000

    @classmethod
    def for_visitors(cls) -> Retention:
        return cls(closed=60.0, idle=3600.0, sessions=512, address=128)


class Sweeper:
    """Deletes the sessions of visitors who have left. Sessions with an active stream are never deleted.

    uploads: the folder of uploaded files, whose old ones are deleted as well.
    """

    def __init__(self, app, retention: Retention, uploads: Path | None = None):
        self.app, self.retention, self.uploads = app, retention, StoredFiles(uploads) if uploads else None
        self.queue = app.get_blocks()._queue
        self._unread: dict[str, float] = {}  # sessions with messages and no stream, and since when

    def start(self) -> None:
        """Sweep every PERIOD seconds, in a background thread."""
        threading.Thread(target=self._loop, name="sessions", daemon=True).start()

    def sweep(self) -> int:
        """Delete all sessions that are due; returns their number."""
        events = list(self.queue.event_ids_to_events.values())
        live = self.streaming()
        due = [
            session
            for session in list(self.app.state_holder.session_data)
            if session not in live and self._is_due(session)
        ]
        for session in (*due, *self._never_read(live)):
            self.drop(session)
        self.app.iterators_to_reset.intersection_update({event._id for event in events})
        return len(due)

    def streaming(self) -> set[str]:
        """The sessions with an unfinished event."""
        return {event.session_hash for event in list(self.queue.event_ids_to_events.values())}

    def _loop(self) -> None:
        stop = self.app.stop_event
        while not stop.is_set():
            threading.Event().wait(PERIOD)
            try:
                if self.sweep():
                    release_unused()
                if self.uploads:
                    self.uploads.sweep()
            except Exception:
                log.exception("deleting sessions failed")

    def _is_due(self, session: str) -> bool:
        holder = self.app.state_holder
        state, used = holder.session_data.get(session), holder.last_used.get(session)
        if state is None or used is None:
            return False
        return monotonic() - used > (self.retention.closed if state.is_closed else self.retention.idle)

    def _never_read(self, live: set[str]) -> list[str]:
        """Sessions whose messages have not been read for too long after the stream's end."""
        now = monotonic()
        waiting = [
            session
            for session, messages in list(self.queue.pending_messages_per_session.items())
            if session not in live and messages.qsize()
        ]
        self._unread = {session: self._unread.get(session, now) for session in waiting}
        return [session for session, since in self._unread.items() if now - since > UNREAD]

    def drop(self, session: str) -> None:
        """Delete a session and the messages that wait for it."""
        holder = self.app.state_holder
        with holder.lock:
            holder.session_data.pop(session, None)
            holder.time_last_used.pop(session, None)
        holder.forget(session)
        self.queue.pending_messages_per_session.pop(session, None)
        self.queue.pending_event_ids_session.pop(session, None)


def release_unused() -> None:
    """Collect the reference cycles that sessions leave and return their memory to the operating system.

    Objects that were frozen at the start (gc.freeze) are not scanned.
    """
    from playground.engine.loading.load import release_unused  # imports torch
    release_unused()


@dataclass(frozen=True)
class Events:
    """Maximum number of unfinished events in Gradio's queue; each takes a thread of the server while it runs."""

    address: int = 200
    session: int = 200

    @classmethod
    def for_visitors(cls) -> Events:
        return cls(address=40, session=24)


def guard_queue(queue, limits: Events, proxies: int) -> None:
    """Make Gradio's queue refuse events beyond the share of an address or a session."""
    push = queue.push
    queue.ANALYTICS_MAX_EVENTS = ANALYTICS
    queue.ANAYLTICS_CACHE_FREQUENCY = inf  # Gradio's spelling: no table of the statistics after each event, with pandas

    async def guarded(body, request, username):
        visitor = Visitor(body.session_hash or "", address_of(request, proxies))
        _check(list(queue.event_ids_to_events.values()), visitor, limits, proxies)
        if body.session_hash:
            queue.blocks.state_holder[body.session_hash]  # begins the session, if the address may have another
        return await push(body=body, request=request, username=username)

    queue.push = guarded


def charge_events(queue, loop_time: LoopTime, proxies: int) -> None:
    """Charge addresses for the events that they put into Gradio's queue, which works for them after it has answered."""
    process = queue.process_events

    async def charged(events, *given):
        address = address_of(events[0].request, proxies)
        await timed(process(events, *given), loop_time.charging(address, EVENT))

    queue.process_events = charged


def _check(events: list, visitor: Visitor, limits: Events, proxies: int) -> None:
    mine = sum(address_of(event.request, proxies) == visitor.address for event in events)
    same = sum(event.session_hash == visitor.session for event in events)
    if mine >= limits.address or same >= limits.session:
        raise HTTPException(
            429,
            f"Your share of this page is used up: {max(mine, same)} of your requests are open; wait for one to end.",
        )
