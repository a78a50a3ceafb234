"""One thread a device steps the sessions of all visitors in turn.

A visitor's handle is a `Run`: any thread may hold, resume, step or stop it and read it as frames for the live view.
Only the worker's thread touches the session, and it serves one request of one run at a time, so nobody waits for long.
A thread that dies is replaced.
"""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from playground.trace import Trace
from playground.ui.frames import CLOCK, SLOWEST, Facts, frame, new_name, within
from playground.ui.record import Record

PATIENCE = 1.0  # seconds without news after which a reader hears so
HELD_PATIENCE = 5.0  # the same for a held run, which has no news
SLOW = 2.0  # seconds of one step after which it is logged: so long did every other visitor wait
STUCK = 120.0  # seconds of one step after which the worker counts as stuck
BROKE = "This run broke inside the program; the log says where. Other runs are not affected."
DIED = "The worker stopped unexpectedly and was restarted, so this run was lost: start it again."
log = logging.getLogger(__name__)


class Run:
    """A session on its way, seen from outside the worker's thread."""

    def __init__(self, session, wake: Callable[[], None] = lambda: None, crowd: Callable[[], int] = lambda: 1):
        self.name, self.number = new_name(), -1  # of the last frame sent
        self.session = session  # None once the run is over: it holds the KV caches
        self.headers = [asdict(header) for header in session.headers]
        self.record = Record(self.headers)
        self.told: list[float] = []  # when each event came out of the session, in seconds since 1970
        self.held = self.over = False
        self.error = ""  # a sentence, where the session broke as a whole
        self.on_held: Callable[[], None] = lambda: None  # called whenever the run begins to rest
        self._beat, self._archived = CLOCK, False
        self._orders: dict[Hashable, Callable[[], list]] = {}  # one of a kind: a client may send thousands
        self._changed, self._wake, self._crowd = threading.Condition(threading.RLock()), wake, crowd

    @property
    def state(self) -> str:
        return "done" if self.over else "held" if self.held else "running"

    @property
    def events(self) -> Facts:
        return self.record.events

    @property
    def trace(self) -> Trace:
        """All that the session has told so far; it grows while others look."""
        session = self.session
        return session.trace if session is not None else self.record.trace

    @property
    def strategies(self) -> str:
        """What runs in it, for the log."""
        return ", ".join(header["strategy"] for header in self.headers) or "survey"

    def hold(self) -> None:
        self._tell(held=True)

    def resume(self) -> None:
        self._tell(held=False)

    def step(self) -> None:
        """Every lane runs up to its next commit, then the run is held."""
        self._tell(held=True, order="step")

    def stop(self, lane: int | None = None) -> None:
        """End one lane or all of them, within one request."""
        self._tell(held=self.held, order=("stop", lane))

    def fail(self, sentence: str) -> None:
        """End the run with a sentence at once, whatever its session is doing."""
        with self._changed:
            if not self.over:
                self.error = sentence
                self._end()
        self._wake()

    def archive(self) -> None:
        """Compress what the run told as soon as it is over: nobody follows it any more."""
        with self._changed:
            self._archived = True
            if self.over:
                self.record.pack()

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
            self.number, sent, state, due = self.number + 1, sent + len(fresh), now, time.monotonic() + self._pause()
            yield frame(self.name, self.number, fresh, now, self.headers if self.number == 0 else None, oldest)

    def _pause(self) -> float:
        """Seconds to the next frame. Runs that share a device share its frames as well: the server spends milliseconds
        on each, in one thread.
        """
        return max(self._beat, min(SLOWEST, CLOCK * self._crowd()))

    def ready(self) -> bool:
        return not self.over and (bool(self._orders) or not self.held)

    def serve(self) -> None:
        """One order or one request; called by the worker alone. What is no Exception goes on to the worker."""
        try:
            stamped = self._next_step()()
        except Exception:
            log.exception("a run broke")
            return self.fail(BROKE)
        fresh = [event.to_json() for event in stamped]
        with self._changed:
            if self.over:
                return
            self.events.extend(fresh)
            self.told += [time.time()] * len(fresh)
            if self.session.finished:
                self._end()
            self._changed.notify_all()
        self._report_held()

    def _next_step(self) -> Callable[[], list]:
        with self._changed:
            session = self.session
            if session is None:
                return list
            if not self._orders:
                return session.advance
            order = next(iter(self._orders))
            return self._orders.pop(order)

    def _end(self) -> None:
        """Let go of what a finished run no longer needs: its caches are by far the largest part of it."""
        self.over = True
        self.record.keep(getattr(self.session, "trace", None))  # a survey has none
        self.session = None
        self._orders.clear()
        if self._archived:
            self.record.pack()
        self._changed.notify_all()

    def _tell(self, held: bool, order: Hashable = None) -> None:
        with self._changed:
            if self.over:
                return
            self.held = held
            if order:
                self._orders[order] = self.session.step if order == "step" else partial(self.session.stop, order[1])
            self._changed.notify_all()
        self._report_held()
        self._wake()

    def _report_held(self) -> None:
        if self.held and not self._orders and not self.over:
            self.on_held()

    def _news(self, sent: int, state: str) -> tuple[Facts, str]:
        with self._changed:
            patience = HELD_PATIENCE if state == "held" else PATIENCE
            self._changed.wait_for(lambda: len(self.events) > sent or self.state != state, patience)
            fresh, now = self.events[sent:], self.state
        if not fresh and now == state == "running":
            self._wake()  # a worker whose thread died is noticed by whoever waits for it
        return fresh, now


@dataclass(frozen=True)
class Health:
    """How a worker is: whether its thread lives, seconds since it last finished a step, seconds in the present one, and
    its runs by state.
    """

    alive: bool
    heartbeat_age: float
    step_seconds: float
    runs: int
    held: int

    @property
    def ok(self) -> bool:
        return self.alive and self.step_seconds < STUCK


class Worker:
    """Serves its runs round-robin; the thread starts with the first run and sleeps while none is ready."""

    def __init__(self):
        self._runs: deque[Run] = deque()
        self._bell = threading.Condition()
        self._thread: threading.Thread | None = None
        self._serving: Run | None = None
        self._begun = self._beaten = time.monotonic()  # when the present step began, and when the last one ended

    def take(self, session) -> Run:
        run = Run(session, self._ring, self._crowd)
        with self._bell:
            self._runs.append(run)
        self._ring()
        return run

    def others(self, mine: Run) -> int:
        """Runs that share the device with one's own; one that is held takes no turns."""
        with self._bell:
            return sum(run.ready() for run in self._runs if run is not mine)

    def _crowd(self) -> int:
        with self._bell:
            return sum(run.ready() for run in self._runs)

    def runs(self) -> list[Run]:
        """All runs that are not over."""
        with self._bell:
            return [run for run in self._runs if not run.over]

    def health(self) -> Health:
        """How the worker is now. One whose thread has died is reported once as dead and restarted by the question."""
        now, runs = time.monotonic(), self.runs()
        with self._bell:
            serving, alive = self._serving, self._thread is None or self._thread.is_alive()
            step = now - self._begun if serving else 0.0
            age = now - self._beaten if any(run.ready() for run in runs) else 0.0
        self._ring()
        return Health(alive, round(age, 3), round(step, 3), len(runs), sum(run.held for run in runs))

    def _ring(self) -> None:
        """Wake the thread, or start one where there is none."""
        with self._bell:
            dead = self._thread is not None and not self._thread.is_alive()
            lost = self._bury() if dead else []
            if self._thread is None and self._runs:
                self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
                self._thread.start()
            self._bell.notify_all()
        for run in lost:  # with the bell free: a run's own lock comes first
            run.fail(DIED)

    def _bury(self) -> list[Run]:
        """Forget a thread that is gone; the runs that are lost with it: the one it served, or all where it served none.
        """
        lost = [self._serving] if self._serving else list(self._runs)
        self._thread = self._serving = None
        for run in lost:
            self._runs.remove(run)
        return lost

    def _work(self) -> None:
        """The thread. What ends it is no Exception, SystemExit for instance, and must not end the service."""
        try:
            self._loop()
        except BaseException:
            log.critical("the worker's thread died of this; another takes its place", exc_info=True)
        with self._bell:
            lost = self._bury()
        self._ring()
        for run in lost:
            run.fail(DIED)

    def _loop(self) -> None:
        while True:
            with self._bell:
                self._bell.wait_for(lambda: any(run.ready() for run in self._runs))
                run = self._serving = self._next()
                self._begun = time.monotonic()
            run.serve()
            self._served(run)

    def _served(self, run: Run) -> None:
        with self._bell:
            self._serving, self._beaten = None, time.monotonic()
            if run.over and run in self._runs:
                self._runs.remove(run)
        if (seconds := self._beaten - self._begun) > SLOW:
            log.warning("one step of %s took %.1f s; all other runs waited for it", run.strategies, seconds)

    def _next(self) -> Run:
        """The first run that has something to do, which goes to the end of the row; those held keep their places."""
        run = next(run for run in self._runs if run.ready())
        self._runs.remove(run)
        self._runs.append(run)
        return run
