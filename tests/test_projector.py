"""The projector mode enlarges every page and hides nothing."""
from __future__ import annotations

import pytest
from playwright.sync_api import expect

from support.lesson_pages import address, arrive, begun, browser, page  # noqa: F401

CONTROLS = (
    "#prompt", "#run", ".lessons-open", "#gallery", ".settings-open", ".lane-card .edit >> nth=0", ".add-lane",
    ".live .player", ".live .lanes", ".live .key", ".live .views",
)


@pytest.mark.parametrize("place, heading", [("", ".masthead h1"), ("library", "#library h2"), ("game", ".game-lead h2"),
                                            ("benchmark", ".masthead h1")])
def test_projector_mode_enlarges_every_page_by_half_without_overflow(page, address, place, heading):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(address + place)
    inked = f"""() => {{
        const words = document.createRange();
        words.selectNodeContents(document.querySelector("{heading}"));
        return words.getBoundingClientRect().width;
    }}"""
    page.locator(heading).wait_for()
    before = page.evaluate(inked)
    page.keyboard.press("p")
    assert page.evaluate(inked) == pytest.approx(1.5 * before, rel=0.02)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("playground.switchProjector()")


def test_projector_mode_hides_nothing_and_covers_nothing(page, address):
    page.set_viewport_size({"width": 1440, "height": 900})
    arrive(page, address)
    page.keyboard.press("p")
    for control in CONTROLS:
        expect(page.locator(control)).to_be_visible()
    for part in (".live .lane[data-lane='0'] .text", ".live .player", "#run"):
        expect(page.locator(part)).to_be_in_viewport()
    page.click(".lessons-open")
    page.locator(".lesson-list button").first.click()
    expect(page.locator(".lesson-panel h3")).to_be_visible()
    page.locator("#run").click(trial=True)  # nothing lies over it
    page.keyboard.press("Escape")
    page.evaluate("playground.switchProjector()")


def test_projector_mode_is_remembered_and_its_key_is_for_no_field(page, address):
    arrive(page, address)
    page.locator("#prompt textarea").press("p")
    expect(page.locator(".to-projector")).to_have_attribute("aria-pressed", "false")
    page.click(".to-projector")
    arrive(page, address)
    expect(page.locator(".to-projector")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("p")
    expect(page.locator(".to-projector")).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("projector")
