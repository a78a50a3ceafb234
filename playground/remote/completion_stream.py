"""Streams a completion over HTTP, bounded in bytes, chunks and time. Every fault becomes a Refusal in one sentence."""
from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Any

import httpx

from playground.errors import Refusal
from playground.network_errors import connection_error
from playground.remote.completion_chunk import CompletionChunk, read_chunk
from playground.remote.completion_request import CompletionRequest
from playground.remote.remote_server import ABOUT, KEY, RemoteServer
from playground.request_limits import quoted

CONNECTING, SILENT, WHOLE = 10.0, 120.0, 1800.0  # seconds to connect, between two parts, and of the whole answer
MOST_BYTES, LONGEST_LINE, LONGEST_ERROR = 64_000_000, 1_000_000, 20_000
QUOTED = 200  # characters of a server's error message that are shown
MALFORMED = (400, 422)  # also the answer of a server that does not know one of the fields
DATA, END = b"data:", b"[DONE]"


class CompletionStream:
    """One request. Closing the iterator `chunks` closes the connection, which ends the server's generation."""

    def __init__(self, request: CompletionRequest, silent: float = SILENT):
        self.request, self.server = request, request.server
        self._timeout = httpx.Timeout(silent, connect=min(CONNECTING, silent))

    async def chunks(self) -> AsyncIterator[CompletionChunk]:
        """The answer. Raises Refusal. A server that refuses the optional fields is asked again without them."""
        try:
            async with asyncio.timeout(WHOLE), httpx.AsyncClient(timeout=self._timeout) as client:
                async for chunk in self._answer(client):
                    yield chunk
        except TimeoutError:
            raise self._refusal(f"was still answering after {WHOLE / 60:.0f} minutes: ask for fewer tokens") from None
        except httpx.TimeoutException:
            raise self._refusal("does not answer: check that it is running and not overloaded") from None
        except httpx.RemoteProtocolError:
            raise self._refusal("closed the connection in the middle of its answer: look at its log") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as reason:
            why = f" ({known})" if (known := connection_error(reason)) else ""
            raise self._refusal(f"cannot be reached{why}: check the address, and that it is running") from None

    async def _answer(self, client: httpx.AsyncClient) -> AsyncIterator[CompletionChunk]:
        for logprobs in (True, False):
            async with client.stream("POST", self.server.url(self.request.path), **self._sent(logprobs)) as response:
                if response.status_code in MALFORMED and logprobs:
                    continue
                await self._check(response)
                async for line in self._payloads(response):
                    yield self._read(line)
                return

    def _sent(self, logprobs: bool) -> dict[str, Any]:
        """What is sent. Compressed answers are not accepted, since their size is known only once they are unpacked."""
        key = {"Authorization": f"Bearer {self.server.key}"} if self.server.key else {}
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", **key}
        return {"json": self.request.body(logprobs), "headers": headers}

    async def _check(self, response: httpx.Response) -> None:
        """Raise Refusal unless the server answers."""
        status = response.status_code
        if status == 200:
            return
        said = _said(await _start(response), self.server)
        if status in (401, 403):
            raise self._refusal(f"refuses the key (HTTP {status}): set the right one, or {KEY}")
        if status == 404:
            raise self._refusal(
                f"has no model {quoted(self.server.model)} or no /{self.request.path} (HTTP 404){said}: check both"
            )
        raise self._refusal(f"answered with HTTP {status}{said}: look at its log")

    async def _payloads(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The JSON texts of a stream of server-sent events, or the only one of a server that does not stream."""
        if "json" in response.headers.get("content-type", ""):
            yield b"".join([part async for part in _bounded(response, self.server)])
            return
        async for line in _lines(response, self.server):
            payload = line.removeprefix(DATA).strip()
            if not line.startswith(DATA) or not payload:
                continue
            if payload == END:
                return
            yield payload

    def _read(self, payload: bytes) -> CompletionChunk:
        try:
            chunk = read_chunk(json.loads(payload.decode("utf-8-sig", "surrogateescape")))
        except (ValueError, RecursionError):
            raise self._refusal("sent something that is not part of a completion: check the address") from None
        if chunk.error:
            raise self._refusal(f"reports an error{_quoted(chunk.error, self.server)}: look at its log")
        return chunk

    def _refusal(self, what: str) -> Refusal:
        return _refusal(self.server, what)


def _refusal(server: RemoteServer, what: str) -> Refusal:
    return Refusal(f"The server {server.place} {what}.", ABOUT)


async def _bounded(response: httpx.Response, server: RemoteServer) -> AsyncIterator[bytes]:
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > MOST_BYTES:
            raise _refusal(server, f"sent more than {MOST_BYTES:,} bytes: ask for fewer tokens")
        yield part


async def _lines(response: httpx.Response, server: RemoteServer) -> AsyncIterator[bytes]:
    """Lines without their ends and without a byte order mark; the last one may lack its end."""
    rest, marked = b"", True
    async for part in _bounded(response, server):
        *whole, rest = (rest + part).split(b"\n")
        if whole and marked:
            whole[0], marked = whole[0].removeprefix(BOM_UTF8), False
        for line in whole:
            yield line
        if len(rest) > LONGEST_LINE:
            raise _refusal(server, f"sent a line of more than {LONGEST_LINE:,} bytes: check the address")
    yield rest


async def _start(response: httpx.Response) -> bytes:
    """The beginning of an answer."""
    found = b""
    async for part in response.aiter_raw():
        found += part
        if len(found) > LONGEST_ERROR:
            break
    return found


def _said(body: bytes, server: RemoteServer) -> str:
    """The message of an error, in brackets; empty if there is none."""
    try:
        answer = json.loads(body)
        message = read_chunk(answer).error or answer.get("detail") or answer.get("message")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return _quoted(message, server) if isinstance(message, str) else ""


def _quoted(message: str, server: RemoteServer) -> str:
    """A server's message on one line, in brackets; none if it repeats the key."""
    line = " ".join(message.split())[:QUOTED].rstrip(".")
    return "" if server.key and server.key in message else f" ({line})"
