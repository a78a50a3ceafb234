"""What an overlay names at a word is switched off in a copy of the lane: by a button, a key, and on a phone."""
from __future__ import annotations

import re

from app_page import address, browser, expect, page, running, status, visit  # noqa: F401
from chromium import new_context

from playground.ui.components.settings import Settings

LENGTH = 8
HEADS = {"strategy": "greedy", "extras": [["attention_entropy", {}]]}


def begun(page, address, lanes: list[dict]) -> list[str]:
    """The texts of these lanes, which have been run."""
    visit(page, address, Settings(prompt="The green bird", length=LENGTH, lanes=lanes))
    page.click("#run")
    ended(page, len(lanes))
    return texts(page)


def ended(page, lanes: int) -> None:
    expect(page.locator("#live [data-recorded='false'] .lane")).to_have_count(lanes)
    for lane in range(lanes):
        expect(status(page, lane)).to_have_text("reached the token limit")
        expect(running(page, lane).locator(".tokens > .t")).to_have_count(LENGTH)
    expect(page.locator("#run")).to_be_visible()


def texts(page) -> list[str]:
    return page.locator("#live .lane .tokens").all_text_contents()


def hold(page, lane: int, position: int) -> None:
    running(page, lane).locator(".tokens > .t").nth(position).click()


def switches(page):
    return page.locator("#live .switch-off:visible")


def parts_of(page, lane: int) -> str:
    """What the editor says of a lane."""
    return page.locator(f".lane-card[data-lane='{lane}'] .lane-config").inner_text()


def test_a_button_runs_a_copy_of_the_lane_without_the_part(page, address):
    before = begun(page, address, [{"strategy": "sample"}, HEADS])
    hold(page, 0, 2)
    expect(switches(page), "no overlay reads this lane").to_have_count(0)
    page.keyboard.press("Escape")
    hold(page, 1, 2)
    part = switches(page).first.inner_text()
    assert re.fullmatch(r"head \d+\.\d+", part)
    page.get_by_role("button", name=f"Switch {part} off in a copy").click()
    ended(page, 3)
    assert texts(page)[:2] == before
    assert "switch part" in parts_of(page, 2).replace("_", " ") and "attention" not in parts_of(page, 2)
    expect(page.locator("#live .lane .title").nth(2)).to_have_text(f"{part.capitalize()} off · Greedy")
    page.locator("#settings .undo").click()
    expect(page.locator(".lane-card")).to_have_count(2)


def test_the_copy_is_what_the_lane_writes_with_the_part_off(page, address):
    begun(page, address, [HEADS])
    hold(page, 0, 4)
    part = switches(page).first.inner_text()
    switches(page).first.click()
    ended(page, 2)
    copy = texts(page)[1]
    assert begun(page, address, [{"strategy": "greedy", "extras": [["switch_part", {"parts": part}]]}]) == [copy]


def test_the_key_switches_off_what_is_named_first_and_says_where_nothing_is(page, address):
    begun(page, address, [HEADS, {"strategy": "sample"}])
    running(page, 0).locator(".text").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("o")
    ended(page, 3)
    expect(page.locator("#live .lane .title").nth(1)).to_contain_text(" off · Greedy")
    running(page, 2).locator(".text").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("3")
    page.keyboard.press("o")
    expect(page.locator("#live .message")).to_contain_text("No overlay names a part of the network here")


def test_a_fifth_lane_replaces_one(page, address):
    before = begun(page, address, [HEADS, *3 * [{"strategy": "sample"}]])
    hold(page, 0, 3)
    switches(page).first.click()
    dialog = page.locator("dialog.replacing")
    expect(dialog).to_contain_text("Which lane does the copy replace?")
    expect(dialog.locator(".choice small").first).to_have_text("the lane that is copied")
    dialog.locator(".choice").nth(3).click()
    expect(page.locator("#live .lane .title").nth(1)).to_contain_text(" off · Greedy")
    ended(page, 4)
    assert [texts(page)[0], *texts(page)[2:]] == before[:3]


def test_a_phone_has_the_buttons_in_the_sheet_of_the_word(browser, address):  # noqa: F811
    size = {"width": 390, "height": 844}
    phone = new_context(browser.browser, views="one", viewport=size, has_touch=True, reduced_motion="reduce").new_page()
    begun(phone, address, [HEADS])
    hold(phone, 0, 3)
    switches(phone).first.scroll_into_view_if_needed()
    box = switches(phone).first.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    switches(phone).first.tap()
    ended(phone, 2)
    phone.context.close()
