"""Features that are named after digits are switched off, and as many others. Sparse autoencoders, arXiv 2405.12522;
held neurons, arXiv 2501.02688.

The parts are those of the bundled `pocket`. Of the bundled autoencoder, all features whose sixteen strongest tokens in
the training texts consist of digits, as many random ones, and as many that are as active on arithmetic of the training
wordings (`active_features`: 21.2 in mean norm for 21.3, and 3.3 for the random ones of seed 1); the neurons whose three
names by what they write are digits, with a z-score of 6 or more, the best ones, as many; and the heads whose absence
costs most and least of the loss on 14 other texts.
"""
from __future__ import annotations

import random

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import PLAIN, SURE, against, levels, score, significantly_worse, value
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.survey.survey import Answer, Entrant
from playground.lane_fields import LaneConfig
from playground.questions.questions import ask

TASKS = NUMBERS, WORDS = "arithmetic", "context_qa"
FEATURES, CHANNELS = 1024, 768  # of the autoencoder and the model
DIGIT_FEATURES = (
    16, 70, 92, 120, 130, 134, 149, 254, 271, 278, 348, 353, 361, 383, 400, 453, 457, 483, 539, 548, 587, 592, 622, 637,
    642, 674, 690, 724, 753, 758, 783, 795, 801, 827, 832, 839, 864, 888, 958,
)
AS_ACTIVE = (
    20, 48, 69, 114, 142, 161, 176, 274, 288, 302, 308, 345, 403, 404, 432, 449, 463, 509, 545, 552, 572, 595, 626, 643,
    663, 665, 668, 680, 682, 705, 769, 773, 873, 934, 935, 954, 970, 991, 1009,
)
DIGIT_NEURONS = (
    "0.503", "0.87", "1.204", "3.24", "6.299", "4.680", "1.65", "3.48", "1.224", "3.75", "0.490", "3.368", "1.551",
    "1.184", "1.245", "1.27", "2.630", "3.641", "6.238", "1.725", "0.106", "2.257", "4.766", "6.426", "7.724", "0.718",
    "3.27", "3.604", "0.287", "4.338", "5.39", "3.584", "1.577", "4.597", "7.198", "3.426", "0.462", "2.237", "2.485",
)
HEADS = {"head 0.1": "head 0.1", "head 4.0": "head 4.0"}  # of the largest and the smallest loss
NAMED, OTHERS, ACTIVE = "features of digits", "as many other features", "as many features as active"
NEURONS, OTHER_NEURONS = "neurons of digits", "as many other neurons"


def interventions(count: int = 30, seed: int = 1) -> Effect:
    entrants = [Entrant(PLAIN, LaneConfig("greedy")), *(
        Entrant(name, LaneConfig("greedy", extras=[("switch_part", {"parts": parts})]))
        for name, parts in switched(seed).items()
    )]
    return Effect(
        "interventions",
        "Features of a sparse autoencoder that are named after digits do what their names say: without them the model "
        "calculates worse, and it answers questions in words as before.",
        "With the features of digits off, arithmetic scores lower than without a change, lower than with as many "
        "random other features off, and lower than with as many others off that are as active on arithmetic (sign "
        f"tests, p < {SURE}); questions about passages do not score significantly lower. Neurons and heads are "
        "measured beside them and decide nothing.",
        entrants,
        [question for task in TASKS for question in ask(task, count, seed)],
        96,
        shown,
        chart,
    )


def switched(seed: int) -> dict[str, str]:
    """What each entrant switches off."""
    rng = random.Random(seed)
    features = rng.sample([number for number in range(FEATURES) if number not in DIGIT_FEATURES], len(DIGIT_FEATURES))
    neurons = [f"{name.split('.')[0]}.{rng.randrange(CHANNELS)}" for name in DIGIT_NEURONS]  # of the same layers
    lists = {
        NAMED: [f"feature {number}" for number in DIGIT_FEATURES],
        OTHERS: [f"feature {number}" for number in features],
        ACTIVE: [f"feature {number}" for number in AS_ACTIVE],
        NEURONS: [f"neuron {name}" for name in DIGIT_NEURONS],
        OTHER_NEURONS: [f"neuron {name}" for name in neurons],
    }
    return {name: ", ".join(parts) for name, parts in lists.items()} | HEADS


def shown(answers: list[Answer]) -> EffectVerdict:
    names = list(switched(0))
    gaps = {(name, task): against(answers, name, PLAIN, task) for task in TASKS for name in names}
    beside = {f"{NAMED} against {name}, {NUMBERS}": against(answers, NAMED, name, NUMBERS) for name in (OTHERS, ACTIVE)}
    holds = (
        significantly_worse(gaps[NAMED, NUMBERS]) and all(map(significantly_worse, beside.values()))
        and not significantly_worse(gaps[NAMED, WORDS])
    )
    numbers = {f"{name} off against {PLAIN}, {task}": gap for (name, task), gap in gaps.items()}
    plain = {f"{PLAIN}, {task}": score(answers, PLAIN, task) for task in TASKS}
    return EffectVerdict(holds, plain | beside | numbers)


def chart(answers: list[Answer]) -> Chart:
    names = list(switched(0))
    series = {task: [value(score(answers, name, task)) for name in names] for task in TASKS}
    return Chart("Parts switched off", "part", "score", names, series, levels(answers, (PLAIN,)))
