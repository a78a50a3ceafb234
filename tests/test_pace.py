"""Time limits in seconds grow on slow machines and never shrink."""
from __future__ import annotations

import pace
import pytest


@pytest.mark.parametrize("times_as_slow, allowed", [(0.5, 2.0), (1.0, 2.0), (3.0, 6.0)])
def test_time_limits_scale_with_the_slowness_of_the_machine(times_as_slow, allowed, monkeypatch):
    monkeypatch.setattr(pace, "_loop", lambda: times_as_slow * pace.TURNS / pace.TURNS_A_SECOND)
    assert pace.here(2.0) == pytest.approx(allowed)


def test_the_minimum_of_all_measurements_excludes_other_load(monkeypatch):
    looks = iter([9.0, 0.001, *[9.0] * (pace.LOOKS - 2)])
    monkeypatch.setattr(pace, "_loop", lambda: next(looks))
    assert pace.here(1.0) == 1.0
