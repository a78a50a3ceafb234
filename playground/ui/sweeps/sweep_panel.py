"""A panel that runs many lanes of one session: their progress and their results as HTML, and a button to stop them.

The lanes share forwards. The browser gets only the drawn results, not their events.
"""
from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, Protocol

import gradio as gr

from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.player.frames import Facts
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import Settings
from playground.ui.components.theme import PRIVATE
from playground.ui.guard.readers import ends_unread
from playground.ui.models.status_line import queue_status, status
from playground.ui.play.visit import Changes, Visit
from playground.ui.server.admission_queue import REPEATS
from playground.ui.server.site import Site


class PanelProgress(Protocol):
    """The state of the lanes so far."""

    def add(self, events: Facts) -> None: ...

    def draw(self, headers: Facts, error: str = "") -> str: ...


class SweepPanel:
    """Base class of such panels, which add their controls, the request and its progress."""

    go: gr.Button
    halt: gr.Button
    output: gr.HTML

    def __init__(self, site: Site):
        self.site, self.visit = site, gr.State(None)

    def inputs(self) -> list[gr.components.Component]:
        """The panel's own controls."""
        raise NotImplementedError

    def request(self, settings: Settings, *values: Any) -> tuple[Settings, PanelProgress]:
        """The settings of the lanes to run, from those of the page and the values of `inputs`. Raises Refusal."""
        raise NotImplementedError

    def bind(self, controls: list[gr.components.Component]) -> None:
        self.go.click(
            self.run,
            [self.visit, *self.inputs(), *controls],
            [self.visit, self.output, self.go, self.halt],
            concurrency_limit=None,
            **PRIVATE,
        )
        self.halt.click(self.stop, self.visit, [self.go, self.halt], queue=False, **PRIVATE)

    @ends_unread
    def run(self, before: Visit | None, *values: Any) -> Iterator[Changes]:
        """Run the lanes that the panel's controls ask for; leaving the page stops them."""
        own = len(self.inputs())
        settings = Settings(*values[own:])
        visit = before.follow(settings) if before else Visit(settings)
        try:
            with as_refusals("This run"):
                settings.check(self.site.rules)
                visit.settings, progress = self.request(settings, *values[:own])
                yield {self.visit: visit, self.output: "", **self._buttons(running=True)}
                yield from self._stream(visit, progress)
        except Refusal as refusal:
            yield {
                self.output: f"<p class='refused' role='alert'>{escape(str(refusal))}</p>",
                **self._buttons(running=False),
            }
        finally:
            visit.leave()

    def stop(self, visit: Visit | None) -> Changes:
        """Stop all lanes; if none is active, reset the buttons."""
        if visit is None or visit.over:
            return self._buttons(running=False)
        visit.stop()
        return gr.skip()

    def _stream(self, visit: Visit, progress: PanelProgress) -> Iterator[Changes]:
        loading = self.site.chosen.load(visit.settings)
        for now in loading.watch():
            yield {self.output: status(now)} if not visit.stopped else gr.skip()
        if visit.stopped:
            yield gr.skip() if visit.left else self._buttons(running=False)
            return
        visit.ticket = self.site.join(REPEATS)
        for place in visit.ticket.wait():
            waits = queue_status(place, visit.ticket.waited)
            yield {self.output: waits} if not visit.stopped else gr.skip()
            if visit.stopped:
                yield gr.skip() if visit.left else self._buttons(running=False)
                return
        # With an empty memory: the lanes do not depend on earlier runs.
        visit.run = self.site.runs.start(loading, visit.settings, Memory())
        try:
            yield from self._watch(visit, progress)
        finally:
            visit.run.stop()

    def _watch(self, visit: Visit, progress: PanelProgress) -> Iterator[Changes]:
        for news in visit.run.frames():
            progress.add(news["events"] if news else [])
            yield {self.output: progress.draw(visit.run.headers)} if news else gr.skip()
        if not visit.left:
            yield {self.output: progress.draw(visit.run.headers, visit.run.error), **self._buttons(running=False)}

    def _buttons(self, running: bool) -> Changes:
        return {self.go: gr.update(visible=not running), self.halt: gr.update(visible=running)}
