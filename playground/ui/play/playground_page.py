"""The playground page: its components and their layout. `page_events` binds them to the handlers."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape

import gradio as gr

from playground.decoding.visitor_memory import Memory
from playground.prompt_form import TOOL
from playground.run_request import DEFAULT, RunRequest, choices
from playground.ui.classroom.classroom_panel import ClassroomPanel
from playground.ui.components import model_menu
from playground.ui.components.run_controls import ModelDropdown, length_and_seed, mode_switch, status_line
from playground.ui.components.settings import Settings
from playground.ui.components.share_menu import ShareMenu
from playground.ui.components.theme import notice
from playground.ui.guard.framing import embedders
from playground.ui.models.model_sheet import ModelSheet, proposal_button
from playground.ui.play.chat_history import EarlierTurns
from playground.ui.play.gallery import Gallery, free_prompt_note, question_note
from playground.ui.play.lane_editor import LaneEditor
from playground.ui.play.lessons import Lessons
from playground.ui.play.live_view import Lanes
from playground.ui.play.remote_panel import RemotePanel
from playground.ui.play.settings_button import SettingsButton
from playground.ui.play.visit import Changes, Visit
from playground.ui.server.site import FIRST_SETTINGS, Site, first_view
from playground.ui.sweeps.knob_sweep_panel import KnobSweepPanel
from playground.ui.sweeps.seed_sweep_panel import Repeats

HERO = "<h2>A language model writes one word at a time. Watch it choose.</h2>"
MEMORY = {"storage_key": "decoding-playground", "secret": "not a secret"}  # browser storage for the settings


class Page:
    """The components, each an attribute, from top to bottom."""

    def __init__(self, site: Site, head: gr.Row):
        self.site, self.start = site, Settings.read(FIRST_SETTINGS)
        self.visit = gr.State(Visit(Settings(), stopped=True))  # so that each visit follows another
        self.stored = gr.BrowserState(None, **MEMORY)
        self.choice = gr.State(None)  # the model whose load was asked for on the sheet
        self.renewed = gr.Textbox(visible="hidden")  # when settings were last set, or models loaded, by the page
        with head:
            self.status = status_line("starting")
            self.sheet = ModelSheet(site.chosen.named(DEFAULT), typed=not site.rules.public, elem_id="models")
        if site.classroom:
            ClassroomPanel(elem_id="classroom")
        with gr.Row(elem_classes="begin"):
            self.lessons = Lessons(elem_id="lessons")
            self.gallery = Gallery(elem_id="gallery")
        self._bar()
        self._drawer()
        with gr.Column(elem_classes="stage"):
            self._lanes()
            self.live = Lanes(first_view(), elem_id="live")

    def controls(self) -> list[gr.components.Component]:
        """The controls, in the order of the fields of Settings."""
        return [getattr(self, name) for name in Settings.names()]

    def show(self, settings: Settings, names: list[str]) -> Changes:
        """Set the named controls from `settings`. The system message is shown in a chat."""
        settings = replace(settings, model=self.site.chosen.menu_choice(settings.model))
        shown = {getattr(self, name): getattr(settings, name) for name in names}
        return {**shown, self.system: gr.update(value=settings.system, visible=settings.mode == "chat"),
                self.tools: gr.update(value=settings.tools, visible=_has_tools(self.site, settings)),
                **self.show_question_note(settings)}

    def fit_tools(self, settings: Settings) -> Changes:
        """Show the tools only where they can be used."""
        return {self.tools: gr.update(visible=_has_tools(self.site, settings))}

    def show_question_note(self, settings: Settings) -> Changes:
        """Show what to look at if the prompt is a question with a known answer, and what to expect of any other from a
        toy model.
        """
        real = proposal_button(self.site.offers.proposed)
        html = question_note(settings) or free_prompt_note(settings, self.site.chosen.named(settings.model), real)
        return {self.known: gr.update(value=html, visible=bool(html))}

    def show_remarks(self, remarks: Iterable[str]) -> Changes:
        """Show what is to know about the prompt of a run."""
        return {self.prompt_remarks: "".join(f"<p class='look'>{escape(remark)}</p>" for remark in remarks)}

    def busy(self) -> Changes:
        return {**self.stoppable(), self.lanes: gr.update(problems={})}

    def stoppable(self) -> Changes:
        """Show Stop instead of Run."""
        return {self.go: gr.update(visible=False), self.halt: gr.update(visible=True)}

    def idle(self) -> Changes:
        return {self.go: gr.update(visible=True), self.halt: gr.update(visible=False)}

    def show_memory(self, memory: Memory) -> Changes:
        """Show how much strategies remember from earlier runs, with the Forget button; nothing if the memory is empty.
        """
        entries = f"{len(memory)} entr{'ies' if len(memory) > 1 else 'y'}"
        return {self.remembered: gr.update(value=f"memory: {entries} from earlier runs", visible=len(memory) > 0),
                self.forget: gr.update(visible=len(memory) > 0)}

    def offer(self, chosen: Settings) -> Changes:
        """Update the model menus, and the note on the chosen model."""
        named = self.site.chosen.named
        targets, note = model_menu.targets(named(DEFAULT)), _note(self.site, named(chosen.model))
        return {self.model: gr.update(choices=targets, info=note), self.draft: gr.update(choices=model_menu.drafts())}

    def fit_lanes(self, chosen: Settings) -> Changes:
        """Update which lanes the chosen models can run."""
        models = self.site.chosen
        return {self.lanes: gr.update(attention=models.attention(chosen), drafted=models.has_draft(chosen))}

    def notices(self) -> list[gr.components.Component]:
        return [
            self.status,
            self.prompt_notice,
            self.prompt_remarks,
            self.tools_notice,
            self.form_notice,
            self.model_notice,
            self.lanes_notice,
        ]

    def memory(self) -> list[gr.components.Component]:
        return [self.remembered, self.forget]

    def _bar(self) -> None:
        """The prompt and Run; below, the button of the drawer with a summary of the settings."""
        gr.HTML(HERO, elem_classes="hero", apply_default_css=False)
        with gr.Row(elem_classes="bar ask", equal_height=False):
            self.prompt = gr.Textbox(
                self.start.prompt,
                label="Prompt",
                show_label=False,
                lines=1,
                max_lines=6,
                placeholder="Write what the model continues…",
                elem_id="prompt",
            )
            self.go = gr.Button("Run", variant="primary", elem_id="run", min_width=112, scale=0)
            self.halt = gr.Button("Stop", variant="stop", elem_id="stop", min_width=112, scale=0, visible=False)
            self.share = ShareMenu(bool(embedders()), elem_id="share")
        self.link = gr.Textbox(visible="hidden", elem_id="link")
        self.frame = gr.Textbox(visible="hidden", elem_id="frame")
        self.known = gr.HTML(visible=False, elem_classes="known", elem_id="known", apply_default_css=False)
        self.prompt_notice = notice("prompt-notice")
        self.prompt_remarks = gr.HTML(
            "",
            html_template="<div role='status'>${value}</div>",
            elem_classes="known remarks",
            elem_id="prompt-remarks",
            apply_default_css=False,
        )
        self.summary = SettingsButton(self.start, self.site.chosen.default_name(), elem_id="settings")

    def _drawer(self) -> None:
        """Everything else about a run. It stays mounted while it is closed, so that its values are read and set."""
        with gr.Column(elem_classes="drawer", elem_id="drawer"):
            with gr.Row(elem_classes="ask", equal_height=False):
                self._models(self.start)
                self._numbers()
                self._question()
            self.remote = RemotePanel(visible=not self.site.rules.public)
            self._actions()
            self._sweeps()

    def _question(self) -> None:
        start = self.start
        with gr.Column(scale=4, min_width=280, elem_classes="question"):
            self.system = gr.Textbox(
                start.system,
                label="System message",
                lines=1,
                max_lines=4,
                placeholder="optional",
                visible=start.mode == "chat",
                elem_id="system",
            )
            self.tools, self.tools_notice = _tools_box(start, _has_tools(self.site, start)), notice("tools-notice")
            self.before = EarlierTurns(start.before, elem_id="before")
            with gr.Column(elem_classes="passage", elem_id="passage"):
                self.context = gr.Textbox(
                    start.context,
                    label="Context: a passage that the answer should be based on",
                    lines=3,
                    max_lines=10,
                    elem_id="context",
                    info="Every lane reads it before the prompt; context-contrastive lanes also run without it.",
                )
                self.form = gr.Textbox(
                    start.form,
                    label="Form of context and prompt",
                    lines=1,
                    max_lines=4,
                    placeholder="Read this: {context} Now answer: {prompt}",
                    elem_id="form",
                )
                self.form_notice = notice("form-notice")

    def _numbers(self) -> None:
        start = self.start
        with gr.Column(scale=2, min_width=240, elem_classes="numbers"):
            self.mode = mode_switch(start)
            self.length, self.seed = length_and_seed(start)
            self.stop = gr.Textbox(
                start.stop,
                label="Stop at",
                lines=1,
                max_lines=4,
                placeholder="one per line; \\n is a line break",
                elem_id="stop-strings",
            )

    def _models(self, start: Settings) -> None:
        named = self.site.chosen.named
        targets, hint = model_menu.targets(named(DEFAULT)), _note(self.site, named(start.model))
        typed = {"allow_custom_value": not self.site.rules.public}
        with gr.Column(scale=2, min_width=240, elem_classes="models"):
            self.model = ModelDropdown(
                targets, value=start.model, label="Model", info=hint, elem_id="model", **typed
            )
            self.draft = ModelDropdown(
                model_menu.drafts(), value=start.draft, label="Draft model", elem_id="draft", **typed
            )
            with gr.Row(elem_classes="pair"):
                self.dtype = gr.Dropdown(
                    choices(RunRequest)["dtype"], value=start.dtype, label="Data type", min_width=90, elem_id="dtype"
                )
                self.quantization = gr.Dropdown(
                    choices(RunRequest)["quantization"],
                    value=start.quantization,
                    label="Quantisation",
                    min_width=90,
                    elem_id="quantization",
                )
            self.fetch = gr.Button("Load now", size="sm")
            self.model_notice = notice("model-notice")

    def _lanes(self) -> None:
        self.lanes = LaneEditor(
            self.start.lanes,
            attention=self.site.chosen.attention(self.start),
            drafted=self.site.chosen.has_draft(self.start),
            elem_id="editor",
        )
        self.lanes_notice = notice("lanes-notice")

    def _actions(self) -> None:
        with gr.Row(elem_classes="actions"):
            self.read = gr.Button(
                "Score this text", size="sm", variant="secondary", elem_id="score", min_width=120, scale=0
            )
            self.remembered = gr.HTML(
                "", elem_classes="remembered", elem_id="remembered", apply_default_css=False, visible=False
            )
            self.forget = gr.Button(
                "Forget", size="sm", variant="secondary", elem_id="forget", min_width=80, scale=0, visible=False
            )
            self.again = gr.Button(
                "Show last run", size="sm", variant="secondary", elem_id="again", min_width=110, scale=0
            )

    def _sweeps(self) -> None:
        """Many runs of one lane: they are set up as a run is, and their results do not move the text."""
        with gr.Column(elem_classes="folds"):
            self.repeats = Repeats(self.site)
            self.knobs = KnobSweepPanel(self.site)


def _note(site: Site, model: str) -> str | None:
    return model_menu.note(model) or (None if site.rules.public else "from the list, a hub id or a folder")


def _tools_box(start: Settings, visible: bool) -> gr.Textbox:
    return gr.Textbox(
        start.tools,
        label="Tools",
        lines=3,
        max_lines=10,
        placeholder=f"[{TOOL}]",
        visible=visible,
        elem_id="tools",
        info="A list in JSON, as for a chat API. The model's chat template describes the tools in the prompt.",
    )


def _has_tools(site: Site, settings: Settings) -> bool:
    """Tools are shown in a chat with a model that has a place for them, and where there are some to remove."""
    return settings.chat and site.chosen.takes_tools(settings) or bool(settings.tools.strip())
