"""A lane whose text a server generates, beside lanes that are decoded here.

It takes the place of a Runner in a session. A thread reads the server's answer; the session takes what has arrived and
never waits for it longer than a moment, so that a slow server delays no other lane. The lane's clock is the time since
the request was sent, network included. Only what the server reports is shown: text, log-probabilities of the most
probable tokens, and counts of draft tokens. Entropies, forwards, draft trees, caches and token masks are not.
"""
from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import aclosing
from time import perf_counter

from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session
from playground.errors import Refusal
from playground.events import Commit, Done, Event, Failed, Figure, Header, Note, Part, TopLogprobs
from playground.remote.character_joiner import CharacterJoiner, whole
from playground.remote.completion_chunk import CompletionChunk, DraftCounts
from playground.remote.completion_request import CompletionRequest
from playground.remote.completion_stream import SILENT, CompletionStream
from playground.remote.remote_server import RemoteServer

REMOTE = "remote"  # `strategy` in the header
NOT_SHOWN = "Not shown, since the server does not report it: forwards, entropies, draft tree, KV cache, token masks."
PIECES = "The server reports no log-probabilities: pieces are shown as they arrived, and may hold several tokens."
HALF = "The server ended its answer without saying why: the text may be incomplete; look at the server's log."
REPORTED = "Speculation, as the server reports it"
REASONS = {"length": "length", "stop": "end", "eos": "end"}
log = logging.getLogger(__name__)


def add_lane(session: Session, server: RemoteServer, prompt: Prompt, limits: Limits) -> None:
    """Add the lane of a server to a session that has not begun. Raises Refusal for what cannot be sent."""
    server.check()
    prompt.check()
    limits.check()
    session.add(_header(server, prompt, limits), RemoteLane(CompletionRequest(server, prompt, limits)))


def _header(server: RemoteServer, prompt: Prompt, limits: Limits) -> Header:
    return Header(
        title=f"{server.model} on {server.place}",
        model=server.model,
        remote=server.place,
        strategy=REMOTE,
        parts=[Part(REMOTE, "decoder", {"temperature": server.temperature})],
        seed=limits.seed,
        max_new_tokens=limits.max_new_tokens,
        stop=list(limits.stop),
        chat=prompt.chat,
        context=prompt.context,
        before=list(prompt.before),
        form=prompt.form,
        tools=prompt.tools,
        prompt=prompt.text,
        prompt_pieces=[prompt.whole()],
    )


class RemoteLane:
    """The runner of a remote lane. `silent`: seconds without a sign of the server after which it fails."""

    remote, feeds, work = True, (), 0.0

    def __init__(self, request: CompletionRequest, silent: float = SILENT):
        self.clock, self.finished = 0.0, False
        self._answer = AnswerReader(CompletionStream(request, silent))
        self._text = RemoteText(request.limits.max_new_tokens)

    def arrived(self, patience: float) -> bool:
        """Whether the server has sent more, waiting for at most `patience` seconds; the first call sends the request.
        """
        return self._answer.wait(patience)

    def go_on(self) -> list[Event]:
        """The events of the next part of the answer, if there is one."""
        news = self._answer.take()
        if news is None:
            return []
        self.clock, part = news
        if isinstance(part, Refusal):
            return self._end([Failed(str(part))])
        if part is None:
            return self._end(self._text.close())
        events = self._text.take(part)
        return self._end([*events, *self._text.close()]) if self._text.full else events

    def stop(self) -> list[Event]:
        """End the lane and the server's generation."""
        return [] if self.finished else self._end([Done("stopped")])

    def _end(self, events: list[Event]) -> list[Event]:
        self.finished = True
        self._answer.cancel()
        return events


class RemoteText:
    """Turns the parts of an answer into events."""

    def __init__(self, most: int):
        self.most, self.length = most, 0
        self._last, self._counted, self._has_logprobs = CompletionChunk(), None, False
        self._drafts: DraftCounts | None = None
        self._joiner = CharacterJoiner()

    @property
    def full(self) -> bool:
        """Whether the server has sent more tokens than were asked for."""
        return self.length > self.most and not self._last.finish

    def take(self, chunk: CompletionChunk) -> list[Event]:
        """A TopLogprobs for each token that has them, then the Commit."""
        if chunk.finish:
            self._last = chunk
        self._counted = chunk.counted or self._counted
        self._drafts = chunk.drafts or self._drafts
        tokens, start = chunk.tokens, self.length
        if not tokens:
            return []
        pieces = [self._joiner.push(token.piece) for token in tokens]
        self.length += len(tokens)
        self._has_logprobs |= any(token.logprob is not None for token in tokens)
        tops = [TopLogprobs(start + i, _storable(token.top)) for i, token in enumerate(tokens) if token.top]
        return [*tops, Commit(
            start, [token.id for token in tokens], pieces, "".join(pieces),
            [token.logprob for token in tokens], ["sampled"] * len(tokens),
        )]

    def close(self) -> list[Event]:
        """The last events: what the server reports about the whole answer, what it does not, and the end."""
        if not self._last.finish and not self.full:
            return [Failed(HALF)]
        return [*self._speculation(), Note(self._remark()), Done(self._reason(), self._limit())]

    def _speculation(self) -> list[Event]:
        if self._drafts is None:
            return []
        counts = {"labels": ["draft tokens", "accepted"], "values": [self._drafts.drafted, self._drafts.accepted]}
        return [Figure("bars", REPORTED, counts)]

    def _remark(self) -> str:
        counted = f"The server counts {self._counted} tokens." if self._counted is not None else ""
        pieces = PIECES if self.length and not self._has_logprobs else ""
        return " ".join(filter(None, (pieces, counted, NOT_SHOWN)))

    def _limit(self) -> str:
        if self._reason() != "length" or self.length >= self.most or not self._has_logprobs:
            return ""  # without log-probabilities an event may hold several tokens, which are not counted
        return f"The server ended the text at {self.length:,} tokens: the context of its model may be full."

    def _reason(self) -> str:
        return "stop_string" if self._last.stop_string else REASONS.get(self._last.finish, "length")


def _storable(top: tuple[tuple[str, float], ...]) -> list[tuple[str, float]]:
    return [(whole(piece), logprob) for piece, logprob in top]


class AnswerReader:
    """Reads an answer in a thread. News are (seconds since the request was sent, a chunk, a Refusal, or None for the
    end).
    """

    def __init__(self, stream: CompletionStream):
        self._stream = stream
        self._news: deque[tuple[float, CompletionChunk | Refusal | None]] = deque()
        self._changed = threading.Condition()
        self._started = self._cancelled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task | None = None

    def wait(self, patience: float) -> bool:
        """Whether there is news, waiting for at most `patience` seconds; the first call starts the thread."""
        if not self._started:
            self._started, self._sent = True, perf_counter()
            threading.Thread(target=self._run, name="remote", daemon=True).start()
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._news, patience))

    def take(self) -> tuple[float, CompletionChunk | Refusal | None] | None:
        """The next news; None if there is none."""
        with self._changed:
            return self._news.popleft() if self._news else None

    def cancel(self) -> None:
        """Close the connection; does nothing if the answer is complete."""
        with self._changed:
            self._cancelled = True
            if self._task is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        try:
            asyncio.run(self._read())
        except asyncio.CancelledError:
            return
        except Refusal as refusal:
            self._put(refusal)
        except Exception:
            log.exception("reading a remote lane failed")
            self._put(Refusal("Reading the server's answer failed with an internal error; see the log."))

    async def _read(self) -> None:
        with self._changed:
            if self._cancelled:
                return
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with aclosing(self._stream.chunks()) as chunks:
            async for chunk in chunks:
                self._put(chunk)
        self._put(None)

    def _put(self, part: CompletionChunk | Refusal | None) -> None:
        with self._changed:
            self._news.append((perf_counter() - self._sent, part))
            self._changed.notify_all()
