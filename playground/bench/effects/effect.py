"""An effect of strategies: a claim, entrants, questions, and a rule that decides from the answers whether it is shown.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from playground.bench.charts import Chart
from playground.bench.report_text import (
    facts_table,
    markdown,
    markdown_page,
    number,
    paragraphs,
    spread_text,
)
from playground.bench.spread import Spread
from playground.bench.survey.results import Paired, Score, score_text, sections, table
from playground.bench.survey.survey import Answer, Entrant, survey
from playground.questions.questions import Question

if TYPE_CHECKING:
    from playground.decoding.models import Models

Number = Score | Paired | Spread | float | None
FORMAT, VERSION = "decoding-playground-effects", 1
NOTES = """Every number was measured on the machine below, with questions held out from training. *Score*: 1 for a right
answer, mean over the questions ± one standard error. Two entrants are compared question by question: the mean of the
differences ± its standard error, on how many questions the first scores higher or lower, and the p value of the
two-sided sign test of that split. Whether an effect is shown is decided by its rule, which was written before the
measurement."""


class EffectVerdict(NamedTuple):
    """Whether an effect is shown, and the numbers that decided it."""

    shown: bool
    numbers: dict[str, Number]


@dataclass(frozen=True)
class Effect:
    """One claim about strategies, and how it is tested. `rule` says in words what `judge` computes."""

    name: str
    claim: str
    rule: str
    entrants: list[Entrant]
    questions: list[Question]
    length: int  # most tokens of an answer
    judge: Callable[[list[Answer]], EffectVerdict]
    draw: Callable[[list[Answer]], Chart]
    timed: bool = False  # whether times are compared: over several rounds, after a warm-up

    def observe(
        self, models: Models, repeats: int, seed: int, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[Answer]:
        """Every entrant on every question; `repeats` rounds if times are compared, otherwise one."""
        from playground.decoding.limits import Limits  # late, since it imports torch

        return survey(
            models,
            self.entrants,
            self.questions,
            repeats if self.timed else 1,
            Limits(seed, self.length),
            cancelled,
            warm_up=self.timed,
        )


@dataclass(frozen=True)
class EffectResult:
    """An effect, the answers, and the verdict."""

    effect: Effect
    answers: list[Answer]
    verdict: EffectVerdict

    @classmethod
    def of(cls, effect: Effect, answers: list[Answer]) -> EffectResult:
        return cls(effect, answers, effect.judge(answers))

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure]

    @property
    def shown(self) -> bool:
        """Shown by the rule, and no lane failed: missing answers might contradict it."""
        return self.verdict.shown and not self.failed

    @property
    def outcome(self) -> str:
        return "shown" if self.shown else "not shown"

    def lines(self) -> list[str]:
        """The outcome, then a line per number and one about failures."""
        numbers = [f"{name}: {say(value)}" for name, value in self.verdict.numbers.items()]
        failures = [
            f"{len(self.failed)} answers failed, the first of {answer.entrant}: {answer.failure}"
            for answer in self.failed[:1]
        ]
        return [f"{self.effect.name}: {self.outcome}. {self.effect.claim}", *numbers, *failures]

    def to_json(self) -> dict[str, Any]:
        effect, numbers = self.effect, self.verdict.numbers
        plain = {name: value._asdict() if isinstance(value, tuple) else value for name, value in numbers.items()}
        return {"name": effect.name, "claim": effect.claim, "rule": effect.rule, "shown": self.shown, "numbers": plain,
                "questions": len(effect.questions), "failed": len(self.failed),
                "table": [row.to_json() for row in table(self.answers)]}

    def page(self, picture: str) -> str:
        """A section in Markdown; `picture` is the path of the chart relative to the page."""
        effect, lines = self.effect, self.lines()[1:]
        tables = "\n\n".join(
            f"{section.task}:\n\n{markdown(section.rows)}" for section in sections(table(self.answers))
        )
        return paragraphs(
            f"## {effect.name[0].upper()}{effect.name[1:]}: {self.outcome}",
            effect.claim,
            f"Rule: {effect.rule}",
            "\n".join(f"- {line}" for line in lines),
            f"![{effect.claim}]({picture})",
            f"<details><summary>Table</summary>\n\n{tables}\n\n</details>",
        )


def say(value: Number) -> str:
    """A number as text, with its uncertainty."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Paired):
        error = "" if value.error is None else f" ± {value.error:.3f}"
        return f"{value.mean:+.3f}{error} ({value.better} better, {value.worse} worse, p {value.p:.3g})"
    if isinstance(value, Score):
        return f"{score_text(value)} on {value.number} questions"
    return spread_text(value, 2) if isinstance(value, Spread) else number(value, 3)


def document(facts: dict[str, Any], findings: list[EffectResult]) -> dict[str, Any]:
    """Plain data for JSON. facts: settings and machine."""
    return {"format": FORMAT, "version": VERSION, **facts, "effects": [finding.to_json() for finding in findings]}


def page(facts: dict[str, Any], findings: list[EffectResult], folder: str) -> str:
    """All results in Markdown; the charts are in a folder next to the page."""
    listed = markdown([["effect", "claim", "outcome"], *([f.effect.name, f.effect.claim, f.outcome] for f in findings)])
    return markdown_page(
        "# Effects",
        "Made by `python -m playground bench effects --out --page`.",
        listed,
        NOTES,
        facts_table(facts),
        *(finding.page(f"{folder}/{finding.effect.name}.svg") for finding in findings),
    )
