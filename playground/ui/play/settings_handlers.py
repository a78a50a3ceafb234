"""What changes the settings of the page, and what follows from a change: links, examples, lessons, undo, menus, notes.

Every handler returns or yields {component: value} for the components it changes; the page binds them to events.
"""
from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

from playground.engine.checkpoint.catalogue import DENOISER, TEXT_MODEL
from playground.errors import Refusal
from playground.prompt_form import check_form
from playground.run_request import DEFAULT
from playground.ui.components.event_fields import text, whole_number
from playground.ui.components.settings import Settings
from playground.ui.play.gallery import example_passage, models_from_examples, picked
from playground.ui.play.lessons import settings_of
from playground.ui.play.notices import MODEL_CONTROLS, Notices
from playground.ui.play.visit import Changes
from playground.ui.server.site import Site

LONGEST_NAME = 500  # characters of the name of a lesson or of a part of the gallery


class SettingsHandlers:
    """The events of one page that are about its settings."""

    def __init__(self, site: Site, page):
        self.site, self.page, self.notices = site, page, Notices(page)

    def open(self, stored: Any, request: gr.Request) -> Changes:
        """Set the controls from the link, or else from the browser's storage. After a reload the browser sends what was
        chosen in its tab, which takes precedence; otherwise a lesson in the address sets up its first step by itself.
        """
        reloaded = isinstance(stored, dict) and stored.get("reloaded") is True
        if "lesson" in request.query_params and not reloaded:
            return gr.skip()
        code = "" if reloaded else request.query_params.get("s", "")
        settings = (Settings.from_code(code) if code else None) or (Settings.read(stored) if stored else None)
        return self.page.show(settings, Settings.names()) if settings else gr.skip()

    def pick(self, model: str, draft: str, event: gr.EventData) -> Changes:
        """Set prompt, context, earlier turns, mode and lanes from an entry of the gallery; seed and models stay.

        A model or draft that an earlier example had set is reset, since few other examples can run with it.
        """
        try:
            chosen = picked(text(event, "part", LONGEST_NAME), whole_number(event, "index"))
        except Refusal as refusal:
            return self.notices.show(refusal)
        names = {*chosen} | models_from_examples(model=model, draft=draft)
        return {
            **self.page.show(Settings.read(chosen), [name for name in Settings.names() if name in names]),
            **self.notices.clear(),
        }

    def set_up(self, model: str, draft: str, event: gr.EventData) -> Changes:
        """Set all controls from a step of a lesson. Models stay, unless an example had set them or the lesson does."""
        try:
            settings = settings_of(text(event, "lesson", LONGEST_NAME), whole_number(event, "step"))
        except Refusal as refusal:
            raise gr.Error(str(refusal), print_exception=False) from None  # an error prevents the run after this event
        changed, blank = models_from_examples(model=model, draft=draft), Settings()
        changed |= {name for name in Settings.names() if getattr(settings, name) != getattr(blank, name)}
        names = [name for name in Settings.names() if name not in MODEL_CONTROLS or name in changed]
        return {**self.page.show(settings, names), **self.notices.clear()}

    def restore(self, event: gr.EventData) -> Changes:
        """Set all controls to what they were before the change that is undone."""
        return self.page.show(Settings.read(getattr(event, "settings", None)), Settings.names())

    def update_question_note(self, *values: Any) -> Changes:
        """Show what to look at if the prompt is a question with a known answer."""
        return self.page.show_question_note(Settings(*values))

    def check_tools(self, *values: Any) -> Changes:
        """Show why the tools cannot be used while they are typed."""
        try:
            self.site.chosen.check_tools(Settings(*values))
        except Refusal as refusal:
            return {self.page.tools_notice: escape(str(refusal)) if refusal.about == "tools" else ""}
        return {self.page.tools_notice: ""}

    def check_form(self, form: str) -> Changes:
        """Show why a form of context and prompt cannot be used while it is typed."""
        try:
            check_form(form)
        except Refusal as refusal:
            return {self.page.form_notice: escape(str(refusal))}
        return {self.page.form_notice: ""}

    def offer(self, model: str, draft: str) -> Changes:
        """Update the model menus, and the note on the chosen model."""
        return self.page.offer(Settings(model=model, draft=draft))

    def fit(self, *values: Any) -> Changes:
        """Update which lanes the chosen models can run, whether tools are shown, and why those there cannot be used."""
        chosen = Settings(*values)
        return {**self.page.fit_lanes(chosen), **self.page.fit_tools(chosen), **self.check_tools(*values)}

    def mend(self, event: gr.EventData) -> Changes:
        """Add what a lane needs: the example's passage as context, the target's own draft model, or another target."""
        added = {
            "context": {self.page.context: example_passage()},
            "draft": {self.page.draft: DEFAULT},
            "denoiser": {self.page.model: self.site.chosen.menu_choice(DENOISER)},
            "text model": {self.page.model: self.site.chosen.menu_choice(TEXT_MODEL)},
        }
        return added.get(getattr(event, "what", None), gr.skip())

    def share(self, *values: Any) -> Iterator[Changes]:
        """The code of a link to the current settings. It is cleared first, so that every click triggers the browser."""
        yield {self.page.link: ""}
        yield {self.page.link: Settings(*values).to_code()}

    def embed(self, *values: Any) -> Iterator[Changes]:
        """The same code, for a frame in another page."""
        yield {self.page.frame: ""}
        yield {self.page.frame: Settings(*values).to_code()}
