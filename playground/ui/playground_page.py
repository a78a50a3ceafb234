"""The playground's own page: what stands where, and which act answers which event. The acts themselves are in
handlers.py.
"""
from __future__ import annotations

import json
from collections.abc import Container
from functools import partial

import gradio as gr

from playground.decoding.visitor_memory import Memory
from playground.ui import model_menu as offers
from playground.ui import study_figures as studies
from playground.ui.chat_history import EarlierTurns
from playground.ui.gallery import Gallery, beside, examples
from playground.ui.handlers import Changes, Handlers
from playground.ui.lane_editor import LaneEditor, reading_context
from playground.ui.lessons import Lessons
from playground.ui.live_view import Lanes
from playground.ui.seed_sweep_panel import Repeats
from playground.ui.settings import CHOICES, Settings
from playground.ui.site import Site, first_view
from playground.ui.theme import PRIVATE, notice, read

MEMORY = {"storage_key": "decoding-playground", "secret": "not a secret"}  # the browser keeps what its owner typed


def fill(site: Site, blocks: gr.Blocks, head: gr.Row) -> None:
    """Lay out the playground under the head of its page."""
    page = Page(site, head)
    page.bind(Handlers(site, page), blocks)


class Page:
    """The components, each an attribute, laid out from top to bottom."""

    def __init__(self, site: Site, head: gr.Row):
        self.site, self.start = site, Settings.read(examples()[0])
        self.visit = gr.State(None)
        self.stored = gr.BrowserState(None, **MEMORY)
        with head:
            self.status = gr.HTML(
                "starting",
                html_template=read("status.html"),
                elem_classes="status",
                elem_id="status",
                apply_default_css=False,
            )
        with gr.Row(elem_classes="begin"):
            self.lessons = Lessons(elem_id="lessons")
            self.gallery = Gallery(elem_id="gallery")
        with gr.Row(elem_classes="ask", equal_height=False):
            self._question()
            self._numbers()
        self._lanes()
        self._actions()
        self._view()

    def controls(self) -> list[gr.components.Component]:
        """What a visitor sets, in the order of Settings."""
        return [getattr(self, name) for name in Settings.names()]

    def show(self, settings: Settings, names: list[str]) -> Changes:
        """The named controls as `settings` has them; the system message is seen in a chat only, the context and what to
        look at where there are any.
        """
        shown = {getattr(self, name): getattr(settings, name) for name in names}
        return {**shown, self.system: gr.update(value=settings.system, visible=settings.mode == "chat"),
                self.passage: gr.update(open=bool(settings.context)), **self.recognised(settings)}

    def recognised(self, settings: Settings) -> Changes:
        """What to look at, where a question with a known answer is asked."""
        told = beside(settings)
        return {self.known: gr.update(value=told, visible=bool(told))}

    def busy(self) -> Changes:
        return {**self.stoppable(), self.lanes: gr.update(problems={})}

    def stoppable(self) -> Changes:
        """Stop in the place of Run."""
        return {self.go: gr.update(visible=False), self.halt: gr.update(visible=True)}

    def rest(self) -> Changes:
        return {self.go: gr.update(visible=True), self.halt: gr.update(visible=False)}

    def remembers(self, memory: Memory) -> Changes:
        """How much strategies remember from earlier runs, and the button that makes them forget it; nothing where it is
        nothing.
        """
        things = f"{len(memory)} thing{'s' if len(memory) > 1 else ''}"
        return {self.remembered: gr.update(value=f"remembers {things} from earlier runs", visible=len(memory) > 0),
                self.forget: gr.update(visible=len(memory) > 0)}

    def figures_of(self, studied: Container[str]) -> Changes:
        """Offer the figures of the run, and the studies that have something to say of it; both are drawn when they are
        opened.
        """
        folds = {fold: gr.update(visible=name in studied) for name, fold in self.studies.items()}
        return {**folds, self.examined: gr.update(visible=True)}

    def shut(self) -> Changes:
        """Shut what was drawn of the run before."""
        return {fold: gr.update(open=False) for fold in (self.examined, *self.studies.values())}

    def offer(self, chosen: str) -> Changes:
        """The models there are to choose from, what there is to say of the chosen one, and which lanes it can run."""
        model = self.site.named(chosen)
        return {self.model: gr.update(choices=offers.targets(self.site.default_name()), info=self._note(model)),
                self.draft: gr.update(choices=offers.drafts()), self.lanes: gr.update(fills=offers.fills(model))}

    def _note(self, model: str) -> str | None:
        return offers.note(model) or (None if self.site.rules.public else "from the list, a hub id or a folder")

    def bind(self, acts: Handlers, blocks: gr.Blocks) -> None:
        """One act for each event."""
        controls = self.controls()
        streaming = {
            "outputs": [
                self.visit,
                self.live,
                self.lanes,
                *self._told(),
                self.examined,
                *self.studies.values(),
                self.go,
                self.halt,
                *self._memory(),
            ],
            "concurrency_limit": None,
            **PRIVATE,
        }
        opened = blocks.load(acts.open, self.stored, [*controls, self.passage, self.known], **PRIVATE)
        for event in (opened.then, self.model.change):
            event(acts.offer, self.model, [self.model, self.draft, self.lanes], queue=False, **PRIVATE)
        blocks.load(acts.ready, None, self._told(), concurrency_limit=None, **PRIVATE)
        self.fetch.click(acts.load, controls, self._told(), concurrency_limit=None, **PRIVATE)
        self.go.click(acts.run, [self.visit, *controls], **streaming)
        self.read.click(acts.score, [self.visit, *controls], **streaming)
        self.live.fork(acts.fork, self.visit, trigger_mode="multiple", **streaming)
        self._bind_run(acts)
        self._bind_figures(acts)
        self.repeats.bind(controls)
        self.forget.click(acts.forget, self.visit, self._memory(), queue=False, **PRIVATE)
        asked = [*controls, self.passage, self.known, *self._told()]
        self.gallery.pick(acts.pick, [self.model, self.draft], asked, queue=False, **PRIVATE)
        self.lessons.set_up(acts.set_up, [self.model, self.draft], asked, queue=False, **PRIVATE).success(
            acts.run, [self.visit, *controls], **streaming
        )
        # the last one's answer stays, however late others come
        asks = [self.prompt.blur, self.context.blur, self.mode.change, self.before.change]
        gr.on(asks, acts.recognise, controls, self.known, queue=False, trigger_mode="always_last", **PRIVATE)
        self.share.click(acts.share, controls, self.link, **PRIVATE)
        self.link.change(None, self.link, None, js="(code) => window.shareLink(code)", **PRIVATE)
        self.mode.change(
            None, self.mode, self.system, js="(mode) => ({__type__: 'update', visible: mode === 'chat'})", **PRIVATE
        )
        self.lanes.change(None, self.lanes, self.passage, js=_opens_for_readers(), **PRIVATE)
        self._remember(controls)

    def _bind_run(self, acts: Handlers) -> None:
        """What can be done to a run while it goes; none of it waits in the queue."""
        now = {"queue": False, **PRIVATE}
        for name in ("hold", "resume", "step", "stop_lane"):
            getattr(self.live, name)(getattr(acts, name), self.visit, None, **now)
        self.live.pace(acts.pace, self.visit, None, trigger_mode="always_last", **now)
        self.live.missed(acts.missed, self.visit, self.live, **now)
        self.live.look(acts.look, self.visit, self.live, concurrency_limit=1, **PRIVATE)
        self.halt.click(acts.stop, self.visit, [self.go, self.halt], **now)
        self.again.click(acts.again, self.visit, [self.live, *self._told()], **now)

    def _bind_figures(self, acts: Handlers) -> None:
        """Pictures take a browser a second, so none is drawn before somebody wants to see it."""
        drawn = {self.examined: acts.examine} | {fold: partial(acts.study, name) for name, fold in self.studies.items()}
        for fold, draw in drawn.items():
            with fold:
                gr.render(self.visit, triggers=[fold.expand], show_progress="hidden")(draw)

    def _remember(self, controls: list[gr.components.Component]) -> None:
        """Every change goes to the browser's own storage without asking the server."""
        names = json.dumps(Settings.names())
        js = f"(...values) => Object.fromEntries({names}.map((name, i) => [name, values[i]]))"
        gr.on([control.change for control in controls], None, controls, self.stored, js=js, **PRIVATE)

    def _told(self) -> list[gr.components.Component]:
        return [self.status, self.prompt_notice, self.model_notice, self.lanes_notice]

    def _memory(self) -> list[gr.components.Component]:
        return [self.remembered, self.forget]

    def _question(self) -> None:
        start = self.start
        with gr.Column(scale=5, min_width=280, elem_classes="question"):
            self.system = gr.Textbox(
                start.system,
                label="System message",
                lines=1,
                max_lines=4,
                placeholder="optional",
                visible=start.mode == "chat",
                elem_id="system",
            )
            self.before = EarlierTurns(start.before, elem_id="before")
            self.prompt = gr.Textbox(
                start.prompt,
                label="Prompt",
                lines=4,
                max_lines=14,
                placeholder="Write what the model continues…",
                elem_id="prompt",
            )
            self.known = gr.HTML(visible=False, elem_classes="known", elem_id="known", apply_default_css=False)
            with gr.Accordion(
                "Context", open=bool(start.context), elem_classes="passage", elem_id="passage"
            ) as self.passage:
                self.context = gr.Textbox(
                    start.context,
                    label="A passage that the answer should rest on",
                    lines=3,
                    max_lines=10,
                    elem_id="context",
                    info="Every lane reads it before the prompt; contrastive lanes also answer without it.",
                )
            self.prompt_notice = notice("prompt-notice")

    def _numbers(self) -> None:
        start = self.start
        with gr.Column(scale=2, min_width=280, elem_classes="numbers"):
            self.mode = gr.Radio(
                [("Raw text", "raw"), ("Chat", "chat")],
                value=start.mode,
                label="The prompt is",
                elem_id="mode",
                elem_classes="segmented",
            )
            with gr.Row(elem_classes="pair"):
                self.length = gr.Number(start.length, label="Tokens", precision=0, min_width=90, elem_id="length")
                self.seed = gr.Number(start.seed, label="Seed", precision=0, min_width=90, elem_id="seed")
            self.stop = gr.Textbox(
                start.stop,
                label="Stop at",
                lines=1,
                max_lines=4,
                placeholder="one a line; \\n is a line break",
                elem_id="stop-strings",
            )
            self._models(start)
            self.model_notice = notice("model-notice")

    def _models(self, start: Settings) -> None:
        targets, hint = offers.targets(self.site.default_name()), self._note(self.site.named(start.model))
        with gr.Accordion("Models", open=False, elem_classes="models"):
            self.model = gr.Dropdown(
                targets, value=start.model, label="Target", info=hint, allow_custom_value=True, elem_id="model"
            )
            self.draft = gr.Dropdown(
                offers.drafts(), value=start.draft, label="Draft", allow_custom_value=True, elem_id="draft"
            )
            with gr.Row(elem_classes="pair"):
                self.dtype = gr.Dropdown(
                    CHOICES["dtype"], value=start.dtype, label="Numbers", min_width=90, elem_id="dtype"
                )
                self.quantization = gr.Dropdown(
                    CHOICES["quantization"],
                    value=start.quantization,
                    label="Quantisation",
                    min_width=90,
                    elem_id="quantization",
                )
            self.fetch = gr.Button("Load now", size="sm")

    def _lanes(self) -> None:
        self.lanes = LaneEditor(
            self.start.lanes, fills=offers.fills(self.site.named(self.start.model)), elem_id="editor"
        )
        self.lanes_notice = notice("lanes-notice")

    def _actions(self) -> None:
        with gr.Row(elem_classes="actions"):
            self.go = gr.Button("Run", variant="primary", elem_id="run", min_width=120, scale=0)
            self.halt = gr.Button("Stop", variant="stop", elem_id="stop", min_width=120, scale=0, visible=False)
            gr.HTML("<kbd>Ctrl</kbd> <kbd>Enter</kbd>", elem_classes="hint", apply_default_css=False)
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
            self.share = gr.Button("Copy link", size="sm", variant="secondary", elem_id="share", min_width=90, scale=0)
            self.link = gr.Textbox(visible="hidden", elem_id="link")

    def _view(self) -> None:
        self.live = Lanes(first_view(), elem_id="live")
        self.repeats = Repeats(self.site)
        self.examined = _fold("Figures of the last run")
        self.studies = {study.name: _fold(f"Study: {study.title}") for study in studies.known()}


def _fold(title: str) -> gr.Accordion:
    """A closed place for figures, which shows once there is a run to draw."""
    return gr.Accordion(title, open=False, visible=False, elem_classes="figures")


def _opens_for_readers() -> str:
    """A script that opens the context for lanes that cannot do without one."""
    names = json.dumps(reading_context())
    return f"""(lanes) => {{
        const reads = (lanes || []).some((lane) => [lane.strategy, ...(lane.extras || []).map(([name]) => name)].some((name) => {names}.includes(name)));
        return reads ? {{__type__: 'update', open: true}} : {{__type__: 'update'}};
    }}"""
