"""Malformed and malicious HTTP against the public page: each gets a refusal, and leaves no traceback and no harm."""
from __future__ import annotations

import json
import socket
import time

import pytest

from support.limited_pages import public  # noqa: F401

JOIN, CALL = "/gradio_api/queue/join", "/gradio_api/call/strategies"
REFUSED, ANSWERED = range(400, 500), (200,)


def exchange(public: str, sent: bytes, seconds: float = 5.0) -> bytes:
    """What the server answers to these bytes until it closes the connection, or stays silent for a moment."""
    host, _, port = public.partition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as line:
        line.sendall(sent)
        try:
            while part := line.recv(65_536):
                answer += part
                line.settimeout(0.3)
        except (TimeoutError, ConnectionResetError):
            pass
    return answer


def statuses(answer: bytes) -> list[int]:
    """The statuses of the answers: more than one where bytes of a body were read as a second request."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *lines: str) -> bytes:
    return head("POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", *lines) + body


SECOND = b"GET /config HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMUGGLED = {
    "both lengths": head("POST", JOIN, "Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + SECOND,
    "two lengths": head("POST", JOIN, "Content-Length: 0", "Content-Length: 50") + SECOND,
    "a list of lengths": head("POST", JOIN, "Content-Length: 0, 50") + SECOND,
    "a length with a sign": head("POST", JOIN, "Content-Length: +50") + SECOND,
    "a negative length": head("POST", JOIN, "Content-Length: -1") + SECOND,
    "a length with underscores": head("POST", JOIN, "Content-Length: 5_0") + SECOND,
    "a length in hexadecimal": head("POST", JOIN, "Content-Length: 0x32") + SECOND,
    "a length of 4,000 digits": head("POST", JOIN, "Content-Length: " + "9" * 4000) + SECOND,
    "chunked twice": head("POST", JOIN, "Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n" + SECOND,
    "another coding": head("POST", JOIN, "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n" + SECOND,
    "a misspelled coding": head("POST", JOIN, "Transfer-Encoding: xchunked") + b"0\r\n\r\n" + SECOND,
    "a space before the colon": head("POST", JOIN, "Content-Length : 50") + SECOND,
    "a folded header": head("POST", JOIN, "Transfer-Encoding:\r\n chunked") + b"x\r\n" + SECOND,
    "a chunk with a signed size": head("POST", JOIN, "Transfer-Encoding: chunked") + b"-1\r\n\r\n" + SECOND,
    "a chunk of 2 to the 64": head("POST", JOIN, "Transfer-Encoding: chunked") + b"f" * 17 + b"\r\n" + SECOND,
    "a chunk longer than it says": head("POST", JOIN, "Transfer-Encoding: chunked") + b"1\r\nxyz\r\n0\r\n\r\n" + SECOND,
    "a long chunk extension": head("POST", JOIN, "Transfer-Encoding: chunked") + b"1;" + b"a" * 70_000,
}


@pytest.mark.parametrize("sent", SMUGGLED.values(), ids=SMUGGLED)
def test_no_bytes_of_a_body_are_read_as_a_second_request(public, sent, caplog):
    found = statuses(exchange(public, sent))
    assert len(found) <= 1 and all(status in REFUSED for status in found)
    assert not [record for record in caplog.records if record.exc_info]


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a NUL in a header": head("GET", "/", "X-A: a\0b"),
    "a NUL in the target": head("GET", "/\0"),
    "a header without a name": head("GET", "/", ": a"),
    "two hosts": head("GET", "/", "Host: evil.example"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "ten thousand headers": head("GET", "/", *[f"X-{number}: a" for number in range(10_000)]),
    "a host that is no name": b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
    "characters beyond ASCII in the target": "GET /ü HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
    "the method CONNECT": head("CONNECT", "example.com:443"),
    "the method TRACE": head("TRACE", "/"),
    "an unknown method": head("PROPFIND", "/"),
    "a long method": head("A" * 20_000, "/"),
    "the target *": head("OPTIONS", "*"),
    "PUT of a page": head("PUT", "/", "Content-Length: 0"),
    "DELETE of a session": head("DELETE", "/gradio_api/heartbeat/s", "Content-Length: 0"),
    "another method by a header": head("GET", JOIN, "X-HTTP-Method-Override: POST"),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_refused(public, sent, caplog):
    found = statuses(exchange(public, sent))
    assert all(status in REFUSED for status in found)
    assert not [record for record in caplog.records if record.exc_info]


PATHS = [
    "/gradio_api/file=/etc/passwd", "/gradio_api/file=..%2f..%2fetc%2fpasswd", "/gradio_api/file/etc/passwd",
    "/gradio_api/file=%2Fproc%2Fself%2Fenviron", "/gradio_api/file=/dev/zero", "/gradio_api/file=%00",
    "/gradio_api/file=app.py", "/gradio_api/file=file:///etc/passwd", "/gradio_api/file=" + "a/" * 5000,
    "/assets/..%2f..%2f..%2fapp.py", "/assets/%2e%2e/%2e%2e/routes.py", "/static/..%5c..%5capp.py",
    "/assets//etc/passwd",
    "/scripts/..%2fapp.py", "/svelte/..%2f..%2fapp.py", "/theme.css/../config", "//evil.example/", "/%2e%2e/config",
    "/openapi.json", "/openapi.json/", "/gradio_api/token", "/pwa_icon/99999", "/pwa_icon/-1", "/frames/nobody",
    "/frames/..%2fconfig", "/gradio_api/upload_progress", "/gradio_api/heartbeat", "/gradio_api/runs", "/classroom",
    "/gradio_api/call/nothing/nobody", "/mcp", "/gradio_api/mcp/sse", "/.env", "/.git/config", "/server-status",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_to_a_file_or_to_a_closed_route(public, path, caplog):
    """A stream of an event that nobody has says so and ends."""
    answer = exchange(public, head("GET", path, "Connection: close"))
    assert statuses(answer) and (statuses(answer)[0] in (*REFUSED, 307) or b"session_not_found" in answer or
                                 b"event: error" in answer), answer[:300]
    assert b"root:x:" not in answer and b"PLAYGROUND" not in answer and b"import " not in answer
    assert not [record for record in caplog.records if record.exc_info]


def queue(**changes) -> bytes:
    return json.dumps({"fn_index": 0, "data": [], "session_hash": "s"} | changes).encode()


BODIES = {
    "an unknown function": (JOIN, queue(fn_index=10**6)),
    "a negative function": (JOIN, queue(fn_index=-1)),
    "a function that is text": (JOIN, queue(fn_index="run")),
    "a function that is a number with a point": (JOIN, queue(fn_index=0.5)),
    "data that is an object": (JOIN, queue(data={"a": 1})),
    "data that is nothing": (JOIN, queue(data=None)),
    "a session that is a list": (JOIN, queue(session_hash=["s"])),
    "no session": (JOIN, queue(session_hash=None)),
    "a long session": (JOIN, queue(session_hash="s" * 100_000)),
    "a body that is a list": (JOIN, b"[]"),
    "a body that is a number": (JOIN, b"7"),
    "an empty body": (JOIN, b""),
    "half a body": (JOIN, b'{"data": ['),
    "bytes that are no text": (JOIN, b"\xff\xfe{}"),
    "an unknown endpoint": ("/gradio_api/call/nothing", b'{"data": []}'),
    "an unknown endpoint by name": ("/gradio_api/call/v2/nothing", b"{}"),
    "unknown arguments by name": ("/gradio_api/call/v2/strategies", b'{"nothing": 1}'),
    "a list of arguments by name": ("/gradio_api/call/v2/strategies", b"[]"),
    "a direct call of an unknown endpoint": ("/gradio_api/run/nothing", b'{"data": []}'),
    "a direct call of an unknown function": ("/gradio_api/run/predict", queue(fn_index=10**6)),
    "a cancel without an event": ("/gradio_api/cancel", b'{"session_hash": "s"}'),
    "a cancel of a list": ("/gradio_api/cancel", b'{"session_hash": ["s"], "event_id": {}, "fn_index": []}'),
    "a reset of nothing": ("/gradio_api/reset", b"{}"),
    "a login": ("/login", b"{}"),
    "a recording": ("/gradio_api/process_recording", b"{}"),
    "a stream of an event": ("/gradio_api/stream/nobody", queue()),
}


@pytest.mark.parametrize("path, body", BODIES.values(), ids=BODIES)
def test_a_body_that_means_nothing_is_refused(public, path, body, caplog, capfd):
    answer = exchange(public, post(path, body, "Connection: close"))
    assert [status in REFUSED for status in statuses(answer)] == [True], answer[:300]
    assert not [record for record in caplog.records if record.exc_info] and "Traceback" not in capfd.readouterr().err


def test_a_stranger_cancels_no_event_of_another_visitor(public):
    """The name of the session is not enough: the event's name is 122 random bits."""
    session = {"session_hash": "victim", "fn_index": 0}
    for event in ("0" * 32, "", "*", "victim_0"):
        answer = exchange(public, post("/gradio_api/cancel", json.dumps(session | {"event_id": event}).encode()))
        assert statuses(answer) == [200]
    assert statuses(exchange(public, post(CALL, b'{"data": [""]}'))) == [200]


@pytest.mark.parametrize("lines", [
    ("Range: bytes=0-0," + ",".join(f"{i}-{i}" for i in range(2000)),), ("Range: bytes=-1",), ("Range: bytes=5-1",),
    ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: a", "Sec-WebSocket-Version: 13"),
    ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    ("Accept-Encoding: " + "br," * 5000,), ("If-None-Match: " + '"a",' * 5000,), ("Cookie: " + "a=b; " * 5000,),
    ("Expect: 200-ok",), ("X-Forwarded-For: " + "1.1.1.1, " * 5000,), ("X-Forwarded-Host: evil.example",),
    ("X-Gradio-Server: http://evil.example",), ("X-Forwarded-Proto: javascript",), ("Accept: " + "a/b;q=0.1," * 3000,),
], ids=lambda lines: lines[0][:40])
def test_a_strange_header_changes_nothing_of_the_page(public, lines, caplog):
    begun = time.monotonic()
    answer = exchange(public, head("GET", "/config", "Connection: close", *lines))
    assert statuses(answer)[0] in (200, 304, 400, 431) and b"evil.example" not in answer
    assert time.monotonic() - begun < 5 and not [record for record in caplog.records if record.exc_info]
