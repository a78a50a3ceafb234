"""A passage overrides memorised facts. Context-aware decoding, arXiv 2305.14739; AdaCAD, arXiv 2409.07394."""
from __future__ import annotations

import random

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import (
    NEARLY,
    PLAIN,
    SURE,
    against,
    not_worse,
    score,
    significantly_better,
    value,
)
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.survey.survey import Answer, Entrant
from playground.lane_fields import LaneConfig
from playground.questions.questions import from_item
from playground.questions.user_questions import exactly

AGAINST, ALIKE, MEMORY = "passage against memory", "passage as in memory", "memory alone"
CONTRASTS = {"cad 0.5": ("cad", {"alpha": 0.5}), "cad 1": ("cad", {"alpha": 1.0}), "adacad": ("adacad", {})}


def context(count: int = 60, seed: int = 1) -> Effect:
    """Facts that the model has memorised, with passages that contradict them and passages that agree."""
    from playground.questions.world import context_qa  # late, since importing the world reads its plots
    rng, makers = random.Random(seed), {AGAINST: context_qa.contradicting, ALIKE: context_qa.agreeing}
    questions = [exactly(from_item(make(rng)), task) for task, make in makers.items() for _ in range(count)]
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        Entrant(MEMORY, LaneConfig("greedy", extras=[("cad", {"alpha": -1.0})])),
        *(Entrant(name, LaneConfig("greedy", extras=[extra])) for name, extra in CONTRASTS.items()),
    ]
    return Effect(
        "context",
        "Context-aware decoding follows a passage that contradicts the model's memory, and costs nothing if both "
        "agree.",
        "One of the contrasts scores higher than greedy decoding on passages that contradict memory (sign test, "
        f"p < {SURE}) and loses at most {NEARLY} on passages that agree with it.",
        entrants,
        questions,
        16,
        shown,
        chart,
    )


def shown(answers: list[Answer]) -> EffectVerdict:
    gains, costs = ({name: against(answers, name, PLAIN, task) for name in CONTRASTS} for task in (AGAINST, ALIKE))
    means = {f"{name}, {task}": score(answers, name, task) for name in (PLAIN, MEMORY) for task in (AGAINST, ALIKE)}
    numbers = {
        f"{name} against {PLAIN}, {task}": gaps[name]
        for name in CONTRASTS
        for task, gaps in ((AGAINST, gains), (ALIKE, costs))
    }
    holds = any(significantly_better(gains[name]) and not_worse(costs[name]) for name in CONTRASTS)
    return EffectVerdict(holds, means | numbers)


def chart(answers: list[Answer]) -> Chart:
    series = {
        name: [value(score(answers, name, task)) for task in (AGAINST, ALIKE)] for name in (PLAIN, MEMORY, *CONTRASTS)
    }
    return Chart("Score with a passage", "", "score", [AGAINST, ALIKE], series, bars=True)
