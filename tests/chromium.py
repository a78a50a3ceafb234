"""The browser that the tests drive."""
from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which

from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

PATIENCE = 60  # seconds after which something is broken rather than slow: the machine may have other work
expect.set_options(timeout=1000 * PATIENCE)
VIEW_SETTINGS = "decoding-playground.view"  # where the page keeps how runs are shown
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]  # no background requests, no display


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium without a window, closed afterwards."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=QUIET)
        yield browser
        browser.close()


def new_context(
    browser: Browser, pace: str = "live", views: str = "all", align: str = "time", **how
) -> BrowserContext:
    """A browser context of its own, with the common timeout. It shows runs at real speed, or as `pace` says, aligned by
    time, and all views below the lanes; with `views="one"` as on a visitor's wide page, one at a time beside them.
    """
    context = browser.new_context(**how)
    shown = json.dumps({"pace": pace, "views": views, "align": align})
    context.add_init_script(f"try {{ localStorage['{VIEW_SETTINGS}'] ??= '{shown}' }} catch {{}}")
    context.set_default_timeout(1000 * PATIENCE)
    return context
