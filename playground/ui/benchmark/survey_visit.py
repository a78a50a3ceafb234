"""A visitor's survey, and how long it will still take."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from playground.bench.survey.survey import Answer, Entrant, Progress
from playground.bench.survey.survey_export import document, model_facts
from playground.questions.questions import Question
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.server.admission_queue import Ticket
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun

CAUTION = (
    "Forwards, acceptance, tokens and scores are exact. Times are unreliable on a busy machine: prefer the time ratio "
    "to the seconds, and check its spread over the rounds."
)


@dataclass(eq=False)
class SurveyVisit:
    """A visitor's last survey and its progress."""

    choice: SurveySettings
    entrants: list[Entrant]
    questions: list[Question]
    answers: list[Answer] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # settings and machine, once the models are loaded
    other_runs: int = 0  # maximum number of other visitors' runs that shared the device
    run: Run | RemoteRun | None = None
    ticket: Ticket | None = None  # its seat or its place in the queue
    stopped: bool = False
    left: bool = False  # another survey has replaced it on the page
    over: bool = False

    def stop(self) -> None:
        self.stopped = True
        if self.run:
            self.run.stop()

    def leave(self) -> None:
        """Stop the survey and give up its seat."""
        self.stop()
        if self.ticket:
            self.ticket.leave()

    def notes(self) -> list[str]:
        """The models, the machine, and how reliable the measurements are."""
        if not self.facts:
            return []
        models, machine = self.facts["settings"], self.facts["machine"]
        draft = f" and the draft {_short(models['draft'])}" if models["draft"] else ""
        others = _count(self.other_runs, "run")
        shared = f" Up to {others} of other visitors shared the device." if self.other_runs else ""
        size = f"{models['parameters'] / 1e6:,.0f} million parameters"
        return [
            f"Measured with {_short(models['model'])} ({size}, {models['dtype']}){draft}, on "
            f"{machine['processor']}, {machine['threads']} of {_count(machine['cores'], 'core')}, "
            f"device {machine['device']}, torch {machine['torch']}.{shared}",
            CAUTION,
        ]


class Forecast:
    """Progress of a survey and an estimate of its remaining time, from its pace so far with the device shared."""

    def __init__(self, visit: SurveyVisit):
        self._visit, self._progress = visit, Progress(visit.entrants, visit.questions, visit.choice.repeats)
        self._begun, self._own = 0.0, 0.0  # time of the first answer; seconds that later answers took by themselves

    def add(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._progress.count(answer)
            self._own += answer.seconds if self._begun else 0.0
            self._begun = self._begun or monotonic()

    @property
    def left(self) -> float | None:
        """Remaining seconds; None until enough has been measured."""
        left = self._progress.left
        return left * max(1.0, (monotonic() - self._begun) / self._own) if left and self._own else left

    def html(self) -> str:
        """The progress line as HTML."""
        if not self._visit.answers:
            return "<p>Warming up: each strategy answers one question of each task, which is not counted.</p>"
        left, others = self.left, self._visit.other_runs
        facts = [
            f"{_count(len(self._visit.answers), 'answer')}",
            *([f"{_lasting(left)} left"] if left is not None else []),
            *([f"sharing the device with {_count(others, 'other run')}"] if others else []),
        ]
        return f"<p>{', '.join(facts)} <progress max='1' value='{self._progress.share:.3f}'></progress></p>"


def facts_of(choice: SurveySettings, models: Any) -> dict[str, Any]:
    """Settings and machine, for a survey's file."""
    from playground.bench.speed.speed_report import machine  # imports torch

    asked = {
        "tasks": choice.tasks,
        "questions": choice.count,
        "repeats": choice.repeats,
        "seed": choice.seed,
        "max_new_tokens": choice.length,
    }
    return {"settings": model_facts(models) | asked, "machine": machine(models.target.device)}


def document_of(visit: SurveyVisit) -> str:
    facts = {**visit.facts, "shared": {"runs_of_others": visit.other_runs}}
    return json.dumps(document(facts, visit.entrants, visit.questions, visit.answers), indent=1)


def _lasting(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def _short(name: str) -> str:
    """A model's name; of a folder only the last part, which does not reveal the path."""
    return Path(name).name if Path(name).is_dir() else name


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
