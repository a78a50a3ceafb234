"""XTC removes all but the least probable of the tokens above a threshold, with a given probability."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from tables import TableModel, distance, law, product_law

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.engine.sampling import REMOVED
from support.laws import AT_ONE, EXACT, WRONG

XTC = find("xtc")
OFF = LaneConfig("greedy", {}, [("xtc", {"probability": 0.0}), AT_ONE])
COLLAPSES = {"xtc": [Collapse(OFF, LaneConfig("greedy", {}, [AT_ONE]))]}
LETTERS, ENDS = ["a", "b", "\n", "."], "."


# --- the rule by hand ---


def removed(scores: list[float], threshold: float, exempt: set[int]) -> set[int]:
    """The tokens the pull request removes, in plain Python: in descending order of probability, each that is followed
    by one at or above the threshold; none if one of them is exempt.
    """
    weights = [math.exp(score) for score in scores]
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    top = {token for token, after in zip(order, order[1:]) if weights[after] > 0
           and weights[after] / sum(weights) >= threshold}
    return set() if top & exempt else top


def mixture(threshold: float, probability: float, exempt: set[int]):
    """A row's log-probabilities: the rule applies with this probability."""
    def reshape(scores, history):
        top = removed(scores.tolist(), threshold, exempt)
        applied = scores.new_tensor([REMOVED if token in top else s for token, s in enumerate(scores.tolist())])
        return (probability * applied.softmax(-1) + (1 - probability) * scores.softmax(-1)).log()
    return reshape


def error(cls: type, **knobs) -> float:
    """Largest difference from the distribution by hand, over texts of two tokens, summed over flips and samples."""
    sampler, model = cls(**knobs), TableModel(LETTERS, ENDS, seed=3)
    assembly = Assembly(make("greedy"), [make(AT_ONE[0], **AT_ONE[1]), sampler])
    exempt = {2, 3} if sampler.exempt else set()
    expected = product_law(model, [0, 1], 2, mixture(sampler.threshold, sampler.probability, exempt))
    return distance(law(assembly, {"target": model}, [0, 1], 2), expected)


SETTINGS = [{}, {"exempt": False}, {"exempt": False, "threshold": 0.25, "probability": 0.9},
            {"exempt": False, "threshold": 0.0, "probability": 1.0}]


@pytest.mark.oracle("xtc")
@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_the_output_distribution_is_a_mixture_of_the_row_with_and_without_its_top_choices(knobs):
    assert error(XTC, **knobs) < EXACT


@pytest.mark.oracle("xtc")
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.3, 0.5])
def test_the_removed_tokens_are_those_of_the_formula(threshold):
    rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    rows[::3, 2] = REMOVED
    kept = always(threshold=threshold, exempt=False).apply(rows, [[0]] * 200)
    for row, new in zip(rows.tolist(), kept.tolist()):
        top = removed(row, threshold, set())
        assert new == [REMOVED if token in top else score for token, score in enumerate(row)]


class AppliesAlways(XTC):
    def flip(self, probability, history, purpose=""):
        return True


class SparesTheMostProbable(XTC):
    def top_choices(self, scores):
        likely = scores.softmax(-1) >= self.threshold
        return likely.scatter(-1, scores.argmax(-1, keepdim=True), False)


class RemovesTheMostProbableAlone(XTC):
    def top_choices(self, scores):
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.argmax(-1, keepdim=True), True)


class HasNoExemption(XTC):
    def _keeps_form(self, token):
        return False


class LeavesOnlyExemptTokens(XTC):
    """Removes the others if the rule removes none."""

    def top_choices(self, scores):
        return super().top_choices(scores) & torch.tensor([not self._keeps_form(t) for t in range(scores.shape[-1])])


@pytest.mark.refuses("xtc")
@pytest.mark.parametrize("wrong", [AppliesAlways, SparesTheMostProbable, RemovesTheMostProbableAlone, HasNoExemption,
                                   LeavesOnlyExemptTokens])
def test_a_wrong_rule_is_refused(wrong):
    assert max(error(wrong, **knobs) for knobs in SETTINGS) > WRONG


# --- one row at a time ---


def always(**knobs):
    """A sampler with probability 1; a and b are letters, 2 is a line break, 3 an end token."""
    sampler = XTC(**knobs)
    sampler.chance = lambda probability, history, purpose: True
    sampler.begin(0, lambda token: LETTERS[token], frozenset([3]))
    return sampler


def kept(sampler, *p: float) -> list[int]:
    """The tokens left of a row with these probabilities."""
    return [token for token, score in enumerate(sampler.apply(torch.tensor([p]).log(), [[0]])[0]) if score > REMOVED]


def test_a_single_likely_token_stays():
    assert kept(always(), 0.85, 0.09, 0.03, 0.03) == [0, 1, 2, 3]


def test_of_several_likely_tokens_the_least_likely_and_all_unlikely_ones_stay():
    assert kept(always(), 0.5, 0.4, 0.06, 0.04) == [1, 2, 3]


@pytest.mark.parametrize("p", [(0.1, 0.2, 0.6, 0.1), (0.1, 0.2, 0.1, 0.6)], ids=["line break", "end token"])
def test_a_row_is_unchanged_if_an_exempt_token_would_be_removed(p):
    assert kept(always(), *p) == [0, 1, 2, 3]
    assert len(kept(always(exempt=False), *p)) < 4


def test_a_retained_line_break_exempts_nothing():
    assert kept(always(), 0.6, 0.04, 0.3, 0.06) == [1, 2, 3]


def test_the_probability_is_sampled_only_if_it_matters():
    flips, sampler = [], always()
    sampler.chance = lambda probability, history, purpose: flips.append(history) or False
    sampler.apply(torch.tensor([[0.9, 0.05, 0.05, 0.0], [0.5, 0.4, 0.1, 0.0], [0.2, 0.2, 0.6, 0.0]]).log(),
                  [[0], [1], [2]])
    assert flips == [[1]]


def test_draft_and_target_rows_of_one_history_are_treated_alike():
    speculation = LaneConfig("speculative", {}, [("draft_model", {"depth": 2}), ("rejection", {}), ("xtc", {}), AT_ONE])
    models = {"target": TableModel(LETTERS, ENDS, seed=3), "draft": TableModel(LETTERS, ENDS, seed=4)}
    found = law(assemble(speculation), models, [0, 1], 2)
    assert distance(found, product_law(models["target"], [0, 1], 2, mixture(0.1, 0.5, {2, 3}))) < EXACT
