"""The gallery: ways to begin. Examples as a row of buttons, and questions with known answers, folded away and sorted by task.

Its event is 'pick', with `index` and `part`: "examples" or "questions". Beside a question that is asked stands what to look at.
"""
from __future__ import annotations

import json
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import gradio as gr

from playground import questions
from playground.questions import Question
from playground.ui.settings import Settings

PROMPTS = Path(__file__).parents[2] / "assets" / "prompts.json"
SCRIPT = (PROMPTS.parent / "gallery.js").read_text(encoding="utf-8")
TASKS = {"facts": "Facts by heart", "context_qa": "Passages", "arithmetic": "Sums", "records": "Records", "edit": "Edits", "lists": "Lists",
         "programs": "Programs", "needle": "A hidden key", "stories": "Stories", "chat": "Several turns"}
KNOWS = ("The bundled models are tiny: they know only an invented country, their tales are fragments, and all else is beyond them. Those of this "
         "version learned from fewer forms of question than stand here and answer few of these rightly, as each lane says when it has ended.")
SHORT = 96  # letters of a prompt in the list


def examples() -> list[dict[str, Any]]:
    """Each has a title, a note, and any of the fields of Settings."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))


def brought_models() -> set[str]:
    """Models that examples name themselves."""
    return {example["model"] for example in examples() if "model" in example}


def picked(part: str, index: int) -> dict[str, Any]:
    """What a pick sets, by the fields of Settings; what it does not name stays as it is."""
    cleared = {"context": "", "before": []}
    return {**cleared, **(_asked(questions.gallery()[index]) if part == "questions" else examples()[index])}


def _asked(question: Question) -> dict[str, Any]:
    turns = [[*turn] for turn in question.before]
    return {"prompt": question.prompt, "mode": "chat", "context": question.context, "before": turns, "stop": "", **question.settings}


def beside(settings: Settings) -> str:
    """What stands beside a question whose answer is known: what to look at, and the answer to unfold. Empty for any other prompt."""
    question = settings.known()
    if question is None:
        return ""
    return (f"<p class='look'>{escape(question.look)}</p>"
            f"<details class='answer'><summary>The answer is known</summary><pre>{escape(question.expected)}</pre></details>")


class Gallery(gr.HTML):
    def __init__(self, **kwargs: Any):
        super().__init__(html_template=_plain(f"<div class='gallery'>{_examples()}{_questions()}</div>"), js_on_load=SCRIPT,
                         apply_default_css=False, **kwargs)


def _plain(html: str) -> str:
    """HTML in which nothing means anything to a template: prompts have braces."""
    return html.replace("{", "&#123;").replace("$", "&#36;").replace("`", "&#96;")


def _examples() -> str:
    chips = (f"<button type='button' data-part='examples' data-index='{i}' title='{escape(example['note'])}'>{escape(example['title'])}</button>"
             for i, example in enumerate(examples()))
    return f"<div class='row' role='group' aria-label='Examples'>{''.join(chips)}</div>"


def _questions() -> str:
    """A fold with a button for each task, which shows the task's own list."""
    by_task = [(task, list(found)) for task, found in groupby(enumerate(questions.gallery()), lambda numbered: numbered[1].task)]
    tasks = "".join(f"<button type='button' data-task='{task}' aria-expanded='false' aria-controls='asked-{task}'>{escape(TASKS[task])} "
                    f"<span class='count'>{len(found)}</span></button>" for task, found in by_task)
    lists = "".join(f"<ul id='asked-{task}' hidden>{''.join(_entry(i, question) for i, question in found)}</ul>" for task, found in by_task)
    return (f"<details class='questions'><summary>Questions with known answers</summary><p class='knows'>{escape(KNOWS)}</p>"
            f"<div class='row' role='group' aria-label='Kinds of question'>{tasks}</div>{lists}</details>")


def _entry(index: int, question: Question) -> str:
    """A question in its list: its grade, how it is put, and what it shows."""
    return (f"<li><button type='button' data-part='questions' data-index='{index}'><span class='grade'>grade {question.grade}</span>"
            f"<span class='put'>{escape(_shortened(question.prompt))}</span><span class='look'>{escape(question.look)}</span></button></li>")


def _shortened(prompt: str) -> str:
    """Beginning and end of a prompt, in whole words: in some the question comes first, in others last."""
    if len(prompt) <= SHORT:
        return prompt
    return f"{prompt[:SHORT // 2].rpartition(' ')[0]} … {prompt[-SHORT // 2:].partition(' ')[2]}"
