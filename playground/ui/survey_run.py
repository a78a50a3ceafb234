"""A survey as the page asks for it: what a visitor chose, the questions that come of it, and the work as the worker
serves it.

The worker takes it for a session: one forward at a time, in turn with the runs of other visitors. What it tells are
answers.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

from playground.bench.questions import PROGRAMS, Question, ask
from playground.bench.survey import Answer, Entrant, score, steps
from playground.bench.user_questions import questions_in
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from playground.pocket.world import TASKS
from playground.request_limits import check_text, quoted
from playground.ui.settings import WIDEST, Rules, Settings

MOST_EACH = 10_000  # questions of a task, and rounds; how many answers there may be is in Rules
MOST_LETTERS = 4000  # of a visitor's own questions that a link still carries
LONGEST_NAME = 90  # letters of an entrant's name; a grammar may be a page long


@dataclass
class SurveySettings(Settings):
    """Lanes, models, seed and length as for a run, and questions in the place of a prompt."""

    MOST: ClassVar[int] = WIDEST
    length: int = 64
    tasks: list[str] = field(default_factory=lambda: ["context_qa", "records"])
    count: int = 4  # questions of each task
    repeats: int = 2  # rounds
    own: str = ""  # questions a visitor brought along, as JSON Lines

    @classmethod
    def read(cls, raw: Any) -> SurveySettings:
        choice = super().read(raw)
        choice.tasks = [task for task in TASKS if task in choice.tasks]
        return choice

    def to_code(self) -> str:
        """As for a run; own questions that are too long for a link are left out."""
        return super().to_code() if len(self.own) <= MOST_LETTERS else replace(self, own="").to_code()

    def written(self) -> int:
        return super().written() * max(1, len(self.tasks) * self.count) * self.repeats

    def check(self, rules: Rules) -> None:
        """Raise Refusal for what can be told before any question is drawn or any model is asked."""
        Settings(
            "asked below", lanes=self.lanes, seed=self.seed, length=self.length, model=self.model, draft=self.draft
        ).check(rules)
        for name, said in (("count", "number of questions"), ("repeats", "number of rounds")):
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) <= MOST_EACH:
                raise Refusal(f"The {said} must be a whole number from 1 to {MOST_EACH:,}.", name)
        if len(self.lanes) > self.MOST:
            raise Refusal(
                f"There are {len(self.lanes):,} strategies, and {self.MOST} are the most here: remove some.", "lanes"
            )
        for task in self.tasks:
            if not isinstance(task, str) or task not in TASKS:
                raise Refusal(f"There is no task {quoted(task)}: choose from the list.", "questions")
        if not self.tasks and not self.own.strip():
            raise Refusal("There is no question to ask: choose a task, or bring questions of your own.", "questions")
        check_text(self.own, "text of your questions", rules.limits.own_characters, "file")

    def questions(self, rules: Rules) -> list[Question]:
        """Of every task in turn, then a visitor's own; raises Refusal for a line that is none, and for more than the
        rules allow.
        """
        number = len(self.tasks) * self.count
        self._check_number(number, rules)  # before they are drawn
        drawn = [ask(task, self.count, self.seed) for task in self.tasks]
        asked = [question for row in zip_longest(*drawn) for question in row] + (
            questions_in(self.own, "your questions") if self.own.strip() else []
        )
        self._check_number(len(asked), rules)
        if (letters := max(len(question.prompt) + len(question.context) for question in asked)) > rules.characters:
            raise Refusal(
                f"One of your questions has {letters:,} letters, and {rules.characters:,} are the most here: shorten it.",
                "file",
            )
        return asked

    def _check_number(self, questions: int, rules: Rules) -> None:
        answers = questions * len(self.lanes) * self.repeats
        if answers > rules.answers:
            raise Refusal(
                f"{questions} questions to {len(self.lanes)} strategies in {self.repeats} rounds are {answers:,} answers, and {rules.answers:,} are "
                "the most here: take fewer of each.",
                "count",
            )

    def entrants(self) -> list[Entrant]:
        """The lanes under names that a shell understands; one that stands there again gets a number."""
        names = [written(recipe) for recipe in self.recipes()]
        before = [names[:place].count(name) for place, name in enumerate(names)]
        return [
            Entrant(f"{name} #{count + 1}" if count else name, recipe)
            for name, count, recipe in zip(names, before, self.recipes())
        ]


def written(recipe: LaneConfig) -> str:
    """A lane in one word, as `bench survey --with` takes it: speculative:budget=4+prompt_lookup:depth=8."""
    word = "+".join(_part(name, knobs) for name, knobs in [(recipe.strategy, recipe.knobs), *recipe.extras])
    return word if len(word) <= LONGEST_NAME else f"{word[:LONGEST_NAME - 1]}…"


def _part(name: str, knobs: dict[str, Any]) -> str:
    given = ",".join(f"{knob}={value}" for knob, value in knobs.items())
    return f"{name}:{given}" if given else name


class AnswerEvent(NamedTuple):
    """An answer on its way to the page, as an event of a run is."""

    answer: Answer

    def to_json(self) -> Answer:
        return self.answer


class Asking:
    """A survey on its way, in the form of a session."""

    headers = ()

    def __init__(self, told: Iterator[Answer | None]):
        self._told, self.finished = told, False

    def advance(self) -> list[AnswerEvent]:
        """One forward; the answer, where it was the last one of a lane."""
        for answer in self._told:
            return [AnswerEvent(answer)] if answer else []
        self.finished = True
        return []

    step = advance

    def stop(self, lane: int | None = None) -> list[AnswerEvent]:
        """End it all: its lanes belong to one work, so none is stopped alone. The answer that is under way is dropped.
        """
        self.finished = True
        self._told.close()
        return []


def asking(models: Any, choice: SurveySettings, rules: Rules) -> Asking:
    """A survey ready to go; raises Refusal where there is nothing to ask, or more than is allowed."""
    from playground.decoding.session import Limits  # not before a model is there: it brings torch along
    limits = Limits(choice.seed, choice.length)
    return Asking(
        steps(models, choice.entrants(), choice.questions(rules), choice.repeats, limits, judge=judge_for(rules))
    )


def judge_for(rules: Rules) -> Callable[[Question, str], float | None]:
    """How right a text is; nobody knows of a program that may not be run."""
    return (
        score if rules.programs else lambda question, text: None if question.task == PROGRAMS else score(question, text)
    )
