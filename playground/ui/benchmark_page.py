"""The benchmark page: strategies on questions, asked while the visitor watches the table fill.

A survey goes through the same worker as the runs of the playground, one forward at a time; of several surveys one goes
on at a time, in the order in which visitors came.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr

from playground.bench.questions import Question
from playground.bench.results import table
from playground.bench.survey import Answer, Entrant, Progress
from playground.bench.survey_export import as_csv, document, models_told
from playground.bench.survey_figures import COSTS, acceptance, quality
from playground.bench.user_questions import FORM, read_questions
from playground.errors import Refusal
from playground.ui import model_menu as offers
from playground.ui.admission_queue import SURVEY, Ticket
from playground.ui.event_fields import whole_number
from playground.ui.gallery import TASKS
from playground.ui.handlers import Changes, status
from playground.ui.lane_editor import LaneEditor
from playground.ui.model_loader import ModelLoad
from playground.ui.readers import ends_unread
from playground.ui.results_table import Standings, answers_to, file_name, told
from playground.ui.run_figures import for_page
from playground.ui.site import Site
from playground.ui.survey_run import SurveySettings
from playground.ui.theme import PRIVATE, notice, read
from playground.ui.worker import Run
from playground.ui.zero_gpu import RemoteRun

CONTROLS = ("tasks", "count", "repeats", "own", "length", "seed", "model", "draft", "lanes")
# what a refusal is about
BESIDE = {"lanes": "lanes", "entrants": "lanes", "file": "own", "model": "model", "draft": "model", "device": "model"}
LANES = [{"strategy": "greedy"}, {"strategy": "speculative", "extras": [["prompt_lookup", {}], ["greedy_match", {}]]}]
OFTEN = 0.7  # seconds between two looks of the table at least
LEAD = (
    "Every strategy answers the same questions, in turn and in several rounds. Where the answer is known you see how right each is, and always what it "
    "costs. The bundled models know only the small world that these questions are drawn from; questions of your own suit other models."
)
CAUTION = (
    "Forwards, acceptance, tokens and scores are exact. Times are not worth much on a busy machine: trust the ratio before the seconds, and look "
    "how far apart its rounds are."
)


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the page under its head."""
    page = Benchmark(site, head)
    page.bind(SurveyHandlers(site, page), blocks)


class Benchmark:
    """The components, each an attribute, laid out from top to bottom."""

    def __init__(self, site: Site, head: gr.Row):
        self.site, self.start, self.visit = site, SurveySettings(lanes=LANES), gr.State(None)
        with head:
            self.status = gr.HTML(
                "starting",
                html_template=read("status.html"),
                elem_classes="status",
                elem_id="status",
                apply_default_css=False,
            )
        gr.HTML(f"<h2>Benchmark</h2><p>{LEAD}</p>", elem_classes="lead", apply_default_css=False)
        with gr.Row(elem_classes="ask survey", equal_height=False):
            self._questions()
            self._numbers()
        self.lanes = LaneEditor(
            self.start.lanes,
            fills=offers.fills(site.named(self.start.model)),
            most=SurveySettings.MOST,
            elem_id="editor",
        )
        self.lanes_notice = notice("lanes-notice")
        self._actions()
        self._results()

    def controls(self) -> list[gr.components.Component]:
        return [getattr(self, name) for name in CONTROLS]

    def show(self, choice: SurveySettings) -> Changes:
        return {getattr(self, name): getattr(choice, name) for name in CONTROLS} | {
            self.brought: gr.update(open=bool(choice.own))
        }

    def busy(self) -> Changes:
        return {self.go: gr.update(visible=False), self.halt: gr.update(visible=True)}

    def rest(self) -> Changes:
        return {self.go: gr.update(visible=True), self.halt: gr.update(visible=False)}

    def silence(self) -> Changes:
        return dict.fromkeys(self._notices(), "")

    def say(self, refusal: Refusal) -> Changes:
        """The sentence beside what it is about."""
        near = getattr(self, f"{BESIDE.get(refusal.about, 'questions')}_notice")
        return {
            **self.silence(),
            near: escape(str(refusal)),
            **({self.brought: gr.update(open=True)} if near is self.own_notice else {}),
        }

    def plotted(self, answers: list[Answer], cost: str) -> Changes:
        """The figures there is something to draw for; nothing of the section where there is none."""
        rows = table(answers)
        drawn = dict(zip(self.plots, map(for_page, (quality(rows, cost), acceptance(rows)))))
        shown = {plot: gr.update(value=figure, visible=figure is not None) for plot, figure in drawn.items()}
        return {
            **shown,
            self.figures: gr.update(visible=any(drawn.values())),
            self.cost: gr.update(visible=drawn[self.plots[0]] is not None),
        }

    def bind(self, acts: SurveyHandlers, blocks: gr.Blocks) -> None:
        """One act for each event."""
        controls, now = self.controls(), {"queue": False, **PRIVATE}
        blocks.load(acts.open, None, [*controls, self.brought], **PRIVATE)
        blocks.load(acts.ready, None, [self.status, *self._notices(), self.brought], concurrency_limit=None, **PRIVATE)
        self.model.change(acts.offer, self.model, self.lanes, **now)
        self.bring.upload(acts.bring, self.bring, [self.own, *self._notices(), self.brought], **now)
        self.go.click(
            acts.run,
            [self.visit, self.cost, *controls],
            [
                self.visit,
                self.status,
                self.told,
                self.standings,
                self.answers,
                self.go,
                self.halt,
                *self._notices(),
                self.brought,
                *self._drawn(),
            ],
            concurrency_limit=None,
            **PRIVATE,
        )
        self.halt.click(acts.stop, self.visit, [self.go, self.halt], **now)
        self.standings.show(acts.show, self.visit, self.answers, **now)
        self.standings.save(acts.save, self.visit, self.standings, **now)
        self.cost.change(acts.draw, [self.visit, self.cost], self._drawn(), **now)
        self.share.click(acts.share, controls, self.link, **PRIVATE)
        self.link.change(None, self.link, None, js="(code) => window.shareLink(code)", **PRIVATE)

    def _notices(self) -> list[gr.components.Component]:
        return [self.questions_notice, self.own_notice, self.model_notice, self.lanes_notice]

    def _drawn(self) -> list[gr.components.Component]:
        return [*self.plots, self.figures, self.cost]

    def _questions(self) -> None:
        with gr.Column(scale=5, min_width=280, elem_classes="question"):
            self.tasks = gr.CheckboxGroup(
                [(title, task) for task, title in TASKS.items()],
                value=self.start.tasks,
                label="Questions of the small world",
                elem_id="tasks",
            )
            with gr.Accordion(
                "Questions of your own", open=False, elem_classes="passage", elem_id="brought"
            ) as self.brought:
                self.own = gr.Textbox(
                    self.start.own,
                    label="One JSON object a line",
                    lines=3,
                    max_lines=10,
                    placeholder=FORM,
                    elem_id="own",
                    info='Only "prompt" has to be there. "answer" makes it scored: exact, or with "contains": true anywhere in the text.',
                )
                self.bring = gr.UploadButton(
                    "Load a .jsonl file", file_types=[".jsonl", ".json", ".txt"], size="sm", elem_id="bring"
                )
                self.own_notice = notice("own-notice")
            self.questions_notice = notice("questions-notice")

    def _numbers(self) -> None:
        with gr.Column(scale=2, min_width=280, elem_classes="numbers"):
            with gr.Row(elem_classes="pair"):
                self.count = self._number("count", "Of each kind")
                self.repeats = self._number("repeats", "Rounds")
            with gr.Row(elem_classes="pair"):
                self.length = self._number("length", "Tokens")
                self.seed = self._number("seed", "Seed")
            with gr.Accordion("Models", open=False, elem_classes="models"):
                targets = offers.targets(self.site.default_name())
                self.model = gr.Dropdown(
                    targets, value=self.start.model, label="Target", allow_custom_value=True, elem_id="model"
                )
                self.draft = gr.Dropdown(
                    offers.drafts(), value=self.start.draft, label="Draft", allow_custom_value=True, elem_id="draft"
                )
            self.model_notice = notice("model-notice")

    def _number(self, name: str, label: str) -> gr.Number:
        return gr.Number(getattr(self.start, name), label=label, precision=0, min_width=90, elem_id=name)

    def _actions(self) -> None:
        with gr.Row(elem_classes="actions"):
            self.go = gr.Button("Run", variant="primary", elem_id="run", min_width=120, scale=0)
            self.halt = gr.Button("Stop", variant="stop", elem_id="stop", min_width=120, scale=0, visible=False)
            gr.HTML("<kbd>Ctrl</kbd> <kbd>Enter</kbd>", elem_classes="hint", apply_default_css=False)
            self.share = gr.Button("Copy link", size="sm", variant="secondary", elem_id="share", min_width=90, scale=0)
            self.link = gr.Textbox(visible="hidden", elem_id="link")

    def _results(self) -> None:
        self.told = gr.HTML(
            "",
            html_template="<div class='told' role='status'>${value}</div>",
            elem_id="progress",
            apply_default_css=False,
        )
        self.standings = Standings(elem_id="standings")
        self.answers = gr.HTML("", elem_id="answers", apply_default_css=False)
        with gr.Accordion(
            "Figures", open=True, visible=False, elem_classes="figures", elem_id="figures"
        ) as self.figures:
            self.cost = gr.Radio(
                [(told, cost) for cost, (told, _) in COSTS.items()],
                value=next(iter(COSTS)),
                label="Held against",
                elem_id="cost",
            )
            self.plots = [gr.Plot(show_label=False, visible=False) for _ in range(2)]


@dataclass(eq=False)
class SurveyVisit:
    """A visitor's last survey and how far it has come."""

    choice: SurveySettings
    entrants: list[Entrant]
    questions: list[Question]
    answers: list[Answer] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # settings and machine, once the models are there
    beside: int = 0  # most runs of others that took turns with it
    run: Run | RemoteRun | None = None
    ticket: Ticket | None = None  # its seat, or its place among those who wait for one
    stopped: bool = False
    left: bool = False  # another one has taken its place on the page
    over: bool = False

    def stop(self) -> None:
        self.stopped = True
        if self.run:
            self.run.stop()

    def leave(self) -> None:
        """Nobody follows any more: end it and give the seat back."""
        self.stop()
        if self.ticket:
            self.ticket.leave()

    def notes(self) -> list[str]:
        """What it was measured with and on, and what that is worth."""
        if not self.facts:
            return []
        models, machine = self.facts["settings"], self.facts["machine"]
        draft = f" and the draft {_short(models['draft'])}" if models["draft"] else ""
        others = f" Up to {_count(self.beside, 'run')} of other visitors took turns with it." if self.beside else ""
        return [
            f"Measured with {_short(models['model'])} ({models['parameters'] / 1e6:,.0f} million parameters, {models['dtype']}){draft}, on "
            f"{machine['processor']}, {machine['threads']} of {_count(machine['cores'], 'core')}, device {machine['device']}, "
            f"torch {machine['torch']}.{others}",
            CAUTION,
        ]


class SurveyHandlers:
    """What happens when a visitor does something. Bound to one page; what belongs to one visitor comes in through the
    page's state.
    """

    def __init__(self, site: Site, page: Benchmark):
        self.site, self.page = site, page

    def open(self, request: gr.Request) -> Changes:
        """Put the controls as a link has them."""
        code = request.query_params.get("s", "")
        choice = SurveySettings.from_code(code) if code else None
        return self.page.show(choice) if choice else gr.skip()

    @ends_unread
    def ready(self) -> Iterator[Changes]:
        """Show how the models that the page was started with are coming along."""
        try:
            arrival = self.site.arrivals.want(self.site.wish)
            yield from self._progress(arrival)
            arrival.result()
        except Refusal as refusal:
            yield self.page.say(refusal)

    def offer(self, model: str) -> Changes:
        return {self.page.lanes: gr.update(fills=offers.fills(self.site.named(model)))}

    def bring(self, path: str) -> Changes:
        """The text of a file, if every line of it is a question; the file itself is not kept."""
        file = Path(path)
        try:
            read_questions(file)
            return {self.page.own: file.read_text(encoding="utf-8-sig"), **self.page.silence()}
        except Refusal as refusal:
            return self.page.say(refusal)
        finally:
            file.unlink(missing_ok=True)

    @ends_unread
    def run(self, before: SurveyVisit | None, cost: str, *values: Any) -> Iterator[Changes]:
        """Ask, and stream how it goes; leaving the page stops it."""
        if before:
            before.left = True
            before.stop()
        try:
            yield from self._run(SurveySettings(**dict(zip(CONTROLS, values))), cost)
        except Refusal as refusal:
            yield {self.page.told: "", **self.page.rest(), **self.page.say(refusal)}

    def stop(self, visit: SurveyVisit | None) -> Changes:
        """End it; where nothing goes on any more, put the buttons right."""
        if visit is None or visit.over:
            return self.page.rest()
        visit.stop()
        return gr.skip()

    def show(self, visit: SurveyVisit | None, event: gr.EventData) -> str:
        """One question with what everybody wrote."""
        try:
            number = whole_number(event, "number")
        except Refusal:
            return ""
        known = visit and number < len(visit.questions)
        return answers_to(visit.questions[number], number, visit.entrants, visit.answers) if known else ""

    def save(self, visit: SurveyVisit | None, event: gr.EventData) -> Changes:
        """The whole survey as a file."""
        form = getattr(event, "form", "")
        if visit is None or form not in ("csv", "json"):
            return gr.skip()
        kind, text = ("text/csv", as_csv(visit.answers)) if form == "csv" else ("application/json", _document(visit))
        # at: the same file can be had twice
        return {"saved": {"name": file_name(form), "type": kind, "text": text, "at": monotonic()}}

    def draw(self, visit: SurveyVisit | None, cost: str) -> Changes:
        return self.page.plotted(visit.answers if visit else [], cost)

    def share(self, *values: Any) -> Iterator[Changes]:
        """The code of a link that opens the page as it is set; the browser makes it an address, each time anew."""
        yield {self.page.link: ""}
        yield {self.page.link: SurveySettings(**dict(zip(CONTROLS, values))).to_code()}

    def _run(self, choice: SurveySettings, cost: str) -> Iterator[Changes]:
        choice.check(self.site.rules)
        visit = SurveyVisit(choice, choice.entrants(), choice.questions(self.site.rules))
        arrival = self.site.arrival(choice)
        cleared = {self.page.told: "", self.page.standings: None, self.page.answers: "", **self.page.plotted([], cost)}
        yield {self.page.visit: visit, **self.page.busy(), **self.page.silence(), **cleared}
        try:
            for change in self._before(visit, arrival):
                yield gr.skip() if visit.stopped else change
                if visit.stopped:
                    break
            else:
                yield from self._stream(visit, arrival)
        finally:
            visit.over = True
            visit.leave()
        yield gr.skip() if visit.left else {**self.page.rest(), **self._outcome(visit, cost)}

    def _before(self, visit: SurveyVisit, arrival: ModelLoad) -> Iterator[Changes]:
        """What there is to wait for: the models, and the surveys of others."""
        yield from self._progress(arrival)
        arrival.result()
        visit.ticket = self.site.join(SURVEY)
        for place in visit.ticket.wait():
            yield {
                self.page.told: f"<p>Place {place} in the queue. One survey goes on at a time, so that none spoils another's times.</p>"
            }

    def _progress(self, arrival: ModelLoad) -> Iterator[Changes]:
        for now in arrival.watch():
            yield {self.page.status: status(now)}
        yield {self.page.status: status(arrival)}

    def _stream(self, visit: SurveyVisit, arrival: ModelLoad) -> Iterator[Changes]:
        """The table, as often as is worth looking at it."""
        models = arrival.result()
        visit.facts = _facts(visit.choice, models)
        visit.run = self.site.survey(arrival, visit.choice)
        forecast, due = Forecast(visit), 0.0
        for news in visit.run.frames():
            fresh = news["events"] if news else []
            visit.answers += fresh
            visit.beside = max(visit.beside, self.site.beside(models, visit.run))
            forecast.hear(fresh)
            if monotonic() < due:
                yield gr.skip()
                continue
            yield {self.page.told: forecast.say(), **(self._table(visit) if visit.answers else {})}
            due = monotonic() + OFTEN

    def _table(self, visit: SurveyVisit) -> Changes:
        return {self.page.standings: told(visit.entrants, visit.questions, visit.answers, visit.notes())}

    def _outcome(self, visit: SurveyVisit, cost: str) -> Changes:
        """Where it ended: the whole table with its figures, and why it is not more."""
        wanted = len(visit.entrants) * len(visit.questions) * visit.choice.repeats
        came = f"{len(visit.answers):,} of {wanted:,} answers."
        said = (
            visit.run.error
            if visit.run and visit.run.error
            else came
            if len(visit.answers) == wanted
            else f"Stopped after {came}"
        )
        shown = {**self._table(visit), **self.page.plotted(visit.answers, cost)} if visit.answers else {}
        return {self.page.told: f"<p>{escape(said)}</p>", **shown}


class Forecast:
    """How far a survey is, and how long the rest will take: as long as it took so far, the turns of other visitors
    included.
    """

    def __init__(self, visit: SurveyVisit):
        self._visit, self._progress = visit, Progress(visit.entrants, visit.questions, visit.choice.repeats)
        # when the first answer came, and seconds that those after it took by themselves
        self._begun, self._own = 0.0, 0.0

    def hear(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._progress.count(answer)
            self._own += answer.seconds if self._begun else 0.0
            self._begun = self._begun or monotonic()

    @property
    def left(self) -> float | None:
        """Seconds; None as long as too little was measured."""
        left = self._progress.left
        return left * max(1.0, (monotonic() - self._begun) / self._own) if left and self._own else left

    def say(self) -> str:
        """As HTML."""
        if not self._visit.answers:
            return "<p>Warming up: every strategy answers a question of each kind, which does not count.</p>"
        left = self.left
        facts = [
            f"{_count(len(self._visit.answers), 'answer')}",
            *([f"{_lasting(left)} left"] if left is not None else []),
            *([f"in turn with {_count(self._visit.beside, 'run')} of others"] if self._visit.beside else []),
        ]
        return f"<p>{', '.join(facts)} <progress max='1' value='{self._progress.share:.3f}'></progress></p>"


def _facts(choice: SurveySettings, models: Any) -> dict[str, Any]:
    """What a survey's file says beside its answers."""
    from playground.bench.speed_report import machine  # not before a model is there: it brings torch along

    asked = {
        "tasks": choice.tasks,
        "questions": choice.count,
        "repeats": choice.repeats,
        "seed": choice.seed,
        "max_new_tokens": choice.length,
    }
    return {"settings": models_told(models) | asked, "machine": machine(models.target.device)}


def _document(visit: SurveyVisit) -> str:
    facts = {**visit.facts, "shared": {"runs_of_others": visit.beside}}
    return json.dumps(document(facts, visit.entrants, visit.questions, visit.answers), indent=1)


def _lasting(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def _short(name: str) -> str:
    """A model's name; of a folder only its last part, which tells nobody where the files lie."""
    return Path(name).name if Path(name).is_dir() else name


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
