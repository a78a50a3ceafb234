"""Visitors who stay long, wait for a model, use no mouse or want no motion, in a real browser."""
from __future__ import annotations

import re
import threading
from contextlib import contextmanager

import pytest
from app_page import address, browser, expect, page, ran, status, tokens, visit  # noqa: F401
from counting import Counting, counting_site  # noqa: F401

from playground.ui.components.settings import Settings
from playground.ui.components.theme import theme_options
from playground.ui.play.gallery import examples
from playground.ui.server.pages import build
from support.launched import launched

pytestmark = pytest.mark.journey
GREEDY, SAMPLE = {"strategy": "greedy"}, {"strategy": "sample"}


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
    with launched(build(site), **theme_options()) as address:
        try:
            yield address, slow
        finally:
            slow.let.set()


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
