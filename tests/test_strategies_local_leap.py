"""LocalLeap: which positions it fills, by its rule, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from strategies.diffusion.local_leap import LocalLeap
from support.canvas_laws import proposals

CONFIDENCES = (.95, .80, .74, .76, .10, .76, .76, .91, .30, .89)


@pytest.mark.oracle("local_leap")
def test_near_an_anchor_a_lower_confidence_is_enough():
    """Anchors are 0 and 7; with radius 2, positions 1, 2, 5, 6, 8 and 9 are near one."""
    rule = LocalLeap(threshold=.9, relaxed=.75, radius=2)
    assert rule.choose(None, proposals(*CONFIDENCES), range(10)) == [0, 1, 5, 6, 7, 9]
    assert LocalLeap(threshold=.9, relaxed=.75, radius=16).choose(None, proposals(*CONFIDENCES), range(10)) == [
        0, 1, 3, 5, 6, 7, 9
    ]


def test_without_an_anchor_the_relaxed_threshold_does_not_count():
    assert LocalLeap(threshold=.99, relaxed=.5).choose(None, proposals(*CONFIDENCES), range(10)) == [0]


class Chained(LocalLeap):
    """Wrong: positions accepted near an anchor are anchors themselves."""

    def choose(self, lm, given, block):
        anchors = [i for i, c in given.confidence.items() if c >= self.threshold]
        for position, confidence in given.confidence.items():
            if confidence >= self._needed(position, anchors):
                anchors.append(position)
        return sorted(set(anchors))


@pytest.mark.refuses("local_leap")
def test_anchors_that_beget_anchors_fill_more():
    given = proposals(.95, .80, .80, .80)
    assert LocalLeap(radius=1).choose(None, given, range(4)) == [0, 1]
    assert Chained(radius=1).choose(None, given, range(4)) == [0, 1, 2, 3]
