"""An ASGI middleware in front of Gradio that checks host, origin, route and size of every HTTP request.

A body is read and counted here before it is parsed, so requests without Content-Length are limited too. What the
requests of an address and of all hold is counted as well. Responses, including streams of server-sent events, pass
through unchanged. Mount it with `launch(app_kwargs=guarded(...))`.
"""
from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from playground.request_limits import RequestLimits, Rules
from playground.ui.guard.loop_time import LoopTime, timed
from playground.ui.guard.request_shares import CLIENT, Denied, HeldBody, Left, RequestShares, Turn
from playground.ui.server.admission_queue import address_of

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
EVERY_INTERFACE = ("0.0.0.0", "::", "")
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
UPLOAD = "/gradio_api/upload"
TOOLS = "/gradio_api/mcp"  # of the Model Context Protocol
MULTIPART_BYTES = 65_536  # allowance for the headers and boundaries of an uploaded file
DISCARDED = 4  # multiple of the limit beyond which a body is not read to its end
DEFAULT_PORTS = {None, 80, 443}
CALLS = re.compile(r"/gradio_api/(?:queue/join|(?:call|run|api)/)")
DESCRIBED = "GET /gradio_api/info describes them"
BEGUN = "Caught handled exception, but response already started."  # of Starlette
SHUT = re.compile(
    "|".join(
        (
            r"/monitoring",
            r"/gradio_api/(?:proxy=|process_recording|vibe-|undo-vibe-|dev/|runs|run-history|deep_link|stream/"
            r"|custom_component/|profiling/|token)",
            r"/(?:login|logout|docs|redoc|openapi\.json)(?:/|$)",
            r"/gradio_api/file[=/]\w+:",
        )
    )
)
"""Routes of Gradio 6.31 that this page does not use: dashboards, developer modes, recordings, proxies, logins, files of
other hosts.
"""
# Possessive quantifiers, and the end of the body ends a string: linear time for any input.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
ESCAPE = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
NOT_FINITE = re.compile(rb"NaN|Infinity|[0-9.][eE]\+?0*[1-9][0-9]{2}")
BRACKET = re.compile(rb"[\[\]{}]")


@dataclass(frozen=True)
class Hosts:
    """The host names the page answers to; None: any. IP addresses and loopback names are always accepted.

    Another site can point its own domain name at this machine (DNS rebinding), but not an IP address. The host reported
    by a proxy is trusted only if `proxied`.
    """

    names: frozenset[str] | None
    # of PLAYGROUND_HOSTS and SPACE_HOST: accepted as Origin even if a proxy changes the Host header
    origins: frozenset[str] = frozenset()
    proxied: bool = False

    @classmethod
    def from_environment(cls, bound: str, public: bool, environ: Mapping[str, str] = os.environ) -> Hosts:
        """From SPACE_HOST and the comma-separated PLAYGROUND_HOSTS; a local page answers to its own names as well."""
        given = f"{environ.get('PLAYGROUND_HOSTS', '')},{environ.get('SPACE_HOST', '')}".split(",")
        configured = frozenset(name.strip().lower() for name in given if name.strip())
        if public:
            return cls(configured or None, configured, proxied=True)
        own = machine_names() if bound in EVERY_INTERFACE else frozenset({bound.lower()})
        return cls(configured | own, configured)

    def answers_to(self, name: str) -> bool:
        return self.names is None or name in LOOPBACK or _is_address(name) or name in self.names

    def check(self, headers: Headers, changing: bool) -> None:
        """Raise Denied for an unknown host, and for a changing request from another site's page."""
        asked = [_place(value) for value in self._hosts(headers)]
        if asked and not any(self.answers_to(name) for name, _ in asked):
            raise Denied(
                421, "This page does not answer to that host name: add the name to PLAYGROUND_HOSTS."
            )
        origin = headers.get("origin")
        if changing and origin is not None and not self._is_own(origin, asked):
            raise Denied(
                403,
                "Requests from pages of other sites are refused: open the page itself, or use a client other than a "
                "browser.",
            )

    def _hosts(self, headers: Headers) -> list[str]:
        forwarded = headers.get("x-forwarded-host", "").split(",")[0] if self.proxied else ""
        return [value.strip() for value in (headers.get("host", ""), forwarded) if value.strip()]

    def _is_own(self, origin: str, asked: list[tuple[str, int | None]]) -> bool:
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or not place:
            return False
        name, port = _place(place)
        return (name, port) in asked or (name in self.origins and port is None)


def machine_names() -> frozenset[str]:
    """Names by which other machines on the network reach this one."""
    name = socket.gethostname().lower()
    return frozenset({name, f"{name}.local"})


def _place(authority: str) -> tuple[str, int | None]:
    """Host name and port of, for instance, `localhost:7860`; default ports are None. Raises Denied."""
    try:
        parts = urlsplit(f"//{authority}")
        name, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise Denied(400, "The Host header of this request is malformed.") from None
    return name, None if port in DEFAULT_PORTS else port


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class RequestGuard:
    """The middleware; a denied request is answered with JSON, {"detail": message}."""

    def __init__(self, app: ASGIApp, limits: RequestLimits, hosts: Hosts, proxies: int, shares: RequestShares):
        self.app, self.limits, self.hosts, self.proxies, self.shares = app, limits, hosts, proxies, shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = HeldBody(self.shares, address_of(HTTPConnection(scope), self.proxies))
        CLIENT.set(held.address)
        try:
            with self.shares.requests.one(held.address):
                body = await timed(self._checked(scope, receive, held), self._charge)
                scope = _with_address(scope, held.address) if _path(scope).startswith(TOOLS) else scope
                await self._in_turn(scope, body, receive, send)
        except Denied as denied:
            answer = JSONResponse({"detail": str(denied), "error": str(denied)}, denied.status, {"connection": "close"})
            await answer(scope, receive, send)
        finally:
            held.release()

    def _charge(self, seconds: float) -> None:
        self.shares.loop_time.charge(CLIENT.get(), seconds)

    async def _in_turn(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass a request on when its address may begin another one; not at all if the client has left by then."""
        with suppress(Left):
            turn = await self.shares.turns.take(CLIENT.get(), partial(_left_within, receive))
            try:
                await self._passed_on(scope, _replayed(body, receive), send, turn)
            finally:
                turn.end()

    async def _passed_on(self, scope: Scope, receive: Receive, send: Send, turn: Turn) -> None:
        """Gradio ends the stream of a session that it does not know with an HTTP error after the answer has begun. Its
        last message says so; what is left is to end the answer. On a call that names an unknown function or argument it
        fails before it answers, and before any of the page's own code runs.
        """
        begun = charged = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            turn.end()
            await send(message)

        def charge(seconds: float) -> None:  # up to the step in which the answer begins: a stream costs its beginning
            nonlocal charged
            if not charged:
                self._charge(seconds)
            charged = begun

        try:
            await timed(self.app(scope, receive, noted), charge)
        except Exception as reason:
            if begun and str(reason) == BEGUN:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not begun and scope["method"] == "POST" and CALLS.match(_path(scope)):
                raise Denied(404, f"There is no such endpoint, or it takes other arguments: {DESCRIBED}.") from reason
            else:
                raise

    async def _checked(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes:
        """The body of a request that may be passed on, empty for a method without one; raises Denied."""
        self._check_head(scope)
        if scope["method"] not in CHANGING:
            return await self._read(scope, receive, held)
        with self.shares.bodies.one(held.address):
            return await self._read(scope, receive, held)

    def _check_head(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > self.limits.url_bytes:
            raise Denied(
                414,
                f"The URL is longer than {self.limits.url_bytes:,} bytes: shorten the settings in it.",
            )
        if sum(len(name) + len(value) for name, value in headers.raw) > self.limits.header_bytes:
            raise Denied(431, f"The headers are longer than {self.limits.header_bytes:,} bytes.")
        self.hosts.check(headers, scope["method"] in CHANGING)
        if SHUT.match(_path(scope)):
            raise Denied(404, "This page has no such route.")

    async def _read(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes:
        """The whole body, checked; empty for a method without one."""
        headers, most = Headers(scope=scope), self._most_bytes(scope)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 20:
            raise Denied(400, "The Content-Length of this request is not a number.")
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                if int(length) > most:
                    await _discarded(receive, 0 if int(length) > DISCARDED * most else int(length))
                    raise _too_large(most)
                if scope["method"] not in CHANGING:
                    return b""
                body = await _collected(receive, most, held)
        except TimeoutError:
            raise Denied(408, f"The request took longer than {self.limits.body_seconds} s to arrive.") from None
        if not headers.get("content-type", "").lower().startswith("multipart/"):
            check_json(body, self.limits)
        return body

    def _most_bytes(self, scope: Scope) -> int:
        upload = _path(scope).rstrip("/") == UPLOAD
        return self.limits.upload_bytes + MULTIPART_BYTES if upload else self.limits.body_bytes


def _with_address(scope: Scope, address: str) -> Scope:
    """A request for a tool with the address that sent it, in place of what it says itself: Gradio passes its headers on
    in a call of this server from this machine, which is believed.
    """
    said = (b"x-forwarded-for", b"forwarded")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in said]
    return {**scope, "headers": [*headers, (b"x-forwarded-for", address.encode("latin-1", "replace"))]}


def guarded(rules: Rules, host: str, proxies: int, loop_time: LoopTime) -> dict[str, Any]:
    """Arguments of Gradio's FastAPI app, for a page bound to `host` behind so many proxies."""
    hosts = Hosts.from_environment(host, rules.public)
    shares = RequestShares(loop_time=loop_time)
    guard = Middleware(RequestGuard, limits=rules.limits, hosts=hosts, proxies=proxies, shares=shares)
    return {"middleware": [guard]}


def check_json(body: bytes, limits: RequestLimits) -> None:
    """Raise Denied for JSON that is expensive to parse or has lone surrogates or infinite numbers.

    Whether it is valid JSON is left to the parser.
    """
    if b"\\u" in body and any(ESCAPE.findall(body)):
        raise Denied(400, "The request contains half a character (a lone surrogate): send whole characters.")
    bare = STRING.sub(b"s", body)
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") > limits.json_items:
        raise Denied(413, f"The request contains more than {limits.json_items:,} list items and fields: send fewer.")
    if _depth(bare) > limits.json_depth:
        raise Denied(413, f"The request is nested deeper than {limits.json_depth} levels: flatten it.")
    if re.search(rb"[0-9]{%d}" % (limits.number_digits + 1), bare):
        raise Denied(413, f"The request contains a number of more than {limits.number_digits} digits: shorten it.")
    if NOT_FINITE.search(bare):
        raise Denied(400, "The request contains a number that is not finite: send one below 1e100.")
    if (b"FileData" in body or b"\\u" in body) and _fetches_files(body):
        raise Denied(400, "The page fetches no file from another address: upload it.")


def _fetches_files(body: bytes) -> bool:
    """Whether the JSON describes a file at another address: Gradio would fetch it, of any size, before anything checks
    whether an input takes files.
    """
    try:
        waiting = [json.loads(body)]
    except ValueError:
        return False
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "meta" in value and "://" in str(value.get("path", "")):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def _depth(bare: bytes) -> int:
    """Maximum nesting of JSON whose strings have been removed."""
    depth = deepest = 0
    for found in BRACKET.finditer(bare):
        depth += 1 if found[0] in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


async def _collected(receive: Receive, most: int, held: HeldBody) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Denied(400, "The client left before the request was complete.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        held.add(len(parts[-1]))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _discarded(receive: Receive, most: int) -> None:
    """Read and drop up to `most` bytes: a client that is still sending would see a broken connection, not the answer.
    """
    while most > 0:
        message = await receive()
        most -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def _left_within(receive: Receive, seconds: float) -> bool:
    """Whether the client of a request that has been read leaves within so many seconds, which it takes otherwise."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that returns the body once, then the client's messages: a stream must see it disconnect."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()
    return replay


def _path(scope: Scope) -> str:
    """The path relative to where the app is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


def _too_large(most: int) -> Denied:
    return Denied(413, f"The request is larger than {most:,} bytes: send less.")
