"""Controls that several pages have in the same form: the status line, and mode, length and seed of a run."""
from __future__ import annotations

import gradio as gr

from playground.ui.components.settings import Settings
from playground.ui.components.theme import read


class ModelDropdown(gr.Dropdown):
    """A menu of models. A hub id or a folder can be typed into it, except on a public page."""

    is_template = True  # the browser draws a Dropdown

    def preprocess(self, payload: str | None) -> str | None:
        """The value as it was sent: `ChosenModels.request` refuses models that are not offered, with a reason."""
        return payload


def status_line(value: str = "", elem_id: str = "status") -> gr.HTML:
    return gr.HTML(
        value, html_template=read("status.html"), elem_classes="status", elem_id=elem_id, apply_default_css=False
    )


def mode_switch(start: Settings) -> gr.Radio:
    return gr.Radio(
        [("Raw text", "raw"), ("Chat", "chat")],
        value=start.mode,
        label="The prompt is",
        elem_id="mode",
        elem_classes="segmented",
    )


def length_and_seed(start: Settings) -> tuple[gr.Number, gr.Number]:
    """Two numbers side by side."""
    with gr.Row(elem_classes="pair"):
        return (
            gr.Number(start.length, label="Tokens", precision=0, min_width=90, elem_id="length"),
            gr.Number(start.seed, label="Seed", precision=0, min_width=90, elem_id="seed"),
        )
