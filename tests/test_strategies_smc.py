"""Weighted and resampled particles, against their target distribution."""
from __future__ import annotations

import pytest
from pairs import pair
from tables import distance

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.model import ForwardInput
from playground.events import Branches, Figure, Forward
from support.laws import EXACT, WRONG
from support.particles import SKEWED, coins, legal_chances, steered, weighed_law, zeros
from support.search_runs import run


@pytest.mark.oracle("smc")
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("particles", [1, 2])
def test_weighted_answers_are_unbiased_estimates_of_the_models_probabilities(particles, threshold):
    found = weighed_law(LaneConfig("smc", {"particles": particles, "threshold": threshold}, [SKEWED]), coins(2, 0.3))
    assert distance(found, legal_chances(0.3)) < EXACT


@pytest.mark.refuses("smc")
@pytest.mark.parametrize("wrong", ["keeps weights after drawing anew", "forgets the legal mass"])
def test_wrong_weights_are_detected(wrong, monkeypatch):
    smc = find("smc")
    if wrong.startswith("keeps"):
        copied = smc._copied

        def kept(self, lm, texts):
            heaviest = max(particle.weight for particle in texts)
            copies = copied(self, lm, texts)
            for copy in copies:
                copy.weight = heaviest
            return copies

        monkeypatch.setattr(smc, "_copied", kept)
    else:
        step = smc._step

        def blind(self, lm, particle, rows):
            choice = step(self, lm, particle, rows)
            particle.weight = 0.0
            return choice

        monkeypatch.setattr(smc, "_step", blind)
    found = weighed_law(LaneConfig("smc", {"particles": 2, "threshold": 1.0}, [SKEWED]), coins(2, 0.3))
    assert distance(found, legal_chances(0.3)) > WRONG


@pytest.mark.slow
def test_one_particle_equals_a_plain_mask_and_more_approach_the_model():
    """A mask gives 1/2, the model's own distribution 1/3."""
    assert zeros(1, 0.0) == pytest.approx(1 / 2)
    by_importance = [zeros(particles, 0.0) for particles in (1, 2, 3)]
    assert by_importance == sorted(by_importance, reverse=True) and 1 / 3 < by_importance[-1] < 0.42
    assert 1 / 3 < zeros(2, 1.0) < 1 / 2


def test_if_all_tokens_are_allowed_weights_stay_equal_and_nothing_is_resampled():
    lane = steered(
        LaneConfig("smc", {"particles": 5, "threshold": 1.0}, [("regex", {"pattern": "[01]{3}"})]), coins(3), Draws(0)
    )
    figures = [
        event.data["series"]["effective sample size"]
        for event in lane.recorded
        if isinstance(event, Figure) and event.name == "effective sample size"
    ]
    assert figures == pytest.approx([5.0] * 4) and not [
        event for event in lane.recorded if isinstance(event, Branches) and event.dropped
    ]


def test_a_resampled_particle_continues_like_a_separate_run():
    """On a real network: rows of copies equal a fresh forward over the whole text."""
    model, config = (
        pair("llama").target,
        LaneConfig("smc", {"particles": 6, "threshold": 1.0}, [("regex", {"pattern": "(ab|cd|efg){2,9}"})]),
    )
    recorded = run(config, model, [54, 71, 9], 10, seed=4)
    assert any(event.dropped for event in recorded.of(Branches)), "nothing was drawn anew, so this says nothing"
    text = recorded.texts()[0]
    store = model.new_store()
    tokens = [54, 71, 9, *text]
    rows = model.forward([ForwardInput(store, tokens, list(range(-1, len(tokens) - 1)))])[0][0].log_softmax(-1)
    expected = [float(rows[2 + i, token]) for i, token in enumerate(text)]
    assert recorded.lane.main.logprobs == pytest.approx(expected, abs=1e-6)


def test_a_step_of_all_particles_takes_one_forward():
    lane = steered(LaneConfig("smc", {"particles": 7}, [("regex", {"pattern": "0{3}|1[01]{2}"})]), coins(3), Draws(1))
    assert len([event for event in lane.recorded if isinstance(event, Forward)]) == len(lane.main.written)
