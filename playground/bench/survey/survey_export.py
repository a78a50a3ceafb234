"""Exports a survey: everything as JSON, answers as CSV, tables as a Markdown page. Imports neither torch nor gradio."""
from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from playground.bench.report_text import facts_table, markdown_page, section
from playground.bench.survey.results import sections, table
from playground.bench.survey.survey import Answer, Entrant
from playground.questions.questions import Question
from playground.trace.csv_export import cell

if TYPE_CHECKING:
    from playground.decoding.models import Models

FORMAT, VERSION = "decoding-playground-survey", 1
NOTES = """Every entrant answered every question in a lane of its own, in one process, interleaved round by round; a
warm-up was dropped. *Score*: mean over the questions with its standard error, 1 for a right answer. *Target forwards
per token*: target forwards per token after the first, prefill excluded, so that plain decoding takes 1; *other
forwards*: those of every other model or stream. *Tokens/s* and *time*: wall clock, prefill included, median (lowest to
highest) of the rounds; the time is the entrant's seconds divided by those of the first entrant, within each round.
*Accepted*: draft tokens accepted / tested, in total and by position in the draft. *Live slots*: maximum over KV heads.
*Same text*: answers with exactly the first entrant's tokens. Names in braces are inputs from each question; *a dash* in
every column: the questions lack an input that the entrant needs, as the sentence above the table says."""


def document(
    facts: dict[str, Any], entrants: Sequence[Entrant], questions: Sequence[Question], answers: Sequence[Answer]
) -> dict[str, Any]:
    """Plain data for JSON. Answers refer to their question by its index in the list. facts: settings and machine."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **facts,
        "entrants": [{"name": entrant.name, **asdict(entrant.config)} for entrant in entrants],
        "questions": [_question_json(question) for question in questions],
        "table": [row.to_json() for row in table(answers)],
        "answers": [_answer_json(answer) for answer in answers],
    }


def model_facts(models: Models) -> dict[str, Any]:
    """Name, revision, size and number format of the models."""
    target, draft = models.target, models.draft
    return {
        "model": target.name,
        "revision": target.revision,
        "parameters": target.parameters,
        "draft": draft.name if draft else "",
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
    }


def as_csv(answers: Sequence[Answer]) -> str:
    """Header and one line per answer. An apostrophe precedes texts that a spreadsheet would run."""
    streams = sorted({stream for answer in answers for stream in answer.forwards})
    deepest = max((len(answer.trials) for answer in answers), default=0)
    lines = [_line(answer, streams, deepest) for answer in answers]
    written = io.StringIO()
    writer = csv.DictWriter(written, list(lines[0]) if lines else ["entrant"])
    writer.writeheader()
    writer.writerows(
        {name: cell(value) if isinstance(value, str) else value for name, value in line.items()} for line in lines
    )
    return written.getvalue()


def page(title: str, facts: dict[str, Any], answers: Sequence[Answer]) -> str:
    """The tables in Markdown, with settings and machine."""
    tables = [section(each.task, each.rows, *each.remarks) for each in sections(table(answers))]
    return markdown_page(f"# {title}", NOTES, facts_table(facts), *tables)


def _question_json(question: Question) -> dict[str, Any]:
    return {
        "task": question.task,
        "prompt": question.prompt,
        "chat": question.chat,
        "before": question.before,
        "context": question.context,
        "answer": question.answer,
        "grade": question.grade,
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    """Everything except the question, which the document lists separately."""
    return {name: value for name, value in vars(answer).items() if name != "question"}


def _line(answer: Answer, streams: list[str], deepest: int) -> dict[str, Any]:
    question, trials = answer.question, answer.trials + [("", "")] * (deepest - len(answer.trials))
    return {
        "entrant": answer.entrant,
        "task": question.task,
        "question": answer.number,
        "round": answer.round,
        "seed": answer.seed,
        "prompt": question.prompt,
        "context": question.context,
        "expected": question.answer or "",
        "text": answer.text,
        "score": "" if answer.score is None else answer.score,
        "tokens": len(answer.token_ids),
        "seconds": answer.seconds,
        "clock": answer.clock,
        **{f"forwards_{stream}": answer.forwards.get(stream, 0) for stream in streams},
        "tested": answer.tested,
        "accepted": answer.accepted,
        **{f"accepted_{depth}": accepted for depth, (accepted, _) in enumerate(trials, 1)},
        **{f"tested_{depth}": tested for depth, (_, tested) in enumerate(trials, 1)},
        "flops": answer.flops,
        "kv_live": "" if answer.kv_live is None else answer.kv_live,
        "reason": answer.reason,
        "failure": answer.failure,
        "lacking": answer.lacking,
        "token_ids": " ".join(map(str, answer.token_ids)),
    }
