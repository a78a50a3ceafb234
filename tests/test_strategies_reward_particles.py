"""Particles weighted by a reward: exact distributions, summed over everything sampled."""
from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import pytest
import torch
from registry import Collapse
from tables import Enumerating, Law, TableModel, Text, distance, law, product_law, write

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from support.laws import AT_ONE, EXACT, WRONG
from support.scripted_rewards import hashed, scripted

RewardParticles = find("reward_particles")
BRIEF = {"reward_particles": {"reward": "likelihood", "particles": 2, "step_tokens": 3}}
PLAIN = LaneConfig("greedy", {}, [AT_ONE])
COLLAPSES = {
    "reward_particles": [
        Collapse(LaneConfig("reward_particles", {"reward": "likelihood", "particles": 1, "temperature": 1.0}), PLAIN),
        Collapse(LaneConfig("reward_particles", {"reward": "likelihood", "temperature": 0.0}), LaneConfig("greedy")),
    ]
}
PROMPT, LENGTH, STRENGTH = (0, 1), 2, 2.0
MODEL = TableModel("ab", seed=3)


def lane(cls: type | None, weights: str, threshold: float):
    knobs = {"particles": 2, "strength": STRENGTH, "threshold": threshold, "weights": weights}
    return scripted("reward_particles", hashed, cls, step_tokens=1, temperature=1.0, **knobs)


def weighed(cls: type, threshold: float) -> Law:
    """E[mean weight if the answer is y], for every y."""
    means: list[float] = []

    class Watched(cls):
        def _answer(self, lm, particles):
            means.append(math.exp(self._mean(particles)))
            return super()._answer(lm, particles)

    draws, found = Enumerating(), defaultdict(float)
    assembly = lane(Watched, "ratio", threshold)
    for _ in draws.runs():
        written = write(assembly, {"target": MODEL}, list(PROMPT), Limits(max_new_tokens=LENGTH), draws).main.written
        found[tuple(written)] += draws.weight * means[-1]
    return dict(found)


def target() -> Law:
    """The model's probability of each text times its reward to the power of the strength, relative to the prompt's."""
    start = hashed(PROMPT)
    texts = product_law(MODEL, list(PROMPT), LENGTH)
    return {text: p * (hashed((*PROMPT, *text)) / start) ** STRENGTH for text, p in texts.items()}


@pytest.mark.oracle("reward_particles")
@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
def test_soft_potentials_are_unbiased(threshold):
    assert distance(weighed(RewardParticles, threshold), target()) < EXACT


class WithoutTheOldReward(RewardParticles):
    """Wrong: every step multiplies the present reward in, so that early rewards count several times."""

    def _potential(self, before, after):
        return super()._potential(1.0, after)


class KeepsItsWeight(RewardParticles):
    """Wrong: copies keep their own weights, and so count twice."""

    def _mean(self, particles):
        return particles[0].weight


@pytest.mark.refuses("reward_particles")
@pytest.mark.parametrize("wrong", [WithoutTheOldReward, KeepsItsWeight])
def test_wrong_weights_are_biased(wrong):
    assert distance(weighed(wrong, 1.0), target()) > WRONG


def filtered() -> Law:
    """Two particles and two steps of the paper's filter by hand: resampled by odds of the reward, the best wins."""
    found = defaultdict(float)

    def odds(text: Text) -> float:
        r = hashed((*PROMPT, *text))
        return (r / (1 - r)) ** STRENGTH

    def p(text: Text) -> float:
        rows = [MODEL.scores((*PROMPT, *text[:i])).softmax(0) for i in range(len(text))]
        return math.prod(float(row[token]) for row, token in zip(rows, text))

    for first in product(range(2), repeat=2):
        texts = [(token,) for token in first]
        chance, weights = p(texts[0]) * p(texts[1]), torch.tensor([odds(text) for text in texts])
        for ancestors in product(range(2), repeat=2):
            shares = [float(weights[i] / weights.sum()) for i in ancestors]
            for second in product(range(2), repeat=2):
                longer = [(*texts[i], token) for i, token in zip(ancestors, second)]
                rest = math.prod(p(text) / p(text[:1]) for text in longer)
                best = max(longer, key=lambda text: hashed((*PROMPT, *text)))
                found[best] += chance * math.prod(shares) * rest
    return dict(found)


class Uniform(RewardParticles):
    """Wrong: rewards do not decide who continues."""

    def _shares(self, particles):
        return torch.full((len(particles),), 1 / len(particles), dtype=torch.float64)


@pytest.mark.oracle("reward_particles")
@pytest.mark.refuses("reward_particles")
def test_the_papers_filter_resamples_by_the_odds_of_the_present_reward():
    expected, models = filtered(), {"target": MODEL}
    assert distance(law(lane(None, "current", 1.0), models, list(PROMPT), LENGTH), expected) < 1e-6
    assert distance(law(lane(Uniform, "current", 1.0), models, list(PROMPT), LENGTH), expected) > WRONG
