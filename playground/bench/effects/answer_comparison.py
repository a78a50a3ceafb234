"""What every rule reads of the answers: scores, and two entrants held against each other."""
from __future__ import annotations

from collections.abc import Iterable

from playground.bench.charts import Value
from playground.bench.results import Paired, Score, paired, scores, select
from playground.bench.survey import Answer

PLAIN = "greedy"
NEARLY = 0.05  # of the score: what may be lost where nothing should be
SURE = 0.05  # of a sign test: how unlikely chance must be


def of(answers: Iterable[Answer], entrant: str, task: str | None = None) -> list[Answer]:
    """An entrant's answers, to one task or to all."""
    return [answer for answer in select(answers, entrant) if task in (None, answer.question.task)]


def score(answers: Iterable[Answer], entrant: str, task: str | None = None) -> Score | None:
    found = list(scores(of(answers, entrant, task)).values())
    return Score.of(found) if found else None


def against(answers: Iterable[Answer], one: str, other: str, task: str | None = None) -> Paired | None:
    return paired(of(answers, one, task), of(answers, other, task))


def keeps(gap: Paired | None) -> bool:
    """Whether next to nothing is lost."""
    return gap is not None and gap.mean >= -NEARLY


def wins(gap: Paired | None) -> bool:
    return gap is not None and gap.mean > 0 and gap.p < SURE


def loses(gap: Paired | None) -> bool:
    return gap is not None and gap.mean < 0 and gap.p < SURE


def value(found: Score | None) -> Value:
    """As a chart takes it."""
    return (found.mean, found.error or 0.0) if found else None


def levels(answers: list[Answer], names: Iterable[str]) -> dict[str, float]:
    """Mean scores that a chart shows beside its series."""
    return {name: found.mean for name in names if (found := score(answers, name))}
