"""Whether the client of a stream still takes its messages. Gradio notices a connection that closes, not one that was
never opened or is not read.

Gradio 6.31 puts every answer of a stream into a queue of the session (`Queue.pending_messages_per_session`), which the
client's connection empties. A stream whose answers all stay there has no reader.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from time import monotonic
from typing import Any

import gradio as gr
from gradio.context import LocalContext

IDLE = 30.0  # seconds without a message taken after which a stream is ended
# the same for a stream of which nothing was ever taken: a client asks for its messages as soon as it has joined
OPENING = 10.0


def current_request() -> gr.Request | None:
    """The request that Gradio is answering in this thread; None outside of one."""
    return LocalContext.request.get(None)


class Reader:
    """The client of one stream. `backlog` is the number of messages that wait for it, None where nobody can tell."""

    def __init__(self, backlog: Callable[[], int | None], idle: float = IDLE, opening: float = OPENING):
        self._backlog, self._idle, self._patience = backlog, idle, opening
        self._before, self._taken = 0, monotonic()

    def has_left(self) -> bool:
        """Called once for every message sent: whether none was taken for too long.

        A backlog that grew by less than that one message has lost another to the client.
        """
        now, backlog = monotonic(), self._backlog()
        if backlog is None or backlog <= self._before:
            self._taken, self._patience = now, self._idle
        self._before = backlog or 0
        return now - self._taken > self._patience


def current_reader() -> Reader:
    """The client that Gradio is answering in this thread; outside of Gradio's queue one that never leaves."""
    blocks, request = LocalContext.blocks.get(None), current_request()
    session = getattr(request, "session_hash", None)
    if blocks is None or session is None:
        return Reader(lambda: None)
    pending = blocks._queue.pending_messages_per_session
    return Reader(lambda: messages.qsize() if (messages := pending.get(session)) is not None else None)


def ends_unread(stream: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Close a generator whose answers nobody reads, as Gradio closes one whose client has left."""

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
