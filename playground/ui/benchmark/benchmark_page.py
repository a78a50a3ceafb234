"""The benchmark page: strategies answer questions, and a results table fills while they do.

A survey is served by the same worker as the runs of the playground, one forward at a time. One survey runs at a time;
others wait in the admission queue.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr

from playground.bench.survey.results import table
from playground.bench.survey.survey import Answer, Entrant, Progress
from playground.bench.survey.survey_export import as_csv, document, model_facts
from playground.bench.survey.survey_figures import COSTS, acceptance, quality
from playground.errors import Refusal
from playground.questions.questions import Question
from playground.questions.user_questions import FORM, read_questions
from playground.run_request import DEFAULT
from playground.ui.benchmark.results_table import ResultsTable, answers_to, file_name, table_value, task_name
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components import model_menu
from playground.ui.components.event_fields import whole_number
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.run_controls import ModelDropdown, status_line
from playground.ui.components.theme import PRIVATE, notice
from playground.ui.guard.readers import ends_unread
from playground.ui.guard.uploads import delete
from playground.ui.models.status_line import status
from playground.ui.play.gallery import TASKS
from playground.ui.play.lane_editor import LaneEditor
from playground.ui.play.visit import Changes
from playground.ui.server.admission_queue import SURVEY, Ticket
from playground.ui.server.model_loader import ModelLoad
from playground.ui.server.site import Site
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun
from playground.ui.studies.run_figures import for_page

CONTROLS = ("tasks", "count", "repeats", "own", "length", "seed", "model", "draft", "lanes")
# `Refusal.about` -> the notice it is shown in
NOTICES = {"lanes": "lanes", "entrants": "lanes", "file": "own", "model": "model", "draft": "model", "device": "model"}
LANES = [{"strategy": "greedy"}, {"strategy": "speculative", "extras": [["prompt_lookup", {}], ["greedy_match", {}]]}]
TABLE_INTERVAL = 0.7  # least seconds between two updates of the table
LEAD = (
    "All strategies answer the same questions, one after another and in several rounds. The table shows what each "
    "costs and, for questions with known answers, its score. The bundled models know only the small invented world of "
    "these questions; for other models, use questions of your own."
)
CAUTION = (
    "Forwards, acceptance, tokens and scores are exact. Times are unreliable on a busy machine: prefer the time ratio "
    "to the seconds, and check its spread over the rounds."
)

APPLE_KEYS = "if (window.isApple) element.querySelector('kbd').textContent = '⌘';"


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the page below its header."""
    page = Benchmark(site, head)
    page.bind(SurveyHandlers(site, page), blocks)


class Benchmark:
    """The components, each an attribute, from top to bottom."""

    def __init__(self, site: Site, head: gr.Row):
        self.site, self.start, self.visit = site, SurveySettings(lanes=LANES), gr.State(None)
        with head:
            self.status = status_line("starting")
        gr.HTML(f"<h2>Benchmark</h2><p>{LEAD}</p>", elem_classes="lead", apply_default_css=False)
        with gr.Row(elem_classes="ask survey", equal_height=False):
            self._questions()
            self._numbers()
        self.lanes = LaneEditor(
            self.start.lanes,
            attention=site.chosen.attention(self.start),
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
            self.own_section: gr.update(open=bool(choice.own))
        }

    def busy(self) -> Changes:
        return {self.go: gr.update(visible=False), self.halt: gr.update(visible=True)}

    def idle(self) -> Changes:
        return {self.go: gr.update(visible=True), self.halt: gr.update(visible=False)}

    def clear_notices(self) -> Changes:
        return dict.fromkeys(self._notices(), "")

    def show_refusal(self, refusal: Refusal) -> Changes:
        """Show the message of a refusal next to the control it is about."""
        near = getattr(self, f"{NOTICES.get(refusal.about, 'questions')}_notice")
        return {
            **self.clear_notices(),
            near: escape(str(refusal)),
            **({self.own_section: gr.update(open=True)} if near is self.own_notice else {}),
        }

    def plotted(self, answers: list[Answer], cost: str | None) -> Changes:
        """Show the figures that have data; hide the section if none has."""
        rows = [replace(row, task=task_name(row.task)) for row in table(answers)]  # as the table names them
        drawn = dict(zip(self.plots, map(for_page, (quality(rows, cost or next(iter(COSTS))), acceptance(rows)))))
        shown = {plot: gr.update(value=figure, visible=figure is not None) for plot, figure in drawn.items()}
        return {
            **shown,
            self.figures: gr.update(visible=any(drawn.values())),
            self.cost: gr.update(visible=drawn[self.plots[0]] is not None),
        }

    def bind(self, handlers: SurveyHandlers, blocks: gr.Blocks) -> None:
        """Connect each event to its handler."""
        controls, now = self.controls(), {"queue": False, **PRIVATE}
        blocks.load(handlers.open, None, [*controls, self.own_section], **PRIVATE)
        notices = [*self._notices(), self.own_section]
        blocks.load(handlers.ready, None, [self.status, *notices], concurrency_limit=None, **PRIVATE)
        self.model.change(handlers.offer, self.model, self.lanes, **now)
        self.bring.upload(handlers.bring, self.bring, [self.own, *notices], **now)
        self.go.click(
            handlers.run,
            [self.visit, self.cost, *controls],
            [
                self.visit,
                self.status,
                self.progress,
                self.results,
                self.answers,
                self.go,
                self.halt,
                *notices,
                *self._drawn(),
            ],
            concurrency_limit=None,
            **PRIVATE,
        )
        self.halt.click(handlers.stop, self.visit, [self.go, self.halt], **now)
        self.results.show(handlers.show, self.visit, self.answers, **now)
        self.results.save(handlers.save, self.visit, self.results, **now)
        self.cost.change(handlers.draw, [self.visit, self.cost], self._drawn(), **now)
        self.share.click(handlers.share, controls, self.link, **PRIVATE)
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
            ) as self.own_section:
                self.own = gr.Textbox(
                    self.start.own,
                    label="One JSON object per line",
                    lines=3,
                    max_lines=10,
                    placeholder=FORM,
                    elem_id="own",
                    info='Only "prompt" is required. "answer" is needed for a score: it must equal the text, or with '
                         '"contains": true occur anywhere in it.',
                )
                self.bring = gr.UploadButton(
                    "Load a .jsonl file", file_types=[".jsonl", ".json", ".txt"], size="sm", elem_id="bring"
                )
                self.own_notice = notice("own-notice")
            self.questions_notice = notice("questions-notice")

    def _numbers(self) -> None:
        with gr.Column(scale=2, min_width=280, elem_classes="numbers"):
            with gr.Row(elem_classes="pair"):
                self.count = self._number("count", "Per task")
                self.repeats = self._number("repeats", "Rounds")
            with gr.Row(elem_classes="pair"):
                self.length = self._number("length", "Tokens")
                self.seed = self._number("seed", "Seed")
            with gr.Accordion("Models", open=False, elem_classes="models"):
                targets = model_menu.targets(self.site.chosen.named(DEFAULT))
                typed = {"allow_custom_value": not self.site.rules.public}
                self.model = ModelDropdown(
                    targets, value=self.start.model, label="Target", elem_id="model", **typed
                )
                self.draft = ModelDropdown(
                    model_menu.drafts(), value=self.start.draft, label="Draft", elem_id="draft", **typed
                )
            self.model_notice = notice("model-notice")

    def _number(self, name: str, label: str) -> gr.Number:
        return gr.Number(getattr(self.start, name), label=label, precision=0, min_width=90, elem_id=name)

    def _actions(self) -> None:
        with gr.Row(elem_classes="actions"):
            self.go = gr.Button("Run", variant="primary", elem_id="run", min_width=120, scale=0)
            self.halt = gr.Button("Stop", variant="stop", elem_id="stop", min_width=120, scale=0, visible=False)
            gr.HTML("<kbd>Ctrl</kbd> <kbd>Enter</kbd>", js_on_load=APPLE_KEYS, elem_classes="hint",
                    apply_default_css=False)
            self.share = gr.Button("Copy link", size="sm", variant="secondary", elem_id="share", min_width=90, scale=0)
            self.link = gr.Textbox(visible="hidden", elem_id="link")

    def _results(self) -> None:
        self.progress = gr.HTML(
            "",
            html_template="<div class='fold-note' role='status'>${value}</div>",
            elem_id="progress",
            apply_default_css=False,
        )
        self.results = ResultsTable(elem_id="results-table")
        self.answers = gr.HTML("", elem_id="answers", apply_default_css=False)
        with gr.Accordion(
            "Figures", open=True, visible=False, elem_classes="figures", elem_id="figures"
        ) as self.figures:
            self.cost = gr.Radio(
                [(label, cost) for cost, (label, _) in COSTS.items()],
                value=next(iter(COSTS)),
                label="Cost axis",
                elem_id="cost",
            )
            self.plots = [gr.Plot(show_label=False, visible=False) for _ in range(2)]


@dataclass(eq=False)
class SurveyVisit:
    """A visitor's last survey and its progress."""

    choice: SurveySettings
    entrants: list[Entrant]
    questions: list[Question]
    answers: list[Answer] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # settings and machine, once the models are loaded
    other_runs: int = 0  # maximum number of other visitors' runs that shared the device
    run: Run | RemoteRun | None = None
    ticket: Ticket | None = None  # its seat or its place in the queue
    stopped: bool = False
    left: bool = False  # another survey has replaced it on the page
    over: bool = False

    def stop(self) -> None:
        self.stopped = True
        if self.run:
            self.run.stop()

    def leave(self) -> None:
        """Stop the survey and give up its seat."""
        self.stop()
        if self.ticket:
            self.ticket.leave()

    def notes(self) -> list[str]:
        """The models, the machine, and how reliable the measurements are."""
        if not self.facts:
            return []
        models, machine = self.facts["settings"], self.facts["machine"]
        draft = f" and the draft {_short(models['draft'])}" if models["draft"] else ""
        others = _count(self.other_runs, "run")
        shared = f" Up to {others} of other visitors shared the device." if self.other_runs else ""
        size = f"{models['parameters'] / 1e6:,.0f} million parameters"
        return [
            f"Measured with {_short(models['model'])} ({size}, {models['dtype']}){draft}, on "
            f"{machine['processor']}, {machine['threads']} of {_count(machine['cores'], 'core')}, "
            f"device {machine['device']}, torch {machine['torch']}.{shared}",
            CAUTION,
        ]


class SurveyHandlers:
    """The event handlers of one page; everything that belongs to a visitor is passed in through the page's state."""

    def __init__(self, site: Site, page: Benchmark):
        self.site, self.page = site, page

    def open(self, request: gr.Request) -> Changes:
        """Set the controls from the link."""
        code = request.query_params.get("s", "")
        choice = SurveySettings.from_code(code) if code else None
        return self.page.show(choice) if choice else gr.skip()

    @ends_unread
    def ready(self) -> Iterator[Changes]:
        """Show the loading progress of the page's own models."""
        try:
            with as_refusals("Loading the models", "model"):
                loading = self.site.model_loader.request(self.site.model_request)
                yield from self._progress(loading)
                loading.result()
        except Refusal as refusal:
            yield self.page.show_refusal(refusal)

    def offer(self, model: str) -> Changes:
        return {self.page.lanes: gr.update(attention=self.site.chosen.attention(SurveySettings(model=model)))}

    def bring(self, path: str | None) -> Changes:
        """Take the text of an uploaded file if every line is a question; the file is deleted."""
        if path is None:  # a request without a file
            return gr.skip()
        file = Path(path)
        try:
            with as_refusals("Reading the file"):
                read_questions(file)
                return {self.page.own: file.read_text(encoding="utf-8-sig"), **self.page.clear_notices()}
        except Refusal as refusal:
            return self.page.show_refusal(refusal)
        finally:
            delete(file)

    @ends_unread
    def run(self, before: SurveyVisit | None, cost: str, *values: Any) -> Iterator[Changes]:
        """Run a survey and stream its results; leaving the page stops it."""
        if before:
            before.left = True
            before.stop()
        try:
            with as_refusals("The benchmark"):
                yield from self._run(SurveySettings(**dict(zip(CONTROLS, values))), cost)
        except Refusal as refusal:
            yield {self.page.progress: "", **self.page.idle(), **self.page.show_refusal(refusal)}

    def stop(self, visit: SurveyVisit | None) -> Changes:
        """Stop the survey; if none is running, reset the buttons."""
        if visit is None or visit.over:
            return self.page.idle()
        visit.stop()
        return gr.skip()

    def show(self, visit: SurveyVisit | None, event: gr.EventData) -> str:
        """One question with the answers of all strategies, as HTML."""
        try:
            number = whole_number(event, "number")
        except Refusal:
            return ""
        known = visit and number < len(visit.questions)
        return answers_to(visit.questions[number], number, visit.entrants, visit.answers) if known else ""

    def save(self, visit: SurveyVisit | None, event: gr.EventData) -> Changes:
        """The survey as a CSV or JSON file."""
        form = getattr(event, "form", "")
        if visit is None or form not in ("csv", "json"):
            return gr.skip()
        kind, text = ("text/csv", as_csv(visit.answers)) if form == "csv" else ("application/json", _document(visit))
        # "at" makes the value differ, so the same file can be saved twice
        return {"saved": {"name": file_name(form), "type": kind, "text": text, "at": monotonic()}}

    def draw(self, visit: SurveyVisit | None, cost: str) -> Changes:
        return self.page.plotted(visit.answers if visit else [], cost)

    def share(self, *values: Any) -> Iterator[Changes]:
        """The code of a link to the current settings. It is cleared first, so that every click triggers the browser."""
        yield {self.page.link: ""}
        yield {self.page.link: SurveySettings(**dict(zip(CONTROLS, values))).to_code()}

    def _run(self, choice: SurveySettings, cost: str) -> Iterator[Changes]:
        choice.check(self.site.rules)
        choice.check_fit(self.site.chosen.surroundings(choice))
        visit = SurveyVisit(choice, choice.entrants(), choice.questions(self.site.rules))
        loading = self.site.chosen.load(choice)
        cleared = {self.page.progress: "", self.page.results: None, self.page.answers: ""}
        shown = {**self.page.busy(), **self.page.clear_notices(), **cleared, **self.page.plotted([], cost)}
        yield {self.page.visit: visit, **shown}
        try:
            for change in self._before(visit, loading):
                yield gr.skip() if visit.stopped else change
                if visit.stopped:
                    break
            else:
                yield from self._stream(visit, loading)
        finally:
            visit.over = True
            visit.leave()
        yield gr.skip() if visit.left else {**self.page.idle(), **self._outcome(visit, cost)}

    def _before(self, visit: SurveyVisit, loading: ModelLoad) -> Iterator[Changes]:
        """Wait for the models and for a seat."""
        yield from self._progress(loading)
        loading.result()
        visit.ticket = self.site.join(SURVEY)
        for place in visit.ticket.wait():
            reason = "One survey runs at a time, so that the measured times are comparable."
            waits = f"Place {place} in the queue, {visit.ticket.waited:.0f} s so far."
            yield {self.page.progress: f"<p>{waits} {reason}</p>"}

    def _progress(self, loading: ModelLoad) -> Iterator[Changes]:
        for now in loading.watch():
            yield {self.page.status: status(now)}
        yield {self.page.status: status(loading)}

    def _stream(self, visit: SurveyVisit, loading: ModelLoad) -> Iterator[Changes]:
        """Stream the table, at most every TABLE_INTERVAL seconds."""
        models = loading.result()
        visit.facts = _facts(visit.choice, models)
        visit.run = self.site.runs.survey(loading, visit.choice)
        forecast, due = Forecast(visit), 0.0
        for news in visit.run.frames():
            fresh = news["events"] if news else []
            visit.answers += fresh
            visit.other_runs = max(visit.other_runs, self.site.runs.others(models, visit.run))
            forecast.add(fresh)
            if monotonic() < due:
                yield gr.skip()
                continue
            yield {self.page.progress: forecast.html(), **(self._table(visit) if visit.answers else {})}
            due = monotonic() + TABLE_INTERVAL

    def _table(self, visit: SurveyVisit) -> Changes:
        return {self.page.results: table_value(visit.entrants, visit.questions, visit.answers, visit.notes())}

    def _outcome(self, visit: SurveyVisit, cost: str) -> Changes:
        """The final table with its figures, and an error message or how many answers there are."""
        wanted = len(visit.entrants) * len(visit.questions) * visit.choice.repeats
        count = f"{len(visit.answers):,} of {wanted:,} answers."
        error = visit.run.error if visit.run else ""
        message = error or (count if len(visit.answers) == wanted else f"Stopped after {count}")
        shown = {**self._table(visit), **self.page.plotted(visit.answers, cost)} if visit.answers else {}
        return {self.page.progress: f"<p>{escape(message)}</p>", **shown}


class Forecast:
    """Progress of a survey and an estimate of its remaining time, from its pace so far with the device shared."""

    def __init__(self, visit: SurveyVisit):
        self._visit, self._progress = visit, Progress(visit.entrants, visit.questions, visit.choice.repeats)
        self._begun, self._own = 0.0, 0.0  # time of the first answer; seconds that later answers took by themselves

    def add(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._progress.count(answer)
            self._own += answer.seconds if self._begun else 0.0
            self._begun = self._begun or monotonic()

    @property
    def left(self) -> float | None:
        """Remaining seconds; None until enough has been measured."""
        left = self._progress.left
        return left * max(1.0, (monotonic() - self._begun) / self._own) if left and self._own else left

    def html(self) -> str:
        """The progress line as HTML."""
        if not self._visit.answers:
            return "<p>Warming up: each strategy answers one question of each task, which is not counted.</p>"
        left, others = self.left, self._visit.other_runs
        facts = [
            f"{_count(len(self._visit.answers), 'answer')}",
            *([f"{_lasting(left)} left"] if left is not None else []),
            *([f"sharing the device with {_count(others, 'other run')}"] if others else []),
        ]
        return f"<p>{', '.join(facts)} <progress max='1' value='{self._progress.share:.3f}'></progress></p>"


def _facts(choice: SurveySettings, models: Any) -> dict[str, Any]:
    """Settings and machine, for a survey's file."""
    from playground.bench.speed.speed_report import machine  # imports torch

    asked = {
        "tasks": choice.tasks,
        "questions": choice.count,
        "repeats": choice.repeats,
        "seed": choice.seed,
        "max_new_tokens": choice.length,
    }
    return {"settings": model_facts(models) | asked, "machine": machine(models.target.device)}


def _document(visit: SurveyVisit) -> str:
    facts = {**visit.facts, "shared": {"runs_of_others": visit.other_runs}}
    return json.dumps(document(facts, visit.entrants, visit.questions, visit.answers), indent=1)


def _lasting(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def _short(name: str) -> str:
    """A model's name; of a folder only the last part, which does not reveal the path."""
    return Path(name).name if Path(name).is_dir() else name


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
