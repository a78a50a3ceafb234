"""The sessions of Gradio 6.31, counted by address, so that a stranger's requests cannot push out a visitor's session.

A client chooses the names of its sessions, and each takes a quarter of a megabyte. Gradio keeps the sessions used last.
Here an address has a share of them, a session with a run that computes, waits or is held stays, and one that has run
outlives those that have not.
"""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic

from fastapi import HTTPException
from gradio.state_holder import SessionState, StateHolder

from playground.ui.guard.request_shares import CLIENT
from playground.ui.server.admission_queue import AdmissionQueue

NAME = 128  # characters of a session's name


class VisitorSessions(StateHolder):
    """Gradio's holder of sessions. `drop` deletes one with all that belongs to it, `streaming` names those with an
    unfinished event.
    """

    def __init__(
        self,
        admission: AdmissionQueue,
        most_of_address: int,
        drop: Callable[[str], None],
        streaming: Callable[[], set[str]],
    ):
        super().__init__()
        self.admission, self.most_of_address = admission, most_of_address
        self.drop, self.streaming = drop, streaming
        self.owners: dict[str, str] = {}  # the address that began a session
        self.ran: set[str] = set()  # sessions that have had a run
        self.last_used: dict[str, float] = {}  # monotonic: Gradio's own times follow the wall clock, which may be set
        self._growing = threading.RLock()

    def __getitem__(self, session_id: str) -> SessionState:
        """The session of this name, which is begun if there is none. Raises HTTPException if it cannot be."""
        if not isinstance(session_id, str) or len(session_id) > NAME:
            raise HTTPException(400, f"The name of a session must be text of at most {NAME} characters.")
        if session_id not in self.session_data:
            with self._growing:
                self._make_room(CLIENT.get())
                self.owners[session_id] = CLIENT.get()
                return self._use(session_id)
        if session_id not in self.ran and self.admission.has(session_id):
            self.ran.add(session_id)
        return self._use(session_id)

    def _use(self, session_id: str) -> SessionState:
        self.last_used[session_id] = monotonic()
        return super().__getitem__(session_id)

    def update(self, session_id: str) -> None:
        """Mark a session as used last; unlike Gradio's, deletes no other."""
        with self.lock:
            if session_id in self.session_data:
                self.session_data.move_to_end(session_id)

    def forget(self, session_id: str) -> None:
        """What is known about a session that is deleted."""
        self.owners.pop(session_id, None)
        self.last_used.pop(session_id, None)
        self.ran.discard(session_id)

    def _make_room(self, address: str) -> None:
        """Delete a session if the address, or all, have as many as they may. Raises HTTPException if none can be."""
        known = list(self.session_data)
        mine = [session for session in known if self.owners.get(session, "") == address]
        if address and len(mine) >= self.most_of_address and not self._delete_one(mine):
            raise HTTPException(429, "Your address has too many sessions on this page: close some of its pages.")
        if len(self.session_data) >= self.capacity and not self._delete_one(known):
            raise HTTPException(503, "The page has too many sessions: try again in a minute.")

    def _delete_one(self, sessions: list[str]) -> bool:
        """Delete one of these sessions, given in the order of their last use, without a run and a stream: first those
        that never ran, of them those of the address with the most. Whether there was one.
        """
        busy = self.streaming() | self.admission.sessions()
        counts = Counter(self.owners.get(session, "") for session in self.session_data)
        idle = [session for session in sessions if session not in busy]
        if not idle:
            return False
        self.drop(min(idle, key=lambda session: (session in self.ran, -counts[self.owners.get(session, "")])))
        return True
