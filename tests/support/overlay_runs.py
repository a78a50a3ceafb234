"""Lets overlays read given texts, with a lane or without one."""
from __future__ import annotations

from types import SimpleNamespace

import torch

from playground.contract import Overlay
from playground.decoding.overlay_reading import reading_of
from playground.events import Event, Figure


def read_by(overlay: Overlay, model, tokens: list[int], start: int, loaded=None) -> list[Event]:
    """What an overlay draws about a text whose first `start` tokens are the prompt. loaded: as in `reading_of`."""
    overlay.check_target(model)
    drawn: list[Event] = []
    lane = SimpleNamespace(
        tokens=tokens, generated=len(tokens) - start, piece=model.tokens.piece, end_ids=model.end_ids,
        vocabulary=model.vocabulary, record=drawn.append,
    )
    request = reading_of(lane, model, [overlay], loaded)
    with torch.inference_mode():
        while not request.go_on():
            for feed in request.feeds:
                (feed.logits,), captured = feed.stream.model.forward([feed.work], feed.plan)
                feed.captured = {layer: captured[layer] for layer in feed.plan.capture}
    return drawn


def named(events: list[Event], beginning: str) -> dict:
    """The data of the one figure whose name begins so."""
    (found,) = [event for event in events if isinstance(event, Figure) and event.name.startswith(beginning)]
    return found.data


def shades(events: list[Event]) -> list[float]:
    """The values that colour the text."""
    (found,) = [event for event in events if isinstance(event, Figure) and event.data.get("shades")]
    return [value for *_, value in found.data["spans"]]
