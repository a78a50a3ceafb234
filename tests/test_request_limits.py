"""Limits of requests: attacks on the public page over HTTP, and on everything that reads input of a
browser or a program.
"""
from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time, thread_time
from types import SimpleNamespace
from urllib.parse import urlsplit

import gradio as gr
import pytest
import saved
from toys import save

import app
from playground import request_limits
from playground.bench.questions import Question
from playground.bench.survey import Answer
from playground.bench.survey_export import as_csv
from playground.bench.user_questions import questions_in
from playground.engine.load import Loading, load
from playground.errors import Refusal
from playground.events import Failed
from playground.request_limits import LOCAL, MAX_SEED, PUBLIC, RequestLimits, quoted
from playground.ui import gallery, lessons
from playground.ui import game_page as game
from playground.ui import lane_editor as editor
from playground.ui.benchmark_page import SurveyHandlers
from playground.ui.event_fields import number, text, whole_number
from playground.ui.gallery import picked
from playground.ui.handlers import Handlers, Visit
from playground.ui.model_loader import ModelRequest
from playground.ui.pages import build
from playground.ui.playground_page import Page
from playground.ui.request_guard import Denied, Hosts, check_json, guarded
from playground.ui.settings import Rules, Settings
from playground.ui.site import Site
from playground.ui.survey_run import SurveySettings

ROOT = Path(__file__).parents[1]
STRANGERS = Rules.for_visitors()
GREEDY = {"strategy": "greedy"}
LONGEST_EXAMPLE = 4096  # tokens: an example may be longer than a public page runs it
MODELS: dict[str, str] = {}  # folders of the public page's models


# --- over HTTP, against a public page ---

@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Host and port of a public page over small random models."""
    pair = saved.save_models(tmp_path_factory.mktemp("models"))
    MODELS.update(target=pair.target, draft=pair.draft)
    site = Site(ModelRequest(pair.target, pair.draft), STRANGERS)
    demo = build(site)
    _, address, _ = demo.launch(
        prevent_thread_lock=True,
        quiet=True,
        run_history=False,
        max_file_size=PUBLIC.upload_bytes,
        app_kwargs=guarded(site.rules, "127.0.0.1"),
    )
    yield urlsplit(address).netloc
    demo.close()


def ask(place: str, path: str, body: bytes | None = None, method: str = "POST", **headers: str) -> tuple[int, str]:
    """Status and body of the answer; header names are written with _ for -."""
    connection = http.client.HTTPConnection(place, timeout=30)
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    told = answer.status, answer.read().decode("utf-8", "replace")
    connection.close()
    return told


def join(place: str, body: bytes, **headers: str) -> tuple[int, str]:
    return ask(place, "/gradio_api/queue/join", body, **headers)


def call(name: str, *data) -> bytes:
    return json.dumps({"data": data, "session_hash": "s"}).encode()


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
    got, told = join(public, b'{"session_hash": "s", "fn_index": 0, "data": [%s]}' % value.encode())
    assert got == status and says in json.loads(told)["detail"]


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
    status, told = ask(public, path, method="GET")
    assert status == 404 and "no such route" in told


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


def test_escaped_characters_are_distinguished_from_lone_surrogates():
    check_json(json.dumps({"a": "\U0001f600 \\ud800 [[[[ 1e999 NaN"}).encode(), PUBLIC)
    with pytest.raises(Denied):
        check_json(b'"\\\\\\ud83d"', PUBLIC)


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
            "import sys; from playground.ui.request_guard import *; from playground.request_limits import PUBLIC\n"
            "try: check_json(sys.stdin.buffer.read(), PUBLIC)\nexcept Denied: pass",
        ],
        input=body,
        timeout=60,
        cwd=ROOT,
        capture_output=True,
    )
    assert watched.returncode == 0, watched.stderr


# --- what settings, lanes and events may hold ---

LONE = "half \ud800 a letter"
MALFORMED = [
    ({"prompt": "x" * 4001}, "more than 4,000"),
    ({"prompt": LONE}, "surrogate"),
    ({"prompt": "a\0b"}, "NUL"),
    ({"system": LONE}, "surrogate"),
    ({"context": "x" * 5000}, "more than 4,000"),
    ({"before": [["x" * 5000, "y"]], "mode": "chat"}, "more than 4,000"),
    ({"before": [[LONE, "y"]], "mode": "chat"}, "surrogate"),
    ({"stop": "\n".join("abcdefghijklmnopq")}, "17 stop strings"),
    ({"stop": "x" * 201}, "201 characters"),
    ({"stop": "x" * 10_000}, "stop strings"),
    ({"model": "m" * 201}, "choice of model"),
    ({"draft": LONE}, "choice of draft"),
    ({"seed": 10**5000}, "more than 60 digits"),
    ({"seed": MAX_SEED + 1}, "seed"),
    ({"seed": float("nan")}, "whole number"),
    ({"length": 10**400}, "number of tokens"),
    ({"length": True}, "whole number"),
    ({"prompt": ["a"] * 9}, "empty"),
    ({"lanes": [GREEDY, "greedy"]}, "Lane 2 is malformed"),
    ({"lanes": [{"strategy": "g" * 201}]}, "201 characters"),
    ({"lanes": [GREEDY | {"forced": [1] * 400_000}]}, "begins with 400,000 forced tokens"),
    ({"lanes": [GREEDY | {"forced": [-1]}]}, "token ids"),
    ({"lanes": [GREEDY | {"forced": [2**31]}]}, "token ids"),
    ({"lanes": [GREEDY | {"forced": "abc"}]}, "must be a list"),
    ({"lanes": [GREEDY | {"extras": [["top_p", {}]] * 25}]}, "25 additions"),
    ({"lanes": [GREEDY | {"extras": [["top_p"]]}]}, "malformed"),
    ({"lanes": [GREEDY | {"seed": -1}]}, "seed of lane 1"),
    ({"lanes": [GREEDY | {"knobs": {str(number): 1 for number in range(49)}}]}, "49 knobs"),
    ({"lanes": [GREEDY | {"knobs": {"k" * 201: 1}}]}, "name of a knob"),
    ({"lanes": [GREEDY | {"knobs": {"x": float("inf")}}]}, "between -1e18"),
    ({"lanes": [GREEDY | {"knobs": {"x": 10**10_000}}]}, "between -1e18"),
    ({"lanes": [GREEDY | {"knobs": {"x": LONE}}]}, "surrogate"),
    ({"lanes": [{"strategy": "gencls_ppl", "knobs": {"labels": "good|bad|" + "x" * 300_000}}]}, "300,009 characters"),
    ({"lanes": [{"strategy": "caad", "knobs": {"pairs": "a => b\n" * 40_000}}]}, "280,000 characters"),
    ({"lanes": [GREEDY | {"extras": [["choice", {"options": "x" * 9000}]] * 5}]}, "knobs of all lanes have 45,000"),
]


@pytest.mark.parametrize("change, says", MALFORMED, ids=range(len(MALFORMED)))
def test_requests_beyond_public_limits_are_refused_in_a_short_sentence(change, says):
    with pytest.raises(Refusal) as refused:
        Settings(**({"prompt": "Hello"} | change)).check(STRANGERS)
    told = str(refused.value)
    assert says in told and len(told) < 400 and told.encode()


def test_a_local_page_has_higher_limits_than_a_public_one():
    longer = Settings("Hello", lanes=[{"strategy": "greedy", "extras": [["choice", {"options": "x" * 90_000}]]}])
    longer.check(Rules())
    with pytest.raises(Refusal, match="90,000 characters"):
        longer.check(STRANGERS)


@pytest.mark.parametrize(
    "values",
    [
        {"count": 10**4000},
        {"repeats": 0},
        {"tasks": ["nonsense"]},
        {"tasks": [{}]},
        {"own": "x" * 400_001},
        {"own": LONE},
        {"own": ["a"], "tasks": []},
        {"lanes": [GREEDY] * 400},
    ],
)
def test_a_survey_is_bounded_as_a_run_is(values):
    with pytest.raises(Refusal) as refused:
        SurveySettings(**({"lanes": [GREEDY]} | values)).check(STRANGERS)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a\\u0000b"}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "context": "%s"}' % ("x" * 20_001),
        "[" * 100_000,
        '{"prompt": "a", "answer": %s}' % ("9" * 5000),
        '{"prompt": "a", "%s": 1}' % ("k" * 100_000),
    ],
)
def test_a_question_of_ones_own_is_refused_with_its_line(line):
    with pytest.raises(Refusal, match="Line 1") as refused:
        questions_in(line)
    assert len(str(refused.value)) < 400


def test_links_with_hostile_contents_open_no_page_that_breaks():
    import base64
    many = json.dumps({"lanes": [{}] * 9000})
    for raw in (
        '{"prompt": "\\ud800", "lanes": [{"strategy": "greedy"}]}',
        f'{{"seed": {"9" * 5000}}}',
        "[" * 40_000,
        many,
    ):
        settings = Settings.from_code(base64.urlsafe_b64encode(raw.encode()).decode())
        if settings is not None:
            with pytest.raises(Refusal):
                settings.check(STRANGERS)


@pytest.fixture(scope="module")
def acts():
    """Handlers of a page without a model, and a visit whose run has one lane."""
    site = Site(rules=STRANGERS, load=None)
    with gr.Blocks():
        page = Page(site, gr.Row())
    run = SimpleNamespace(
        headers=[{"model": "m", "prompt_ids": [1]}],
        name="r",
        over=True,
        state="done",
        pace=lambda beat: None,
        stop=lambda lane=None: None,
        trace=SimpleNamespace(lane=lambda lane: SimpleNamespace(events=[])),
    )
    return Handlers(site, page), Visit(Settings("Hello"), run=run)


HOSTILE = [
    {},
    None,
    [],
    {"lane": "x"},
    {"lane": -1},
    {"lane": 0},
    {"lane": 0, "sequence": 0, "position": 1e99, "token": 1},
    {"lane": 0, "sequence": "0", "position": 1, "token": 1},
    {"lane": float("nan")},
    {"lane": 0, "sequence": 0, "position": 0, "token": 10**50},
    {"lane": 0, "sequence": 0, "position": 0, "words": "w" * 10_000_000},
    {"lane": 0, "sequence": 0, "position": 0, "words": {"a": 1}},
    {"beat": "x"},
    {"beat": float("nan")},
    {"beat": -1e308},
    {"lane": [0]},
    {"lane": True},
    {"run": "gone", "lane": 0, "sequence": 0, "position": 0, "token": 1},
    {"run": ["r"], "lane": 0},
    {"run": "r", "lane": 0, "sequence": 0, "position": 0, "token": 1, "instead_of": 7},
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_a_malformed_event_is_answered_or_dropped(acts, data):
    act, visit = acts
    event = gr.EventData(None, data)
    for handler in (act.look, act.stop_lane, act.pace):
        handler(visit, event)
    said = [
        value
        for change in act.fork(visit, event)
        if isinstance(change, dict)
        for value in change.values()
        if isinstance(value, str)
    ]
    assert all(len(sentence) < 400 for sentence in said)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"part": "questions", "index": -1},
        {"part": "questions", "index": 10**6},
        {"part": 3, "index": 0},
        {"part": "examples", "index": "x"},
        {"part": "examples", "index": float("nan")},
    ],
)
def test_an_entry_that_the_gallery_does_not_have_is_a_sentence(acts, data):
    changes = acts[0].pick("default", "default", gr.EventData(None, data))
    assert any(value.endswith(".</span>") for value in changes.values() if isinstance(value, str))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"lesson": "x" * 10**6, "step": 0},
        {"lesson": "none", "step": 0},
        {"lesson": 3, "step": 0},
        {"step": 0},
        {"lesson": "none", "step": 1e300},
    ],
)
def test_a_lesson_that_does_not_exist_is_a_sentence(acts, data):
    with pytest.raises(gr.Error) as refused:
        acts[0].set_up("default", "default", gr.EventData(None, data))
    assert len(str(refused.value)) < 400
    with pytest.raises(Refusal):
        lessons.settings_of("x" * 10**6, 0)


def test_fields_of_events_are_read_within_bounds():
    event = SimpleNamespace(a=3.0, b=2.5, c="abc", d=-1, e=True)
    assert (whole_number(event, "a"), number(event, "b", 0, 3), text(event, "c", 3)) == (3, 2.5, "abc")
    for read in (
        lambda: whole_number(event, "b"),
        lambda: whole_number(event, "d"),
        lambda: whole_number(event, "e"),
        lambda: whole_number(event, "none"),
        lambda: number(event, "b", 0, 2),
        lambda: number(event, "c", 0, 2),
        lambda: text(event, "c", 2),
        lambda: text(event, "a", 2),
    ):
        with pytest.raises(Refusal):
            read()
    with pytest.raises(Refusal, match="no such entry"):
        picked("examples", 10_000)


def test_the_lane_editor_explains_what_it_cannot_read():
    assert "1 is malformed" in editor.check(["x"])[0]["problem"]
    assert "characters" in editor.check([{"strategy": "gencls_ppl", "knobs": {"labels": "x" * 200_000}}])[0]["problem"]
    assert editor.check([GREEDY])[0]["problem"] == "" and editor.check({"a": 1}) == []
    assert len(editor.check([GREEDY] * 100_000)) <= 8


def test_a_word_in_the_game_is_bounded():
    odds = game.probability_lookup(SimpleNamespace())
    for asked in (
        {"ids": [1], "word": LONE},
        {"ids": [1], "word": " " * 10**7},
        {"ids": [1] * 300_000, "word": "a"},
        {"ids": [2**40], "word": "a"},
        {"ids": [-1], "word": "a"},
        {"ids": [1.5], "word": "a"},
        None,
        [],
    ):
        assert len(odds(asked)["refused"]) < 200


def test_a_survey_event_that_is_malformed_shows_and_saves_nothing():
    acts, visit = SurveyHandlers(None, None), SimpleNamespace(questions=[], answers=[], entrants=[], facts={}, beside=0)
    for data in (None, {}, {"number": "x"}, {"number": 1e99}, {"number": -1}, {"number": 0}):
        assert acts.show(visit, gr.EventData(None, data)) == ""
    for data in ({}, {"form": "../../etc"}, {"form": ["csv"]}):
        assert "saved" not in acts.save(visit, gr.EventData(None, data))


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_the_benchmark_csv_starts_no_formula(start):
    import csv
    import io
    hostile = f"{start}cmd|' /C calc'!A0"
    answer = Answer(hostile, 0, Question("own", hostile, hostile, context=hostile), 0, 0, text=hostile, failure=hostile)
    row = next(csv.DictReader(io.StringIO(as_csv([answer]), newline="")))
    assert [row[name] for name in ("entrant", "prompt", "context", "expected", "text", "failure")] == [
        f"'{hostile}"
    ] * 6
    assert row["round"] == "0"


# --- starting the page ---

@pytest.mark.parametrize(
    "options, says",
    [
        (["--port", "99999"], "'99999' is not a port"),
        (["--port", "-1"], "'-1' is not a port"),
        (["--port", "1e4"], "is not a port"),
        (["--port", "9" * 5000], "is not a port"),
        (["--host", "nosuch.invalid"], "cannot listen on 'nosuch.invalid'"),
        (["--host", "a" * 300], "cannot listen on"),
        (["--host", "203.0.113.7"], "cannot listen on"),
        (["--host", "a\0b"], "cannot listen on"),
    ],
)
def test_an_unavailable_address_is_refused_in_one_sentence(options, says, capsys, monkeypatch):
    monkeypatch.setattr(app, "build", lambda site: None)
    with pytest.raises(SystemExit) as ended:
        app.main(options)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and says in told and "Traceback" not in told and len(told) < 400


def test_a_port_in_use_is_refused_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(app, "build", lambda site: None)
    with socket.socket() as taken, pytest.raises(SystemExit):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        app.main(["--port", str(taken.getsockname()[1])])
    assert "in use" in capsys.readouterr().err


# --- SECURITY.md ---

def test_the_security_page_prints_the_limits_as_they_are():
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \|", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    written = {name: (int(local.replace(",", "")), int(public.replace(",", ""))) for name, local, public in rows}
    local, strangers = asdict(Rules()) | asdict(LOCAL), asdict(STRANGERS) | asdict(PUBLIC)
    names = [field.name for field in fields(RequestLimits)] + ["characters", "tokens", "repeats", "answers"]
    assert written == {name: (local[name], strangers[name]) for name in names}


def test_values_in_sentences_are_truncated_and_escaped():
    shown = [
        quoted(value) for value in ("\ud800" * 10**6, 10**10_000, [1] * 10**6, float("nan"), {"a": 1}, None, "short")
    ]
    assert all(len(each) < 400 and each.encode() for each in shown) and shown[-1] == "'short'"
    assert request_limits.in_range(1, 0, 1) and not request_limits.in_range(10**400, 0, 1.0)


def test_every_example_and_lesson_keeps_the_limits_of_a_public_page():
    for example in gallery.examples():
        Settings.read(example).check(replace(STRANGERS, tokens=LONGEST_EXAMPLE, programs=True))
    for lesson in lessons.lessons().values():
        for step in range(len(lesson.steps)):
            lessons.settings_of(lesson.name, step).check(replace(STRANGERS, programs=True))


def test_knobs_of_every_type_are_taken():
    knobs = {"prune": False, "longest": 40, "score": "mean", "share": 0.5}
    Settings(
        "Hello",
        lanes=[
            {
                "strategy": "exact_extract",
                "knobs": knobs,
                "extras": [["top_p", {"p": 0.9}]],
                "forced": [1, 2],
                "seed": 3,
            }
        ],
    ).check(STRANGERS)


# --- model folders ---

def edited(**changes):
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return edit


def many_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(100_000)}})
    )


def long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{")


ABSURD = {
    "ten million layers": edited(num_hidden_layers=10**7),
    "a layer for every integer": edited(num_hidden_layers=10**18),
    "a wide network": edited(hidden_size=2**17, intermediate_size=2**30),
    "a large vocabulary": edited(vocab_size=2**36),
    "layers in a text": edited(num_hidden_layers="many"),
    "no heads": edited(num_attention_heads=0),
    "a billion labels": edited(num_labels=10**9),
    "experts": edited(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=10**8),
    "a list in place of an object": lambda folder: (folder / "config.json").write_text("[]"),
    "ten million brackets": lambda folder: (folder / "config.json").write_text("[" * 10_000_000),
    "deep brackets": lambda folder: (folder / "config.json").write_text('{"a": ' + "[" * 100_000),
    "a hundred thousand shards": many_shards,
    "a long header": long_header,
    "an index that is a list": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors.index.json").write_text("[]"),
    ),
    "a header that is a list": lambda folder: (folder / "model.safetensors").write_bytes(
        (2).to_bytes(8, "little") + b"[]"
    ),
}


@pytest.fixture
def addresses():
    """4 GiB of address space beyond the current use: larger allocations fail without affecting the machine."""
    from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit, setrlimit
    before = getrlimit(RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    setrlimit(RLIMIT_AS, (pages * 4096 + (4 << 30), before[1] if before[1] != RLIM_INFINITY else RLIM_INFINITY))
    yield
    setrlimit(RLIMIT_AS, before)


@pytest.mark.parametrize("broken", ABSURD)
def test_an_absurd_model_is_refused_before_it_is_built(broken, tmp_path, addresses):
    save(tmp_path / "model")
    ABSURD[broken](tmp_path / "model")
    start, before = process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(Refusal) as refused:
        load(str(tmp_path / "model"), Loading("cpu"))
    assert str(refused.value).endswith(".") and "memory" not in str(refused.value)
    assert process_time() - start < 10 and getrusage(RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


# --- the worker's steps, over requests that keep every limit ---

WORDS = " ".join(f"red{number}" for number in range(2000))[:9900]
HEAVY = {
    "gencls_ppl": {"strategy": "gencls_ppl", "knobs": {"labels": "|".join(f"ab{number}" for number in range(1500))}},
    "caad": {"strategy": "greedy", "extras": [["caad", {"pairs": "a => b c d\n" * 800}]]},
    "caad, one answer": {"strategy": "greedy", "extras": [["caad", {"pairs": f"a => {WORDS}"}]]},
    "exact_extract": {"strategy": "exact_extract", "knobs": {"passage": WORDS[:900], "prune": False, "longest": 40}},
    "exact_extract, long": {"strategy": "exact_extract", "knobs": {"passage": WORDS}},
    "static": {
        "strategy": "static",
        "knobs": {"items": "|".join(f"ab{number}" for number in range(1000, 2400)), "beams": 64},
    },
    "superposed": {"strategy": "superposed", "knobs": {"corpus": WORDS, "drafts": 10, "kept": 60}},
    "knn_lm": {"strategy": "greedy", "extras": [["knn_lm", {"text": WORDS}]]},
    "rasd": {"strategy": "speculative", "extras": [["rasd", {"corpus": WORDS}]]},
    "rest": {"strategy": "speculative", "extras": [["rest", {}]]},
    "rest, one letter": {"strategy": "speculative", "extras": [["rest", {"corpus": "e" * 9900, "shortest": 1}]]},
    "mbr": {"strategy": "mbr"},
    "dry": {"strategy": "greedy", "extras": [["dry", {"breakers": WORDS}]]},
}
TOO_MUCH = {
    "gencls_ppl": "the maximum is 512",
    "exact_extract": "8,192 spans",
    "caad": "the maximum is 64",
    "caad, one answer": "the maximum for all of them is 512",
    "exact_extract, long": "the maximum is 1,024",
}


@pytest.mark.parametrize("heavy", HEAVY)
def test_no_request_within_the_limits_holds_the_worker_for_two_seconds(public, heavy):
    import playground
    from playground.decoding.visitor_memory import Memory
    from playground.ui.site import _prepare
    settings = Settings("The red fox", length=60, lanes=[{"knobs": {}, "extras": [], "forced": []} | HEAVY[heavy]])
    settings.check(STRANGERS)
    session = _prepare(playground.load(MODELS["target"], MODELS["draft"]), settings, Memory())
    told = []
    for _ in range(150):
        start = thread_time()
        told += session.advance()
        assert thread_time() - start < 2
    messages = [stamped.event.message for stamped in told if isinstance(stamped.event, Failed)]
    assert [TOO_MUCH[heavy] in message for message in messages] == ([True] if heavy in TOO_MUCH else [])


def test_unknown_token_ids_end_one_lane_with_a_sentence(public):
    import playground
    from playground.contract.lane_config import LaneConfig

    results = playground.compare(
        [LaneConfig("greedy", forced=[200_000]), LaneConfig("greedy", forced=[1] * 9), LaneConfig("greedy")],
        "The red fox",
        models=playground.load(MODELS["target"]),
        max_new_tokens=8,
    )
    assert "has 319 tokens" in results[0].message and "9 fixed tokens" in results[1].message and not results[2].message


# --- a full disk ---

def test_a_full_disk_is_reported_in_a_sentence():
    from playground.cli.input_files import write_text
    from playground.events import Header
    from playground.trace import Trace
    for write in (lambda: write_text("/dev/full", "x"), lambda: Trace([Header()], []).save("/dev/full")):
        with pytest.raises(Refusal, match="No space left"):
            write()
    told = subprocess.run(
        [sys.executable, "-m", "playground", "list"],
        cwd=ROOT,
        stdout=open("/dev/full", "w"),
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    assert told.returncode == 2 and "No space left" in told.stderr and "Traceback" not in told.stderr


# --- programs of models ---

def test_a_page_that_runs_no_programs_names_the_strategy_as_its_menu_does():
    asked = Settings(prompt="a", lanes=[{"strategy": "pg_td", "knobs": {"tests": "work([]) == 0"}}])
    with pytest.raises(Refusal, match="^Planning-guided decoding runs programs written by a model, and this page"):
        asked.check(Rules.for_visitors())
