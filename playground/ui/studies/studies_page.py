"""Figures and studies of a run, on a page of their own: `studies?run=NAME&hues=0,2`, where the menu View leads.

A run is found by its name, which only the page that made it has, for as long as the server keeps it for its visitor.
"""
from __future__ import annotations

import re
from html import escape

import gradio as gr

from playground.ui.play.kept_runs import LONGEST_NAME
from playground.ui.server.site import Site
from playground.ui.studies import run_figures, study_figures

LEAD = (
    "<h2>Studies</h2><p class='lead'>A study looks at a recorded run as a whole. The playground leads here from a run; "
    "<code>python -m playground study</code> draws the same of trace files.</p>"
)
GONE = "This run is no longer on the server: run it again in the playground, and choose Figures in its menu View."
HUES = "[0-3](,[0-3]){0,3}"
NONE = "Choose one of the studies below for what it needs, and run such lanes in the playground."


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the page: figures and studies of the run that the address names, and what studies there are."""
    gr.HTML(LEAD, elem_classes="studies-lead", apply_default_css=False)

    @gr.render(show_progress="hidden")
    def draw(request: gr.Request) -> None:
        asked = request.query_params
        _draw(site, asked.get("run", "")[:LONGEST_NAME], _hues(asked.get("hues", "")))

    gr.HTML(_all_studies(), elem_classes="studies-known", apply_default_css=False)


def _hues(text: str) -> list[int]:
    """The hues of the lanes from an address; none where it says anything else."""
    return [int(hue) for hue in text.split(",")] if re.fullmatch(HUES, text) else []


def _draw(site: Site, name: str, hues: list[int]) -> None:
    run = site.runs.find(name)
    if run is None:
        return _say(GONE if name else NONE)
    for figure in filter(None, run_figures.draw(run.trace, hues)):
        gr.Plot(figure, show_label=False)
    outcomes = study_figures.outcomes(run.trace)
    for study in study_figures.known():
        if study.name in outcomes:
            events = outcomes[study.name]
            notes = "".join(f"<p>{escape(note)}</p>" for note in study_figures.notes(events))
            _html(f"<h3>{escape(study.title)}</h3>{notes}")
            for drawn in study_figures.draw(events):
                gr.Plot(drawn, show_label=False)
    if not outcomes:
        _say(f"No study can use this run. {NONE}")


def _say(sentence: str) -> None:
    _html(f"<p>{sentence}</p>")


def _html(html: str) -> None:
    gr.HTML(html, elem_classes="study", apply_default_css=False)


def _all_studies() -> str:
    """What studies there are, with links to their entries in the library."""
    rows = "".join(
        f"<li><a href='./library#{escape(study.name)}'>{escape(study.title)}</a>"
        f" {escape(study.summary().replace('`', ''))}</li>"
        for study in study_figures.known()
    )
    return f"<h3>All studies</h3><ul>{rows}</ul>"
