"""Frames for the live view: small dicts with the events since the previous frame.

A run is identified by its name; the browser starts over when the name changes and ignores frame numbers it has seen.
"""
from __future__ import annotations

import json
import secrets
from typing import Any

from playground.events import VERSION
from playground.trace import FORMAT, Trace

Reading = dict[str, float | list[int]]  # of the machine's meters
CLOCK, SLOWEST = 1 / 30, 0.5  # least seconds between two frames; the same for the slowest browser or a busy device
Facts = list[dict[str, Any]]


def new_name() -> str:
    """The name of a run, 128 random bits: whoever knows it can read the stream of its frames."""
    return secrets.token_hex(16)


def frame(
    run: str,
    number: int,
    events: Facts,
    state: str,
    headers: Facts | None = None,
    oldest_at: float | None = None,
    machine: Reading | None = None,
) -> dict[str, Any]:
    """One frame; the first of a run carries the headers of its lanes. oldest_at: time of its oldest event, Unix
    seconds. machine: a reading of MachineMeters.
    """
    known = {"headers": headers, "oldest_at": oldest_at, "machine": machine}
    return {"run": run, "n": number, "events": events, "state": state, "recorded": False} | {
        name: value for name, value in known.items() if value
    }


def within(beat: float) -> float:
    """The interval between two frames that a browser requests, clipped to CLOCK and SLOWEST seconds."""
    return min(beat, SLOWEST) if beat > CLOCK else CLOCK  # a NaN is not more


def interval(beat: float, runs: int) -> float:
    """Seconds to the next frame of a browser that takes one each `beat` seconds. The more runs share the device, the
    fewer frames each gets: the server spends milliseconds on each frame, in one thread.
    """
    return max(beat, min(SLOWEST, CLOCK * runs))


def recording(headers: Facts, events: Facts) -> dict[str, Any]:
    """A whole run in one frame, for replay."""
    return {**frame(new_name(), 0, events, "done", headers), "recorded": True}


def trace_of(headers: Facts, events: Facts) -> Trace:
    return Trace.from_json({"format": FORMAT, "version": VERSION, "lanes": headers, "events": events})


def to_json(frame: dict[str, Any]) -> str:
    """Compact, strict JSON: NaN and infinities become null."""
    try:
        return json.dumps(frame, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(frame), parse_constant=lambda _: None), separators=(",", ":"))
