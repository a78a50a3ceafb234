"""The events of a run: a list while it runs, compressed afterwards, since the list takes megabytes."""
from __future__ import annotations

import json
import zlib

from playground.player.frames import Facts, trace_of
from playground.trace import Trace

LEVEL = 1  # of zlib: the events compress to about a twentieth; higher levels gain little


class Record:
    """Events as plain data, in the form of frames."""

    def __init__(self, headers: Facts):
        self.headers = headers
        self._events: Facts = []
        self._packed = b""
        self._trace: Trace | None = None

    @property
    def events(self) -> Facts:
        return json.loads(zlib.decompress(self._packed)) if self._packed else self._events

    @property
    def packed_bytes(self) -> int:
        return len(self._packed)

    @property
    def trace(self) -> Trace:
        """The events as a trace: the session's own while it is kept."""
        return self._trace or trace_of(self.headers, list(self.events))

    def keep(self, trace: Trace | None) -> None:
        """Keep the session's own trace until `pack`, so that the figures at the end of a run need not parse it again.
        """
        self._trace = trace

    def pack(self) -> None:
        """Compress the events and drop the trace; calling it again does nothing."""
        self._trace = None
        if not self._packed:
            self._packed, self._events = (
                zlib.compress(json.dumps(self._events, separators=(",", ":")).encode(), LEVEL),
                [],
            )
