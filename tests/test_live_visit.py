"""The runs of a visit: forks hang below theirs, earlier ones come back as they were, the oldest go first."""
from __future__ import annotations

from dataclasses import asdict

import pytest
from live_page import address, browser, feed, numbers, page, send, token_texts, visitor, wait_for  # noqa: F401
from playwright.sync_api import expect

from playground.player.frames import frame, new_name, recording
from support.live_runs import EVENTS, HEADERS
from support.live_sequences import lane
from support.saved_runs import FIRST, kept, show, visit_run, writing

FORKED = visit_run(writing(), writing(1, 4, tokens=(1, 4, 2)))


@pytest.fixture
def fresh(page, address):
    """The page as a visitor opens it, without stored runs."""
    page.goto(address)
    page.wait_for_selector(".live .welcome")
    return page


def test_a_fork_hangs_below_its_run_and_the_run_can_be_brought_back(fresh, feed):
    first = show(fresh, feed, FIRST)
    expect(fresh.locator(".live .visit")).to_be_hidden()
    second = show(fresh, feed, FORKED)
    assert kept(fresh) == ["Run 1Greedy, “Say”", "Run 2lane 1 forked at token 2: “ w4” instead of “ w2”, as lane 2"]
    assert fresh.locator(".visit li li .visit-run[aria-current]").text_content().startswith("Run 2")
    fresh.locator(".live .visit-run").first.click()
    fresh.wait_for_selector(f".live[data-run='{first}']")
    expect(fresh.locator(".lane")).to_have_count(1)
    assert token_texts(fresh, 0) == [" w1", " w2", " w3"]
    fresh.locator(".lane[data-lane='0'] .tokens > .t").nth(1).click()
    assert "Run again from here" in fresh.locator(".live .card .candidate[data-id='4']").get_attribute("title")
    fresh.keyboard.press("Escape")  # the card may cover the runs
    fresh.locator(".live .visit-run").nth(1).click()
    fresh.wait_for_selector(f".live[data-run='{second}']")
    assert token_texts(fresh, 1) == [" w1", " w4", " w2"]
    fresh.locator(".lane[data-lane='0'] .tokens > .t").nth(2).click()
    expect(fresh.locator(".live .card .candidate[data-id='4']")).to_be_enabled()


def test_a_run_goes_on_while_an_earlier_one_is_shown(fresh, feed):
    first = show(fresh, feed, FIRST)
    name, facts = new_name(), [stamped.to_json() for stamped in FORKED.events]
    headers = [asdict(header) for header in FORKED.headers]
    send(fresh, feed, frame(name, 0, facts[:4], "running", headers))
    fresh.locator(".live .visit-run").first.click()
    send(fresh, feed, frame(name, 1, facts[4:], "done"))
    fresh.wait_for_timeout(300)
    assert fresh.locator(".live").get_attribute("data-run") == first
    fresh.locator(".live .visit-run").nth(1).click()
    expect(fresh.locator(".lane[data-lane='1'] .tokens > .t")).to_have_count(3)
    assert not feed.heard


def test_a_run_that_was_packed_away_comes_back_as_it_was(fresh, feed):
    fresh.evaluate("""() => {
        const Press = CompressionStream;
        window.packed = 0;
        window.CompressionStream = class extends Press { constructor(form) { super(form); window.packed += 1; } };
    }""")
    first = show(fresh, feed, FORKED)
    before = [(token_texts(fresh, lane), numbers(fresh, lane)) for lane in (0, 1)]
    show(fresh, feed, FIRST)
    show(fresh, feed, FIRST)
    fresh.wait_for_function("packed >= 1")
    assert (
        f"3 runs, {len(FORKED.events) + 2 * len(FIRST.events)} events" in fresh.locator(".visit-note").text_content()
    ), "what is packed still counts"
    fresh.locator(".live .visit-run").first.click()
    fresh.wait_for_selector(f".live[data-run='{first}']")
    expect(fresh.locator(".lane[data-lane='1'] .tokens > .t")).to_have_count(3)
    assert [(token_texts(fresh, lane), numbers(fresh, lane)) for lane in (0, 1)] == before


def test_a_held_run_is_still_held_when_it_is_brought_back(fresh, feed):
    name, facts = new_name(), [stamped.to_json() for stamped in FIRST.events]
    headers = [asdict(header) for header in FIRST.headers]
    show(fresh, feed, FIRST)
    send(fresh, feed, frame(name, 0, facts[:4], "held", headers))
    fresh.locator(".live .visit-run").first.click()
    fresh.locator(".live .visit-run").nth(1).click()
    expect(fresh.locator(".lane .status")).to_have_text("held")
    expect(fresh.locator(".live .play")).to_have_attribute("aria-label", "Play")
    fresh.click(".live .play")
    assert wait_for(fresh, feed, "resume") == {}


def test_a_run_that_begins_with_no_new_token_is_no_fork(fresh, feed):
    for trace in (FORKED, FORKED):
        show(fresh, feed, trace)
    expect(fresh.locator(".live .visit > ol > li")).to_have_count(2)


def test_the_oldest_runs_go_first_and_a_replayed_recording_is_none_of_them(fresh, feed):
    send(fresh, feed, recording(HEADERS, EVENTS))
    for _ in range(21):
        show(fresh, feed, FIRST)
    assert [text.split("Greedy")[0] for text in kept(fresh)] == [f"Run {number}" for number in range(10, 22)]
    assert "12 runs" in fresh.locator(".visit-note").text_content()
