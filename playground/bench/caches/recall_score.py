"""How much is remembered with how much room: every policy on questions about what a prompt said.

The first token of an answer comes from the prompt's own forward, which saw everything, so needles are numbers of four
digits.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from playground.bench.caches.caches_defaults import ANSWER, GRADE, TASKS
from playground.bench.caches.policy_configs import FULL, full_cache, own_sizes, policies
from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import score
from playground.bench.effects.eviction_effect import needles
from playground.bench.questions import Question, ask
from playground.bench.results import Score, told
from playground.bench.survey import Answer, Entrant, prompt_of, survey
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig

if TYPE_CHECKING:
    from playground.decoding.session import Models

Length = Callable[[Question], int]


@dataclass(frozen=True)
class BudgetedEntrant(Entrant):
    """A policy that holds so many tokens of every prompt, which takes other knobs for other prompts where they are
    shares.
    """

    policy: str
    tokens: int
    length: Length

    def recipe_for(self, question: Question) -> LaneConfig:
        return LaneConfig(
            "greedy", extras=[(self.policy, find(self.policy).holding(self.tokens, self.length(question)))]
        )


@dataclass(frozen=True)
class Measured:
    """What one entrant came to on one task."""

    task: str
    entrant: str
    series: str  # the line of the figure it belongs to
    share: float  # of a full cache that it may hold once the prompt was read, mean over the questions
    score: Score | None
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score._asdict() if self.score else None}


def questions(count: int, seed: int) -> list[Question]:
    """So many of each task."""
    return [*needles(count, seed), *ask("chat", count, seed, grade=GRADE)]


@dataclass(frozen=True)
class RecallTrial:
    """All policies on the same questions. budgets: tokens of a prompt that those hold which go by tokens."""

    models: Models
    questions: Sequence[Question]
    budgets: Sequence[int]
    seed: int

    def entrants(self) -> list[Entrant]:
        return [Entrant(FULL, LaneConfig("greedy")), *(entrant for cls in policies() for entrant in self._of(cls.name))]

    def _of(self, policy: str) -> list[Entrant]:
        cls = find(policy)
        if cls.holding(self.budgets[0], self.budgets[0]) is None:
            return [Entrant(point.name, point.recipe) for point in own_sizes(cls)]
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
        from playground.decoding.session import Limits  # not before: it brings torch along
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
        """Of the full cache that an entrant may look at once it read a question: by tokens where it goes by them, by
        the bytes it promises where not.
        """
        length = length_of(question, self.models)
        if isinstance(entrant, BudgetedEntrant):
            return min(1.0, entrant.tokens / length)
        added = entrant.recipe.extras
        return make(added[0][0], **added[0][1]).promise(full_cache(self.models.target, length)) if added else 1.0


def length_of(question: Question, models: Models) -> int:
    """Tokens of a question as the model reads it."""
    return len(prompt_of(question, models).encode(models.target))


def chart(task: str, measured: Iterable[Measured]) -> Chart:
    """Score against room, a line for each policy; room doubles from place to place."""
    found = [each for each in measured if each.task == task and each.score]
    full = {each.entrant: each.score.mean for each in found if each.entrant == FULL}
    lines = {name: sorted((each for each in found if each.series == name), key=lambda each: each.share)
             for name in dict.fromkeys(each.series for each in found if each.entrant != FULL)}
    low = math.floor(math.log2(min(each.share for each in found)))
    return Chart(
        f"Score on {task}",
        "room, as a share of the full cache",
        "score",
        [f"{100 * 2.0**power:.3g} %" for power in range(low, 1)],
        {name: [(each.score.mean, each.score.error or 0.0) for each in line] for name, line in lines.items()},
        full,
        at={name: [math.log2(each.share) - low for each in line] for name, line in lines.items()},
    )


def rows(measured: Iterable[Measured]) -> list[list[str]]:
    """A table: the entrants downwards, the tasks across."""
    measured = list(measured)
    of = {(each.entrant, each.task): each for each in measured}
    head = ["policy", *(column for task in TASKS for column in (f"room, {task}", f"score, {task}"))]
    return [
        head,
        *(
            [name, *(cell for task in TASKS for cell in _cells(of[name, task]))]
            for name in dict.fromkeys(each.entrant for each in measured)
        ),
    ]


def _cells(each: Measured) -> list[str]:
    return [f"{each.share:.1%}", "failed" if each.failure else told(each.score)]
