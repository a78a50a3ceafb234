"""A run that only the browser has: from before a reload, or older than those that the server keeps.

To fork such a run, the browser sends its settings and its events, which are untrusted.
"""
from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import asdict
from typing import Any

from playground.errors import Refusal
from playground.events import VERSION
from playground.player.frames import Facts
from playground.request_limits import Rules
from playground.trace import FORMAT, Trace
from playground.ui.components.event_fields import text
from playground.ui.components.settings import Settings

GZIP = 31  # the window bits that make zlib read gzip
LONGEST_NAME = 40  # characters of the name of a run
BROKEN = "The page sent an earlier run that cannot be read: press Run first."


class KeptRun:
    """An ended run with its settings; of the interface of a worker's Run, what a visit needs to be forked."""

    over, error = True, ""

    def __init__(self, name: str, settings: Settings, trace: Trace):
        self.name, self.settings, self.trace = name, settings, trace
        self.headers = [asdict(header) for header in trace.headers]

    @property
    def events(self) -> Facts:
        return [stamped.to_json() for stamped in self.trace.events]

    def hand_over(self) -> None:
        """None: no lane is running."""

    def stop(self, lane: int | None = None) -> None:
        """Does nothing: every lane has ended."""

    def archive(self) -> None:
        """Does nothing: the browser keeps the run."""


def kept_run(event: Any, rules: Rules) -> KeptRun:
    """The run that an event carries: `run`, its name, `settings`, the code of a link, and `kept`, its headers and
    events as base64 of compressed JSON. Raises Refusal.
    """
    settings = Settings.from_code(text(event, "settings", rules.limits.body_bytes))
    trace = unpacked(text(event, "kept", rules.limits.body_bytes), rules.limits.kept_bytes)
    if settings is None or not _belong(settings, trace):
        raise Refusal(BROKEN, "lanes")
    settings.check(rules)
    return KeptRun(text(event, "run", LONGEST_NAME), settings, trace)


def unpacked(packed: str, most: int) -> Trace:
    """Headers and events from base64 of compressed JSON of at most `most` bytes. Raises Refusal."""
    return _trace(_unzipped(packed, most))


def _unzipped(packed: str, most: int) -> bytes:
    unzip = zlib.decompressobj(GZIP)
    try:
        whole = unzip.decompress(base64.b64decode(packed, validate=True), most)
    except (binascii.Error, zlib.error, ValueError):
        raise Refusal(BROKEN, "lanes") from None
    if unzip.unconsumed_tail:
        raise Refusal("This earlier run is too long to be sent back: press Run first.", "lanes")
    return whole


def _trace(whole: bytes) -> Trace:
    try:
        document = json.loads(whole)
        lanes, events = document["headers"], document["events"]
        return Trace.from_json({"format": FORMAT, "version": VERSION, "lanes": lanes, "events": events})
    except (Refusal, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Refusal(BROKEN, "lanes") from None


def _belong(settings: Settings, trace: Trace) -> bool:
    """Whether these may be the settings of a run. A server's lane is not among them, and comes last."""
    strategies = [header.strategy for header in trace.headers if not header.remote]
    numbers = [header.lane for header in trace.headers]
    chosen = [lane.get("strategy") for lane in settings.lanes]
    return numbers == list(range(len(numbers))) and strategies == chosen
