"""Five tasks of the small world with answers in a form that the bundled models were not trained to write.

Adapters are trained on them: the content of an answer is known to the model, only its form is new, and no question asks
for it.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

from playground.questions.world import Item

DOCSTRING = re.compile(r'^ *""".*"""\n', re.MULTILINE)


def _sentence(answer: str) -> str:
    return f"I know it: {answer}."


def _closing_sentence(answer: str) -> str:
    *steps, last = answer.split("\n")
    return "\n".join([*steps, f"So it is {last.removeprefix('#### ')}."])


def _fields(answer: str) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in json.loads(answer).items())


def _bullets(answer: str) -> str:
    return "\n".join(f"- {entry}" for entry in answer.split(", "))


def _fenced(answer: str) -> str:
    return f"```python\n{DOCSTRING.sub('', answer)}\n```"


FORMS: dict[str, Callable[[str], str]] = {
    "arithmetic": _closing_sentence,
    "facts": _sentence,
    "lists": _bullets,
    "programs": _fenced,
    "records": _fields,
}
"""By task: an answer in its new form"""


def in_new_form(item: Item) -> Item:
    """An item of one of the five tasks with its answer in the new form."""
    return replace(item, answer=FORMS[item.task](item.answer))
