"""The effect of switched parts: its rule on answers with and without it, and its parts as the rule finds them."""
from __future__ import annotations

from functools import cache

import pytest

from playground.bench.effects.answer_comparison import PLAIN
from playground.bench.effects.intervention_effect import (
    ACTIVE,
    AS_ACTIVE,
    DIGIT_FEATURES,
    NAMED,
    NUMBERS,
    OTHERS,
    interventions,
    switched,
)
from playground.bench.survey.survey import Answer
from playground.decoding.fitted_weights import BUNDLED_FITTED
from playground.engine.checkpoint.catalogue import BUNDLED_MODELS

EFFECT = interventions(count=12)
ABSENT = {
    "arithmetic does not suffer": {},
    "other features harm as much": {(NAMED, NUMBERS): 1.0, (OTHERS, NUMBERS): 1.0},
    "features as active harm as much": {(NAMED, NUMBERS): 1.0, (ACTIVE, NUMBERS): 1.0},
    "questions in words suffer as well": {(NAMED, NUMBERS): 1.0, (NAMED, "context_qa"): 1.0},
}


def verdict(losses: dict[tuple[str, str], float]) -> bool:
    """Whether it is shown if entrants lose these shares of the questions of a task; greedy is always right."""
    answers = [
        Answer(entrant.name, number, question, 1, seed=0, token_ids=[1], seconds=1.0,
               score=float(number % 12 >= 12 * losses.get((entrant.name, question.task), 0.0)))
        for number, question in enumerate(EFFECT.questions) for entrant in EFFECT.entrants
    ]
    return EFFECT.judge(answers).shown


def test_it_is_shown_if_only_the_named_features_and_only_numbers_suffer():
    assert verdict({(NAMED, NUMBERS): 1.0, (OTHERS, NUMBERS): 0.25}) and EFFECT.entrants[0].name == PLAIN


@pytest.mark.parametrize("losses", ABSENT.values(), ids=list(ABSENT))
def test_it_is_not_shown_otherwise(losses):
    assert not verdict(losses)


@cache
def all_digits() -> tuple[int, ...]:
    """Features of the bundled autoencoder whose sixteen strongest tokens are digits, by the files alone."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODELS / "pocket" / "tokenizer.json"))
    examples = load_file(BUNDLED_FITTED / "sae_features-pocket.safetensors")["examples"].tolist()
    return tuple(number for number, row in enumerate(examples) if min(row) >= 0 and all(
        tokenizer.decode([token]).strip().isdigit() for token in row))


def test_features_of_digits_are_those_that_the_rule_finds_and_the_others_are_none_of_them():
    assert all_digits() == DIGIT_FEATURES
    others = {int(name.split()[1]) for name in switched(1)[OTHERS].split(", ")}
    assert len(others) == len(DIGIT_FEATURES) and others.isdisjoint(DIGIT_FEATURES)


def test_the_features_as_active_are_those_that_the_rule_finds():
    import torch

    import playground
    from playground.bench.effects.active_features import as_active, mean_activity
    from playground.contract import make
    from playground.decoding import fitted_weights
    from playground.questions.world.show import items
    from playground.training.calibration import answered
    model = playground.load("pocket").target
    weights = fitted_weights.find(make("sae_features"), {"target": model})
    texts = [answered(model.tokens, item) for item in items("arithmetic", 60, 2, held_out=False)]
    with torch.inference_mode():
        activity = mean_activity(model, weights, texts)
    assert as_active(activity, DIGIT_FEATURES) == AS_ACTIVE and not set(AS_ACTIVE) & set(DIGIT_FEATURES)
    totals = [float(activity[list(group)].sum()) for group in (DIGIT_FEATURES, AS_ACTIVE)]
    assert totals[1] == pytest.approx(totals[0], rel=0.02)


def test_a_feature_as_active_is_the_nearest_that_is_free_and_the_most_active_chooses_first():
    from torch import tensor

    from playground.bench.effects.active_features import as_active
    assert as_active(tensor([5.0, 4.0, 4.1, 3.0, 1.0, 0.5]), [0, 1]) == (2, 3)
    assert as_active(tensor([1.0, 1.1, 1.05, 9.0]), [0]) == (2,)
