"""The difference between two lanes in the live view: where they diverge, how close the decision was, and the word diff.
"""
from __future__ import annotations

import math
import re

import pytest
from live_page import address, browser, choose, feed, page, seek, send, visitor  # noqa: F401
from playwright.sync_api import expect
from view_runs import send_trace

from playground.events import Candidate, Commit, Done, Event, Figure, Forward, Header, Part, Stamped, Step
from playground.trace import Trace
from playground.trace.lane_metrics import diff
from support.page_scripts import defining, evaluating

WORDS = [" the", " red", " green", " fox", " <b>ran</b>", " home", " again"]
ROW = [Candidate(1, " red", 0.5, 0.5), Candidate(2, " green", 0.25, 0.25)]


def writing(
    *ids: int, reason: str | None = "end", second: float = 0.1, row: list[Candidate] = ROW
) -> list[tuple[float, Event]]:
    """One token per forward; the row of the second token has red and green, and gives an eighth to all others."""
    events = [(second, Forward(phase="prefill", tokens=2))]
    for at, token in enumerate(ids):
        when, top = second * (at + 1), row if at == 1 else [Candidate(token, WORDS[token], 0.75, 0.75)]
        logprob = math.log(next((candidate.raw for candidate in top if candidate.id == token), 0.125))
        events += [
            (when, Step(at, 1.0, 1.0, token, top)),
            (when, Commit(at, [token], [WORDS[token]], WORDS[token], [logprob], ["sampled"])),
        ]
    return [*events, (second * len(ids), Done(reason))] if reason else events


def run_of(*lanes: list[tuple[float, Event]], models: tuple[str, ...] = ()) -> Trace:
    rows = sorted(
        ((at, lane, i, event) for lane, events in enumerate(lanes) for i, (at, event) in enumerate(events)),
        key=lambda row: row[:3],
    )
    headers = [
        Header(lane, f"Lane {lane + 1}", model=models[lane] if models else "toy", vocabulary=10, prompt="Look:")
        for lane in range(len(lanes))
    ]
    return Trace(headers, [Stamped(lane, seq, at, event) for seq, (at, lane, _, event) in enumerate(rows)])


def panel(page):
    return page.locator(".panel-difference")


def said(page):
    return panel(page).locator(".readout")


def stretches(page) -> list[tuple[str, str]]:
    return [
        tuple(part)
        for part in panel(page)
        .locator(".word-diff > *")
        .evaluate_all("all => all.map((part) => [part.className, part.textContent])")
    ]


RED, GREEN = writing(0, 1, 3, 4, 5), writing(0, 2, 3, 4, 6)


@pytest.mark.journey
def test_where_two_lanes_part_is_where_the_metric_finds_it(page, feed):
    trace = run_of(RED, GREEN)
    expected = diff(trace.lane(1), trace.lane(0))
    send_trace(page, feed, trace)
    choose(page, 1)
    expect(said(page)).to_have_text(
        f"The texts diverge at token {expected.index + 1}, logit difference {abs(expected.margin):.2f}."
    )
    cells = panel(page).locator(".parting td").all_inner_texts()
    # probability of green, then of red, then of all others, in the column of each lane
    assert cells == ["25 %", "25 %", "50 %", "50 %", "25 %", "25 %"]
    assert [text.split() for text in panel(page).locator(".parting tr th:first-child").all_inner_texts()[1:]] == [
        ["green", "lane", "2"],
        ["red", "lane", "1"],
        ["all", "others"],
    ]


@pytest.mark.journey
def test_each_column_has_the_probabilities_of_its_lane(page, feed):
    other = [Candidate(1, " red", 0.9, 0.9), Candidate(2, " green", 0.05, 0.05)]
    send_trace(page, feed, run_of(writing(0, 1, 3), writing(0, 2, 3, row=other)))
    choose(page, 0)
    assert panel(page).locator(".parting th").all_inner_texts()[1:3] == ["p in lane 1", "p in lane 2"]
    red, green = ["50 %", "90 %"], ["25 %", "5.0 %"]
    expect(panel(page).locator(".parting td")).to_have_text([*red, *green, "25 %", "5.0 %"])
    widths = panel(page).locator(".parting td .bars i").evaluate_all("bars => bars.map((bar) => bar.style.width)")
    assert widths[:4] == ["50%", "90%", "25%", "5%"]


def test_a_token_outside_the_favourites_is_known_from_its_commit(page, feed):
    send_trace(page, feed, run_of(RED, writing(0, 5, 3)))
    choose(page, 1)
    expect(said(page)).to_contain_text(f"logit difference {math.log(4):.2f}")
    others = ["25 %", "25 %", "13 %", "25 %"]  # green, then all others
    expect(panel(page).locator(".parting td")).to_have_text(
        ["13 %", "not among the 2 recorded", "50 %", "50 %", *others]
    )


def test_words_that_both_wrote_are_distinguished_from_those_of_one(page, feed):
    send_trace(page, feed, run_of(RED, GREEN))
    choose(page, 1)
    expect(panel(page).locator(".word-diff")).to_be_visible()
    assert stretches(page) == [
        ("same", " the"),
        ("mine", " green"),
        ("theirs", " red"),
        ("same", " fox <b>ran</b>"),
        ("mine", " again"),
        ("theirs", " home"),
    ]
    assert panel(page).locator("b").count() == 0


def test_a_word_that_one_left_out_does_not_shift_the_rest(page, feed):
    send_trace(page, feed, run_of(writing(0, 1, 3, 5), writing(0, 3, 5)))
    choose(page, 0)
    expect(panel(page).locator(".word-diff .mine")).to_have_text(" red")
    assert stretches(page) == [("same", " the"), ("mine", " red"), ("same", " fox home")]


def test_lane_1_is_compared_with_lane_2_and_any_other_can_be_chosen(page, feed):
    send_trace(page, feed, run_of(RED, RED, GREEN))
    choose(page, 0)
    expect(said(page)).to_have_text("Same text, 5 tokens.")
    panel(page).locator(".against").select_option("2")
    expect(said(page)).to_contain_text("The texts diverge at token 2")
    choose(page, 1)
    expect(said(page)).to_contain_text("The texts diverge at token 2")  # still against lane 3
    choose(page, 2)
    expect(panel(page).locator(".against option")).to_have_text(["lane 1", "lane 2"])
    expect(panel(page).locator(".against")).to_have_value("0")


def test_while_lanes_write_they_are_compared_as_far_as_both_have_come(page, feed):
    send_trace(page, feed, run_of(writing(0, 1, 3, 4, 5, reason=None), writing(0, 1, reason=None)), "running")
    choose(page, 1)
    expect(said(page)).to_have_text("Same text so far, 2 tokens.")
    assert stretches(page) == [("same", " the red")]


def test_the_difference_follows_the_player(page, feed):
    send_trace(page, feed, run_of(RED, GREEN))
    choose(page, 1)
    seek(page, 0.2)
    expect(said(page)).to_have_text("Same text so far, 1 token.")
    expect(panel(page).locator(".parting")).to_have_count(0)
    seek(page, 1.0)
    expect(said(page)).to_contain_text("The texts diverge at token 2")


def test_a_text_that_stops_early_is_the_same_as_far_as_it_goes(page, feed):
    send_trace(page, feed, run_of(RED, writing(0, 1, 3, reason="length")))
    choose(page, 1)
    expect(said(page)).to_have_text("Same text for 3 tokens; there lane 2 reached the token limit.")
    assert stretches(page) == [("same", " the red fox"), ("theirs", " <b>ran</b> home")]


def test_tokens_of_different_models_are_not_compared(page, feed):
    send_trace(page, feed, run_of(RED, GREEN, models=("toy", "other")))
    choose(page, 1)
    expect(said(page)).to_contain_text("only the words can be compared")
    expect(panel(page).locator(".parting")).to_have_count(0)
    assert ("mine", " green") in stretches(page)


def test_a_token_at_the_parting_is_shown_in_its_text(page, feed):
    send_trace(page, feed, run_of(RED, GREEN))
    choose(page, 1)
    panel(page).locator(".parting .piece").last.click()
    expect(page.locator(".lane[data-lane='0'] .tokens > .t").nth(1)).to_have_class(re.compile("chosen"))
    page.keyboard.press("Escape")


def test_a_single_lane_has_nothing_to_differ_from(page, feed):
    send_trace(page, feed, run_of(RED))
    expect(panel(page)).to_be_hidden()


LONG = [f"w{i % 700}" for i in range(1500)]


@pytest.mark.parametrize(
    "mine, theirs", [(LONG, LONG[:700] + ["x"] + LONG[701:]), (LONG, LONG[::-1]), (LONG, []), ([], []), (["a"], ["b"])]
)
def test_the_stretches_put_both_texts_together_again(differing, mine, theirs):
    texts = {"mine": " ".join(mine), "theirs": " ".join(theirs)}
    parts = differing("({ mine, theirs }) => diffWords(mine, theirs)", texts)
    for kind, text in texts.items():
        assert "".join(part["text"] for part in parts if part["kind"] in ("same", kind)) == text
    assert all(a["kind"] != b["kind"] for a, b in zip(parts, parts[1:]))


@pytest.fixture(scope="module")
def differing(browser):
    return evaluating(browser, defining("run/words.js"))


def test_a_lane_that_was_forced_where_the_texts_diverge_has_no_column_of_probabilities(page, feed):
    forced = [(0.1, Forward(phase="prefill", tokens=2)),
              (0.1, Commit(
                  0, [0, 2], WORDS[0:1] + WORDS[2:3], WORDS[0] + WORDS[2], [None, None], ["forced", "forced"]
              )),
              (0.2, Done("end"))]
    send_trace(page, feed, run_of(writing(0, 1, 3), forced))
    choose(page, 0)
    expect(panel(page).locator(".readout")).to_have_text(
        "The texts diverge at token 2, logit difference 0.69; lane 2 was forced there."
    )
    assert panel(page).locator(".parting th").all_inner_texts()[:2] == ["", "p in lane 1"]
    expect(panel(page).locator(".parting td")).to_have_text(["50 %", "25 %"])


def test_a_token_that_a_lane_did_not_record_is_said_to_be_missing_from_its_list(page, feed):
    send_trace(page, feed, run_of(writing(0, 1, 3), writing(0, 5, 3)))
    others = ["25 %", "25 %", "25 %", "13 %"]  # green, then all others
    expect(panel(page).locator(".parting td")).to_have_text(
        ["50 %", "50 %", "not among the 2 recorded", "13 %", *others]
    )


# --- a lane with other weights ---

def changed_weights(*figures: Figure) -> Trace:
    """The red lane beside one with other weights, which writes green."""
    *written, done = GREEN
    trace = run_of(RED, [*written, *((0.6, figure) for figure in figures), done])
    trace.headers[1].parts.append(Part("rtn:bits=3", "weights"))
    return trace


def kl(position: int, nats: float) -> Figure:
    return Figure("scalar", "KL after the same prefix, nats", {"x": position, "series": {"KL(loaded || lane)": nats}})


@pytest.mark.journey
def test_both_distributions_stand_at_the_first_difference_with_the_measured_divergence(page, feed):
    send_trace(page, feed, changed_weights(kl(0, 0.01), kl(1, 0.125), kl(2, 0.5)))
    choose(page, 1)
    words = panel(page).locator(".parting-words")
    expect(words).to_have_count(2)
    expect(words.first).to_contain_text("Both lanes have read the same text up to here")
    expect(words.last).to_contain_text("KL(loaded weights || lane 2) of this token: 0.125 nats, measured over the full")


def test_a_divergence_that_was_not_measured_is_not_given_a_number(page, feed):
    send_trace(page, feed, changed_weights())
    choose(page, 0)
    words = panel(page).locator(".parting-words").last
    expect(words).to_have_text(
        "KL to the loaded weights was not measured: it needs the full vocabulary, and 2 candidates of lane 2 are "
        "recorded. The overlay “KL to the loaded weights” measures it."
    )


def test_lanes_with_the_loaded_weights_are_not_told_about_others(page, feed):
    send_trace(page, feed, run_of(RED, GREEN))
    expect(panel(page).locator(".parting-words")).to_have_count(1)
