"""The gallery: a row of first examples and, collapsed, all examples by topic and questions with known answers by task.

Its event is 'pick', with `index` and `part`: "examples" or "questions".
"""
from __future__ import annotations

import json
from functools import cache
from html import escape
from itertools import groupby
from typing import Any

from playground.asset_files import ASSETS
from playground.engine.checkpoint.catalogue import EXPERTS, TEXT_MODEL
from playground.errors import Refusal
from playground.page_scripts import joined
from playground.questions import questions
from playground.questions.questions import Question
from playground.ui.components.scripted_component import Scripted
from playground.ui.components.settings import Settings
from playground.ui.play.lessons import lessons

PROMPTS = ASSETS / "prompts.json"
TASKS = {
    "facts": "Facts by heart",
    "context_qa": "Passages",
    "arithmetic": "Sums",
    "records": "Records",
    "edit": "Edits",
    "lists": "Lists",
    "programs": "Programs",
    "needle": "A hidden key",
    "stories": "Stories",
    "chat": "Several turns",
}
STARTERS = 9  # examples in the row
TOPICS = {
    "words": "Choosing words",
    "guessing": "Speculative decoding",
    "texts": "Several texts",
    "grammars": "Constraints",
    "caches": "KV cache",
    "passages": "Context and memory",
    "orders": "Other orders",
    "inside": "Inside the model",
}
EXAMPLES_NOTE = "Each sets a prompt and suitable lanes; models and seed stay unchanged."
QUESTIONS_NOTE = (
    "The bundled models are tiny: they know only an invented country and a few hundred stories, and their tales are "
    "fragments. None of these questions was in their training data. Questions of higher grades are harder. When a "
    "lane ends, it shows whether its answer is right."
)
TOYS = {TEXT_MODEL: "Pocket is a 7-million-parameter toy that", EXPERTS: "Pocket experts is a toy that"}
SHORT = 96  # characters of a prompt in the list


def examples() -> list[dict[str, Any]]:
    """Each has a title, a topic, a note, and any of the fields of Settings."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))


def example_passage() -> str:
    """The context of the first example that has one."""
    return next(example["context"] for example in examples() if example.get("context"))


def models_from_examples(**chosen: str) -> set[str]:
    """The controls whose chosen model, such as model="oracle", is one that an example sets."""
    return {control for control, name in chosen.items() if any(example.get(control) == name for example in examples())}


def picked(part: str, index: int) -> dict[str, Any]:
    """The fields of Settings that an entry sets; the others stay unchanged. Raises Refusal for an unknown entry."""
    listed = questions.gallery() if part == "questions" else examples()
    if not 0 <= index < len(listed):
        raise Refusal("There is no such entry in the gallery: choose one from its lists.", "prompt")
    entry = listed[index]
    if isinstance(entry, Question):
        return {"stop": "", **entry.request()}
    return {"context": "", "before": [], **entry}


def question_note(settings: Settings) -> str:
    """HTML for a question with a known answer: what to look at, and the answer, collapsed. Empty for other prompts."""
    question = settings.known()
    if question is None:
        return ""
    answer = f"<summary>The answer is known</summary><pre>{escape(question.expected)}</pre>"
    return f"<p class='look'>{escape(question.look)}</p><details class='answer'>{answer}</details>"


def free_prompt_note(settings: Settings, model: str, real: str) -> str:
    """HTML for a prompt of the visitor's own and a bundled model that continues text: what to expect, and the button
    `real` that leads to a real model. Empty for the page's own prompts and for any other model.
    """
    if model not in TOYS or not settings.prompt.strip() or settings.prompt in _known_prompts():
        return ""
    return (f"<p class='look'>{TOYS[model]} knows fairy tales and a small invented world; anything else comes out "
            f"as nonsense. {real}</p>")


@cache
def _known_prompts() -> frozenset[str]:
    """The prompts of examples and lessons."""
    taught = (step.settings.get("prompt") for lesson in lessons().values() for step in lesson.steps)
    return frozenset([*(example.get("prompt") for example in examples()), *taught])


class Gallery(Scripted):
    def __init__(self, **kwargs: Any):
        super().__init__(
            html_template=_plain(f"<div class='gallery'>{_examples()}{_questions()}</div>"),
            js_on_load=joined("play/gallery.js"),
            apply_default_css=False,
            **kwargs,
        )


def _plain(html: str) -> str:
    """HTML with the characters escaped that a template would interpret: prompts contain braces."""
    return html.replace("{", "&#123;").replace("$", "&#36;").replace("`", "&#96;")


def _examples() -> str:
    """The first examples as a row, and all of them, collapsed."""
    chips = (
        f"<button type='button' data-part='examples' data-index='{i}' title='{escape(example['note'])}'>"
        f"{escape(example['title'])}</button>"
        for i, example in enumerate(examples()[:STARTERS])
    )
    listed = sorted(enumerate(examples()), key=lambda numbered: [*TOPICS].index(numbered[1]["topic"]))
    groups = {
        topic: [_example(i, example) for i, example in found]
        for topic, found in groupby(listed, lambda numbered: numbered[1]["topic"])
    }
    row = f"<div class='row starters' role='group' aria-label='First examples'>{''.join(chips)}</div>"
    return row + _fold("All examples", EXAMPLES_NOTE, TOPICS, groups)


def _questions() -> str:
    listed = enumerate(questions.gallery())
    groups = {
        task: [_question(i, question) for i, question in found]
        for task, found in groupby(listed, lambda numbered: numbered[1].task)
    }
    return _fold("Questions with known answers", QUESTIONS_NOTE, TASKS, groups)


def _fold(title: str, note: str, names: dict[str, str], groups: dict[str, list[str]]) -> str:
    """A collapsed section with a button for each group, which shows the group's list."""
    chips = "".join(
        f"<button type='button' data-group='{name}' aria-expanded='false' aria-controls='list-{name}'>"
        f"{escape(names[name])} <span class='count'>{len(entries)}</span></button>"
        for name, entries in groups.items()
    )
    lists = "".join(f"<ul id='list-{name}' hidden>{''.join(entries)}</ul>" for name, entries in groups.items())
    return (f"<details class='fold'><summary>{title}</summary><p class='about'>{escape(note)}</p>"
            f"<div class='row' role='group' aria-label='{title}'>{chips}</div>{lists}</details>")


def _example(index: int, example: dict[str, Any]) -> str:
    return _entry("examples", index, ("", example["title"], example["note"]))


def _question(index: int, question: Question) -> str:
    return _entry("questions", index, (f"grade {question.grade}", _shortened(question.prompt), question.look))


def _entry(part: str, index: int, texts: tuple[str, str, str]) -> str:
    """A line of a list. texts: the grade, the question or title, and what to look at."""
    grade, put, look = map(escape, texts)
    marked = f"<span class='grade'>{grade}</span>" if grade else ""
    return (f"<li><button type='button' data-part='{part}' data-index='{index}'>{marked}"
            f"<span class='put'>{put}</span><span class='look'>{look}</span></button></li>")


def _shortened(prompt: str) -> str:
    """Beginning and end of a prompt, in whole words: the question may come first or last."""
    if len(prompt) <= SHORT:
        return prompt
    return f"{prompt[:SHORT // 2].rpartition(' ')[0]} … {prompt[-SHORT // 2:].partition(' ')[2]}"
