"""The live view shows the events of a run."""
from __future__ import annotations

from dataclasses import asdict

import pytest
from live_page import (  # noqa: F401
    address,
    browser,
    choose,
    drawn,
    feed,
    numbers,
    page,
    seek,
    send,
    token_texts,
    visitor,
    wait_for,
)
from playwright.sync_api import expect

from playground.events import Header, Part
from playground.player.frames import frame, new_name
from playground.trace import Trace, check, metrics
from support.live_runs import EVENTS, HEADERS, HOSTILE, RUN
from support.live_view_run import show

READABLE = (
    "tokens",
    "seconds",
    "tokens_per_second",
    "target_forwards",
    "tokens_per_target_forward",
    "draft_forwards",
    "acceptance_rate",
    "mean_accepted",
    "mean_entropy",
    "wasted_tokens",
)


def test_the_run_made_by_hand_is_a_sound_one():
    complaints = [complaint for complaint in check(RUN) if "probability" not in complaint]
    assert not complaints


@pytest.mark.journey
def test_text_is_shown_token_by_token_and_stays_text(page, feed):
    show(page, feed)
    assert token_texts(page, 0) == [HOSTILE, "\n", " b", "<|end|>"]
    assert token_texts(page, 1) == [" s", " a", " b", " c", " r"]
    assert page.locator(".live img").count() == 0
    assert page.evaluate("window.hacked") is None
    origins = page.locator(".lane[data-lane='1'] .tokens > .t").evaluate_all(
        "all => all.map((t) => [...t.classList].find((c) => c.startsWith('o-')))"
    )
    assert origins == ["o-sampled", "o-draft", "o-draft", "o-bonus", "o-redraw"]
    assert page.locator(".lane[data-lane='0'] .tokens .chip").all_inner_texts() == ["<|end|>"]


def test_a_lane_says_who_it_is_and_how_it_ended(page, feed):
    show(page, feed)
    assert page.locator(".lane .status").all_inner_texts() == ["ended", "reached the token limit", "failed"]
    assert page.locator(".lane[data-lane='2'] .trouble").inner_text() == "Choose another draft model."
    assert page.locator(".lane[data-lane='2'] .badge").all_inner_texts() == ["heuristic", "reconstruction"]
    assert page.locator(".lane[data-lane='1'] .badge").all_inner_texts() == ["same text as greedy"]
    assert page.locator(".lane[data-lane='1'] .note").inner_text() == "One draft token was rejected."


def test_lanes_of_one_strategy_are_distinguished_by_what_they_differ_in(page, feed):
    settings = [{"steps": 0, "order": "sure"}, {"steps": 0, "order": "left"}, {"steps": 2, "order": "sure"}]
    headers = [asdict(Header(i, "Fill", parts=[Part("fill", "decoder", knobs)])) for i, knobs in enumerate(settings)]
    plain = asdict(Header(3, "Fill", parts=[Part("fill", "decoder", settings[0]), Part("top_k", "sampler", {"k": 4})]))
    send(page, feed, frame(new_name(), 0, [], "done", [*headers, plain]))
    expect(page.locator(".lane")).to_have_count(4)
    assert page.locator(".lane .title").all_inner_texts() == [
        "Steps 0, order sure · Fill",
        "Order left · Fill",
        "Steps 2 · Fill",
        "Top k · Fill",
    ]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_costs_are_those_of_the_trace_up_to_the_player(page, feed, share):
    """Scrubbing back shows the earlier state: texts and costs of the events up to that time, and nothing of later ones.
    """
    show(page, feed)
    show(page, feed, share)
    for lane in (0, 1):
        seen = [stamped for stamped in RUN.lane(lane).events if stamped.at <= 0.4 * share + 1e-9]
        computed = metrics(Trace([RUN.headers[lane]], seen))
        shown = numbers(page, lane)
        assert {name: shown[name] for name in READABLE} == pytest.approx({name: computed[name] for name in READABLE})
        assert len(token_texts(page, lane)) == computed["tokens"]


def test_live_slots_are_the_most_of_any_head(page, feed):
    show(page, feed)
    assert numbers(page, 1)["kv_live"] == 6
    assert page.locator(".lane[data-lane='1'] .strip").get_attribute("data-peak") == str(
        metrics(RUN.lane(1))["kv_live_peak"]
    )
    choose(page, 1)
    expect(page.locator(".panel-cache .readout")).to_have_text(
        "6 of 6 positions live, 5 reserved for draft tokens, 9 slots freed by this update, 160 B"
    )


@pytest.mark.journey
def test_the_tree_shows_what_was_tested_and_what_was_accepted(page, feed):
    show(page, feed, 0.5)
    choose(page, 1)
    nodes = page.locator(".panel-tree .node[data-node]")
    expect(nodes).to_have_count(4)
    assert nodes.evaluate_all("all => all.map((node) => node.dataset.state)") == ["kept", "refused", "kept", "untested"]
    assert nodes.nth(1).locator(".numbers").text_content().split() == ["p", ".01", "q", ".25", "u", ".90"]
    assert page.locator(".panel-tree .node[data-state='bonus'] .name").text_content() == " c"
    assert page.locator(".panel-tree .which").inner_text() == "round 1 of 2"
    rows = page.locator(".panel-tree .tests tr").all_inner_texts()[1:]
    assert [row.split() for row in rows] == [
        ["x", "0.0100", "0.2500", "0.9000", "rejected"],
        ["a", "0.5000", "0.5000", "0.1250", "accepted"],
        ["b", "0.7500", "0.5000", "0.2500", "accepted"],
    ]
    page.click(".panel-tree button[title='Next round']")
    expect(page.locator(".panel-tree .which")).to_have_text("round 2 of 2")
    assert page.locator(".panel-tree .node[data-node]").evaluate_all(
        "all => all.map((node) => node.dataset.state)"
    ) == ["refused"]


def test_draft_tokens_are_seen_before_their_verdict(page, feed):
    show(page, feed, 0.26)
    beats = []
    for _ in range(7):
        page.keyboard.press("ArrowRight")
        drawn(page)
        states = page.locator(".lane[data-lane='1'] .ghosts .g").evaluate_all("all => all.map((g) => g.classList[1])")
        beats += [states] if states not in beats[-1:] else []
    assert beats[:3] == [["pending", "pending"], ["kept", "kept", "refused", "next"], []]  # the commit settles them


def test_the_mask_view_shows_what_was_allowed(page, feed):
    show(page, feed)
    choose(page, 0)
    page.wait_for_selector(".panel-mask .allowed")
    allowed = page.locator(".panel-mask .allowed").evaluate_all(
        "all => all.map((mark) => [mark.dataset.position, mark.dataset.allowed])"
    )
    assert allowed == [["0", "12"], ["1", "1"], ["3", "40"]]
    assert (
        page.locator(".panel-mask .readout").inner_text()
        == "40 of 100 tokens allowed, 25 % of the probability masked"
    )
    assert page.locator(".panel-mask .favourites .row .piece").text_content() == HOSTILE
    assert page.locator(".panel-mask .forced-run").evaluate_all(
        "all => all.map((run) => [run.dataset.from, run.dataset.to])"
    ) == [["1", "3"]]
    assert page.locator(".panel-mask .accepting").count() == 1


def test_views_that_no_lane_has_are_named_in_one_line(page, feed):
    send(page, feed, frame(new_name(), 0, [event for event in EVENTS if event["lane"] == 2], "done", HEADERS[2:]))
    seek(page, 1.0)
    expect(page.locator(".live .absent")).to_have_text(
        "Not in this run: entropy per token, draft tree, accepted per round, KV cache, grammar mask, cost on the"
        " lane's clock."
    )
    expect(page.locator(".live .panel.empty:visible")).to_have_count(0)
    expect(page.locator(".panel-figures")).to_be_hidden()


@pytest.mark.journey
def test_the_card_of_a_token_shows_its_row_and_forks(page, feed):
    show(page, feed)
    page.locator(".lane[data-lane='1'] .tokens > .t").nth(1).click()
    card = page.locator(".live .card")
    assert card.locator(".candidate .num").all_inner_texts() == ["50 %", "75 %", "25 %", "25 %", "13 %", "banned"]
    assert card.locator(".rest .num").first.inner_text() == "13 %"  # never renormalised: the rest is listed
    assert "p 0.500 q 0.500 draw 0.125" in " ".join(card.locator(".guess").inner_text().split())
    expect(card.locator(".candidate[data-id='9']")).to_be_disabled()  # masked by the grammar
    card.locator(".candidate[data-id='8']").click()
    expect(card).to_be_hidden()
    asked = wait_for(page, feed, "fork")
    assert asked | {"run": ""} == {"run": "", "lane": 1, "sequence": 0, "position": 1, "token": 8}
    page.locator(".lane[data-lane='1'] .tokens > .t").nth(4).click()
    assert "rejected" in card.locator(".guess").inner_text()


@pytest.mark.parametrize("height", [520, 900])
def test_the_card_of_a_token_stays_inside_the_window_and_scrolls_there(page, feed, height):
    show(page, feed)
    page.set_viewport_size({"width": 1280, "height": height})
    page.locator(".lane[data-lane='1'] .tokens > .t").nth(1).click()
    card = page.locator(".live .card")
    box = card.bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= height
    last = card.locator(".candidate").last
    last.scroll_into_view_if_needed()
    expect(last).to_be_in_viewport()
    expect(card.locator(".close")).to_be_in_viewport()
