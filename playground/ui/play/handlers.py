"""The event handlers of the playground page, one method for each event. Streaming handlers are generators.

Every handler returns or yields {component: value} for the components it changes; the page binds them to events.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr

from playground.decoding.forked_session import Siblings
from playground.decoding.lane_checks import Surroundings, check_some_ready
from playground.decoding.visitor_memory import Memory
from playground.engine.checkpoint.catalogue import DENOISER, TEXT_MODEL
from playground.errors import Refusal
from playground.player.frames import frame, recording
from playground.prompt_form import check_form
from playground.remote.remote_server import RemoteServer
from playground.request_limits import MAX_TOKEN_ID
from playground.run_request import DEFAULT
from playground.trace.transcript import Written, sequences
from playground.ui.components.event_fields import has, number, text, whole_number
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.settings import Fork, Settings
from playground.ui.guard.readers import ends_unread
from playground.ui.play import run_figures
from playground.ui.play.gallery import example_passage, models_from_examples, picked
from playground.ui.play.kept_runs import LONGEST_NAME, KeptRun, kept_run
from playground.ui.play.lessons import settings_of
from playground.ui.server.admission_queue import PAGE, Ticket
from playground.ui.server.model_loader import ModelLoad
from playground.ui.server.run_streams import RunStream
from playground.ui.server.site import Site
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun
from playground.ui.studies import study_figures

MODEL_CONTROLS = ("model", "draft", "device", "dtype", "quantization")
QUIET = 1.0  # seconds between two messages while the stream brings the frames: only then does Gradio notice who left
STOP_SHOWN_AGAIN = 2.0  # seconds between two messages that show Stop
HELD_LIMIT = 600.0  # seconds that a run may be held on a public page
LONGEST_WORDS = 500  # characters typed to begin a fork
EARLIER = 3  # runs of a visitor kept beside the last one, compressed
LONGEST_BEAT = 3600  # largest interval between frames that a browser may request, in seconds
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
        """The visitor's next visit. This one ends, since one run at a time is active."""
        self.left = True
        self.stop()
        earlier, self.earlier = [visit for visit in (*self.earlier, self) if visit.run][-EARLIER:], []
        return Visit(settings, self.memory, reads=reads, siblings=siblings, server=self.server, earlier=earlier)

    def of(self, run: str) -> Visit:
        """The visit of a run by its name. Raises Refusal if it is not kept."""
        for visit in (self, *reversed(self.earlier)):
            if visit.run and visit.run.name == run:
                return visit
        raise Refusal("This run is no longer on the server: press Run first.", "lanes")


class Handlers:
    """The handlers of one page; everything that belongs to a visitor is passed in through the page's state."""

    def __init__(self, site: Site, page):
        self.site, self.page = site, page

    def open(self, stored: Any, request: gr.Request) -> Changes:
        """Set the controls from the link, or else from the browser's storage. After a reload the browser sends what was
        chosen in its tab, which takes precedence.
        """
        reloaded = isinstance(stored, dict) and stored.get("reloaded") is True
        code = "" if reloaded else request.query_params.get("s", "")
        settings = (Settings.from_code(code) if code else None) or (Settings.read(stored) if stored else None)
        return self.page.show(settings, Settings.names()) if settings else gr.skip()

    @ends_unread
    def ready(self) -> Iterator[Changes]:
        """Show the loading progress of the page's own models."""
        yield from self._settled(lambda: self.site.model_loader.request(self.site.model_request))

    @ends_unread
    def load(self, *values: Any) -> Iterator[Changes]:
        """Load the chosen models now rather than with the first run."""
        yield from self._settled(lambda: self.site.model_load(Settings(*values)))

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
        """Run a lane again, continued differently from a position of its shown sequence; the others are unchanged, and
        those that are running go on.
        """
        try:
            with as_refusals("This fork", "lanes"):
                shown = self._shown_visit(visit, event)
                if not _has_lane(shown, event) or shown.reads or _is_remote(shown, event):
                    return
                fork = self._fork(shown, event)
                settings = shown.settings.forked(fork)
                settings.check(self.site.rules)  # before the running lanes leave their run
        except Refusal as refusal:
            yield self._show_refusal(refusal)
            return
        yield {self.page.lanes: settings.lanes}
        siblings = _siblings(shown.run, fork)
        yield from self._guarded((visit or Visit(Settings())).follow(settings, siblings=siblings))

    def _shown_visit(self, visit: Visit | None, event: gr.EventData) -> Visit | None:
        """The visit of the run that an event names, which the browser sends if it is no longer here; the last one if
        the event names none. Raises Refusal.
        """
        if has(event, "kept"):
            kept = kept_run(event, self.site.rules)
            self.site.check_model(kept.settings, kept.headers[0])
            return Visit(kept.settings, run=kept)
        return visit.of(text(event, "run", LONGEST_NAME)) if visit and has(event, "run") else visit

    def _fork(self, shown: Visit, event: gr.EventData) -> Fork:
        """The fork that an event requests. Raises Refusal."""
        lanes = len(shown.run.headers)
        instead_of = whole_number(event, "instead_of", lanes - 1) if has(event, "instead_of") else None
        tokens = [*_past(shown.run, event), *self._instead(shown, event)]
        return Fork(whole_number(event, "lane"), tokens, whole_number(event, "position"), instead_of)

    def _instead(self, visit: Visit, event: gr.EventData) -> list[int]:
        """The tokens that a fork continues with: the chosen candidate, or the typed words."""
        if not has(event, "words"):
            return [whole_number(event, "token", MAX_TOKEN_ID)]
        return self.site.continuation_tokens(
            visit.settings, visit.run.headers[whole_number(event, "lane")]["model"], text(event, "words", LONGEST_WORDS)
        )

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
                shown = self._shown_visit(visit, event)
        except Refusal as refusal:
            return {"run": str(getattr(event, "run", ""))[:LONGEST_NAME], name: None, "refused": str(refusal)}
        if not _has_lane(shown, event) or _is_remote(shown, event):
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
        tokens = [*header["prompt_ids"], *_past(shown.run, event)]
        return {**self.site.look(_settings_of(shown, header), header["model"], tokens, chosen), "chosen": chosen}

    def _attribute(self, shown: Visit, event: gr.EventData, chosen: int) -> dict[str, Any]:
        header = shown.run.headers[whole_number(event, "lane")]
        prompt = header["prompt_ids"]
        tokens = [*prompt, *_past(shown.run, event)]
        return self.site.attribute(_settings_of(shown, header), header["model"], tokens, len(prompt), chosen)

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
        if _has_lane(visit, event):
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
        return _with_settings(frame(run.name, run.number, list(run.events), run.state, run.headers), shown)

    def _by_stream(self, run: str, heard: bool) -> None:
        """Note whether the page gets the frames of a run by its stream."""
        if stream := self.site.streams.find(run):
            stream.heard = heard

    def again(self, visit: Visit | None) -> Changes:
        """Replay the visitor's last run from the server's record, for instance after a broken connection."""
        if not (visit and visit.run and visit.run.events):
            return {self.page.prompt_notice: "There is no run to show yet: press Run first."}
        return {self.page.live: recording(visit.run.headers, list(visit.run.events)), **self._clear_notices()}

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

    def pick(self, model: str, draft: str, event: gr.EventData) -> Changes:
        """Set prompt, context, earlier turns, mode and lanes from an entry of the gallery; seed and models stay.

        A model or draft that an earlier example had set is reset, since few other examples can run with it.
        """
        try:
            chosen = picked(text(event, "part", LONGEST_WORDS), whole_number(event, "index"))
        except Refusal as refusal:
            return self._show_refusal(refusal)
        names = {*chosen} | models_from_examples(model=model, draft=draft)
        return {
            **self.page.show(Settings.read(chosen), [name for name in Settings.names() if name in names]),
            **self._clear_notices(),
        }

    def set_up(self, model: str, draft: str, event: gr.EventData) -> Changes:
        """Set all controls from a step of a lesson. Models stay, unless an example had set them or the lesson does."""
        try:
            settings = settings_of(text(event, "lesson", LONGEST_WORDS), whole_number(event, "step"))
        except Refusal as refusal:
            raise gr.Error(str(refusal), print_exception=False) from None  # an error prevents the run after this event
        changed, blank = models_from_examples(model=model, draft=draft), Settings()
        changed |= {name for name in Settings.names() if getattr(settings, name) != getattr(blank, name)}
        names = [name for name in Settings.names() if name not in MODEL_CONTROLS or name in changed]
        return {**self.page.show(settings, names), **self._clear_notices()}

    def restore(self, event: gr.EventData) -> Changes:
        """Set all controls to what they were before the change that is undone."""
        return self.page.show(Settings.read(getattr(event, "settings", None)), Settings.names())

    def update_question_note(self, *values: Any) -> Changes:
        """Show what to look at if the prompt is a question with a known answer."""
        return self.page.show_question_note(Settings(*values))

    def check_tools(self, *values: Any) -> Changes:
        """Show why the tools cannot be used while they are typed."""
        try:
            self.site.check_tools(Settings(*values))
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
            "denoiser": {self.page.model: self.site.menu_choice(DENOISER)},
            "text model": {self.page.model: self.site.menu_choice(TEXT_MODEL)},
        }
        return added.get(getattr(event, "what", None), gr.skip())

    def examine(self, visit: Visit | None) -> None:
        """Draw figures of the visitor's run so far."""
        drawn = [figure for figure in run_figures.draw(visit.run.trace) if figure] if visit and visit.run else []
        if not drawn:
            gr.HTML("<p>No lane has generated a token.</p>", elem_classes="fold-note", apply_default_css=False)
        for figure in drawn:
            gr.Plot(figure, show_label=False)

    def share(self, *values: Any) -> Iterator[Changes]:
        """The code of a link to the current settings. It is cleared first, so that every click triggers the browser."""
        yield {self.page.link: ""}
        yield {self.page.link: Settings(*values).to_code()}

    def embed(self, *values: Any) -> Iterator[Changes]:
        """The same code, for a frame in another page."""
        yield {self.page.frame: ""}
        yield {self.page.frame: Settings(*values).to_code()}

    def _guarded(self, visit: Visit) -> Iterator[Changes]:
        try:
            with as_refusals("This run"):
                yield from self._run(visit)
        except Refusal as refusal:
            yield self._clear_notices()  # so that the same message, shown again, scrolls into view
            yield {**self.page.idle(), **self._show_refusal(refusal)}
        finally:
            visit.leave()

    def _run(self, visit: Visit) -> Iterator[Changes]:
        visit.settings.check(self.site.rules)
        around = self._checked(visit)
        loading = self.site.model_load(visit.settings)
        yield {self.page.visit: visit, **self.page.busy(), **self._clear_notices(), self.page.status: status(loading)}
        awaited = [loading, *self.site.weight_loads(visit.settings).values()]
        progress = [self._progress(one) for one in awaited if not one.ended.is_set()]
        for change in chain(*progress, self._queue(visit)):
            yield change
            if visit.stopped:
                yield gr.skip() if visit.left else self.page.idle()
                return
        if around.attention is None:  # now it is known
            self._checked(visit)
        visit.begin(
            self.site.read(loading, visit.settings)
            if visit.reads
            else self.site.start(loading, visit.settings, visit.memory, visit.siblings, visit.server)
        )
        self.site.show_to_class(visit.run)
        visit.siblings = None  # a whole trace, which the run has now
        yield from self._stream(visit, loading)

    def _checked(self, visit: Visit) -> Surroundings:
        """What the lanes need besides their own settings. Raises Refusal if no lane has what it needs."""
        around = self.site.surroundings(visit.settings)
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
            # A separate message: a browser gets the last one twice, which would close figures opened meanwhile.
            yield gr.skip() if visit.left else self.page.close_figures()
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
        whole = _with_settings(news, visit)
        if stream.carry(whole):
            return {}
        return {self.page.live: {**whole, "streamed": True} if news["n"] == 0 else whole}

    def _shown(self, visit: Visit, loading: ModelLoad) -> str:
        """The status line of a run: its place in the queue if it waits, otherwise the models and how many runs share
        the device.
        """
        place = visit.ticket.place if visit.ticket else 0
        waits = queue_status(place, visit.ticket.waited) if place else ""
        return waits or status(loading, self.site.other_runs(loading.models, visit.run))

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
            yield self._clear_notices()
        except Refusal as refusal:
            yield self._show_refusal(refusal)

    def _progress(self, loading: ModelLoad) -> Iterator[Changes]:
        for now in loading.watch():
            yield {self.page.status: status(now)}
        yield {self.page.status: status(loading)}

    def _outcome(self, run: Run | RemoteRun) -> Changes:
        """Offer the figures; show failures of lanes in the lane editor and an error of the run below the prompt."""
        failed = {str(event["lane"]): event.get("message", "") for event in run.events if event["kind"] == "failed"}
        studied = study_figures.outcomes(run.trace)
        return {
            self.page.lanes: gr.update(problems=failed),
            self.page.prompt_notice: escape(run.error),
            **self.page.show_remarks(_remarks(run)),  # again: a busy browser may have lost the first message
            **self.page.figures_of(studied, run.name),
        }

    def _show_refusal(self, refusal: Refusal) -> Changes:
        """Show the message of a refusal next to the control it is about, which the page opens, and clear the others."""
        parts = refusal.about.split(":")  # a control, or "lane", the lane's index and the field
        place, field = parts[0], parts[-1]
        near = {"lanes": self.page.lanes_notice, **dict.fromkeys(MODEL_CONTROLS, self.page.model_notice)}
        typed = {"tools": self.page.tools_notice, "form": self.page.form_notice}
        if place in typed:  # a lane may have a knob of this name
            near[place] = typed[place]
        in_lane = self.page.lanes_notice if place == "lane" and field != "context" else self.page.prompt_notice
        return {**self._clear_notices(), near.get(field, in_lane): _notice(refusal)}

    def _clear_notices(self) -> Changes:
        page = self.page
        beside = (page.prompt_notice, page.tools_notice, page.form_notice, page.model_notice, page.lanes_notice)
        return {**dict.fromkeys(beside, ""), **page.show_remarks([])}


def _settings_of(shown: Visit, header: dict[str, Any]) -> Settings:
    """The settings that choose the model of a lane: one with weights of its own has another target than the run."""
    own = next((part["name"] for part in header.get("parts", ()) if part["kind"] == "weights"), "")
    return replace(shown.settings, quantization=own) if own else shown.settings


def _notice(refusal: Refusal) -> str:
    """A message as HTML, with the control that it is about."""
    return f"<span data-about='{escape(refusal.about)}'>{escape(str(refusal))}</span>"


def _remarks(run: Run | RemoteRun) -> list[str]:
    """What is to know about the prompt of a run, each once."""
    return list(dict.fromkeys(remark for header in run.headers for remark in header.get("remarks", ())))


def _with_settings(news: dict[str, Any], visit: Visit) -> dict[str, Any]:
    """A frame; if it begins a run of lanes, with their settings, which the browser keeps to fork the run later."""
    return {**news, "settings": visit.settings.to_code()} if news.get("headers") and not visit.reads else news


def _siblings(run: Run | RemoteRun | KeptRun, fork: Fork) -> Siblings:
    """The lanes beside a fork. Those that are running leave their run and go on beside the fork."""
    session = run.hand_over()
    trace = session.trace if session else run.trace
    return Siblings(trace, fork.siblings(len(run.headers)), fork.place, session)


def _past(run: Run | RemoteRun | KeptRun, event: gr.EventData) -> list[int]:
    """Token ids before a position of a lane's sequence."""
    written = sequences(run.trace.lane(whole_number(event, "lane")).events).get(
        whole_number(event, "sequence"), Written()
    )
    return [token.id for token in written.tokens[:whole_number(event, "position")]]


def _has_lane(visit: Visit | None, event: gr.EventData) -> bool:
    with suppress(Refusal):
        return bool(visit and visit.run) and whole_number(event, "lane") < len(visit.run.headers)
    return False


def _is_remote(visit: Visit, event: gr.EventData) -> bool:
    """Whether a server generates the lane, which can be neither forked nor inspected."""
    return bool(visit.run.headers[whole_number(event, "lane")].get("remote"))


def status(loading: ModelLoad, others: int = 0) -> str:
    """The status line as HTML: the models, or their loading progress, and how many other runs share the device."""
    if not loading.ended.is_set():
        progress = f"<progress max='1' value='{loading.fraction:.3f}'></progress>"
        return f"<span class='dot loading'></span>{escape(loading.text)} {progress}"
    if loading.refusal:
        return "<span class='dot failed'></span>no model loaded"
    shared = f" · sharing the device with {others} other run{'s' if others > 1 else ''}" if others else ""
    bounds = getattr(loading.models.target, "bounds", "")  # a canvas has none
    said = escape(bounds[:1].upper() + bounds[1:])
    more = f"<details class='bounds'><summary>limits</summary><p>{said}.</p></details>"
    names = f"<span class='described'>{escape(described(loading.models))}</span>"
    return f"<span class='dot ready'></span>{names}{escape(shared)}{more if bounds else ''}"


def queue_status(place: int, waited: float) -> str:
    """The status line of a run that has waited in the queue for some seconds."""
    so_far = f"place {place} in the queue, {waited:.0f} s so far"
    return f"<span class='dot loading'></span>{so_far}: waiting for another run to end or be held"


def described(models: Any) -> str:
    """Names, quantisation, dtype and device of the loaded models, and the draft's device if it differs."""
    target, draft = models.target, models.draft
    packed = [] if target.quantization == "none" else [target.quantization]
    names = [_short(target.name), *([_short(draft.name) + models.draft_place] if draft else [])]
    spread = sorted(map(str, set(getattr(target, "devices", ()))))  # a canvas model is never spread
    dtype, place = str(target.dtype).removeprefix("torch."), " + ".join(spread) or target.device.type
    return " · ".join([*names, *packed, dtype, place])


def _short(name: str) -> str:
    """A model's name; of a folder only the last part."""
    return Path(name).name if Path(name).is_dir() else name
