"""One lane under many seeds: a panel that runs it, shows the progress, and shows each text with its frequency."""
from __future__ import annotations

from html import escape
from os.path import commonprefix
from typing import Any

import gradio as gr

from playground.player.frames import Facts, trace_of
from playground.run_request import LANES
from playground.trace.seed_sweep import Outcome, outcomes
from playground.ui.components.settings import Settings
from playground.ui.server.site import Site
from playground.ui.sweeps.sweep_panel import SweepPanel

USUAL = 8  # default number of runs
WRITTEN = ("branches", "commit", "rollback", "done", "failed")  # kinds of events that determine a lane's text


class Repeats(SweepPanel):
    """The panel with its event handlers."""

    def __init__(self, site: Site):
        super().__init__(site)
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
                self.go = gr.Button("Run seeds", variant="secondary", min_width=110, scale=0, elem_id="repeat")
                self.halt = gr.Button(
                    "Stop", variant="stop", min_width=110, scale=0, visible=False, elem_id="repeat-stop"
                )
            self.output = gr.HTML("", elem_classes="fold-note", elem_id="repeated", apply_default_css=False)

    def inputs(self) -> list[gr.components.Component]:
        return [self.lane, self.times]

    def request(self, settings: Settings, lane: int, times: int | None) -> tuple[Settings, SweepProgress]:
        """One lane with consecutive seeds: its texts are independent samples of one output distribution."""
        wanted = settings.repeated(lane, times, self.site.rules)
        return wanted, SweepProgress(wanted)


class SweepProgress:
    """The state of the runs so far."""

    def __init__(self, settings: Settings):
        self.asked, self.length = len(settings.lanes), settings.length
        self.events: Facts = []  # of the kinds in WRITTEN
        self.last: dict[int, dict[str, Any]] = {}  # the final event of each lane that has ended
        self.found: list[Outcome] = []
        self._counted = 0  # ended lanes when the texts were last compared

    def add(self, events: Facts) -> None:
        self.events += [event for event in events if event["kind"] in WRITTEN]
        self.last |= {event["lane"]: event for event in events if event["kind"] in ("done", "failed")}

    def draw(self, headers: Facts, error: str = "") -> str:
        """The panel's HTML; texts are compared again only when another run has ended."""
        if self._counted != len(self.last):
            self._counted, self.found = len(self.last), outcomes(trace_of(headers, self.events))
        lines = [self._progress(), *self._failures(), escape(error)]
        return "".join(f"<p>{line}</p>" for line in lines if line) + listing(self.found)

    def _progress(self) -> str:
        over = len(self.last)
        if over == self.asked:
            whole = sum(outcome.count for outcome in self.found)
            texts = f"{len(self.found)} different text{'s' if len(self.found) > 1 else ''}"
            return (
                f"{self.asked} runs, {texts}."
                if whole == self.asked
                else f"{whole} of {self.asked} runs finished their text."
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
    """The histogram: each text with its count, its mean log-probability, and where it diverges from the first."""
    return f"<ol class='outcomes'>{''.join(_row(outcome, found[0]) for outcome in found)}</ol>" if found else ""


def _row(outcome: Outcome, commonest: Outcome) -> str:
    seeds = ", ".join(map(str, outcome.seeds))
    facts = [f"<b>{outcome.count}×</b> {outcome.share:.0%}", _logprob(outcome), _divergence(outcome)]
    bar = f"<span class='bar'><i style='width:{outcome.share:.2%}'></i></span>"
    spans = " ".join(f"<span>{fact}</span>" for fact in facts if fact)
    text = f"<p class='text'>{_text(outcome, commonest)}</p>"
    return f"<li title='seed {seeds}'>{bar}<p class='facts'>{spans}</p>{text}</li>"


def _logprob(outcome: Outcome) -> str:
    return "" if outcome.logprob is None else f"mean log-probability {outcome.logprob:.2f}"


def _divergence(outcome: Outcome) -> str:
    return "" if outcome.parts is None else f"diverges from the first at token {outcome.parts + 1}"


def _text(outcome: Outcome, commonest: Outcome) -> str:
    """The text, with the prefix it shares with the most common one dimmed."""
    shared = 0 if outcome is commonest else len(commonprefix([outcome.text, commonest.text]))
    same, own = escape(outcome.text[:shared]), escape(outcome.text[shared:])
    return f"<span class='same'>{same}</span>{own}" if outcome.text else "<span class='same'>no text</span>"
