"""Fast-dLLM: which positions it fills, by its rule, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest

from playground.algorithms.diffusion.proposals import above, by_factor, most_confident
from strategies.diffusion.fast_dllm import FastDLLM
from support.canvas_laws import BLOCK, proposals
from support.canvases import denoiser, difference, run


class OffByOne(FastDLLM):
    """Wrong: it fills what is below the threshold."""

    def choose(self, lm, given, block):
        return [i for i, c in given.confidence.items() if c <= self.threshold] or given.ranked[:1]


@pytest.mark.refuses("fast_dllm")
def test_filling_what_is_below_the_threshold_is_another_rule():
    model = denoiser()
    plain = run(model, "masked_diffusion", rule="threshold", threshold=0.2, **BLOCK)
    assert difference(run(model, "fast_dllm", OffByOne(threshold=0.2, cache="none", **BLOCK)), plain) == math.inf


@pytest.mark.oracle("fast_dllm")
def test_the_threshold_and_the_factor_choose_as_their_formulas_say():
    given = proposals(.95, .8, .99, .6)
    assert above(given, .9) == [0, 2] and above(given, .999) == [2] and above(given, 0) == [0, 1, 2, 3]
    assert most_confident(given, 3) == [2, 0, 1] and most_confident(proposals(.5, .5), 1) == [0]
    # sorted .99, .95, .8, .6: (n + 1)(1 - c) is .02, .15, .8, 2.0
    assert by_factor(given, .1) == [2] and by_factor(given, .16) == [2, 0]
    assert by_factor(given, 1.0) == [2, 0, 1] and by_factor(given, 2.1) == [2, 0, 1, 3] and by_factor(given, .01) == [2]
