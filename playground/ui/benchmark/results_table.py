"""The results of a survey on the page: the table, the questions with their scores, and the answers to one question.

The table is data that assets/benchmark.js draws and sorts while it fills. The answers to one question are HTML rendered
here, with all text from models and visitors escaped.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from playground.bench.spread import Spread
from playground.bench.survey.results import COLUMNS, ResultRow, scores, select, table
from playground.bench.survey.survey import Answer, Entrant
from playground.page_scripts import joined
from playground.questions.questions import Question
from playground.ui.components.scripted_component import Scripted
from playground.ui.play.gallery import TASKS

SHORT = 110  # characters of a question in the list
MEANINGS: dict[str, tuple[str, Callable[[ResultRow], Any]]] = {  # column: (description, sort key)
    "entrant": ("The strategy, in the syntax of the command line.", lambda row: row.entrant),
    "score": (
        "Mean score over the questions, from 0 to 1, ± its standard error; none for questions without a known answer.",
        lambda row: row.score and row.score.mean,
    ),
    "tokens": ("Tokens of an answer, mean.", lambda row: row.tokens),
    "target forwards per token": (
        "Forwards of the target per token after the first. Plain decoding takes exactly 1.",
        lambda row: row.target_forwards,
    ),
    "other forwards": (
        "Forwards of all other models or streams, such as the draft, per token.",
        lambda row: row.other_forwards,
    ),
    "tokens/s": (
        "Tokens per second including prefill: median of the rounds (lowest to highest).",
        lambda row: _middle(row.tokens_per_second),
    ),
    "time": (
        "Wall-clock time relative to the first strategy on the same questions, within each round: median (lowest to "
        "highest). Below 1 is faster.",
        lambda row: _middle(row.time_ratio),
    ),
    "accepted": ("Share of verified draft tokens that were accepted.", lambda row: row.acceptance),
    "by position": (
        "The same by position in the draft, from the first draft token.",
        lambda row: next(iter(row.acceptance_by_position), None),
    ),
    "live slots": ("Maximum number of live KV cache slots of a head.", lambda row: row.kv_live),
    "same text": ("Answers with exactly the first strategy's tokens.", lambda row: row.same_text),
    "failed": ("Answers that failed; the reason is shown below the strategy.", lambda row: row.failed),
}
HEADINGS = {"entrant": "strategy"}  # columns with another name on the page than in files


class ResultsTable(Scripted):
    """The results table. Its value is made by `table_value`. Bind event handlers with

        table.show(fn)   table.save(fn)

    where `fn` takes a gr.EventData. show carries the `number` of a question. save carries a `form`, csv or json; the
    answer {"saved": {"name", "type", "text"}} is saved as a file by the browser and leaves the table unchanged.
    """

    def __init__(self, **settings: Any):
        super().__init__(
            None,
            html_template='<section class="results-table" aria-label="Results"></section>',
            js_on_load=joined("benchmark/results_table.js"),
            apply_default_css=False,
            **settings,
        )

    def postprocess(self, value: dict[str, Any] | None) -> str | None:
        """The value as JSON text; otherwise the page would track every cell, and Gradio would send differences."""
        return None if value is None else json.dumps(value, allow_nan=False)

    def preprocess(self, payload: str | None) -> dict[str, Any] | None:
        return json.loads(payload) if payload else None

    def api_info(self) -> dict[str, Any]:
        return {"type": "string", "description": "the results table, as JSON"}

    def example_payload(self) -> Any:
        return None

    def example_value(self) -> Any:
        return None


def table_value(
    entrants: Sequence[Entrant], questions: Sequence[Question], answers: Sequence[Answer], notes: Iterable[str] = ()
) -> dict[str, Any]:
    """The data of the table: columns, rows by task, and the questions with a mark for every strategy.

    notes: sentences below the table.
    """
    names = [entrant.name for entrant in entrants]
    return {
        "columns": [{"name": HEADINGS.get(name, name), "about": MEANINGS[name][0]} for name in COLUMNS],
        "entrants": names,
        "sections": _sections(table(answers), names),
        "asked": _question_entries(names, questions, answers),
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
    cells = [{"text": _cell(words(row)), "value": MEANINGS[name][1](row)} for name, words in COLUMNS.items()]
    return {"entrant": names.index(row.entrant), "failure": row.failure, "remark": _why(row.lacking), "cells": cells}


def _cell(text: str) -> str:
    """What does not apply to a strategy is left empty; a table of plain text marks it with a dash."""
    return "" if text == "-" else text


def _why(lacking: str) -> str:
    """Why a strategy was not asked; empty if it was."""
    return f"Not asked: the question does not provide {lacking}." if lacking else ""


def _middle(values: Spread | None) -> float | None:
    return values and values.median


def _question_entries(
    names: list[str], questions: Sequence[Question], answers: Sequence[Answer]
) -> list[dict[str, Any]]:
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
    """{number of a question: its score, "written" if it has no known answer, "failed" or "unasked"}."""
    written = {
        answer.number: "failed" if answer.failure else "unasked" if answer.lacking else "written" for answer in answers
    }
    return written | scores(answers)


def _shortened(question: Question) -> str:
    text = " ".join(f"{question.context} {question.prompt}".split())
    return text if len(text) <= SHORT else f"{text[:SHORT // 2].rstrip()} … {text[-SHORT // 2:].lstrip()}"


# --- one question ---

def answers_to(question: Question, number: int, entrants: Sequence[Entrant], answers: Sequence[Answer]) -> str:
    """A question, its expected answer, and each strategy's answers so far, as HTML."""
    before = "".join(
        f"<dt>User</dt><dd>{escape(user)}</dd><dt>Assistant</dt><dd>{escape(assistant)}</dd>"
        for user, assistant in question.before
    )
    passage = f"<dt>Context</dt><dd>{escape(question.context)}</dd>" if question.context else ""
    expected = escape(_expected(question)) or "<i>not known</i>"
    found = [answer for answer in answers if answer.number == number]
    wrote = "".join(_wrote(entrant.name, given) for entrant in entrants if (given := select(found, entrant.name)))
    return (
        f"<article class='one-question'><h3>Question {number + 1}, {escape(task_name(question.task))}</h3>"
        f"<dl>{before}{passage}<dt>Question</dt><dd>{escape(question.prompt)}</dd><dt>Expected</dt><dd>{expected}</dd>"
        f"</dl>{wrote or '<p>No answers yet.</p>'}</article>"
    )


def _expected(question: Question) -> str:
    """The expected answer; empty for a visitor's own question without one."""
    return question.expected if question.answer is not None or "hero" in question.meta else ""


def _wrote(name: str, answers: Sequence[Answer]) -> str:
    """A strategy's answers; rounds with the same answer are grouped."""
    rounds: dict[tuple[str, str, str, float | None], list[Answer]] = {}
    for answer in answers:
        rounds.setdefault((answer.text, answer.failure, answer.lacking, answer.score), []).append(answer)
    return f"<section><h4>{escape(name)}</h4>{''.join(map(_alike, rounds.values()))}</section>"


def _alike(answers: Sequence[Answer]) -> str:
    """The answer that a strategy gave in all of these rounds."""
    answer, (verdict, label) = answers[0], _verdict(answers[0])
    which = f"round{'s' if len(answers) > 1 else ''} {', '.join(str(each.round) for each in answers)}"
    failed = f"<p class='failure'>{escape(answer.failure)}</p>" if answer.failure else ""
    wrote = (
        f"<pre>{escape(answer.text)}</pre>"
        if answer.text or not (answer.failure or answer.lacking)
        else escape(_why(answer.lacking))
    )
    return f"<p class='facts'><b class='{verdict}'>{label}</b> {which}</p>{failed}{wrote}"


def _verdict(answer: Answer) -> tuple[str, str]:
    """The CSS class and the label of an answer's mark."""
    score = answer.score
    if answer.failure or answer.lacking:
        return ("failed", "failed") if answer.failure else ("open", "not asked")
    if score is None:
        return "open", "not judged"
    return ("right", "right") if score == 1 else ("wrong", "wrong") if score == 0 else ("part", f"{score:.2f} right")


def file_name(kind: str) -> str:
    """The name of a survey's file."""
    return f"survey.{re.sub('[^a-z]', '', kind)}"
