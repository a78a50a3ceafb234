"""Detect streams whose client no longer reads their messages.

Gradio notices a connection that closes, but not one that was never opened or is not read. Gradio 6.31 puts every answer
of a stream into a queue of the session (`Queue.pending_messages_per_session`), which the client's connection empties.
A stream whose answers all stay there has no reader.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from time import monotonic
from typing import Any

import gradio as gr
from gradio.context import LocalContext

IDLE = 30.0  # seconds without a message taken by its client after which a stream is ended
OPENING = 10.0  # the same for a client that has never taken one; normally it does so at once


def current_request() -> gr.Request | None:
    """The request that Gradio is handling in this thread; None if there is none."""
    return LocalContext.request.get(None)


class FrameReader:
    """The client of one stream. `backlog` returns the number of messages waiting for it, None if unknown."""

    def __init__(self, backlog: Callable[[], int | None], idle: float = IDLE, opening: float = OPENING):
        self._backlog, self._idle, self._patience = backlog, idle, opening
        self._before, self._taken = 0, monotonic()

    def has_left(self) -> bool:
        """Whether the client has taken no message for too long; called once for every message sent.

        If the backlog has grown by less than that one message, the client has taken another.
        """
        now, backlog = monotonic(), self._backlog()
        if backlog is None or backlog <= self._before:
            self._taken, self._patience = now, self._idle
        self._before = backlog or 0
        return now - self._taken > self._patience


def current_reader() -> FrameReader:
    """The client of the current Gradio request; outside of Gradio's queue one that never leaves."""
    blocks, request = LocalContext.blocks.get(None), current_request()
    session = getattr(request, "session_hash", None)
    if blocks is None or session is None:
        return FrameReader(lambda: None)
    pending = blocks._queue.pending_messages_per_session
    return FrameReader(lambda: messages.qsize() if (messages := pending.get(session)) is not None else None)


def ends_unread(stream: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Close a generator whose client no longer reads, as Gradio does for a client that has disconnected."""

    @wraps(stream)
    def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
        reader, answers = current_reader(), stream(*args, **kwargs)
        try:
            for answer in answers:
                yield answer
                if reader.has_left():
                    return
        finally:
            answers.close()

    return watched
