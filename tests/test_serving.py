"""The service around the runs: worker restarts, /health, graceful shutdown, and no leaks from visitors."""
from __future__ import annotations

import gc
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
from chromium import PATIENCE
from counting import Counting, committed, counting_site
from fastapi import HTTPException

from playground.events import Commit
from playground.request_limits import Rules
from playground.trace import Trace
from playground.ui.guard.sessions import Events, Retention, Sweeper, _check
from playground.ui.server import worker as worker_module
from playground.ui.server.admission_queue import PAGE, STOPPING, Visitor
from playground.ui.server.model_loader import ModelLoad
from playground.ui.server.pages import build
from playground.ui.server.record import Record
from playground.ui.server.serving import health, launch_options
from playground.ui.server.worker import DIED, Worker
from playground.ui.start import freeze_loaded
from support.launched import free_port, launched
from support.visits import request, stream

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROMPT = "Tell me a story about Mia."


class Deadly(Counting):
    """A session that ends the thread which serves it."""

    def advance(self):
        raise SystemExit("no more")


@pytest.fixture
def worker():
    served = Worker()
    yield served
    for run in served.runs():
        run.stop()


# --- which run is served next ---

def advanced(worker, *runs) -> list[int]:
    """Which of these runs is served in each of the next steps, until each has a token."""
    served = []
    while any(run.starting for run in runs):
        run = worker._next()
        run.serve()
        served.append(runs.index(run))
    return served


class Slow(Counting):
    """The first token needs several requests."""

    def advance(self):
        if len(self.log) < 6:
            self.log.append("prefill")
            return []
        return super().advance()


def test_a_run_without_a_token_gets_every_other_step(monkeypatch):
    worker = Worker()
    monkeypatch.setattr(worker, "_notify", lambda: None)  # served here, not by its thread
    old = [worker.take(Counting([], forward=0.0)) for _ in range(4)]
    advanced(worker, *old)
    new = worker.take(Slow([], forward=0.0))
    order = advanced(worker, *old, new)
    assert order.count(4) == 7 and 12 <= len(order) <= 14, "one step in five would be 31 to 35 steps"
    assert {0, 1, 2, 3} <= set(order), "the others go on"


def test_a_run_that_stays_without_a_token_loses_its_priority(monkeypatch):
    worker = Worker()
    monkeypatch.setattr(worker, "_notify", lambda: None)
    monkeypatch.setattr(worker_module, "HEAD_START", 0.0)
    run = worker.take(Slow([]))
    assert not run.starting


# --- a worker that dies ---

@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_is_replaced_its_run_says_so_and_the_others_go_on(worker):
    other = worker.take(Counting([], length=200))
    lost = worker.take(Deadly([]))
    assert list(lost.frames())[-1]["state"] == "done" and lost.error == DIED
    assert committed(other.frames()) == list(range(1, 201))
    assert committed(worker.take(Counting([], length=2)).frames()) == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_thread_vanished_is_replaced(worker, monkeypatch):
    monkeypatch.setattr(Worker, "_work", lambda worker: worker._next())  # the thread ends at once
    lost = worker.take(Counting([]))
    worker._thread.join(PATIENCE)
    monkeypatch.undo()
    assert not worker.health().alive
    assert list(lost.frames())[-1]["state"] == "done" and lost.error == DIED
    assert worker.health().alive and committed(worker.take(Counting([], length=2)).frames()) == [1, 2]


def test_an_endless_step_marks_the_worker_as_stuck(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "STUCK", 0.2)
    run = worker.take(Counting([], forward=PATIENCE))
    begun = time.monotonic()
    while worker.health().ok:
        assert time.monotonic() - begun < PATIENCE / 2
    assert worker.health().step_seconds >= 0.2
    run.fail("enough")


def test_a_slow_step_is_logged_with_its_strategy(worker, monkeypatch, caplog):
    monkeypatch.setattr(worker_module, "SLOW", 0.0)
    caplog.set_level(logging.WARNING, logger=worker_module.__name__)
    session = Counting([], length=1)
    session.headers[0].strategy = "greedy"
    list(worker.take(session).frames())
    list(worker.take(Counting([], length=1)).frames())  # its steps come after the log line of the first run
    assert "one step of greedy took" in caplog.text


# --- held runs are idle ---

@pytest.mark.slow
def test_fifty_held_runs_take_no_processor_time(worker):
    def held():
        run = worker.take(Counting([]))
        run.hold()
        threading.Thread(target=lambda: list(run.frames()), daemon=True).start()
        return run

    runs = [held() for _ in range(50)]
    time.sleep(1.0)  # the first frames were sent
    begun = time.process_time()
    time.sleep(2.0)
    assert time.process_time() - begun < 0.1
    for run in runs:
        run.fail("enough")


# --- storage of runs ---

def test_a_finished_run_releases_its_session_and_keeps_its_events(worker):
    run = worker.take(Counting([], length=300))
    list(run.frames())
    before, trace = list(run.events), run.trace
    run.archive()
    assert run.session is None and run.events == before and run.record.packed_bytes < len(json.dumps(before)) / 5
    assert [stamped.event for stamped in run.trace.events] == [stamped.event for stamped in trace.events]
    assert isinstance(run.trace, Trace) and isinstance(run.trace.events[0].event, Commit)


def test_a_run_whose_visitor_left_is_packed_when_it_ends(worker):
    run = worker.take(Counting([]))
    next(run.frames())
    run.archive()
    run.stop()
    list(run.frames())
    assert run.record.packed_bytes > 0


def test_a_packed_record_can_be_packed_again():
    record = Record([])
    record.events.append({"kind": "commit"})
    record.pack()
    record.pack()
    assert record.events == [{"kind": "commit"}]


# --- storage of visitors ---

def holder(*sessions: str, closed: bool, age: float):
    return SimpleNamespace(
        session_data={name: SimpleNamespace(is_closed=closed) for name in sessions},
        last_used=dict.fromkeys(sessions, time.monotonic() - age),
        time_last_used={},
        lock=threading.Lock(),
        forget=lambda session: None,
    )


def app_with(state, live: tuple[str, ...] = (), unread: dict[str, int] | None = None):
    messages = {name: SimpleNamespace(qsize=lambda count=count: count) for name, count in (unread or {}).items()}
    queue = SimpleNamespace(
        event_ids_to_events={name: SimpleNamespace(session_hash=name, _id=name) for name in live},
        pending_messages_per_session=messages,
        pending_event_ids_session={name: set() for name in state.session_data},
    )
    return SimpleNamespace(state_holder=state, iterators_to_reset={"gone"}, stop_event=threading.Event(),
                           get_blocks=lambda: SimpleNamespace(_queue=queue))


@pytest.mark.parametrize(
    "closed, age, live, kept",
    [
        (True, 61, False, False),
        (True, 30, False, True),
        (False, 61, False, True),
        (False, 3601, False, False),
        (True, 9999, True, True),
    ],
    ids=["left", "left just now", "still open", "idle for an hour", "a run goes on"],
)
def test_sessions_of_visitors_who_left_are_dropped(closed, age, live, kept):
    state = holder("one", closed=closed, age=age)
    app = app_with(state, ("one",) if live else ())
    Sweeper(app, Retention.for_visitors()).sweep()
    assert ("one" in state.session_data, "one" in app.get_blocks()._queue.pending_event_ids_session) == (kept, kept)
    assert not app.iterators_to_reset


def test_unfetched_messages_are_dropped(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("playground.ui.guard.sessions.monotonic", lambda: now[0])
    app = app_with(holder(closed=False, age=0), unread={"never read": 9, "read": 0})
    sweeper, messages = Sweeper(app, Retention()), app.get_blocks()._queue.pending_messages_per_session
    sweeper.sweep()
    assert set(messages) == {"never read", "read"}
    now[0] = 100.0
    sweeper.sweep()
    assert set(messages) == {"read"}


def test_an_address_beyond_its_share_of_requests_is_refused_and_another_is_not():
    events = [SimpleNamespace(request=request("", "1.1.1.1"), session_hash=str(number)) for number in range(40)]
    with pytest.raises(HTTPException) as refused:
        _check(events, Visitor("new", "1.1.1.1"), Events.for_visitors(), 0)
    assert refused.value.status_code == 429 and "40 of your requests are open" in refused.value.detail
    _check(events, Visitor("new", "2.2.2.2"), Events.for_visitors(), 0)


@pytest.mark.slow
def test_visitors_who_leave_do_not_leak_memory():
    """Streams over sessions as large as a real run's; the first hundred fill what is kept anyway."""
    rules = Rules.for_visitors()
    site = counting_site(lambda models, settings, memory: Counting([], length=40, forward=0), rules=rules)

    def come_and_go(visitors: int) -> int:
        for _ in range(visitors):
            page, changes = stream(site)
            list(changes)
        gc.collect()
        return psutil.Process().memory_info().rss

    before = come_and_go(100)
    assert come_and_go(900) < 1.05 * before and site.admission.counts() == {"seated": 0, "waiting": 0, "resting": 0}


def test_what_is_imported_for_the_pages_own_models_is_not_scanned_for_garbage_once_they_are_loaded():
    loading = ModelLoad()
    freezing = threading.Thread(target=freeze_loaded, args=[loading])
    gc.unfreeze()  # what other tests froze
    try:
        freezing.start()
        assert gc.get_freeze_count() == 0, "before they are loaded"
        loading.ended.set()
        freezing.join()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


# --- health ---

@contextmanager
def served(site):
    demo = build(site)
    with launched(demo, **launch_options(site, demo, "127.0.0.1")) as address:
        yield address


def asked(address: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as reason:
        return reason.code, json.load(reason)


@pytest.mark.slow
def test_health_answers_for_the_worker(monkeypatch):
    site = counting_site(lambda models, settings, memory: Counting([]))
    with served(site) as address:
        assert asked(address) == (200, health(site))
        models = site.model_loader.request(site.model_request).result()
        run = site.runs.worker(models).take(Counting([], forward=PATIENCE))
        site.join(PAGE)
        code, described = asked(address)
        assert (
            code == 200
            and described["seated"] == 1
            and described["models"] == ["counter"]
            and [one["runs"] for one in described["workers"].values()] == [1]
        )
        monkeypatch.setattr(worker_module, "STUCK", 0.0)
        assert asked(address)[0] == 503
        run.fail("enough")


def test_health_says_when_the_server_stops():
    site = counting_site(lambda models, settings, memory: Counting([]))
    site.drain()
    assert health(site)["stopping"] and not health(site)["ok"]


def test_docker_asks_for_the_workers_health():
    with open(os.path.join(ROOT, "Dockerfile"), encoding="utf-8") as file:
        assert "/health" in file.read().partition("HEALTHCHECK")[2]


# --- signals ---

@contextmanager
def app_running(folder, places: dict[str, str] | None = None, prefix: Sequence[str] = (), **process):
    """The app with its bundled models, some of its environment replaced: the process and its address."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    with open(folder / "log", "w") as log:
        app = subprocess.Popen(
            [*prefix, sys.executable, "app.py", "--port", str(port)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(places or {})},
            **process,
        )
    try:
        wait_until_loaded(f"http://127.0.0.1:{port}", app)
        yield app, f"http://127.0.0.1:{port}"
    finally:
        app.kill()
        app.wait(PATIENCE)


def wait_until_loaded(address: str, app: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and app.poll() is None:
        try:
            if asked(address)[1]["models"]:
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise AssertionError("the app did not load its models")


def run_until_the_end(address: str, begun: threading.Event, heard: list[str], length: int = 2000) -> None:
    """A run of the API, read as it comes."""
    body = json.dumps({"prompt": PROMPT, "lanes": [{"strategy": "sample"}] * 4, "length": length}).encode()
    call = urllib.request.Request(f"{address}/gradio_api/call/v2/run", body, {"Content-Type": "application/json"})
    event = json.load(urllib.request.urlopen(call, timeout=PATIENCE))["event_id"]
    with urllib.request.urlopen(f"{address}/gradio_api/call/v2/run/{event}", timeout=PATIENCE) as frames:
        for line in frames:
            heard.append(line.decode())
            if "commit" in heard[-1]:
                begun.set()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_runs_with_a_sentence_and_the_process_with_zero(tmp_path, number):
    with app_running(tmp_path) as (app, address):
        begun, heard = threading.Event(), []
        client = threading.Thread(target=run_until_the_end, args=(address, begun, heard), daemon=True)
        client.start()
        assert begun.wait(PATIENCE)
        asked_at = time.monotonic()
        app.send_signal(number)
        assert app.wait(10) == 0 and time.monotonic() - asked_at < 6
        client.join(PATIENCE)
        assert STOPPING in "".join(heard[-6:])


@pytest.mark.slow
def test_a_second_signal_ends_the_process_even_if_both_arrive_together(tmp_path):
    with app_running(tmp_path) as (app, address):
        begun, heard = threading.Event(), []
        threading.Thread(target=run_until_the_end, args=(address, begun, heard), daemon=True).start()
        assert begun.wait(PATIENCE)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            app.send_signal(number)
        assert app.wait(PATIENCE) in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # not 0, which ends an orderly stop


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads which libraries a process has loaded")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_page_starts_ends_it_with_a_sentence_and_zero(number):
    app = subprocess.Popen([sys.executable, "app.py", "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    with open(f"/proc/{app.pid}/maps") as libraries:
        while "libtorch" not in libraries.read() and time.monotonic() < deadline:
            libraries.seek(0)
            time.sleep(0.02)
    app.send_signal(number)
    said, _ = app.communicate(timeout=PATIENCE)
    assert (app.returncode, said) == (0, "Stopped before the page had started.\n")


# --- a machine that lacks something ---

READ_ONLY = 'for place in "$HOME" /dev/shm; do mount -t tmpfs -o ro none "$place" || exit; done; exec "$@"'
CONFINED = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh")


def can_mount() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*CONFINED, "true"], capture_output=True).returncode


@pytest.mark.slow
def test_two_pages_in_one_home_one_with_few_descriptors_one_that_cannot_write_there_end_their_runs(tmp_path):
    """For the second, home and /dev/shm are read-only; it has no home at all where no file system may be mounted."""
    (tmp_path / "home").mkdir()
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    home = {"HOME": str(tmp_path / "home")}
    prefix, elsewhere = (CONFINED, home) if can_mount() else ((), {"HOME": "/dev/null/none"})
    with (app_running(tmp_path / "one", home, preexec_fn=few) as one,
          app_running(tmp_path / "two", elsewhere, prefix) as two):
        for _, address in (one, two):
            heard: list[str] = []
            run_until_the_end(address, threading.Event(), heard, length=4)
            assert "event: complete" in "".join(heard)
        for app, _ in (one, two):
            app.send_signal(signal.SIGTERM)
            assert app.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not enforce the limit")
def test_a_page_that_has_no_memory_to_start_says_so_and_ends_with_two():
    little = partial(resource.setrlimit, resource.RLIMIT_AS, (300 << 20, 300 << 20))
    done = subprocess.run([sys.executable, "app.py"], cwd=ROOT, preexec_fn=little, capture_output=True, text=True,
                          timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: The page cannot start") and done.stderr.count("\n") == 1
