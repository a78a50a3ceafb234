"""What happens on the benchmark page: a survey runs and streams its results, is stopped, shown and saved."""
from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr

from playground.bench.survey.survey_export import as_csv
from playground.errors import Refusal
from playground.questions.user_questions import read_questions
from playground.ui.benchmark.results_table import answers_to, file_name, table_value
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.benchmark.survey_visit import Forecast, SurveyVisit, document_of, facts_of
from playground.ui.components.event_fields import whole_number
from playground.ui.components.internal_errors import as_refusals
from playground.ui.guard.readers import ends_unread
from playground.ui.guard.uploads import delete
from playground.ui.models.status_line import status
from playground.ui.play.visit import Changes
from playground.ui.server.admission_queue import SURVEY
from playground.ui.server.model_loader import ModelLoad
from playground.ui.server.site import Site

CONTROLS = ("tasks", "count", "repeats", "own", "length", "seed", "model", "draft", "lanes")
TABLE_INTERVAL = 0.7  # least seconds between two updates of the table


class SurveyHandlers:
    """The event handlers of one page; everything that belongs to a visitor is passed in through the page's state."""

    def __init__(self, site: Site, page):
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
        kind, text = ("text/csv", as_csv(visit.answers)) if form == "csv" else ("application/json", document_of(visit))
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
        visit.facts = facts_of(visit.choice, models)
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
