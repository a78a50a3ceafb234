"""Scores and paired comparisons of entrants, on which the rules of all effects are based."""
from __future__ import annotations

from collections.abc import Iterable

from playground.bench.charts import Value
from playground.bench.survey.results import Paired, Score, paired, scores, select
from playground.bench.survey.survey import Answer

PLAIN = "greedy"
NEARLY = 0.05  # tolerance: a score that is lower by no more counts as not worse
SURE = 0.05  # significance level of the sign tests


def answers_of(answers: Iterable[Answer], entrant: str, task: str | None = None) -> list[Answer]:
    """An entrant's answers, to one task or to all."""
    return [answer for answer in select(answers, entrant) if task in (None, answer.question.task)]


def score(answers: Iterable[Answer], entrant: str, task: str | None = None) -> Score | None:
    found = list(scores(answers_of(answers, entrant, task)).values())
    return Score.of(found) if found else None


def against(answers: Iterable[Answer], one: str, other: str, task: str | None = None) -> Paired | None:
    """Scores of one entrant compared with those of another, question by question."""
    return paired(answers_of(answers, one, task), answers_of(answers, other, task))


def not_worse(gap: Paired | None) -> bool:
    """Whether at most NEARLY is lost."""
    return gap is not None and gap.mean >= -NEARLY


def significantly_better(gap: Paired | None) -> bool:
    return gap is not None and gap.mean > 0 and gap.p < SURE


def significantly_worse(gap: Paired | None) -> bool:
    return gap is not None and gap.mean < 0 and gap.p < SURE


def value(found: Score | None) -> Value:
    """The score as a chart value."""
    return (found.mean, found.error or 0.0) if found else None


def levels(answers: list[Answer], names: Iterable[str]) -> dict[str, float]:
    """Mean scores that a chart shows as levels."""
    return {name: found.mean for name in names if (found := score(answers, name))}
