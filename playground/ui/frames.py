"""What the live view receives: small dicts that say what happened since the one before.

A run is known by its name; the browser starts afresh when the name changes and ignores numbers it has already seen.
"""
from __future__ import annotations

import secrets
from typing import Any

from playground.events import VERSION
from playground.trace import FORMAT, Trace

CLOCK, SLOWEST = 0.05, 0.5  # seconds between two frames: at least, and where a browser cannot follow so many of them
Facts = list[dict[str, Any]]


def new_name() -> str:
    return secrets.token_hex(4)


def frame(
    run: str, number: int, events: Facts, state: str, headers: Facts | None = None, told: float | None = None
) -> dict[str, Any]:
    """One delta; the first of a run carries the headers of its lanes. `told` is when the oldest event happened, in
    seconds since 1970.
    """
    known = {"headers": headers, "told": told}
    return {"run": run, "n": number, "events": events, "state": state, "recorded": False} | {
        name: value for name, value in known.items() if value
    }


def within(beat: float) -> float:
    """Seconds between two frames as a browser asks for them, within what is served."""
    return min(beat, SLOWEST) if beat > CLOCK else CLOCK  # a NaN is not more


def recording(headers: Facts, events: Facts) -> dict[str, Any]:
    """A whole run in one frame, to be played from the start."""
    return {**frame(new_name(), 0, events, "done", headers), "recorded": True}


def trace_of(headers: Facts, events: Facts) -> Trace:
    return Trace.from_json({"format": FORMAT, "version": VERSION, "lanes": headers, "events": events})
