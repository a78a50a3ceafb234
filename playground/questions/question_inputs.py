"""Inputs that a question provides besides its prompt: with `gencls_ppl:labels={labels}` a lane chooses among its
labels.

A knob whose value is a name in braces takes its value from the question. Such inputs describe the task and never reveal
the right answer: labels are all values that could be asked for, tests differ from those that judge a program, and
trusted answers belong to other questions. A user's own questions provide a passage only. Imports neither torch nor
gradio.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from playground.algorithms.programs.sandbox import call
from playground.errors import Refusal
from playground.lane_fields import LaneConfig
from playground.questions.questions import PROGRAMS, Question
from playground.questions.user_questions import is_own
from playground.questions.world import arithmetic, facts, programs
from playground.questions.world.attributes import VALUES
from playground.questions.world.show import items

TRUSTED = 8  # questions with their answers
PAIRED = ("facts", "lists")  # tasks whose questions and answers are one line each
READ_THROUGH = "needle"  # the task whose prompt is the passage


class Lacking(Refusal):
    """An entrant needs an input that the question does not provide: it is skipped, which is not counted as a failure.
    """


def passage(question: Question) -> str | None:
    return question.context.strip() or (
        question.prompt if question.task == READ_THROUGH and not is_own(question) else None
    )


def labels(question: Question) -> str | None:
    """All values of the requested attribute; None if the question is about its owner or town instead."""
    attribute = question.meta.get("kind" if question.task == facts.TASK else "attribute")
    values = VALUES.get(attribute, ())
    return "|".join(values) if question.answer in values else None


def tests(question: Question) -> str | None:
    """A line per input that guides a search, with what the known program returns. Judging uses other inputs."""
    if question.task != PROGRAMS:
        return None
    name, inputs = question.meta["name"], programs.GUIDES[question.meta["takes"]]
    results = call(question.answer or "", name, inputs)
    return results and "\n".join(f"{name}({given!r}) == {result!r}" for given, result in zip(inputs, results))


def schema(question: Question) -> str | None:
    return json.dumps(question.meta["schema"]) if "schema" in question.meta else None


def pairs(question: Question) -> str | None:
    """Training questions of the same task with their answers, none about the same subject."""
    if question.task not in PAIRED:
        return None
    subject = question.meta.get("subject", "")
    others = [
        item
        for item in items(question.task, 4 * TRUSTED, held_out=False)
        if item.meta.get("subject") != subject and "\n" not in item.prompt
    ]
    return "\n".join(f"{item.prompt} => {item.answer}" for item in others[:TRUSTED])


def cue(question: Question) -> str | None:
    """The marker before the final number of a worked answer; a sheet of sums has none."""
    return "####" if question.task == arithmetic.TASK and question.meta["kind"] != "sheet" else None


BRINGS: dict[str, tuple[str, Callable[[Question], str | None]]] = {
    "passage": ("a passage", passage),
    "labels": ("labels to choose from", labels),
    "tests": ("tests", tests),
    "schema": ("a schema", schema),
    "pairs": ("trusted answers", pairs),
    "cue": ("a final number", cue),
}


def filled(config: LaneConfig, question: Question) -> LaneConfig:
    """The config with names in braces replaced by the question's inputs. Raises Lacking for one it does not provide."""
    def fill(knobs: dict[str, Any]) -> dict[str, Any]:
        names = {knob: _input_name(value) for knob, value in knobs.items()}
        return {knob: _input(names[knob], question) if names[knob] else value for knob, value in knobs.items()}

    return replace(config, knobs=fill(config.knobs), extras=[(name, fill(knobs)) for name, knobs in config.extras])


def bare(config: LaneConfig) -> LaneConfig:
    """The config without these knobs, which keep their defaults until there is a question."""
    def strip(knobs: dict[str, Any]) -> dict[str, Any]:
        return {knob: value for knob, value in knobs.items() if not _input_name(value)}

    return replace(config, knobs=strip(config.knobs), extras=[(name, strip(knobs)) for name, knobs in config.extras])


def _input_name(value: Any) -> str:
    """The name in braces that is the value of a knob; empty for any other value. Raises Refusal for an unknown name."""
    if not (isinstance(value, str) and value[:1] == "{" and value[-1:] == "}" and value[1:-1].isidentifier()):
        return ""
    if value[1:-1] not in BRINGS:
        raise Refusal(
            f"No question provides {value}: use one of {', '.join(f'{{{name}}}' for name in BRINGS)}.", "entrants"
        )
    return value[1:-1]


def _input(name: str, question: Question) -> str:
    noun, bring = BRINGS[name]
    found = bring(question) if name == "passage" or not is_own(question) else None
    if not found:
        raise Lacking(noun, name)
    return found
