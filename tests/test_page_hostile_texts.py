"""Texts that would rather be a page, in a real browser: prompts, chats, links, and what a model writes."""
from __future__ import annotations

import re

import pytest
from app_page import (  # noqa: F401
    address,
    browser,
    expect,
    open_settings,
    page,
    ran,
    running,
    share_link,
    tokens,
    visit,
)
from toys import byte_tokenizer

from playground.trace import Trace
from playground.ui.components.settings import Settings

pytestmark = pytest.mark.journey
GREEDY = {"strategy": "greedy"}
ATTACK = "<img src=x onerror=window.hacked=1>"
HOSTILE = (
    f"{ATTACK}</textarea><script>window.hacked=1</script> \u202eabc\u202c שלום مرحبا 👩‍👩‍👧 ${{7*7}}"
    f" {'w' * 400}"
)


def unharmed(page) -> bool:
    """Whether nothing that was text has become part of the page."""
    return page.evaluate(
        "window.hacked === undefined && !document.querySelector('img[src=x]') && !document.title.includes('<')"
    )


def test_a_hostile_prompt_is_text_everywhere(page, address):
    visit(page, address, Settings(prompt=HOSTILE, context=HOSTILE, length=4, lanes=[GREEDY]))
    ran(page)
    shown = running(page, 0).locator(".prompt")
    assert ATTACK in shown.text_content() and "w" * 400 in shown.text_content()
    expect(running(page, 0).locator(".setting")).to_have_attribute("title", re.compile("<img src=x"))
    running(page, 0).locator(".text").press("ArrowLeft")
    expect(page.locator("#live .card")).to_be_visible()
    assert unharmed(page)


def test_a_hostile_prompt_comes_back_from_its_link_and_from_the_browsers_memory(page, address):
    visit(page, address, Settings(prompt=HOSTILE, length=4))
    open_settings(page)
    share_link(page)
    page.wait_for_function("new URLSearchParams(location.search).has('s')")
    code = page.evaluate("new URLSearchParams(location.search).get('s')")
    assert Settings.from_code(code).prompt == HOSTILE
    page.goto(address)
    expect(page.locator("#prompt textarea")).to_have_value(HOSTILE)
    assert unharmed(page)


def test_hostile_turns_of_a_chat_are_text(page, address):
    asked = Settings(prompt="Who?", mode="chat", system=HOSTILE, before=[[ATTACK, ATTACK]], length=2, lanes=[GREEDY])
    page.goto(f"{address}?s={asked.to_code()}")
    expect(page.locator(".turns .said").first).to_have_text(ATTACK)
    ran(page)
    assert unharmed(page)


def test_a_refusal_that_quotes_a_visitor_quotes_text(page, address):
    visit(page, address, Settings(prompt="The red fox", model=f"/no/{ATTACK}"))
    page.click("#run")
    expect(page.locator("#model-notice")).to_contain_text(ATTACK)
    assert unharmed(page)


def test_a_run_over_a_hostile_prompt_is_saved_as_it_was(page, address, tmp_path):
    visit(page, address, Settings(prompt=HOSTILE, length=4, lanes=[GREEDY]))
    ran(page)
    page.click("#live .save > button")
    with page.expect_download() as download:
        page.click("#live [data-do='export']")
    download.value.save_as(tmp_path / "run.jsonl")
    assert Trace.load(tmp_path / "run.jsonl").headers[0].prompt == HOSTILE
    assert "<" not in download.value.suggested_filename


def test_what_is_wrong_comes_into_sight_on_a_phone_however_often_it_is_asked_for(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, address, Settings(prompt="The green bird", lanes=4 * [GREEDY]))
    page.fill("#prompt textarea", " ")
    notice = page.locator(".notice p", has_text="The prompt is empty")
    for _ in range(2):
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        expect(notice).not_to_be_in_viewport()
        page.keyboard.press("Control+Enter")
        expect(notice).to_be_in_viewport()


def test_a_hostile_prompt_does_not_widen_a_phones_page(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, address, Settings(prompt=HOSTILE, length=4, lanes=[GREEDY]))
    ran(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_html_that_a_model_writes_is_text_in_lane_card_and_chart(page, address):
    written = f"{ATTACK}<script>window.hacked=1</script>"
    lane = {**GREEDY, "forced": byte_tokenizer().encode(written)}
    visit(
        page,
        address,
        Settings(prompt="The red fox", length=len(lane["forced"]) + 1, lanes=[lane, {**lane, "strategy": "sample"}]),
    )
    ran(page)
    expect(running(page, 0).locator(".tokens")).to_contain_text(written)
    tokens(page, 0).first.click()
    expect(page.locator("#live .card")).to_contain_text("<")
    page.locator("#live .views").scroll_into_view_if_needed()
    assert unharmed(page)
