"""The status line of a page: its models, or how far they are loaded, and the queue."""
from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from playground.ui.server.model_loader import ModelLoad


def status(loading: ModelLoad, others: int = 0) -> str:
    """The status line as HTML: the models, or their loading progress, and how many other runs share the device."""
    if not loading.ended.is_set():
        progress = f"<progress max='1' value='{loading.fraction:.3f}'></progress>"
        return f"<span class='dot loading'></span>{escape(loading.text)} {progress}"
    if loading.refusal:
        return "<span class='dot failed'></span>no model loaded"
    shared = f" · sharing the device with {others} other run{'s' if others > 1 else ''}" if others else ""
    bounds = getattr(loading.models.target, "bounds", "")  # a canvas has none
    said = escape(bounds[:1].upper() + bounds[1:])
    more = f"<details class='bounds'><summary>limits</summary><p>{said}.</p></details>"
    names = f"<span class='described'>{escape(described(loading.models))}</span>"
    return f"<span class='dot ready'></span>{names}{escape(shared)}{more if bounds else ''}"


def queue_status(place: int, waited: float) -> str:
    """The status line of a run that has waited in the queue for some seconds."""
    so_far = f"place {place} in the queue, {waited:.0f} s so far"
    return f"<span class='dot loading'></span>{so_far}: waiting for another run to end or be held"


def described(models: Any) -> str:
    """Names, quantisation, dtype and device of the loaded models, and the draft's device if it differs."""
    target, draft = models.target, models.draft
    packed = [] if target.quantization == "none" else [target.quantization]
    names = [_short(target.name), *([_short(draft.name) + models.draft_place] if draft else [])]
    spread = sorted(map(str, set(getattr(target, "devices", ()))))  # a canvas model is never spread
    dtype, place = str(target.dtype).removeprefix("torch."), " + ".join(spread) or target.device.type
    return " · ".join([*names, *packed, dtype, place])


def _short(name: str) -> str:
    """A model's name; of a folder only the last part."""
    return Path(name).name if Path(name).is_dir() else name
