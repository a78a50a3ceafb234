"""Rules that fill several positions of a canvas in one forward: against their formulas, thresholds at their ends, and
one token a step.
"""
from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from tables import Enumerating, Letters, distance

from playground.algorithms.diffusion.proposals import Proposals, above, by_factor, most_confident
from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder, Silent
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.events import Figure, Note
from strategies.diffusion.adablock import AdaBlock
from strategies.diffusion.bacd import BACD
from strategies.diffusion.dream import Dream
from strategies.diffusion.explore_then_exploit import ExploreThenExploit
from strategies.diffusion.fast_dllm import FastDLLM
from strategies.diffusion.local_leap import LocalLeap
from strategies.diffusion.masked_diffusion import MaskedDiffusion
from support.canvases import LENGTH, PROMPT, canvas, course, denoiser, difference, fills, forwards, run

BLOCK = dict(block_length=LENGTH)
EXACT = 1e-9


def proposals(*confidence: float) -> Proposals:
    return Proposals(dict.fromkeys(range(len(confidence)), 0), dict(enumerate(confidence)))


def random_table(letters: int, length: int, seed: int = 0) -> torch.Tensor:
    scores = torch.randn([letters] * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5
    return scores.flatten().softmax(0).view_as(scores)


def over(table: torch.Tensor) -> OracleDenoiser:
    return OracleDenoiser.from_table(table, Letters("abcd"[:len(table)], frozenset()))


def law(table: torch.Tensor, strategy) -> dict:
    """Exact probability of every string the strategy may write, by going through all draws."""
    model, draws, found = over(table), Enumerating(), Counter()
    for _ in draws.runs():
        assembly = assemble(LaneConfig(strategy.name, strategy.values()))
        assembly.decoder = strategy
        lane = Canvas([], {"target": model}, assembly, Limits(), Silent(model.tokens))
        lane.draws = draws
        runner = Runner(lane, assembly)
        while not runner.finished:
            runner.advance()
        found[tuple(lane.ids)] += draws.weight
    return dict(found)


def law_of(table: torch.Tensor) -> dict:
    return {tuple(text): float(table[tuple(text)]) for text in torch.ones_like(table).nonzero().tolist()}


def on_table(table: torch.Tensor, strategy):
    """Events of one lane over a table."""
    assembly = assemble(LaneConfig(strategy.name, strategy.values()))
    assembly.decoder = strategy
    model = over(table)
    runner, events = Runner(Canvas([], {"target": model}, assembly, Limits(), Recorder(model.tokens)), assembly), []
    while not runner.finished:
        events += runner.advance()
    return events


# --- Fast-dLLM ---

def test_the_threshold_and_the_factor_choose_as_their_formulas_say():
    given = proposals(.95, .8, .99, .6)
    assert above(given, .9) == [0, 2] and above(given, .999) == [2] and above(given, 0) == [0, 1, 2, 3]
    assert most_confident(given, 3) == [2, 0, 1] and most_confident(proposals(.5, .5), 1) == [0]
    # sorted .99, .95, .8, .6: (n + 1)(1 - c) is .02, .15, .8, 2.0
    assert by_factor(given, .1) == [2] and by_factor(given, .16) == [2, 0]
    assert by_factor(given, 1.0) == [2, 0, 1] and by_factor(given, 2.1) == [2, 0, 1, 3] and by_factor(given, .01) == [2]


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


class OffByOne(FastDLLM):
    """Wrong: it fills what is below the threshold."""

    def choose(self, lm, given, block):
        return [i for i, c in given.confidence.items() if c <= self.threshold] or given.ranked[:1]


@pytest.mark.refuses("fast_dllm")
def test_filling_what_is_below_the_threshold_is_another_rule():
    model = denoiser()
    plain = run(model, "masked_diffusion", rule="threshold", threshold=0.2, **BLOCK)
    assert difference(run(model, "fast_dllm", OffByOne(threshold=0.2, cache="none", **BLOCK)), plain) == math.inf


# --- LocalLeap ---

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


# --- bounded adaptive confidence ---

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


# --- AdaBlock ---

class Window:
    """A lane that proposes a newline at some positions."""

    length = 32

    def __init__(self, delimiters: dict[int, float]):
        self.given = Proposals(
            {i: int(i in delimiters) for i in range(32)}, {i: delimiters.get(i, .9) for i in range(32)}
        )

    def piece(self, token: int) -> str:
        return "\n" if token else "x"


@pytest.mark.oracle("adablock")
@pytest.mark.parametrize("threshold, length", [(.3, 7), (.65, 12)])
def test_the_most_confident_delimiter_of_the_window_ends_the_block(threshold, length):
    lane = Window({2: .35, 6: .60, 20: .99})  # the window is a quarter of the canvas, 8 positions
    assert AdaBlock(delimiter_threshold=threshold, block_length=12)._length(lane, lane.given, 0) == length


class FirstDelimiter(AdaBlock):
    """Wrong: the first delimiter ends the block."""

    def _length(self, lm, given, start):
        return next(i for i in given.tokens if self._delimits(lm, given.tokens[i])) - start + 1


@pytest.mark.refuses("adablock")
def test_the_first_delimiter_gives_another_block():
    lane = Window({2: .35, 6: .60})
    assert FirstDelimiter()._length(lane, lane.given, 0) == 3 != AdaBlock()._length(lane, lane.given, 0)


def test_the_last_block_is_clipped_and_the_search_shares_its_forward_with_the_first_fill():
    events = run(denoiser(), "adablock", threshold=0.0, delimiter_threshold=1.05, block_length=8)
    borders = [event.data["series"]["positions"] for event in events if isinstance(event, Figure)]
    assert borders == [8, 6] and len(forwards(events)) == 2


# --- Explore-Then-Exploit ---

def groups(count: int) -> torch.Tensor:
    """Independent groups of three tokens: aaa or bbb, with even odds."""
    table = torch.zeros([2] * (3 * count), dtype=torch.float64)
    for code in range(2 ** count):
        table[tuple(bit for group in range(count) for bit in [code >> group & 1] * 3)] = 0.5 ** count
    return table


@pytest.mark.oracle("explore_then_exploit")
def test_a_try_that_makes_others_certain_saves_forwards():
    """Threshold decoding fills one of a group and then its two partners: two forwards per group."""
    table = groups(3)
    threshold = on_table(table, MaskedDiffusion(rule="threshold", threshold=0.9))
    explored = on_table(table, ExploreThenExploit(tried=1, reuses=16))
    assert len(forwards(threshold)) == 6 and len(forwards(explored)) == 1 + 3
    assert [len(fill.positions) for fill in fills(explored)] == [3, 3, 3]


class Forgetful(ExploreThenExploit):
    """Wrong: the rows of a try are not used again."""

    def _explore(self, lm, rows, block):
        yield from super()._explore(lm, rows, block)
        return None


@pytest.mark.refuses("explore_then_exploit")
def test_tries_that_are_not_kept_save_nothing():
    assert len(forwards(on_table(groups(3), Forgetful(tried=1, reuses=16)))) > 6


@pytest.mark.slow
@pytest.mark.oracle("explore_then_exploit")
@pytest.mark.parametrize("table", [groups(1), torch.full([2, 2], 0.25, dtype=torch.float64)],
                         ids=["certain", "independent"])
def test_one_sampled_try_follows_the_table(table):
    """Where the try makes the other positions certain, and where every position needs one of its own."""
    assert distance(law(table, ExploreThenExploit(tried=1, temperature=1.0)), law_of(table)) < 1e-12


def test_bits_of_all_rounds_are_those_of_the_text():
    table = random_table(2, 4)
    events = on_table(table, ExploreThenExploit(threshold=1.05, tried=0))
    bits = [event.data["series"]["bits"] for event in events if isinstance(event, Figure)]
    text = dict((position, token) for position, token, _ in course(events))
    assert sum(bits) == pytest.approx(-math.log2(float(table[tuple(text[i] for i in range(4))])), abs=1e-9)
    assert len(bits) >= sum(bits) / max(bits)


def test_where_nothing_depends_on_anything_every_try_is_wasted():
    even = torch.full([2] * 4, 1 / 16, dtype=torch.float64)
    events = on_table(even, ExploreThenExploit(tried=2))
    assert [len(fill.positions) for fill in fills(events)] == [1] * 4 and len(forwards(events)) == 4 * 3
    assert sum(isinstance(event, Note) for event in events) == 4


# --- Dream ---

@pytest.mark.oracle("dream")
@pytest.mark.parametrize("rule", ["topk_margin", "entropy"])
def test_dream_at_one_position_per_forward_and_temperature_one_follows_the_table(rule):
    table = random_table(2, 3)
    found = law(table, OneByOne(rule=rule, temperature=1.0))
    assert distance(found, law_of(table)) < 1e-12


class OneByOne(Dream):
    """Dream's rules with one position per forward, which its schedule of times does not give exactly."""

    def _chosen(self, lm, rows, given, share):
        return super()._chosen(lm, rows, given, 1 / len(given.tokens) + 1e-9)


@pytest.mark.refuses("dream")
def test_all_positions_at_once_do_not_follow_the_table():
    table = random_table(2, 3)
    assert distance(law(table, Dream(steps=1, temperature=1.0)), law_of(table)) > 0.01


@pytest.mark.oracle("dream")
@pytest.mark.parametrize("steps", [1, 3, 5, 14, 20])
def test_each_step_fills_the_share_that_the_times_give(steps):
    """By hand: time t falls evenly from 1 to 0.001; a step fills floor(masked * (1 - s / t)), the last one all."""
    left, expected = LENGTH, []
    for step in range(steps):
        time, following = (1 - (1 - 1e-3) * i / steps for i in (step, step + 1))
        count = left if step == steps - 1 else int(left * (1 - following / time))
        expected += [count] * (count > 0)
        left -= count
    events = run(denoiser(), "dream", steps=steps)
    assert [len(fill.positions) for fill in fills(events)] == expected


def test_dreams_scores_are_those_of_their_names():
    rows = run_rows(torch.tensor([[2.0, 1.0, 0.0]]).double())
    p = torch.tensor([2.0, 1.0, 0.0]).double().softmax(-1)
    given = Proposals({0: 0}, {0: float(p[0])})
    scores = {rule: Dream(rule=rule)._score(rows, given, 0) for rule in ("maskgit_plus", "topk_margin", "entropy")}
    assert scores == pytest.approx({
        "maskgit_plus": float(p[0]), "topk_margin": float(p[0] - p[1]), "entropy": float((p * p.log()).sum())
    })


def run_rows(raw: torch.Tensor):
    """Rows of a plain lane with these logits."""
    lane = canvas(denoiser(), assemble(LaneConfig("dream")))
    return lane.rows_of(raw)


@pytest.mark.slow
def test_origin_fills_each_position_with_the_share_as_probability():
    counts = [
        len(fills(run(denoiser(), "dream", rule="origin", steps=2, seed=seed))[0].positions) for seed in range(40)
    ]
    assert len(set(counts)) > 2 and abs(sum(counts) / 40 - LENGTH / 2) < 1.5  # five standard errors


def test_an_order_temperature_draws_positions():
    courses = {
        tuple(position for position, _, _ in course(run(denoiser(), "dream", order_temperature=1.0, seed=seed)))
        for seed in range(4)
    }
    assert len(courses) == 4


# --- guidance ---

@pytest.mark.oracle("masked_diffusion")
def test_guidance_moves_the_logits_away_from_those_without_the_prompt():
    model = denoiser()
    first = fills(run(model, "masked_diffusion", guidance=1.5, **BLOCK))[0]
    with_prompt = model.denoise([*PROMPT, *[None] * LENGTH])[len(PROMPT):]
    without = model.denoise([None] * (len(PROMPT) + LENGTH))[len(PROMPT):]
    guided = without + 2.5 * (with_prompt - without)
    guided[:, model.mask_id] = float("-inf")
    best = guided.softmax(-1).max(-1)
    position = int(best.values.argmax())
    assert (first.positions, first.ids) == ([position], [int(best.indices[position])])
    assert first.confidences[0] == pytest.approx(float(best.values[position]))


@pytest.mark.refuses("masked_diffusion")
def test_guidance_changes_what_is_filled_and_costs_a_second_forward():
    model = denoiser()
    plain, guided = run(model, "masked_diffusion", **BLOCK), run(model, "masked_diffusion", guidance=1.5, **BLOCK)
    assert difference(plain, guided) > 1e-3 and len(forwards(guided)) == 2 * len(forwards(plain))


def test_the_rules_are_registered():
    names = ("fast_dllm", "dkv_cache", "local_leap", "adablock", "bacd", "dream", "explore_then_exploit")
    assert all(make(name).kind == "canvas_decoder" for name in names)
