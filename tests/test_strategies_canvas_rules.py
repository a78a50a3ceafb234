"""Rules that fill several positions of a canvas in one forward: against their formulas, thresholds at their ends, and
one token a step.
"""
from __future__ import annotations

import pytest

from playground.contract import make
from strategies.diffusion.adablock import AdaBlock
from strategies.diffusion.bacd import BACD
from strategies.diffusion.explore_then_exploit import ExploreThenExploit
from strategies.diffusion.fast_dllm import FastDLLM
from strategies.diffusion.local_leap import LocalLeap
from support.canvases import LENGTH, denoiser, difference, fills, forwards, run

EXACT = 1e-9


# --- at the ends of their thresholds ---

@pytest.mark.oracle("fast_dllm", "local_leap", "bacd", "adablock", "explore_then_exploit")
@pytest.mark.parametrize("strategy", [
    FastDLLM(threshold=1.05, cache="none"), LocalLeap(threshold=1.05, relaxed=1.05), BACD(low=1.05, high=1.05),
    AdaBlock(threshold=1.05, delimiter_threshold=1.05), ExploreThenExploit(threshold=1.05, tried=0, ahead=0),
], ids=lambda strategy: strategy.name)
def test_a_threshold_above_one_fills_one_position_per_forward_as_the_baseline_does(strategy):
    model = denoiser()
    strategy.block_length = 5
    found, baseline = run(model, strategy.name, strategy), run(model, "masked_diffusion", block_length=5)
    assert difference(found, baseline) < EXACT and len(forwards(found)) == LENGTH


@pytest.mark.parametrize("strategy", [
    FastDLLM(threshold=0.0, cache="none"), LocalLeap(threshold=0.0), BACD(low=0.0, high=0.0), AdaBlock(threshold=0.0)
], ids=lambda strategy: strategy.name)
def test_a_threshold_of_zero_fills_a_block_in_one_forward(strategy):
    strategy.block_length = 5
    if strategy.name == "adablock":
        strategy.delimiter_threshold = 1.05
    events = run(denoiser(), strategy.name, strategy)
    assert [len(fill.positions) for fill in fills(events)] == [5, 5, 4] and len(forwards(events)) == 3


@pytest.mark.oracle("fast_dllm", "local_leap", "bacd", "adablock", "explore_then_exploit")
@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("make_one", [
    lambda t: FastDLLM(threshold=t, cache="none"), lambda t: LocalLeap(threshold=t, relaxed=t),
    lambda t: LocalLeap(threshold=t, relaxed=0.0, radius=0), lambda t: BACD(low=t, high=t),
    lambda t: AdaBlock(threshold=t, delimiter_threshold=1.05),
    lambda t: ExploreThenExploit(threshold=t, tried=0, ahead=0),
])
def test_at_their_ends_the_rules_are_plain_threshold_decoding(threshold, make_one):
    model, strategy = denoiser(), make_one(threshold)
    strategy.block_length = 7
    plain = run(model, "masked_diffusion", rule="threshold", threshold=threshold, block_length=7)
    assert difference(run(model, strategy.name, strategy), plain) < EXACT


# --- guidance ---

def test_the_rules_are_registered():
    names = ("fast_dllm", "dkv_cache", "local_leap", "adablock", "bacd", "dream", "explore_then_exploit")
    assert all(make(name).kind == "canvas_decoder" for name in names)
