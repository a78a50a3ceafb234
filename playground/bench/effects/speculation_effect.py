"""Speculative decoding writes the same text in less time. Leviathan et al. 2023, arXiv 2211.17192."""
from __future__ import annotations

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import PLAIN, answers_of
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.spread import Spread
from playground.bench.survey.results import table, time_ratio
from playground.bench.survey.survey import Answer, Entrant
from playground.lane_fields import LaneConfig
from playground.questions.questions import ask

DRAFTED, LOOKED_UP = "draft model", "prompt lookup"
# required speed-up over the plain lane, by task
AIMS = {"records": (DRAFTED, 2.2), "programs": (DRAFTED, 2.2), "edit": (LOOKED_UP, 4.0)}


def speculation(count: int = 10, seed: int = 1) -> Effect:
    """Two drafters compared with the plain lane by wall clock."""
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        speculative(DRAFTED, "draft_model", depth=12),
        speculative(LOOKED_UP, "prompt_lookup", depth=20, n_max=3),
    ]
    aims = ", ".join(f"{aim:g} times on {task} ({name})" for task, (name, aim) in AIMS.items())
    return Effect(
        "speculation", "Speculative decoding generates the plain lane's text in a fraction of its time.",
        f"Speed-up over the plain lane, median of the rounds: {aims}; the same tokens everywhere.", entrants,
        [question for task in AIMS for question in ask(task, count, seed)], 330, shown, chart, timed=True)


def speculative(name: str, drafter: str, **knobs: int) -> Entrant:
    return Entrant(name, LaneConfig("speculative", extras=[(drafter, knobs), ("greedy_match", {})]))


def shown(answers: list[Answer]) -> EffectVerdict:
    faster = {
        f"{name}, {task}, speed-up": speed_up(answers, name, task)
        for task in AIMS
        for name in (DRAFTED, LOOKED_UP)
    }
    reached = [
        (found := faster[f"{name}, {task}, speed-up"]) is not None and found.median >= aim
        for task, (name, aim) in AIMS.items()
    ]
    same = {
        f"{row.entrant}, {row.task}, share of texts that are the same": row.same_text / row.compared
        if row.compared
        else None
        for row in table(answers)
        if row.entrant != PLAIN
    }
    return EffectVerdict(all(reached) and all(share == 1 for share in same.values()), faster | same)


def speed_up(answers: list[Answer], name: str, task: str) -> Spread | None:
    """Seconds of the plain lane divided by those of another, within each round."""
    return time_ratio(answers_of(answers, PLAIN, task), answers_of(answers, name, task))


def chart(answers: list[Answer]) -> Chart:
    found = {name: [speed_up(answers, name, task) for task in AIMS] for name in (DRAFTED, LOOKED_UP)}
    series = {name: [(each.median, 0.0) if each else None for each in spreads] for name, spreads in found.items()}
    return Chart(
        "Speed-up over the plain lane", "", "speed-up", list(AIMS), series, {"plain lane": 1.0}, bars=True
    )
