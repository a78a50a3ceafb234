"""The logic of the page's scripts without a page: evaluated in an empty window, with neither server nor Gradio.

The window is one of the Chromium that the browser tests need anyway: an engine of its own would be one more dependency
and another dialect than that of visitors.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chromium import chromium
from playwright.sync_api import Browser

from playground.asset_files import ASSETS
from playground.player.live_view_assets import constants
from playground.ui.play.lane_editor import catalogue, source_of

RUNS = ("dom", "composed", "contents", "trace", "metrics", "ledger", "model")  # what a run is, and its numbers


Evaluate = Callable[..., Any]
"""Evaluates an expression with what the scripts define; a function is called with the argument."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def evaluating(browser: Browser, source: str) -> Evaluate:
    window, broken = browser.new_page(), []
    window.on("pageerror", lambda error: broken.append(error))
    window.add_script_tag(content=source)
    assert not broken
    return window.evaluate


@pytest.fixture(scope="module")
def run_scripts(browser: Browser) -> Evaluate:
    """The scripts of runs."""
    logic = [(ASSETS / "live" / f"{name}.js").read_text(encoding="utf-8") for name in RUNS]
    return evaluating(browser, "\n".join([*constants(), *logic]))


@pytest.fixture(scope="module")
def rule_scripts(browser: Browser) -> Evaluate:
    """The editor's rules of a lane, with the catalogue of the strategies."""
    return evaluating(browser, source_of("editor/rules").replace("__CATALOGUE__", catalogue()))
