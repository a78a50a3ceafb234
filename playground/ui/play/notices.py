"""The notices of the page: messages beside the controls that they are about."""
from __future__ import annotations

from html import escape

from playground.errors import Refusal
from playground.ui.play.visit import Changes

MODEL_CONTROLS = ("model", "draft", "device", "dtype", "quantization")


class Notices:
    """The notices of one page."""

    def __init__(self, page):
        self.page = page

    def show(self, refusal: Refusal) -> Changes:
        """Show the message of a refusal next to the control it is about, which the page opens, and clear the others."""
        parts = refusal.about.split(":")  # a control, or "lane", the lane's index and the field
        place, field = parts[0], parts[-1]
        near = {"lanes": self.page.lanes_notice, **dict.fromkeys(MODEL_CONTROLS, self.page.model_notice)}
        typed = {"tools": self.page.tools_notice, "form": self.page.form_notice}
        if place in typed:  # a lane may have a knob of this name
            near[place] = typed[place]
        in_lane = self.page.lanes_notice if place == "lane" and field != "context" else self.page.prompt_notice
        return {**self.clear(), near.get(field, in_lane): _marked(refusal)}

    def clear(self) -> Changes:
        page = self.page
        beside = (page.prompt_notice, page.tools_notice, page.form_notice, page.model_notice, page.lanes_notice)
        return {**dict.fromkeys(beside, ""), **page.show_remarks([])}


def _marked(refusal: Refusal) -> str:
    """A message as HTML, with the control that it is about."""
    return f"<span data-about='{escape(refusal.about)}'>{escape(str(refusal))}</span>"
