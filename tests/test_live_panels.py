"""The views under the lanes: costs, entropy, sources of tokens, draft tokens, caches, grammars, figures of a method."""
from __future__ import annotations

from dataclasses import replace

import pytest
from live_page import address, browser, choose, drawn, feed, page, seek, visitor  # noqa: F401
from playwright.sync_api import expect
from view_runs import (
    GUESSING,
    PLAIN,
    WORDS,
    commit,
    evicting,
    in_rounds,
    key_of,
    one_by_one,
    run_of,
    show,
    side_by_side,
    step,
    totals,
)

from playground.events import Done, Draft, Figure, Forward, Mask, Rollback, Switch, Verdict
from playground.player.live_view_assets import ASSETS
from playground.trace.lane_metrics import metrics

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


@pytest.mark.parametrize("width", [1440, 1280, 390])
def test_no_cells_of_the_costs_of_four_lanes_touch(page, feed, width):
    page.set_viewport_size({"width": width, "height": 2400})
    show(page, feed, run_of(*4 * [(GUESSING, in_rounds())]))
    gaps = page.locator(".panel-cost .totals tr").evaluate_all("""rows => rows.flatMap((row) => {
        const boxes = [...row.cells].filter((cell) => cell.textContent).map((cell) => {
            const words = document.createRange();
            words.selectNodeContents(cell);
            return words.getBoundingClientRect();
        });
        return boxes.slice(1).map((box, i) => box.left - boxes[i].right);
    })""")
    assert len(gaps) > 4 * 10 and min(gaps) >= 4


def test_numbers_of_four_lanes_stay_in_one_row_and_a_long_one_is_no_column(page, feed):
    show(page, feed, run_of(*4 * [(GUESSING, in_rounds())]))
    rows = page.locator(".live .headlines").evaluate_all(
        "all => all.map((one) => new Set([...one.querySelectorAll('dd')].map((dd) => dd.offsetTop)).size)"
    )
    assert rows == [1] * 4
    page.locator(".live .more > summary").first.click()
    assert page.locator(".live .strip .detailed").first.evaluate("one => one.offsetHeight") <= 90


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
        "rejected, replaced (1)",
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

def test_a_cache_says_what_it_saves_and_what_every_head_holds(page, feed):
    show(page, feed, run_of((PLAIN, evicting())))
    expect(page.locator(".panel-cache .budget")).to_have_text(
        "1000 B instead of 1.6 KiB for a full cache: 38 % saved."
    )
    held = "Every layer and head holds the first 2 and the newest 2; of 8 positions, 3 are evicted on average."
    expect(page.locator(".panel-cache .held")).to_have_text(held)


def test_in_projector_mode_a_pointer_finds_what_is_drawn_under_it(page, feed):
    page.add_style_tag(content=(ASSETS / "projector.css").read_text())
    page.evaluate("document.body.classList.add('projector')")
    show(page, feed, run_of((PLAIN, evicting(False))))
    canvas = page.locator(".panel-cache canvas:visible").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 1.5 * 52 + 3.5 * (box["width"] - 1.5 * 54) / 16, box["y"] + 1.5 * 5)
    expect(page.locator(".panel-cache .hover-line")).to_have_text("layer 1, position 4 “ a”: live in 1 of 2 heads")
    token = page.locator(".lane .tokens .t").first
    token.click()
    card, near = page.locator(".card").bounding_box(), token.bounding_box()
    gaps = [card["y"] - near["y"] - near["height"], near["y"] - card["y"] - card["height"]]
    assert 0 <= max(gaps) < 20 and card["x"] <= near["x"] <= card["x"] + card["width"]
    page.evaluate("document.body.classList.remove('projector')")


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
    expect(series.locator("b")).to_have_text("2 Greedy: mark")
    assert series.locator(".tick[text-anchor='end']:not(.along)").all_text_contents() == ["-2", "0", "2"]


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
