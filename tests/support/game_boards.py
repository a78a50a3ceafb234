"""Boards of the guessing game, and runs to guess."""
from __future__ import annotations

import pytest
from chromium import chromium, new_context
from playwright.sync_api import Page

import playground
from playground.ui.components.theme import theme_options
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.launched import launched

HOSTILE = "<img src=x onerror=\"window.struck = 1\"> & <b>Mia</b>"
PIECES = (" fox", " crow", " hen", " duck", " bee")
ODDS = (0.5, 0.25, 0.125, 0.0625, 0.0625)  # 1, 2, 3, 4 and 4 bits; 1.875 bits of entropy


def token(came: int = 0, entropy: float = 1.875, pieces=PIECES) -> dict:
    """A token of a game, among candidates with halving probabilities."""
    top = [{"id": i, "piece": piece, "p": p} for i, (piece, p) in enumerate(zip(pieces, ODDS))]
    return {"id": came, "piece": pieces[came], "p": ODDS[came], "entropy": entropy, "top": top}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield new_context(opened, viewport={"width": 1440, "height": 1000})


@pytest.fixture
def page(browser):
    """An empty tab; script errors fail the test."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert not wrong


def options(page: Page) -> list[str]:
    """The offered options, in the order of the keys."""
    return page.locator(".game .option").evaluate_all(
        "all => all.map((one) => one.querySelector('.token, .else').textContent)"
    )


@pytest.fixture(scope="module")
def models():
    return playground.load()


@pytest.fixture(scope="module")
def address(models):
    with launched(build(Site(load=lambda *names, **how: models)), **theme_options()) as address:
        yield address
