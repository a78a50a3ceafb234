"""A page over the bundled models on which lessons are taken, and what is read off their runs."""
from __future__ import annotations

import pytest
from chromium import chromium, new_context
from playwright.sync_api import BrowserContext, Page, expect

import playground
from playground.ui.components.theme import theme_options
from playground.ui.play.lessons import lessons
from playground.ui.server.gpu_work import prepare_run
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.launched import launched

STEPS = [
    pytest.param(lesson, i, id=f"{lesson.name}-{i + 1}")
    for lesson in lessons().values()
    for i in range(len(lesson.steps))
]


@pytest.fixture(scope="module")
def begun():
    return []


@pytest.fixture(scope="module")
def address(begun):
    def prepare(models, settings, memory):
        begun.append(prepare_run(models, settings, memory))
        return begun[-1]

    with launched(build(Site(prepare=prepare)), **theme_options()) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    """One browser for all visitors, so that the page's own files are fetched once."""
    with chromium() as opened:
        yield new_context(opened, viewport={"width": 1440, "height": 900}, reduced_motion="reduce")


@pytest.fixture
def page(browser: BrowserContext):
    """A first-time visitor who prefers reduced motion; script errors fail the test."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    if page.url.startswith("http"):
        page.evaluate("localStorage.clear()")
    page.close()
    assert not wrong


def arrive(page: Page, address: str, query: str = "") -> None:
    page.goto(address + query)
    expect(page.locator("#live [data-recorded='true'] .tokens > *").nth(2)).to_be_attached()


@pytest.fixture(scope="module")
def models():
    return playground.load()
