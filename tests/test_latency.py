"""Latencies fitted to measured forwards, and the time between two measured sizes."""
from __future__ import annotations

import numpy
import pytest

from playground.algorithms.speculative.latency import Latency, at, deviation, fitted, seconds_by_rows

SIZES = [(rows, context) for rows in (1, 4, 16, 64) for context in (32, 256, 1024)]


def test_the_parts_of_a_linear_latency_are_found():
    true = Latency(2e-3, 3e-5, 4e-7)
    times = {size: true.of(*size) for size in SIZES}
    assert fitted(times) == pytest.approx(true, rel=1e-6) and deviation(fitted(times), times) < 1e-9


def test_no_part_is_negative_and_none_that_is_not_fits_better():
    """Against a search over the parts: times that fall with the context would need a negative part."""
    times = {(rows, context): 1e-3 + 2e-5 * rows - 2e-7 * context for rows, context in SIZES}
    found = fitted(times)

    def error(latency: Latency) -> float:
        return sum((latency.of(*size) / seconds - 1) ** 2 for size, seconds in times.items())

    near = numpy.linspace(0.5, 1.5, 21)
    others = [Latency(found.fixed * a, found.row * b, slot) for a in near for b in near for slot in (0.0, 1e-8, 1e-7)]
    assert min(found) >= 0 and all(error(found) <= error(other) + 1e-12 for other in others)


def test_more_rows_never_take_less_time():
    times = {(1, 32): 2.0, (2, 32): 3.0, (4, 32): 1.0, (8, 32): 5.0, (1, 256): 9.0}
    assert seconds_by_rows(times) == {1: 2.0, 2: 2.0, 4: 2.0, 8: 5.0}


@pytest.mark.parametrize("rows, seconds", [(1, 2.0), (3, 4.0), (8, 8.0), (10, 9.0)])
def test_between_two_measured_sizes_the_time_is_on_their_line(rows, seconds):
    assert at({1: 2.0, 4: 5.0, 6: 7.0, 8: 8.0}, rows) == seconds


def test_from_one_measured_size_the_time_grows_in_proportion():
    assert at({4: 2.0}, 2) == 2.0 and at({4: 2.0}, 8) == 4.0
