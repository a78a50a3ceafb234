"""The meters of the machine: measured values, read rarely."""
from __future__ import annotations

import psutil
import pytest

from playground.events import Note, Stamped
from playground.ui.server import machine_meters
from playground.ui.server.machine_meters import MachineMeters, gpu, memory, processor
from playground.ui.server.worker import METERED, Run


class Counted(MachineMeters):
    readings = 0

    def read(self):
        self.readings += 1
        return super().read()


class Ticking:
    """A session with one event per step."""

    headers, trace = [], None

    def __init__(self, steps: int):
        self.left = steps

    @property
    def finished(self) -> bool:
        return not self.left

    def advance(self) -> list[Stamped]:
        self.left -= 1
        return [Stamped(0, self.left, 0.0, Note())]


def test_memory_is_what_the_system_reports():
    seen, system = memory(), psutil.virtual_memory()
    assert 0 < seen["memory"] < seen["memory_total"] <= system.total
    if seen["memory_total"] == system.total:
        assert seen["memory"] == pytest.approx(system.used, rel=0.5)


def test_the_processor_is_shown_only_as_the_average_of_a_short_time():
    assert processor(machine_meters.STALE + 1) == {}, "an average over minutes is not the load of now"
    assert 0 <= processor(1.0)["cpu"] <= 1


def test_without_a_gpu_in_use_there_are_no_meters_of_one():
    import torch
    assert (gpu() == {}) == (not torch.cuda.is_initialized())


def test_one_reading_serves_all_runs_for_a_while(monkeypatch):
    now, reads = [100.0], []
    monkeypatch.setattr(machine_meters.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine_meters, "memory", lambda: reads.append(now[0]) or {"memory": 1.0})
    meters = MachineMeters()
    for now[0] in (100.0, 100.5, 100.8, 101.0, 101.2):
        assert meters.read()["memory"] == 1.0
    assert reads == [100.0, 101.0]


def test_a_run_sends_at_most_one_reading_per_interval():
    meters = Counted()
    run = Run(Ticking(3), meters=meters)
    frames = run.frames()
    sent = [run.serve() or next(frames) for _ in range(3)]
    assert [len(frame["events"]) for frame in sent] == [1, 1, 1]
    assert ["machine" in frame for frame in sent] == [True, False, False]
    assert meters.readings == 1 and METERED >= 1
