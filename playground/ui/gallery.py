"""The gallery: examples to begin with, as a row of buttons. Its event is 'pick', with the index of the example."""
from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

PROMPTS = Path(__file__).parents[2] / "assets" / "prompts.json"
SCRIPT = """
element.addEventListener('click', (event) => {
  const chip = event.target.closest('button[data-index]');
  if (chip) trigger('pick', { index: Number(chip.dataset.index) });
});
"""


def examples() -> list[dict[str, Any]]:
    """Each has a title, a note, and any of the fields of Settings."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))


def brought_models() -> set[str]:
    """Models that examples name themselves."""
    return {example["model"] for example in examples() if "model" in example}


class Gallery(gr.HTML):
    def __init__(self, **kwargs: Any):
        chips = "".join(f"<button type='button' data-index='{i}' title='{escape(example['note'], quote=True)}'>{escape(example['title'])}</button>"
                        for i, example in enumerate(examples()))
        super().__init__(html_template=f"<div class='gallery' role='group' aria-label='Examples'>{chips}</div>", js_on_load=SCRIPT,
                         apply_default_css=False, **kwargs)
