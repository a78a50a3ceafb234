"""What a survey came to, on the page: the table, the questions with who was right, and single answers to read.

The table is data that assets/benchmark.js draws and sorts, so that it can fill while somebody looks at it. A single
question is HTML made here, with everything escaped that a model or a visitor wrote.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from playground.bench.questions import Question
from playground.bench.results import COLUMNS, ResultRow, scores, select, table
from playground.bench.spread import Spread
from playground.bench.survey import Answer, Entrant
from playground.ui.gallery import TASKS
from playground.ui.scripted_component import Scripted
from playground.ui.theme import read

SHORT = 110  # letters of a question in the list
MEANINGS: dict[str, tuple[str, Callable[[ResultRow], Any]]] = {  # what a column tells, and the value it is sorted by
    "entrant": ("The strategy, written as the command line takes it.", lambda row: row.entrant),
    "score": (
        "How right: mean over the questions, 0 to 1, ± its standard error. Where nobody knows the answer there is none.",
        lambda row: row.score and row.score.mean,
    ),
    "tokens": ("Tokens of a text, mean.", lambda row: row.tokens),
    "target forwards a token": (
        "Passes of the target for each token after the first. Plain decoding takes exactly 1.",
        lambda row: row.target_forwards,
    ),
    "other forwards": (
        "Passes of every other model or stream, such as the draft, for each token.",
        lambda row: row.other_forwards,
    ),
    "tokens/s": (
        "Tokens a second, the prompt's own pass included: median of the rounds (lowest to highest).",
        lambda row: _middle(row.tokens_per_second),
    ),
    "time": (
        "Seconds over those of the first strategy on the same questions, within each round: median (lowest to highest). Below 1 is faster.",
        lambda row: _middle(row.time_ratio),
    ),
    "accepted": ("Guesses that stood, of those tested.", lambda row: row.acceptance),
    "by position": (
        "The same at each depth of the draft, from the first guess.",
        lambda row: next(iter(row.acceptance_by_position), None),
    ),
    "live slots": ("Most tokens that a head of keys and values held.", lambda row: row.kv_live),
    "same text": ("Answers with exactly the first strategy's tokens.", lambda row: row.same_text),
    "failed": ("Answers that did not come through; the reason stands under the strategy.", lambda row: row.failed),
}


class Standings(Scripted):
    """Give it the value that `told` makes. Bind what a person does with

        standings.show(fn)   standings.save(fn)

    where `fn` takes a gr.EventData: show carries the `number` of a question; save carries a `form`, csv or json, and is
    answered with a value {"saved": {"name", "type", "text"}}, which the browser puts into a file and leaves the table
    as it is.
    """

    def __init__(self, **settings: Any):
        super().__init__(
            None,
            html_template='<section class="standings" aria-label="Standings"></section>',
            js_on_load=read("benchmark.js"),
            apply_default_css=False,
            **settings,
        )

    def postprocess(self, value: dict[str, Any] | None) -> str | None:
        """As a JSON text: the page would otherwise track every cell, and Gradio would send differences between tables.
        """
        return None if value is None else json.dumps(value, allow_nan=False)

    def preprocess(self, payload: str | None) -> dict[str, Any] | None:
        return json.loads(payload) if payload else None

    def api_info(self) -> dict[str, Any]:
        return {"type": "string", "description": "the standings, as JSON"}

    def example_payload(self) -> Any:
        return None

    def example_value(self) -> Any:
        return None


def told(
    entrants: Sequence[Entrant], questions: Sequence[Question], answers: Sequence[Answer], notes: Iterable[str] = ()
) -> dict[str, Any]:
    """Everything the browser draws: columns, rows by task, and the questions with a mark for every entrant. notes:
    sentences under the table.
    """
    names = [entrant.name for entrant in entrants]
    return {
        "columns": [{"name": name, "about": MEANINGS[name][0]} for name in COLUMNS],
        "entrants": names,
        "sections": _sections(table(answers), names),
        "asked": _asked(names, questions, answers),
        "notes": [*notes],
    }


def task_name(task: str) -> str:
    return TASKS.get(task, task)


def _sections(rows: Sequence[ResultRow], names: list[str]) -> list[dict[str, Any]]:
    """The rows of each task."""
    tasks = dict.fromkeys(row.task for row in rows)
    return [
        {"task": task, "title": task_name(task), "rows": [_row(row, names) for row in rows if row.task == task]}
        for task in tasks
    ]


def _row(row: ResultRow, names: list[str]) -> dict[str, Any]:
    cells = [{"text": words(row), "value": MEANINGS[name][1](row)} for name, words in COLUMNS.items()]
    return {"entrant": names.index(row.entrant), "failure": row.failure, "remark": _why(row.lacking), "cells": cells}


def _why(lacking: str) -> str:
    """Why an entrant was not asked, empty where it was."""
    return f"Not asked: the question does not bring {lacking}." if lacking else ""


def _middle(values: Spread | None) -> float | None:
    return values and values.median


def _asked(names: list[str], questions: Sequence[Question], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    marks = [_marks(select(answers, name)) for name in names]
    return [
        {
            "number": number,
            "task": task_name(question.task),
            "prompt": _shortened(question),
            "marks": [mark.get(number) for mark in marks],
        }
        for number, question in enumerate(questions)
    ]


def _marks(answers: Sequence[Answer]) -> dict[int, str | float]:
    """By number of the question: its score, "written" where nobody knows the answer, "failed", or "unasked"."""
    written = {
        answer.number: "failed" if answer.failure else "unasked" if answer.lacking else "written" for answer in answers
    }
    return written | scores(answers)


def _shortened(question: Question) -> str:
    said = " ".join(f"{question.context} {question.prompt}".split())
    return said if len(said) <= SHORT else f"{said[:SHORT // 2].rstrip()} … {said[-SHORT // 2:].lstrip()}"


# --- one question ---

def answers_to(question: Question, number: int, entrants: Sequence[Entrant], answers: Sequence[Answer]) -> str:
    """The question, what is expected, and what each entrant wrote so far, as HTML."""
    before = "".join(
        f"<dt>Earlier</dt><dd>{escape(user)}</dd><dt>Answered</dt><dd>{escape(assistant)}</dd>"
        for user, assistant in question.before
    )
    passage = f"<dt>Passage</dt><dd>{escape(question.context)}</dd>" if question.context else ""
    expected = escape(_expected(question)) or "<i>nobody knows</i>"
    found = [answer for answer in answers if answer.number == number]
    wrote = "".join(_wrote(entrant.name, given) for entrant in entrants if (given := select(found, entrant.name)))
    return (
        f"<article class='one-question'><h3>Question {number + 1}, {escape(task_name(question.task))}</h3><dl>{before}{passage}<dt>Question</dt>"
        f"<dd>{escape(question.prompt)}</dd><dt>Expected</dt><dd>{expected}</dd></dl>{wrote or '<p>Nobody has answered it yet.</p>'}</article>"
    )


def _expected(question: Question) -> str:
    """What a right answer is; a visitor's own question may have none."""
    return question.expected if question.answer is not None or "hero" in question.meta else ""


def _wrote(name: str, answers: Sequence[Answer]) -> str:
    """An entrant's texts; rounds that wrote the same stand together."""
    rounds: dict[tuple[str, str, str, float | None], list[Answer]] = {}
    for answer in answers:
        rounds.setdefault((answer.text, answer.failure, answer.lacking, answer.score), []).append(answer)
    return f"<section><h4>{escape(name)}</h4>{''.join(map(_alike, rounds.values()))}</section>"


def _alike(answers: Sequence[Answer]) -> str:
    """What an entrant wrote in all of these rounds."""
    answer, (verdict, said) = answers[0], _verdict(answers[0])
    which = f"round{'s' if len(answers) > 1 else ''} {', '.join(str(each.round) for each in answers)}"
    failed = f"<p class='failure'>{escape(answer.failure)}</p>" if answer.failure else ""
    wrote = (
        f"<pre>{escape(answer.text)}</pre>"
        if answer.text or not (answer.failure or answer.lacking)
        else escape(_why(answer.lacking))
    )
    return f"<p class='facts'><b class='{verdict}'>{said}</b> {which}</p>{failed}{wrote}"


def _verdict(answer: Answer) -> tuple[str, str]:
    """How it is marked, and in words."""
    score = answer.score
    if answer.failure or answer.lacking:
        return ("failed", "failed") if answer.failure else ("open", "not asked")
    if score is None:
        return "open", "not judged"
    return ("right", "right") if score == 1 else ("wrong", "wrong") if score == 0 else ("part", f"{score:.2f} right")


def file_name(kind: str) -> str:
    """A name for a file that holds a survey."""
    return f"survey.{re.sub('[^a-z]', '', kind)}"
