"""What the style sheets do as a whole, in a real browser: Gradio writes them again, and a browser tries every rule on
whatever changes.
"""
from __future__ import annotations

import pytest
from app_page import address, browser, page, visit  # noqa: F401
from playwright.sync_api import expect

from playground.ui.components.settings import Settings
from playground.ui.server.pages import PLACES

PHONE = {"width": 390, "height": 844}

LOOKING_THROUGH = r"""() => {
    const live = document.querySelector(".live");
    const selectors = [];
    const collect = (rules) => {
        for (const rule of rules) {
            if (rule.selectorText) selectors.push(rule.selectorText);
            if (rule.cssRules) collect(rule.cssRules);
        }
    };
    for (const sheet of document.styleSheets) collect(sheet.cssRules);
    const anchors = (selector) => [...selector.matchAll(/:has\(/g)].map(({ index }) => {
        const before = selector.slice(0, index).replace(/:(not|is|where)\($/, "") || "*";
        const open = before.split("(").length - before.split(")").length;
        return (/[\s>+~,(]$/.test(before) ? before + "*" : before) + ")".repeat(open);
    });
    const found = selectors.flatMap(anchors);
    const near = (node) => node.contains(live) || live.contains(node);
    return [found.length, [...new Set(found)].filter((anchor) => [...document.querySelectorAll(anchor)].some(near))];
}"""

MOVING = """() => [...document.querySelectorAll(".gradio-container, .gradio-container *")]
    .filter((node) => [null, "::before", "::after"].some((part) => {
        const style = getComputedStyle(node, part);
        const durations = `${style.transitionDuration}, ${style.animationDuration}`.split(", ");
        return durations.some((duration) => parseFloat(duration) > 0.001);
    })).map((node) => `${node.tagName}.${node.className}`)"""


def test_no_style_asks_what_the_live_view_has_in_it(page, address):
    """A rule with `:has` is tested on all descendants whenever something is added, and lanes contain thousands of
    tokens.
    """
    visit(page, address, Settings(prompt="The red fox", length=4))
    rules, through = page.evaluate(LOOKING_THROUGH)
    assert rules > 10 and through == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_nothing_on_any_page_takes_its_time_for_those_who_want_no_motion(page, address, place):
    page.emulate_media(reduced_motion="no-preference")
    page.goto(f"{address}/{place.path}")
    page.wait_for_selector(".places")
    assert page.evaluate(MOVING)
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(MOVING) == []


def test_badges_of_four_lanes_are_not_cut_to_a_letter(page, address):
    lane = {"strategy": "greedy", "extras": [["sink_window", {}], ["regex", {}]]}
    visit(page, address, Settings(prompt="The red fox", length=4, lanes=4 * [lane]))
    page.locator(".lane-card[data-lane='3'] .promise").first.wait_for()
    shown = "all => all.map((one) => one.offsetWidth).filter(Boolean)"
    widths = page.eval_on_selector_all(".lane-card .promise", shown)
    assert len(widths) == 4 and min(widths) > 40


@pytest.mark.parametrize("width", [1440, 1280, 1024])
def test_the_head_of_the_page_is_one_row(page, address, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(address)
    page.locator(".top .dot").wait_for()
    middles = page.locator(":is(.masthead, .places, .top .tools, .top > .status)").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect()).map(({ top, height }) => top + height / 2)"
    )
    assert len(middles) == 4 and max(middles) - min(middles) < 8
    assert page.locator(".masthead").evaluate("head => head.offsetHeight") < 30  # its sentence is not cut in two


def test_the_buttons_of_a_view_do_not_touch_on_a_phone(page, address):
    page.set_viewport_size(PHONE)
    page.goto(address)
    page.locator(".panel-tree .which").wait_for()
    before, which, after = page.locator(".panel-tree :is(.icon, .which)").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect()).map(({ left, right }) => ({ left, right }))"
    )
    assert which["left"] - before["right"] >= 4 and after["left"] - which["right"] >= 4


def test_the_foot_of_the_page_is_not_faded(page, address):
    """Faded text of the soft colour has a contrast below 4.5."""
    page.goto(address)
    assert page.locator("footer").evaluate("foot => getComputedStyle(foot).opacity") == "1"


def test_the_settings_of_a_run_are_the_only_ones_on_the_page(page, address):
    page.goto(address)
    expect(page.locator("footer button:visible")).to_have_count(1)
    assert page.locator("footer").inner_text().strip() == "Use via API"
    expect(page.get_by_role("button", name="Settings")).to_have_count(1)
