"""Pages and scripts are answered from memory, and only what is the same for every visitor."""
from __future__ import annotations

import asyncio
import gzip

import brotli
import pytest
from starlette.datastructures import Headers

from playground.ui.response_cache import ResponseCache

TEXT = b"the same for everyone " * 100


class Inner:
    """Stands in for Gradio: counts requests and names the host that each came to."""

    def __init__(self, status: int = 200, **headers: str):
        self.asked: list[str] = []
        self.status, self.headers = status, {"content-type": "text/html", **headers}

    async def __call__(self, scope, receive, send):
        headers = Headers(scope=scope)
        assert "if-none-match" not in headers or scope["path"] == "/health"
        self.asked.append(scope["path"])
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": TEXT, "more_body": True})
        await send({"type": "http.response.body", "body": headers.get("host", "").encode()})


def get(app, path: str = "/", query: str = "", method: str = "GET", **headers: str) -> tuple[int, Headers, bytes]:
    """Status, headers and body of one request."""
    sent, raw = [], {"host": "a.example", **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in raw.items()]
    scope = {"type": "http", "method": method, "scheme": "http", "path": path, "query_string": query.encode(),
             "headers": pairs}

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    head, bodies = sent[0], [message.get("body", b"") for message in sent[1:]]
    return head["status"], Headers(raw=head["headers"]), b"".join(bodies)


def test_a_page_is_made_once_for_each_host():
    inner = Inner()
    app = ResponseCache(inner, ["", "library"])
    assert [get(app)[2] for _ in range(3)] == [TEXT + b"a.example"] * 3
    assert get(app, host="b.example")[2] == TEXT + b"b.example"
    assert get(app, "/library")[0] == 200 and inner.asked == ["/", "/", "/library"]


@pytest.mark.parametrize(("encoding", "decode"), [("gzip", gzip.decompress), ("br", brotli.decompress)])
def test_a_page_is_sent_compressed_to_browsers_that_read_it(encoding, decode):
    app = ResponseCache(Inner(), [""])
    for _ in range(2):
        status, headers, body = get(app, accept_encoding=f"deflate, {encoding}")
        assert status == 200 and headers["content-encoding"] == encoding and int(headers["content-length"]) == len(body)
        assert decode(body) == TEXT + b"a.example" and headers["content-type"] == "text/html"
    assert "content-encoding" not in get(app)[1]


def test_a_browser_that_has_the_page_gets_no_body():
    inner = Inner()
    app = ResponseCache(inner, [""])
    _, headers, _ = get(app, if_none_match='W/"another"')
    assert headers["cache-control"] == "no-cache"
    status, _, body = get(app, if_none_match=headers["etag"])
    assert (status, body, inner.asked) == (304, b"", ["/"])


@pytest.mark.parametrize(("request_", "caching"), [
    ({"path": "/assets/Index-Ba0kRe4M.css"}, "public, max-age=31536000, immutable"),
    ({"path": "/assets/src-1GSBhSW9.js"}, "public, max-age=31536000, immutable"),
    ({"path": "/theme.css", "query": "v=e4fe6119"}, "public, max-age=31536000, immutable"),
    ({"path": "/theme.css"}, "no-cache"),
    ({"path": "/static/js/plain.js"}, "no-cache"),
    ({"path": "/config"}, "no-cache"),
], ids=str)
def test_only_files_named_by_their_content_are_not_checked_again(request_, caching):
    app = ResponseCache(Inner(), [""])
    for _ in range(2):
        assert get(app, **request_)[1]["cache-control"] == caching


@pytest.mark.parametrize("request_", [
    {"path": "/health"}, {"path": "/gradio_api/call/run"}, {"method": "POST"}, {"query": "deep_link=1"},
    {"query": "page=game"}, {"query": "deep_link"}, {"path": "/assets/a.js", "range": "bytes=0-1"},
], ids=str)
def test_everything_else_is_asked_of_the_app_each_time(request_):
    inner = Inner()
    app = ResponseCache(inner, [""])
    assert get(app, **request_)[0] == get(app, **request_)[0] == 200 and len(inner.asked) == 2


def test_settings_in_a_link_do_not_make_another_page():
    inner = Inner()
    app = ResponseCache(inner, [""])
    assert get(app, query="s=abc&at=0.5&__theme=dark")[2] == get(app)[2] and len(inner.asked) == 1


@pytest.mark.parametrize("inner", [Inner(404), Inner(500), Inner(set_cookie="who=me")], ids=["404", "500", "a cookie"])
def test_errors_and_cookies_are_passed_on_and_not_kept(inner):
    app = ResponseCache(inner, [""])
    assert get(app)[0] == get(app)[0] == inner.status and len(inner.asked) == 2


def test_memory_is_limited():
    inner = Inner()
    app = ResponseCache(inner, [""], most=3 * len(TEXT))
    for name in "abcd":
        get(app, host=name)
    get(app, host="d")
    assert len(inner.asked) == 4
    get(app, host="a")
    assert len(inner.asked) == 5
