"""The app with small random models in a real browser: fixtures, actions and readings.

`from app_page import address, browser, page` gives a test file the app, which all files share, and its own browser.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import saved
from chromium import PATIENCE, chromium, new_context
from playwright.sync_api import BrowserContext, Page, expect

from playground.ui.components.settings import Settings
from support.launched import free_port

ROOT = Path(__file__).parents[1]
# positions the models take, and what makes a token last some milliseconds: so a run can be caught in the middle
LONG, WIDE = 6000, 1 << 16


# --- the app, started as by a user ---

@contextmanager
def started(folder: Path) -> Iterator[str]:
    """Address of `python app.py` with random models from a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "CONTEXT", LONG)
        patch.setattr(saved, "WIDTH", WIDE)
        models = saved.save_models(folder)
    port = free_port()
    app = subprocess.Popen(
        [sys.executable, "app.py", "--model", models.target, "--draft", models.draft, "--port", str(port)],
        cwd=ROOT,
        # the page offers the code for a frame, and keeps what it measures with the models
        env={**os.environ, "PLAYGROUND_EMBED": "*", "PLAYGROUND_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while "Running on" not in (line := app.stdout.readline()):
        assert line, "the app ended before its page was up"
    threading.Thread(target=app.stdout.read, daemon=True).start()
    yield f"http://127.0.0.1:{port}"
    app.terminate()
    app.wait(PATIENCE)


@pytest.fixture(scope="module")
def address(app: str) -> str:
    return app


@pytest.fixture(scope="module")
def browser():
    """One browser for all visitors, so that the page's own files are fetched once. They want no motion: otherwise the
    recording would play during every test, at a fifth of its CPU time.
    """
    with chromium() as opened:
        yield new_context(opened, viewport={"width": 1280, "height": 900}, reduced_motion="reduce")


@pytest.fixture
def new_tab(browser: BrowserContext):
    """Opens tabs for a test with several visitors and closes them: open tabs would reconnect to the next page here."""
    opened: list[Page] = []
    yield lambda: opened.append(browser.new_page()) or opened[-1]
    for tab in opened:
        tab.close()


@pytest.fixture
def page(browser: BrowserContext, address: str):
    """A visitor's new tab; script errors fail the test."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert not wrong


TWO_LANES = Settings(prompt="The green bird", length=4000, lanes=[{"strategy": "greedy"}, {"strategy": "sample"}])


def visit(page: Page, address: str, settings: Settings = TWO_LANES) -> None:
    page.goto(f"{address}?s={settings.to_code()}")
    expect(page.locator("#prompt textarea")).to_have_value(settings.prompt)
    expect(page.locator(".lane-card")).to_have_count(len(settings.lanes))
    # afterwards nothing moves under the mouse
    expect(page.locator("#settings .summary")).to_contain_text(f"{settings.length} token")
    expect(page.locator("#settings .summary")).to_contain_text("raw text" if settings.mode == "raw" else "chat")


def open_settings(page: Page) -> None:
    """Open the drawer that holds everything about a run but its prompt and its lanes."""
    if not page.locator("#drawer").is_visible():
        page.locator("#settings .settings-open").click()
    expect(page.locator("#length")).to_be_visible()


def share_link(page: Page) -> None:
    """Put the settings into the page's address, and on the clipboard."""
    page.click("#share .share-open")
    page.click("#share [data-share=link]")


def running_visitors(new_tab: Callable[[], Page], address: str, *prompts: str) -> list[Page]:
    """A tab for each prompt with a run that has generated some tokens and can be stopped."""
    pages = [new_tab() for _ in prompts]
    for page, prompt in zip(pages, prompts):
        visit(page, address, Settings(prompt=prompt))
        page.click("#run")
        expect(tokens(page, 0).nth(2)).to_be_attached()
        expect(page.locator("#stop")).to_be_visible()
    return pages


def choose_strategy(page: Page, lane: int, name: str) -> None:
    page.locator(f".lane-card[data-lane='{lane}'] .strategy").click()
    page.locator(f".lane-card[data-lane='{lane}'] .option[data-name='{name}']").click()


def running(page: Page, lane: int):
    """A lane of a run started here, not of the recording shown on arrival."""
    return page.locator(f"#live [data-recorded='false'] .lane[data-lane='{lane}']")


def tokens(page: Page, lane: int):
    return running(page, lane).locator(".tokens > *")


def status(page: Page, lane: int):
    return running(page, lane).locator(".status")


def ran(page) -> None:
    """Press Run, and wait until that run is over."""
    live = page.locator("#live .live")
    before = live.get_attribute("data-run")
    page.click("#run")
    expect(live).not_to_have_attribute("data-run", before or "")
    expect(page.locator("#run")).to_be_visible()
