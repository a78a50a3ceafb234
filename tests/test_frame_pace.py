"""The worker sends frames a beat apart, as fast as the page can take them, and says when their events happened."""
from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
from counting import Counting

from playground.player.frames import CLOCK, SLOWEST
from playground.ui.server import worker
from playground.ui.server.worker import Worker


def test_a_frame_shows_when_the_oldest_of_its_events_happened():
    begun = time.time()
    frames = list(Worker().take(Counting([], length=200)).frames())
    times = [frame["oldest_at"] for frame in frames if frame["events"]]
    assert begun <= times[0] and times == sorted(times) and times[-1] <= time.time()
    assert all("oldest_at" not in frame for frame in frames if not frame["events"])


def waits_of(monkeypatch, reading: float, beat: float) -> list[float]:
    """Seconds that a run waits between its first frames, where each takes so long to read."""
    now, waits = [1000.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=waits.append, time=time.time)
    run = Worker().take(Counting([], length=100_000))
    run.pace(beat)
    monkeypatch.setattr(worker, "time", clock)
    frames = run.frames()
    for _ in range(3):
        while next(frames) is None:
            pass
        now[0] += reading
    run.stop()
    return waits[1:3]


@pytest.mark.parametrize("reading, waited", [(0.01, CLOCK - 0.01), (2 * CLOCK, 0.0)])
def test_frames_begin_a_beat_apart_and_a_slow_reader_waits_no_longer(monkeypatch, reading, waited):
    assert waits_of(monkeypatch, reading, CLOCK) == pytest.approx([waited] * 2)


@pytest.mark.parametrize("asked, beat", [(0.2, 0.2), (1e9, SLOWEST), (0.001, CLOCK), (-1.0, CLOCK), (math.nan, CLOCK)])
def test_a_browser_that_cannot_follow_gets_frames_further_apart_and_still_some(monkeypatch, asked, beat):
    assert waits_of(monkeypatch, 0.01, asked) == pytest.approx([beat - 0.01] * 2)


def test_a_run_that_is_being_served_still_counts_as_a_neighbour_and_one_that_is_held_or_over_does_not():
    worker = Worker()
    first, second = worker.take(Counting([])), worker.take(Counting([]))
    assert {worker.others(first) for _ in range(500)} == {1}
    second.hold()
    assert worker.others(first) == 0
    second.resume()
    second.stop()
    list(second.frames())
    assert worker.others(first) == 0
    first.stop()
