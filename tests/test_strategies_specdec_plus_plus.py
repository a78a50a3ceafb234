"""SpecDec++: where a chain of draft tokens stops, and wrong variants against the same check."""
from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from random import Random

import pytest
import torch
from drafting_runs import recording_rejections
from registry import Collapse
from tables import TableModel, write

from playground.contract import find, make
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.speculative.specdec_plus_plus import SpecDecPlusPlus
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import collapses, first_drafts, speculative_lane
from support.speculative_runs import CHAIN, DropsDoubtful, law_distance, with_drafter

COLLAPSES = {"specdec_plus_plus": [
        *collapses("specdec_plus_plus", most=0),
        Collapse(speculative_lane("specdec_plus_plus", "rejection", AT_ONE, h=1.0, most=3), CHAIN),
        Collapse(speculative_lane("specdec_plus_plus", "rejection", AT_ONE, h=0.0, least=3, most=3), CHAIN),
    ]}


def saying(*chances: float) -> TableModel:
    """After a prompt of one token, its successive argmaxes have these probabilities."""
    def scores(context):
        chance = chances[min(len(context), len(chances)) - 1]
        return torch.tensor([chance, (1 - chance) / 2, (1 - chance) / 2], dtype=torch.float64).log()

    return TableModel("abc", rule=scores)


def first_chain(models: dict, **knobs) -> list[int]:
    """SpecDec++'s first draft, by the draft's own probabilities."""
    config = speculative_lane("specdec_plus_plus", "greedy_match", estimate="draft", **knobs)
    ((_, tree, _),) = first_drafts(config, models, 30)
    return tree.tokens


@pytest.mark.oracle("specdec_plus_plus")
@pytest.mark.parametrize("late, guesses", [(True, 4), (False, 3)])
def test_a_chain_ends_when_its_acceptance_probability_falls_below_one_minus_h(late, guesses):
    """1 - .9 = .1, 1 - .72 = .28, 1 - .36 = .64: the third draft token makes it doubtful; the paper's head would see
    that one draft token later.
    """
    models = {"target": TableModel("abc"), "draft": saying(.9, .8, .5, .99)}
    assert len(first_chain(models, h=0.5, least=1, late=late)) == guesses


def length_by_formula(chances: list[float], h: float, least: int, most: int, late: bool) -> int:
    """The first length at which 1 minus the product of the probabilities exceeds h; judged late, without the last."""
    for length in range(1, most):
        if length >= least and 1 - prod(chances[:length - late]) > h:
            return length
    return most


def check_specdec(drafter: type[SpecDecPlusPlus]) -> None:
    """Length of the first chain, given the acceptance probability of every token."""
    lengths = set()
    for seed in range(30):
        chance = Random(seed)
        chances = [chance.uniform(0.6, 0.99) for _ in range(12)]
        knobs = {"h": chance.uniform(0.1, 0.9), "least": chance.randrange(1, 5), "most": 12, "late": seed % 2 == 0}
        seen, models = [], {"target": TableModel("abc"), "draft": saying(*chances)}
        assembly = with_drafter(drafter(estimate="draft", **knobs), verifier="greedy_match")
        assembly.decoder.verifier = recording_rejections(seen)
        write(assembly, models, [0], Limits(0, 14), Draws(0))
        lengths.add(len(seen[0][0]))
        assert len(seen[0][0]) == length_by_formula(chances, **knobs)
    assert len(lengths) > 5


class GoesByTheLastChance(SpecDecPlusPlus):
    def survival(self, chances):
        return [*chances[:-1], 1.0] if self.late else chances


class ForgetsTheLag(SpecDecPlusPlus):
    """Judges the newest token at once, which the prediction head could not."""

    def survival(self, chances):
        return list(accumulate(chances, mul))


class StopsAtTheLeast(SpecDecPlusPlus):
    """Ignores the minimum draft length."""

    def _should_stop(self, tree):
        return len(tree) > self.least and super()._should_stop(tree)


@pytest.mark.oracle("specdec_plus_plus")
def test_the_length_of_a_chain_equals_the_formula():
    check_specdec(SpecDecPlusPlus)


@pytest.mark.refuses("specdec_plus_plus")
@pytest.mark.parametrize("wrong", [GoesByTheLastChance, ForgetsTheLag, StopsAtTheLeast], ids=lambda cls: cls.__name__)
def test_a_wrong_stop_rule_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_specdec(wrong)


@pytest.mark.parametrize(
    "h, least, most, late, guesses",
    [
        (0.0, 1, 20, True, 2),
        (0.0, 1, 20, False, 1),
        (0.0, 3, 20, True, 3),
        (1.0, 1, 20, True, 20),
        (1.0, 1, 7, False, 7),
        (0.0, 4, 2, True, 2),
    ],
)
def test_h_zero_makes_the_shortest_chain_and_h_one_the_longest(h, least, most, late, guesses):
    models = {"target": TableModel("abc"), "draft": saying(.6)}
    assert len(first_chain(models, h=h, least=least, most=most, late=late)) == guesses


def test_acceptance_estimates_start_at_the_drafts_probability_and_converge_to_observed_rates():
    known = type(make("specdec_plus_plus")._calibration)()
    assert known.chance(0.85) == pytest.approx(0.85)
    for stood in [True] * 30 + [False] * 70:
        known.learn(0.88, stood)
    assert known.chance(0.85) == pytest.approx(0.3, abs=0.02)
    assert known.chance(0.15) == pytest.approx(0.15), "other probabilities are not touched"
    assert known.figure("what was said").data["values"] == [0.3]


class CountsAll(find("specdec_plus_plus")):
    """Counts untested draft tokens as rejected."""

    def observe(self, tree, rows, verdict):
        for node in range(len(tree)):
            self._calibration.learn(tree.confidence[node], node in verdict.kept)


@pytest.mark.parametrize("cls, right", [(find("specdec_plus_plus"), True), (CountsAll, False)], ids=["tested", "all"])
def test_only_tested_draft_tokens_update_the_acceptance_estimate(cls, right):
    """Draft and target agree at six of ten positions, whatever came before, so 60 % of the draft tokens are accepted,
    if only tested ones count.
    """
    certain = torch.eye(3, dtype=torch.float64) * 50
    target, draft = (lambda context: certain[int(len(context) % 10 >= 6)]), (lambda context: certain[0])
    models = {"target": TableModel("abc", rule=target), "draft": TableModel("abc", rule=draft)}
    assembly = with_drafter(cls(h=1.0, most=8, estimate="draft"))
    lane = write(assembly, models, [0], Limits(0, 200), Draws(0))
    known = lane.assembly.decoder.drafter._calibration
    measured = sum(known.accepted) / sum(known.tested)
    assert (abs(measured - 0.6) < 0.05) == right


def test_an_overconfident_draft_is_soon_stopped_early():
    certain = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]], dtype=torch.float64)
    models = {
        "target": TableModel("abc", rule=lambda context: certain[len(context) % 2]),
        "draft": TableModel("abc", rule=lambda context: certain[0]),
    }
    lengths = []

    class Watched(find("specdec_plus_plus")):
        def observe(self, tree, rows, verdict):
            lengths.append(len(tree))
            super().observe(tree, rows, verdict)

    write(with_drafter(Watched(h=0.4, least=1, most=8)), models, [0], Limits(0, 60), Draws(0))
    assert lengths[0] == 8 and max(lengths[5:-2]) <= 3


SHORT = {"h": 0.5, "least": 1, "late": False}


@pytest.mark.oracle("specdec_plus_plus")
@pytest.mark.parametrize("knobs", [SHORT, SHORT | {"late": True}, SHORT | {"estimate": "draft"}], ids=str)
def test_a_chain_may_stop_depending_on_its_draft_tokens_if_all_are_verified(knobs):
    assert law_distance(with_drafter(find("specdec_plus_plus")(**knobs), AT_ONE), tables("ab")) < EXACT


@pytest.mark.slow
@pytest.mark.refuses("specdec_plus_plus")
def test_withdrawing_a_doubtful_draft_token_changes_the_distribution():
    assert law_distance(with_drafter(DropsDoubtful(**SHORT), AT_ONE), tables("ab")) > WRONG
