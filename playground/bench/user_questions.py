"""Questions that a person brings along: JSON Lines, one object a line, read as data that anybody may have written.

    {"prompt": "What is 2 + 3?", "answer": "5", "contains": true, "task": "sums", "chat": true, "context": ""}

Only the prompt has to be there. A text is right if it is the answer, spaces around it aside, or with "contains" if the
answer stands somewhere in it. Imports neither torch nor gradio.
"""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from playground.bench.questions import Question
from playground.errors import Refusal
from playground.request_limits import UNREADABLE

MOST_BYTES, MOST_LINES = 1_000_000, 500  # of a file, and questions in it
TASK, RULE = "own", "own_rule"
LONGEST = {"prompt": 20_000, "task": 60, "context": 20_000, "answer": 20_000}  # letters of each text
FLAGS = ("chat", "contains")
FORM = '{"prompt": "What is 2 + 3?", "answer": "5"}'


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file; raises Refusal, with the line where one is to blame."""
    name = Path(path).name
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as reason:
        raise Refusal(
            f"The questions {name} cannot be read ({reason.strerror or reason}): check the path.", "file"
        ) from None
    if len(raw) > MOST_BYTES:
        raise Refusal(f"{name} is larger than {MOST_BYTES:,} bytes: leave some questions away.", "file")
    try:
        return questions_in(raw.decode("utf-8-sig"), name)
    except UnicodeDecodeError:
        raise Refusal(f"{name} is no text in UTF-8: save it as one.", "file") from None


def questions_in(text: str, name: str = "the questions") -> list[Question]:
    """The questions of a text; raises Refusal, with the line where one is to blame."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise Refusal(f"There is no question in {name}: write one object a line, such as {FORM}.", "file")
    if len(lines) > MOST_LINES:
        raise Refusal(
            f"There are {len(lines)} questions in {name}, and {MOST_LINES} are the most: leave some away.", "file"
        )
    return [_question(line, f"Line {number} of {name}") for number, line in lines]


def is_own(question: Question) -> bool:
    """Whether a person brought it along, whatever its task is called."""
    return RULE in question.meta


def own_score(question: Question, text: str) -> float | None:
    """1 for right and 0 for wrong by the question's own rule; None where it has no answer."""
    if question.answer is None:
        return None
    wanted = question.answer.strip()
    return float(wanted in text if question.meta[RULE] == "contains" else wanted == text.strip())


def _question(line: str, place: str) -> Question:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: a line of ten thousand brackets
        raise Refusal(f"{place} is not JSON: write an object such as {FORM}.", "file") from None
    if problem := _problem(entry):
        raise Refusal(f"{place}: {problem}.", "file")
    rule = "contains" if entry.get("contains") else "exact"
    return Question(
        entry.get("task") or TASK,
        entry["prompt"],
        entry.get("answer"),
        chat=entry.get("chat", True),
        context=entry.get("context", ""),
        meta={RULE: rule},
    )


def _problem(entry: Any) -> str:
    """What is wrong with a line, empty if nothing is."""
    if not isinstance(entry, dict):
        return f"it is no object; write one such as {FORM}"
    for name, value in entry.items():
        if name not in (*LONGEST, *FLAGS):
            return f"there is no field {name[:40]!r}; take {', '.join((*LONGEST, *FLAGS))}"
        if problem := _flag_problem(value) if name in FLAGS else _text_problem(value, LONGEST[name]):
            return f"{name} {problem}"
    if not entry.get("prompt", "").strip():
        return "the prompt is missing or empty"
    if not entry.get("answer", "-").strip():
        return "the answer is empty; leave it away where nobody knows it"
    return ""


def _flag_problem(value: Any) -> str:
    return "" if isinstance(value, bool) else "is true or false"


def _text_problem(value: Any, longest: int) -> str:
    if not isinstance(value, str):
        return "is a text, so put it in quotation marks"
    if len(value) > longest:
        return f"has {len(value):,} letters, and {longest:,} are the most"
    return "holds a NUL or half a letter (a lone surrogate): write whole letters" if UNREADABLE.search(value) else ""


def exactly(question: Question, task: str) -> Question:
    """The question under another name of its task, right where a text is the answer."""
    return replace(question, task=task, meta=question.meta | {RULE: "exact"})
