"""The chip that names the model, and the sheet it opens: the models that fit this machine, and one click to load one.

The drawing is in scripts/models/model_sheet.js. The events are 'offer' (the sheet was opened: what fits?), 'take' with
the `name` of a model to load and use, and 'cancel'. The value has any of `list` (as `listing` returns it), `proposal`,
`busy` (a load: its name, how far it is), `refused` (why a model is not used) and `taken` (the name of one that is).
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from playground.engine.checkpoint.catalogue import BUNDLED, SUGGESTED
from playground.errors import Refusal
from playground.page_scripts import joined
from playground.run_request import DEFAULT
from playground.ui.components.event_fields import text
from playground.ui.components.internal_errors import as_refusals
from playground.ui.components.scripted_component import Scripted
from playground.ui.components.settings import Settings
from playground.ui.components.theme import PRIVATE
from playground.ui.guard.readers import ends_unread
from playground.ui.models.model_offers import ModelOffer, Room
from playground.ui.models.status_line import status
from playground.ui.server.model_loader import ModelLoad, ModelRequest

Changes = dict[Any, Any]
NF4 = ("Quantisation is in the settings: on two CPU cores a model of 0.36 billion parameters wrote 32.1 tokens/s in "
       "nf4, 15.2 in int8 and 14.4 in bfloat16.")
CANCELLED = "Loading was cancelled; the model in use has not changed."
ASKING = "Asking the hub for the sizes of its models…"
HUB, BUNDLED_HERE = "From the hub", "Bundled"  # what cannot be loaded, or is only a toy, comes last
GROUPS = {HUB: SUGGESTED, BUNDLED_HERE: BUNDLED}  # those of neither were made on this machine
TEMPLATE = (
    "<button type='button' class='model-chip' aria-haspopup='dialog'><b></b><span></span></button>"
    "<dialog class='model-sheet' role='dialog' aria-labelledby='models-title' hidden></dialog>"
)


class ModelSheet(Scripted):
    """own: the name of the page's own model. typed: whether a hub id or a folder may be typed."""

    def __init__(self, own: str, typed: bool, **kwargs: Any):
        known = {"own": own, "typed": typed, "titles": {entry.name: entry.title for entry in (*BUNDLED, *SUGGESTED)}}
        script = joined("models/model_sheet.js", {"KNOWN": known})
        super().__init__({}, html_template=TEMPLATE, js_on_load=script, apply_default_css=False, **kwargs)


@dataclass(eq=False)
class ModelChoice:
    """A model that a visitor has asked for; its load may be shared with others."""

    request: ModelRequest
    cancelled: bool = False


class ModelChoices:
    """The handlers of the sheet; `page` has the controls that a choice sets."""

    def __init__(self, site: Any, page: Any):
        self.site, self.page = site, page

    def bind(self, ready: gr.events.Dependency) -> None:
        """Connect the events; `ready`: the page's own models are loaded."""
        page, kinds = self.page, [self.page.dtype, self.page.quantization]
        streaming = {"concurrency_limit": None, **PRIVATE}
        ready.then(self.propose, page.controls(), [page.sheet, page.known], **streaming)
        page.sheet.offer(self.offer, kinds, page.sheet, **streaming)
        asked = [page.choice, page.sheet, page.status, page.model, page.draft, page.model_notice]
        page.sheet.take(self.take, kinds, asked, **streaming)
        page.sheet.cancel(self.cancel, page.choice, None, queue=False, **PRIVATE)

    def propose(self, *values: Any) -> Changes:
        """Look for a real model that fits, now that the page is up, and name it on the chip and beside free prompts."""
        settings = Settings(*values)
        try:
            with as_refusals("Looking for a model", "model"):
                offer = self.site.offers.propose(self.site.model_request)
        except Refusal:  # of the device, which the page's own models report
            return gr.skip()
        if offer is None:
            return gr.skip()
        return {self.page.sheet: {"proposal": brief(offer)}, **self.page.show_question_note(settings)}

    def offer(self, dtype: str, quantization: str) -> Iterator[Changes]:
        """List the models: at first as far as this machine knows them, then with what the hub says."""
        offers = self.site.offers
        try:
            with as_refusals("Listing the models", "model"):
                request = self._request(DEFAULT, dtype, quantization)
                yield {self.page.sheet: {"list": listing(offers.listed(request), offers.room(request), ASKING)}}
                hub = offers.ask_hub()
                yield {self.page.sheet: {"list": listing(offers.listed(request), offers.room(request), hub)}}
        except Refusal as refusal:
            yield {self.page.sheet: {"refused": str(refusal)}}

    @ends_unread
    def take(self, dtype: str, quantization: str, event: gr.EventData) -> Iterator[Changes]:
        """Load a model, with its draft, and use it for the next runs. Until it is loaded nothing changes."""
        try:
            with as_refusals("Loading the model", "model"):
                name = text(event, "name", self.site.rules.limits.name_characters).strip()
                choice = ModelChoice(self._request(name, dtype, quantization))
                loading = self.site.model_loader.request(choice.request)
                yield {self.page.choice: choice, self.page.sheet: {"busy": progress(name, loading)}}
                for now in loading.watch():
                    if choice.cancelled:
                        raise Refusal(CANCELLED)
                    yield {self.page.sheet: {"busy": progress(name, now)}}
                loading.result()
        except Refusal as refusal:
            yield {self.page.sheet: {"refused": str(refusal)}}
            return
        used = DEFAULT if name == self.site.chosen.named(DEFAULT) else name
        yield {self.page.sheet: {"taken": name}, self.page.status: status(loading), self.page.model: used,
               self.page.draft: DEFAULT, self.page.model_notice: ""}

    def cancel(self, choice: ModelChoice | None) -> None:
        """Stop waiting for a model, and loading it if no one else waits for it."""
        if choice:
            choice.cancelled = True
            self.site.model_loader.cancel(choice.request)

    def _request(self, name: str, dtype: str, quantization: str) -> ModelRequest:
        chosen = DEFAULT if name == self.site.chosen.named(DEFAULT) else name
        return self.site.chosen.request(Settings(model=chosen, dtype=dtype, quantization=quantization))


def progress(name: str, loading: ModelLoad) -> dict[str, Any]:
    """How far the load of a model is."""
    return {"name": name, "share": loading.fraction, "text": loading.text}


def listing(offers: list[ModelOffer], room: Room, hub: str) -> dict[str, Any]:
    """The sheet as texts. hub: why models from the hub cannot be loaded; empty if they can."""
    from playground.engine.device_memory import size_text  # imports torch
    found = {**GROUPS, "Made on this machine": _made(offers)}
    titles = sorted(found, key=lambda title: title == (HUB if hub and hub != ASKING else BUNDLED_HERE))
    groups = [
        {"title": title, "rows": [row(offer, room) for offer in offers if offer.entry in found[title]]}
        for title in titles
    ]
    memory = f"{size_text(room.free)} of {size_text(room.total)} memory are free on the {place(room.device)}."
    derived = [offer for offer in offers if offer.speed and not offer.measured]
    return {"groups": [group for group in groups if group["rows"]], "hub": hub, "memory": memory,
            "derived": _derivation(room) if derived else "", "quantising": NF4 if room.device == "cpu" else ""}


def row(offer: ModelOffer, room: Room) -> dict[str, Any]:
    """One model: its facts as texts, and whether it can be loaded."""
    from playground.engine.device_memory import size_text  # imports torch
    size, entry = offer.size, offer.entry
    facts = {"name": entry.name, "title": entry.title, "note": entry.note, "loads": bool(size and offer.fits)}
    if size is None:
        return {**facts, "why": offer.why or "Not on this machine, and its size is not known."}
    with_draft = " with its draft" if offer.draft else ""
    there = "bundled" if entry in BUNDLED else "on this machine"
    short = f"It takes {size_text(offer.needed)}{with_draft}, and {size_text(room.free)} are free."
    return {
        **facts,
        "parameters": counted(size.parameters) if size.parameters else entry.parameters,
        "download": f"{size_text(size.missing)} to download" if size.missing else there,
        "memory": f"{size_text(offer.needed)} of memory{with_draft}" if offer.needed else "memory not known",
        "speed": speed_text(offer),
        "why": "" if offer.fits else short,
    }


def brief(offer: ModelOffer) -> dict[str, str]:
    """A proposed model, in words."""
    from playground.engine.device_memory import size_text  # imports torch
    size = f"{size_text(offer.size.missing)} to download" if offer.size.missing else "on this machine"
    return {"name": offer.entry.name, "title": offer.entry.title, "size": size}


def proposal_button(offer: ModelOffer | None) -> str:
    """HTML of the button beside a free prompt: it loads the proposed model, or opens the sheet."""
    if offer is None:
        return "<button type='button' onclick='playground.openModels()'>Use a real model</button>"
    said = brief(offer)
    return (f"<button type='button' data-model='{escape(said['name'])}'"
            f" onclick='playground.useModel(this.dataset.model)'>"
            f"Use {escape(said['title'])}</button> ({escape(said['size'])})")


def speed_text(offer: ModelOffer) -> str:
    """Tokens a second of plain decoding, and where the number comes from."""
    if offer.speed is None:
        return "speed not measured yet"
    digits = 0 if offer.speed >= 10 else 1
    number = f"{offer.speed:.{digits}f} tokens/s"
    return f"{number}, measured" if offer.measured else f"at most {number}, derived"


def counted(parameters: int) -> str:
    """A number of parameters, "135 M" or "1.7 B"."""
    if parameters >= 999_500_000:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e6:.0f} M" if parameters >= 9_500_000 else f"{parameters / 1e6:.1f} M"


def place(device: str) -> str:
    return {"cpu": "CPU", "mps": "GPU"}.get(device, f"GPU ({device})")


def _made(offers: list[ModelOffer]) -> tuple:
    return tuple(offer.entry for offer in offers if offer.entry not in BUNDLED and offer.entry not in SUGGESTED)


def _derivation(room: Room) -> str:
    from playground.engine.memory_bandwidth import memory_bandwidth  # imports torch
    speed = memory_bandwidth(room.device) / 1e9
    return (f"A derived speed is a bound: each token reads all weights once, at the {speed:.1f} GB/s that this "
            f"{place(room.device)} was measured to read.")
