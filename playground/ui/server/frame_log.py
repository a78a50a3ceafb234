"""The frames of a run as server-sent events: encoded once, into a log that every reader reads at its own pace.

A reader costs one write per frame; a slow or late one gets what it lacks in a few larger pieces, so that nothing is
stored for a reader. Imports neither torch nor gradio.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from playground.player.frames import to_json

MOST_BYTES = 64_000_000  # of the frames of one run
AT_ONCE = 64  # frames in one piece
SILENCE = 15.0  # seconds after which a stream sends a comment, so that a broken connection is noticed
COMMENT = b": here\n\n"


class Pulse:
    """Wakes all coroutines that wait for a change, from any thread."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None

    def listen(self) -> asyncio.Event:
        """An event that the next `beat` sets; in the event loop only."""
        self._loop = asyncio.get_running_loop()
        self._event = self._event or asyncio.Event()
        return self._event

    def beat(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()


class FrameLog:
    """The encoded frames of one run; the index of a frame is its number."""

    def __init__(self):
        self.frames: list[bytes] = []
        self.size = 0

    def add(self, frame: dict[str, Any]) -> bool:
        """Add a frame; False if the run has become too long to be streamed."""
        encoded = message("frame", frame, len(self.frames))
        self.size += len(encoded)
        if self.size <= MOST_BYTES:
            self.frames.append(encoded)
        return self.size <= MOST_BYTES

    def piece(self, sent: int) -> list[bytes]:
        """The frames from number `sent` on, at most AT_ONCE."""
        return self.frames[sent:sent + AT_ONCE]


class EventStream(StreamingResponse):
    """A response of server-sent events, which no proxy should store or buffer. After `longest` seconds the connection
    is closed, even if the client takes nothing; None: no limit.
    """

    def __init__(self, parts: AsyncIterator[bytes], longest: float | None = None):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self.longest = longest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.longest):
                await super().__call__(scope, receive, send)


async def silent(news: asyncio.Event) -> bool:
    """Wait for news of a Pulse. Whether there was none for SILENCE seconds."""
    try:
        await asyncio.wait_for(news.wait(), SILENCE)
    except TimeoutError:
        return True
    return False


def message(event: str, data: dict[str, Any], number: int | None = None) -> bytes:
    """One server-sent event. A browser that has lost the connection asks for those after the last `number` it got."""
    name = "" if number is None else f"id: {number}\n"
    return f"{name}event: {event}\ndata: {to_json(data)}\n\n".encode()
