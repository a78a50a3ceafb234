"""A visitor's run and its settings, from the click on Run until the next one."""
from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import gradio as gr

from playground.decoding.forked_session import Siblings
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.remote.remote_server import RemoteServer
from playground.trace.transcript import Written, sequences
from playground.ui.components.event_fields import has, text, whole_number
from playground.ui.components.settings import Settings
from playground.ui.play.kept_runs import LONGEST_NAME, KeptRun, kept_run
from playground.ui.server.admission_queue import Ticket
from playground.ui.server.site import Site
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun

EARLIER = 3  # runs of a visitor kept beside the last one, compressed
Changes = dict[Any, Any]


@dataclass(eq=False)
class Visit:
    """A visitor's last run and its settings; there is no run yet while models load.

    The memory of strategies passes from visit to visit. It is stored only here, so no other visitor's run can read it.
    The visits before this one are kept, a few of them, so that their runs can be forked after an undo.
    """

    settings: Settings
    memory: Memory = field(default_factory=Memory)
    run: Run | RemoteRun | KeptRun | None = None
    ticket: Ticket | None = None  # its seat or its place in the queue
    stopped: bool = False
    left: bool = False  # another run has replaced it on the page
    reads: bool = False  # the models score the prompt; the lanes of the editor are not run
    siblings: Siblings | None = None  # of a fork: the lanes of the run that it comes from
    server: RemoteServer | None = None  # generates one more lane; stored only here, since it may hold a key
    earlier: list[Visit] = field(default_factory=list)  # the newest last
    follower: ref[Visit] | None = None  # weak: a visit that was refused is nobody's last one

    @property
    def over(self) -> bool:
        return self.run.over if self.run else self.stopped

    def begin(self, run: Run | RemoteRun) -> None:
        """Take a run that has a seat; the seat is given up whenever the run is held."""
        self.run = run
        if self.ticket:
            run.on_held = self.ticket.rest

    def resume(self) -> None:
        """Resume the run once it has a seat."""
        if self.run and self.ticket:
            self.ticket.ask_again(self.run.resume)

    def step(self) -> None:
        """Run every lane up to its next commit, once the run has a seat."""
        if self.run and self.ticket:
            self.ticket.ask_again(self.run.step)

    def leave(self) -> None:
        """End the run, give up its seat and compress its record."""
        if self.ticket:
            self.ticket.leave()
        if self.run:
            self.run.stop()
            self.run.archive()

    def stop(self) -> None:
        self.stopped = True
        if self.run:
            self.run.stop()

    def follow(self, settings: Settings, reads: bool = False, siblings: Siblings | None = None) -> Visit:
        """The visitor's next visit. The last one ends, since one run at a time is active: this one, or one that was
        begun meanwhile, which the page does not know yet.
        """
        last = self._last()
        last.left = True
        last.stop()
        earlier, last.earlier = [visit for visit in (*last.earlier, last) if visit.run][-EARLIER:], []
        visit = Visit(settings, last.memory, reads=reads, siblings=siblings, server=last.server, earlier=earlier)
        self.follower = last.follower = ref(visit)
        return visit

    def _last(self) -> Visit:
        """The newest of the visits that follow this one."""
        last = self
        while last.follower and (following := last.follower()):
            last = following
        return last

    def of(self, run: str) -> Visit:
        """The visit of a run by its name. Raises Refusal if it is not kept."""
        for visit in (self, *reversed(self.earlier)):
            if visit.run and visit.run.name == run:
                return visit
        raise Refusal("This run is no longer on the server: press Run first.", "lanes")


def shown_visit(site: Site, visit: Visit | None, event: gr.EventData) -> Visit | None:
    """The visit of the run that an event names, which the browser sends if it is no longer here; the last one if
    the event names none. Raises Refusal.
    """
    if has(event, "kept"):
        kept = kept_run(event, site.rules)
        site.chosen.check_same(kept.settings, kept.headers[0])
        return Visit(kept.settings, run=kept)
    return visit.of(text(event, "run", LONGEST_NAME)) if visit and has(event, "run") else visit


def settings_of_lane(shown: Visit, header: dict[str, Any]) -> Settings:
    """The settings that choose the model of a lane: one with weights of its own has another target than the run."""
    own = next((part["name"] for part in header.get("parts", ()) if part["kind"] == "weights"), "")
    return replace(shown.settings, quantization=own) if own else shown.settings


def past_tokens(run: Run | RemoteRun | KeptRun, event: gr.EventData) -> list[int]:
    """Token ids before a position of a lane's sequence."""
    written = sequences(run.trace.lane(whole_number(event, "lane")).events).get(
        whole_number(event, "sequence"), Written()
    )
    return [token.id for token in written.tokens[:whole_number(event, "position")]]


def has_lane(visit: Visit | None, event: gr.EventData) -> bool:
    with suppress(Refusal):
        return bool(visit and visit.run) and whole_number(event, "lane") < len(visit.run.headers)
    return False


def is_remote(visit: Visit, event: gr.EventData) -> bool:
    """Whether a server generates the lane, which can be neither forked nor inspected."""
    return bool(visit.run.headers[whole_number(event, "lane")].get("remote"))


def with_settings(news: dict[str, Any], visit: Visit) -> dict[str, Any]:
    """A frame; if it begins a run of lanes, with their settings, which the browser keeps to fork the run later."""
    return {**news, "settings": visit.settings.to_code()} if news.get("headers") and not visit.reads else news
