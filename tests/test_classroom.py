"""A class: who gets in, what followers see and may do, and what the presenter sees."""
from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import time
from dataclasses import replace

import pytest
import segno
from counting import Counting
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from playground.asset_files import ASSETS
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.trace import Trace
from playground.ui import start
from playground.ui.classroom import classroom as module
from playground.ui.classroom.classroom import Classroom, Follower
from playground.ui.classroom.classroom_routes import FOLLOWER, guard_of, routes_of
from playground.ui.classroom.join_attempts import PERIOD, JoinAttempts, Pace
from playground.ui.play.lessons import lessons
from playground.ui.server import frame_log
from playground.ui.server.frame_log import FrameLog
from playground.ui.server.site import Site
from playground.ui.server.worker import Worker

FIRST_VIEW = ASSETS / "traces" / "first_view.jsonl"
SAMPLING = lessons()["temperature"]
STEP = next(i for i, step in enumerate(SAMPLING.steps) if step.question and step.question.choices)


@pytest.fixture
def classroom() -> Classroom:
    return Classroom()


@pytest.fixture
def open_site(classroom):
    """Makes clients of a site with one page, "/", behind the guard of the class."""
    async def page(request) -> PlainTextResponse:
        return PlainTextResponse("the page")

    site = Starlette(routes=[Route("/", page, methods=["GET", "POST"]), *routes_of(classroom)],
                     middleware=[guard_of(classroom)])
    return lambda: TestClient(site, follow_redirects=False)


def joined(classroom: Classroom, name: str = "", address: str = "10.0.0.2") -> str:
    return classroom.join(classroom.code, name, address)


def read(part: bytes) -> list[tuple[str, dict]]:
    """The (event, data) pairs of server-sent events."""
    lines = [block.split("\n") for block in part.decode().split("\n\n") if block and not block.startswith(":")]
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for *_, event, data in lines]


# --- who gets in ---

QUICK = Pace(tries=3, wait=0.15, all_tries=20, turn=0.02, waiting=4, all_waiting=12)


def try_code(classroom, code: str, address: str) -> float:
    """Seconds until a code was tried; raises Refusal if it is wrong."""
    async def tried() -> float:
        begun = time.monotonic()
        await classroom.attempts.turn(address)
        waited = time.monotonic() - begun
        classroom.join(code, "", address)
        return waited
    return asyncio.run(tried())


def test_wrong_codes_make_the_next_ones_of_their_address_wait_and_the_right_one_enters(classroom):
    classroom.attempts = JoinAttempts(QUICK)
    for _ in range(QUICK.tries):
        with pytest.raises(Refusal, match="not the code"):
            try_code(classroom, "000", "10.0.0.9")
    assert try_code(classroom, classroom.code, "10.0.0.9") >= QUICK.wait
    assert try_code(classroom, classroom.code, "10.0.0.10") < QUICK.wait


async def guess(classroom, code: str, address: str, ended: list[str]) -> None:
    try:
        await classroom.attempts.turn(address)
        classroom.join(code, "", address)
        ended.append("in")
    except Refusal as refusal:
        ended.append(str(refusal))


def test_a_right_code_passes_those_who_guess_from_many_addresses(classroom):
    """Sixty wrong codes from the addresses of one machine locked the class."""
    classroom.attempts = JoinAttempts(QUICK)
    for number in range(60):
        classroom.attempts.add_wrong(f"10.0.1.{number}")

    async def class_under_attack() -> list[str]:
        guesses, mine = [], []
        for number in range(60):
            guesses.append(asyncio.create_task(guess(classroom, "000", f"10.0.1.{number}", [])))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(guess(classroom, classroom.code, "10.0.0.2", mine), 1)
        for task in guesses:
            task.cancel()
        return mine

    assert asyncio.run(class_under_attack()) == ["in"]


def test_guesses_from_many_addresses_take_turns(classroom):
    classroom.attempts = JoinAttempts(QUICK)
    for number in range(QUICK.all_tries):
        classroom.attempts.add_wrong(f"10.0.1.{number}")

    async def guesses() -> int:
        ended: list[str] = []
        tasks = [asyncio.create_task(guess(classroom, "000", f"10.0.2.{number}", ended)) for number in range(12)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        return len(ended)

    assert asyncio.run(guesses()) <= 1 + 0.1 / QUICK.turn


def test_one_address_has_few_codes_waiting(classroom):
    classroom.attempts = JoinAttempts(replace(QUICK, wait=30))

    async def guesses() -> list[str]:
        ended: list[str] = []
        tasks = [asyncio.create_task(guess(classroom, "000", "10.0.0.9", ended)) for _ in range(50)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        return ended

    ended = asyncio.run(guesses())
    assert sum("too many attempts" in one for one in ended) >= 50 - QUICK.waiting and "in" not in ended


def test_after_a_minute_wrong_codes_are_forgotten(classroom, monkeypatch):
    classroom.attempts = JoinAttempts(replace(QUICK, wait=30))
    for _ in range(60):
        classroom.attempts.add_wrong("10.0.0.9")
    now = time.monotonic()
    monkeypatch.setattr("playground.ui.classroom.join_attempts.monotonic", lambda: now + PERIOD + 1)
    assert try_code(classroom, classroom.code, "10.0.0.9") < 5


@pytest.mark.parametrize("given, shown", [
    ("\u202eevil\u202c name", "evil name"), ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
    ("a\x00b\x1b[31mc", "a b [31mc"), ("x" * 10**6, "x" * 40), ("\u200b\u2060", "Follower 1"), ("\n", "Follower 1"),
    ("\u3164\u2800 \uffa0", "Follower 1"), ("\ufe0f", "Follower 1"),
    ("Z" + "\u0300" * 500 + "o", "Z" + "\u0300" * 3 + "o"), ("हिन्दी", "हिन्दी"),
], ids=["turned", "markup", "control", "long", "hidden", "blank", "blank letters", "a mark alone", "stacked", "Hindi"])
def test_a_name_is_short_and_shows_what_it_is(classroom, given, shown):
    token = joined(classroom, given)
    assert classroom.followers[token].name == shown  # the page writes it as textContent


def test_a_full_class_takes_nobody_until_somebody_has_left(classroom):
    tokens = [joined(classroom) for _ in range(module.FOLLOWERS)]
    with pytest.raises(Refusal, match="full"):
        joined(classroom)
    classroom.followers[tokens[0]].seen -= module.AWAY + 1
    assert joined(classroom) and tokens[0] not in classroom.followers


def test_a_code_may_be_written_with_a_space_and_a_name_is_shortened(classroom):
    token = classroom.join(f" {classroom.code[:3]} {classroom.code[3:]}", "  Ada \n Lovelace " + "x" * 99, "10.0.0.2")
    assert classroom.followers[token].name == ("Ada Lovelace " + "x" * 99)[:module.NAME]
    assert classroom.followers[joined(classroom)].name == "Follower 2"


def test_only_the_presenter_and_the_follower_with_the_controls_reach_the_page(open_site, classroom):
    stranger, presenter, follower = open_site(), open_site(), open_site()
    assert stranger.get("/").headers["location"] == "/classroom" and stranger.post("/").status_code == 403
    assert presenter.get("/classroom/present?key=wrong").status_code == 403
    presenter.get(f"/classroom/present?key={classroom.key}")
    assert presenter.get("/").text == "the page"
    refused = follower.post("/classroom/join", json={"code": "1"})
    assert refused.status_code == 403 and "not the code" in refused.json()["detail"]
    assert follower.post("/classroom/join", json={"code": classroom.code, "name": "Ada"}).status_code == 200
    assert follower.get("/").status_code == 303
    for act in ("question", "answer", "control"):
        assert follower.post(f"/classroom/{act}", json={}).status_code == 403
    assert presenter.post("/classroom/control", json={"follower": 1}).status_code == 200
    assert follower.get("/").text == "the page" and follower.get("/classroom/state").json() == {"controls": True}
    presenter.post("/classroom/control", json={"follower": None})
    assert follower.get("/").status_code == 303 and follower.get("/classroom/state").status_code == 403


def test_bodies_that_are_no_requests_are_refused_in_sentences(open_site, classroom):
    client = open_site()
    for body in (b"", b"[]", b"\xff", b"[" * 5000, b'{"code": {"a": 1}}', b'{"code": "\\ud800"}'):
        answer = client.post("/classroom/join", content=body)
        assert answer.status_code in (403, 429) and answer.json()["detail"].endswith(".")
    assert client.get("/classroom/stream").status_code == 403


def test_a_public_page_and_one_behind_a_proxy_have_no_class(monkeypatch):
    monkeypatch.setenv("PLAYGROUND_PROXIES", "1")
    for site in (Site(load=None), Site(load=None, rules=Rules.for_visitors())):
        with pytest.raises(Refusal, match="local network"):
            start.opened_class(site)


def test_the_invitation_has_a_link_for_the_class_and_one_for_the_presenter(classroom):
    lines = start.invitation(classroom, "0.0.0.0", 7860).splitlines()
    assert classroom.key in lines[0] and classroom.key not in "".join(lines[1:])
    assert lines[1].endswith(":7860/classroom") and lines[2].split("  ")[1].replace(" ", "") == classroom.code


# --- what followers see ---

async def parts_until_done(classroom: Classroom, token: str) -> list[tuple[str, dict]]:
    seen = []
    async for part in classroom.stream(token):
        seen += read(part)
        if any(event == "frame" and data["state"] == "done" for event, data in seen):
            return seen


def test_every_follower_gets_the_same_frames_from_the_first_on_a_late_one_too(classroom):
    """The frames of the presenter's own page are not disturbed: it gets every event as well."""
    run = Worker().take(Counting([], length=40, forward=0.002))
    own = [event for frame in run.frames() if frame for event in frame["events"]]
    classroom.show(run)

    async def follow() -> list:
        return await asyncio.gather(*(parts_until_done(classroom, joined(classroom)) for _ in range(3)))

    early = asyncio.run(follow())
    late = asyncio.run(parts_until_done(classroom, joined(classroom)))
    for seen in (*early, late):
        frames = [data for event, data in seen if event == "frame"]
        assert [event for frame in frames for event in frame["events"]] == own
        assert frames[0]["headers"] == run.headers and [frame["n"] for frame in frames] == [*range(len(frames))]


def test_a_new_run_replaces_the_old_one(classroom):
    worker = Worker()
    first, second = (worker.take(Counting([], length=length, forward=0.002)) for length in (10**9, 5))

    async def follow() -> list:
        token = joined(classroom)
        stream, seen = classroom.stream(token), []
        classroom.show(first)
        while not any(event == "frame" for event, _ in seen):
            seen += read(await anext(stream))
        classroom.show(second)
        while not any(data.get("run") == second.name and data["state"] == "done" for _, data in seen):
            seen += read(await anext(stream))
        await stream.aclose()
        return [data["run"] for event, data in seen if event == "frame"]

    runs = asyncio.run(follow())
    first.stop()
    assert runs == sorted(runs, key=[first.name, second.name].index)


def test_a_run_that_is_too_long_to_follow_is_cut_off(monkeypatch):
    monkeypatch.setattr(frame_log, "MOST_BYTES", 100)
    log = FrameLog()
    assert log.add({"a": 1}) and not log.add({"a": "x" * 100}) and len(log.frames) == 1


# --- trace files ---

def opened(trace: Trace) -> str:
    """A trace file as the presenter's page sends it."""
    whole = {"headers": trace.to_json()["lanes"], "events": trace.to_json()["events"]}
    return base64.b64encode(gzip.compress(json.dumps(whole).encode())).decode()


def test_a_trace_that_the_presenter_opens_reaches_every_follower_and_late_ones_too(open_site, classroom):
    presenter, trace = open_site(), Trace.load(FIRST_VIEW)
    presenter.get(f"/classroom/present?key={classroom.key}")
    assert presenter.post("/classroom/trace", json={"kept": opened(trace)}).status_code == 200

    async def follow() -> list:
        return await asyncio.gather(*(parts_until_done(classroom, joined(classroom)) for _ in range(2)))

    for seen in asyncio.run(follow()):
        [shown] = [data for event, data in seen if event == "frame"]
        assert shown["fromFile"] and shown["recorded"]
        sent = json.loads(json.dumps(trace.to_json()))
        assert shown["events"] == sent["events"] and shown["headers"] == sent["lanes"]


def test_only_whoever_may_run_shows_a_trace_and_one_that_cannot_be_read_is_refused(open_site, classroom):
    follower, presenter = open_site(), open_site()
    follower.post("/classroom/join", json={"code": classroom.code})
    assert follower.post("/classroom/trace", json={"kept": opened(Trace.load(FIRST_VIEW))}).status_code == 403
    presenter.get(f"/classroom/present?key={classroom.key}")
    answer = presenter.post("/classroom/trace", json={"kept": "x"})
    assert answer.status_code == 400 and "cannot be read" in answer.json()["detail"]
    assert classroom.log.frames == []


# --- predictions ---

def test_votes_are_counted_once_each_may_change_and_do_not_show_the_answer(classroom):
    tokens = [joined(classroom, address=f"10.0.0.{i}") for i in range(3)]
    classroom.ask("temperature", STEP)
    seen = classroom._seen_by(tokens[0])["question"]
    question = SAMPLING.steps[STEP].question
    assert seen["choices"] == [text for text, *_ in question.choices] and question.because not in json.dumps(seen)
    for token, choice in zip(tokens, (0, 1, 1)):
        classroom.vote(token, seen["id"], choice)
    classroom.vote(tokens[0], seen["id"], 1)
    assert [bar["count"] for bar in classroom.votes()][:2] == [0, 3]
    classroom.ask("temperature", STEP)  # the presenter looks at the same step again
    assert [bar["count"] for bar in classroom.votes()][:2] == [0, 3]
    classroom.ask("entropy", 0)
    with pytest.raises(Refusal, match="over"):
        classroom.vote(tokens[0], seen["id"], 1)


def test_votes_reach_followers_who_voted_when_the_presenter_looks_and_all_with_the_answer(classroom):
    voted, silent = joined(classroom), joined(classroom)
    classroom.ask("temperature", STEP)
    asked, before = f"temperature {STEP}", classroom._version
    classroom.vote(voted, asked, 1)
    assert classroom._version == before, "votes alone send nothing"
    classroom.state()
    classroom.state()
    assert classroom._version == before + 1
    counts = [[bar["count"] for bar in classroom._seen_by(token)["votes"]] for token in (voted, silent)]
    assert counts == [[0, 1, 0], []] and classroom._seen_by(voted)["answer"] is None
    classroom.reveal(asked, 2, 7.0, "changed tokens: 7")
    seen = classroom._seen_by(silent)
    because = SAMPLING.steps[STEP].question.because
    assert seen["answer"] == {"choice": 2, "value": 7.0, "said": "changed tokens: 7", "because": because}
    assert [bar["count"] for bar in seen["votes"]] == [0, 1, 0]
    classroom.ask("entropy", 0)
    assert classroom._seen_by(silent)["answer"] is None


@pytest.mark.parametrize("choice, value", [(99, 1.0), (-1, 1.0), (True, 1.0), ("0", 1.0), (0, "7"), (0, float("inf"))])
def test_what_answers_no_question_is_not_sent_to_the_class(classroom, choice, value):
    with pytest.raises(Refusal, match="over"):
        classroom.reveal(f"temperature {STEP}", 0, 1.0, "")
    classroom.ask("temperature", STEP)
    with pytest.raises(Refusal, match="question"):
        classroom.reveal(f"temperature {STEP}", choice, value, "")
    classroom.reveal(f"temperature {STEP}", None, None, "x\u202e" * 10**6)
    assert classroom.answer.said == ("x " * module.SAID)[:module.SAID].strip()


def test_the_qr_code_of_the_presenters_slide_joins_the_class_with_its_code(open_site, classroom):
    classroom.link = "http://192.168.1.20:7860/classroom"
    stranger, presenter = open_site(), open_site()
    assert stranger.get("/classroom/qr").status_code == 403
    presenter.get(f"/classroom/present?key={classroom.key}")
    image = presenter.get("/classroom/qr")
    assert image.headers["content-type"] == "image/svg+xml"
    drawn = segno.make_qr(f"{classroom.link}#{classroom.code}").svg_inline(omitsize=True, dark="#000", light="#fff")
    assert re.findall(r' d="([^"]+)"', image.text) == re.findall(r' d="([^"]+)"', drawn)


@pytest.mark.parametrize("value", [-1, 99, 1.0, True, "0", None, [0], float("nan")])
def test_what_is_no_answer_is_refused(classroom, value):
    token = joined(classroom)
    classroom.ask("temperature", STEP)
    with pytest.raises(Refusal, match="not an answer"):
        classroom.vote(token, f"temperature {STEP}", value)


@pytest.mark.parametrize("lesson, step", [("none", 0), ("temperature", 99), ("temperature", -1), ("temperature", "0")])
def test_an_unknown_step_is_refused(classroom, lesson, step):
    with pytest.raises(Refusal, match="no such step"):
        classroom.ask(lesson, step)


def test_numbers_are_grouped_and_bounded_in_their_bars(classroom):
    question = SAMPLING.steps[STEP].question
    classroom.question = ("temperature", 0, replace(question, choices=[], guess="a number"))
    for i in range(20):
        classroom.followers[str(i)] = Follower(i, "", vote=float(max(i, 5)))
    bars = classroom.votes()
    assert len(bars) == module.BARS and bars[0] == {"label": "5", "count": 6}


def test_a_vote_over_http_needs_a_follower(open_site, classroom):
    client = open_site()
    assert client.post("/classroom/vote", json={"id": "", "value": 0}).status_code == 403
    client.post("/classroom/join", json={"code": classroom.code})
    assert client.post("/classroom/vote", json={"id": "", "value": 0}).json() == {"detail": "This question is over."}
    assert client.cookies[FOLLOWER] in classroom.followers
