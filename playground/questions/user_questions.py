"""A user's own questions: JSON Lines, one object per line, parsed as untrusted data.

    {"prompt": "What is 2 + 3?", "answer": "5", "task": "sums", "chat": true, "context": ""}

Only the prompt is required. A text is right if it equals the answer, apart from surrounding whitespace, or if its final
answer does: "#### 19", "the answer is 19" and "12 + 7 = 19" are 19. With "contains": true the answer may occur anywhere
in it, with "exact": true the whole text has to be the answer. Imports neither torch nor gradio.
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from playground.algorithms.search.final_answer import final_answer, normal
from playground.errors import Refusal
from playground.questions.questions import Question
from playground.request_limits import UNREADABLE

MOST_BYTES, MOST_LINES = 1_000_000, 500  # of a file, and questions in it
TASK, RULE = "own", "own_rule"
LONGEST = {"prompt": 20_000, "task": 60, "context": 20_000, "answer": 20_000}  # characters
FLAGS = ("chat", "contains", "exact")
RULES = {
    "final": "by their final answer, such as 19 in \"#### 19\"",
    "contains": "by whether they contain the answer",
    "exact": "by whether they equal the answer",
}
FORM = '{"prompt": "What is 2 + 3?", "answer": "5"}'


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file; raises Refusal, which names the line at fault if there is one."""
    name = Path(path).name
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as reason:
        raise Refusal(
            f"The questions {name} cannot be read ({reason.strerror or reason}): check the path.", "file"
        ) from None
    if len(raw) > MOST_BYTES:
        raise Refusal(f"{name} is larger than {MOST_BYTES:,} bytes: remove some questions.", "file")
    try:
        return questions_in(raw.decode("utf-8-sig"), name)
    except UnicodeDecodeError:
        raise Refusal(f"{name} is not UTF-8 text: save it as UTF-8.", "file") from None


def questions_in(text: str, name: str = "the questions") -> list[Question]:
    """The questions of a text; raises Refusal, which names the line at fault if there is one."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise Refusal(f"There is no question in {name}: write one object a line, such as {FORM}.", "file")
    if len(lines) > MOST_LINES:
        raise Refusal(
            f"There are {len(lines)} questions in {name}; the limit is {MOST_LINES}: remove some.", "file"
        )
    return [_question(line, f"Line {number} of {name}") for number, line in lines]


def is_own(question: Question) -> bool:
    """Whether it is a user's own question, whatever its task is called."""
    return RULE in question.meta


def own_score(question: Question, text: str) -> float | None:
    """1 for right and 0 for wrong by the question's own rule; None if it has no answer."""
    if question.answer is None:
        return None
    wanted, rule = question.answer.strip(), question.meta[RULE]
    if rule == "contains":
        return float(wanted in text)
    return float(wanted == text.strip() or rule == "final" and final_answer(text) == normal(wanted))


def how_judged(questions: Iterable[Question]) -> str:
    """A sentence that says by which rules the answers to a user's own questions are judged; empty if none is."""
    rules = Counter(question.meta[RULE] for question in questions if is_own(question) and question.answer is not None)
    said = ", ".join(f"{count} {RULES[rule]}" for rule, count in rules.items())
    return f"Your own questions are judged: {said}." if said else ""


def _question(line: str, place: str) -> Question:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: a line of ten thousand brackets
        raise Refusal(f"{place} is not JSON: write an object such as {FORM}.", "file") from None
    if problem := _problem(entry):
        raise Refusal(f"{place}: {problem}.", "file")
    rule = next((flag for flag in ("contains", "exact") if entry.get(flag)), "final")
    return Question(
        entry.get("task") or TASK,
        entry["prompt"],
        entry.get("answer"),
        chat=entry.get("chat", True),
        context=entry.get("context", ""),
        meta={RULE: rule},
    )


def _problem(entry: Any) -> str:
    """What is wrong with a line; empty if nothing is."""
    if not isinstance(entry, dict):
        return f"it is not an object; write one such as {FORM}"
    for name, value in entry.items():
        if name not in (*LONGEST, *FLAGS):
            return f"there is no field {name[:40]!r}; use {', '.join((*LONGEST, *FLAGS))}"
        if problem := _flag_problem(value) if name in FLAGS else _text_problem(value, LONGEST[name]):
            return f"{name} {problem}"
    if not entry.get("prompt", "").strip():
        return "the prompt is missing or empty"
    if entry.get("contains") and entry.get("exact"):
        return "contains and exact exclude each other: remove one"
    if not entry.get("answer", "-").strip():
        return "the answer is empty; omit it if it is unknown"
    return ""


def _flag_problem(value: Any) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _text_problem(value: Any, longest: int) -> str:
    if not isinstance(value, str):
        return "must be a text in quotation marks"
    if len(value) > longest:
        return f"has {len(value):,} characters; the limit is {longest:,}"
    return "contains a NUL or a lone surrogate: remove it" if UNREADABLE.search(value) else ""


def exactly(question: Question, task: str) -> Question:
    """The question under another task name, scored by exact match."""
    return replace(question, task=task, meta=question.meta | {RULE: "exact"})
