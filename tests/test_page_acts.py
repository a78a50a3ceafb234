"""Acts of visitors that end badly elsewhere, in a real browser: hostile texts, lost connections, neighbours, no mouse,
no patience.
"""
from __future__ import annotations

import math
import re
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from app_page import (  # noqa: F401
    address,
    browser,
    expect,
    new_tab,
    open_settings,
    page,
    running,
    running_visitors,
    share_link,
    status,
    tokens,
    visit,
)
from counting import Counting, counted, counting_site, open_page  # noqa: F401
from playwright.sync_api import Page
from toys import byte_tokenizer

from playground.player.frames import CLOCK, SLOWEST
from playground.trace import Trace
from playground.ui.components.settings import Settings
from playground.ui.components.theme import theme_options
from playground.ui.play.gallery import examples
from playground.ui.server import worker
from playground.ui.server.pages import build
from playground.ui.server.worker import Worker

pytestmark = pytest.mark.journey
GREEDY, SAMPLE = {"strategy": "greedy"}, {"strategy": "sample"}
ATTACK = "<img src=x onerror=window.hacked=1>"
HOSTILE = (
    f"{ATTACK}</textarea><script>window.hacked=1</script> \u202eabc\u202c שלום مرحبا 👩‍👩‍👧 ${{7*7}}"
    f" {'w' * 400}"
)


def unharmed(page) -> bool:
    """Whether nothing that was text has become part of the page."""
    return page.evaluate(
        "window.hacked === undefined && !document.querySelector('img[src=x]') && !document.title.includes('<')"
    )


def ran(page) -> None:
    live = page.locator("#live .live")
    before = live.get_attribute("data-run")
    page.click("#run")
    expect(live).not_to_have_attribute("data-run", before or "")
    expect(page.locator("#run")).to_be_visible()


# --- texts that would rather be a page ---

def test_a_hostile_prompt_is_text_everywhere(page, address):
    visit(page, address, Settings(prompt=HOSTILE, context=HOSTILE, length=4, lanes=[GREEDY]))
    ran(page)
    shown = running(page, 0).locator(".prompt")
    assert ATTACK in shown.text_content() and "w" * 400 in shown.text_content()
    expect(running(page, 0).locator(".setting")).to_have_attribute("title", re.compile("<img src=x"))
    running(page, 0).locator(".text").press("ArrowLeft")
    expect(page.locator("#live .card")).to_be_visible()
    assert unharmed(page)


def test_a_hostile_prompt_comes_back_from_its_link_and_from_the_browsers_memory(page, address):
    visit(page, address, Settings(prompt=HOSTILE, length=4))
    open_settings(page)
    share_link(page)
    page.wait_for_function("new URLSearchParams(location.search).has('s')")
    code = page.evaluate("new URLSearchParams(location.search).get('s')")
    assert Settings.from_code(code).prompt == HOSTILE
    page.goto(address)
    expect(page.locator("#prompt textarea")).to_have_value(HOSTILE)
    assert unharmed(page)


def test_hostile_turns_of_a_chat_are_text(page, address):
    asked = Settings(prompt="Who?", mode="chat", system=HOSTILE, before=[[ATTACK, ATTACK]], length=2, lanes=[GREEDY])
    page.goto(f"{address}?s={asked.to_code()}")
    expect(page.locator(".turns .said").first).to_have_text(ATTACK)
    ran(page)
    assert unharmed(page)


def test_a_refusal_that_quotes_a_visitor_quotes_text(page, address):
    visit(page, address, Settings(prompt="The red fox", model=f"/no/{ATTACK}"))
    page.click("#run")
    expect(page.locator("#model-notice")).to_contain_text(ATTACK)
    assert unharmed(page)


def test_a_run_over_a_hostile_prompt_is_saved_as_it_was(page, address, tmp_path):
    visit(page, address, Settings(prompt=HOSTILE, length=4, lanes=[GREEDY]))
    ran(page)
    page.click("#live .save > button")
    with page.expect_download() as download:
        page.click("#live [data-do='export']")
    download.value.save_as(tmp_path / "run.jsonl")
    assert Trace.load(tmp_path / "run.jsonl").headers[0].prompt == HOSTILE
    assert "<" not in download.value.suggested_filename


def test_what_is_wrong_comes_into_sight_on_a_phone_however_often_it_is_asked_for(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, address, Settings(prompt="The green bird", lanes=4 * [GREEDY]))
    page.fill("#prompt textarea", " ")
    notice = page.locator(".notice p", has_text="The prompt is empty")
    for _ in range(2):
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        expect(notice).not_to_be_in_viewport()
        page.keyboard.press("Control+Enter")
        expect(notice).to_be_in_viewport()


def test_a_hostile_prompt_does_not_widen_a_phones_page(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, address, Settings(prompt=HOSTILE, length=4, lanes=[GREEDY]))
    ran(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_html_that_a_model_writes_is_text_in_lane_card_and_chart(page, address):
    written = f"{ATTACK}<script>window.hacked=1</script>"
    lane = {**GREEDY, "forced": byte_tokenizer().encode(written)}
    visit(
        page,
        address,
        Settings(prompt="The red fox", length=len(lane["forced"]) + 1, lanes=[lane, {**lane, "strategy": "sample"}]),
    )
    ran(page)
    expect(running(page, 0).locator(".tokens")).to_contain_text(written)
    tokens(page, 0).first.click()
    expect(page.locator("#live .card")).to_contain_text("<")
    page.locator("#live .views").scroll_into_view_if_needed()
    assert unharmed(page)


# --- others on the same page, and a connection that breaks ---

def test_two_visitors_never_see_each_others_text(address, new_tab):
    visitors = [new_tab(), new_tab()]
    secrets = ("a violet giraffe", "an amber walrus")
    for visitor, secret in zip(visitors, secrets):
        visit(visitor, address, Settings(prompt=secret, length=4000, lanes=[GREEDY]))
        visitor.click("#run")
    for visitor in visitors:
        expect(tokens(visitor, 0).nth(5)).to_be_attached()
    for visitor, own, other in zip(visitors, secrets, secrets[::-1]):
        assert own in running(visitor, 0).locator(".prompt").text_content()
        assert other not in visitor.content()


def test_a_visitor_without_a_run_is_shown_none_of_another(counted, new_tab):
    address, _ = counted
    first, second = new_tab(), new_tab()
    visit(first, address, Settings(prompt="first"))
    first.click("#run")
    expect(tokens(first, 0).nth(2)).to_be_attached()
    visit(second, address, Settings(prompt="second"))
    open_settings(second)
    second.click("#again")
    expect(second.locator("#prompt-notice")).to_contain_text("no run to show yet")


def test_a_run_says_with_how_many_others_it_takes_turns(counted, new_tab):
    address, _ = counted
    visitors = running_visitors(new_tab, address, "first", "second")
    for visitor in visitors:
        expect(visitor.locator("#status")).to_contain_text("sharing the device with 1 other run")
    visitors[0].click("#stop")
    expect(visitors[1].locator("#status")).not_to_contain_text("in turn")


def paused(visitor):
    visitor.locator("#live .live").focus()
    visitor.keyboard.press("Space")


@pytest.fixture
def one_seat():
    """Address of a page where one run at a time is served."""
    with open_page(lambda models, settings, memory: Counting([], settings.prompt, forward=0.01), seats=1) as address:
        yield address


@pytest.mark.parametrize("makes_room", [Page.close, paused], ids=["leaves", "pauses"])
def test_a_visitor_who_comes_when_all_places_are_taken_is_queued(one_seat, new_tab, makes_room):
    first, second = new_tab(), new_tab()
    for visitor in (first, second):
        visit(visitor, one_seat, Settings(prompt="mine"))
        visitor.click("#run")
        expect(visitor.locator("#stop")).to_be_visible()
    expect(tokens(first, 0).nth(2)).to_be_attached()
    expect(second.locator("#status")).to_contain_text("place 1 in the queue")
    second.click("#stop")
    expect(second.locator("#run")).to_be_visible()
    second.click("#run")
    expect(second.locator("#status")).to_contain_text("place 1 in the queue")
    makes_room(first)
    expect(tokens(second, 0).nth(2)).to_be_attached()


@pytest.fixture
def cut(browser):
    """Takes the network away from all tabs, or gives it back."""
    yield browser.set_offline
    browser.set_offline(False)


def test_after_a_lost_connection_the_run_is_there_and_another_can_begin(page, address, cut):
    visit(page, address, Settings(prompt="The red fox", length=4000, lanes=[GREEDY]))
    page.click("#run")
    expect(tokens(page, 0).nth(5)).to_be_attached()
    cut(True)
    page.wait_for_timeout(1500)
    before = tokens(page, 0).count()
    cut(False)
    expect(page.get_by_text("Attempting reconnection")).to_have_count(0)  # then the page loads itself again
    expect(tokens(page, 0).nth(before - 1)).to_be_attached()
    # in one step: the end of the lost run may arrive at any moment and hide the button
    page.evaluate("document.querySelector('#stop')?.checkVisibility() && document.querySelector('#stop').click()")
    open_settings(page)
    page.fill("#length input", "3")
    page.click("#run")
    expect(status(page, 0)).to_have_text("reached the token limit")


def test_a_run_that_a_reload_interrupts_is_kept_as_far_as_it_has_come(page, address):
    """A browser that has lost its server for a while loads the page again by itself."""
    visit(page, address, Settings(prompt="The red fox", length=4000, lanes=[GREEDY, SAMPLE]))
    page.click("#run")
    expect(tokens(page, 1).nth(5)).to_be_attached()
    page.reload()
    expect(status(page, 1)).to_have_text("interrupted")
    expect(page.locator("#live .message")).to_contain_text("The page was loaded again during run 1")
    assert tokens(page, 1).count() > 5
    ran_from = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", ran_from)
    expect(page.locator("#live .visit-run").first).to_contain_text(", interrupted")
    page.locator("#live .visit-run").first.click()
    expect(status(page, 1)).to_have_text("interrupted")


def test_a_run_that_has_just_ended_outlasts_a_reload(page, address):
    """Its compression takes a while, and a page that is left does not wait for it."""
    page.add_init_script("""window.CompressionStream = function () {
        return new TransformStream({ transform: () => new Promise(() => {}) });
    };""")
    visit(page, address, Settings(prompt="The red fox", length=6, lanes=[GREEDY, SAMPLE]))
    page.click("#run")
    expect(status(page, 1)).to_have_text("reached the token limit")
    texts = page.locator("#live .lane .tokens").all_text_contents()
    page.reload()
    expect(page.locator("#live .lane .tokens").first).to_have_text(texts[0])
    assert page.locator("#live .lane .tokens").all_text_contents() == texts
    expect(status(page, 1)).to_have_text("reached the token limit")


def test_a_reload_keeps_what_was_chosen_after_a_link_was_opened(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[GREEDY]))
    page.fill("#prompt textarea", "The green bird")
    page.keyboard.press("Tab")
    page.wait_for_function("playground.settingsNow().prompt === 'The green bird'")
    page.reload()
    expect(page.locator("#settings .summary")).to_contain_text("12 tokens")
    expect(page.locator("#prompt textarea")).to_have_value("The green bird")


def test_the_last_run_can_be_shown_again(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[GREEDY]))
    ran(page)
    open_settings(page)
    page.click("#again")
    expect(page.locator("#live [data-recorded='true'] .lane .tokens > .t").nth(11)).to_be_attached()


# --- a long visit ---

WINDOW, APART = 4, 9  # runs of which the second fewest are taken; runs between them, each of which would leave a node
KEPT = 12  # runs of a visit that the page keeps, as visit.js has it


AT_REST = """() => new Promise((done) => {
    const restart = () => setTimeout(() => { watcher.disconnect(); done(); }, 120);
    const watcher = new MutationObserver(() => { clearTimeout(timer); timer = restart(); });
    let timer = restart();
    watcher.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
})"""


def held(page) -> tuple[int, int]:
    """Nodes and listeners that garbage collection leaves alive after a run, in the document or out of it.

    On a busy machine Run is back before the views have been drawn: a run that is counted then has fewer nodes.
    """
    ran(page)
    page.evaluate(AT_REST)
    client = page.context.new_cdp_session(page)
    client.send("HeapProfiler.collectGarbage")
    counts = client.send("Memory.getDOMCounters")
    client.detach()
    return counts["nodes"], counts["jsEventListeners"]


def test_a_long_visit_leaves_nothing_behind(page, address):
    """Runs are kept to go back to, up to a number; after that many, a new one leaves no more than the one before."""
    visit(page, address, Settings(prompt="The red fox", length=6, lanes=[GREEDY]))
    counts = [held(page) for _ in range(KEPT + APART + WINDOW)]
    print("nodes and listeners after each run:", counts)
    windows = counts[KEPT:KEPT + WINDOW], counts[-WINDOW:]
    before, after = ([sorted(part)[1] for part in zip(*runs)] for runs in windows)
    nodes, listeners = (last - first for first, last in zip(before, after))
    assert nodes < APART / 2 and listeners <= 0, "what just ended may linger, and a view may not be drawn yet"


def test_a_page_that_is_left_or_loaded_again_in_mid_run_reports_no_errors(page, address):
    reported = []
    page.on("console", lambda message: message.type == "error" and reported.append(message.text))
    visit(page, address)
    page.click("#run")
    expect(tokens(page, 0).nth(2)).to_be_attached()
    page.reload()
    expect(page.locator("#status .dot.ready")).to_be_visible()
    page.click("#run")
    expect(tokens(page, 0).nth(2)).to_be_attached()
    page.goto("about:blank")
    assert reported == []


# --- models that take their time ---

class Slow:
    """Loads models only once it is let; until then it is at two fifths."""

    def __init__(self, models):
        self.models, self.let = models, threading.Event()

    def __call__(self, *names, progress, **how):
        progress(0.4, "reading weights")
        self.let.wait(60)
        return self.models()


@contextmanager
def slow_page():
    site = counting_site(lambda models, settings, memory: Counting([], length=3))
    site.model_loader._load = slow = Slow(site.load)
    demo = build(site)
    try:
        yield demo.launch(prevent_thread_lock=True, quiet=True, **theme_options())[1], slow
    finally:
        slow.let.set()
        demo.close()


def test_loading_shows_how_far_it_is_and_can_be_given_up(page):
    with slow_page() as (address, slow):
        visit(page, address, Settings(prompt="The red fox"))
        page.click("#run")
        expect(page.locator("#status")).to_contain_text("reading weights")
        expect(page.locator("#status progress")).to_have_attribute("value", "0.400")
        page.click("#stop")
        expect(page.locator("#run")).to_be_visible()
        slow.let.set()
        page.click("#run")
        expect(tokens(page, 0)).to_have_count(3)


# --- people who use no mouse, or want no motion ---

def tab_to(page, wanted: str, most: int = 80) -> None:
    """Press Tab until the focus is on what matches the selector."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("(wanted) => document.activeElement.matches(wanted)", wanted):
            return
    raise AssertionError(f"Tab does not lead to {wanted}")


def every_token(page):
    """The tokens of all lanes: by the clock, the next beat may be any lane's."""
    return page.locator("#live [data-recorded='false'] .lane .tokens > *")


def test_a_run_is_begun_held_stepped_and_gone_through_with_the_keyboard_alone(page, address):
    visit(page, address)
    tab_to(page, "[data-part='examples'][data-index='1']")
    page.keyboard.press("Enter")
    expect(page.locator("#prompt textarea")).to_have_value(examples()[1]["prompt"])
    tab_to(page, "#settings .settings-open")
    page.keyboard.press("Enter")
    tab_to(page, "#length input")
    page.keyboard.type("4000")  # Tab has selected the text of the field
    page.keyboard.press("Control+Enter")
    expect(tokens(page, 0).nth(2)).to_be_attached()
    tab_to(page, "#live .play")
    page.keyboard.press("Space")
    expect(page.locator("#live .play")).to_have_attribute("aria-label", "Play")
    held = every_token(page).count()
    page.keyboard.press("ArrowRight")
    expect(every_token(page).nth(held)).to_be_attached()
    tab_to(page, "#live .scrub")
    page.keyboard.press("Home")
    expect(tokens(page, 0)).to_have_count(0)
    page.keyboard.press("2")
    expect(page.locator("#live .chooser .tab[data-lane='1']")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#run")).to_be_visible()


def test_a_token_is_read_and_its_card_opened_with_the_keyboard_alone(page, address):
    visit(page, address, Settings(prompt="The red fox", length=6, lanes=[GREEDY]))
    page.keyboard.press("Control+Enter")
    expect(status(page, 0)).to_have_text("reached the token limit")
    tab_to(page, "#live .lane[data-lane='0'] .text")
    page.keyboard.press("ArrowLeft")
    expect(tokens(page, 0).nth(5)).to_have_attribute("aria-label", re.compile("^token 6, "))
    page.keyboard.press("Enter")
    expect(page.locator("#live .card")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#live .card")).to_be_hidden()


MOVING = """() => document.getAnimations()
    .filter((one) => one.playState === 'running' && one.effect.getTiming().duration > 1)
    .map((one) => [one.animationName || one.transitionProperty, one.effect.target])
    .map(([name, target]) => `${name} of ${target.tagName}.${target.className}`)"""


def test_for_those_who_want_no_motion_nothing_plays_by_itself_and_nothing_moves(page, address):
    visit(page, address, Settings(prompt="The red fox", length=400, lanes=[GREEDY]))
    expect(page.locator("#live .play")).to_have_attribute("aria-label", "Play")
    # colours that came with the style sheet, before it could say so
    page.wait_for_function(f"() => !({MOVING})().length")
    page.click("#run")
    expect(tokens(page, 0).nth(5)).to_be_attached()
    assert page.evaluate(MOVING) == []


# --- an idle page ---

WATCH_SHIFTS = """window.shifts = [];
const note = (list) => window.shifts.push(
    ...list.getEntries().filter((one) => !one.hadRecentInput).map((one) => one.value));
new PerformanceObserver(note).observe({ type: "layout-shift" });"""


def test_nothing_jumps_while_lanes_write(page, address):
    visit(page, address, Settings(prompt="The red fox", length=60, lanes=[GREEDY, SAMPLE, GREEDY, SAMPLE]))
    page.click("#run")
    expect(tokens(page, 0).nth(0)).to_be_attached()
    page.locator("#live .lanes").scroll_into_view_if_needed()
    page.evaluate(WATCH_SHIFTS)
    expect(status(page, 0)).to_have_text("reached the token limit")
    assert page.evaluate("window.shifts.reduce((sum, value) => sum + value, 0)") < 0.05


# --- times and shares reported by the worker ---

def test_a_frame_shows_when_the_oldest_of_its_events_happened():
    begun = time.time()
    frames = list(Worker().take(Counting([], length=200)).frames())
    times = [frame["oldest_at"] for frame in frames if frame["events"]]
    assert begun <= times[0] and times == sorted(times) and times[-1] <= time.time()
    assert all("oldest_at" not in frame for frame in frames if not frame["events"])


def waits_of(monkeypatch, reading: float, beat: float) -> list[float]:
    """Seconds that a run waits between its first frames, where each takes so long to read."""
    now, waits = [1000.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=waits.append, time=time.time)
    run = Worker().take(Counting([], length=100_000))
    run.pace(beat)
    monkeypatch.setattr(worker, "time", clock)
    frames = run.frames()
    for _ in range(3):
        while next(frames) is None:
            pass
        now[0] += reading
    run.stop()
    return waits[1:3]


@pytest.mark.parametrize("reading, waited", [(0.01, CLOCK - 0.01), (2 * CLOCK, 0.0)])
def test_frames_begin_a_beat_apart_and_a_slow_reader_waits_no_longer(monkeypatch, reading, waited):
    assert waits_of(monkeypatch, reading, CLOCK) == pytest.approx([waited] * 2)


@pytest.mark.parametrize("asked, beat", [(0.2, 0.2), (1e9, SLOWEST), (0.001, CLOCK), (-1.0, CLOCK), (math.nan, CLOCK)])
def test_a_browser_that_cannot_follow_gets_frames_further_apart_and_still_some(monkeypatch, asked, beat):
    assert waits_of(monkeypatch, 0.01, asked) == pytest.approx([beat - 0.01] * 2)


def test_a_run_that_is_being_served_still_counts_as_a_neighbour_and_one_that_is_held_or_over_does_not():
    worker = Worker()
    first, second = worker.take(Counting([])), worker.take(Counting([]))
    assert {worker.others(first) for _ in range(500)} == {1}
    second.hold()
    assert worker.others(first) == 0
    second.resume()
    second.stop()
    list(second.frames())
    assert worker.others(first) == 0
    first.stop()
