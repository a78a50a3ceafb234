"""A page with only the live view in a real browser: fixtures, actions and readings.

`from live_page import address, browser, feed, page, visitor` gives a test file its own page.
"""
from __future__ import annotations

import gradio as gr
import pytest
from chromium import chromium, new_context

from playground.ui.play.live_view import Lanes
from support.launched import launched

ACTS = ("hold", "resume", "step", "stop_lane", "fork", "look", "attribute", "missed", "pace")


class Feed:
    """What the next click of the button sends, and what the browser sent."""

    def __init__(self):
        self.frames: list[dict] = []
        self.heard: list[tuple[str, dict]] = []

    def send(self):
        yield from self.frames

    def hear(self, name: str):
        def handler(event: gr.EventData) -> None:
            self.heard.append((name, dict(event._data or {})))
        return handler


@pytest.fixture(scope="module")
def feed():
    return Feed()


@pytest.fixture(scope="module")
def address(feed):
    with gr.Blocks() as demo:
        send = gr.Button("send", elem_id="send")
        live = Lanes(elem_id="live")
        # the previous run may still be under way
        send.click(feed.send, None, live, show_progress="hidden", trigger_mode="multiple")
        for name in ACTS:
            getattr(live, name)(feed.hear(name), None, None, show_progress="hidden", trigger_mode="multiple")
    with launched(demo.queue()) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def visitor(browser, address):
    """One page for all tests: every run that is sent starts anew. Script errors fail the test."""
    page = new_context(
        browser, viewport={"width": 1440, "height": 2400}, accept_downloads=True, has_touch=True
    ).new_page()
    page.broken = []
    page.on("pageerror", lambda error: page.broken.append(error))
    page.goto(address)
    page.wait_for_selector(".live .welcome")
    return page


@pytest.fixture
def page(visitor, feed):
    feed.heard.clear()
    visitor.set_viewport_size({"width": 1440, "height": 2400})
    visitor.evaluate("scrollTo(0, 0)")  # views out of sight are not drawn, and the page is shared
    if visitor.locator(".live .player").is_visible():
        visitor.select_option(".live .mode", "time")
        visitor.keyboard.press("Escape")
    yield visitor
    assert not visitor.broken


def send(page, feed, *frames):
    """Send frames and wait for the lanes of a new run: the previous run may look like the awaited one."""
    feed.frames = list(frames)
    page.click("#send")
    page.evaluate("document.activeElement.blur()")  # keys go to the player, not to the button
    if frames[0].get("headers"):
        page.wait_for_selector(f".live[data-run='{frames[0]['run']}']")


def drawn(page):
    """Wait until an action is on screen: the view draws in the next animation frame, so wait for two."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


def seek(page, share: float):
    """Pause the player and move its slider to a share of the run."""
    page.evaluate("""(share) => {
        document.querySelector(".live .play.playing")?.click();
        const scrub = document.querySelector(".live .scrub");
        scrub.value = scrub.max * share;
        scrub.dispatchEvent(new Event("input", { bubbles: true }));
    }""", share)
    drawn(page)


def token_texts(page, lane: int) -> list[str]:
    return page.locator(f".lane[data-lane='{lane}'] .tokens > .t").evaluate_all(
        "spans => spans.map((span) => span.textContent)"
    )


def numbers(page, lane: int) -> dict[str, float | None]:
    shown = page.locator(f".lane[data-lane='{lane}'] dd[data-metric]").evaluate_all(
        "cells => cells.map((dd) => [dd.dataset.metric, dd.dataset.value])"
    )
    return {name: None if value == "null" else float(value) for name, value in shown}


def choose(page, lane: int):
    page.click(f".live .chooser .tab[data-lane='{lane}']")
    drawn(page)


def wait_for(page, feed, name: str, times: int = 1) -> dict:
    """The browser's events, once there are so many of a name."""
    for _ in range(60):
        found = [data for heard, data in feed.heard if heard == name]
        if len(found) >= times:
            return found[-1]
        page.wait_for_timeout(50)
    raise AssertionError(f"the browser did not say {name} {times} times, only {feed.heard}")
