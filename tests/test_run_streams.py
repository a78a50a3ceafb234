"""The stream of a run's frames: what it brings, after a lost connection too, who may read it, and its limits."""
from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator

import gradio as gr
import pytest
from counting import Counting, counting_site
from starlette.applications import Starlette
from starlette.testclient import TestClient

from playground.player.frames import frame, new_name
from playground.ui.classroom.classroom import Classroom
from playground.ui.classroom.classroom_routes import guard_of, routes_of
from playground.ui.play.kept_runs import LONGEST_NAME
from playground.ui.play.live_handlers import LiveHandlers
from playground.ui.server import frame_log, run_streams
from playground.ui.server.frame_log import EventStream
from playground.ui.server.run_streams import RunStream, RunStreams, stream_route
from playground.ui.server.site import Site
from playground.ui.server.worker import Worker
from playground.ui.server.zero_gpu import RemoteRun, batches
from support.visits import stream as visit_stream


def frames_of(parts: list[bytes]) -> list[dict]:
    """The frames in pieces of a stream."""
    return [json.loads(data) for data in re.findall(rb"^event: frame\ndata: (.*)$", b"".join(parts), re.MULTILINE)]


def last_id(part: bytes) -> int:
    return int(re.findall(rb"^id: (\d+)$", part, re.MULTILINE)[-1])


async def some(events: AsyncIterator[bytes], pieces: int) -> list[bytes]:
    """So many pieces with frames; then the connection is lost."""
    taken = []
    async for part in events:
        taken += [part] if b"event: frame" in part else []
        if len(taken) == pieces:
            break
    await events.aclose()
    return taken


async def rest(events: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in events]


def test_a_stream_brings_the_frames_of_a_run_as_they_are_made_and_ends_with_it():
    run = Worker().take(Counting([], length=60, forward=0.005))
    stream, own = RunStream(), []

    def carry() -> None:
        for news in filter(None, run.frames()):
            own.append(news)
            stream.carry(news)
        stream.end()

    async def read_along() -> list[bytes]:
        reading, _ = await asyncio.gather(rest(stream.events(0)), asyncio.to_thread(carry))
        return reading

    parts = asyncio.run(read_along())
    assert frames_of(parts) == own and own[-1]["state"] == "done"
    assert len(parts) > 3, "not all in one piece at the end"


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_connection_that_breaks_goes_on_after_the_last_frame_that_has_arrived(monkeypatch, pieces):
    monkeypatch.setattr(frame_log, "AT_ONCE", 2)
    stream, frames = RunStream(), [frame("a", n, [{"seq": n}], "running") for n in range(9)]
    for news in frames:
        stream.carry(news)
    before = asyncio.run(some(stream.events(0), pieces))
    stream.end()
    after = asyncio.run(rest(stream.events(last_id(before[-1]) + 1)))
    assert frames_of(before) == frames[:2 * pieces], "only a part had arrived"
    assert frames_of(before) + frames_of(after) == frames
    assert stream.readers == 0


def left_to_the_stream(stream: RunStream, numbers: Iterable[int]) -> list[int]:
    """The frames of these numbers that Gradio does not bring."""
    return [n for n in numbers if stream.carry(frame("a", n, [], "running"))]


def test_gradio_brings_the_first_frames_and_the_last_and_leaves_the_others_to_a_stream_that_is_heard():
    stream = RunStream()
    stream.heard = True
    assert not stream.carry(frame("a", 0, [], "done"))
    assert left_to_the_stream(stream, range(1, 9)) == [*range(1, 9)]


def test_gradio_waits_a_while_for_the_page_to_report_whether_it_gets_the_stream(monkeypatch):
    stream = RunStream()
    assert left_to_the_stream(stream, range(9)) == [*range(run_streams.FIRST, 9)]
    monkeypatch.setattr(run_streams, "PATIENCE", 0.0)
    assert left_to_the_stream(stream, range(9, 12)) == [], "it has reported nothing"


def test_gradio_brings_every_frame_to_a_page_that_gets_no_stream():
    stream = RunStream()
    stream.heard = False
    assert left_to_the_stream(stream, range(9)) == []


def test_a_run_that_is_too_long_for_its_stream_is_brought_by_gradio(monkeypatch):
    monkeypatch.setattr(frame_log, "MOST_BYTES", 400)
    stream = RunStream()
    stream.heard = True
    long = [stream.carry(frame("a", n, [{"x": "y" * 100}], "running")) for n in range(4)]
    assert long[0] and not any(long[2:]) and stream.log.size - len(b"".join(stream.log.frames)) > 0


def test_one_connection_has_a_limit_of_time_and_the_next_goes_on(monkeypatch):
    monkeypatch.setattr(run_streams, "LIFETIME", 0.0)
    stream = RunStream()
    stream.carry(frame("a", 0, [], "running"))
    assert asyncio.run(rest(stream.events(0))) == [run_streams.RETRY]
    monkeypatch.setattr(run_streams, "LIFETIME", 60.0)
    assert frames_of(asyncio.run(some(stream.events(0), 1)))[0]["n"] == 0


def test_a_slow_reader_is_sent_what_it_lacks_in_pieces(monkeypatch):
    monkeypatch.setattr(frame_log, "AT_ONCE", 3)
    stream, frames = RunStream(), [frame("a", n, [], "running") for n in range(10)]
    for news in frames:
        stream.carry(news)
    stream.end()
    parts = asyncio.run(rest(stream.events(0)))
    assert [len(frames_of([part])) for part in parts if part != run_streams.RETRY] == [3, 3, 3, 1]


def test_a_connection_whose_client_takes_nothing_is_closed():
    stream = RunStream()
    stream.carry(frame("a", 0, [], "running"))

    async def answer() -> None:
        await EventStream(stream.events(0), 0.05)({"type": "http"}, never, never)

    asyncio.run(asyncio.wait_for(answer(), 10))


async def never(*_) -> None:
    await asyncio.Event().wait()


def test_numbers_that_json_lacks_do_not_break_a_stream():
    stream = RunStream()
    stream.carry(frame("a", 0, [{"p": float("nan")}], "running"))
    assert frames_of(stream.log.frames)[0]["events"] == [{"p": None}]


# --- the event of a run ---

def counting(*_) -> Counting:
    return Counting([], length=100, forward=0.01)


def on_a_borrowed_gpu(*_) -> RemoteRun:
    return RemoteRun(batches(counting()))


@pytest.fixture(params=["worker", "borrowed GPU"])
def site(request) -> Site:
    site = counting_site(counting)
    if request.param == "borrowed GPU":
        site.runs.start = on_a_borrowed_gpu
    return site


def frames_by_gradio(site: Site) -> Iterator[dict]:
    page, changes = visit_stream(site)
    return (change[page.live] for change in changes if page.live in change)


@pytest.mark.slow
def test_the_event_of_a_run_brings_its_first_frame_and_its_last_and_the_stream_all(site):
    by_gradio = frames_by_gradio(site)
    first = next(by_gradio)
    stream = site.streams.find(first["run"])
    stream.heard = True
    [last] = by_gradio
    assert first["n"] == 0 and first["streamed"] and first["headers"] and last["state"] == "done"
    numbers = [data["n"] for data in frames_of(stream.log.frames)]
    assert numbers == list(range(last["n"] + 1)) and last["n"] > 3


@pytest.mark.slow
def test_without_a_reader_the_event_of_a_run_brings_every_frame(site, monkeypatch):
    monkeypatch.setattr(run_streams, "PATIENCE", 0.0)
    frames = list(frames_by_gradio(site))
    assert [one["n"] for one in frames] == list(range(len(frames))) and frames[-1]["state"] == "done"
    assert [event for one in frames for event in one["events"]] == [
        event for one in frames_of(site.streams.find(frames[0]["run"]).log.frames) for event in one["events"]]


@pytest.mark.slow
def test_a_page_that_has_lost_the_stream_gets_the_run_so_far_and_the_frames_after_it():
    site = counting_site(counting)
    page, changes = visit_stream(site)
    acts = LiveHandlers(site, page)
    states = (change for change in changes if page.visit in change or page.live in change)
    visit = next(states)[page.visit]
    first = next(states)[page.live]
    acts.heard(gr.EventData(None, {"run": first["run"]}))
    assert site.streams.find(first["run"]).heard
    so_far = acts.missed(visit, gr.EventData(None, {"run": first["run"]}))
    after = [change[page.live] for change in states]
    assert so_far["headers"] and "streamed" not in so_far and len(after) > 3
    seqs = {event["seq"] for one in (so_far, *after) for event in one["events"]}
    assert seqs == set(range(1, 101)) and after[0]["n"] <= so_far["n"] + 1


# --- the route ---

@pytest.fixture
def streams() -> RunStreams:
    return RunStreams()


@pytest.fixture
def client(streams) -> TestClient:
    return TestClient(Starlette(routes=[stream_route(streams)]))


def ended(streams: RunStreams, frames: int) -> str:
    """The name of an ended run of so many frames."""
    name = new_name()
    with streams.opened(name) as stream:
        for n in range(frames):
            stream.carry(frame(name, n, [], "done" if n == frames - 1 else "running"))
    return name


@pytest.mark.parametrize("last, numbers", [("", [0, 1, 2]), ("0", [1, 2]), ("1", [2]), ("x", [0, 1, 2]),
                                           ("-1", [0, 1, 2]), ("9" * 5000, [0, 1, 2])])
def test_a_browser_that_connects_again_names_the_last_frame_it_got(streams, client, last, numbers):
    answer = client.get(f"/frames/{ended(streams, 3)}", headers={"Last-Event-ID": last})
    assert [data["n"] for data in frames_of([answer.content])] == numbers
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no" and answer.headers["cache-control"] == "no-store"


def test_a_browser_that_has_every_frame_of_an_ended_run_is_answered_with_no_content(streams, client):
    assert client.get(f"/frames/{ended(streams, 3)}", headers={"Last-Event-ID": "2"}).status_code == 204


def test_a_stranger_cannot_guess_the_name_of_a_run(streams, client):
    name = ended(streams, 1)
    assert len(bytes.fromhex(name)) >= 16 and len(name) <= LONGEST_NAME and name != new_name()
    for guess in (new_name(), name[:-1], name.upper(), "", "..%2f" + name):
        assert client.get(f"/frames/{guess}").status_code == 404


def test_a_run_has_few_readers(streams, client, monkeypatch):
    name = ended(streams, 1)
    streams.find(name).readers = run_streams.READERS
    assert client.get(f"/frames/{name}").status_code == 429
    streams.find(name).readers -= 1
    assert client.get(f"/frames/{name}").status_code == 200


def test_an_ended_run_can_be_read_for_a_while_and_is_then_forgotten(streams, client, monkeypatch):
    name = ended(streams, 1)
    ended(streams, 1)
    assert client.get(f"/frames/{name}").status_code == 200
    now = run_streams.monotonic()
    monkeypatch.setattr(run_streams, "monotonic", lambda: now + run_streams.LINGER + 1)
    ended(streams, 1)
    assert client.get(f"/frames/{name}").status_code == 404


def test_a_follower_of_a_class_cannot_read_the_stream_of_a_run_though_frames_carry_its_name(streams):
    classroom = Classroom()
    site = Starlette(routes=[stream_route(streams), *routes_of(classroom)], middleware=[guard_of(classroom)])
    follower, presenter = TestClient(site), TestClient(site)
    name = ended(streams, 1)
    follower.post("/classroom/join", json={"code": classroom.code})
    assert follower.get(f"/frames/{name}").status_code == 403
    presenter.get(f"/classroom/present?key={classroom.key}", follow_redirects=False)
    assert presenter.get(f"/frames/{name}").status_code == 200
