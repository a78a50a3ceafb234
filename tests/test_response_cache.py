"""Pages and scripts are answered from memory, and only what is the same for every visitor."""
from __future__ import annotations

import asyncio
import gzip

import brotli
import pytest
from starlette.datastructures import Headers

from playground.ui.guard.response_cache import ResponseCache, StoredPage

TEXT = b"the same for everyone " * 100


class Inner:
    """Stands in for Gradio: counts requests and names the host that each came to."""

    def __init__(self, status: int = 200, **headers: str):
        self.asked: list[str] = []
        self.status, self.headers = status, {"content-type": "text/html", **headers}

    async def __call__(self, scope, receive, send):
        headers = Headers(scope=scope)
        assert not {"if-none-match", "range"} & set(headers) or scope["path"] == "/health"
        self.asked.append(scope["path"] + (f"?{query}" if (query := scope["query_string"].decode()) else ""))
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": TEXT, "more_body": True})
        await send({"type": "http.response.body", "body": b'"http://%s"' % headers.get("host", "").encode()})


def get(app, path: str = "/", query: str = "", method: str = "GET", **headers: str) -> tuple[int, Headers, bytes]:
    """Status, headers and body of one request."""
    sent = asyncio.run(ask(app, path, query, method, **headers))
    head, bodies = sent[0], [message.get("body", b"") for message in sent[1:]]
    return head["status"], Headers(raw=head["headers"]), b"".join(bodies)


async def ask(app, path: str = "/", query: str = "", method: str = "GET", **headers: str) -> list[dict]:
    """The messages of the answer to one request."""
    sent, raw = [], {"host": "a.example", **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in raw.items()]
    scope = {"type": "http", "method": method, "scheme": "http", "path": path, "query_string": query.encode(),
             "headers": pairs}

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent


# --- requests that used to be made anew ---

PAGE = TEXT + b'""+location.origin+""'
VARIANTS = [
    {"host": "b.example"}, {"x_forwarded_host": "b.example"}, {"x_forwarded_proto": "https"},
    {"x_gradio_server": "http://b.example"}, {"range": "bytes=0-1"}, {"method": "HEAD"}, {"query": "unknown=1"},
    {"query": "deep_link=1"}, {"query": "page=game"}, {"query": "s=abc&at=0.5&__theme=dark"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("path", ["/", "/library"])
def test_a_page_is_made_once_whatever_a_client_sends(path, variant):
    inner = Inner()
    app = ResponseCache(inner, ["", "library"])
    assert [get(app, path)[2], get(app, path, **variant)[2], get(app, path)[2]] == [PAGE] * 3
    assert inner.asked == [path]


def test_ten_first_visitors_wait_for_one_page():
    inner = Inner()
    app = ResponseCache(inner, [""])

    async def all_at_once():
        await asyncio.gather(*(ask(app) for _ in range(10)))

    asyncio.run(all_at_once())
    assert inner.asked == ["/"]


def test_the_config_names_no_address_and_a_page_of_it_is_made_once():
    inner = Inner()
    app = ResponseCache(inner, ["", "game"])
    for query in ("", "page=game", "page=nowhere", "page=game&unknown=1", "deep_link=x"):
        assert get(app, "/config", query)[2] == TEXT + b'""'
    assert inner.asked == ["/config", "/config?page=game"]


@pytest.mark.parametrize("headers, address", [
    ({"host": "b.example:7860"}, b"http://b.example:7860"),
    ({"host": "[::1]:7860"}, b"http://[::1]:7860"),
    ({"x_forwarded_host": "c.example, d.example", "x_forwarded_proto": "https"}, b"https://c.example"),
    ({"host": '"><script>'}, b"http://playground.invalid"),
    ({"host": "b.example/evil"}, b"http://playground.invalid"),
], ids=str)
def test_the_first_visitor_leaves_no_host_name_in_the_description_of_the_api(headers, address):
    inner = Inner()
    app = ResponseCache(inner, [""])
    get(app, "/gradio_api/info", host="evil.example")
    assert get(app, "/gradio_api/info", **headers)[2] == TEXT + b'"%s"' % address
    assert inner.asked == ["/gradio_api/info"]


def test_a_body_is_written_in_pieces_that_wait_for_the_client():
    app = ResponseCache(Inner(), [""])
    app._pages[("", "/", "")] = StoredPage.of(b"a" * 300_000, Headers())
    sent = asyncio.run(ask(app))
    assert max(len(message.get("body", b"")) for message in sent) <= 1 << 16 and len(sent) == 7


# --- what is kept ---

@pytest.mark.parametrize(("encoding", "decode"), [("gzip", gzip.decompress), ("br", brotli.decompress)])
def test_a_page_is_sent_compressed_to_browsers_that_read_it(encoding, decode):
    app = ResponseCache(Inner(), [""])
    for _ in range(2):
        status, headers, body = get(app, accept_encoding=f"deflate, {encoding}")
        assert status == 200 and headers["content-encoding"] == encoding and int(headers["content-length"]) == len(body)
        assert decode(body) == PAGE and headers["content-type"] == "text/html"
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
    {"path": "/health"}, {"path": "/gradio_api/call/run"}, {"method": "POST"}, {"path": "/library"},
], ids=str)
def test_everything_else_is_asked_of_the_app_each_time(request_):
    inner = Inner()
    app = ResponseCache(inner, [""])
    assert get(app, **request_)[0] == get(app, **request_)[0] == 200 and len(inner.asked) == 2


@pytest.mark.parametrize("inner", [Inner(404), Inner(500), Inner(set_cookie="who=me")], ids=["404", "500", "a cookie"])
def test_errors_and_cookies_are_passed_on_and_not_kept(inner):
    app = ResponseCache(inner, [""])
    assert get(app)[0] == get(app)[0] == inner.status and len(inner.asked) == 2


def test_memory_is_limited():
    inner = Inner()
    app = ResponseCache(inner, [], most=3 * len(PAGE))
    for name in "abcd":
        get(app, f"/assets/{name}")
    get(app, "/assets/d")
    assert len(inner.asked) == 4
    get(app, "/assets/a")
    assert len(inner.asked) == 5
