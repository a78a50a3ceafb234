"""The gallery: ways to begin. A row of first examples; folded away, all examples by topic and questions with known
answers by task.

Its event is 'pick', with `index` and `part`: "examples" or "questions". Beside a question that is asked stands what to
look at.
"""
from __future__ import annotations

import json
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from playground.bench import questions
from playground.bench.questions import Question
from playground.errors import Refusal
from playground.ui.scripted_component import Scripted
from playground.ui.settings import Settings

PROMPTS = Path(__file__).parents[2] / "assets" / "prompts.json"
SCRIPT = (PROMPTS.parent / "gallery.js").read_text(encoding="utf-8")
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
STARTERS = 9  # examples that stand in the row, from the first one on
TOPICS = {
    "words": "Choosing words",
    "guessing": "Guessing ahead",
    "texts": "Several texts",
    "grammars": "Legal tokens",
    "caches": "Small caches",
    "passages": "Passage and memory",
    "orders": "Other orders",
}
TOLD = "Each sets a prompt and the lanes that show something on it; models and seed stay as they are."
KNOWS = (
    "The bundled models are tiny: they know only an invented country and some hundred stories, their tales are fragments, and all else is beyond "
    "them. Training showed none of these questions. The higher grades are hard for them; each lane says whether it was right when it has ended."
)
SHORT = 96  # letters of a prompt in the list


def examples() -> list[dict[str, Any]]:
    """Each has a title, a topic, a note, and any of the fields of Settings."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))


def brought(**chosen: str) -> set[str]:
    """Which of the chosen models, model="oracle", are there because an example named them."""
    return {control for control, name in chosen.items() if any(example.get(control) == name for example in examples())}


def picked(part: str, index: int) -> dict[str, Any]:
    """What a pick sets, by the fields of Settings; what it does not name stays as it is. Raises Refusal for an entry
    that does not exist.
    """
    listed = questions.gallery() if part == "questions" else examples()
    if not 0 <= index < len(listed):
        raise Refusal("There is no such entry in the gallery: choose one from its lists.", "prompt")
    cleared = {"context": "", "before": []}
    return {**cleared, **(_asked(listed[index]) if part == "questions" else listed[index])}


def _asked(question: Question) -> dict[str, Any]:
    turns = [[*turn] for turn in question.before]
    return {
        "prompt": question.prompt,
        "mode": "chat",
        "context": question.context,
        "before": turns,
        "stop": "",
        **question.settings,
    }


def beside(settings: Settings) -> str:
    """What stands beside a question whose answer is known: what to look at, and the answer to unfold. Empty for any
    other prompt.
    """
    question = settings.known()
    if question is None:
        return ""
    return (
        f"<p class='look'>{escape(question.look)}</p>"
        f"<details class='answer'><summary>The answer is known</summary><pre>{escape(question.expected)}</pre></details>"
    )


class Gallery(Scripted):
    def __init__(self, **kwargs: Any):
        super().__init__(
            html_template=_plain(f"<div class='gallery'>{_examples()}{_questions()}</div>"),
            js_on_load=SCRIPT,
            apply_default_css=False,
            **kwargs,
        )


def _plain(html: str) -> str:
    """HTML in which nothing means anything to a template: prompts have braces."""
    return html.replace("{", "&#123;").replace("$", "&#36;").replace("`", "&#96;")


def _examples() -> str:
    """The first ones as a row, and all of them in a fold."""
    chips = (
        f"<button type='button' data-part='examples' data-index='{i}' title='{escape(example['note'])}'>{escape(example['title'])}</button>"
        for i, example in enumerate(examples()[:STARTERS])
    )
    listed = sorted(enumerate(examples()), key=lambda numbered: [*TOPICS].index(numbered[1]["topic"]))
    groups = {
        topic: [_example(i, example) for i, example in found]
        for topic, found in groupby(listed, lambda numbered: numbered[1]["topic"])
    }
    return f"<div class='row starters' role='group' aria-label='First examples'>{''.join(chips)}</div>{_fold('All examples', TOLD, TOPICS, groups)}"


def _questions() -> str:
    listed = enumerate(questions.gallery())
    groups = {
        task: [_question(i, question) for i, question in found]
        for task, found in groupby(listed, lambda numbered: numbered[1].task)
    }
    return _fold("Questions with known answers", KNOWS, TASKS, groups)


def _fold(title: str, told: str, names: dict[str, str], groups: dict[str, list[str]]) -> str:
    """A fold with a button for each group, which shows the group's own list."""
    chips = "".join(
        f"<button type='button' data-group='{name}' aria-expanded='false' aria-controls='list-{name}'>{escape(names[name])} "
        f"<span class='count'>{len(entries)}</span></button>"
        for name, entries in groups.items()
    )
    lists = "".join(f"<ul id='list-{name}' hidden>{''.join(entries)}</ul>" for name, entries in groups.items())
    return (f"<details class='fold'><summary>{title}</summary><p class='about'>{escape(told)}</p>"
            f"<div class='row' role='group' aria-label='{title}'>{chips}</div>{lists}</details>")


def _example(index: int, example: dict[str, Any]) -> str:
    return _entry("examples", index, ("", example["title"], example["note"]))


def _question(index: int, question: Question) -> str:
    return _entry("questions", index, (f"grade {question.grade}", _shortened(question.prompt), question.look))


def _entry(part: str, index: int, told: tuple[str, str, str]) -> str:
    """A line of a list. told: the grade, how it is put, and what it shows."""
    grade, put, look = map(escape, told)
    marked = f"<span class='grade'>{grade}</span>" if grade else ""
    return (f"<li><button type='button' data-part='{part}' data-index='{index}'>{marked}"
            f"<span class='put'>{put}</span><span class='look'>{look}</span></button></li>")


def _shortened(prompt: str) -> str:
    """Beginning and end of a prompt, in whole words: in some the question comes first, in others last."""
    if len(prompt) <= SHORT:
        return prompt
    return f"{prompt[:SHORT // 2].rpartition(' ')[0]} … {prompt[-SHORT // 2:].partition(' ')[2]}"
