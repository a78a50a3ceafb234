"""The browser that the tests drive."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import which

from playwright.sync_api import Browser, sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]  # no calls home, and none for a screen


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium without a window, closed afterwards."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=QUIET)
        yield browser
        browser.close()
