"""Remote lanes: what a server reports is shown, what it does not is not, and its faults end its lane alone."""
from __future__ import annotations

import errno
import json
import logging
import ssl
import threading
from math import exp

import pytest
from completion_server import DONE, Answer, CompletionServer, event, piece, text

import playground
from playground.contract import make
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session
from playground.errors import Refusal
from playground.events import Commit, Done, Figure, Header, Note, TopLogprobs
from playground.network_errors import connection_error
from playground.player.standalone import to_html
from playground.remote.completion_chunk import read_chunk
from playground.remote.completion_request import CompletionRequest
from playground.remote.remote_lane import RemoteLane, add_lane
from playground.remote.remote_server import RemoteServer
from playground.trace import Trace, check
from playground.trace.csv_export import to_csv
from playground.trace.lane_metrics import diff
from playground.trace.result import Result
from support.sessions import side_by_side

KEY = "sk-very-secret-0123456789"


@pytest.fixture
def serving():
    """Starts servers that stop at the end of the test."""
    from contextlib import ExitStack
    with ExitStack() as stack:
        yield lambda *answers: stack.enter_context(CompletionServer([*answers]).running())


PLAIN = Prompt("The red")


def run(server: CompletionServer, prompt: Prompt = PLAIN, limits: Limits | None = None, **how) -> Result:
    """A session of one remote lane, run to its end; the trace must be consistent."""
    session = Session([], [])
    add_lane(session, RemoteServer.given(server.address, "fox", **how), prompt, limits or Limits())
    for _ in session:
        pass
    assert check(session.trace) == []
    return Result(session.trace)


def events(result: Result, kind: type) -> list:
    return [stamped.event for stamped in result.trace.events if isinstance(stamped.event, kind)]


# --- what is shown ---

def test_text_and_top_log_probabilities_are_those_of_the_server(serving):
    server = serving(text(" fox", " listens", "."))
    result = run(server, limits=Limits(seed=3, max_new_tokens=8, stop=("\n",)))
    assert (result.text, result.reason, result.logprobs) == (" fox listens.", "end", [-0.5] * 3)
    assert [(top.position, top.top) for top in events(result, TopLogprobs)][1] == (1, [(" listens", -0.5), (" zu", -3)])
    assert result.token_ids == [-1] * 3
    assert server.requests[0]["path"] == "/v1/completions"
    body = {name: server.requests[0]["body"][name] for name in ("prompt", "model", "max_tokens", "seed", "temperature")}
    assert body == {"prompt": "The red", "model": "fox", "max_tokens": 8, "seed": 3, "temperature": 0.0}


def test_what_a_server_cannot_show_is_marked_and_not_made_up(serving):
    result = run(serving(text(" fox")))
    kinds = {stamped.event.kind for stamped in result.trace.events}
    assert kinds == {"top_logprobs", "commit", "note", "done"}  # no step, forward, draft, cache or mask
    unknown = ("mean_entropy", "target_forwards", "wasted_tokens", "flops", "acceptance_rate", "kv_bytes_peak")
    assert {result.metrics[name] for name in unknown} == {None}
    assert "Not shown, since the server does not report it" in events(result, Note)[0].text
    assert result.header.remote.startswith("127.0.0.1:") and result.header.guarantee == []


def test_a_chat_is_sent_as_messages_and_read_from_the_chat_interface(serving):
    content = [{"token": " Hi", "id": 7, "logprob": -0.1, "top_logprobs": [{"token": " Hi", "logprob": -0.1}]}]
    server = serving(Answer([
        event(choices=[{"delta": {"role": "assistant"}, "finish_reason": None}]),
        event(choices=[{"delta": {"content": " Hi"}, "logprobs": {"content": content}, "finish_reason": None}]),
        event(choices=[{"delta": {}, "finish_reason": "length"}]), DONE,
    ]))
    result = run(server, Prompt("Hello", chat=True, system="Be brief", before=(("a", "b"),)))
    assert (result.text, result.reason, result.token_ids) == (" Hi", "length", [7])
    assert server.requests[0]["path"] == "/v1/chat/completions"
    assert [message["content"] for message in server.requests[0]["body"]["messages"]] == ["Be brief", "a", "b", "Hello"]


@pytest.mark.parametrize("report", [
    {"timings": {"draft_n": 8, "draft_n_accepted": 6}},  # llama.cpp
    {"usage": {"completion_tokens": 9, "completion_tokens_details":
               {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}}},  # OpenAI
])
def test_speculation_is_shown_as_the_server_reports_it(serving, report):
    result = run(serving(Answer([piece(" fox", -0.5), piece("", finish="stop", **report), DONE])))
    assert [figure.data["values"] for figure in events(result, Figure)] == [[8, 6]]


def test_pieces_without_log_probabilities_are_shown_and_named_as_such(serving):
    result = run(serving(Answer([piece(" red fox"), piece("", finish="stop"), DONE])))
    assert (result.text, result.logprobs) == (" red fox", [None])
    assert "may hold several tokens" in events(result, Note)[0].text


def test_a_server_that_refuses_the_optional_fields_is_asked_again_without_them(serving):
    refused = Answer([b'{"error": {"message": "logprobs is not supported"}}'], 400, "application/json")
    server = serving(refused, text(" fox"))
    assert run(server).text == " fox"
    first, second = (set(request["body"]) for request in server.requests)
    assert first - second == {"logprobs", "stream_options"}


def test_a_server_that_does_not_stream_is_read_as_a_whole(serving):
    whole = {"choices": [{"text": " fox", "finish_reason": "stop"}]}
    assert run(serving(Answer([json.dumps(whole).encode()], kind="application/json"))).text == " fox"


def test_tokens_that_do_not_spell_the_text_are_shown_as_one_piece():
    half = {"tokens": ["bytes:\\xe2", "bytes:\\x82\\xac"], "token_logprobs": [-1, -1], "top_logprobs": [{}, {}]}
    chunk = read_chunk({"choices": [{"text": "€", "logprobs": half}]})
    assert [(token.piece, token.logprob) for token in chunk.tokens] == [("€", None)]


@pytest.mark.parametrize("parts", [
    ["a\\ud83d", "\\ude00b"],
    [b"a\xf0", b"\x9f", b"\x98\x80b"],
    [b"a\xf0\x9f\x98", b"\x80b"],
    ["a", "\\ud83d", "\\ude00", "b"],
], ids=["surrogates", "bytes", "last byte", "parts"])
def test_halves_of_a_character_are_joined(serving, parts, tmp_path):
    sent = [b'data: {"choices": [{"text": "' + (part if isinstance(part, bytes) else part.encode()) + b'"}]}\n\n'
            for part in parts]
    result = run(serving(Answer([*sent, piece("", finish="stop"), DONE])))
    assert result.text == "a😀b" and len(result.token_ids) == len(parts)
    result.trace.save(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("part, shown", [
    ("a\\ud83d!", "a\ufffd!"), (b"a\xff!", "a\ufffd!"), ("a\\ude00", "a\ufffd"), ("a\\ud83d", "a")
])
def test_half_a_character_that_is_never_completed_can_be_stored(serving, part, shown, tmp_path):
    sent = b'data: {"choices": [{"text": "' + (part if isinstance(part, bytes) else part.encode()) + b'"}]}\n\n'
    result = run(serving(Answer([sent, piece("", finish="stop"), DONE])))
    assert result.text == shown
    result.trace.save(tmp_path / "trace.jsonl")


def test_halves_among_the_candidates_can_be_stored(serving, tmp_path):
    found = '{"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1, "\\ud83d": -3.0}]}'
    sent = f'data: {{"choices": [{{"text": "a", "logprobs": {found}}}]}}\n\n'.encode()
    result = run(serving(Answer([sent, piece("", finish="stop"), DONE])))
    assert events(result, TopLogprobs)[0].top == [("a", -0.1), ("\ufffd", -3.0)]
    result.trace.save(tmp_path / "trace.jsonl")


def test_a_server_that_ignores_the_limit_is_cut_off(serving):
    result = run(serving(Answer([piece(" a", -0.5)] * 50)), limits=Limits(max_new_tokens=4))
    assert result.reason == "length" and len(result.token_ids) == 5


# --- faults ---

FAULTS = {
    "wrong key": (Answer([b"{}"], 401, "application/json"), "refuses the key (HTTP 401)"),
    "unknown model": (Answer([b'{"error": {"message": "no fox"}}'], 404, "application/json"), "no model 'fox'"),
    "error status": (Answer([b"<html>oops"], 500, "text/html"), "answered with HTTP 500"),
    "redirect": (Answer([b""], 302, "text/html"), "answered with HTTP 302"),
    "error in the stream": (Answer([piece(" a"), event(error={"message": "out of memory"})]), "(out of memory)"),
    "no JSON": (Answer([b"data: <html>\n\n"]), "not part of a completion"),
    "another interface": (Answer([event(results=[])]), "not part of a completion"),
    "text that is a number": (Answer([event(choices=[{"text": 5}])]), "not part of a completion"),
    "half an answer": (Answer([piece(" a")]), "without saying why"),
    "broken off": (Answer([piece(" a")], breaks=True), "closed the connection in the middle"),
    "endless line": (Answer([b"data: " + b"x" * 600_000] * 2), "a line of more than"),
    "empty": (Answer([]), "without saying why"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server_is_a_sentence(serving, fault):
    answer, sentence = FAULTS[fault]
    result = run(serving(answer))
    assert result.reason == "failed" and sentence in result.message and result.message.endswith(".")
    assert result.text == (" a" if answer.status == 200 and b'" a"' in b"".join(answer.parts) else "")


@pytest.mark.parametrize("address, says", [
    ("http://127.0.0.1:9", "The server 127.0.0.1:9 cannot be reached (it refuses the connection): check the address"),
    ("http://nowhere.invalid", "The server nowhere.invalid cannot be reached (its name cannot be resolved): check"),
])
def test_a_server_that_is_not_there_is_a_sentence(address, says):
    session = Session([], [])
    add_lane(session, RemoteServer.given(address, "fox"), Prompt("The"), Limits())
    assert says in list(session)[-1].event.message


@pytest.mark.parametrize("reason, says", [
    (ExceptionGroup("all attempts failed", [ConnectionRefusedError(111, "Connect call failed")]), "it refuses the"),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), "there is no route to it"),
    (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), "no secure connection"),
    (ValueError("no error of a connection"), ""),
])
def test_an_error_of_the_operating_system_is_said_in_our_words(reason, says):
    said = connection_error(reason)
    assert said.startswith(says) and bool(said) == bool(says) and str(reason) not in said


def test_a_silent_server_ends_its_lane_and_delays_no_other(serving):
    """The local lane ends while the server says nothing; only then is the remote lane given up."""
    hush = threading.Event()
    server = RemoteServer.given(serving(Answer([piece(" a", -0.5)], silent=hush)).address, "fox")
    session = side_by_side(make("greedy"))
    session.add(Header(), RemoteLane(CompletionRequest(server, Prompt("a"), Limits()), silent=0.3))
    ended = {stamped.lane: stamped.event for stamped in session if stamped.event.kind in ("done", "failed")}
    hush.set()
    assert list(ended) == [0, 1]
    assert isinstance(ended[0], Done) and "does not answer" in ended[1].message


def test_stopping_a_remote_lane_closes_its_connection(serving):
    hush = threading.Event()
    server = serving(Answer([piece(" a", -0.5)], silent=hush))
    session = Session([], [])
    add_lane(session, RemoteServer.given(server.address, "fox"), Prompt("The"), Limits())
    while not any(isinstance(stamped.event, Commit) for stamped in session.trace.events):
        session.advance()
    assert [stamped.event for stamped in session.stop()] == [Done("stopped")] and session.finished
    hush.set()


# --- keys and addresses ---

def test_the_key_reaches_the_server_and_nothing_else(serving, caplog):
    caplog.set_level(logging.DEBUG)
    echo = f'{{"error": {{"message": "Incorrect API key provided: {KEY}"}}}}'.encode()
    server = serving(Answer([echo], 500, "application/json"))
    result = run(server, key=KEY)
    assert server.requests[0]["headers"]["Authorization"] == f"Bearer {KEY}"
    exported = to_csv(result.trace) + to_html(result.trace) + repr(result)
    written = json.dumps(result.trace.to_json()) + result.message + caplog.text + exported
    assert KEY not in written and KEY not in repr(RemoteServer(server.address, "fox", KEY))


def test_the_key_of_the_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("PLAYGROUND_REMOTE_KEY", KEY)
    assert RemoteServer.given("http://127.0.0.1:1", "fox").key == KEY
    assert RemoteServer.given("http://127.0.0.1:1", "fox", key="other").key == "other"


@pytest.mark.parametrize("address", [
    "", "localhost:8000", "file:///etc/passwd", "gopher://a", "http://", "http://user:word@host", "http://a b",
    "//host", "http://host:99999", "http://host/?key=1", "http://host#x", "http://[::1", "http://ho\nst", "x" * 500,
])
def test_what_is_no_address_is_refused_before_anything_is_sent(address):
    with pytest.raises(Refusal, match="address|server"):
        RemoteServer.given(address, "fox")


def test_an_address_may_end_in_a_version():
    plain, versioned = (RemoteServer.given(f"http://a:1{path}", "fox") for path in ("/", "/v1/"))
    assert plain.url("completions") == versioned.url("completions") == "http://a:1/v1/completions"


@pytest.mark.parametrize("bad", [{"model": ""}, {"key": "two words"}, {"key": "a\r\nHost: b"}, {"temperature": 9.0}])
def test_a_model_a_key_or_a_temperature_that_cannot_be_sent_is_refused(bad):
    with pytest.raises(Refusal):
        RemoteServer.given(**{"address": "http://a:1", "model": "fox"} | bad)


@pytest.mark.parametrize("name", ["PLAYGROUND_PUBLIC", "SPACE_ID"])
def test_a_public_page_connects_to_no_server(monkeypatch, name):
    """A visitor's address could name a machine behind the public page."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(Refusal, match="does not connect to other servers"):
        RemoteServer.given("http://127.0.0.1:1", "fox")
    with pytest.raises(Refusal, match="does not connect to other servers"):
        playground.compare([], "The", remote=RemoteServer("http://127.0.0.1:1", "fox"))


# --- comparison ---

def test_texts_without_ids_are_compared_character_by_character(serving):
    texts = ([" fox", " runs"], [" fo", "x runs"], [" fox", " ran"])
    one, two, three = (run(serving(text(*pieces))) for pieces in texts)
    assert diff(one.trace, two.trace) is None
    found = diff(one.trace, three.trace)
    assert (found.index, found.a.piece, found.b.piece, found.margin) == (1, " runs", " ran", None)


def test_a_trace_of_a_remote_lane_can_be_saved_and_read(serving, tmp_path):
    result = run(serving(text(" fox")))
    result.trace.save(tmp_path / "remote.jsonl")
    again = Result(Trace.load(tmp_path / "remote.jsonl"))
    assert again.text == " fox" and exp(again.logprobs[0]) == pytest.approx(exp(-0.5))
