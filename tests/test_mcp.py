"""The page as a server of tools (`--mcp`): which tools it offers, and malicious requests for them."""
from __future__ import annotations

import json

import httpx
import pytest
import saved

from playground.request_limits import PUBLIC, Rules
from playground.ui.server import pages
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.serving import launch_options, protect
from playground.ui.server.site import Site
from support.launched import launched

NAMES = {"/run", "/compare", "/strategies", "/examples", "/questions"}
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
PLACE = "/gradio_api/mcp/"


@pytest.fixture(scope="module")
def offering(tmp_path_factory):
    """A public page that offers its tools: the page and a client of it."""
    pair = saved.save_models(tmp_path_factory.mktemp("models"))
    site = Site(ModelRequest(pair.target, pair.draft), Rules.for_visitors())
    page = pages.build(site)
    options = launch_options(site, page, "127.0.0.1")
    with launched(page, mcp_server=True, max_file_size=PUBLIC.upload_bytes, **options) as address:
        protect(page, site)
        with httpx.Client(base_url=address, headers=HEADERS, timeout=20) as client:
            yield page, client


def message(method: str, **params) -> dict:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def call(tool: str, **arguments) -> dict:
    return message("tools/call", name=tool, arguments=arguments)


def said(answer: httpx.Response) -> dict:
    """The JSON of an answer, which is the only event of a stream."""
    data = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
    return json.loads(data[-1])


def test_the_tools_are_the_public_endpoints(offering):
    page, client = offering
    assert set(page.mcp_server_obj.tool_to_endpoint.values()) == NAMES
    listed = said(client.post(PLACE, json=message("tools/list")))["result"]["tools"]
    assert len(listed) == len(NAMES)


RUN = {"prompt": "The red", "lanes": [{"strategy": "greedy"}], "length": 4}
FILE = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": [],
    "a thousand messages": [message("tools/list")] * 1000,
    "a number": 7,
    "no method": {"jsonrpc": "2.0", "id": 1},
    "another version": {**message("tools/list"), "jsonrpc": "1.0"},
    "an id that is an object": {**message("tools/list"), "id": {"a": 1}},
    "a method that is unknown": message("tools/delete"),
    "a method of 100,000 letters": message("x" * 100_000),
    "params that are a list": {**message("tools/call"), "params": [1]},
    "a tool that is unknown": call("os_system", command="id"),
    "a tool that is a number": message("tools/call", name=7, arguments={}),
    "arguments that are a list": message("tools/call", name="compare", arguments=[1]),
    "arguments that are unknown": call("compare", **RUN, fn_index=0),
    "arguments that are missing": call("compare"),
    "lanes that are a text": call("compare", **{**RUN, "lanes": "greedy"}),
    "a prompt that is a file": call("compare", **{**RUN, "prompt": FILE}),
    "a model that is a folder": call("compare", **RUN, model="/etc"),
    "a server to be asked": call("compare", **RUN, remote="http://169.254.169.254", remote_model="fox"),
    "a long run": call("compare", **{**RUN, "length": 10**9}),
    "half a character": b'{"jsonrpc": "2.0", "id": 1, "method": "\\ud800"}',
    "100 levels": b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": ' + b"[" * 100 + b"]" * 100 + b"}",
    "a resource that is a file": message("resources/read", uri="file:///etc/passwd"),
    "a mark of progress that is an object": message("tools/call", name="examples", arguments={},
                                                    _meta={"progressToken": {"a": 1}}),
    "a log level": message("logging/setLevel", level="debug"),
    "an answer that nobody asked for": {"jsonrpc": "2.0", "id": 1, "result": {}},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_malicious_message_is_refused_without_a_traceback(offering, body, caplog):
    _, client = offering
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(PLACE, content=content)
    assert answer.status_code < 500 and "root:" not in answer.text and "Traceback" not in answer.text
    refused = answer.status_code >= 400 or any(sign in answer.text for sign in ('"error"', '"isError":true'))
    assert refused or answer.status_code == 202, answer.text[:500]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("method, path", [
    ("GET", "/gradio_api/mcp/../../etc/passwd"), ("GET", "/gradio_api/mcp/nothing"), ("DELETE", PLACE), ("PUT", PLACE),
    ("POST", "/gradio_api/mcp/messages/"), ("POST", "/gradio_api/mcp/messages/?session_id=x"),
    ("POST", f"/gradio_api/mcp/messages/?session_id={'0' * 32}"),
])
def test_other_routes_of_the_protocol_are_refused(offering, method, path, caplog):
    answer = offering[1].request(method, path, content=b"{}" if method in ("POST", "PUT") else None)
    assert 400 <= answer.status_code < 500
    assert not [record for record in caplog.records if record.exc_info]


def test_a_page_of_another_site_calls_no_tool(offering):
    answer = offering[1].post(PLACE, json=call("examples"), headers={"origin": "https://evil.example"})
    assert answer.status_code == 403


def test_a_call_counts_for_the_address_that_sent_it_whatever_it_says(offering, monkeypatch):
    """Tools call the page again from its own machine, which is believed to forward others."""
    page, client = offering
    counted, push = [], page._queue.push

    async def noting(body, request, username):
        counted.append(request.client.host)
        return await push(body=body, request=request, username=username)

    monkeypatch.setattr(page._queue, "push", noting)
    forged, stranger = {"x-forwarded-for": "9.9.9.9", "forwarded": "for=9.9.9.9"}, "127.0.0.66"
    with httpx.Client(base_url=client.base_url, headers=HEADERS | forged, timeout=20,
                      transport=httpx.HTTPTransport(local_address=stranger)) as caller:
        answer = said(caller.post(PLACE, json=call("compare", **RUN)))
    assert not answer["result"]["isError"] and counted == [stranger]
