"""A survey on paper: all of it as JSON, its answers as CSV, its tables as a page in Markdown. Imports neither torch nor
gradio.
"""
from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from playground.bench.questions import Question
from playground.bench.results import sections, table
from playground.bench.survey import Answer, Entrant
from playground.trace.csv_export import cell

if TYPE_CHECKING:
    from playground.decoding.session import Models

FORMAT, VERSION = "decoding-playground-survey", 1
NOTES = """Every entrant answered every question in a lane of its own, in turn, round after round, in one process; a warm-up was
dropped. *Score*: mean over the questions with its standard error, 1 for a right answer. *Target forwards a token*: passes of the
target for each token after the first, prefill left out, so that plain decoding takes 1; *other forwards*: those of every other
model or stream. *Tokens/s* and *time*: wall clock with the prompt's own forward included, median (lowest to highest) of the
rounds; the time is the entrant's seconds over those of the first entrant, taken within each round. *Accepted*: guesses that stood
over those tested, in all and by their position in the draft. *Live slots*: most tokens that a KV head held. *Same text*: answers
with exactly the first entrant's tokens. What stands in braces came from each question; *a dash* in every column: the questions lack
what the entrant needs, and the sentence above the table says what."""


def document(
    facts: dict[str, Any], entrants: Sequence[Entrant], questions: Sequence[Question], answers: Sequence[Answer]
) -> dict[str, Any]:
    """Plain data for JSON. Answers name their question by its place in the list. facts: settings and machine."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **facts,
        "entrants": [{"name": entrant.name, **asdict(entrant.recipe)} for entrant in entrants],
        "questions": [_asked(question) for question in questions],
        "table": [row.to_json() for row in table(answers)],
        "answers": [_told(answer) for answer in answers],
    }


def models_told(models: Models) -> dict[str, Any]:
    """What was measured."""
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
    """A line for each answer, under a line of names. Texts that a spreadsheet would run as formulas begin with an
    apostrophe.
    """
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
    """The tables in Markdown, with what they were measured on."""
    parts = [f"# {title}", NOTES, facts_table(facts)]
    for section in sections(table(answers)):
        parts += [f"## {section.task}", *section.remarks, markdown(section.rows)]
    return "\n\n".join(parts) + "\n"


def facts_table(facts: dict[str, Any]) -> str:
    return markdown([["", ""], *([name, str(value)] for part in facts.values() for name, value in part.items())])


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    lines = [f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _asked(question: Question) -> dict[str, Any]:
    return {
        "task": question.task,
        "prompt": question.prompt,
        "chat": question.chat,
        "before": question.before,
        "context": question.context,
        "answer": question.answer,
        "grade": question.grade,
    }


def _told(answer: Answer) -> dict[str, Any]:
    """Everything but the question, which stands elsewhere."""
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
