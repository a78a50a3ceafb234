"""Recall against cache size: every policy on questions about facts in the prompt.

The first token of an answer comes from the prefill, which attends to the whole prompt, so needles are numbers of four
digits.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from playground.bench.caches.caches_defaults import ANSWER, GRADE, TASKS
from playground.bench.caches.policy_configs import FULL, default_points, full_cache, policies
from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import score
from playground.bench.effects.eviction_effect import needles
from playground.bench.report_text import Rows
from playground.bench.survey.results import Score, score_text
from playground.bench.survey.survey import Answer, Entrant, prompt_of, survey
from playground.contract import find, make
from playground.lane_fields import LaneConfig
from playground.questions.questions import Question, ask

if TYPE_CHECKING:
    from playground.decoding.models import Models

Length = Callable[[Question], int]


@dataclass(frozen=True)
class BudgetedEntrant(Entrant):
    """A policy with the same token budget for every prompt. Knobs that are shares of the prompt differ between prompts.
    """

    policy: str
    tokens: int
    length: Length

    def config_for(self, question: Question) -> LaneConfig:
        return LaneConfig(
            "greedy", extras=[(self.policy, find(self.policy).knobs_for_budget(self.tokens, self.length(question)))]
        )


@dataclass(frozen=True)
class Measured:
    """One entrant's result on one task."""

    task: str
    entrant: str
    series: str  # its line in the figure
    share: float  # cache size after the prefill, as a share of a full cache, mean over the questions
    score: Score | None
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score._asdict() if self.score else None}


def questions(count: int, seed: int) -> list[Question]:
    """`count` questions of each task."""
    return [*needles(count, seed), *ask("chat", count, seed, grade=GRADE)]


@dataclass(frozen=True)
class RecallTrial:
    """All policies, or some by name, on the same questions.

    `budgets` are tokens of a prompt, for policies with a token budget.
    """

    models: Models
    questions: Sequence[Question]
    budgets: Sequence[int]
    seed: int
    only: Sequence[str] = ()

    def entrants(self) -> list[Entrant]:
        chosen = policies(self.only)
        return [Entrant(FULL, LaneConfig("greedy")), *(entrant for cls in chosen for entrant in self._of(cls.name))]

    def _of(self, policy: str) -> list[Entrant]:
        cls = find(policy)
        if cls.knobs_for_budget(self.budgets[0], self.budgets[0]) is None:
            return [Entrant(point.name, point.config) for point in default_points(cls)]
        return [
            BudgetedEntrant(
                f"{policy}, {tokens}", LaneConfig("greedy", extras=[(policy, {})]), policy, tokens, self._lengths
            )
            for tokens in self.budgets
        ]

    @property
    def _lengths(self) -> Length:
        return lambda question: length_of(question, self.models)

    def answers(self) -> Iterator[Answer]:
        from playground.decoding.limits import Limits  # late, since it imports torch
        return survey(self.models, self.entrants(), self.questions, 1, Limits(self.seed, ANSWER), warm_up=False)

    def measured(self, answers: Iterable[Answer]) -> list[Measured]:
        answers = list(answers)
        return [
            self._measured(
                task,
                entrant,
                [answer for answer in answers if answer.entrant == entrant.name and answer.question.task == task],
            )
            for task in TASKS
            for entrant in self.entrants()
        ]

    def _measured(self, task: str, entrant: Entrant, answers: list[Answer]) -> Measured:
        failure = next((answer.failure for answer in answers if answer.failure), "")
        share = fmean(self.share(entrant, answer.question) for answer in answers) if answers else math.nan
        return Measured(task, entrant.name, entrant.name.split(",")[0], share, score(answers, entrant.name), failure)

    def share(self, entrant: Entrant, question: Question) -> float:
        """Cache size after the prefill of a question, as a share of the full cache: by tokens for a token budget,
        otherwise by the bytes the policy promises.
        """
        length = length_of(question, self.models)
        if isinstance(entrant, BudgetedEntrant):
            return min(1.0, entrant.tokens / length)
        from playground.decoding.fitted_weights import find_all  # late, since it imports torch
        added, target = entrant.config.extras, self.models.target
        if not added:
            return 1.0
        policy = make(added[0][0], **added[0][1])
        find_all([policy], {"target": target})  # what was fitted may decide how much is held
        return policy.expected_share(full_cache(target, length))


def length_of(question: Question, models: Models) -> int:
    """Length of a question's prompt in tokens."""
    return len(prompt_of(question, models).encode(models.target))


def chart(task: str, measured: Iterable[Measured]) -> Chart:
    """Score against cache size, a line per policy, on a logarithmic axis."""
    found = [each for each in measured if each.task == task and each.score]
    full = {each.entrant: each.score.mean for each in found if each.entrant == FULL}
    lines = {name: sorted((each for each in found if each.series == name), key=lambda each: each.share)
             for name in dict.fromkeys(each.series for each in found if each.entrant != FULL)}
    low = math.floor(math.log2(min(each.share for each in found)))
    return Chart(
        f"Score on {task}",
        "cache size, as a share of the full cache",
        "score",
        [f"{100 * 2.0**power:.3g} %" for power in range(low, 1)],
        {name: [(each.score.mean, each.score.error or 0.0) for each in line] for name, line in lines.items()},
        full,
        at={name: [math.log2(each.share) - low for each in line] for name, line in lines.items()},
    )


def rows(measured: Iterable[Measured]) -> Rows:
    """A table: a row per entrant, two columns per task."""
    by_task = {(each.entrant, each.task): each for each in measured}
    header = ["policy", *(column for task in TASKS for column in (f"cache size, {task}", f"score, {task}"))]
    names = dict.fromkeys(name for name, _ in by_task)
    return [header, *([name, *(cell for task in TASKS for cell in _cells(by_task[name, task]))] for name in names)]


def _cells(each: Measured) -> list[str]:
    share = "-" if math.isnan(each.share) else f"{each.share:.1%}"
    return [share, "failed" if each.failure else score_text(each.score)]
