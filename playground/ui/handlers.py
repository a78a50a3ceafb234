"""What happens when a visitor does something: one method for each act. Methods that stream are generators.

Every method returns or yields {component: value} for the few components it touches; the page binds them.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr

from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.request_limits import MAX_TOKEN_ID
from playground.trace.transcript import Written, sequences
from playground.ui import run_figures as figures
from playground.ui import study_figures as studies
from playground.ui.admission_queue import PAGE, Ticket
from playground.ui.event_fields import has, number, text, whole_number
from playground.ui.frames import frame, recording
from playground.ui.gallery import brought, picked
from playground.ui.lessons import settings_of
from playground.ui.model_loader import ModelLoad
from playground.ui.readers import ends_unread
from playground.ui.settings import Settings
from playground.ui.site import Site
from playground.ui.worker import Run
from playground.ui.zero_gpu import RemoteRun

MODEL_CONTROLS = ("model", "draft", "device", "dtype", "quantization")
HELD_LIMIT = 600.0  # seconds that a run may be held on a public page
LONGEST_WORDS = 500  # characters that a fork may be told to begin with
LONGEST_BEAT = 3600  # seconds between two frames that a browser may ask for
Changes = dict[Any, Any]


@dataclass(eq=False)
class Visit:
    """A visitor's last run, and how the page was set for it; there is no run yet while models load.

    What strategies remember goes from visit to visit. It lives here and nowhere else: no other visitor meets it.
    """

    settings: Settings
    memory: Memory = field(default_factory=Memory)
    run: Run | RemoteRun | None = None
    ticket: Ticket | None = None  # its seat, or its place among those who wait for one
    stopped: bool = False
    left: bool = False  # another one has taken its place on the page
    reads: bool = False  # the models only read the prompt, and no lane of the editor writes

    @property
    def over(self) -> bool:
        return self.run.over if self.run else self.stopped

    def begin(self, run: Run | RemoteRun) -> None:
        """Take a run for which there is a seat; the seat is free whenever the run is held."""
        self.run = run
        if self.ticket:
            run.on_held = self.ticket.rest

    def resume(self) -> None:
        """Go on, once there is a seat."""
        if self.run and self.ticket:
            self.ticket.ask_again(self.run.resume)

    def step(self) -> None:
        """Every lane runs up to its next commit, once there is a seat."""
        if self.run and self.ticket:
            self.ticket.ask_again(self.run.step)

    def leave(self) -> None:
        """Nobody follows any more: give the seat back, and keep the record small."""
        if self.ticket:
            self.ticket.leave()
        if self.run:
            self.run.stop()
            self.run.archive()

    def stop(self) -> None:
        self.stopped = True
        if self.run:
            self.run.stop()

    def follow(self, settings: Settings, reads: bool = False) -> Visit:
        """The next visit of the same person. This one ends: one run at a time is shown."""
        self.left = True
        self.stop()
        return Visit(settings, self.memory, reads=reads)


class Handlers:
    """Bound to one page; what belongs to one visitor comes in through the page's state."""

    def __init__(self, site: Site, page):
        self.site, self.page = site, page

    def open(self, stored: Any, request: gr.Request) -> Changes:
        """Put the controls as the link or the browser's memory has them."""
        code = request.query_params.get("s", "")
        settings = (Settings.from_code(code) if code else None) or (Settings.read(stored) if stored else None)
        return self.page.show(settings, Settings.names()) if settings else gr.skip()

    @ends_unread
    def ready(self) -> Iterator[Changes]:
        """Show how the models that the page was started with are coming along."""
        yield from self._settled(lambda: self.site.arrivals.want(self.site.wish))

    @ends_unread
    def load(self, *values: Any) -> Iterator[Changes]:
        """Fetch the chosen models now, rather than at the first run."""
        yield from self._settled(lambda: self.site.arrival(Settings(*values)))

    @ends_unread
    def run(self, before: Visit | None, *values: Any) -> Iterator[Changes]:
        """Load what is missing, begin a run and stream it; leaving the page stops it."""
        settings = Settings(*values)
        yield from self._guarded(before.follow(settings) if before else Visit(settings))

    @ends_unread
    def score(self, before: Visit | None, *values: Any) -> Iterator[Changes]:
        """Show how the models read the prompt, token by token; nothing is written."""
        settings = Settings(*values)
        yield from self._guarded(before.follow(settings, reads=True) if before else Visit(settings, reads=True))

    @ends_unread
    def fork(self, visit: Visit | None, event: gr.EventData) -> Iterator[Changes]:
        """Run again with one more lane that takes another way at some place of a lane's text, or of the sequence that
        was shown as such.
        """
        if not _has_lane(visit, event) or visit.reads:
            return
        try:
            tokens = [*_past(visit.run, event), *self._instead(visit, event)]
        except Refusal as refusal:
            yield self._say(refusal)
            return
        settings = visit.settings.forked(whole_number(event, "lane"), tokens)
        yield {self.page.lanes: settings.lanes}
        yield from self._guarded(visit.follow(settings))

    def _instead(self, visit: Visit, event: gr.EventData) -> list[int]:
        """The tokens that a fork takes: the candidate that was pressed, or the words that were typed."""
        if not has(event, "words"):
            return [whole_number(event, "token", MAX_TOKEN_ID)]
        return self.site.spelt(
            visit.settings, visit.run.headers[whole_number(event, "lane")]["model"], text(event, "words", LONGEST_WORDS)
        )

    def look(self, visit: Visit | None, event: gr.EventData) -> Changes:
        """What the layers of the lane's model make of the text before a token, and what they attend to."""
        if not _has_lane(visit, event):
            return gr.skip()
        lane = whole_number(event, "lane")
        header = visit.run.headers[lane]
        try:
            place = {
                "lane": lane,
                "position": whole_number(event, "position"),
                "chosen": whole_number(event, "token", MAX_TOKEN_ID),
            }
            found = self.site.look(
                visit.settings, header["model"], [*header["prompt_ids"], *_past(visit.run, event)], place["chosen"]
            )
        except Refusal as refusal:
            return {"run": visit.run.name, "inside": None, "refused": str(refusal)}
        return {"run": visit.run.name, "inside": {**found, **place}}

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
        """Stop every lane; where nothing runs any more, put the buttons right."""
        if visit is None or visit.over:
            return self.page.rest()
        visit.stop()
        return gr.skip()

    def stop_lane(self, visit: Visit | None, event: gr.EventData) -> None:
        if _has_lane(visit, event):
            visit.run.stop(whole_number(event, "lane"))

    def pace(self, visit: Visit | None, event: gr.EventData) -> None:
        """A browser that cannot follow is told of its run less often."""
        if visit and visit.run:
            with suppress(Refusal):  # nobody reads an answer to this event
                visit.run.pace(number(event, "beat", 0, LONGEST_BEAT))

    def missed(self, visit: Visit | None) -> Changes:
        """The whole run so far, for a browser that lost frames on the way."""
        if not (visit and visit.run):
            return gr.skip()
        run = visit.run
        return frame(run.name, run.number, list(run.events), run.state, run.headers)

    def again(self, visit: Visit | None) -> Changes:
        """Show the visitor's last run from the server's record, for instance after a broken connection."""
        if not (visit and visit.run and visit.run.events):
            return {self.page.prompt_notice: "There is no run to show yet: press Run first."}
        return {self.page.live: recording(visit.run.headers, list(visit.run.events)), **self._silence()}

    def forget(self, visit: Visit | None) -> Changes:
        """Begin with an empty memory. A run that still goes on keeps its own, which ends with it."""
        if visit:
            visit.memory = Memory()
        return self.page.remembers(Memory())

    def pick(self, model: str, draft: str, event: gr.EventData) -> Changes:
        """Take an example or a question of the gallery: prompt, what comes before it, mode and the lanes that suit it;
        seed and models stay.

        Only a model or a draft that an example brought goes again with the next one: few others could run on it.
        """
        try:
            chosen = picked(text(event, "part", LONGEST_WORDS), whole_number(event, "index"))
        except Refusal as refusal:
            return self._say(refusal)
        names = {*chosen} | brought(model=model, draft=draft)
        return {
            **self.page.show(Settings.read(chosen), [name for name in Settings.names() if name in names]),
            **self._silence(),
        }

    def set_up(self, model: str, draft: str, event: gr.EventData) -> Changes:
        """Set the page as a step of a lesson wants it, down to its stop strings; models stay, but for one that an
        example brought.
        """
        brought_along = brought(model=model, draft=draft)
        names = [name for name in Settings.names() if name not in MODEL_CONTROLS or name in brought_along]
        try:
            settings = settings_of(text(event, "lesson", LONGEST_WORDS), whole_number(event, "step"))
        except Refusal as refusal:
            raise gr.Error(str(refusal), print_exception=False) from None  # or the run that follows a step would begin
        return {**self.page.show(settings, names), **self._silence()}

    def recognise(self, *values: Any) -> Changes:
        """Say what to look at where the prompt is a question with a known answer."""
        return self.page.recognised(Settings(*values))

    def offer(self, model: str) -> Changes:
        """The menus of models as they stand by now, and what goes with the chosen one."""
        return self.page.offer(model)

    def examine(self, visit: Visit | None) -> None:
        """Draw the visitor's run as far as it has come."""
        drawn = [figure for figure in figures.draw(visit.run.trace) if figure] if visit and visit.run else []
        if not drawn:
            gr.HTML("<p>No lane got as far as a token.</p>", elem_classes="told", apply_default_css=False)
        for figure in drawn:
            gr.Plot(figure, show_label=False)

    def study(self, name: str, visit: Visit | None) -> None:
        """Lay out what a study has to say of the visitor's run as far as it has come."""
        told = studies.outcomes(visit.run.trace).get(name, []) if visit and visit.run else []
        gr.HTML(
            "".join(f"<p>{escape(note)}</p>" for note in studies.notes(told)),
            elem_classes="told",
            apply_default_css=False,
        )
        for drawn in studies.draw(told):
            gr.Plot(drawn, show_label=False)

    def share(self, *values: Any) -> Iterator[Changes]:
        """The code of a link that opens the page as it is set now; the browser makes it an address, each time anew."""
        yield {self.page.link: ""}
        yield {self.page.link: Settings(*values).to_code()}

    def _guarded(self, visit: Visit) -> Iterator[Changes]:
        try:
            yield from self._run(visit)
        except Refusal as refusal:
            yield self._silence()  # for a sentence that stands there already to come into sight again
            yield {**self.page.rest(), **self._say(refusal)}
        finally:
            visit.leave()

    def _run(self, visit: Visit) -> Iterator[Changes]:
        visit.settings.check(self.site.rules)
        arrival = self.site.arrival(visit.settings)
        yield {self.page.visit: visit, **self.page.busy(), **self._silence(), self.page.status: status(arrival)}
        for change in chain([] if arrival.ended.is_set() else self._progress(arrival), self._turn(visit)):
            yield change
            if visit.stopped:
                yield gr.skip() if visit.left else self.page.rest()
                return
        visit.begin(
            self.site.read(arrival, visit.settings)
            if visit.reads
            else self.site.start(arrival, visit.settings, visit.memory)
        )
        yield from self._stream(visit, arrival)

    def _turn(self, visit: Visit) -> Iterator[Changes]:
        """The place in the queue until it is this run's turn."""
        visit.ticket = self.site.join(PAGE)
        for place in visit.ticket.wait():
            yield {self.page.status: waits(place)}

    def _stream(self, visit: Visit, arrival: ModelLoad) -> Iterator[Changes]:
        """Frames to the live view until the run is over, and with how many runs it shares the device; a visitor who
        leaves stops it.
        """
        # a browser was seen to lose the message before the first frame, and there was no Stop
        told, again = "", self.page.stoppable()
        try:
            for news in visit.run.frames():
                self._limit_hold(visit)
                shown = self._shown(visit, arrival)
                shared = {self.page.status: shown} if shown != told else {}
                yield {**again, **shared, **({self.page.live: news} if news else {})} or gr.skip()
                told, again = shown, {}
            # by itself: a browser gets the last answer twice, and would shut what is open by then
            yield gr.skip() if visit.left else self.page.shut()
            yield gr.skip() if visit.left else {**self._rested(visit), self.page.status: status(arrival)}
        finally:
            visit.run.stop()

    def _shown(self, visit: Visit, arrival: ModelLoad) -> str:
        """The status line of a run: its place in the queue where it waits to go on, otherwise with how many it shares
        the device.
        """
        place = visit.ticket.place if visit.ticket else 0
        return waits(place) if place else status(arrival, self.site.beside(arrival.models, visit.run))

    def _limit_hold(self, visit: Visit) -> None:
        """On a public page, end a run that is held for too long: its caches take memory that others need."""
        ticket = visit.ticket
        if self.site.rules.public and ticket and ticket.state == "resting" and monotonic() - ticket.since > HELD_LIMIT:
            visit.run.fail(f"This run was held for {HELD_LIMIT / 60:.0f} minutes and has ended: run it again to go on.")

    def _rested(self, visit: Visit) -> Changes:
        """The buttons as before the run, what came of it, and what is remembered of it."""
        return {**self.page.rest(), **self._outcome(visit.run), **self.page.remembers(visit.memory)}

    def _settled(self, wanted) -> Iterator[Changes]:
        """Progress until the wanted models are here, or the reason why they are not."""
        try:
            arrival = wanted()
            yield from self._progress(arrival)
            arrival.result()
            yield self._silence()
        except Refusal as refusal:
            yield self._say(refusal)

    def _progress(self, arrival: ModelLoad) -> Iterator[Changes]:
        for now in arrival.watch():
            yield {self.page.status: status(now)}
        yield {self.page.status: status(arrival)}

    def _outcome(self, run: Run | RemoteRun) -> Changes:
        """What can be drawn, what failed in a lane beside that lane, and what broke as a whole under the prompt."""
        failed = {str(event["lane"]): event.get("message", "") for event in run.events if event["kind"] == "failed"}
        studied = studies.outcomes(run.trace)
        return {
            self.page.lanes: gr.update(problems=failed),
            self.page.prompt_notice: escape(run.error),
            **self.page.figures_of(studied),
        }

    def _say(self, refusal: Refusal) -> Changes:
        """The sentence beside the control it is about; the other places fall silent."""
        near = {"lanes": self.page.lanes_notice, **dict.fromkeys(MODEL_CONTROLS, self.page.model_notice)}
        return {**self._silence(), near.get(refusal.about, self.page.prompt_notice): escape(str(refusal))}

    def _silence(self) -> Changes:
        return dict.fromkeys((self.page.prompt_notice, self.page.model_notice, self.page.lanes_notice), "")


def _past(run: Run | RemoteRun, event: gr.EventData) -> list[int]:
    """Tokens a lane, or the sequence that was shown as its text, wrote before a place."""
    written = sequences(run.trace.lane(whole_number(event, "lane")).events).get(
        whole_number(event, "sequence"), Written()
    )
    return [token.id for token in written.tokens[:whole_number(event, "position")]]


def _has_lane(visit: Visit | None, event: gr.EventData) -> bool:
    with suppress(Refusal):
        return bool(visit and visit.run) and whole_number(event, "lane") < len(visit.run.headers)
    return False


def status(arrival: ModelLoad, beside: int = 0) -> str:
    """The line that says which models are here, or how far they are, and how many other runs take turns on their
    device.
    """
    if not arrival.ended.is_set():
        return f"<span class='dot loading'></span>{escape(arrival.text)} <progress max='1' value='{arrival.fraction:.3f}'></progress>"
    if arrival.refusal:
        return "<span class='dot failed'></span>no model loaded"
    shared = f" · in turn with {beside} other run{'s' if beside > 1 else ''}" if beside else ""
    return f"<span class='dot ready'></span>{escape(described(arrival.models) + shared)}"


def waits(place: int) -> str:
    """The line while others have the device."""
    return f"<span class='dot loading'></span>place {place} in the queue: waiting for a run of another visitor to end or pause"


def described(models: Any) -> str:
    """Names, number format and device of what is loaded, and the draft's device where it has one of its own."""
    target, draft = models.target, models.draft
    names = [_short(target.name), *([_short(draft.name) + models.draft_place] if draft else [])]
    return " · ".join([*names, str(target.dtype).removeprefix("torch."), target.device.type])


def _short(name: str) -> str:
    """Of a model in a folder, the folder's own name."""
    return Path(name).name if Path(name).is_dir() else name
