"""The logic of the page's modules without a page: evaluated in an empty window, with neither server nor Gradio.

The window is one of the Chromium that the browser tests need anyway: an engine of its own would be one more dependency
and another dialect than that of visitors.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from chromium import chromium
from playwright.sync_api import Browser

from playground.page_scripts import joined_module, parsed, read_module
from playground.player import live_view_assets
from playground.ui.play import lane_editor

Evaluate = Callable[..., Any]
"""Evaluates an expression with what the scripts define; a function is called with the argument."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def defining(*modules: str, constants: Mapping[str, Any] = {}) -> str:
    """A script that defines globally what these modules export."""
    exports = {name: ", ".join(read_module(name).exports) for name in modules}
    imports = "".join(f'import {{ {names} }} from "./{name}";\n' for name, names in exports.items())
    return joined_module(parsed("test.js", f"{imports}Object.assign(window, {{ {', '.join(exports.values())} }});"),
                         constants)


def evaluating(browser: Browser, source: str) -> Evaluate:
    window, broken = browser.new_page(), []
    window.on("pageerror", lambda error: broken.append(error))
    window.add_script_tag(content=source)
    assert not broken
    return window.evaluate


@pytest.fixture(scope="module")
def run_scripts(browser: Browser) -> Evaluate:
    """What a run is, and its numbers."""
    modules = (f"run/{name}.js" for name in ("trace", "model", "metrics"))
    return evaluating(browser, defining(*modules, constants=live_view_assets.constants()))


@pytest.fixture(scope="module")
def rule_scripts(browser: Browser) -> Evaluate:
    """The editor's rules of a lane, with the catalogue of the strategies."""
    return evaluating(browser, defining("editor/rules.js", constants=lane_editor.constants()))
