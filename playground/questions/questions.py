"""Questions with known answers: those of the gallery, and others sampled from the small world.

The gallery's questions are held out from training. They are stored in `assets/questions.json` with a sentence on what
to look at and the lanes that show it; `ask` samples others of the same kind. `judge` compares a text with the known
answer by the rule of the task (`playground.questions.world`). Imports neither torch nor gradio.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from playground.algorithms.programs.sandbox import NotRun
from playground.asset_files import ASSETS
from playground.events import Judged
from playground.questions.world import Item, score
from playground.questions.world.show import items

FILE = ASSETS / "questions.json"
PROGRAMS = "programs"  # the task whose answers are judged by running them
STORIES = "stories"  # the task with many right answers
Turns = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Question:
    """One question to a chat model, and what is needed to judge its answer.

    before: earlier (user, assistant) turns. context: a passage that is read before the prompt. answer: None if there
    is no single right one. meta: what the task's own rule needs, as plain data. look: what is worth watching. settings:
    suitable length and lanes, by the names of the page's settings.
    """

    task: str
    prompt: str
    answer: str | None
    grade: int = 1
    chat: bool = True
    before: Turns = ()
    context: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    look: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """The fields of a RunRequest that ask it."""
        turns = [[*turn] for turn in self.before]
        mode = "chat" if self.chat else "raw"
        return {"prompt": self.prompt, "mode": mode, "context": self.context, "before": turns, **self.settings}

    @property
    def expected(self) -> str:
        """The right answer for a reader: the answer itself, or a description if many texts are right."""
        if self.answer is None:
            hero = self.meta["hero"]
            return (
                f"A story of forty words or more that names {hero}, ends with its last sentence and repeats no six "
                "words in a row."
            )
        return self.answer


def gallery() -> tuple[Question, ...]:
    """The bundled questions, in the order of their file."""
    return _read(FILE)


@cache
def _read(path: Path) -> tuple[Question, ...]:
    return tuple(_question(raw) for raw in json.loads(path.read_text(encoding="utf-8")))


def _question(raw: dict[str, Any]) -> Question:
    return Question(**raw | {"before": turns(raw.get("before", ()))})


def turns(pairs: Iterable[Iterable[str]]) -> Turns:
    """Pairs in any kind of sequence, as tuples."""
    return tuple((user, assistant) for user, assistant in pairs)


def known(prompt: str, before: Iterable[Iterable[str]] = (), context: str = "") -> Question | None:
    """The gallery's question with exactly this prompt, these earlier turns and this passage; None if there is none."""
    asked = prompt, turns(before), context
    return next(
        (question for question in gallery() if (question.prompt, question.before, question.context) == asked), None
    )


def judge(question: Question, text: str) -> float:
    """Score of a text as the answer, 0 to 1. A program is run for this in a confined process; raises NotRun if it
    cannot be.
    """
    try:
        return score(_item(question.task, question.answer or "", question.meta), text)
    except (ValueError, RecursionError):  # unreadable: a number of thousands of digits, thousands of brackets
        return 0.0


def verdict(question: Question, text: str, runs_programs: bool = True) -> Judged:
    """The judgement as an event; not checked if that means running a program, and programs may not or cannot be run."""
    if question.task == PROGRAMS and not runs_programs:
        return Judged(expected=question.expected, checked=False)
    try:
        return Judged(judge(question, text), question.expected)
    except NotRun as refusal:
        return Judged(expected=question.expected, checked=False, why=refusal.why)


def judging(question: Question | None, runs_programs: bool = True) -> Callable[[str], Judged] | None:
    """The function with which a session judges the final text of each lane; None if the answer is unknown."""
    return partial(verdict, question, runs_programs=runs_programs) if question else None


def ask(task: str, count: int, seed: int, grade: int | None = None) -> list[Question]:
    """`count` held-out questions, the same for the same seed. Raises Refusal for an unknown task, grade or number."""
    return [from_item(item) for item in items(task, count, seed, grade=grade, held_out=True)]


def from_item(item: Item) -> Question:
    """An item of the world as a question. The passage of a reading task becomes the context, so that lanes may contrast
    with and without it.
    """
    meta = _plain(item.meta)
    answer = None if item.task == STORIES else item.answer
    if item.task == "context_qa":
        return Question(item.task, meta["question"], answer, item.grade, context=meta["passage"], meta=meta)
    return Question(item.task, item.prompt, answer, item.grade, before=item.before, meta=meta)


def _plain(meta: dict[str, Any]) -> dict[str, Any]:
    """Meta as JSON data: the item of a chat's last turn becomes a dict."""
    last = meta.get("last")
    return meta | {"last": {"task": last.task, "answer": last.answer, "meta": _plain(last.meta)}} if last else meta


def _item(task: str, answer: str, meta: dict[str, Any]) -> Item:
    """An item with the fields that its task's rule reads."""
    inner = {"last": _item(**meta["last"])} if "last" in meta else {}
    return Item("", answer, task, meta | inner)
