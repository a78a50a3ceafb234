"""The streams by which the frames of visitors' runs reach their pages.

A run's generator is read within a Gradio event, which adds each frame to the run's stream. The page reads the stream by
the name of the run, which nobody can guess; a connection that breaks goes on after the last frame that has arrived.
Gradio brings the first frames. It then waits until the page reports that one has come by the stream, and brings all
frames again if the page asks for it or reports nothing: a proxy may block or buffer the stream.
"""
from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from playground.ui.server.frame_log import COMMENT, EventStream, FrameLog, Pulse, silent

PLACE = "/frames"
FIRST = 4  # frames that Gradio brings in any case: the first token does not wait for the stream
PATIENCE = 10.0  # seconds in which a page reports whether it gets the stream; Gradio's messages delay a slow phone
READERS = 4  # connections to one stream: a broken one may still be open here when the browser connects again
LIFETIME = 300.0  # seconds of one connection; the browser then connects again
STUCK = LIFETIME + 15  # the same if the client takes nothing, so that it does not get the end of the stream
LINGER = 60.0  # seconds after the end of a run in which its last frames can be read
RETRY = b"retry: 500\n\n"  # ms until a browser connects again


class RunStream:
    """The frames of one run. `heard`: whether the page gets them by this stream, so that it needs none from Gradio;
    None until it reports one or the other.
    """

    def __init__(self):
        self.heard: bool | None = None
        self.begun, self.readers = monotonic(), 0
        self.ended: float | None = None  # when the run ended
        self.log, self._pulse = FrameLog(), Pulse()

    def carry(self, frame: dict[str, Any]) -> bool:
        """Add a frame. Whether Gradio need not bring it to the page as well.

        It always brings the last one: a page that lacks frames before it has lost the stream, and asks for the run.
        """
        added = self.log.add(frame)
        self._pulse.beat()
        return added and self._brings(frame["n"]) and frame["state"] != "done"

    def _brings(self, number: int) -> bool:
        """Whether the page gets a frame by this stream, or is about to."""
        if self.heard is None:
            return number >= FIRST and monotonic() - self.begun < PATIENCE
        return self.heard

    def end(self) -> None:
        self.ended = monotonic()
        self._pulse.beat()

    def is_over(self, sent: int) -> bool:
        """Whether no frame follows the first `sent` ones."""
        return self.ended is not None and sent >= len(self.log.frames)

    async def events(self, sent: int) -> AsyncIterator[bytes]:
        """Server-sent events, from frame number `sent` on, until the run ends, for at most LIFETIME seconds."""
        self.readers += 1
        begun = monotonic()
        try:
            yield RETRY
            while monotonic() - begun < LIFETIME and not self.is_over(sent):
                news = self._pulse.listen()
                fresh = self.log.piece(sent)
                sent += len(fresh)
                if fresh:
                    yield b"".join(fresh)
                elif self.ended is None and await silent(news):
                    yield COMMENT
        finally:
            self.readers -= 1


class RunStreams:
    """The streams of all runs by their names; those of ended runs are kept for LINGER seconds."""

    def __init__(self):
        self._streams: dict[str, RunStream] = {}

    @contextmanager
    def opened(self, run: str) -> Iterator[RunStream]:
        """The stream of a run, which ends with this context."""
        self._forget_old()
        stream = self._streams[run] = RunStream()
        try:
            yield stream
        finally:
            stream.end()

    def find(self, run: str) -> RunStream | None:
        return self._streams.get(run)

    def _forget_old(self) -> None:
        for run, stream in list(self._streams.items()):
            if stream.ended is not None and monotonic() - stream.ended > LINGER:
                self._streams.pop(run, None)


def stream_route(streams: RunStreams) -> Route:
    """GET PLACE/<name of a run>. The header Last-Event-ID is the number of the last frame that has arrived."""

    async def answer(request: Request) -> Response:
        stream = streams.find(request.path_params["run"])
        if stream is None:
            return JSONResponse({"detail": "There is no such run, or it ended a while ago."}, 404)
        if stream.readers >= READERS:
            return JSONResponse({"detail": f"This run is read {READERS} times already."}, 429)
        sent = _number(request.headers.get("last-event-id", "")) + 1
        return Response(status_code=204) if stream.is_over(sent) else EventStream(stream.events(sent), STUCK)

    return Route(f"{PLACE}/{{run}}", answer)


def _number(given: str) -> int:
    """The number of a frame; -1 if none is given."""
    return int(given) if given.isascii() and given.isdigit() and len(given) < 10 else -1
