"""One lane under many seeds: a panel that runs it, tells how far it is, and shows what it wrote and how often.

The runs are lanes of one session, so they share forwards. The browser gets a few lines of HTML, never their events.
"""
from __future__ import annotations

from collections.abc import Iterator
from html import escape
from os.path import commonprefix
from typing import Any

import gradio as gr

from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.trace.seed_sweep import Outcome, outcomes
from playground.ui.admission_queue import REPEATS
from playground.ui.frames import Facts, trace_of
from playground.ui.handlers import Changes, Visit, status, waits
from playground.ui.readers import ends_unread
from playground.ui.settings import LANES, Settings
from playground.ui.site import Site
from playground.ui.theme import PRIVATE

USUAL = 8  # runs, where nobody chose another number
WRITTEN = ("branches", "commit", "rollback", "done", "failed")  # kinds of events that say what a lane wrote


class Repeats:
    """The panel with its acts."""

    def __init__(self, site: Site):
        self.site, self.visit = site, gr.State(None)
        most = site.rules.repeats
        with gr.Accordion("One lane, many seeds", open=False, elem_classes="figures repeats", elem_id="repeats"):
            with gr.Row(elem_classes="ask"):
                lanes = [(f"Lane {lane + 1}", lane) for lane in range(LANES)]
                self.lane = gr.Dropdown(lanes, value=0, label="Repeat", min_width=100, scale=1, elem_id="repeat-lane")
                self.times = gr.Number(
                    min(USUAL, most),
                    label=f"Runs, each with the next seed (2 to {most})",
                    precision=0,
                    min_width=100,
                    scale=2,
                    elem_id="repeat-times",
                )
                self.go = gr.Button("Run them", variant="secondary", min_width=110, scale=0, elem_id="repeat")
                self.halt = gr.Button(
                    "Stop", variant="stop", min_width=110, scale=0, visible=False, elem_id="repeat-stop"
                )
            self.told = gr.HTML("", elem_classes="told", elem_id="repeated", apply_default_css=False)

    def bind(self, controls: list[gr.components.Component]) -> None:
        self.go.click(
            self.run,
            [self.visit, self.lane, self.times, *controls],
            [self.visit, self.told, self.go, self.halt],
            concurrency_limit=None,
            **PRIVATE,
        )
        self.halt.click(self.stop, self.visit, [self.go, self.halt], queue=False, **PRIVATE)

    @ends_unread
    def run(self, before: Visit | None, lane: int, times: int | None, *values: Any) -> Iterator[Changes]:
        """Run one lane as the page has it, seed after seed; leaving the page stops it."""
        settings = Settings(*values)
        visit = before.follow(settings) if before else Visit(settings)
        try:
            settings.check(self.site.rules)
            visit.settings = settings.repeated(lane, times, self.site.rules)
            yield {self.visit: visit, self.told: "", **self._buttons(running=True)}
            yield from self._stream(visit)
        except Refusal as refusal:
            yield {
                self.told: f"<p class='refused' role='alert'>{escape(str(refusal))}</p>",
                **self._buttons(running=False),
            }
        finally:
            visit.leave()

    def stop(self, visit: Visit | None) -> Changes:
        """End all runs; where none goes on any more, put the buttons right."""
        if visit is None or visit.over:
            return self._buttons(running=False)
        visit.stop()
        return gr.skip()

    def _stream(self, visit: Visit) -> Iterator[Changes]:
        arrival = self.site.arrival(visit.settings)
        for now in arrival.watch():
            yield {self.told: status(now)} if not visit.stopped else gr.skip()
        if visit.stopped:
            yield gr.skip() if visit.left else self._buttons(running=False)
            return
        visit.ticket = self.site.join(REPEATS)
        for place in visit.ticket.wait():
            yield {self.told: waits(place)} if not visit.stopped else gr.skip()
            if visit.stopped:
                yield gr.skip() if visit.left else self._buttons(running=False)
                return
        # a sample of one law: no run learns from another
        visit.run = self.site.start(arrival, visit.settings, Memory())
        try:
            yield from self._tally(visit)
        finally:
            visit.run.stop()

    def _tally(self, visit: Visit) -> Iterator[Changes]:
        tally = SweepProgress(visit.settings)
        for news in visit.run.frames():
            tally.hear(news["events"] if news else [])
            yield {self.told: tally.draw(visit.run.headers)} if news else gr.skip()
        if not visit.left:
            yield {self.told: tally.draw(visit.run.headers, visit.run.error), **self._buttons(running=False)}

    def _buttons(self, running: bool) -> Changes:
        return {self.go: gr.update(visible=not running), self.halt: gr.update(visible=running)}


class SweepProgress:
    """What has become of the runs so far."""

    def __init__(self, settings: Settings):
        self.asked, self.length = len(settings.lanes), settings.length
        self.events: Facts = []  # of the kinds in WRITTEN
        self.last: dict[int, dict[str, Any]] = {}  # by lane, how it ended
        self.found: list[Outcome] = []
        self._counted = 0  # ended lanes when the texts were last compared

    def hear(self, events: Facts) -> None:
        self.events += [event for event in events if event["kind"] in WRITTEN]
        self.last |= {event["lane"]: event for event in events if event["kind"] in ("done", "failed")}

    def draw(self, headers: Facts, error: str = "") -> str:
        """All there is to say, as HTML; texts are compared anew only when another run has ended."""
        if self._counted != len(self.last):
            self._counted, self.found = len(self.last), outcomes(trace_of(headers, self.events))
        said = [self._progress(), *self._failures(), escape(error)]
        return "".join(f"<p>{line}</p>" for line in said if line) + listing(self.found)

    def _progress(self) -> str:
        over = len(self.last)
        if over == self.asked:
            whole = sum(outcome.count for outcome in self.found)
            texts = f"{len(self.found)} different text{'s' if len(self.found) > 1 else ''}"
            return (
                f"{self.asked} runs, {texts}."
                if whole == self.asked
                else f"{whole} of {self.asked} runs wrote a whole text."
            )
        written = sum(
            len(event.get("ids", []))
            for event in self.events
            if event["kind"] == "commit" and not event.get("sequence")
        )
        share = max(over / self.asked, min(1.0, written / (self.asked * self.length)))
        return f"{over} of {self.asked} runs ended, {written} tokens <progress max='1' value='{share:.3f}'></progress>"

    def _failures(self) -> list[str]:
        return [
            escape(message)
            for message in dict.fromkeys(
                event.get("message", "") for event in self.last.values() if event["kind"] == "failed"
            )
        ]


def listing(found: list[Outcome]) -> str:
    """The histogram: for each text a bar, how often it came, how sure the model was of it, and where it leaves the
    commonest one.
    """
    return f"<ol class='outcomes'>{''.join(_row(outcome, found[0]) for outcome in found)}</ol>" if found else ""


def _row(outcome: Outcome, commonest: Outcome) -> str:
    seeds = ", ".join(map(str, outcome.seeds))
    facts = [f"<b>{outcome.count}×</b> {outcome.share:.0%}", _sure(outcome), _apart(outcome)]
    bar = f"<span class='bar'><i style='width:{outcome.share:.2%}'></i></span>"
    said = " ".join(f"<span>{fact}</span>" for fact in facts if fact)
    return (
        f"<li title='seed {seeds}'>{bar}<p class='facts'>{said}</p><p class='text'>{_text(outcome, commonest)}</p></li>"
    )


def _sure(outcome: Outcome) -> str:
    return "" if outcome.logprob is None else f"mean log-probability {outcome.logprob:.2f}"


def _apart(outcome: Outcome) -> str:
    return "" if outcome.parts is None else f"leaves the first at token {outcome.parts + 1}"


def _text(outcome: Outcome, commonest: Outcome) -> str:
    """What a text shares with the commonest one is dimmed; of that one, nothing is."""
    shared = 0 if outcome is commonest else len(commonprefix([outcome.text, commonest.text]))
    same, own = escape(outcome.text[:shared]), escape(outcome.text[shared:])
    return f"<span class='same'>{same}</span>{own}" if outcome.text else "<span class='same'>no text</span>"
