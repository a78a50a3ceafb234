"""The views under the lanes: costs, sources of tokens, figures of a method, memory saved by a cache, absent views; all lanes
in every view; and the interesting places of a run.
"""
from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from live_page import address, browser, choose, drawn, feed, page, seek, send, token_texts, visitor  # noqa: F401
from playwright.sync_api import expect

from playground import events as ev
from playground.events import (
    Branches,
    Cache,
    Candidate,
    Commit,
    Done,
    Draft,
    Event,
    Figure,
    Forward,
    Header,
    Mask,
    Part,
    Rollback,
    Stamped,
    Step,
    Switch,
    Verdict,
)
from playground.trace import Trace
from playground.trace.cache_contents import write_layers
from playground.trace.lane_metrics import metrics
from playground.ui.frames import frame, new_name

Happened = list[tuple[float, Event]]
SHARED = {
    "model": "toy",
    "vocabulary": 100,
    "prompt": "one two",
    "prompt_ids": [1, 2, 3],
    "prompt_pieces": ["one", " ", "two"],
}
PLAIN = Header(0, "Greedy", strategy="greedy", parts=[Part("greedy", "decoder")], **SHARED)
GUESSING = Header(1, "Speculative", strategy="speculative", draft="small", **SHARED,
                  parts=[Part("speculative", "decoder"), Part("draft_model", "drafter"), Part("rejection", "verifier")])
WORDS = [" a", " b", " c", " d", " e"]


# --- runs made by hand ---

def commit(position: int, *origins: str) -> Commit:
    places = range(position, position + len(origins))
    return Commit(
        position,
        list(places),
        [WORDS[i] for i in places],
        "".join(WORDS[i] for i in places),
        [-0.5] * len(origins),
        list(origins),
    )


def step(position: int, entropy: float = 1.0, stream: str = "target") -> Step:
    return Step(position, entropy, entropy, position, [Candidate(position, WORDS[position], 0.5, 0.5)], stream)


def one_by_one(second: float = 0.1, length: int = 5) -> Happened:
    """Plain decoding: each forward takes half of its turn on the lane's clock."""
    events: Happened = []
    for i in range(length):
        forward = Forward(phase="decode" if i else "prefill", tokens=1 if i else 3, seconds=second / 2)
        events += [((i + 1) * second, event) for event in (forward, step(i), commit(i, "sampled"))]
    return [*events, (length * second, Done("length"))]


def in_rounds() -> Happened:
    """Two rounds of two draft tokens: both of the first are accepted, none of the second, which wastes two rows."""
    right, wrong = (
        [ev.Test(0, 0.75, 0.5, 0.25, True), ev.Test(1, 0.75, 0.5, 0.5, True)],
        [ev.Test(0, 0.125, 0.5, 0.875, False)],
    )
    left = [Candidate(4, " e", 0.5, 0.75), Candidate(9, " <b>", 0.25, 0.25)]
    return [
        (0.05, Forward(phase="prefill", tokens=3, seconds=0.04)),
        (0.05, step(0)),
        (0.05, commit(0, "sampled")),
        (0.06, Forward("draft", tokens=1, seconds=0.01)),
        (0.07, Forward("draft", tokens=1, seconds=0.01)),
        (0.07, Draft(0, [1, 2], WORDS[1:3], [-1, 0], [0.5, 0.5], "draft_model")),
        (0.15, Forward(tokens=3, seconds=0.06)),
        (0.15, Verdict(0, [0, 1], right, 3, " d", "bonus")),
        (0.15, step(1)),
        (0.15, step(2)),
        (0.15, step(3)),
        (0.15, commit(1, "draft", "draft", "bonus")),
        (0.15, Draft(1, [8, 9], [" x", " y"], [-1, 0], [0.5, 0.5], "draft_model")),
        (0.25, Forward(tokens=3, seconds=0.06)),
        (0.25, Verdict(1, [], wrong, 4, " e", "redraw", left)),
        (0.25, step(4)),
        (0.25, commit(4, "redraw")),
        (0.25, Done("length")),
    ]


def side_by_side() -> Happened:
    """Two sequences over three forwards; the first ends early and becomes the text."""
    events: Happened = [(0.1, Forward(phase="prefill", tokens=3, seconds=0.05)), (0.1, Branches([(1, 0), (2, 0)]))]
    for i, growing in enumerate([(1, 2), (1, 2), (2,), (2,)]):
        events += [((i + 1) / 10, Forward(tokens=len(growing), seconds=0.05))] * bool(i)
        events += [
            ((i + 1) / 10, replace(event, sequence=one)) for one in growing for event in (step(i), commit(i, "sampled"))
        ]
    return [*events, (0.4, replace(commit(0, "sampled", "sampled"), grown_on=1)), (0.4, Done("end"))]


def run_of(*lanes: tuple[Header, Happened]) -> Trace:
    headers = [replace(header, lane=lane) for lane, (header, _) in enumerate(lanes)]
    rows = sorted(
        ((at, lane, i, event) for lane, (_, events) in enumerate(lanes) for i, (at, event) in enumerate(events)),
        key=lambda row: row[:3],
    )
    return Trace(headers, [Stamped(lane, seq, at, event) for seq, (at, lane, _, event) in enumerate(rows)])


def show(page, feed, trace: Trace, lane: int = 0, state: str = "done") -> None:
    """The whole run with the player at its end and one of its lanes chosen; an unfinished one is followed."""
    run = frame(
        new_name(),
        0,
        [stamped.to_json() for stamped in trace.events],
        state,
        [asdict(header) for header in trace.headers],
    )
    send(page, feed, run)
    if state == "done":
        seek(page, 1.0)
    if len(trace.headers) > 1:
        choose(page, lane)
    settle(page)


def settle(page) -> None:
    """Wait until the views show the player's position; during playback they pause between two drawings."""
    page.wait_for_timeout(100)
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>"
        " requestAnimationFrame(done))))"
    )


def totals(page) -> dict[str, list[str]]:
    """Time, share, forwards and rows by worker, of the lane drawn large."""
    rows = page.locator(".panel-cost .large .totals tr").evaluate_all(
        "rows => rows.slice(1).map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return {name: numbers for name, *numbers in rows}


def key_of(page, view: str) -> list[str]:
    return page.locator(f".panel-{view} .chart-key > span").all_inner_texts()


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


# --- all lanes ---

THREE = run_of((PLAIN, one_by_one()), (GUESSING, in_rounds()), (replace(GUESSING, title="Again"), in_rounds()))


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
    expect(page.locator(".panel-cache .hover-line")).to_have_text("lane 3, position 4 “ a”: live in 1 of 4 layers and heads")
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


# --- costs ---

def test_each_forward_counts_for_its_model_and_the_rest_of_the_clock_as_other_work(page, feed):
    show(page, feed, run_of((GUESSING, in_rounds())))
    expect(page.locator(".panel-cost .readout")).to_have_text(
        "0.25 s in all, 64 % of it in the target, 16 % on wasted rows"
    )
    assert totals(page) == {"target": ["0.16 s", "64 %", "2 + 1 prefill", "9"], "wasted": ["0.04 s", "16 %", "", "2"],
                            "draft": ["0.02 s", "8.0 %", "2", "2"], "other": ["0.07 s", "28 %", "", ""]}


@pytest.mark.parametrize(
    "happened",
    [one_by_one(), in_rounds(), [*one_by_one()[:-1], (0.5, Rollback(2, "")), (0.5, Done("stopped"))], side_by_side()],
    ids=["one by one", "in rounds", "rolled back", "side by side"],
)
def test_wasted_rows_are_those_the_metrics_count(page, feed, happened):
    trace = run_of((GUESSING, happened))
    show(page, feed, trace)
    wasted = metrics(trace.lane(0))["wasted_tokens"]
    row = page.locator(".panel-cost .totals tr", has_text="wasted")
    expect(row).to_have_count(1 if wasted else 0)
    expect(row.locator("> :last-child")).to_have_text([str(wasted)] if wasted else [])


def test_the_timeline_describes_a_forward_and_a_click_goes_there(page, feed):
    show(page, feed, run_of((GUESSING, in_rounds())))
    page.locator(".panel-cost canvas").scroll_into_view_if_needed()
    box = page.locator(".panel-cost canvas").bounding_box()
    at = box["x"] + 62 + (box["width"] - 72) * 0.2 / 0.25
    page.mouse.move(at, box["y"] + 10)
    expect(page.locator(".panel-cost .hover-line")).to_have_text(
        "target: decode, 3 rows, 60.0 ms, 2 of the rows wasted"
    )
    page.mouse.move(at, box["y"] + 24 * 2 + 10)
    page.mouse.click(at, box["y"] + 10)
    expect(
        page.locator(".lane[data-lane='0'] .tokens > .t"), "the forward is shown, but not its result yet"
    ).to_have_text(WORDS[:4])


def test_a_concurrent_forward_overlaps_what_the_draft_did_meanwhile(page, feed):
    happened = [
        (0.05, Forward(phase="prefill", tokens=3, seconds=0.05)),
        (0.05, step(0)),
        (0.05, commit(0, "sampled")),
        (0.15, Forward("draft", tokens=1, seconds=0.1)),
        (0.25, Forward("draft", tokens=1, seconds=0.1)),
        (0.3, Forward(tokens=1, seconds=0.05, meanwhile=0.2)),
        (0.3, step(1)),
        (0.3, commit(1, "sampled")),
        (0.3, Done("length")),
    ]
    show(page, feed, run_of((GUESSING, happened)))
    page.locator(".panel-cost canvas").scroll_into_view_if_needed()
    box = page.locator(".panel-cost canvas").bounding_box()
    reads = {
        0.02: "target: prefill",
        0.1: "target: decode, 1 row, 50.0 ms, and 200.0 ms concurrently with the lane",
        0.28: "target: decode",
    }
    for moment, found in reads.items():
        page.mouse.move(box["x"] + 62 + (box["width"] - 72) * moment / 0.3, box["y"] + 10)
        expect(page.locator(".panel-cost .hover-line")).to_contain_text(found)
    assert totals(page)["target"][:2] == ["0.10 s", "33 %"], "the lane waited for a part of it"


def test_masks_and_other_streams_have_their_own_track(page, feed):
    happened = [
        (0.1, Forward(phase="prefill", tokens=3, seconds=0.04)),
        (0.1, Forward("without_context", tokens=1, seconds=0.02)),
        (0.1, step(0)),
        (0.1, Mask(0, 4, 100, 0.5, seconds=0.01)),
        (0.1, commit(0, "sampled")),
        (0.1, Done("grammar")),
    ]
    show(page, feed, run_of((PLAIN, happened)))
    expect(page.locator(".panel-cost .totals")).to_be_visible()
    assert {name: numbers[0] for name, numbers in totals(page).items()} == {
        "target": "0.04 s",
        "auxiliary": "0.02 s",
        "grammar": "0.01 s",
        "other": "0.03 s",
    }
    assert "Timeline of forwards of lane 1" in page.locator(".panel-cost canvas").get_attribute("aria-label")


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


# --- entropy and a method's own series ---

def test_thresholds_and_followed_entropies_are_drawn_on_the_chart_in_nats(page, feed):
    follow = [
        (
            0.1 * (i + 1),
            Figure(
                "scalar", "mean entropy", {"x": i, "series": {"mean entropy, bits": 2.0}, "lines": {"threshold": 1.0}}
            ),
        )
        for i in range(5)
    ]
    show(page, feed, run_of((PLAIN, [*follow, *one_by_one()])))
    expect(page.locator(".panel-entropy .limit-name")).to_have_text("threshold: 0.693 nats (1 bits)")
    ticks = (
        page.locator(".panel-entropy svg")
        .first.locator(".grid")
        .evaluate_all("all => all.map((line) => Number(line.getAttribute('y1')))")
    )
    limit = float(page.locator(".panel-entropy .limit").get_attribute("y1"))
    share = (ticks[0] - limit) / (ticks[0] - ticks[-1])  # ticks from 0 to the top, which is 2 nats
    assert share == pytest.approx(0.693 / 2, abs=0.01)
    assert key_of(page, "entropy") == ["model", "after processors", "mean entropy"]
    assert page.locator(".panel-entropy .figure").count() == 0, "it has no chart of its own"


def test_rejections_pauses_and_switches_are_marked_and_counted(page, feed):
    pauses = [
        (0.25, Figure("spans", "pauses", {"spans": [[i, i + 1, label, 1.5]]}))
        for i, label in ((0, "kept"), (2, "overruled"), (3, "kept"))
    ]
    show(
        page,
        feed,
        run_of((GUESSING, [*in_rounds()[:-1], *pauses, (0.25, Switch(3, "small", "sure")), (0.25, Done("length"))])),
    )
    expect(page.locator(".panel-entropy .mark")).to_have_count(3)
    assert key_of(page, "entropy")[2:6] == [
        "switch (1)",
        "rejected, resampled (1)",
        "pauses: kept (2)",
        "pauses: overruled (1)",
    ]
    assert "pauses: overruled: 1" in page.locator(".panel-entropy svg title").first.text_content()
    rows = page.locator(".panel-figures .span-list tr").evaluate_all(
        "rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert rows == [
        ["token 1", " a", "kept", "1.5"],
        ["token 3", " c", "overruled", "1.5"],
        ["token 4", " d", "kept", "1.5"],
    ]


# --- sources of tokens ---

def test_a_strip_shows_the_source_of_each_token(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one()), (GUESSING, in_rounds())), 1)
    strip = page.locator(".panel-entropy svg", has=page.locator(".who"))
    expect(strip.locator("title")).to_have_text(
        "Sources of the tokens of lane 2: target 3, accepted draft tokens 2."
    )
    choose(page, 0)
    expect(page.locator(".panel-entropy svg .who")).to_have_count(0)


def test_tokens_written_by_the_draft_model_or_forced_by_the_grammar_have_their_own_source(page, feed):
    happened = [(0.1, step(0)), (0.1, Mask(0, 4, 100, 0.5, forced=[1])), (0.1, commit(0, "sampled", "forced")),
                (0.2, step(2, stream="draft")), (0.2, commit(2, "sampled")), (0.2, Done("end"))]
    show(page, feed, run_of((replace(PLAIN, draft="small"), happened)))
    expect(page.locator(".panel-entropy .speakers span")).to_have_text(
        ["target 1", "draft model 1", "forced by the grammar 1"]
    )


# --- draft tokens ---

def test_the_residual_is_shown_under_the_tree_of_a_rejected_draft_token(page, feed):
    show(page, feed, run_of((GUESSING, in_rounds())))
    rows = page.locator(".panel-tree .leftover .row")
    expect(rows).to_have_count(2)
    assert [row.split() for row in rows.all_inner_texts()] == [
        ["e", "50", "%", "75", "%"],
        ["<b>", "25", "%", "25", "%"],
    ]
    page.click(".panel-tree button[title='Previous round']")
    expect(page.locator(".panel-tree .which")).to_have_text("round 1 of 2")
    expect(page.locator(".panel-tree .leftover")).to_have_count(0)


def test_a_tall_tree_opens_at_its_root(page, feed):
    """With its topmost branch in sight instead, a tree of 64 tokens would look empty."""
    nodes = list(range(40))
    draft = Draft(0, nodes, [" x"] * 40, [-1] * 40, [0.025] * 40, "draft_model")
    judged = [(0.2, Forward(tokens=41)), (0.2, Verdict(0, [], [], 4, " e", "redraw"))]
    events = [(0.1, draft), *judged, (0.2, Done("length"))]
    show(page, feed, run_of((GUESSING, events)))
    root = page.locator(".panel-tree .node.root")
    scroller, at = page.locator(".panel-tree .tree-scroll").bounding_box(), root.bounding_box()
    assert scroller["y"] < at["y"] and at["y"] + at["height"] < scroller["y"] + scroller["height"]


def test_acceptance_by_draft_position_shows_its_counts(page, feed):
    show(page, feed, run_of((GUESSING, in_rounds())))
    expect(page.locator(".panel-rounds .depth")).to_have_count(2)
    rows = page.locator(".panel-rounds .depth").evaluate_all(
        "rows => rows.map((row) => [...row.querySelectorAll('.num')].map((cell) => cell.textContent))"
    )
    assert rows == [["+1", "50 %", "1/2"], ["+2", "100 %", "1/1"]]


# --- caches ---

def evicting(as_differences: bool = False) -> Happened:
    """Two layers of two heads: first everything is live, then sinks, a window, and one position of each head's own."""
    evicted = [["2 2+1", "2+1 1"], ["3+2", "2+2"]]
    live = [[[(0, 2), (3, 4), (6, 8)], [(0, 2), (4, 5), (6, 8)]], [[(0, 2), (2, 3), (6, 8)], [(0, 2), (5, 6), (6, 8)]]]
    return [(0.1, step(0)), (0.1, commit(0, "sampled")), (0.1, Cache("target", 4, 2, 2, [[[(0, 4)]]], bytes=800)),
            (0.2, Cache("target", 8, 2, 2, evicted=12, bytes=1000, dropped=write_layers(evicted)) if as_differences
             else Cache("target", 8, 2, 2, live, evicted=12, bytes=1000)), (0.2, Done("length"))]


def test_a_cache_says_what_it_saves_and_what_every_head_holds(page, feed):
    show(page, feed, run_of((PLAIN, evicting())))
    expect(page.locator(".panel-cache .budget")).to_have_text(
        "1000 B instead of 1.6 KiB for a full cache: 38 % saved."
    )
    held = "Every layer and head holds the first 2 and the newest 2; of 8 positions, 3 are evicted on average."
    expect(page.locator(".panel-cache .held")).to_have_text(held)


@pytest.mark.parametrize("as_differences", [False, True])
def test_heads_have_rows_of_their_own_on_demand(page, feed, as_differences):
    show(page, feed, run_of((PLAIN, evicting(as_differences))))
    page.locator(".panel-cache canvas:visible").first.scroll_into_view_if_needed()
    height = page.locator(".panel-cache canvas:visible").first.bounding_box()["height"]

    def hovered() -> str:
        box = page.locator(".panel-cache canvas:visible").first.bounding_box()
        page.mouse.move(box["x"] + 52 + 3.5 * (box["width"] - 54) / 16, box["y"] + 5)
        return page.locator(".panel-cache .hover-line").inner_text()

    assert hovered() == "layer 1, position 4 “ a”: live in 1 of 2 heads"
    page.get_by_role("button", name="each head").click()
    drawn(page)
    assert hovered() == "layer 1, head 1, position 4 “ a”: live"
    assert page.locator(".panel-cache canvas:visible").first.bounding_box()["height"] > height
    page.get_by_role("button", name="each head").click()


# --- grammars ---

@pytest.mark.parametrize(("reason", "accepting", "words"), [
    ("grammar", True, "the grammar was complete after token 1"),
    ("end", True, "the model ended the text where the grammar allowed it"),
    ("length", False, "token limit reached; the grammar was not complete"),
    ("length", True, "token limit reached; the grammar allowed the end"),
])
def test_a_mask_says_why_the_text_stopped(page, feed, reason, accepting, words):
    happened = [
        (0.1, step(0)),
        (0.1, Mask(0, 4, 100, 0.5, accepting=accepting)),
        (0.1, commit(0, "sampled")),
        (0.1, Done(reason)),
    ]
    show(page, feed, run_of((PLAIN, happened)))
    expect(page.locator(".panel-mask .stopped")).to_have_text(f"Why it stopped: {words}.")


def test_marks_of_masks_follow_the_player_back_and_forth(page, feed):
    happened = [
        (0.1 * (i + 1), event) for i in range(5) for event in (step(i), Mask(i, i + 1, 100, 0.5), commit(i, "sampled"))
    ]
    show(page, feed, run_of((PLAIN, [*happened, (0.5, Done("length"))])))
    marks = page.locator(".panel-mask .allowed")
    expect(marks).to_have_count(5)
    seek(page, 0.5)
    expect(marks).to_have_count(2)
    seek(page, 1.0)
    expect(marks).to_have_count(5)
    assert marks.evaluate_all("all => all.map((mark) => mark.dataset.allowed)") == ["1", "2", "3", "4", "5"]


# --- figures of a method ---

def test_a_series_over_the_tokens_is_drawn_whichever_lane_is_chosen(page, feed):
    """The z-score of a watermarked lane, say, beside a plain one."""
    figures = [Figure("scalar", "mark", {"x": i, "series": {"z": i - 2.0}}) for i in range(5)]
    marked = [*one_by_one()[:-1], *((0.5, figure) for figure in figures), (0.5, Done("length"))]
    show(page, feed, run_of((PLAIN, one_by_one()), (replace(PLAIN, strategy="sample"), marked)))
    series = page.locator(".panel-entropy .figure.scalar")
    expect(series).to_have_count(1)
    expect(series.locator("b")).to_have_text("lane 2: mark")
    assert series.locator("text[text-anchor='end']").all_text_contents() == ["-2", "0", "2"]


def test_small_values_of_bars_are_short(page, feed):
    bars = Figure("bars", "left", {"labels": ["a", "b", "c"], "values": [0.0000246712, 0.123456, 0.0]})
    show(page, feed, run_of((PLAIN, [*one_by_one()[:-1], (0.5, bars), (0.5, Done("length"))])))
    assert page.locator(".panel-figures .bar-list .num").all_inner_texts() == ["2e-5", "0.123", "0"]


def test_of_many_spans_the_latest_are_listed_under_how_many_there_are(page, feed):
    spans = [[i, i + 1, "green" if i % 3 else "not green", 1 if i % 3 else 0] for i in range(50)]
    figure = Figure("spans", "green tokens", {"spans": spans})
    show(page, feed, run_of((PLAIN, [*one_by_one()[:-1], (0.5, figure), (0.5, Done("length"))])))
    rows = page.locator(".panel-figures .span-list")
    expect(rows.locator("caption")).to_have_text("The last 40 of 50.")
    assert [part.strip() for part in rows.locator("tr").last.locator("td").all_inner_texts()] [1:] == ["green", ""]

FIGURES = [
    Figure("scalar", "chance", {"x": 0, "axis": "sample", "series": {f"series {i}": i for i in range(7)}}),
    Figure("bars", "votes", {"labels": ["up", "down"], "values": [2, -1]}),
    Figure("matrix", "table", {"rows": ["r"], "columns": ["c", "d"], "values": [[1, None]]}),
    Figure("tree", "ways", {"labels": ["root", "leaf"], "parents": [-1, 0], "values": [1.0, 0.25]}),
    Figure("spans", "parts", {"spans": [[0, 2, "head", None]]}),
    Figure("points", "keys", {"points": [[1, -1, "a", "like a", False], [0.5, 1, "b", "", False]]}),
    Figure(
        "points", "keys", {"points": [[1, -1, "a", "like a", True]], "path": [[0.5, 0.5, "query 1"], [1, 1, "query 2"]]}
    ),
]


def test_every_shape_of_a_figure_is_drawn(page, feed):
    show(
        page, feed, run_of((PLAIN, [*one_by_one()[:-1], *((0.5, figure) for figure in FIGURES), (0.5, Done("length"))]))
    )
    panel = page.locator(".panel-figures")
    expect(panel.locator("h4")).to_have_text(["votes", "table", "ways", "parts", "keys"])
    expect(panel.locator(".key-words")).to_have_text("and 2 more, not drawn")
    assert panel.locator(".bar-list .row").evaluate_all(
        "rows => rows.map((row) => row.querySelector('i').className)"
    ) == ["final", "final below"]
    assert panel.locator(".matrix td").all_inner_texts() == ["1", "–"]
    assert panel.locator(".tree-list li li .piece").all_inner_texts() == ["leaf"]
    looks = panel.locator(".points circle.dot").evaluate_all("all => all.map((dot) => dot.getAttribute('class'))")
    assert looks == ["dot series-0", "dot apart", "dot series-0"]
    assert panel.locator(".points .struck").count() == 1 and panel.locator(".points line.arrow").count() == 2
    assert panel.locator(".points text").all_text_contents() == ["query 2"]
    assert panel.locator(".span-list td").first.inner_text() == " a b"


# --- accessibility ---

def test_every_drawing_has_a_name_that_says_what_it_shows(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one()), (GUESSING, in_rounds())), 1)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('.panel [role=img]')].filter((one) => one.checkVisibility())
        .filter((one) => ((one.getAttribute('aria-label') || one.querySelector(':scope > title')?.textContent || '').match(/ /g) || []).length < 2)
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
    page.locator(".panel-tree .tests td").first.evaluate("one => { one.textContent = 'w'.repeat(80); }")
    assert page.locator(".panel-tree .tests").evaluate("one => { one.scrollLeft = 999; return one.scrollLeft; }") > 0
