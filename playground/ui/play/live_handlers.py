"""What a visitor does with a run that is there: hold, step, stop, look into it, forget what it learned.

Every handler returns {component: value} for the components it changes; the page binds them to events.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gradio as gr

from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.player.frames import frame, recording
from playground.remote.remote_server import RemoteServer
from playground.request_limits import MAX_TOKEN_ID
from playground.ui.components.event_fields import number, text, whole_number
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import Settings
from playground.ui.play.kept_runs import LONGEST_NAME
from playground.ui.play.notices import Notices
from playground.ui.play.visit import (
    Changes,
    Visit,
    has_lane,
    is_remote,
    past_tokens,
    settings_of_lane,
    shown_visit,
    with_settings,
)
from playground.ui.server.site import Site

LONGEST_BEAT = 3600  # largest interval between frames that a browser may request, in seconds


class LiveHandlers:
    """The events of one page that are about a run; everything that belongs to a visitor is passed in."""

    def __init__(self, site: Site, page):
        self.site, self.page, self.notices = site, page, Notices(page)

    def hold(self, visit: Visit | None) -> None:
        if visit and visit.run:
            visit.run.hold()

    def resume(self, visit: Visit | None) -> None:
        if visit:
            visit.resume()

    def step(self, visit: Visit | None) -> None:
        if visit:
            visit.step()

    def stop(self, visit: Visit | None) -> Changes:
        """Stop all lanes; if no run is active, reset the buttons."""
        if visit is None or visit.over:
            return self.page.idle()
        visit.stop()
        return gr.skip()

    def stop_lane(self, visit: Visit | None, event: gr.EventData) -> None:
        if has_lane(visit, event):
            visit.run.stop(whole_number(event, "lane"))

    def pace(self, visit: Visit | None, event: gr.EventData) -> None:
        """Send fewer frames to a browser that cannot keep up."""
        if visit and visit.run:
            with suppress(Refusal):  # this event has no output
                visit.run.pace(number(event, "beat", 0, LONGEST_BEAT))

    def heard(self, event: gr.EventData) -> None:
        """The page gets the frames of a run by its stream: from now on Gradio brings only the last one."""
        with suppress(Refusal):  # this event has no output
            self._by_stream(text(event, "run", LONGEST_NAME), True)

    def missed(self, visit: Visit | None, event: gr.EventData) -> Changes:
        """The whole run so far, for a browser that lost frames or gets no stream; Gradio brings those that follow."""
        if not visit:
            return gr.skip()
        try:
            shown = visit.of(text(event, "run", LONGEST_NAME))
        except Refusal:
            return gr.skip()
        run = shown.run
        self._by_stream(run.name, False)
        return with_settings(frame(run.name, run.number, list(run.events), run.state, run.headers), shown)

    def _by_stream(self, run: str, heard: bool) -> None:
        """Note whether the page gets the frames of a run by its stream."""
        if stream := self.site.streams.find(run):
            stream.heard = heard

    def again(self, visit: Visit | None) -> Changes:
        """Replay the visitor's last run from the server's record, for instance after a broken connection."""
        if not (visit and visit.run and visit.run.events):
            return {self.page.prompt_notice: "There is no run to show yet: press Run first."}
        return {self.page.live: recording(visit.run.headers, list(visit.run.events)), **self.notices.clear()}

    def connect(self, visit: Visit | None, address: str, model: str, key: str) -> Changes:
        """Add a lane of a server to the following runs, or with an empty address none."""
        visit = visit or Visit(Settings(), stopped=True)
        try:
            visit.server = RemoteServer.given(address, model, key) if address.strip() else None
        except Refusal as refusal:
            visit.server = None
            return {self.page.visit: visit, **self.page.remote.refused(refusal)}
        return {self.page.visit: visit, **self.page.remote.connected(visit.server)}

    def forget(self, visit: Visit | None) -> Changes:
        """Clear what strategies remember. An active run keeps its memory, which is dropped with it."""
        if visit:
            visit.memory = Memory()
        return self.page.show_memory(Memory())

    def look(self, visit: Visit | None, event: gr.EventData) -> Changes:
        """The lane's model by layer before a token: predictions (logit lens) and attention."""
        return self._answer_query("inside", self._look, visit, event)

    def attribute(self, visit: Visit | None, event: gr.EventData) -> Changes:
        """The effect of each word of the prompt on a token, by leave-one-out."""
        return self._answer_query("attributed", self._attribute, visit, event)

    def _answer_query(self, name: str, ask: Callable[..., dict], visit: Visit | None, event: gr.EventData) -> Changes:
        """The result of `ask` for a position of a lane, or its refusal, as a message to the live view."""
        try:
            with as_refusals("The lookup of this run"):
                shown = shown_visit(self.site, visit, event)
        except Refusal as refusal:
            return {"run": str(getattr(event, "run", ""))[:LONGEST_NAME], name: None, "refused": str(refusal)}
        if not has_lane(shown, event) or is_remote(shown, event):
            return gr.skip()
        try:
            place = {"lane": whole_number(event, "lane"), "position": whole_number(event, "position")}
            with as_refusals("The computation"):
                found = ask(shown, event, whole_number(event, "token", MAX_TOKEN_ID))
        except Refusal as refusal:
            return {"run": shown.run.name, name: None, "refused": str(refusal)}
        return {"run": shown.run.name, name: {**found, **place}}

    def _look(self, shown: Visit, event: gr.EventData, chosen: int) -> dict[str, Any]:
        header = shown.run.headers[whole_number(event, "lane")]
        tokens = [*header["prompt_ids"], *past_tokens(shown.run, event)]
        looked = self.site.runs.look(settings_of_lane(shown, header), header["model"], tokens, chosen)
        return {**looked, "chosen": chosen}

    def _attribute(self, shown: Visit, event: gr.EventData, chosen: int) -> dict[str, Any]:
        header = shown.run.headers[whole_number(event, "lane")]
        prompt = header["prompt_ids"]
        tokens = [*prompt, *past_tokens(shown.run, event)]
        return self.site.runs.attribute(settings_of_lane(shown, header), header["model"], tokens, len(prompt), chosen)
