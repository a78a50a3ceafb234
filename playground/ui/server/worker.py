"""One worker thread per device serves the sessions of all visitors round-robin.

A visitor's handle is a `Run`: any thread may hold, resume, step or stop it and read it as frames for the live view.
Only the worker thread uses the session. It serves one forward of one run at a time, so no run waits for long. Every
other step is reserved for runs without a token, so that a visitor of a busy page soon sees the first one. A thread that
dies is replaced.
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

from playground.decoding.forked_session import stopped
from playground.events import Commit, Fill
from playground.player.frames import CLOCK, Facts, frame, interval, new_name, within
from playground.trace import Trace
from playground.ui.server.machine_meters import MachineMeters
from playground.ui.server.memory_watch import MemoryWatch
from playground.ui.server.record import Record

PATIENCE = 1.0  # seconds without events after which `frames` yields None
HELD_PATIENCE = 5.0  # the same for a held run, which has no events
SLOW = 2.0  # seconds after which a step is logged, since all other runs waited for it
METERED = 1.0  # seconds between two readings of the machine in the frames of a run
HEAD_START = 1.0  # seconds of the worker's time in which a run without a token has priority
HANDED_OVER = 30.0  # seconds to wait for the session of a run that is forked
STUCK = 120.0  # seconds of one step after which the worker counts as stuck
BROKE = "This run failed with an internal error; see the log. Other runs are not affected."
DIED = "The worker stopped unexpectedly and was restarted, so this run was lost: start it again."
TOO_LARGE = (
    "The page ran out of memory, and of all runs this one had the largest KV caches, so it was ended: run fewer lanes, "
    "a shorter text or a smaller model."
)
log = logging.getLogger(__name__)


class Run:
    """A running session, as seen from outside the worker thread."""

    def __init__(
        self,
        session,
        wake: Callable[[], None] = lambda: None,
        active_runs: Callable[[], int] = lambda: 1,
        meters: MachineMeters | None = None,
    ):
        self.name, self.number = new_name(), -1  # of the last frame sent
        self.session = session  # None once the run is over: it holds the KV caches
        self.headers = [asdict(header) for header in session.headers]
        self.record = Record(self.headers)
        self.times: list[float] = []  # when the session returned each event, in seconds since 1970
        self.held = self.over = False
        self.error = ""  # a message, if the session failed as a whole
        self.on_held: Callable[[], None] = lambda: None  # called whenever the run is held
        self._beat, self._archived, self._given = CLOCK, False, False
        self._has_token, self._served = False, 0.0  # seconds of the worker's time
        self._orders: dict[Hashable, Callable[[], list]] = {}  # at most one of a kind: a client may send thousands
        self._changed, self._wake, self._active_runs = threading.Condition(threading.RLock()), wake, active_runs
        self._meters = meters  # None: frames carry no readings of the machine

    @property
    def state(self) -> str:
        return "done" if self.over else "held" if self.held else "running"

    @property
    def events(self) -> Facts:
        return self.record.events

    @property
    def trace(self) -> Trace:
        """The trace so far; it grows while the run is active."""
        session = self.session
        return session.trace if session is not None else self.record.trace

    @property
    def strategies(self) -> str:
        """The strategies of the run, for the log."""
        return ", ".join(header["strategy"] for header in self.headers) or "survey"

    def cache_bytes(self) -> int:
        """Memory of the KV caches of all lanes; called by the worker only."""
        session = self.session
        return session.cache_bytes() if session is not None else 0

    def hold(self) -> None:
        self._command(held=True)

    def resume(self) -> None:
        self._command(held=False)

    def step(self) -> None:
        """Run every lane up to its next commit, then hold the run."""
        self._command(held=True, order="step")

    def stop(self, lane: int | None = None) -> None:
        """End one lane or all of them, within one request."""
        self._command(held=self.held, order=("stop", lane))

    def hand_over(self) -> Any:
        """End this run, but not its session, which is returned: its lanes go on in another run, and are recorded here
        as stopped. None if the run is over, or does not answer for a while.
        """
        sessions: list[Any] = []
        with self._changed:
            if self.over:
                return None
            self._orders["hand over"] = partial(self._give, sessions)
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: self.over, HANDED_OVER)
        return sessions[0] if sessions else None

    def _give(self, sessions: list[Any]) -> list:
        """The order behind `hand_over`, carried out by the worker."""
        known = self.session.trace
        whole = stopped(known)
        self.record.keep(whole)
        self._given = True
        sessions.append(self.session)
        return whole.events[len(known.events):]

    def fail(self, sentence: str) -> None:
        """End the run with a message at once, whatever its session is doing."""
        with self._changed:
            if not self.over:
                self.error = sentence
                self._end()
        self._wake()

    def archive(self) -> None:
        """Compress the events as soon as the run is over; called when its client has left."""
        with self._changed:
            self._archived = True
            if self.over:
                self.record.pack()

    def pace(self, beat: float) -> None:
        """Set the interval between two frames in seconds, for a browser that cannot handle more of them."""
        self._beat = within(beat)

    def frames(self) -> Iterator[dict[str, Any] | None]:
        """Yield the events since the previous frame, at most once per interval; None if there were none for a while."""
        sent, state, due, metered = 0, "", 0.0, -METERED
        while state != "done":
            time.sleep(max(0.0, due - time.monotonic()))
            fresh, now = self._new_events(sent, state)
            if not fresh and now == state:
                yield None
                continue
            oldest = self.times[sent] if fresh else None
            self.number, sent, state = self.number + 1, sent + len(fresh), now
            due = time.monotonic() + interval(self._beat, self._active_runs())
            headers = self.headers if self.number == 0 else None
            machine = self._meters.read() if self._meters and time.monotonic() - metered >= METERED else None
            metered = time.monotonic() if machine else metered
            yield frame(self.name, self.number, fresh, now, headers, oldest, machine)

    def follow(self) -> Iterator[dict[str, Any]]:
        """The frames of one more reader, from the first event on; the run's own reader and its pace are unaffected."""
        sent, state, number = 0, "", 0
        while state != "done":
            fresh, now = self._new_events(sent, state)
            if fresh or now != state:
                oldest = self.times[sent] if fresh else None
                yield frame(self.name, number, fresh, now, self.headers if number == 0 else None, oldest)
                sent, state, number = sent + len(fresh), now, number + 1
                time.sleep(CLOCK)

    def ready(self) -> bool:
        return not self.over and (bool(self._orders) or not self.held)

    @property
    def starting(self) -> bool:
        """Whether the run has no token yet. Not true for long of a strategy that commits only at its end."""
        return not self._has_token and self._served < HEAD_START

    def serve(self) -> None:
        """Carry out one order or one forward; called by the worker only. Other than Exception is left to the worker."""
        begun = time.monotonic()
        try:
            stamped = self._next_step()()
        except Exception:
            log.exception("a run failed")
            return self.fail(BROKE)
        fresh = [event.to_json() for event in stamped]
        self._served += time.monotonic() - begun
        self._has_token = self._has_token or any(isinstance(one.event, (Commit, Fill)) for one in stamped)
        with self._changed:
            if self.over:
                return
            self.events.extend(fresh)
            self.times += [time.time()] * len(fresh)
            if self._given or self.session.finished:
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
        """Release what a finished run no longer needs; its KV caches are by far the largest part."""
        self.over = True
        if not self._given:
            self.record.keep(getattr(self.session, "trace", None))  # a survey has none
        self.session = None
        self._orders.clear()
        if self._archived:
            self.record.pack()
        self._changed.notify_all()

    def _command(self, held: bool, order: Hashable = None) -> None:
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

    def _new_events(self, sent: int, state: str) -> tuple[Facts, str]:
        with self._changed:
            patience = HELD_PATIENCE if state == "held" else PATIENCE
            self._changed.wait_for(lambda: len(self.events) > sent or self.state != state, patience)
            fresh, now = self.events[sent:], self.state
        if not fresh and now == state == "running":
            self._wake()  # so that a dead worker thread is noticed and replaced
        return fresh, now


@dataclass(frozen=True)
class Health:
    """The state of a worker: whether its thread is alive, seconds since its last step ended and since the current one
    began, and its numbers of runs and of held runs.
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
    """Serves its runs round-robin, every other step only those that are starting, if any. The thread starts with the
    first run and sleeps while none is ready. With a watch, the run with the largest caches ends before the memory does.
    """

    def __init__(self, watch: MemoryWatch | None = None):
        self._runs: deque[Run] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._serving: Run | None = None
        self._favours_starting = False  # in the next step
        self._meters, self._watch = MachineMeters(), watch
        self._begun = self._ended = time.monotonic()  # when the current step began, and when the last one ended

    def take(self, session) -> Run:
        run = Run(session, self._notify, self._active_runs, self._meters)
        with self._condition:
            self._runs.append(run)
        self._notify()
        return run

    def others(self, mine: Run) -> int:
        """The number of other runs that share the device; held ones do not count."""
        with self._condition:
            return sum(run.ready() for run in self._runs if run is not mine)

    def _active_runs(self) -> int:
        with self._condition:
            return sum(run.ready() for run in self._runs)

    def runs(self) -> list[Run]:
        """All runs that are not over."""
        with self._condition:
            return [run for run in self._runs if not run.over]

    def health(self) -> Health:
        """The state of the worker. A dead thread is reported once and then replaced by this call."""
        now, runs = time.monotonic(), self.runs()
        with self._condition:
            serving, alive = self._serving, self._thread is None or self._thread.is_alive()
            step = now - self._begun if serving else 0.0
            age = now - self._ended if any(run.ready() for run in runs) else 0.0
        self._notify()
        return Health(alive, round(age, 3), round(step, 3), len(runs), sum(run.held for run in runs))

    def _notify(self) -> None:
        """Wake the thread, or start one if there is none."""
        with self._condition:
            dead = self._thread is not None and not self._thread.is_alive()
            lost = self._forget_thread() if dead else []
            if self._thread is None and self._runs:
                self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        for run in lost:  # without holding the condition: a run's own lock must be taken first
            run.fail(DIED)

    def _forget_thread(self) -> list[Run]:
        """Forget a dead thread; returns the runs lost with it: the one it served, or all if it served none."""
        lost = [self._serving] if self._serving else list(self._runs)
        self._thread = self._serving = None
        for run in lost:
            self._runs.remove(run)
        return lost

    def _work(self) -> None:
        """The body of the thread. It ends only by a BaseException such as SystemExit, which must not end the service.
        """
        try:
            self._loop()
        except BaseException:
            log.critical("the worker thread died and is replaced", exc_info=True)
        with self._condition:
            lost = self._forget_thread()
        self._notify()
        for run in lost:
            run.fail(DIED)

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: any(run.ready() for run in self._runs))
                run = self._serving = self._next()
                self._begun = time.monotonic()
            run.serve()
            self._served(run)

    def _served(self, run: Run) -> None:
        with self._condition:
            self._serving, self._ended = None, time.monotonic()
            if run.over and run in self._runs:
                self._runs.remove(run)
        if (seconds := self._ended - self._begun) > SLOW:
            log.warning("one step of %s took %.1f s; all other runs waited for it", run.strategies, seconds)
        if self._watch and (missing := self._watch.missing()):
            self._release(missing)

    def _release(self, missing: int) -> None:
        """End the run with the largest caches, unless all caches together are smaller than what is missing: then
        something else takes the memory.
        """
        sizes = {run: run.cache_bytes() for run in self.runs()}
        if sum(sizes.values()) < missing:
            return
        largest = max(sizes, key=sizes.get)
        log.warning("memory is short: ended %s, whose caches took %d MB", largest.strategies, sizes[largest] // 10**6)
        largest.fail(TOO_LARGE)

    def _next(self) -> Run:
        """The first run that is ready, which is moved to the end of the queue; held runs keep their places."""
        ready = [run for run in self._runs if run.ready()]
        starting = [run for run in ready if run.starting]
        self._favours_starting = not self._favours_starting
        run = starting[0] if starting and self._favours_starting else ready[0]
        self._runs.remove(run)
        self._runs.append(run)
        return run
