"""Evicted tokens cannot be recalled. H2O, arXiv 2306.14048; SnapKV, 2404.14469; attention sinks, 2309.17453; KIVI,
2402.02750.
"""
from __future__ import annotations

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import (
    NEARLY,
    PLAIN,
    SURE,
    against,
    levels,
    not_worse,
    score,
    significantly_worse,
    value,
)
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.survey.survey import Answer, Entrant
from playground.contract import find
from playground.lane_fields import LaneConfig
from playground.questions.questions import Question, ask

# budgets in tokens of the prompt
BUDGETS, POLICIES, KEPT = (16, 32, 64, 128, 256), ("h2o", "snapkv", "sink_window"), "kivi, 4 bits"


def eviction(count: int = 24, seed: int = 1) -> Effect:
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        Entrant(KEPT, LaneConfig("greedy", extras=[("kivi", {"bits": "4"})])),
        *(
            Entrant(
                evicting(policy, budget),
                LaneConfig("greedy", extras=[(policy, find(policy).knobs_for_budget(budget, budget))]),
            )
            for policy in POLICIES
            for budget in BUDGETS
        ),
    ]
    return Effect(
        "eviction",
        "Below some budget an evicting cache loses the needle and the score falls; a quantised cache, which evicts "
        "nothing, keeps it.",
        f"Each policy at {BUDGETS[0]} tokens scores lower than the full cache, and lower than itself at {BUDGETS[-1]} "
        f"(sign tests, p < {SURE}); the quantised cache loses at most {NEARLY}.",
        entrants,
        needles(count, seed),
        16,
        shown,
        chart,
    )


def needles(count: int, seed: int) -> list[Question]:
    """Needles are numbers of four digits, since the first token of an answer comes from the prefill, which attends to
    the whole prompt.
    """
    return [question for question in ask("needle", 4 * count, seed, grade=4) if question.answer.isdigit()][:count]


def evicting(policy: str, budget: int) -> str:
    return f"{policy}, {budget}"


def shown(answers: list[Answer]) -> EffectVerdict:
    ends = [(evicting(policy, BUDGETS[0]), evicting(policy, BUDGETS[-1])) for policy in POLICIES]
    lost = {f"{small} against {PLAIN}": against(answers, small, PLAIN) for small, _ in ends}
    fell = {f"{small} against {large}": against(answers, small, large) for small, large in ends}
    control = against(answers, KEPT, PLAIN)
    holds = all(map(significantly_worse, [*lost.values(), *fell.values()])) and not_worse(control)
    least = {f"{policy}, smallest budget that loses at most {NEARLY}": enough(answers, policy) for policy in POLICIES}
    return EffectVerdict(
        holds, {PLAIN: score(answers, PLAIN), f"{KEPT} against {PLAIN}": control, **lost, **fell, **least}
    )


def enough(answers: list[Answer], policy: str) -> int | None:
    """The smallest budget from which on at most NEARLY is lost; None if even the largest is too small."""
    near = [not_worse(against(answers, evicting(policy, budget), PLAIN)) for budget in BUDGETS]
    return next((budget for index, budget in enumerate(BUDGETS) if all(near[index:])), None)


def chart(answers: list[Answer]) -> Chart:
    series = {policy: [value(score(answers, evicting(policy, budget))) for budget in BUDGETS] for policy in POLICIES}
    return Chart(
        "Needle in a passage of 32 sentences",
        "budget in tokens",
        "score",
        list(map(str, BUDGETS)),
        series,
        levels(answers, (PLAIN, KEPT)),
    )
