"""What starts a run and streams it: models are loaded, a seat is awaited, frames are brought, the outcome is shown.

Handlers are generators that yield {component: value} for the components they change; the page binds them to events.
"""
from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import chain
from math import inf
from time import monotonic
from typing import Any

import gradio as gr

from playground.decoding.forked_session import Siblings
from playground.decoding.lane_checks import Surroundings, check_some_ready
from playground.errors import Refusal
from playground.request_limits import MAX_TOKEN_ID
from playground.ui.components.event_fields import has, text, whole_number
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import Fork, LaneCopy, Settings, SwitchedCopy
from playground.ui.guard.readers import ends_unread
from playground.ui.models.status_line import queue_status, status
from playground.ui.play.kept_runs import KeptRun
from playground.ui.play.notices import Notices
from playground.ui.play.visit import Changes, Visit, has_lane, is_remote, past_tokens, shown_visit, with_settings
from playground.ui.server.admission_queue import PAGE
from playground.ui.server.model_loader import ModelLoad
from playground.ui.server.run_streams import RunStream
from playground.ui.server.site import Site
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun

QUIET = 1.0  # seconds between two messages while the stream brings the frames: only then does Gradio notice who left
STOP_SHOWN_AGAIN = 2.0  # seconds between two messages that show Stop
HELD_LIMIT = 600.0  # seconds that a run may be held on a public page
LONGEST_WORDS = 500  # characters typed to begin a fork
LONGEST_PART = 40  # characters of the name of a part


class RunHandlers:
    """The events of one page that start runs; everything that belongs to a visitor is passed in."""

    def __init__(self, site: Site, page):
        self.site, self.page, self.notices = site, page, Notices(page)

    @ends_unread
    def ready(self) -> Iterator[Changes]:
        """Show the loading progress of the page's own models."""
        yield from self._settled(lambda: self.site.model_loader.request(self.site.model_request))

    @ends_unread
    def load(self, *values: Any) -> Iterator[Changes]:
        """Load the chosen models now rather than with the first run."""
        yield from self._settled(lambda: self.site.chosen.load(Settings(*values)))

    @ends_unread
    def run(self, before: Visit | None, *values: Any) -> Iterator[Changes]:
        """Load missing models, start a run and stream it; leaving the page stops it."""
        settings = Settings(*values)
        yield from self._guarded(before.follow(settings) if before else Visit(settings))

    @ends_unread
    def score(self, before: Visit | None, *values: Any) -> Iterator[Changes]:
        """Score the prompt token by token; nothing is generated."""
        settings = Settings(*values)
        yield from self._guarded(before.follow(settings, reads=True) if before else Visit(settings, reads=True))

    @ends_unread
    def fork(self, visit: Visit | None, event: gr.EventData) -> Iterator[Changes]:
        """Run a lane again, continued differently from a position of its shown sequence or with a part of the model
        off; the others are unchanged, and those that are running go on.
        """
        try:
            with as_refusals("This fork", "lanes"):
                shown = shown_visit(self.site, visit, event)
                if not has_lane(shown, event) or shown.reads or is_remote(shown, event):
                    return
                copy = self._copy(shown, event)
                settings = shown.settings.with_copy(copy)
                settings.check(self.site.rules)  # before the running lanes leave their run
        except Refusal as refusal:
            yield self.notices.show(refusal)
            return
        yield {self.page.lanes: settings.lanes}
        siblings = _siblings(shown.run, copy)
        yield from self._guarded((visit or Visit(Settings())).follow(settings, siblings=siblings))

    def _copy(self, shown: Visit, event: gr.EventData) -> LaneCopy:
        """The copy of a lane that an event requests. Raises Refusal."""
        lane, lanes = whole_number(event, "lane"), len(shown.run.headers)
        instead_of = whole_number(event, "instead_of", lanes - 1) if has(event, "instead_of") else None
        if has(event, "part"):
            return SwitchedCopy(lane, text(event, "part", LONGEST_PART), instead_of=instead_of)
        tokens = [*past_tokens(shown.run, event), *self._instead(shown, event)]
        return Fork(lane, tokens, whole_number(event, "position"), instead_of=instead_of)

    def _instead(self, visit: Visit, event: gr.EventData) -> list[int]:
        """The tokens that a fork continues with: the chosen candidate, or the typed words."""
        if not has(event, "words"):
            return [whole_number(event, "token", MAX_TOKEN_ID)]
        return self.site.chosen.continuation_tokens(
            visit.settings, visit.run.headers[whole_number(event, "lane")]["model"], text(event, "words", LONGEST_WORDS)
        )

    def _guarded(self, visit: Visit) -> Iterator[Changes]:
        try:
            with as_refusals("This run"):
                yield from self._run(visit)
        except Refusal as refusal:
            yield from self._refused(visit, refusal)
        finally:
            visit.leave()

    def _refused(self, visit: Visit, refusal: Refusal) -> Iterator[Changes]:
        """Show why a run cannot be, unless the next one has begun before this answer."""
        # cleared first: so the same message, shown again, scrolls into view
        for show in (self.notices.clear, lambda: {**self.page.idle(), **self.notices.show(refusal)}):
            yield gr.skip() if visit.left else show()

    def _run(self, visit: Visit) -> Iterator[Changes]:
        visit.settings.check(self.site.rules)
        around = self._checked(visit)
        loading = self.site.chosen.load(visit.settings)
        yield {self.page.visit: visit, **self.page.busy(), **self.notices.clear(), self.page.status: status(loading)}
        awaited = [loading, *self.site.chosen.weight_loads(visit.settings).values()]
        progress = [self._progress(one) for one in awaited if not one.ended.is_set()]
        for change in chain(*progress, self._queue(visit)):
            yield change
            if visit.stopped:
                yield gr.skip() if visit.left else self.page.idle()
                return
        if around.attention is None:  # now it is known
            self._checked(visit)
        visit.begin(
            self.site.runs.read(loading, visit.settings)
            if visit.reads
            else self.site.runs.start(loading, visit.settings, visit.memory, visit.siblings, visit.server)
        )
        self.site.show_to_class(visit.run)
        visit.siblings = None  # a whole trace, which the run has now
        yield from self._stream(visit, loading)

    def _checked(self, visit: Visit) -> Surroundings:
        """What the lanes need besides their own settings. Raises Refusal if no lane has what it needs."""
        around = self.site.chosen.surroundings(visit.settings)
        if not visit.reads:
            check_some_ready(visit.settings.configs(), around)
        return around

    def _queue(self, visit: Visit) -> Iterator[Changes]:
        """Show the place in the queue until the run has a seat."""
        visit.ticket = self.site.join(PAGE)
        for place in visit.ticket.wait():
            yield {self.page.status: queue_status(place, visit.ticket.waited)}

    def _stream(self, visit: Visit, loading: ModelLoad) -> Iterator[Changes]:
        """Hand the frames to the run's stream until the run is over; a visitor who leaves stops it."""
        try:
            with self.site.streams.opened(visit.run.name) as stream:
                yield from self._news(visit, loading, stream)
            yield gr.skip() if visit.left else {**self._rested(visit), self.page.status: status(loading)}
        finally:
            visit.run.stop()

    def _news(self, visit: Visit, loading: ModelLoad, stream: RunStream) -> Iterator[Changes]:
        """The status line of a run, and the frames that the page does not get by the stream."""
        # The buttons are sent again and again: a browser was seen to lose the message that shows Stop.
        status_before, offered, yielded, remarked = "", -inf, -inf, False
        for news in visit.run.frames():
            self._limit_hold(visit)
            live = self._live(visit, stream, news) if news else {}
            if not live and monotonic() - yielded < QUIET:
                continue
            shown = self._shown(visit, loading)
            shared = {self.page.status: shown} if shown != status_before else {}
            if visit.run.headers and not remarked:
                shared |= self.page.show_remarks(found) if (found := _remarks(visit.run)) else {}
                remarked = True
            again = self.page.stoppable() if monotonic() - offered > STOP_SHOWN_AGAIN else {}
            offered = monotonic() if again else offered
            yield {**again, **shared, **live} or gr.skip()
            status_before, yielded = shown, monotonic()

    def _live(self, visit: Visit, stream: RunStream, news: dict[str, Any]) -> Changes:
        """A frame for Gradio to bring; none if the stream brings it. The first one says that there is a stream."""
        whole = with_settings(news, visit)
        if stream.carry(whole):
            return {}
        return {self.page.live: {**whole, "streamed": True} if news["n"] == 0 else whole}

    def _shown(self, visit: Visit, loading: ModelLoad) -> str:
        """The status line of a run: its place in the queue if it waits, otherwise the models and how many runs share
        the device.
        """
        place = visit.ticket.place if visit.ticket else 0
        waits = queue_status(place, visit.ticket.waited) if place else ""
        return waits or status(loading, self.site.runs.others(loading.models, visit.run))

    def _limit_hold(self, visit: Visit) -> None:
        """On a public page, end a run that is held for too long, since its KV caches take memory that others need."""
        ticket = visit.ticket
        if self.site.rules.public and ticket and ticket.state == "resting" and monotonic() - ticket.since > HELD_LIMIT:
            visit.run.fail(f"This run was held for {HELD_LIMIT / 60:.0f} minutes and was ended: run it again.")

    def _rested(self, visit: Visit) -> Changes:
        """Reset the buttons; show the outcome, and how much strategies remember."""
        return {**self.page.idle(), **self._outcome(visit.run), **self.page.show_memory(visit.memory)}

    def _settled(self, wanted) -> Iterator[Changes]:
        """Show progress until the wanted models are loaded, or the reason why they cannot be."""
        try:
            with as_refusals("Loading the models", "model"):
                loading = wanted()
                yield from self._progress(loading)
                loading.result()
            yield self.notices.clear()
        except Refusal as refusal:
            yield self.notices.show(refusal)

    def _progress(self, loading: ModelLoad) -> Iterator[Changes]:
        for now in loading.watch():
            yield {self.page.status: status(now)}
        yield {self.page.status: status(loading)}

    def _outcome(self, run: Run | RemoteRun) -> Changes:
        """Show failures of lanes in the lane editor and an error of the run below the prompt."""
        failed = {str(event["lane"]): event.get("message", "") for event in run.events if event["kind"] == "failed"}
        return {
            self.page.lanes: gr.update(problems=failed),
            self.page.prompt_notice: escape(run.error),
            **self.page.show_remarks(_remarks(run)),  # again: a busy browser may have lost the first message
        }


def _remarks(run: Run | RemoteRun) -> list[str]:
    """What is to know about the prompt of a run, each once."""
    return list(dict.fromkeys(remark for header in run.headers for remark in header.get("remarks", ())))


def _siblings(run: Run | RemoteRun | KeptRun, copy: LaneCopy) -> Siblings:
    """The lanes beside a copy of one. Those that are running leave their run and go on beside the copy."""
    session = run.hand_over()
    trace = session.trace if session else run.trace
    return Siblings(trace, copy.siblings(len(run.headers)), copy.place, session)
