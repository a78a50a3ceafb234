"""The wall clock of a machine may be set in the middle of a run: no visitor loses a session, a file or a turn by it."""
from __future__ import annotations

import ast
import re
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from playground.ui.guard.sessions import Retention, Sweeper
from playground.ui.guard.uploads import PREFIX, StoredFiles
from playground.ui.guard.visitor_sessions import VisitorSessions
from playground.ui.server.admission_queue import AdmissionQueue

ROOT = Path(__file__).parents[1]
HOUR = 3600.0
ASKED = ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.today", "date.today")
MENTIONED = re.compile("|".join(["from time import", *map(re.escape, ASKED)]))
# Where the time of day is asked for, and why it may be: nothing waits, ends or is deleted by it.
WALL_CLOCK = {
    "chat_template.py": "the date that a chat template writes",
    "worker.py": "when an event happened, which a browser compares with its own clock",
    "zero_gpu.py": "the same, on ZeroGPU",
}


@pytest.fixture(params=[HOUR, -HOUR, 3e8, -1e9], ids=["an hour on", "an hour back", "ten years on", "to the nineties"])
def set_clock(request, monkeypatch):
    """Sets the wall clock; to Gradio's sessions it looks as if they had been used so much earlier."""
    def jump(sessions: VisitorSessions | None = None) -> None:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + request.param)
        for name in sessions.time_last_used if sessions else ():
            sessions.time_last_used[name] -= timedelta(seconds=request.param)
    return jump


def holder(drop=lambda session: None) -> VisitorSessions:
    sessions = VisitorSessions(AdmissionQueue(), 100, drop, set)
    config = SimpleNamespace(blocks={})
    sessions.set_blocks(SimpleNamespace(state_session_capacity=100, default_config=config, blocks={}))
    return sessions


def sweeper(sessions: VisitorSessions) -> Sweeper:
    queue = SimpleNamespace(event_ids_to_events={}, pending_messages_per_session={}, pending_event_ids_session={})
    page = SimpleNamespace(_queue=queue)
    app = SimpleNamespace(state_holder=sessions, iterators_to_reset=set(), get_blocks=lambda: page)
    return Sweeper(app, Retention.for_visitors())


def test_an_open_session_stays_when_the_clock_is_set(set_clock):
    sessions = holder()
    assert sessions["mine"] is not None
    set_clock(sessions)
    assert sweeper(sessions).sweep() == 0 and "mine" in sessions


def test_a_session_that_was_left_goes_in_its_time_when_the_clock_is_set_back(set_clock):
    sessions = holder()
    sessions["left"].is_closed = True
    sessions.last_used["left"] -= 61
    set_clock(sessions)
    assert sweeper(sessions).sweep() == 1 and "left" not in sessions


def test_a_file_that_was_just_uploaded_stays_when_the_clock_is_set(set_clock, tmp_path):
    folder = tmp_path / f"{PREFIX}a"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "a.jsonl").write_text("text")
    files = StoredFiles(folder)
    files.sweep()
    set_clock()
    files.sweep()
    assert (folder / "one" / "a.jsonl").exists()


def asks_for_the_time_of_day(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if MENTIONED.search(text) else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ASKED:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "time" and "time" in {name.name for name in node.names}:
            return True
    return False


def test_durations_are_measured_by_clocks_that_are_never_set():
    files = [ROOT / "app.py", *(ROOT / "playground").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
    found = {path.name for path in files if asks_for_the_time_of_day(path)}
    assert found == set(WALL_CLOCK)
