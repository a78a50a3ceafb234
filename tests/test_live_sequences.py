"""The live view of lanes with more than one text: sequences that grow side by side, canvases, and quantised caches."""
from __future__ import annotations

from dataclasses import asdict, replace

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

from playground.events import (
    Branches,
    Cache,
    Commit,
    Done,
    Draft,
    Figure,
    Fill,
    Forward,
    Judged,
)
from playground.player.frames import frame, new_name
from playground.trace import Trace, check, metrics
from support.live_sequences import BEAMS, filling, grown, lane, run_of

READABLE = (
    "tokens",
    "seconds",
    "tokens_per_second",
    "target_forwards",
    "tokens_per_target_forward",
    "mean_entropy",
    "wasted_tokens",
)


# --- runs made by hand ---


def show(page, feed, trace: Trace, share: float = 1.0):
    """A whole run, with the player at a share of its length."""
    run = frame(
        new_name(),
        0,
        [stamped.to_json() for stamped in trace.events],
        "done",
        [asdict(header) for header in trace.headers],
    )
    send(page, feed, run)
    seek(page, share)
    last = trace.events[-1].at
    shown = max(stamped.at for stamped in trace.events if stamped.at <= last * share + 1e-9) if share else 0
    expect(page.locator(".live .clock")).to_have_text(f"{shown:.2f} of {last:.2f} s")


def listed(page) -> list[list[str]]:
    """Number, score, state, shared beginning and own text of every sequence in the list."""
    page.wait_for_selector(".panel-branches .branch")
    drawn(page)
    return page.locator(".panel-branches .branch").evaluate_all(
        "rows => rows.map((row) => ['.num', '.score', '.branch-state', '.shared', '.own'].map((part) =>"
        " row.querySelector(part).textContent))"
    )


# --- sequences ---

def test_the_runs_made_by_hand_are_sound():
    assert not check(BEAMS) and not check(run_of(lane(0, filling(), canvas=4)))


def test_while_there_is_no_text_the_best_sequence_is_shown_and_said_to_be_one_of_several(page, feed):
    show(page, feed, BEAMS, 0.5)
    assert token_texts(page, 0) == [" a", " d"]
    expect(page.locator(".branch-shown")).to_have_text("Sequence 1, best of 3 so far")
    assert numbers(page, 0)["tokens"] == 2
    show(page, feed, BEAMS, 0.75)
    assert token_texts(page, 0) == [" b", " e", " g"]
    expect(page.locator(".branch-shown")).to_have_text("Sequence 2, best of 3 so far")


def test_branches_that_grow_beyond_a_text_are_shown_until_it_has_caught_up(page, feed):
    begun = [
        *grown(0, 0, " a"),
        Branches([(1, 0), (2, 0)]),
        *grown(1, 1, " b"),
        *grown(2, 1, " c"),
        Branches(scores={1: -2.0, 2: -1.0}),
    ]
    ending = [Commit(1, [ord("b")], [" b"], " b", [-0.5], ["sampled"], grown_on=1), Done("length")]
    whole = run_of(lane(0, [(0.1, event) for event in begun] + [(0.2, event) for event in ending]))
    show(page, feed, whole, 0.5)
    assert token_texts(page, 0) == [" a", " c"]
    expect(page.locator(".branch-shown")).to_have_text("Sequence 2, best of 2 so far")
    show(page, feed, whole)
    assert token_texts(page, 0) == [" a", " b"]
    expect(page.locator(".branch-shown")).to_be_empty()


def test_the_sequence_that_becomes_the_text_brings_its_thoughts_along(page, feed):
    show(page, feed, BEAMS)
    assert token_texts(page, 0) == [" b", " e", " g"]
    expect(page.locator(".branch-shown")).to_be_empty()
    computed, shown = metrics(BEAMS), numbers(page, 0)
    assert {name: shown[name] for name in READABLE} == pytest.approx({name: computed[name] for name in READABLE})
    assert (shown["mean_entropy"], shown["tokens_per_target_forward"]) == (3.0, 1.0)
    page.locator(".lane .tokens > .t").nth(1).click()
    assert "3.00" in page.locator(".live .card .facts").inner_text()
    assert "after forward" in page.locator(".live .card .facts").inner_text()


def test_every_sequence_has_a_line_with_score_fate_and_text_and_the_best_comes_first(page, feed):
    show(page, feed, BEAMS)
    assert listed(page) == [["#2", "-2.000", "became the text", "", " b e g"], ["#1", "-3.000", "ended", "", " a d i"],
                            ["#4", "-3.500", "not chosen", " a", " f h"], ["#3", "-2.500", "dropped", "", " c"]]
    expect(page.locator(".panel-branches .readout")).to_have_text(
        "3 sequences at the end, 1 dropped, #2 became the text"
    )


def test_going_back_shows_the_sequences_as_they_were(page, feed):
    show(page, feed, BEAMS)
    listed(page)
    show(page, feed, BEAMS, 0.25)
    assert listed(page) == [
        ["#1", "-1.000", "growing", "", " a"],
        ["#2", "-1.500", "growing", "", " b"],
        ["#3", "-2.500", "growing", "", " c"],
    ]


def test_the_drawing_of_births_marks_the_way_of_the_best(page, feed):
    show(page, feed, BEAMS, 0.5)
    listed(page)
    fates = page.locator(".panel-branches .birth").evaluate_all(
        "all => all.map((one) => [one.dataset.sequence, one.classList[1]])"
    )
    assert fates == [["1", "growing"], ["2", "growing"], ["3", "dropped"], ["4", "growing"]]
    # sequence 1 starts at the beginning; a child's path would have two parts
    assert page.locator(".panel-branches .descent").count() == 1
    rows = page.locator(".panel-branches .birth path").evaluate_all(
        "all => all.map((path) => path.getAttribute('d').match(/([\\d.]+)$/)[1])"
    )
    assert rows[3] == rows[2] and len(set(rows)) == 3  # the child takes the free row


def test_sequences_that_grow_side_by_side_take_one_beat(page, feed):
    show(page, feed, BEAMS, 0)
    beats = []
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        beats.append(sorted(len((shared + own).split()) for *_, shared, own in listed(page)))
    # branching is a step of the player, and so is a round
    assert beats == [[0, 0, 0], [1, 1, 1], [1, 1, 1, 1], [1, 2, 2, 2]]


def test_sequences_side_by_side_share_the_token_count(page, feed):
    show(page, feed, BEAMS)
    page.select_option(".live .mode", "tokens")
    expect(page.locator(".live .clock")).to_have_text("3 of 3 tokens")
    seek(page, 1 / 3)
    expect(page.locator(".live .clock")).to_have_text("1 of 3 tokens")
    assert [own for *_, own in listed(page)] == [" a", " b", " c"]


def test_numbers_given_away_at_one_moment_change_hands_at_once(page, feed):
    events = [
        Branches([(1, 0), (2, 0)]),
        *grown(1, 0, " a"),
        *grown(2, 0, " b"),
        Branches([(1, 2), (2, 1)], scores={1: -1.0, 2: -2.0}),
        Done("length"),
    ]
    show(page, feed, run_of(lane(0, [(0.1, event) for event in events])))
    living = {number: shared + own for number, _, state, shared, own in listed(page) if state != "dropped"}
    assert living == {"#1": " b", "#2": " a"}


def test_a_fork_from_a_sequence_says_which_one(page, feed):
    show(page, feed, BEAMS, 0.5)
    page.locator(".lane .tokens > .t").nth(1).click()
    page.locator(".live .card .candidate[data-id='7']").click()
    asked = wait_for(page, feed, "fork")
    assert asked | {"run": ""} == {"run": "", "lane": 0, "sequence": 1, "position": 1, "token": 7}


def test_sixty_four_sequences_fit(page, feed):
    births = Branches(
        [(number, 0) for number in range(1, 65)], scores={number: -float(number) for number in range(1, 65)}
    )
    tokens = [
        event for position in range(20) for number in range(1, 65) for event in grown(number, position, f" w{number}")
    ]
    show(page, feed, run_of(lane(0, [(0.1, births), *((0.1, event) for event in tokens)])))
    assert [number for number, *_ in listed(page)] == [f"#{number}" for number in range(1, 65)]
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".panel-branches .branches").evaluate("list => list.scrollHeight > list.clientHeight")


def test_lanes_with_one_text_have_neither_view(page, feed):
    show(page, feed, run_of(lane(0, [(0.1, event) for event in [*grown(0, 0, " a"), Done("length")]])))
    expect(page.locator(".panel-branches")).to_be_hidden()
    expect(page.locator(".panel-canvas")).to_be_hidden()


# --- canvases ---

CANVAS = run_of(lane(0, filling(), canvas=4))


def cells(page) -> list[tuple[str, str | None]]:
    """Text and step of every position of the canvas."""
    shown = page.locator(".lane .is-canvas .cell").evaluate_all(
        "all => all.map((cell) => [cell.textContent, cell.dataset.step || null])"
    )
    return [tuple(cell) for cell in shown]


def test_a_canvas_begins_as_a_row_of_blank_boxes(page, feed):
    show(page, feed, CANVAS, 0)
    assert cells(page) == [("", None)] * 4
    assert numbers(page, 0)["tokens"] == 0


def test_boxes_fill_in_any_order_coloured_by_confidence_with_the_step_that_filled_them(page, feed):
    show(page, feed, CANVAS, 0.5)
    assert cells(page) == [(" a", "2"), ("", None), (" c", "1"), (" d", "2")]
    levels = page.locator(".lane .is-canvas .cell").evaluate_all(
        "all => all.map((cell) => [...cell.classList].find((name) => /^h\\d/.test(name)) || null)"
    )
    assert levels == ["h3", None, "h1", "h6"]  # distance to certainty in tenths
    assert (
        page.locator(".lane .cell.fresh").all_inner_texts()
        == page.locator(".lane .cell[data-step='2']").all_inner_texts()
    )
    assert numbers(page, 0)["tokens"] == 3


def test_a_text_from_a_canvas_keeps_its_look_and_shows_when_it_was_filled(page, feed):
    show(page, feed, CANVAS)
    assert cells(page) == [(" a", "2"), (" b", "3"), (" c", "1"), (" d", "2")]
    page.locator(".lane .tokens > .t").nth(3).click()
    assert "position 4, filled in step 2, confidence 40 %" in page.locator(".live .card").inner_text()
    assert page.locator(".live .card .candidate:enabled").count() == 0  # it cannot be continued
    computed, shown = metrics(CANVAS), numbers(page, 0)
    assert {name: shown[name] for name in READABLE} == {name: computed[name] for name in READABLE}


def test_the_grid_has_a_mark_where_each_position_was_filled_and_goes_there(page, feed):
    show(page, feed, CANVAS)
    marks = page.locator(".panel-canvas .filled")
    expect(marks).to_have_count(4)
    assert sorted(marks.evaluate_all("all => all.map((one) => [one.dataset.position, one.dataset.step])")) == [
        ["0", "2"],
        ["1", "3"],
        ["2", "1"],
        ["3", "2"],
    ]
    page.locator(".panel-canvas .filled[data-position='2'] .at").click()
    expect(page.locator(".panel-canvas .readout")).to_have_text(
        "step 1 of 3 filled 1 position, 1 of 4 are filled, lowest confidence 90 %"
    )
    assert cells(page) == [("", None), ("", None), (" c", "1"), ("", None)]


def test_the_grid_is_coloured_by_confidence_or_by_entropy(page, feed):
    """Entropy has the scale of the text: ten levels of its square root, 6 nats or more the last."""
    show(page, feed, CANVAS)
    colours = "all => all.map((one) => [one.parentNode.dataset.position, one.style.fill.match(/--(h\\d+)/)[1]])"
    assert sorted(page.locator(".panel-canvas .at").evaluate_all(colours)) == [
        ["0", "h3"], ["1", "h0"], ["2", "h1"], ["3", "h6"]
    ]
    page.locator(".panel-canvas").get_by_role("button", name="entropy").click()
    expect(page.locator(".panel-canvas .chart-key")).to_contain_text("high entropy")
    assert sorted(page.locator(".panel-canvas .at").evaluate_all(colours)) == [
        ["0", "h4"], ["1", "h0"], ["2", "h3"], ["3", "h6"]
    ]
    assert "entropy 2.20 nats" in page.locator(".panel-canvas .filled[data-position='3'] title").text_content()


def test_a_canvas_without_entropies_offers_no_choice(page, feed):
    bare = [(at, replace(event, entropies=[]) if isinstance(event, Fill) else event) for at, event in filling()]
    show(page, feed, run_of(lane(0, bare, canvas=4)))
    expect(page.locator(".panel-canvas .tools .segments")).to_be_hidden()


def test_filled_positions_count_as_tokens_for_the_player(page, feed):
    show(page, feed, CANVAS)
    page.select_option(".live .mode", "tokens")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".live .clock")).to_have_text("3 of 4 tokens")


# --- quantised caches ---

def cached(packed: int) -> Trace:
    events = [
        *grown(0, 0, " a"),
        Cache("target", 8, 1, 1, [[[(0, 2), (4, 8)]]], packed=packed, bytes=64),
        Done("length"),
    ]
    return run_of(lane(0, [(0.1, event) for event in events]))


def pointed_at(page, position: int) -> str:
    """The view's description of one position; the drawing has room for sixteen."""
    box = page.locator(".panel-cache canvas:visible").first.bounding_box()
    page.mouse.move(box["x"] + (position + 0.5) * (box["width"] - 2) / 16, box["y"] + 5)
    return page.locator(".panel-cache .hover-line").inner_text()


def test_the_oldest_live_tokens_are_marked_where_they_are_held_in_a_coarser_form(page, feed):
    show(page, feed, cached(3))
    expect(page.locator(".panel-cache .readout")).to_have_text(
        "6 of 8 positions live, the oldest 3 quantised, 64 B"
    )
    expect(page.locator(".panel-cache .key-packed")).to_be_visible()
    hovered = [pointed_at(page, position).split(": ")[-1] for position in range(8)]
    quantised = "live, quantised"
    assert hovered == [quantised, quantised, "evicted", "evicted", quantised, "live", "live", "live"]


def test_a_cache_with_nothing_packed_says_nothing_of_it(page, feed):
    show(page, feed, cached(0))
    expect(page.locator(".panel-cache .readout")).to_have_text("6 of 8 positions live, 64 B")
    expect(page.locator(".panel-cache .key-packed")).to_be_hidden()


# --- what slots beyond the text are reserved for ---

@pytest.mark.parametrize(("reasons", "held_for"), [
    ([Draft(0, [7], [" a"], [-1], [1.0])], "draft tokens"),
    ([Branches([(1, 0)])], "branches"),
    ([Branches([(1, 0)]), Draft(0, [7], [" a"], [-1], [1.0])], "draft tokens and branches"),
])
def test_the_cache_shows_whether_slots_are_reserved_for_draft_tokens_or_branches(page, feed, reasons, held_for):
    events = [*grown(0, 0, " a"), *reasons, Cache("target", 4, 1, 1, [[[(0, 4)]]], scratch=2, bytes=64), Done("length")]
    show(page, feed, run_of(lane(0, [(0.1, event) for event in events])))
    shown = f"4 of 4 positions live, 2 reserved for {held_for}, 64 B"
    expect(page.locator(".panel-cache .readout")).to_have_text(shown)
    expect(page.locator(".panel-cache .key-scratch")).to_have_text(f"reserved for {held_for} at the last update")
    assert pointed_at(page, 5).endswith(f": reserved for {held_for}")


# --- figures over another axis than tokens ---

def measured(*axes: str) -> Trace:
    """Three numbers on each axis; the empty axis is that of the tokens."""
    def chance(x: int, axis: str) -> Figure:
        return Figure(
            "scalar", f"chance {axis}", {"x": x, "series": {"at most": 1 / (x + 1)}} | ({"axis": axis} if axis else {})
        )

    figures = [chance(x, axis) for axis in axes for x in range(3)]
    return run_of(lane(0, [(0.1, event) for event in [*grown(0, 0, " a"), *figures, Done("length")]]))


def test_numbers_by_sample_have_an_axis_of_their_own_and_leave_that_of_the_tokens_alone(page, feed):
    show(page, feed, measured("sample", ""))
    own, tokens = page.locator(".panel-figures .figure.scalar"), page.locator(".panel-entropy .figure.scalar")
    expect(own).to_have_count(1)
    expect(tokens).to_have_count(1)
    expect(own.locator(".along")).to_have_text("sample")
    expect(own.locator("circle")).to_have_count(3)
    assert own.locator(".tick:not(.unit, .along)").evaluate_all("all => all.map((one) => one.textContent)")[-3:] == [
        "1",
        "2",
        "3",
    ]
    expect(tokens.locator(".unit")).to_have_count(0)


def test_without_numbers_of_another_axis_there_is_nothing_from_the_method_to_show(page, feed):
    show(page, feed, measured(""))
    expect(page.locator(".panel-entropy .figure.scalar")).to_have_count(1)
    expect(page.locator(".panel-figures")).to_be_hidden()


def test_a_sequence_ends_where_it_is_said_to_and_not_where_a_token_looks_like_an_end(page, feed):
    events = [
        Branches([(1, 0), (2, 0)]),
        *grown(1, 0, "<|end|>"),
        *grown(2, 0, " b"),
        Branches(ended=[2], scores={1: -1.0, 2: -2.0}),
    ]
    show(page, feed, run_of(lane(0, [(0.1, event) for event in events])))
    assert [(number, state) for number, _, state, *_ in listed(page)] == [("#1", "growing"), ("#2", "ended")]


def test_views_that_no_canvas_fills_are_not_there_for_a_canvas(page, feed):
    show(page, feed, CANVAS)
    expect(page.locator(".live .absent")).to_have_text(
        "Not in this run: entropy per token, draft tree, accepted per round, KV cache, grammar mask."
    )
    shown = page.locator(".panel:visible").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert shown == ["Canvas, step by step", "Cost on the lane's clock"]


# --- answers that were not judged ---

@pytest.mark.parametrize(
    "judged, words",
    [
        (Judged(expected="x", checked=False), "Not checked: this requires running the program"),
        (
            Judged(expected="x", checked=False, why="this machine cannot confine a program"),
            "Not judged: this machine cannot confine a program",
        ),
    ],
)
def test_the_page_says_why_an_answer_was_not_judged(page, feed, judged, words):
    written = [
        (0.1, Forward(phase="prefill", tokens=3)),
        *((0.2, event) for event in grown(0, 0, " a")),
        (0.3, judged),
        (0.3, Done("length")),
    ]
    show(page, feed, run_of(lane(0, written)))
    expect(page.locator(".verdict-said")).to_have_text(words)
