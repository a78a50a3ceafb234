"""An ASGI middleware that answers the GET requests of a visit from memory: pages, Gradio's config and its scripts.

Gradio copies and serialises its config for every request of a page, and compresses every script anew, although they
are the same for every visitor. Here each response is made once for each origin, compressed once for each encoding, and
named by an ETag, so that a browser which has it already gets no body. Files named by their content are not asked for
again. Mount it inside whatever decides who may see a page.
"""
from __future__ import annotations

import gzip
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

import brotli
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCRIPTS = ("/assets/", "/scripts/", "/static/", "/theme.css")
CONFIG = "/config"
NAMED_BY_CONTENT = re.compile(
    r"/assets/.+-[\w-]{8}\.(js|css)$"  # by Gradio's build
    r"|/theme\.css\?v=\w+$|/scripts/[0-9a-f]{16}\.js$"
)
UNREAD = {"s", "at", "__theme", "v"}  # query parameters that only the browser reads, or a later event; v: of theme.css
CHECKED, FOR_GOOD = "no-cache", "public, max-age=31536000, immutable"
ORIGIN = ("host", "x-forwarded-host", "x-forwarded-proto")  # headers that Gradio makes its address from
ELSEWHERE = ("range", "x-gradio-server")  # requests with these headers are left to Gradio
COPIED = ("content-type", "last-modified")
MOST_BYTES = 64 << 20
SMALLEST = 400  # bytes of a body worth compressing
QUALITY = 5  # of Brotli, up to 11
ENCODINGS = {"br": lambda body: brotli.compress(body, quality=QUALITY), "gzip": lambda body: gzip.compress(body, 6)}


@dataclass
class StoredPage:
    """A response, with its body in every encoding that was asked for."""

    body: bytes
    headers: dict[str, str]
    encoded: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, body: bytes, headers: Headers) -> StoredPage:
        kept = {name: headers[name] for name in COPIED if name in headers}
        etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
        return cls(body, {**kept, "etag": etag, "vary": "Accept-Encoding"})

    @property
    def size(self) -> int:
        return len(self.body) + sum(map(len, self.encoded.values()))

    def answer(self, headers: Headers, caching: str) -> Response:
        """The response to a request with these headers. caching: its Cache-Control."""
        sent = {**self.headers, "cache-control": caching}
        if self.headers["etag"] in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=sent)
        accepted = headers.get("accept-encoding", "")
        encoding = next((name for name in ENCODINGS if name in accepted), "")
        if not encoding or len(self.body) < SMALLEST:
            return Response(self.body, headers=sent)
        if encoding not in self.encoded:
            self.encoded[encoding] = ENCODINGS[encoding](self.body)
        return Response(self.encoded[encoding], headers={**sent, "content-encoding": encoding})


class ResponseCache:
    """The middleware. Only complete responses with status 200 and without cookies are kept, the latest MOST_BYTES."""

    def __init__(self, app: ASGIApp, pages: Iterable[str], most: int = MOST_BYTES):
        self.app, self.most = app, most
        self.paths = {CONFIG, *(f"/{page}" for page in pages)}
        self._pages: OrderedDict[tuple, StoredPage] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if not self._is_kept(scope, headers):
            await self.app(scope, receive, send)
            return
        key = (scope["scheme"], scope.get("root_path", ""), scope["path"], *(headers.get(name) for name in ORIGIN))
        page = self._pages.get(key)
        if page:
            self._pages.move_to_end(key)
            await page.answer(headers, _caching(scope))(scope, receive, send)
            return
        capture = Capture(send)
        await self.app(_unconditional(scope), receive, capture.send)
        if page := capture.page():
            self._pages[key] = page
            self._shrink()
            await page.answer(headers, _caching(scope))(scope, receive, send)

    def _is_kept(self, scope: Scope, headers: Headers) -> bool:
        if scope["type"] != "http" or scope["method"] != "GET" or any(name in headers for name in ELSEWHERE):
            return False
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        asked = {name for name, _ in query}
        return (path in self.paths or path.startswith(SCRIPTS)) and asked <= UNREAD

    def _shrink(self) -> None:
        """Forget the pages that were not asked for longest, down to the limit."""
        while len(self._pages) > 1 and sum(page.size for page in self._pages.values()) > self.most:
            self._pages.popitem(last=False)


class Capture:
    """Collects a response; one that cannot be kept is passed on as it is."""

    def __init__(self, send: Send):
        self._send, self._head, self._parts, self._passes = send, None, [], False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self._head, self._passes = headers, message["status"] != 200 or "set-cookie" in headers
        if self._passes:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))

    def page(self) -> StoredPage | None:
        return None if self._passes or self._head is None else StoredPage.of(b"".join(self._parts), self._head)


def _caching(scope: Scope) -> str:
    """Cache-Control of a response: a file whose address changes with its content need not be checked again."""
    query = scope.get("query_string", b"").decode("latin-1")
    address = scope["path"] + (f"?{query}" if query else "")
    return FOR_GOOD if NAMED_BY_CONTENT.search(address) else CHECKED


def _unconditional(scope: Scope) -> Scope:
    """The same request for the whole body, not compressed."""
    left_out = (b"if-none-match", b"if-modified-since", b"accept-encoding")
    return {**scope, "extensions": {}, "headers": [pair for pair in scope["headers"] if pair[0] not in left_out]}


def cached(pages: Iterable[str]) -> Middleware:
    """The middleware for a site with these pages, named by their paths."""
    return Middleware(ResponseCache, pages=tuple(pages))
