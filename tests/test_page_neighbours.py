"""Visitors on the same page, and a connection that breaks, in a real browser."""
from __future__ import annotations

import pytest
from app_page import (  # noqa: F401
    address,
    browser,
    expect,
    new_tab,
    open_settings,
    page,
    ran,
    running,
    running_visitors,
    status,
    tokens,
    visit,
)
from counting import Counting, counted, counting_site, open_page  # noqa: F401
from playwright.sync_api import Page

from playground.ui.components.settings import Settings

pytestmark = pytest.mark.journey
GREEDY, SAMPLE = {"strategy": "greedy"}, {"strategy": "sample"}


def test_two_visitors_never_see_each_others_text(address, new_tab):
    visitors = [new_tab(), new_tab()]
    secrets = ("a violet giraffe", "an amber walrus")
    for visitor, secret in zip(visitors, secrets):
        visit(visitor, address, Settings(prompt=secret, length=4000, lanes=[GREEDY]))
        visitor.click("#run")
    for visitor in visitors:
        expect(tokens(visitor, 0).nth(5)).to_be_attached()
    for visitor, own, other in zip(visitors, secrets, secrets[::-1]):
        assert own in running(visitor, 0).locator(".prompt").text_content()
        assert other not in visitor.content()


def test_a_visitor_without_a_run_is_shown_none_of_another(counted, new_tab):
    address, _ = counted
    first, second = new_tab(), new_tab()
    visit(first, address, Settings(prompt="first"))
    first.click("#run")
    expect(tokens(first, 0).nth(2)).to_be_attached()
    visit(second, address, Settings(prompt="second"))
    open_settings(second)
    second.click("#again")
    expect(second.locator("#prompt-notice")).to_contain_text("no run to show yet")


def test_a_run_says_with_how_many_others_it_takes_turns(counted, new_tab):
    address, _ = counted
    visitors = running_visitors(new_tab, address, "first", "second")
    for visitor in visitors:
        expect(visitor.locator("#status")).to_contain_text("sharing the device with 1 other run")
    visitors[0].click("#stop")
    expect(visitors[1].locator("#status")).not_to_contain_text("in turn")


def paused(visitor):
    visitor.locator("#live .live").focus()
    visitor.keyboard.press("Space")


@pytest.fixture
def one_seat():
    """Address of a page where one run at a time is served."""
    with open_page(lambda models, settings, memory: Counting([], settings.prompt, forward=0.01), seats=1) as address:
        yield address


@pytest.mark.parametrize("makes_room", [Page.close, paused], ids=["leaves", "pauses"])
def test_a_visitor_who_comes_when_all_places_are_taken_is_queued(one_seat, new_tab, makes_room):
    first, second = new_tab(), new_tab()
    for visitor in (first, second):
        visit(visitor, one_seat, Settings(prompt="mine"))
        visitor.click("#run")
        expect(visitor.locator("#stop")).to_be_visible()
    expect(tokens(first, 0).nth(2)).to_be_attached()
    expect(second.locator("#status")).to_contain_text("place 1 in the queue")
    second.click("#stop")
    expect(second.locator("#run")).to_be_visible()
    second.click("#run")
    expect(second.locator("#status")).to_contain_text("place 1 in the queue")
    makes_room(first)
    expect(tokens(second, 0).nth(2)).to_be_attached()


@pytest.fixture
def cut(browser):
    """Takes the network away from all tabs, or gives it back."""
    yield browser.set_offline
    browser.set_offline(False)


def test_after_a_lost_connection_the_run_is_there_and_another_can_begin(page, address, cut):
    visit(page, address, Settings(prompt="The red fox", length=4000, lanes=[GREEDY]))
    page.click("#run")
    expect(tokens(page, 0).nth(5)).to_be_attached()
    cut(True)
    page.wait_for_timeout(1500)
    before = tokens(page, 0).count()
    cut(False)
    expect(page.get_by_text("Attempting reconnection")).to_have_count(0)  # then the page loads itself again
    expect(tokens(page, 0).nth(before - 1)).to_be_attached()
    # in one step: the end of the lost run may arrive at any moment and hide the button
    page.evaluate("document.querySelector('#stop')?.checkVisibility() && document.querySelector('#stop').click()")
    open_settings(page)
    page.fill("#length input", "3")
    page.click("#run")
    expect(status(page, 0)).to_have_text("reached the token limit")


def test_a_run_that_a_reload_interrupts_is_kept_as_far_as_it_has_come(page, address):
    """A browser that has lost its server for a while loads the page again by itself."""
    visit(page, address, Settings(prompt="The red fox", length=4000, lanes=[GREEDY, SAMPLE]))
    page.click("#run")
    expect(tokens(page, 1).nth(5)).to_be_attached()
    page.reload()
    expect(status(page, 1)).to_have_text("interrupted")
    expect(page.locator("#live .message")).to_contain_text("The page was loaded again during run 1")
    assert tokens(page, 1).count() > 5
    ran_from = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", ran_from)
    expect(page.locator("#live .visit-run").first).to_contain_text(", interrupted")
    page.locator("#live .visit-run").first.click()
    expect(status(page, 1)).to_have_text("interrupted")


def test_a_run_that_has_just_ended_outlasts_a_reload(page, address):
    """Its compression takes a while, and a page that is left does not wait for it."""
    page.add_init_script("""window.CompressionStream = function () {
        return new TransformStream({ transform: () => new Promise(() => {}) });
    };""")
    visit(page, address, Settings(prompt="The red fox", length=6, lanes=[GREEDY, SAMPLE]))
    page.click("#run")
    expect(status(page, 1)).to_have_text("reached the token limit")
    texts = page.locator("#live .lane .tokens").all_text_contents()
    page.reload()
    expect(page.locator("#live .lane .tokens").first).to_have_text(texts[0])
    assert page.locator("#live .lane .tokens").all_text_contents() == texts
    expect(status(page, 1)).to_have_text("reached the token limit")


def test_a_reload_keeps_what_was_chosen_after_a_link_was_opened(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[GREEDY]))
    page.fill("#prompt textarea", "The green bird")
    page.keyboard.press("Tab")
    page.wait_for_function("playground.settingsNow().prompt === 'The green bird'")
    page.reload()
    expect(page.locator("#settings .summary")).to_contain_text("12 tokens")
    expect(page.locator("#prompt textarea")).to_have_value("The green bird")


def test_the_last_run_can_be_shown_again(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[GREEDY]))
    ran(page)
    open_settings(page)
    page.click("#again")
    expect(page.locator("#live [data-recorded='true'] .lane .tokens > .t").nth(11)).to_be_attached()
