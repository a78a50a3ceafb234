"""Which handler is bound to which event of the playground page."""
from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import gradio as gr

from playground.ui.components.settings import Settings
from playground.ui.components.theme import PRIVATE
from playground.ui.models.model_sheet import ModelChoices
from playground.ui.play.live_handlers import LiveHandlers
from playground.ui.play.playground_page import Page
from playground.ui.play.run_handlers import RunHandlers
from playground.ui.play.settings_button import announce
from playground.ui.play.settings_handlers import SettingsHandlers
from playground.ui.play.visit import Changes, Visit
from playground.ui.server.site import Site

NOW = "() => String(performance.now())"
SHOW_IN_CHAT = "(mode) => ({ __type__: 'update', visible: mode === 'chat' })"


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the playground below the page's header."""
    page = Page(site, head)
    bind(page, Acts(RunHandlers(site, page), LiveHandlers(site, page), SettingsHandlers(site, page)), blocks)


class Acts(NamedTuple):
    """The event handlers of one page."""

    runs: RunHandlers
    live: LiveHandlers
    settings: SettingsHandlers


def bind(page: Page, acts: Acts, blocks: gr.Blocks) -> None:
    """Connect each event to its handler."""
    controls = page.controls()
    streaming = {
        "outputs": [
            page.visit,
            page.live,
            page.lanes,
            *page.notices(),
            page.go,
            page.halt,
            *page.memory(),
        ],
        "concurrency_limit": None,
        "trigger_mode": "multiple",  # a click counts while the refusal of the one before is on its way
        **PRIVATE,
    }
    chosen = "(stored) => playground.settingsToOpen(stored)"
    opened = blocks.load(acts.settings.open, page.stored, [*controls, page.known], js=chosen, **PRIVATE)
    page.lanes.mend(acts.settings.mend, None, [page.context, page.draft, page.model], queue=False, **PRIVATE)
    loads = {"outputs": page.notices(), "concurrency_limit": None, **PRIVATE}
    ready = blocks.load(acts.runs.ready, None, **loads)
    ModelChoices(page.site, page).bind(ready)
    loaded = page.fetch.click(acts.runs.load, controls, **loads)
    page.go.click(acts.runs.run, [page.visit, *controls], **streaming)
    page.read.click(acts.runs.score, [page.visit, *controls], **streaming)
    page.live.fork(acts.runs.fork, page.visit, **streaming)
    _bind_run(page, acts.live)
    if not page.site.rules.public:
        page.remote.bind(acts.live.connect, page.visit)
    page.repeats.bind(controls)
    _bind_knobs(page, controls, acts, streaming)
    page.forget.click(acts.live.forget, page.visit, page.memory(), queue=False, **PRIVATE)
    asked = [*controls, page.known, *page.notices()]
    picked = page.gallery.pick(acts.settings.pick, [page.model, page.draft], asked, queue=False, **PRIVATE)
    opened_step = {"queue": False, "trigger_mode": "multiple", **PRIVATE}  # steps may be skimmed: none is dropped
    prepared = page.lessons.prepare(acts.settings.set_up, [page.model, page.draft], asked, **opened_step)
    page.lessons.set_up(acts.settings.set_up, [page.model, page.draft], asked, queue=False, **PRIVATE).success(
        acts.runs.run, [page.visit, *controls], **streaming
    )
    latest = {"queue": False, "trigger_mode": "always_last", **PRIVATE}
    restored = page.summary.restore(acts.settings.restore, None, [*controls, page.known], **latest)
    _bind_fitting(page, acts.settings, (opened, ready, loaded, picked, prepared, restored))
    page.share.ask_link(acts.settings.share, controls, page.link, **PRIVATE)
    page.link.change(None, page.link, None, js="(code) => playground.shareLink(code)", **PRIVATE)
    page.share.ask_embed(acts.settings.embed, controls, page.frame, **PRIVATE)
    page.frame.change(None, page.frame, None, js="(code) => playground.embedCode(code)", **PRIVATE)
    opened.then(None, None, None, js="() => playground.linkOpened()", **PRIVATE)
    opened.success(None, None, None, js="() => playground.settingsSetUp()", **PRIVATE)
    page.mode.change(None, page.mode, page.system, js=SHOW_IN_CHAT, **PRIVATE)
    page.tools.change(acts.settings.check_tools, controls, page.tools_notice, **latest)
    page.form.change(acts.settings.check_form, page.form, page.form_notice, **latest)
    _remember(page, controls)


def _bind_fitting(page: Page, acts: SettingsHandlers, renewing: Iterable[gr.events.Dependency]) -> None:
    """Fit to the settings what is offered and shown. Each handler is bound once to all of its triggers: Gradio then
    sends the newest settings only after the answer to older ones, which so cannot come last.
    """
    for event in renewing:
        event.then(None, None, page.renewed, js=NOW, **PRIVATE)
    controls, models, latest = page.controls(), [page.model, page.draft], {"trigger_mode": "always_last", **PRIVATE}
    chosen = [page.model.change, page.draft.change, page.renewed.change]
    gr.on(chosen, acts.offer, models, models, queue=False, **latest)
    fitted = [*chosen, page.mode.change, page.tools.blur]
    gr.on(fitted, acts.fit, controls, [page.lanes, page.tools, page.tools_notice], queue=False, **latest)
    noted = [*chosen, page.prompt.blur, page.context.blur, page.mode.change, page.before.change]
    gr.on(noted, acts.update_question_note, controls, page.known, queue=False, **latest)


def _bind_knobs(page: Page, controls: list, acts: Acts, streaming: dict[str, Any]) -> None:
    """Bind the grid of knobs; a chosen cell becomes a lane, and all lanes are run."""
    page.knobs.bind(controls)
    page.knobs.bind_menus(page.lanes)

    def open_cell(visit: Visit | None, lanes: list, event: gr.EventData) -> Changes:
        return page.show(page.knobs.open_cell(visit, lanes, event), Settings.names())

    asked = [*controls, page.known]
    opened = page.knobs.output.open_cell(open_cell, [page.knobs.visit, page.lanes], asked, queue=False, **PRIVATE)
    opened.success(acts.runs.run, [page.visit, *controls], **streaming)


def _bind_run(page: Page, acts: LiveHandlers) -> None:
    """Bind the controls of an active run; they bypass Gradio's queue."""
    now = {"queue": False, **PRIVATE}
    for name in ("hold", "resume", "step", "stop_lane"):
        getattr(page.live, name)(getattr(acts, name), page.visit, None, **now)
    page.live.pace(acts.pace, page.visit, None, trigger_mode="always_last", **now)
    page.live.heard(acts.heard, None, None, **now)
    page.live.missed(acts.missed, page.visit, page.live, **now)
    for name in ("look", "attribute"):
        getattr(page.live, name)(
            getattr(acts, name), page.visit, page.live, concurrency_id="look", concurrency_limit=1, **PRIVATE
        )
    page.halt.click(acts.stop, page.visit, [page.go, page.halt], **now)
    page.again.click(acts.again, page.visit, [page.live, *page.notices()], **now)


def _remember(page: Page, controls: list[gr.components.Component]) -> None:
    """Save every change to the browser's storage and announce it, without a request to the server."""
    names = json.dumps(Settings.names())
    js = f"(...values) => {announce(f'Object.fromEntries({names}.map((name, i) => [name, values[i]]))')}"
    gr.on([control.change for control in controls], None, controls, page.stored, js=js, **PRIVATE)
