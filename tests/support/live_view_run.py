"""A small run made by hand, and what the page shows of it."""
from __future__ import annotations

from live_page import seek, send
from playwright.sync_api import expect

from playground.player.frames import frame, new_name
from support.live_runs import EVENTS, HEADERS


def show(page, feed, share: float = 1.0):
    """The whole run, finished before it is shown, with the player at a share of its length."""
    run = frame(new_name(), 0, EVENTS, "done", HEADERS)
    send(page, feed, run)
    seek(page, share)
    expect(page.locator(".live .clock")).to_have_text(
        f"{max(e['at'] for e in EVENTS if e['at'] <= 0.4 * share + 1e-9):.2f} of 0.40 s"
    )
