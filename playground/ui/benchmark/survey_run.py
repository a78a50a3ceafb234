"""A survey on the page: its settings, its questions, and its execution by the worker.

The survey has the interface of a session, whose events are answers. The worker serves it one forward at a time,
alternating with the runs of other visitors.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

from playground.bench.survey.survey import Answer, Entrant, Examiner, check_entrants, rounds, score
from playground.decoding.lane_checks import Surroundings, check_models
from playground.errors import Refusal
from playground.lane_fields import LaneConfig
from playground.questions.questions import PROGRAMS, Question, ask
from playground.questions.user_questions import questions_in
from playground.questions.world import TASKS
from playground.request_limits import Rules, check_text, quoted
from playground.ui.components.settings import WIDEST, Settings

MOST_EACH = 10_000  # questions of a task, and rounds; the number of answers is limited by Rules
MOST_LETTERS = 4000  # characters of a visitor's own questions that are included in a link
LONGEST_NAME = 90  # characters of an entrant's name, since a grammar may be a page long


@dataclass
class SurveySettings(Settings):
    """Lanes, models, seed and length as for a run, with questions instead of a prompt."""

    MOST: ClassVar[int] = WIDEST
    length: int = 64
    tasks: list[str] = field(default_factory=lambda: ["context_qa", "records"])
    count: int = 4  # questions of each task
    repeats: int = 2  # rounds
    own: str = ""  # a visitor's own questions, as JSON Lines

    @classmethod
    def read(cls, raw: Any) -> SurveySettings:
        choice = super().read(raw)
        choice.tasks = [task for task in TASKS if task in choice.tasks]
        return choice

    def to_code(self) -> str:
        """The code of a link; a visitor's own questions are left out if they are too long."""
        return super().to_code() if len(self.own) <= MOST_LETTERS else replace(self, own="").to_code()

    def written(self) -> int:
        return super().written() * max(1, len(self.tasks) * self.count) * self.repeats

    def check(self, rules: Rules) -> None:
        """Raise Refusal for anything that can be checked before questions are drawn and without a model."""
        Settings(
            "asked below", lanes=self.lanes, seed=self.seed, length=self.length, model=self.model, draft=self.draft
        ).check(rules)
        for name, said in (("count", "number of questions"), ("repeats", "number of rounds")):
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) <= MOST_EACH:
                raise Refusal(f"The {said} must be a whole number from 1 to {MOST_EACH:,}.", name)
        if len(self.lanes) > self.MOST:
            raise Refusal(
                f"There are {len(self.lanes):,} strategies; at most {self.MOST} are allowed: remove some.", "lanes"
            )
        for task in self.tasks:
            if not isinstance(task, str) or task not in TASKS:
                raise Refusal(f"There is no task {quoted(task)}: choose from the list.", "questions")
        if not self.tasks and not self.own.strip():
            raise Refusal("There is no question to ask: choose a task, or add questions of your own.", "questions")
        check_text(self.own, "text of your questions", rules.limits.own_characters, "file")

    def questions(self, rules: Rules) -> list[Question]:
        """The questions of the tasks, interleaved, then the visitor's own.

        Raises Refusal for a malformed question or more than the rules allow.
        """
        number = len(self.tasks) * self.count
        self._check_number(number, rules)  # before they are drawn
        drawn = [ask(task, self.count, self.seed) for task in self.tasks]
        asked = [question for row in zip_longest(*drawn) for question in row] + (
            questions_in(self.own, "your questions") if self.own.strip() else []
        )
        self._check_number(len(asked), rules)
        if (longest := max(len(question.prompt) + len(question.context) for question in asked)) > rules.characters:
            raise Refusal(
                f"One of your questions has {longest:,} characters; at most {rules.characters:,} are allowed: "
                "shorten it.",
                "file",
            )
        return asked

    def _check_number(self, questions: int, rules: Rules) -> None:
        answers = questions * len(self.lanes) * self.repeats
        if answers > rules.answers:
            raise Refusal(
                f"{questions} questions to {len(self.lanes)} strategies in {self.repeats} rounds are {answers:,} "
                f"answers; at most {rules.answers:,} are allowed: choose fewer of each.",
                "count",
            )

    def entrants(self) -> list[Entrant]:
        """The lanes, named in the syntax of the command line; duplicate names get a number."""
        names = [written(config) for config in self.configs()]
        before = [names[:place].count(name) for place, name in enumerate(names)]
        return [
            Entrant(f"{name} #{count + 1}" if count else name, config)
            for name, count, config in zip(names, before, self.configs())
        ]

    def check_fit(self, around: Surroundings) -> None:
        """Raise Refusal for the first lane that the models cannot run, as far as that is known before they are loaded.
        """
        for number, entrant in enumerate(self.entrants(), 1):
            try:
                check_models(entrant.assembly(), around)
            except Refusal as refusal:
                raise Refusal(f"Lane {number} cannot start. {refusal}", "lanes") from None


def written(config: LaneConfig) -> str:
    """A lane in the syntax of `bench survey --with`: speculative:budget=4+prompt_lookup:depth=8."""
    word = "+".join(_part(name, knobs) for name, knobs in [(config.strategy, config.knobs), *config.extras])
    return word if len(word) <= LONGEST_NAME else f"{word[:LONGEST_NAME - 1]}…"


def _part(name: str, knobs: dict[str, Any]) -> str:
    given = ",".join(f"{knob}={value}" for knob, value in knobs.items())
    return f"{name}:{given}" if given else name


class AnswerEvent(NamedTuple):
    """An answer with the interface of a run's stamped event."""

    event: Answer

    def to_json(self) -> Answer:
        return self.event


class SurveySession:
    """A running survey, with the interface of a session."""

    headers = ()

    def __init__(self, answers: Iterator[Answer | None]):
        self._answers, self.finished = answers, False

    def advance(self) -> list[AnswerEvent]:
        """Run one forward; returns the answer if that completes one."""
        for answer in self._answers:
            return [AnswerEvent(answer)] if answer else []
        self.finished = True
        return []

    step = advance

    def cache_bytes(self) -> int:
        """Not known, and small: one question is answered at a time."""
        return 0

    def stop(self, lane: int | None = None) -> list[AnswerEvent]:
        """End the survey, whatever the lane; an unfinished answer is dropped."""
        self.finished = True
        self._answers.close()
        return []


def survey_session(models: Any, choice: SurveySettings, rules: Rules) -> SurveySession:
    """Prepare a survey; raises Refusal if there is no question, or more than is allowed, or if a lane cannot start."""
    from playground.decoding.limits import Limits  # imports torch
    entrants, questions = choice.entrants(), choice.questions(rules)
    examiner = Examiner(models, Limits(choice.seed, choice.length), judge_for(rules))
    check_entrants(examiner, entrants, questions)
    return SurveySession(rounds(examiner, entrants, questions, choice.repeats))


def judge_for(rules: Rules) -> Callable[[Question, str], float | None]:
    """The function that scores an answer; programs get None if they may not be run."""
    return (
        score if rules.programs else lambda question, text: None if question.task == PROGRAMS else score(question, text)
    )
