"""Texts under a grammar, selected without replacement: which survive, with what weight, and that the
distribution is right whatever is dropped.
"""
from __future__ import annotations

import math

import pytest
import torch
from pairs import pair
from tables import distance

from playground.algorithms.search.particle_filter import mean
from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.events import Branches, Figure, Forward
from strategies.search import smc_steering
from strategies.search.smc_steering import survival_probabilities, systematic_outcomes
from support.laws import EXACT, WRONG
from support.particles import SKEWED, coins, legal_chances, steered, weighed_law
from support.search_runs import run

LETTERS = ("regex", {"pattern": "(ab|cd|efg){2,9}"})
TWINS = ("regex", {"pattern": "00|11"})


def steering(particles: int, n_beam: int, grammar=TWINS) -> LaneConfig:
    return LaneConfig("smc_steering", {"particles": particles, "n_beam": n_beam}, [grammar])


SHARES = torch.tensor([0.5, 0.2, 0.1, 0.08, 0.07, 0.05], dtype=torch.float64)


# --- survivors ---

@pytest.mark.parametrize("count", range(1, 6))
def test_survival_probabilities_are_capped_multiples_of_the_shares_and_sum_to_the_capacity(count):
    stay = survival_probabilities(SHARES, count)
    assert float(stay.sum()) == pytest.approx(count) and bool((stay <= 1).all())
    ratios = (stay / SHARES)[stay < 1 - 1e-9]
    assert bool((ratios - ratios[0]).abs().max() < 1e-9) and bool(
        (SHARES[stay > 1 - 1e-9] * ratios[0] >= 1 - 1e-9).all()
    )


def test_with_enough_capacity_all_particles_of_positive_weight_survive():
    assert survival_probabilities(torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64), 2).tolist() == [1, 1, 0]
    assert survival_probabilities(torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64), 3).tolist() == [1, 1, 0]


@pytest.mark.parametrize("stay", [[0.5] * 4, [0.9, 0.6, 0.5], [0.2, 0.3, 0.1, 0.4], [0.75, 0.75, 0.75, 0.75], []])
def test_each_particle_survives_with_its_probability_and_at_most_once(stay):
    outcomes = systematic_outcomes(stay)
    assert sum(p for p, _ in outcomes) == pytest.approx(1)
    for _, staying in outcomes:
        assert len(staying) == len(set(staying)) == round(sum(stay))
    assert [sum(p for p, staying in outcomes if i in staying) for i in range(len(stay))] == pytest.approx(stay)


# --- the distribution ---

def twin_chances(ones: float) -> dict:
    zero, one = legal_chances(ones), coins(2).tokens.encode
    return {
        text: p
        for text, p in {**zero, **{(*one("11"), *sorted(coins(2).end_ids)): ones**2}}.items()
        if len(set(text[:2])) == 1
    }


@pytest.mark.slow
@pytest.mark.oracle("smc_steering")
@pytest.mark.parametrize(
    "particles, n_beam, grammar, expected",
    [
        (1, 2, SKEWED, legal_chances(0.3)),
        (1, 2, TWINS, twin_chances(0.3)),
        (1, 3, TWINS, twin_chances(0.3)),
        (2, 2, TWINS, twin_chances(0.3)),
    ],
)
def test_weighted_answers_are_unbiased_estimates_of_the_models_probabilities(
    particles, n_beam, grammar, expected
):
    assert distance(weighed_law(steering(particles, n_beam, grammar), coins(2, 0.3)), expected) < EXACT


def keeps_the_heaviest(shares, count):
    best = shares.argsort(descending=True)[:count]
    return torch.zeros_like(shares).scatter(0, best, 1.0).masked_fill(shares == 0, 0)


@pytest.mark.refuses("smc_steering")
@pytest.mark.parametrize(
    "wrong", ["keeps the heaviest only", "all that stay weigh the mean", "copies weigh as much as their text"]
)
def test_a_wrong_survival_rule_is_detected(wrong, monkeypatch):
    cls = find("smc_steering")
    if wrong.startswith("keeps"):
        monkeypatch.setattr(smc_steering, "survival_probabilities", keeps_the_heaviest)
    elif wrong.startswith("all"):
        monkeypatch.setattr(cls, "_threshold", lambda self, texts, stay: mean(texts))
    else:
        copies = cls._copies

        def heavy(self, lm, particle, share):
            return copies(self, lm, particle, share + math.log(self.n_beam) if particle.grows else share)

        monkeypatch.setattr(cls, "_copies", heavy)
    assert distance(weighed_law(steering(1, 2, SKEWED), coins(2, 0.3)), legal_chances(0.3)) > WRONG


@pytest.mark.parametrize("particles", [1, 4])
def test_with_one_continuation_each_it_is_smc_without_resampling(particles):
    model = pair("llama").target
    for seed in range(3):
        recorded = run(steering(particles, 1, LETTERS), model, [54, 71, 9], 10, seed=seed)
        plain = run(
            LaneConfig("smc", {"particles": particles, "threshold": 0.0}, [LETTERS]), model, [54, 71, 9], 10, seed=seed
        )
        assert recorded.lane.tokens == plain.lane.tokens and not dropped(recorded.of(Branches))


def dropped(branches: list[Branches]) -> list[int]:
    return [number for event in branches for number in event.dropped]


# --- events and costs ---

def test_as_many_texts_continue_as_the_capacity_and_counts_add_up():
    lane = steered(steering(4, 3, SKEWED), coins(2, 0.3), Draws(3))
    kept = [
        event.data for event in lane.recorded if isinstance(event, Figure) and event.name == "particles that survive"
    ]
    assert [data["series"]["certain"] + data["series"]["random"] for data in kept] == [4] * len(kept)
    assert kept[0]["lines"]["continuations"] == 12 and all(data["lines"]["continuations"] >= 4 for data in kept)


def test_all_continuations_of_a_step_take_one_forward():
    lane = steered(steering(5, 3, SKEWED), coins(2), Draws(1))
    assert len([event for event in lane.recorded if isinstance(event, Forward)]) == len(lane.main.written)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_surviving_text_continues_like_a_separate_run(architecture):
    model, prompt = pair(architecture).target, [54, 71, 9]
    recorded = run(steering(3, 3, LETTERS), model, prompt, 10, seed=4)
    assert dropped(recorded.of(Branches)), "nothing was dropped, so this says nothing"
    text = recorded.texts()[0]
    tokens = [*prompt, *text]
    rows = model.forward([ForwardInput(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))])[0][0].log_softmax(
        -1
    )
    assert recorded.lane.main.logprobs == pytest.approx(
        [float(rows[2 + i, token]) for i, token in enumerate(text)], abs=1e-6
    )
