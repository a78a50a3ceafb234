"""The seam to ZeroGPU, where a GPU is lent to one call at a time and that call runs in a process of its own.

There a run cannot be held or stepped on the server: the browser's player does that. Elsewhere nothing here is used.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from time import monotonic, time
from typing import Any

from playground.trace import Trace
from playground.ui.frames import CLOCK, Facts, frame, new_name, trace_of, within

LEAST, EACH, MOST = 10, 0.05, 120  # seconds asked for: at least, for every token of every lane, at most
# headers (in the first), events, state, when they began to happen in seconds since 1970
Batch = tuple[Facts, Facts, str, float]


def on_zero() -> bool:
    return bool(os.environ.get("SPACES_ZERO_GPU")) and find_spec("spaces") is not None


def lent(work: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """A generator function of the visitor's settings, run on a borrowed GPU where there is one to borrow."""
    if not on_zero():
        return work
    import spaces
    return spaces.GPU(duration=seconds)(work)


def seconds(settings, *_: Any) -> int:
    return int(min(MOST, LEAST + EACH * settings.written()))


def batches(session) -> Iterator[Batch]:
    """A session served to its end, as plain data that can cross processes, at most one batch every CLOCK seconds."""
    headers, fresh, begun, due = [asdict(header) for header in session.headers], [], time(), monotonic()
    while not session.finished:
        fresh += [stamped.to_json() for stamped in session.advance()]
        if monotonic() >= due and not session.finished:
            yield headers, fresh, "running", begun
            headers, fresh, begun, due = [], [], time(), monotonic() + CLOCK
    yield headers, fresh, "done", begun


class RemoteRun:
    """A run in the other process; to the page it looks like a worker's Run."""

    def __init__(self, batches_: Iterator[Batch]):
        self.name, self.number = new_name(), -1
        self.headers: Facts = []
        self.events: Facts = []
        self.over, self.error = False, ""
        self._batches, self._beat = batches_, CLOCK

    def hold(self) -> None:
        """The GPU cannot wait; the browser's player holds the picture."""

    resume = step = hold

    def archive(self) -> None:
        """Nothing to compress: what came from the other process is kept as it is."""

    def fail(self, sentence: str) -> None:
        """End the run with a sentence, with its next batch."""
        self.error, self.over = sentence, True

    def stop(self, lane: int | None = None) -> None:
        """Ends the whole run with its next batch; a single lane cannot be reached."""
        self.over = self.over or lane is None

    def pace(self, beat: float) -> None:
        """Let so many seconds lie between two frames: batches that come meanwhile go into one."""
        self._beat = within(beat)

    @property
    def state(self) -> str:
        return "done" if self.over else "running"

    @property
    def trace(self) -> Trace:
        """All that came from the other process so far."""
        return trace_of(self.headers, list(self.events))

    def frames(self) -> Iterator[dict[str, Any] | None]:
        waiting, since, due = [], None, 0.0
        for headers, fresh, state, begun in self._batches:
            ends = state == "done" or self.over
            self.headers, self.events = headers or self.headers, self.events + fresh
            waiting, since = waiting + fresh, since or begun
            if ends or monotonic() >= due:
                self.number += 1
                yield frame(
                    self.name,
                    self.number,
                    waiting,
                    "done" if ends else state,
                    self.headers if self.number == 0 else None,
                    since,
                )
                waiting, since, due = [], None, monotonic() + self._beat - CLOCK
            if ends:
                break
        self.over = True
