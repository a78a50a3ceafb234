"""What a question brings beside its prompt, for entrants that need more: `gencls_ppl:labels={labels}` chooses among its
labels.

A knob that is nothing but a name in braces takes its value from the question. Whatever an entrant gets so says what is
asked for and never which answer is right: labels are all that could be asked for, the tests are not those that judge a
program, and trusted answers are those of other questions. A person's own questions bring a passage and nothing else.
Imports neither torch nor gradio.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from playground.algorithms.programs.sandbox import call
from playground.bench.questions import PROGRAMS, Question
from playground.bench.user_questions import is_own
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from playground.pocket.world import arithmetic, facts, programs
from playground.pocket.world.attributes import VALUES
from playground.pocket.world.show import items

TRUSTED = 8  # questions with their answers
PAIRED = ("facts", "lists")  # tasks whose questions and answers are a line each
READ_THROUGH = "needle"  # the task whose prompt is the passage


class Lacking(Refusal):
    """An entrant needs what a question does not bring: nothing failed, it cannot be asked."""


def passage(question: Question) -> str | None:
    return question.context.strip() or (
        question.prompt if question.task == READ_THROUGH and not is_own(question) else None
    )


def labels(question: Question) -> str | None:
    """All values of what is asked for; none where it is asked who or which town has one."""
    attribute = question.meta.get("kind" if question.task == facts.TASK else "attribute")
    values = VALUES.get(attribute, ())
    return "|".join(values) if question.answer in values else None


def tests(question: Question) -> str | None:
    """A line for each input that guides a search, with what the known program returns; the inputs that judge are
    others.
    """
    if question.task != PROGRAMS:
        return None
    name, inputs = question.meta["name"], programs.GUIDES[question.meta["takes"]]
    results = call(question.answer or "", name, inputs)
    return results and "\n".join(f"{name}({given!r}) == {result!r}" for given, result in zip(inputs, results))


def schema(question: Question) -> str | None:
    return json.dumps(question.meta["schema"]) if "schema" in question.meta else None


def pairs(question: Question) -> str | None:
    """Questions of the same task that training shows, none about the same subject, with their answers."""
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
    """What stands before the final number of a worked answer; a sheet of sums has none."""
    return "####" if question.task == arithmetic.TASK and question.meta["kind"] != "sheet" else None


BRINGS: dict[str, tuple[str, Callable[[Question], str | None]]] = {
    "passage": ("a passage", passage),
    "labels": ("labels to choose from", labels),
    "tests": ("tests", tests),
    "schema": ("a schema", schema),
    "pairs": ("trusted answers", pairs),
    "cue": ("a final number", cue),
}


def filled(recipe: LaneConfig, question: Question) -> LaneConfig:
    """The recipe with what the question brings in the place of names in braces. Raises Lacking for what it does not
    bring.
    """
    def fill(knobs: dict[str, Any]) -> dict[str, Any]:
        return {knob: _brought(asked, question) if (asked := _asked(value)) else value for knob, value in knobs.items()}

    return replace(recipe, knobs=fill(recipe.knobs), extras=[(name, fill(knobs)) for name, knobs in recipe.extras])


def bare(recipe: LaneConfig) -> LaneConfig:
    """The recipe before there is a question: such knobs are as they come."""
    def strip(knobs: dict[str, Any]) -> dict[str, Any]:
        return {knob: value for knob, value in knobs.items() if not _asked(value)}

    return replace(recipe, knobs=strip(recipe.knobs), extras=[(name, strip(knobs)) for name, knobs in recipe.extras])


def _asked(value: Any) -> str:
    """The name that a knob's value asks for; empty where it is a value. Raises Refusal for a name there is none of."""
    if not (isinstance(value, str) and value[:1] == "{" and value[-1:] == "}" and value[1:-1].isidentifier()):
        return ""
    if value[1:-1] not in BRINGS:
        raise Refusal(
            f"No question brings {value}: take one of {', '.join(f'{{{name}}}' for name in BRINGS)}.", "entrants"
        )
    return value[1:-1]


def _brought(name: str, question: Question) -> str:
    noun, bring = BRINGS[name]
    found = bring(question) if name == "passage" or not is_own(question) else None
    if not found:
        raise Lacking(noun, name)
    return found
