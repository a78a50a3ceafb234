"""One thread a device steps the sessions of all visitors in turn.

A visitor's handle is a `Run`: any thread may hold, resume, step or stop it and read it as frames for the live view.
Only the worker's thread touches the session, and it serves one request of one run at a time, so nobody waits for long.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from playground.trace import Trace
from playground.ui.frames import CLOCK, Facts, frame, new_name, within

PATIENCE = 1.0  # seconds without news after which a reader hears so
log = logging.getLogger(__name__)


class Run:
    """A session on its way, seen from outside the worker's thread."""

    def __init__(self, session, bell: threading.Condition):
        self.name, self.number = new_name(), -1  # of the last frame sent
        self.session = session
        self.headers = [asdict(header) for header in session.headers]
        self.events: Facts = []
        self.told: list[float] = []  # when each event came out of the session, in seconds since 1970
        self.held = self.over = False
        self.error = ""  # a sentence, where the session broke as a whole
        self._beat = CLOCK
        self._orders: deque[Callable[[], list]] = deque()
        self._bell = bell

    @property
    def state(self) -> str:
        return "done" if self.over else "held" if self.held else "running"

    @property
    def trace(self) -> Trace:
        """All that the session has told so far; it grows while others look."""
        return self.session.trace

    def hold(self) -> None:
        self._tell(held=True)

    def resume(self) -> None:
        self._tell(held=False)

    def step(self) -> None:
        """Every lane runs up to its next commit, then the run is held."""
        self._tell(held=True, order=self.session.step)

    def stop(self, lane: int | None = None) -> None:
        """End one lane or all of them, within one request."""
        self._tell(held=self.held, order=partial(self.session.stop, lane))

    def pace(self, beat: float) -> None:
        """Let so many seconds lie between two frames, for a browser that cannot follow more of them: each then tells
        more.
        """
        self._beat = within(beat)

    def frames(self) -> Iterator[dict[str, Any] | None]:
        """What happened since the last frame, at most once a beat; None where there was nothing to tell for a while."""
        sent, state, due = 0, "", 0.0
        while state != "done":
            time.sleep(max(0.0, due - time.monotonic()))
            fresh, now = self._news(sent, state)
            if not fresh and now == state:
                yield None
                continue
            oldest = self.told[sent] if fresh else None
            self.number, sent, state, due = self.number + 1, sent + len(fresh), now, time.monotonic() + self._beat
            yield frame(self.name, self.number, fresh, now, self.headers if self.number == 0 else None, oldest)

    def ready(self) -> bool:
        return not self.over and (bool(self._orders) or not self.held)

    def serve(self) -> None:
        """One order or one request; called by the worker alone."""
        try:
            stamped = (self._orders.popleft() if self._orders else self.session.advance)()
        except Exception:
            log.exception("a run broke")
            stamped, self.error = (
                [],
                "This run broke inside the program; the log says where. Other runs are not affected.",
            )
        fresh = [event.to_json() for event in stamped]
        with self._bell:
            self.events += fresh
            self.told += [time.time()] * len(fresh)
            self.over = bool(self.error) or self.session.finished
            self._bell.notify_all()

    def _tell(self, held: bool, order: Callable[[], list] | None = None) -> None:
        with self._bell:
            if self.over:
                return
            self.held = held
            self._orders.extend([order] if order else [])
            self._bell.notify_all()

    def _news(self, sent: int, state: str) -> tuple[Facts, str]:
        with self._bell:
            self._bell.wait_for(lambda: len(self.events) > sent or self.state != state, PATIENCE)
            return self.events[sent:], self.state


class Worker:
    """Serves its runs round-robin; the thread starts with the first run and sleeps while none is ready."""

    def __init__(self):
        self._runs: deque[Run] = deque()
        self._bell = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, session) -> Run:
        run = Run(session, self._bell)
        with self._bell:
            self._runs.append(run)
            self._thread = self._thread or self._started()
            self._bell.notify_all()
        return run

    def others(self, mine: Run) -> int:
        """Runs that share the device with one's own; one that is held takes no turns."""
        with self._bell:
            return sum(run.ready() for run in self._runs if run is not mine)

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._loop, name="decoding", daemon=True)
        thread.start()
        return thread

    def _loop(self) -> None:
        while True:
            with self._bell:
                self._bell.wait_for(lambda: any(run.ready() for run in self._runs))
                run = self._next()
            run.serve()
            if run.over:
                self._drop(run)

    def _next(self) -> Run:
        """The first run that has something to do, which goes to the end of the row; those held keep their places."""
        run = next(run for run in self._runs if run.ready())
        self._runs.remove(run)
        self._runs.append(run)
        return run

    def _drop(self, run: Run) -> None:
        with self._bell:
            self._runs.remove(run)
