"""The benchmark page: strategies answer questions, and a results table fills while they do.

A survey is served by the same worker as the runs of the playground, one forward at a time. One survey runs at a time;
others wait in the admission queue.
"""
from __future__ import annotations

from dataclasses import replace
from html import escape

import gradio as gr

from playground.bench.survey.results import table
from playground.bench.survey.survey import Answer
from playground.bench.survey.survey_figures import COSTS, acceptance, quality
from playground.errors import Refusal
from playground.questions.user_questions import FORM
from playground.run_request import DEFAULT
from playground.ui.benchmark.results_table import ResultsTable, task_name
from playground.ui.benchmark.survey_handlers import CONTROLS, SurveyHandlers
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components import model_menu
from playground.ui.components.run_controls import ModelDropdown, status_line
from playground.ui.components.theme import PRIVATE, notice
from playground.ui.play.gallery import TASKS
from playground.ui.play.lane_editor import LaneEditor
from playground.ui.play.visit import Changes
from playground.ui.server.site import Site
from playground.ui.studies.run_figures import for_page

# `Refusal.about` -> the notice it is shown in
NOTICES = {"lanes": "lanes", "entrants": "lanes", "file": "own", "model": "model", "draft": "model", "device": "model"}
LANES = [{"strategy": "greedy"}, {"strategy": "speculative", "extras": [["prompt_lookup", {}], ["greedy_match", {}]]}]
LEAD = (
    "All strategies answer the same questions, one after another and in several rounds. The table shows what each "
    "costs and, for questions with known answers, its score. The bundled models know only the small invented world of "
    "these questions; for other models, use questions of your own."
)

APPLE_KEYS = "if (playground.isApple) element.querySelector('kbd').textContent = '⌘';"


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
        self.link.change(None, self.link, None, js="(code) => playground.shareLink(code)", **PRIVATE)

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
                    info='Only "prompt" is required. "answer" is needed for a score: the text or its final '
                         'answer must equal it, or with "contains": true it may occur anywhere in the text.',
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
