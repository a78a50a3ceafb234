"""Frames arrive late, twice or damaged, and buttons act on the run that is shown."""
from __future__ import annotations

import json
import math
import time
from dataclasses import asdict

import pytest
from live_page import address, browser, drawn, feed, page, seek, send, token_texts, visitor, wait_for  # noqa: F401
from playwright.sync_api import expect

from playground.events import Branches, Done, Header, Rollback, Stamped
from playground.player.frames import CLOCK, SLOWEST, frame, new_name, recording, to_json
from playground.trace import FORMAT, Trace
from support.live_runs import EVENTS, HEADERS, RUN, commit
from support.live_view_run import show


def plain_frames(tokens: int) -> list[dict]:
    """A new run, one token per frame."""
    name = new_name()
    events = [Stamped(0, i, i / 100, commit(i, (f" {i}", "sampled"))).to_json() for i in range(tokens)]
    return [
        frame(name, i, [event], "running", [asdict(Header())] if i == 0 else None) for i, event in enumerate(events)
    ]


@pytest.mark.journey
def test_no_frame_is_lost_and_none_counts_twice(page, feed):
    frames = plain_frames(200)
    send(page, feed, *frames[:120], frames[60], frames[119], *frames[100:], frame(frames[0]["run"], 200, [], "done"))
    expect(page.locator(".lane .tokens > .t")).to_have_count(200)
    assert token_texts(page, 0) == [f" {i}" for i in range(200)]
    assert not [heard for heard in feed.heard if heard[0] == "missed"]


DRAWINGS_UNTIL_REST = """() => new Promise((rested) => {
    let [drawings, timer] = [0, null];
    const wait = () => { clearTimeout(timer); timer = setTimeout(() => rested(drawings), 300); };
    new MutationObserver(() => { drawings += 1; wait(); })
        .observe(document.querySelector(".live .scrub"), { attributeFilter: ["max"] });
    setTimeout(() => rested(drawings), 5000);
    wait();
})"""


def test_a_run_that_is_followed_is_drawn_when_more_of_it_comes_and_then_no_more(page, feed):
    first, second = plain_frames(2)
    send(page, feed, first)
    expect(page.locator(".lane .tokens > .t")).to_have_count(1)
    page.evaluate(DRAWINGS_UNTIL_REST)
    send(page, feed, second)
    drawings = page.evaluate(DRAWINGS_UNTIL_REST)
    expect(page.locator(".lane .tokens > .t")).to_have_count(2)
    assert drawings <= 2, "with the text, and once more with the views where they rested"


@pytest.fixture
def slow_screen(page):
    """From now on a paint takes four seconds by the page's clock, so the page pauses for six before the next."""
    page.evaluate("""() => {
        const [now, frame] = [performance.now.bind(performance), window.requestAnimationFrame];
        let late = 0;
        window.mend = () => Object.assign(window, { requestAnimationFrame: frame }) && delete performance.now;
        performance.now = () => now() + late;
        window.requestAnimationFrame = (paint) => frame((at) => { late = 4000; paint(at); late = 0; });
    }""")
    yield
    page.evaluate("window.mend()")


def test_a_user_action_does_not_wait_for_the_pause_of_playback(page, feed, slow_screen):
    first, second = plain_frames(2)
    send(page, feed, first)
    expect(page.locator(".lane .tokens > .t")).to_have_count(1)
    send(page, feed, second)
    page.wait_for_timeout(500)
    assert len(token_texts(page, 0)) == 1, "the player rests"
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight")
    drawn(page)
    assert len(token_texts(page, 0)) == 2


def test_the_numbers_are_never_ahead_of_the_text_and_catch_up_in_a_silence(page, feed):
    frames = plain_frames(60)
    send(page, feed, frames[0])
    page.evaluate("""() => {
        window.pairs = [];
        const body = document.querySelector(".lane .body");
        const tokens = document.querySelector(".lane dd[data-metric=tokens]");
        requestAnimationFrame(function note() {
            pairs.push([body.querySelectorAll(".tokens > .t").length, Number(tokens.dataset.value)]);
            requestAnimationFrame(note);
        });
    }""")
    send(page, feed, *frames[1:])
    expect(page.locator(".lane dd[data-metric=tokens]")).to_have_attribute("data-value", "60")
    pairs = page.evaluate("pairs")
    assert [pair for pair in pairs if pair[1] > pair[0]] == []


def test_a_run_ends_with_its_numbers_in_the_frame_of_its_last_tokens(page, feed):
    frames = plain_frames(60)
    send(page, feed, *frames)
    expect(page.locator(".lane dd[data-metric=tokens]")).to_have_attribute("data-value", "60")
    page.evaluate("""() => {
        const take = (until) => { while (performance.now() < until); return ""; };
        const slow = { get: () => take(performance.now() + 150), set() {} };
        Object.defineProperty(document.querySelector(".absent"), "textContent", slow); // views that take long rest long
        window.atEnd = [];
        new MutationObserver(() => requestAnimationFrame(() => {
            const said = document.querySelector(".lane .status").dataset.status;
            if (said !== "running") atEnd.push(document.querySelector(".lane dd[data-metric=tokens]").dataset.value);
        })).observe(document.querySelector(".lane .status"), { attributes: true });
    }""")
    run = frames[0]["run"]
    send(page, feed, frame(run, 60, [Stamped(0, 60, 0.7, commit(60, (" last", "sampled"))).to_json()], "running"))
    expect(page.locator(".lane dd[data-metric=tokens]")).to_have_attribute("data-value", "61")
    last, over = Stamped(0, 61, 0.8, commit(61, (" end", "sampled"))), Stamped(0, 62, 0.8, Done("end"))
    send(page, feed, frame(run, 61, [last.to_json(), over.to_json()], "done"))
    expect(page.locator(".lane .status")).to_have_attribute("data-status", "end")
    page.wait_for_function("window.atEnd.length")
    assert page.evaluate("atEnd[0]") == "62"


@pytest.mark.parametrize("hours", [0, 5, -5])
def test_a_page_that_takes_frames_later_and_later_asks_for_fewer_whatever_its_clock(page, feed, hours):
    late = [{**one, "oldest_at": time.time() + 3600 * hours - 60.0 * i} for i, one in enumerate(plain_frames(15))]
    send(page, feed, *late)
    assert CLOCK < wait_for(page, feed, "pace")["beat"] <= SLOWEST
    expect(page.locator(".lane .tokens > .t")).to_have_count(15)
    assert len([name for name, _ in feed.heard if name == "pace"]) == 1, "it sees what came of it first"


def test_a_page_that_has_caught_up_asks_for_more_frames_again(page, feed):
    frames = plain_frames(120)
    now = time.time()
    # except for ten, each has the smallest delay so far
    send(page, feed, *({**one, "oldest_at": now + 60 * i - 3600 * (4 <= i < 14)} for i, one in enumerate(frames)))
    wait_for(page, feed, "pace", times=9)
    beats = sorted((data["beat"] for _, data in feed.heard), reverse=True)
    assert beats == pytest.approx([SLOWEST * 0.7 ** i for i in range(8)] + [CLOCK])


@pytest.mark.parametrize("hours", [0, 5, -5])
def test_a_page_that_keeps_up_says_nothing_whatever_its_clock(page, feed, hours):
    send(page, feed, *({**one, "oldest_at": time.time() + 3600 * hours} for one in plain_frames(40)))
    expect(page.locator(".lane .tokens > .t")).to_have_count(40)
    assert not feed.heard


def test_lost_frames_are_asked_for_again_and_no_text_with_a_hole_is_shown(page, feed):
    frames = plain_frames(10)
    send(page, feed, *frames[:4], frames[6], frames[8])
    assert wait_for(page, feed, "missed")["run"] == frames[0]["run"]
    assert token_texts(page, 0) == [f" {i}" for i in range(4)]
    whole = {
        **frames[9],
        "headers": frames[0]["headers"],
        "events": [event for one in frames for event in one["events"]],
    }
    send(page, feed, whole)
    expect(page.locator(".lane .tokens > .t")).to_have_count(10)
    assert len([heard for heard in feed.heard if heard[0] == "missed"]) == 1


def test_a_run_whose_last_frame_came_too_early_ends_when_the_missing_ones_are_there(page, feed):
    """Lessons, links and kept runs read a run at its end, so it must be whole by then."""
    frames = plain_frames(8)
    frames[-1]["state"] = "done"
    page.evaluate("window.ended = 0; document.addEventListener('run-shown', () => { window.ended += 1; })")
    send(page, feed, *frames[:3], frames[-1])
    wait_for(page, feed, "missed")
    expect(page.locator(".lane .tokens > .t")).to_have_count(3)
    assert page.evaluate("window.ended") == 0
    send(page, feed, frames[-1] | {"headers": frames[0]["headers"], "events": [e for f in frames for e in f["events"]]})
    expect(page.locator(".lane .tokens > .t")).to_have_count(8)
    page.wait_for_function("window.ended === 1")


@pytest.mark.journey
def test_frames_that_came_too_early_are_shown_once_those_before_them_are_there(page, feed):
    """A lost frame may be sent again alone, or within the whole run; the player stays where it was."""
    frames = plain_frames(10)
    send(page, feed, *frames[:4], *frames[5:7], frames[8])
    wait_for(page, feed, "missed")
    expect(page.locator(".lane .tokens > .t")).to_have_count(4)
    page.click(".live [data-do='back']")
    expect(page.locator(".lane .tokens > .t")).to_have_count(3)
    send(page, feed, frames[4])
    page.keyboard.press("End")
    expect(page.locator(".lane .tokens > .t"), "up to the next that is missing").to_have_count(7)
    whole = [event for one in frames[7::-1] for event in one["events"]]
    send(page, feed, {**frames[7], "headers": frames[0]["headers"], "events": whole})
    expect(page.locator(".lane .tokens > .t")).to_have_count(9)
    assert token_texts(page, 0) == [f" {i}" for i in range(9)]


def test_what_is_missing_behind_the_whole_run_is_asked_for_again(page, feed):
    """The answer to a first gap may have been made before a second one."""
    frames = plain_frames(10)
    send(page, feed, *frames[:3], frames[4], frames[8])
    wait_for(page, feed, "missed")
    whole = [event for one in frames[:6] for event in one["events"]]
    send(page, feed, {**frames[5], "headers": frames[0]["headers"], "events": whole})
    expect(page.locator(".lane .tokens > .t")).to_have_count(6)
    wait_for(page, feed, "missed", times=2)


def test_the_meters_show_what_was_measured_of_the_machine_and_nothing_else(page, feed):
    first, second = plain_frames(2)
    send(page, feed, {**first, "machine": {"cpu": 0.625, "memory": 2**30, "memory_total": 2**32}})
    meters = page.locator(".player .machine-meter")
    expect(meters).to_have_text(["RAM25 %", "CPU63 %"])
    expect(page.locator(".player .machine")).to_have_attribute(
        "title", "memory 1.0 GiB of 4.0 GiB; processor 63 % of all cores"
    )
    reading = {"memory": 2**31, "memory_total": 2**32, "gpu_memory": [2**30], "gpu_memory_total": [2**31], "gpu": 0.5}
    send(page, feed, {**second, "machine": reading})
    expect(meters).to_have_text(["RAM50 %", "GPU50 %", "VRAM50 %"])
    reading |= {"gpu_memory": [2**30, 2**29], "gpu_memory_total": [2**31, 2**31]}
    send(page, feed, {**first, "machine": reading})
    expect(meters).to_have_text(["RAM50 %", "GPU50 %", "VRAM 150 %", "VRAM 225 %"])
    send(page, feed, *plain_frames(1))
    expect(page.locator(".player .machine"), "not those of the run before").to_be_hidden()


@pytest.mark.parametrize("width", [1384, 1224, 1000, 840, 700])
def test_the_player_is_one_row_beside_a_lesson_and_in_a_small_window(page, feed, width):
    """1384 and 1224: windows of 1440 and 1280 pixels; 1000 and 840: the same beside an open lesson."""
    view = page.locator(".live").first
    view.evaluate("(node, width) => node.style.width = `${width}px`", width)
    send(page, feed, {**plain_frames(2)[0], "machine": {"cpu": 0.5, "memory": 2**30, "memory_total": 2**32}})
    expect(page.locator(".player .follow")).to_be_visible()
    middles = page.evaluate("""[...document.querySelectorAll(".player > *")].filter((one) => one.offsetParent)
        .map((one) => one.getBoundingClientRect()).map(({ top, bottom }) => (top + bottom) / 2)""")
    is_cut = page.locator(".player").evaluate("(player) => player.scrollWidth > player.clientWidth")
    view.evaluate("(node) => node.style.removeProperty('width')")
    assert len(middles) > 5 and max(middles) - min(middles) < 12 and not is_cut


def test_a_live_run_is_held_stepped_and_resumed(page, feed):
    frames = plain_frames(6)
    send(page, feed, *frames[:2])
    expect(page.locator(".lane .tokens > .t")).to_have_count(2)
    page.keyboard.press("Space")
    wait_for(page, feed, "hold")
    send(page, feed, {**frames[2], "state": "held"})  # stored, and not shown before the player goes there
    expect(page.locator(".lane .status")).to_have_text("earlier")
    assert len(token_texts(page, 0)) == 2
    page.keyboard.press("ArrowRight")
    expect(page.locator(".lane .tokens > .t")).to_have_count(3)
    page.keyboard.press("ArrowRight")
    wait_for(page, feed, "step")
    send(page, feed, {**frames[3], "state": "held"})
    expect(page.locator(".lane .tokens > .t")).to_have_count(4)
    page.keyboard.press("Space")
    wait_for(page, feed, "resume")
    send(page, feed, *frames[4:])
    expect(page.locator(".lane .tokens > .t")).to_have_count(6)
    page.click(".lane .stop")
    assert wait_for(page, feed, "stop_lane") == {"lane": 0}


def test_taken_back_tokens_leave_the_text(page, feed):
    events = [
        commit(0, (" a", "sampled")),
        commit(1, (" b", "sampled")),
        Rollback(1, " a"),
        commit(1, (" c", "sampled")),
        Branches([(1, 0)], [0], {1: -0.5}),
    ]
    stamped = [Stamped(0, i, i / 100, event).to_json() for i, event in enumerate(events)]
    send(page, feed, frame(new_name(), 0, stamped, "done", [asdict(Header())]))
    expect(page.locator(".live .clock")).to_have_text("0.04 of 0.04 s")
    for key, texts in (("", [" a", " c"]), ("ArrowLeft", [" a"]), ("ArrowLeft", [" a", " b"]), ("ArrowRight", [" a"])):
        page.keyboard.press(key or "Escape")
        drawn(page)
        assert token_texts(page, 0) == texts
        struck = page.locator(".lane .g.refused").all_text_contents()
        assert struck == ([" b"] if key == "ArrowRight" or texts == [" a"] else []), "until the next commit"


def test_lanes_can_share_the_token_count(page, feed):
    show(page, feed)
    page.select_option(".live .mode", "tokens")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".live .clock")).to_have_text("4 of 5 tokens")
    assert [len(token_texts(page, lane)) for lane in (0, 1)] == [4, 4]
    seek(page, 1 / 5)
    expect(page.locator(".lane[data-lane='1'] .tokens > .t")).to_have_count(1)
    assert len(token_texts(page, 0)) == 1


def test_a_trace_can_be_saved_and_opened_again(page, feed, tmp_path):
    show(page, feed)
    page.click(".live .save > button")
    with page.expect_download() as download:
        page.click(".live [data-do=export]")
    path = tmp_path / "saved.jsonl"
    download.value.save_as(path)
    assert Trace.load(path).to_json() == RUN.to_json()
    assert json.loads(path.read_text().splitlines()[0])["format"] == FORMAT
    send(page, feed, *plain_frames(2))
    expect(page.locator(".lane")).to_have_count(1)
    page.set_input_files(".live .file", path)
    expect(page.locator(".live .message")).to_have_text(f"Opened saved.jsonl: 3 lanes, {len(EVENTS)} events.")
    expect(page.locator(".lane")).to_have_count(3)
    seek(page, 1.0)
    page.locator(".lane[data-lane='1'] .tokens > .t").nth(1).click()
    expect(page.locator(".live .card .candidate").nth(1)).to_be_disabled()  # there is no model for a fork
    (tmp_path / "other.jsonl").write_text('{"format": "shopping list"}\n')
    page.set_input_files(".live .file", tmp_path / "other.jsonl")
    expect(page.locator(".live .message")).to_contain_text("This is not a trace of the decoding playground")


def test_a_recording_plays_by_itself(page, feed):
    send(page, feed, recording(HEADERS, EVENTS))
    expect(page.locator(".lane .status")).to_have_text(["ended", "reached the token limit", "failed"])
    assert not feed.heard


@pytest.mark.journey
def test_it_fits_a_phone(page, feed):
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, feed)
    page.locator(".lane[data-lane='1'] .tokens > .t").nth(1).tap()
    expect(page.locator(".live .card")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_numbers_that_json_lacks_become_null():
    assert json.loads(to_json({"a": math.nan, "b": [math.inf, 1.5]})) == {"a": None, "b": [None, 1.5]}
