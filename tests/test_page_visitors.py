"""Visitors who come and go, and the worker that serves them, over sessions that only count."""

from threading import Event
from unittest.mock import MagicMock

import pytest
from app_page import (  # noqa: F401
    PATIENCE,
    TWO_LANES,
    address,
    browser,
    choose_strategy,
    expect,
    new_tab,
    open_settings,
    running,
    running_visitors,
    status,
    tokens,
    visit,
)
from counting import Counting, committed, counted, counting_site, open_page  # noqa: F401
from playwright.sync_api import Page, expect

from playground.player.frames import CLOCK, SLOWEST
from playground.ui.components.settings import Settings
from playground.ui.play.run_handlers import RunHandlers
from playground.ui.server.worker import Run, Worker
from playground.ui.server.zero_gpu import RemoteRun, batches


@pytest.mark.slow
def test_runs_are_served_in_turn():
    log, worker = [], Worker()
    first = worker.take(Counting(log, "a", 400))
    second = worker.take(Counting(log, "b", 400))
    assert committed(first.frames()) == committed(second.frames()) == list(range(1, 401))
    both = log[log.index("b"):]
    shared = both[:2 * min(both.count("a"), both.count("b"))]
    assert all({*pair} == {"a", "b"} for pair in zip(shared[::2], shared[1::2]))


def test_stop_ends_a_run_within_one_request_and_says_so():
    session = Counting([])
    run = Worker().take(session)
    frames = run.frames()
    next(frames)
    run.stop()
    served = session.count
    last = list(frames)[-1]
    assert last["state"] == "done" and last["events"][-1] == {
        "lane": 0,
        "seq": session.count + 1,
        "at": 0.0,
        "kind": "done",
        "reason": "stopped",
    }
    assert session.count <= served + 1


@pytest.mark.slow
def test_a_held_run_waits_takes_single_steps_and_goes_on():
    session = Counting([])
    worker = Worker()
    run = worker.take(session)
    frames = run.frames()
    run.hold()
    while next(frames) is not None:
        pass
    held = session.count
    run.step()
    assert committed([next(frames)]) == [held + 1]
    assert next(frames) is None and session.count == held + 1
    run.resume()
    assert next(filter(None, (committed([frame]) for frame in frames)))[0] == held + 2
    run.stop()


def test_a_run_that_breaks_ends_with_a_sentence_and_the_next_one_works():
    class Broken(Counting):
        def advance(self):
            raise RuntimeError("boom")

    worker = Worker()
    broken, sound = worker.take(Broken([])), worker.take(Counting([], length=3))
    assert list(broken.frames())[-1]["state"] == "done" and "boom" not in broken.error and broken.error
    assert committed(sound.frames()) == [1, 2, 3]


def test_a_borrowed_gpu_gives_the_same_events():
    run = RemoteRun(batches(Counting([], length=50)))
    frames = list(run.frames())
    assert committed(frames) == list(range(1, 51)) and "headers" in frames[0] and frames[-1]["state"] == "done"
    endless = RemoteRun(batches(Counting([])))
    frames = endless.frames()
    next(frames)
    endless.stop()
    assert [frame["state"] for frame in frames] == ["done"]


@pytest.mark.slow
def test_of_a_borrowed_gpu_too_a_slow_browser_gets_fewer_frames_and_all_that_happened():
    run = RemoteRun(batches(Counting([], length=2000)))
    run.pace(60)
    frames = list(run.frames())
    assert committed(frames) == list(range(1, 2001))
    assert [frame["n"] for frame in frames] == list(range(len(frames))) and frames[-1]["state"] == "done"
    # each but the first begins to collect when the one before it has left
    times = [frame["oldest_at"] for frame in frames[1:]]
    assert len(times) > 2 and all(later - sooner > 0.99 * (SLOWEST - CLOCK) for sooner, later in zip(times, times[1:]))


def test_what_a_browser_asks_for_that_cannot_follow_reaches_its_run(counted, new_tab, monkeypatch):
    asked, heard = [], Event()
    monkeypatch.setattr(Run, "pace", lambda run, beat: (asked.append((run.session.name, beat)), heard.set()))
    page = new_tab()
    page.add_init_script("const now = Date.now; let late = 0; Date.now = () => now() + (late += 400);")
    visit(page, counted[0], Settings(prompt="slow"))
    page.click("#run")
    assert heard.wait(PATIENCE)
    ((name, beat), *_) = asked
    assert name == "slow" and beat > 0.4


def test_a_visitor_who_leaves_stops_the_run_and_no_other(counted, new_tab):
    address, begun = counted
    pages = running_visitors(new_tab, address, "first", "second")
    first, second = begun
    pages[0].close()
    assert first.stopped.wait(PATIENCE) and not second.finished
    pages[1].click("#stop")
    assert second.stopped.wait(PATIENCE)
    expect(pages[1].locator("#run")).to_be_visible()


def offers_of_stop() -> list[bool]:
    """Whether Stop is shown by the message before the first frame, and by each message with a frame."""
    page = MagicMock(**{f"{name}.return_value": {} for name in ("idle", "show_memory")})
    page.busy.return_value = page.stoppable.return_value = {"stop": "offered"}
    acts, wanted = (
        RunHandlers(counting_site(lambda models, settings, memory: Counting([], length=30)), page),
        Settings(prompt="one"),
    )
    before, *changes = acts.run(None, *(getattr(wanted, name) for name in Settings.names()))
    return ["stop" in change for change in (before, *(change for change in changes if page.live in change))]


def test_stop_is_offered_before_the_first_frame_and_once_again_with_it():
    before, first, *others = offers_of_stop()
    assert before and first and others and not any(others)


def test_stop_is_offered_again_while_the_run_goes_on(monkeypatch):
    monkeypatch.setattr("playground.ui.play.run_handlers.STOP_SHOWN_AGAIN", 0.0)
    assert len(offers := offers_of_stop()) > 2 and all(offers)


class Seen:
    """Something to remember."""

    def digest(self) -> str:
        return "seen"


@pytest.fixture
def learning():
    """The page over short sessions that remember their prompt; gives its address and, for every run, what was
    remembered before it.
    """
    known = []

    def prepare(models, settings, memory):
        known.append(len(memory))
        memory.keep(settings.prompt, Seen())
        return Counting([], length=3)

    with open_page(prepare) as address:
        yield address, known


def ran(page: Page) -> None:
    """Run to the end, and wait until it is this run that the page shows."""
    shown = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", shown)
    expect(page.locator("#run")).to_be_visible()


def test_what_is_remembered_belongs_to_one_visitor_and_can_be_forgotten(learning, new_tab):
    address, known = learning
    first, second = new_tab(), new_tab()
    visit(first, address, Settings(prompt="one"))
    expect(first.locator("#forget")).to_be_hidden()
    ran(first)
    expect(first.locator("#remembered")).to_contain_text("memory: 1 entry from earlier runs")
    first.fill("#prompt textarea", "two")
    ran(first)
    expect(first.locator("#remembered")).to_contain_text("memory: 2 entries from earlier runs")
    visit(second, address, Settings(prompt="one"))
    ran(second)
    open_settings(first)
    first.click("#forget")
    expect(first.locator("#remembered")).to_be_hidden()
    ran(first)
    assert known == [0, 1, 0, 0]


def test_a_run_on_a_borrowed_gpu_begins_with_an_empty_memory():
    given = []
    site = counting_site(lambda models, settings, memory: given.append(len(memory)) or Counting([], length=2))
    assert list(site.runs.work.serve("run", Settings(prompt="one")))[-1][2] == "done" and given == [0]
