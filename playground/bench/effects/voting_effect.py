"""A majority vote of sampled answers beats greedy decoding. Self-consistency, Wang et al. 2022, arXiv 2203.11171."""
from __future__ import annotations

import random

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import PLAIN, SURE, against, levels, score, value
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.survey.survey import Answer, Entrant
from playground.lane_fields import LaneConfig
from playground.questions.questions import from_item

POLLS, HEATS, MIDDLE = (8, 16), (0.5, 0.7, 0.9), 3  # texts that vote, temperatures, grade of the problems


def votes(count: int = 60, seed: int = 1) -> Effect:
    """Word problems of the middle grade: greedy decoding fails on some, and most samples are right."""
    from playground.questions.world import arithmetic  # late, since importing the world reads its plots
    rng = random.Random(seed)
    questions = [from_item(arithmetic.problem(rng, MIDDLE, held_out=True)) for _ in range(count)]
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        *(
            Entrant(polled(n, heat), LaneConfig("self_consistency", {"n": n, "temperature": heat}))
            for n in POLLS
            for heat in HEATS
        ),
    ]
    return Effect(
        "votes",
        f"Self-consistency solves more problems of grade {MIDDLE} than greedy decoding.",
        f"One of the {len(POLLS) * len(HEATS)} settings scores higher (sign test, p times the number of settings < "
        f"{SURE}).",
        entrants,
        questions,
        110,
        shown,
        chart,
    )


def polled(n: int, heat: float) -> str:
    return f"{n} votes at {heat:g}"


def shown(answers: list[Answer]) -> EffectVerdict:
    names = [polled(n, heat) for n in POLLS for heat in HEATS]
    gaps = {f"{name} against {PLAIN}": against(answers, name, PLAIN) for name in names}
    holds = any(gap is not None and gap.mean > 0 and gap.p * len(names) < SURE for gap in gaps.values())
    return EffectVerdict(holds, {PLAIN: score(answers, PLAIN), **gaps})


def chart(answers: list[Answer]) -> Chart:
    series = {f"{n} votes": [value(score(answers, polled(n, heat))) for heat in HEATS] for n in POLLS}
    return Chart(
        f"Arithmetic, grade {MIDDLE}",
        "temperature",
        "score",
        [f"{heat:g}" for heat in HEATS],
        series,
        levels(answers, [PLAIN]),
    )
