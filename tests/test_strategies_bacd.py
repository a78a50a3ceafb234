"""Bounded adaptive confidence: which positions it fills, by its rule, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.algorithms.diffusion.proposals import Proposals, above
from playground.events import Figure
from strategies.diffusion.bacd import BACD
from support.canvases import denoiser, forwards, run


def thresholds(strategy, *passes: dict[int, float]) -> list[list[int]]:
    """Positions filled in each pass with the given confidences."""
    filled, courses = [], []
    for confidence in passes:
        threshold = strategy._threshold(filled, confidence.values())
        chosen = above(Proposals(dict.fromkeys(confidence, 0), confidence), threshold)
        filled += [confidence[position] for position in chosen]
        courses.append(chosen)
    return courses


@pytest.mark.oracle("bacd")
def test_the_threshold_follows_what_was_filled():
    first, second = {0: .55, 1: .50, 2: .40, 3: .30}, {1: .65, 2: .62, 3: .58}
    assert thresholds(BACD(), first, second, {3: .61}) == [[0], [1, 2], [3]]
    assert BACD()._threshold([.55, .65, .62], [.61]) == pytest.approx(.6067, abs=1e-4)
    assert BACD()._threshold([.99], [.1]) == .9 and BACD()._threshold([], [.2, .7]) == .7


class MeanOfMasked(BACD):
    """Wrong: it follows the confidences of what is still masked."""

    def _threshold(self, filled, confidences):
        confidences = list(confidences)
        return max(self.low, min(self.high, sum(confidences) / len(confidences)))


@pytest.mark.refuses("bacd")
def test_a_threshold_that_follows_the_masked_positions_fills_others():
    passes = {0: .7, 1: .62, 2: .4}, {1: .65, 2: .3}
    assert thresholds(BACD(), *passes) != thresholds(MeanOfMasked(), *passes)


def test_the_threshold_begins_anew_in_each_block_and_stays_within_its_bounds():
    events = run(denoiser(), "bacd", low=0.1, high=0.5, block_length=4)
    shown = [event.data["series"]["threshold"] for event in events if isinstance(event, Figure)]
    assert all(0.1 <= value <= 0.5 for value in shown) and len(shown) == len(forwards(events))
