"""Support for ZeroGPU, where a GPU is allocated for one call at a time and the call runs in its own process.

There a run cannot be held or stepped on the server; the browser's player does that. Elsewhere none of this is used.
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

LEAST, EACH, MOST = 10, 0.05, 120  # seconds of GPU time: at least, per token of every lane, at most
Batch = tuple[Facts, Facts, str, float]  # headers (in the first), events, state, time of the oldest event (Unix)


def on_zero() -> bool:
    return bool(os.environ.get("SPACES_ZERO_GPU")) and find_spec("spaces") is not None


def on_gpu(work: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """A generator function of the visitor's settings that runs on an allocated GPU if ZeroGPU is available."""
    if not on_zero():
        return work
    import spaces
    return spaces.GPU(duration=seconds)(work)


def seconds(settings, *_: Any) -> int:
    return int(min(MOST, LEAST + EACH * settings.written()))


def batches(session) -> Iterator[Batch]:
    """Run a session to its end; yields plain data that can be sent to another process, at most every CLOCK seconds."""
    headers, fresh, begun, due = [asdict(header) for header in session.headers], [], time(), monotonic()
    while not session.finished:
        fresh += [stamped.to_json() for stamped in session.advance()]
        if monotonic() >= due and not session.finished:
            yield headers, fresh, "running", begun
            headers, fresh, begun, due = [], [], time(), monotonic() + CLOCK
    yield headers, fresh, "done", begun


class RemoteRun:
    """A run in another process, with the interface of a worker's Run."""

    def __init__(self, batches_: Iterator[Batch]):
        self.name, self.number = new_name(), -1
        self.headers: Facts = []
        self.events: Facts = []
        self.over, self.error = False, ""
        self._batches, self._beat = batches_, CLOCK

    def hold(self) -> None:
        """Does nothing: the GPU cannot wait. The browser's player holds the view."""

    resume = step = hold

    def archive(self) -> None:
        """Does nothing: the events are kept uncompressed."""

    def fail(self, sentence: str) -> None:
        """End the run with a message, at its next batch."""
        self.error, self.over = sentence, True

    def stop(self, lane: int | None = None) -> None:
        """End the whole run at its next batch; a single lane cannot be stopped."""
        self.over = self.over or lane is None

    def pace(self, beat: float) -> None:
        """Set the interval between two frames in seconds; batches in between are merged."""
        self._beat = within(beat)

    @property
    def state(self) -> str:
        return "done" if self.over else "running"

    @property
    def trace(self) -> Trace:
        """All events received so far."""
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
