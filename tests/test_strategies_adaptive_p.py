"""Adaptive-p against its formulas in plain numbers, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import alone, figures, run
from tables import Law, TableModel, Text, distance, law

from playground.contract import Sampler, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from support.laws import EXACT
from support.wrong_variants import refused

AdaptiveP = find("adaptive_p")
REMOVED = -math.inf
COLLAPSES = {
    "adaptive_p": [Collapse(alone("adaptive_p", target=-1.0), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})]))],
}


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def preferred(p: list[float], aim: float) -> list[float]:
    """The distribution that a token is drawn from."""
    away = [abs(a - aim) / 0.3 for a in p]
    return softmax([5 - 10 * d * d / (1 + d) if a > 0 else REMOVED for a, d in zip(p, away)])


def adaptive_law(model: TableModel, prompt: Text, length: int, target: float, decay: float) -> Law:
    """The law of a text, with the state carried along each of its prefixes."""
    found, count = {}, 1 / (1 - decay)

    def grow(text: Text, chance: float, total: float, weight: float) -> None:
        if len(text) == length:
            found[text] = chance
            return
        p = softmax(model.scores((*prompt, *text)).tolist())
        aim = min(1.0, max(0.0, 2 * target - total / weight))
        for token, share in enumerate(preferred(p, aim)):
            if share > 0:
                grow((*text, token), chance * share, p[token] + decay * total, 1 + decay * weight)

    grow((), 1.0, target * count, count)
    return found


def check_adaptive_p(cls: type[Sampler]) -> None:
    """A fixed row of the documentation, then the law of texts of three tokens."""
    row = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    found = cls(target=0.3).apply(row, [[]]).softmax(-1)[0].tolist()
    assert found == pytest.approx([0.0063, 0.9292, 0.0646], abs=1e-4)
    for seed, (target, decay) in enumerate([(0.3, 0.9), (0.5, 0.0), (0.8, 0.5)]):
        model, lane = TableModel("abcd", seed=seed), assemble(LaneConfig("greedy"))
        found = law(Assembly(lane.decoder, [cls(target=target, decay=decay)]), {"target": model}, [0, 1], 3)
        assert distance(found, adaptive_law(model, (0, 1), 3, target, decay)) < EXACT
    cut = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    assert cls(target=0.1).apply(cut, [[]])[0, 2] == REMOVED


class LearnsFromTheTransformed(AdaptiveP):
    """The state follows the probability that the token was drawn with."""

    def observe(self, rows, token, position):
        (scores,) = rows.values()
        return super().observe({"target": self.apply(scores[None], [[]])[0]}, token, position)


class StartsAtNothing(AdaptiveP):
    def __post_init__(self):
        super().__post_init__()
        self.total = 0.0


class RevivesTheCut(AdaptiveP):
    def apply(self, scores, histories):
        return super().apply(scores.clamp(min=-1e9), histories)


class AimsAtTheTarget(AdaptiveP):
    """Never corrects."""

    aim = property(lambda self: self.target)


@pytest.mark.oracle("adaptive_p")
def test_the_law_of_a_text_follows_the_formulas():
    check_adaptive_p(AdaptiveP)


@pytest.mark.refuses("adaptive_p")
@pytest.mark.parametrize("wrong", [LearnsFromTheTransformed, StartsAtNothing, RevivesTheCut, AimsAtTheTarget])
def test_a_wrong_adaptive_p_is_refused(wrong):
    refused(check_adaptive_p, wrong)


def chosen(target: float, p: list[float], *more: tuple[str, dict]) -> list[float]:
    """Probabilities of the tokens chosen from one fixed row."""
    fixed = torch.tensor(p, dtype=torch.float64).log()
    model = TableModel("abcdef"[:len(p)], rule=lambda context: fixed)
    _, events = run(LaneConfig("greedy", {}, [("adaptive_p", {"target": target}), *more]), {"target": model}, [0], 200)
    return [data["series"]["chosen token"] for data in figures(events, "probability against the target")]


@pytest.mark.parametrize("target", [0.15, 0.3, 0.45])
def test_the_mean_of_the_chosen_probabilities_meets_the_target(target):
    found = chosen(target, [0.5, 0.25, 0.15, 0.1])
    plain = 0.5 ** 2 + 0.25 ** 2 + 0.15 ** 2 + 0.1 ** 2  # of sampling
    assert len(found) == 200 and abs(sum(found) / 200 - target) < 0.04 < abs(plain - target) + 0.02


def test_a_token_that_is_nearly_certain_needs_a_truncation_before():
    """The mean meets .3 with improbable tokens in most places; min-p leaves the certain one alone."""
    assert sum(p < 0.02 for p in chosen(0.3, [0.98, 0.01, 0.01])) > 120
    assert min(chosen(0.3, [0.98, 0.01, 0.01], ("min_p", {"m": 0.05}))) > 0.99


def test_rejected_draft_tokens_do_not_change_the_state():
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    config = LaneConfig("speculative", {}, [("draft_model", {}), ("sample_match", {}), ("adaptive_p", {"target": 0.3})])
    lane, _ = run(config, models, [0, 1], 30)
    (sampler,) = lane.chain.samplers
    total, text = 0.3 / (1 - 0.9), lane.main.written
    for i, token in enumerate(text):
        total = softmax(models["target"].scores((0, 1, *text[:i])).tolist())[token] + 0.9 * total
    assert sampler.total == pytest.approx(total)
    assert assemble(config).guarantee() == ["heuristic"]


def test_it_follows_the_temperature_wherever_that_stands():
    for place in ("before cuts", "after cuts"):
        lane = LaneConfig("greedy", {}, [("adaptive_p", {}), ("temperature", {"place": place}), ("min_p", {})])
        assert assemble(lane).samplers[-1].name == "adaptive_p"
