"""Limits on requests over HTTP: size, hosts and origins."""
from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys

import pytest

from playground.errors import Refusal
from playground.request_limits import PUBLIC
from playground.ui.guard.framing import Framing, embedders
from playground.ui.guard.request_guard import Denied, Hosts, check_json
from support.limited_pages import ROOT, public  # noqa: F401

# --- over HTTP, against a public page ---

def ask(place: str, path: str, body: bytes | None = None, method: str = "POST", **headers: str) -> tuple[int, str]:
    """Status and body of the answer; header names are written with _ for -."""
    connection = http.client.HTTPConnection(place, timeout=30)
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    reply = answer.status, answer.read().decode("utf-8", "replace")
    connection.close()
    return reply


def join(place: str, body: bytes, **headers: str) -> tuple[int, str]:
    return ask(place, "/gradio_api/queue/join", body, **headers)


@pytest.mark.slow
def test_forty_megabytes_of_numbers_are_refused_before_they_are_read(public):
    connection = http.client.HTTPConnection(public, timeout=30)
    connection.putrequest("POST", "/gradio_api/queue/join")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(40_000_000))
    connection.endheaders(b'{"data": [1')  # the answer must come without the rest
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_without_a_length_is_counted_while_it_comes(public):
    host, _, port = public.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(
            f"POST /gradio_api/queue/join HTTP/1.1\r\nHost: {public}\r\nContent-Type:"
            " application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        sent = 0
        try:
            while sent <= PUBLIC.body_bytes + 1_000_000:
                line.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000
        except OSError:
            pass  # the server may close the connection before it has read everything
        assert line.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "value, status, says",
    [
        ("[" + "1," * 300_000 + "1]", 413, "list items"),
        ("[" * 3000 + "]" * 3000, 413, "nested"),
        ("1" * 10_000, 413, "digits"),
        ('"\\ud800"', 400, "surrogate"),
        ('"\\udc00\\ud800"', 400, "surrogate"),
        ("NaN", 400, "finite"),
        ("-Infinity", 400, "finite"),
        ("1e999", 400, "finite"),
    ],
)
def test_expensive_or_malicious_json_is_refused_with_a_sentence(public, value, status, says):
    got, reply = join(public, b'{"session_hash": "s", "fn_index": 0, "data": [%s]}' % value.encode())
    assert got == status and says in json.loads(reply)["detail"]


@pytest.mark.parametrize(
    "path",
    [
        "/monitoring",
        "/monitoring/summary",
        "/gradio_api/proxy=https://example.com",
        "/gradio_api/file=https://example.com/x",
        "/gradio_api/run-history/records",
        "/gradio_api/deep_link",
        "/gradio_api/vibe-code",
        "/docs",
        "/gradio_api/dev/reload",
    ],
)
def test_unused_routes_are_closed(public, path):
    status, reply = ask(public, path, method="GET")
    assert status == 404 and "no such route" in reply


def test_a_page_of_another_site_cannot_ask_for_anything(public):
    body = b'{"data": [""], "session_hash": "s"}'
    foreign = [
        ask(public, "/gradio_api/call/strategies", body, Origin=origin)
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1")
    ]
    assert [status for status, _ in foreign] == [403] * 3
    assert [
        ask(public, "/gradio_api/call/strategies", body, **own)[0] for own in ({}, {"Origin": f"http://{public}"})
    ] == [200, 200]


def test_a_long_address_and_long_headers_are_refused(public):
    # 400: of the server, which reads at most 64 KiB itself
    assert ask(public, f"/?s={'A' * 70_000}", method="GET")[0] in (400, 414)
    assert ask(public, "/", method="GET", X_Long="A" * 70_000)[0] in (400, 431)


def test_pages_uploads_and_programs_work_as_before(public):
    assert ask(public, "/", method="GET")[0] == ask(public, "/config", method="GET")[0] == 200
    form = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.jsonl"\r\n\r\n%s\r\n--b--\r\n'
    kind = {"Content_Type": "multipart/form-data; boundary=b"}
    assert ask(public, "/gradio_api/upload", form % b'{"prompt": "a"}', **kind)[0] == 200
    assert ask(public, "/gradio_api/upload", form % (b"a" * 5_100_000), **kind)[0] == 413
    assert ask(public, "/gradio_api/upload", form.replace(b"files", b"other") % b"a", **kind)[0] == 400


def test_a_new_host_or_parameter_gets_the_page_that_everybody_gets(public):
    for path in ("/", "/game", "/config"):
        variants = (path, {}), (path, {"Host": "evil.example"}), (path, {"Range": "bytes=0-1"}), (f"{path}?new=1", {})
        pages = {ask(public, address, method="GET", **headers) for address, headers in variants}
        assert len(pages) == 1 and "evil.example" not in pages.pop()[1], path


def test_the_description_of_the_api_names_the_host_that_asks(public):
    ask(public, "/gradio_api/info", method="GET", Host="evil.example")
    described = ask(public, "/gradio_api/info", method="GET")[1]
    assert "evil.example" not in described and f"http://{public}/gradio_api/call" in described


def test_the_stream_of_an_unknown_session_ends_with_a_message_and_no_traceback(public, caplog):
    status, answer = ask(public, "/gradio_api/queue/data?session_hash=nobody", method="GET")
    assert status == 200 and '"session_not_found":true' in answer and not caplog.records


NO_FUNCTION = {"component_id": 10**9, "fn_name": "script", "session_hash": "s", "data": None}


@pytest.mark.parametrize("changes, status", [
    ({}, 404), ({"component_id": "1"}, 404), ({"component_id": None}, 404), ({"component_id": [1]}, 404),
    ({"component_id": 1, "fn_name": "__init__"}, 404), ({"component_id": True}, 404), ({"fn_name": {"a": 1}}, 404),
    ({"session_hash": ["s"]}, 404),
], ids=str)
def test_a_function_that_no_component_has_is_not_found(public, changes, status, caplog):
    got, answer = ask(public, "/gradio_api/component_server", json.dumps(NO_FUNCTION | changes).encode())
    assert got == status and json.loads(answer)["detail"].endswith(".") and not caplog.records


def script_of(public: str) -> int:
    """The number of a component with a function `script`."""
    parts = json.loads(ask(public, "/config", method="GET")[1])["components"]
    return next(part["id"] for part in parts if "script" in part["props"].get("server_fns", ()))


@pytest.mark.parametrize("session, status", [("s", 200), ("s" * 129, 400), (["s"], 400), (None, 400)], ids=str)
def test_a_function_of_a_component_needs_the_name_of_a_session(public, session, status, caplog):
    asked = NO_FUNCTION | {"component_id": script_of(public), "session_hash": session}
    got, _ = ask(public, "/gradio_api/component_server", json.dumps(asked).encode())
    assert got == status and not caplog.records


def test_a_form_for_a_component_is_refused(public, caplog):
    form = b'--b\r\nContent-Disposition: form-data; name="component_id"\r\n\r\n1\r\n--b--'
    kind = {"Content_Type": "multipart/form-data; boundary=b"}
    assert ask(public, "/gradio_api/component_server", form, **kind)[0] == 400 and not caplog.records


@pytest.mark.parametrize("kind", ["gradio.FileData", "gradio.File\\u0044ata"])
@pytest.mark.parametrize("where", ["%s", "[[%s]]", '{"a": %s}'])
def test_the_page_fetches_no_file_of_another_address(public, kind, where):
    """Gradio downloads such a file into memory and onto the disk, whatever input it is given for."""
    file = where.replace("%s", f'{{"path": "https://example.com/large", "meta": {{"_type": "{kind}"}}}}')
    for path in ("/gradio_api/call/strategies", "/gradio_api/queue/join", "/gradio_api/run/predict"):
        status, answer = ask(public, path, f'{{"data": [{file}], "session_hash": "s", "fn_index": 0}}'.encode())
        assert status == 400 and "fetches no file" in answer


def test_a_session_with_a_long_name_is_refused(public):
    body = json.dumps({"session_hash": "s" * 200, "fn_index": 0, "data": []}).encode()
    assert join(public, body)[0] == 400


# --- hosts and origins ---

def passes(hosts: Hosts, method: str = "POST", **headers: str) -> bool:
    from starlette.datastructures import Headers
    try:
        hosts.check(Headers({name.replace("_", "-"): value for name, value in headers.items()}), method == "POST")
    except Denied:
        return False
    return True


def test_a_local_page_answers_to_its_own_host_names_only():
    local = Hosts.from_environment("127.0.0.1", public=False, environ={})
    own = ("localhost:7860", "127.0.0.1:7860", "[::1]:7860", "192.168.1.4:7860", "LOCALHOST")
    assert all(passes(local, host=host, origin=f"http://{host}".lower()) or host == "LOCALHOST" for host in own)
    assert not passes(local, host="evil.example:7860") and not passes(local, "GET", host="evil.example")
    assert not passes(local, host="localhost:7860", origin="http://evil.example", x_forwarded_host="evil.example")
    assert not passes(local, host="localhost:7860", origin="http://localhost:3000")
    assert not passes(local, "GET", host="localhost:x") and not passes(local, "GET", host="[")
    named = Hosts.from_environment("0.0.0.0", public=False, environ={"PLAYGROUND_HOSTS": "play.example, other.example"})
    assert passes(named, host="play.example", origin="https://play.example") and passes(
        named, host="127.0.0.1:7860", origin="https://other.example"
    )


def test_a_space_works_behind_its_proxy():
    space = Hosts.from_environment("0.0.0.0", public=True, environ={"SPACE_HOST": "me-play.hf.space"})
    assert passes(space, host="me-play.hf.space", origin="https://me-play.hf.space")
    assert passes(space, host="10.0.0.7:7860", x_forwarded_host="me-play.hf.space", origin="https://me-play.hf.space")
    # a probe; a program without a browser
    assert passes(space, "GET", host="10.0.0.7:7860") and passes(space, host="me-play.hf.space")
    assert not passes(space, host="evil.example") and not passes(
        space, host="me-play.hf.space", origin="https://huggingface.co"
    )
    anywhere = Hosts.from_environment("0.0.0.0", public=True, environ={})
    assert passes(anywhere, host="any.example", origin="https://any.example") and not passes(
        anywhere, host="any.example", origin="https://b.example"
    )


# --- frames of other sites ---

@pytest.mark.parametrize("path", ["/", "/config", "/nowhere", "/gradio_api/docs", "/library"])
def test_no_other_site_may_show_the_page_in_a_frame(public, path):
    connection = http.client.HTTPConnection(public, timeout=30)
    connection.request("GET", path)
    assert connection.getresponse().headers["content-security-policy"] == "frame-ancestors 'self'"
    connection.close()


@pytest.mark.parametrize("environ, sites", [
    ({}, ()), ({"PLAYGROUND_EMBED": "0"}, ()), ({"PLAYGROUND_EMBED": " https://a.example, http://b.example:8080,"},
     ("https://a.example", "http://b.example:8080")), ({"PLAYGROUND_EMBED": "*"}, ("*",)),
    ({"SPACE_ID": "me/play"}, ("https://huggingface.co", "https://*.hf.space")),
], ids=str)
def test_sites_that_may_show_the_page_in_a_frame_are_named(environ, sites):
    assert embedders(environ) == sites
    policy = Framing(None, sites).policy
    assert policy == "frame-ancestors *" if "*" in sites else policy == " ".join(["frame-ancestors 'self'", *sites])


@pytest.mark.parametrize("given", ["a.example", "https://a.example; script-src *", "javascript:alert(1)", "'none'"])
def test_a_malformed_site_is_refused_at_the_start(given):
    with pytest.raises(Refusal, match="PLAYGROUND_EMBED"):
        embedders({"PLAYGROUND_EMBED": given})


def test_escaped_characters_are_distinguished_from_lone_surrogates():
    check_json(json.dumps({"a": "\U0001f600 \\ud800 [[[[ 1e999 NaN"}).encode(), PUBLIC)
    with pytest.raises(Denied):
        check_json(b'"\\\\\\ud83d"', PUBLIC)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [b'"\\"' * 600_000, b'"' + b"\\" * 1_999_999, b"[" * 20_000, b'\\"' * 900_000],
    ids=["strings", "escapes", "open", "quotes"],
)
def test_reading_a_hostile_body_takes_linear_time(body):
    watched = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom playground.ui.guard.request_guard import *\n"
            "from playground.request_limits import PUBLIC\n"
            "try: check_json(sys.stdin.buffer.read(), PUBLIC)\nexcept Denied: pass",
        ],
        input=body,
        timeout=60,
        cwd=ROOT,
        capture_output=True,
    )
    assert watched.returncode == 0, watched.stderr
