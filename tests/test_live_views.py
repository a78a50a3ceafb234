"""All lanes in every view, absent views, the interesting places of a run, and the comparison with plain decoding."""
from __future__ import annotations

from dataclasses import replace

import pytest
from live_page import address, browser, choose, drawn, feed, page, seek, token_texts, visitor  # noqa: F401
from playwright.sync_api import expect
from view_runs import GUESSING, PLAIN, WORDS, commit, evicting, in_rounds, one_by_one, run_of, settle, show, step

from playground import events as ev
from playground.events import Cache, Candidate, Commit, Done, Draft, Forward, Mask, Part, Switch, Verdict
from playground.trace import Trace
from playground.trace.cache_contents import write_layers

# --- absent views ---

def test_while_a_lane_runs_its_header_decides_which_views_wait_and_which_are_not_there(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one()[:1]), (GUESSING, in_rounds()[:1])), 1, "running")
    expect(page.locator(".panel-tree .vacancy")).to_be_visible()
    expect(page.locator(".live .absent")).to_have_text("Not in this run: grammar mask.")
    choose(page, 0)
    expect(page.locator(".panel-tree .vacancy"), "a view waits for the lane that has something for it").to_be_visible()
    expect(page.locator(".panel-tree .of-lane")).to_have_text("2")
    expect(page.locator(".panel-entropy .of-lane")).to_have_text("1")
    show(page, feed, run_of((PLAIN, one_by_one()[:1])), state="running")
    expect(page.locator(".panel-tree")).to_be_hidden()
    expect(page.locator(".live .absent")).to_have_text(
        "Not in this run: draft tree, accepted per round, grammar mask."
    )


def test_views_that_wait_do_not_move_when_they_fill(page, feed):
    trace = run_of((PLAIN, one_by_one()))
    early = Trace(trace.headers, trace.events[:1])
    order = "all => all.map((one) => one.className.split(' ')[1])"
    show(page, feed, early, state="running")
    expect(page.locator(".panel:visible")).to_have_count(3)
    before = page.locator(".panel:visible").evaluate_all(order)
    show(page, feed, replace(trace, events=[*trace.events[:-1]]), state="running")
    expect(page.locator(".panel-entropy svg").first).to_be_visible()
    expect(page.locator(".panel:visible")).to_have_count(3)
    assert (
        page.locator(".panel:visible").evaluate_all(order) == before == ["panel-entropy", "panel-cache", "panel-cost"]
    )


def test_views_out_of_sight_are_those_of_the_shown_run_once_it_rests(page, feed):
    page.set_viewport_size({"width": 900, "height": 200})
    below = "panel => panel.getBoundingClientRect().top - innerHeight"
    for trace, lanes in ((THREE, 3), (run_of((PLAIN, one_by_one())), 1)):
        show(page, feed, trace)
        page.evaluate("scrollTo(0, 0)")
        assert page.locator(".panel-cost").evaluate(below) > 200, "a view nearer to the window counts as in sight"
        expect(page.locator(".panel-cost table")).to_have_count(lanes)


# --- all lanes ---

THREE = run_of((PLAIN, one_by_one()), (GUESSING, in_rounds()), (replace(GUESSING, title="Again"), in_rounds()))


@pytest.mark.journey
def test_every_view_shows_all_lanes(page, feed):
    """Curves, bars and tables of each lane; a tree and a mask large, the others small."""
    show(page, feed, THREE)
    lanes = "nodes => nodes.map((node) => node.closest('[data-lane]').dataset.lane)"
    assert page.locator(".panel-entropy .line.of-lane").evaluate_all(lanes) == ["1", "2"]
    assert page.locator(".panel-rounds .bar:first-of-type").evaluate_all(lanes) == ["1", "2"]
    assert page.locator(".panel-cost .lane-label .number").all_inner_texts() == ["1", "2", "3"]
    assert page.locator(".panel-tree .of-lane").inner_text() == "2", "the first lane that drafts"
    page.click(".panel-tree .small-lane")
    expect(page.locator(".panel-tree .of-lane")).to_have_text("3")
    expect(page.locator(".panel-tree .small-lane .number")).to_have_text("2")
    expect(page.locator(".tab[data-lane='2']")).to_have_attribute("aria-pressed", "true")


def test_the_band_spans_the_entropies_of_all_lanes_and_the_difference_is_said(page, feed):
    unsure = [(0.1, step(0, 2.0)), (0.1, commit(0, "sampled")), (0.1, Done("end"))]
    show(page, feed, run_of((PLAIN, one_by_one()), (PLAIN, unsure)))
    page.hover(".lane[data-lane='0'] .tokens > .t >> nth=0")
    expect(page.locator(".panel-entropy .readout")).to_have_text(
        "token 1 “ a”, model 1.00, after processors 1.00 nats; lane 2: 2.00; difference 1.00 nats"
    )
    corners = page.locator(".panel-entropy .band").get_attribute("d").count(" ")
    assert corners == 2, "one upper and one lower corner: only the first token is in both lanes"


@pytest.mark.journey
def test_a_selected_token_is_selected_in_every_lane_and_every_view(page, feed):
    show(page, feed, THREE)
    page.click(".lane[data-lane='1'] .tokens > .t >> nth=1")
    expect(page.locator(".tokens > .t.chosen, .tokens > .t.level")).to_have_text([WORDS[1]] * 3)
    expect(page.locator(".panel-entropy .dot[data-lane]")).to_have_count(3)
    expect(page.locator(".panel-rounds .bar.marked")).to_have_count(2)
    assert page.locator(".panel-rounds .bar.marked").first.get_attribute("data-round") == "1"
    expect(page.locator(".panel-cost .pin"), "the forward of each lane that gave this token").to_have_count(3)
    page.locator(".panel-tree").scroll_into_view_if_needed()
    expect(page.locator(".panel-tree .which"), "its round, not the newest").to_have_text("round 1 of 2")
    page.keyboard.press("Escape")
    expect(page.locator(".panel-tree .which")).to_have_text("round 2 of 2")
    expect(page.locator(".pin, .t.level")).to_have_count(0)


def test_a_token_clicked_long_after_the_pointer_reached_it_shows_its_round(page, feed):
    show(page, feed, THREE)
    page.locator(".panel-tree").scroll_into_view_if_needed()
    round_shown = page.locator(".panel-tree .which")
    page.hover(".lane[data-lane='1'] .tokens > .t >> nth=1")
    drawn(page)
    expect(round_shown, "the pointer alone changes no round").to_have_text("round 2 of 2")
    page.mouse.down()
    page.mouse.up()
    expect(round_shown).to_have_text("round 1 of 2")
    page.keyboard.press("Escape")
    expect(round_shown).to_have_text("round 2 of 2")


def test_the_caches_of_all_lanes_are_bars_on_one_axis_with_layers_on_demand(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one()), (PLAIN, evicting()), (PLAIN, evicting())))
    bars = page.locator(".panel-cache canvas.bars-of-lanes")
    assert bars.get_attribute("aria-label").count("lane") == 2
    expect(page.locator(".panel-cache canvas:visible")).to_have_count(2)  # the bars, and the history of evictions
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    page.mouse.move(box["x"] + 30 + (box["width"] - 134) * 3.5 / 16, box["y"] + 30)
    line = page.locator(".panel-cache .hover-line")
    expect(line).to_have_text("lane 3, position 4 “ a”: live in 1 of 4 layers and heads")
    page.click(".panel-cache button:text('layers')")
    expect(page.locator(".panel-cache canvas:visible")).to_have_count(3)
    page.click(".panel-cache button:text('layers')")


# --- interesting places ---

def test_the_key_n_visits_the_places_of_all_lanes_in_the_order_of_time(page, feed):
    masked = [
        (0.12, Mask(0, 4, 100, 0.75, [Candidate(9, " Sure", 0.5, 0.0)])),
        (0.12, step(0, 0.5)),
        (0.12, commit(0, "sampled")),
        (0.13, Mask(1, 50, 100, 0.25)),
        (0.13, commit(1, "sampled")),
        (0.14, Switch(2, "draft", "sure enough")),
        (0.14, commit(2, "sampled")),
        (0.16, Cache("target", 6, 1, 1, evicted=2, dropped=write_layers([["1+2"]]))),
        (0.2, Done("end")),
    ]
    show(page, feed, run_of((GUESSING, in_rounds()), (PLAIN, masked)))
    seek(page, 0.0)
    said = []
    for _ in range(6):
        page.keyboard.press("n")
        drawn(page)
        said.append(page.locator(".player .place").inner_text())
    assert said == [
        "1 of 6 · lane 1, token 1: the largest entropy of this lane, 1.00 nats",
        "2 of 6 · lane 2, token 1: the mask removed 75 % of the probability, among it “ Sure”",
        "3 of 6 · lane 2, token 1: the largest entropy of this lane, 0.50 nats",
        "4 of 6 · lane 2, token 3: switch to draft: sure enough",
        "5 of 6 · lane 2, token 3: the cache starts to evict: 2 slots freed",
        "6 of 6 · lane 1, token 5: the target rejected “ x” and continued with “ e”",
    ]
    expect(page.locator(".lane[data-lane='0'] .t.chosen")).to_have_text(" e")
    page.keyboard.press("Shift+N")
    expect(page.locator(".player .place")).to_contain_text("5 of 6")
    page.click(".player button[aria-label='Next interesting place']")
    page.click(".player button[aria-label='Next interesting place']")
    expect(page.locator(".player .place"), "around the end").to_contain_text("1 of 6")
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("next interesting place")
    page.keyboard.press("Escape")


def test_an_accepted_side_branch_is_an_interesting_place(page, feed):
    branching = [
        (0.1, Draft(0, [1, 2], WORDS[1:3], [-1, -1], [0.5, 0.5], "draft_model")),
        (0.2, Verdict(0, [1], [ev.Test(0, 0.1, 0.5, 0.9, False), ev.Test(1, 0.75, 0.5, 0.5, True)], 3, " d", "bonus")),
        (0.2, commit(0, "draft", "bonus")),
        (0.2, Done("end")),
    ]
    show(page, feed, run_of((GUESSING, branching)))
    page.keyboard.press("n")
    expect(page.locator(".player .place")).to_have_text(
        "1 of 1 · lane 1, token 1: a side branch of the draft tree was accepted, “ c”"
    )


# --- compared with plain decoding ---

def pace(page) -> str:
    settle(page)
    return page.locator(".panel-cost .large .pace").inner_text()


def test_the_speed_up_is_measured_against_the_plain_lane_of_the_session(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one()), (GUESSING, in_rounds())), 1)
    assert (
        pace(page)
        == "2.00 times the speed: 20.0 against 10.0 tokens/s of plain greedy in lane 1, both measured in this run,"
        " prompt included."
    )
    choose(page, 0)
    assert pace(page) == "This is the plain lane, the baseline for the others."


def test_where_drafting_loses_time_the_lane_says_why_with_the_times_of_both_lanes(page, feed):
    slower = [(4 * at, event) for at, event in in_rounds()]
    show(page, feed, run_of((PLAIN, one_by_one()), (GUESSING, slower)), 1)
    assert pace(page).endswith(
        "Per token it spends 118.0 ms more on drafting and checking and saves only 18.0 ms of the target's forwards: "
        "one forward takes 50.0 ms here. The longer it takes, as on a large model, the more a saved one counts."
    )
    said = page.locator(".lane[data-lane='1'] .headlines > div").evaluate_all(
        "all => all.map((one) => `${one.lastChild.textContent} ${one.firstChild.textContent}`)"
    )
    assert said == [
        "2.00 tokens per forward", "2 forwards instead of 4", "same text against lane 1",
        "0.50× by the clock: a forward takes only 50.0 ms here",
    ]


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, parts=[Part("greedy", "decoder"), Part("h2o", "cache_policy")]),
        replace(PLAIN, prompt_ids=[1, 2]),
        replace(PLAIN, dtype="float16"),
        replace(PLAIN, forced=[0]),
        replace(PLAIN, strategy="sample"),
    ],
    ids=["a toggle", "another prompt", "another precision", "a fork", "sampling"],
)
def test_without_a_plain_lane_on_the_same_prompt_no_speed_up_is_given(page, feed, other):
    show(page, feed, run_of((other, one_by_one()), (GUESSING, in_rounds())), 1)
    assert pace(page) == "No speed-up: add a greedy lane without toggles as a baseline."


def test_a_canvas_is_not_told_to_add_a_lane_that_its_model_cannot_run(page, feed):
    canvas = replace(PLAIN, strategy="masked_diffusion", canvas=5)
    filled = [(0.1, Forward(tokens=8, seconds=0.05)), (0.1, commit(0, *["sampled"] * 5)), (0.1, Done("end"))]
    show(page, feed, run_of((canvas, filled)))
    expect(page.locator(".panel-cost .pace")).to_have_text(
        "No speed-up: a model that fills masked positions has no greedy lane to compare with."
    )


def test_every_lane_says_whether_its_text_is_that_of_plain_greedy(page, feed):
    another = [
        (at, replace(event, ids=[9]) if isinstance(event, Commit) and event.position == 2 else event)
        for at, event in one_by_one()
    ]
    show(
        page, feed, run_of((GUESSING, in_rounds()), (PLAIN, one_by_one()), (replace(PLAIN, strategy="sample"), another))
    )
    assert page.locator(".lane .remark").all_inner_texts() == [
        "Same text as plain greedy (lane 2).",
        "",
        "Differs from plain greedy (lane 2) from token 3 on.",
    ]
    seek(page, 0.5)
    expect(page.locator(".lane .remark").first).to_have_text("Same text as plain greedy (lane 2) so far, 2 tokens.")


# --- accessibility ---

def test_every_drawing_has_a_name_that_says_what_it_shows(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one()), (GUESSING, in_rounds())), 1)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('.panel [role=img]')].filter((one) => one.checkVisibility())
        .map((one) => [one, one.getAttribute('aria-label') || one.querySelector(':scope > title')?.textContent || ''])
        .filter(([, name]) => name.split(' ').length < 3).map(([one]) => one)
        .map((one) => one.outerHTML.slice(0, 90))"""
    )
    assert nameless == []
    assert page.locator(".panel canvas:visible:not([role=img])").count() == 0


def test_a_long_text_is_split_into_stretches_that_read_as_one(page, feed):
    pieces = [f" {i}" + ("\n" if i % 30 == 29 else "") for i in range(400)]
    happened = [
        (0.001 * (i + 1), Commit(i, [i], [piece], piece, [-1.0], ["sampled"])) for i, piece in enumerate(pieces)
    ]
    show(page, feed, run_of((PLAIN, happened)))
    expect(page.locator(".lane .tokens > .t")).to_have_count(400)
    assert token_texts(page, 0) == pieces
    assert page.locator(".lane .stretch .tokens").evaluate_all("all => all.map((one) => one.children.length)") == [
        60
    ] * 6 + [40]
    seek(page, 0.5)
    expect(page.locator(".lane .tokens > .t")).to_have_count(200)
    assert token_texts(page, 0) == pieces[:200]
    assert page.locator(".lane .stretch").count() == 4


def test_views_fit_a_phone(page, feed):
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, feed, run_of((PLAIN, one_by_one()), (GUESSING, [*in_rounds()[:-1], *evicting()[2:]])), 1)
    page.locator(".panel-cost").scroll_into_view_if_needed()
    expect(page.locator(".panel-cost .totals tr").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_table_of_tests_that_is_too_wide_for_a_phone_can_be_scrolled(page, feed):
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, feed, run_of((GUESSING, in_rounds())))
    scrolled = page.locator(".panel-tree .tests").evaluate("""(one) => {
        one.querySelector("td").textContent = "w".repeat(80);
        one.scrollLeft = 999;
        return one.scrollLeft;
    }""")
    assert scrolled > 0
