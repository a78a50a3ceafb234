"""Studies and variants: their reports, recomputed from the definitions, and the results of training.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it.
"""
from __future__ import annotations

from playground.events import Figure


def figure(recorded: list, name: str) -> dict:
    return next(event.data for event in recorded if isinstance(event, Figure) and name in event.name)
