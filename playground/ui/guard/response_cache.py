"""An ASGI middleware that answers the GET requests of a visit from memory: pages, Gradio's config and its scripts.

Gradio copies and serialises its config for every request of a page, and compresses every script anew, although they
are the same for every visitor. Here each response is made once, compressed once for each encoding, and named by an
ETag, so that a browser which has it already gets no body. Files named by their content are not asked for again.

Gradio writes the address of a request into its answers, so a client could have them made anew under ever new host names
and query parameters, and the description of the API shows everybody the host name of whoever asked first. Therefore
Gradio is asked under the address HERE and without what it does not read. In a page HERE becomes the browser's own
`location.origin`; in the config it is left out, as the clients then use the address they connected to; in the
description of the API it becomes the address of the request. Mount it inside whatever decides who may see a page.
"""
from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import brotli
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCRIPTS = ("/assets/", "/scripts/", "/static/", "/theme.css")
CONFIG, DESCRIPTIONS = "/config", ("/gradio_api/info", "/gradio_api/openapi.json")
NAMED_BY_CONTENT = re.compile(
    r"/assets/.+-[\w-]{8}\.(js|css)$"  # by Gradio's build
    r"|/theme\.css\?v=\w+$|/scripts/[0-9a-f]{16}\.js$"
)
CHECKED, FOR_GOOD = "no-cache", "public, max-age=31536000, immutable"
NAME = b"playground.invalid"  # the host name that Gradio is asked under
HERE = b"http://" + NAME
BY_BROWSER = b'"+location.origin+"'  # HERE occurs in pages only inside of double-quoted strings of scripts
HOST = re.compile(r"[\w.\-]{1,255}(:\d{1,5})?|\[[0-9a-fA-F:.]{2,45}\](:\d{1,5})?", re.ASCII)
LEFT_OUT = (
    b"host", b"x-forwarded-host", b"x-forwarded-proto", b"x-gradio-server",  # what Gradio makes its address from
    b"range", b"if-none-match", b"if-modified-since", b"accept-encoding",  # the whole body, not compressed
)
COPIED = ("content-type", "last-modified")
MOST_BYTES = 64 << 20
SMALLEST = 400  # bytes of a body worth compressing
PIECE = 1 << 16  # bytes handed to the connection at a time: no more of a body waits for a client that does not read it
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
            return InPieces(self.body, headers=sent)
        if encoding not in self.encoded:
            self.encoded[encoding] = ENCODINGS[encoding](self.body)
        return InPieces(self.encoded[encoding], headers={**sent, "content-encoding": encoding})

    def addressed(self, headers: Headers) -> Response:
        """The description of the API under the address of this request, for code that is copied from it."""
        return InPieces(self.body.replace(HERE, _address(headers)), headers={**self.headers, "cache-control": CHECKED})


class InPieces(Response):
    """A response that is written as fast as the client reads it: the server waits between two pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), PIECE):
            await send({"type": "http.response.body", "body": self.body[at:at + PIECE], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ResponseCache:
    """The middleware. Only complete responses with status 200 and without cookies are kept, the latest MOST_BYTES."""

    def __init__(self, app: ASGIApp, pages: Iterable[str], most: int = MOST_BYTES):
        self.app, self.most = app, most
        self.names = frozenset(pages)
        self.paths = {CONFIG, *DESCRIPTIONS, *(f"/{page}" for page in self.names)}
        self._pages: OrderedDict[tuple, StoredPage] = OrderedDict()
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_kept(scope):
            await self.app(scope, receive, send)
            return
        page = await self._page(scope, receive)
        headers = Headers(scope=scope)
        if isinstance(page, Capture):
            await page.pass_on(send)
        elif _path(scope) in DESCRIPTIONS:
            await page.addressed(headers)(scope, receive, send)
        else:
            await page.answer(headers, _caching(scope))(scope, receive, send)

    async def _page(self, scope: Scope, receive: Receive) -> StoredPage | Capture:
        """The page that is asked for, or the app's answer if that cannot be kept."""
        query = self._read_query(scope)
        key = (scope.get("root_path", ""), scope["path"], query)
        if key not in self._pages and _path(scope) in self.paths:
            async with self._making:  # many first visitors wait for one page
                return self._pages.get(key) or await self._made(key, _asked_by_nobody(scope, query), receive)
        return self._pages.get(key) or await self._made(key, _asked_by_nobody(scope, query), receive)

    async def _made(self, key: tuple, scope: Scope, receive: Receive) -> StoredPage | Capture:
        capture = Capture()
        await self.app(scope, receive, capture.send)
        page = capture.page(_path(scope))
        if page is None:
            return capture
        self._pages[key] = page
        self._shrink()
        return page

    def _is_kept(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return False
        path = _path(scope)
        return path in self.paths or path.startswith(SCRIPTS)

    def _read_query(self, scope: Scope) -> str:
        """The part of the query that changes an answer: which page's config and description a client wants."""
        if _path(scope) not in (CONFIG, *DESCRIPTIONS):
            return ""
        given = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        page = given.get("page", [None])[-1]
        parts = [f"page={page}"] * (page in self.names) + ["all_endpoints=True"] * bool(given.get("all_endpoints"))
        return "&".join(parts)

    def _shrink(self) -> None:
        """Forget the pages that were made first, down to the limit."""
        while len(self._pages) > 1 and sum(page.size for page in self._pages.values()) > self.most:
            self._pages.popitem(last=False)


class Capture:
    """Collects a response."""

    def __init__(self):
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def pass_on(self, send: Send) -> None:
        for message in self.messages:
            await send(message)

    def page(self, path: str) -> StoredPage | None:
        """The response as a page; None if it cannot be kept."""
        head, *parts = self.messages
        headers = Headers(raw=head["headers"])
        if head["status"] != 200 or "set-cookie" in headers:
            return None
        body = b"".join(part.get("body", b"") for part in parts)
        if path == CONFIG:
            body = re.sub(rb'"' + re.escape(HERE) + rb'[^"]*"', b'""', body)
        elif path not in DESCRIPTIONS and headers.get("content-type", "").startswith("text/html"):
            body = body.replace(HERE, BY_BROWSER)
        return StoredPage.of(body, headers)


def _path(scope: Scope) -> str:
    """The path relative to where the app is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


def _address(headers: Headers) -> bytes:
    """The address that a request was sent to, as Gradio would write it; HERE if that is no host name."""
    host = headers.get("x-forwarded-host", headers.get("host", "")).split(",")[0].strip()
    scheme = "https" if headers.get("x-forwarded-proto", "").split(",")[0].strip() == "https" else "http"
    return f"{scheme}://{host}".encode() if HOST.fullmatch(host) else HERE


def _caching(scope: Scope) -> str:
    """Cache-Control of a response: a file whose address changes with its content need not be checked again."""
    query = scope.get("query_string", b"").decode("latin-1")
    address = scope["path"] + (f"?{query}" if query else "")
    return FOR_GOOD if NAMED_BY_CONTENT.search(address) else CHECKED


def _asked_by_nobody(scope: Scope, query: str) -> Scope:
    """The same request by nobody in particular: under the address HERE, for the whole body, not compressed."""
    headers = [(b"host", NAME), *(pair for pair in scope["headers"] if pair[0] not in LEFT_OUT)]
    return {**scope, "method": "GET", "scheme": "http", "query_string": query.encode(), "extensions": {},
            "headers": headers}


def cached(pages: Iterable[str]) -> Middleware:
    """The middleware for a site with these pages, named by their paths."""
    return Middleware(ResponseCache, pages=tuple(pages))
