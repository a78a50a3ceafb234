"""Guided lessons, read from assets/lessons/*.md and shown in a panel next to the part of the page they explain.

A file begins with `key: value` lines: title, minutes, about, remember (shown at the end), and settings of the page
(the fields of a RunRequest; as JSON unless plain text). Each step is a heading `## ...`, with
`show:` with a part of the page (SHOWN), optionally `lane:` for the lane shown by the views and `at:` for the place
of the run that the player goes to (a place of scripts/run/readings.js), and settings that apply from that step on.
Then come paragraphs, and at most one question:

    question: How many forwards will lane 2 need, compared with lane 1?
    answer: target_forwards(2) / target_forwards(1)
    + fewer than half | below 0.5
    - fewer, but not half as few | below 1
    - as many or more | otherwise
    because: Every accepted draft token saves a forward.

A `question` asks for a prediction: its run is made after it, and the results on the page are covered until then. An
`exercise` in its place is answered by looking at the run of an earlier step. An answer is a reading of
scripts/run/readings.js, or the quotient or difference of two. The browser computes it from the visitor's own run;
the first choice whose limit holds is correct. `none` is for runs in which the reading has no value. `guess: a number`
instead of choices asks for a number. The choice marked + (or the number `shows:`) is the answer of the bundled models,
which a test compares with their run. The component's events are 'prepare' (a step was opened: show its prompt and
lanes) and 'set_up' (run it as well), each with `lesson` and `step`.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from playground.asset_files import ASSETS
from playground.errors import Refusal
from playground.page_scripts import joined
from playground.request_limits import quoted
from playground.run_request import RunRequest, choices, kinds
from playground.ui.components.scripted_component import Scripted
from playground.ui.components.settings import Settings

SHOWN = {
    "prompt": "#prompt",
    "context": "#passage",
    "numbers": ".drawer .numbers",
    "editor": "#editor",
    "run": "#run",
    "lanes": ".live .lanes",
    "tokens": ".live .lanes .text",
    "costs": ".live .lanes .costs",
    "promises": ".live .lanes .badges, #editor .foot",
    "player": ".live .player",
    "colours": ".live :is(.key, .view-menu)",
    "branches": ".live .panel-branches",
    "difference": ".live .panel-difference",
    "entropy": ".live .panel-entropy",
    "tree": ".live .panel-tree",
    "rounds": ".live .panel-rounds",
    "cache": ".live .panel-cache",
    "mask": ".live .panel-mask",
    "canvas": ".live .panel-canvas",
    "method": ".live .panel-figures",
    "repeats": ".repeats",
}
"""Parts of the page that a step may point at, and their CSS selectors."""
PLACES = ("side_branch",)
"""Places of a run that a step may begin at; scripts/run/readings.js finds them."""
ABOUT = {"title": str, "minutes": int, "about": str, "remember": str}
SET = kinds(RunRequest)
STEP = {"show": str, "lane": int, "at": str, **SET}
ASKED = {"question": str, "exercise": str, "answer": str, "guess": str, "shows": int, "because": str}
OFFERED = {"show": SHOWN, "at": PLACES, **choices(RunRequest)}
CHOICE = ("- ", "+ ")
FIELD = re.compile(r"([a-z_]+): ?(.*)")
READING = re.compile(r"([a-z_]+)\((\d+(?:, *\d+)*)\)")
LIMIT = re.compile(r"(below|up to) (-?\d+(?:\.\d+)?)|(otherwise|none)")


@dataclass(frozen=True)
class LessonQuestion:
    """A question. readings: one or two names with their lanes, counted from 1. sign: "/" or "-" between two.

    expected: what the run of the bundled models answers, as the index of a choice or as a number.
    """

    text: str
    is_prediction: bool  # asked before the run
    readings: list[tuple[str, list[int]]]
    sign: str = ""
    # (text, "below", "up to", "otherwise" or "none", limit)
    choices: list[tuple[str, str, float]] = field(default_factory=list)
    guess: str = ""  # the number that is asked for, if there are no choices
    expected: int = 0
    because: str = ""


@dataclass(frozen=True)
class LessonStep:
    heading: str
    paragraphs: list[str]
    show: str
    lane: int  # shown by the views, counted from 1; 0 leaves them unchanged
    at: str  # the place of the run that the player goes to, one of PLACES; empty for none
    settings: dict[str, Any]
    question: LessonQuestion | None


@dataclass(frozen=True)
class Lesson:
    name: str
    title: str
    minutes: int
    about: str
    remember: str
    steps: list[LessonStep]


@cache
def lessons() -> dict[str, Lesson]:
    """All lessons by name, in the order of their numbered files. Raises Refusal for a malformed file."""
    return {lesson.name: lesson for lesson in map(read_lesson, sorted((ASSETS / "lessons").glob("*.md")))}


def read_lesson(path: Path) -> Lesson:
    """Read a lesson. Raises Refusal with the file and the line of an error."""
    source = LessonSource(path.name, _text_of(path).splitlines())
    head, *sections = source.sections()
    about = head.fields({**ABOUT, **SET}, head.numbered())
    head.has(about, *ABOUT, "prompt", "lanes")
    if not sections:
        raise head.wrong("the lesson has no step: begin one with a line '## ...'")
    settings, steps = {name: about[name] for name in SET if name in about}, []
    for section in sections:
        steps.append(section.step(settings))
        settings = steps[-1].settings
    return Lesson(path.stem.split("-", 1)[-1], **{name: about[name] for name in ABOUT}, steps=steps)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise Refusal(f"{path.name} is not UTF-8 text: save it as UTF-8.", "lessons") from None


@dataclass
class LessonSource:
    """Numbered lines of a file or of a part of it."""

    file: str
    lines: list[str]
    first: int = 1  # number of the first line

    def wrong(self, what: str, number: int | None = None) -> Refusal:
        return Refusal(f"{self.file}, line {number or self.first}: {what}.", "lessons")

    def numbered(self) -> Iterator[tuple[int, str]]:
        return ((self.first + i, line.strip()) for i, line in enumerate(self.lines) if line.strip())

    def sections(self) -> list[LessonSource]:
        """The lines before the first heading, then each heading with the lines after it."""
        starts = [0, *(i for i, line in enumerate(self.lines) if line.startswith("## ")), len(self.lines)]
        return [
            LessonSource(self.file, self.lines[start:end], self.first + start) for start, end in zip(starts, starts[1:])
        ]

    def blocks(self) -> list[LessonSource]:
        """Blocks of lines separated by blank lines, without the heading."""
        starts = [
            i for i, line in enumerate(self.lines) if i and line.strip() and (i == 1 or not self.lines[i - 1].strip())
        ]
        return [
            LessonSource(self.file, list(takewhile(str.strip, self.lines[start:])), self.first + start)
            for start in starts
        ]

    def has_entries(self) -> bool:
        return bool(FIELD.fullmatch(self.lines[0])) or any(line.startswith(CHOICE) for line in self.lines)

    def fields(self, known: dict[str, type], numbered: Iterable[tuple[int, str]]) -> dict[str, Any]:
        found = {}
        for number, line in numbered:
            match = FIELD.fullmatch(line)
            if not match:
                raise self.wrong("'key: value' is expected here", number)
            found[match[1]] = self.value(match, known, number)
        return found

    def value(self, match: re.Match, known: dict[str, type], number: int) -> Any:
        name, raw = match[1], match[2]
        if name not in known:
            raise self.wrong(f"{name} is not one of {', '.join(known)}", number)
        try:
            value = raw if known[name] is str and not raw.startswith('"') else json.loads(raw)
        except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
            raise self.wrong(f"the value of {name} cannot be read as JSON", number) from None
        if type(value) is not known[name] or value not in OFFERED.get(name, (value,)):
            raise self.wrong(f"{raw or 'nothing'} is not a value of {name}", number)
        return value

    def has(self, found: dict[str, Any], *names: str) -> None:
        for name in names:
            if name not in found:
                raise self.wrong(f"{name} is missing")

    def step(self, before: dict[str, Any]) -> LessonStep:
        """One step. before: the settings so far. A block is either a paragraph, or consists of keys and choices."""
        blocks = self.blocks()
        paragraphs = [" ".join(line for _, line in block.numbered()) for block in blocks if not block.has_entries()]
        entries = [entry for block in blocks if block.has_entries() for entry in block.numbered()]
        found = self.fields({**STEP, **ASKED}, (entry for entry in entries if not entry[1].startswith(CHOICE)))
        marked = [(number, line) for number, line in entries if line.startswith(CHOICE)]
        choices = [self.choice(line[2:], number) for number, line in marked]
        right = [i for i, (_, line) in enumerate(marked) if line.startswith("+ ")]
        self.has(found, "show")
        settings = {**before, **{name: found[name] for name in SET if name in found}}
        question = self.question(found, choices, right, len(settings["lanes"]))
        return LessonStep(
            self.lines[0].removeprefix("## ").strip(),
            paragraphs,
            found["show"],
            found.get("lane", 0),
            found.get("at", ""),
            settings,
            question,
        )

    def choice(self, line: str, number: int) -> tuple[str, str, float]:
        text, _, limit = line.rpartition(" | ")
        match = LIMIT.fullmatch(limit.strip())
        if not match or not text:
            raise self.wrong("a choice is '- text | below 3', 'up to 3', 'otherwise' or 'none'", number)
        return text.strip(), match[1] or match[3], float(match[2] or 0)

    def question(
        self, found: dict[str, Any], choices: list[tuple[str, str, float]], right: list[int], lanes: int
    ) -> LessonQuestion | None:
        """The question of a step. right: the choices marked +, by index."""
        texts = [found[name] for name in ("question", "exercise") if name in found]
        if not texts:
            if choices or {"answer", "guess", "shows", "because"} & found.keys():
                raise self.wrong("this step has an answer but no question")
            return None
        self.has(found, "answer")
        self.check_choices(found, choices, right)
        if len(texts) > 1:
            raise self.wrong("a step has either a question or an exercise")
        readings, sign = self.answer(found["answer"], lanes)
        expected = right[0] if right else found["shows"]
        about = (found.get("guess", ""), expected, found.get("because", ""))
        return LessonQuestion(texts[0], "question" in found, readings, sign, choices, *about)

    def check_choices(
        self, found: dict[str, Any], choices: list[tuple[str, str, float]], right: list[int]
    ) -> None:
        if bool(choices) == ("guess" in found):
            raise self.wrong("a question has either choices or a line 'guess:'")
        limits = [limit for _, kind, limit in choices if kind in ("below", "up to")]
        if choices and (limits != sorted(limits) or [kind for _, kind, _ in choices].count("otherwise") != 1):
            raise self.wrong("the limits of the choices must increase, and one choice must be 'otherwise'")
        if len(right) + ("shows" in found) != 1 or bool(right) != bool(choices):
            raise self.wrong("mark one choice with +, or say which number the run 'shows:'")

    def answer(self, written: str, lanes: int) -> tuple[list[tuple[str, list[int]]], str]:
        """The readings of an answer, and the sign between them."""
        parts = re.split(r" ([/-]) ", written)
        matches = [READING.fullmatch(part) for part in parts[::2]]
        if len(parts) > 3 or not all(matches):
            raise self.wrong(f"{written!r} is neither a reading such as tokens(1), nor two with / or - between them")
        readings = [(match[1], [int(lane) for lane in match[2].split(",")]) for match in matches]
        if any(not 1 <= lane <= lanes for _, asked in readings for lane in asked):
            raise self.wrong(f"{written!r} asks about a lane that this step does not have")
        return readings, "".join(parts[1:2])


def settings_of(lesson: str, step: int) -> Settings:
    """The settings of a step; raises Refusal for an unknown lesson or step."""
    found = lessons().get(lesson)
    if found is None or not 0 <= step < len(found.steps):
        raise Refusal(f"There is no step {step + 1} of a lesson {quoted(lesson)}: choose one from the list.", "lessons")
    return Settings.read(found.steps[step].settings)


class Lessons(Scripted):
    def __init__(self, **kwargs: Any):
        data = {"lessons": [asdict(lesson) for lesson in lessons().values()], "shown": SHOWN}
        super().__init__(
            html_template="<div class='lessons'></div>",
            js_on_load=joined("play/lessons.js", {"LESSONS": data}),
            apply_default_css=False,
            **kwargs,
        )
