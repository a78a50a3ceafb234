"""Numbers on the page, with a trace made for each: none contradicts another, and each says what it counts."""
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
    visitor,
)
from playwright.sync_api import expect

from playground import events as ev
from playground.events import Branches, Candidate, Commit, Done, Draft, Failed, Forward, Header, Step, Verdict
from playground.player.frames import frame, new_name
from playground.player.live_view_assets import ASSETS
from playground.trace import Trace
from support.live_runs import RUN
from support.live_sequences import BEAMS, grown, lane, run_of


def show(page, feed, trace: Trace) -> None:
    """A whole run, played to its end."""
    events, headers = [stamped.to_json() for stamped in trace.events], [asdict(header) for header in trace.headers]
    send(page, feed, frame(new_name(), 0, events, "done", headers))
    seek(page, 1.0)


def words(locator) -> str:
    return " ".join(locator.inner_text().split())


def card_of(page, token: int) -> str:
    page.locator(".lane[data-lane='0'] .tokens > .t").nth(token).click()
    text = words(page.locator(".live .card"))
    page.keyboard.press("Escape")
    return text


# --- forwards ---

def commit(position: int, *origins: str) -> Commit:
    count = len(origins)
    return Commit(position, [7] * count, [" a"] * count, " a" * count, [None] * count, list(origins))


def forced_by_a_grammar() -> list:
    """Fourteen tokens: one from the prefill, three forced after it, then ten by seven forwards, three of these forced.
    """
    later = [("sampled", "forced")] * 3 + [("sampled",)] * 4
    starts = [4 + sum(map(len, later[:i])) for i in range(len(later))]
    grown = [event for start, origins in zip(starts, later) for event in (Forward(), commit(start, *origins))]
    return [Forward(phase="prefill", tokens=3), commit(0, "sampled", *["forced"] * 3), *grown, Done("length")]


FORCED = run_of(lane(0, [(0.1 * i, event) for i, event in enumerate(forced_by_a_grammar(), 1)]))


def test_tokens_per_forward_says_which_tokens_and_which_forwards_it_divides(page, feed):
    show(page, feed, FORCED)
    shown = numbers(page, 0)
    assert (shown["tokens"], shown["target_forwards"]) == (14, 7)
    assert shown["tokens_per_target_forward"] == pytest.approx(10 / 7)
    expect(page.locator(".lane .strip .detail")).to_have_text(
        "10 of 14 tokens by 7 forwards, 3 of them forced without one; "
        "1 from the prefill, 3 forced before the first forward"
    )


def test_the_card_of_a_forced_token_has_no_probability_instead_of_a_dash(page, feed):
    show(page, feed, FORCED)
    card = card_of(page, 1)
    assert "forced" in card and "probability" not in card and "–" not in card


def test_one_number_of_forwards_under_the_lane_in_the_costs_and_on_the_card_of_the_last_token(page, feed):
    show(page, feed, FORCED)
    assert numbers(page, 0)["target_forwards"] == 7
    assert words(page.locator(".panel-cost .totals tr").nth(1)).split(" %")[1].startswith(" 7 + 1 prefill")
    assert "after forward 7 (decode, 1 row)" in card_of(page, 13)
    assert "after forward prefill (3 rows)" in card_of(page, 0)


# --- marks of the player ---

@pytest.mark.parametrize(
    "ends, expected",
    [
        ([1.0, 1.0], ["1, 2"]),
        ([0.5, 1.0], ["1", "2"]),
        ([1.0, 0.985], ["1, 2"]),
        ([0.2, 0.9, 0.2, 0.91], ["1, 3", "2, 4"]),
    ],
)
def test_lanes_that_end_close_together_share_a_mark_that_lists_them(page, feed, ends, expected):
    text = [*grown(0, 0, " a"), Done("end")]
    show(page, feed, run_of(*(lane(i, [(end, event) for event in text]) for i, end in enumerate(ends))))
    assert page.locator(".live .marks span").all_inner_texts() == expected


# --- a draft tree ---

def siblings(second: ev.Test) -> Trace:
    """Two siblings drawn without replacement: the first is rejected, the second tested against the residual."""
    tree = Draft(0, [7, 8], [" x", " y"], [-1, -1], [0.5, 0.25], "rsd_s", "without_replacement")
    verdict = Verdict(0, [1], [ev.Test(0, 0.1, 0.5, 0.9, False), second], 9, " z", "bonus")
    tokens = Commit(0, [8, 9], [" y", " z"], " y z", [-1.0, -1.0], ["draft", "bonus"])
    events = [tree, Forward(tokens=3), verdict, tokens, Done("end")]
    return run_of(lane(0, [(0.1, event) for event in events]))


def test_q_stays_as_it_was_drawn_and_the_residual_has_a_name_of_its_own(page, feed):
    show(page, feed, siblings(ev.Test(1, 0.3, 0.5, 0.125, True, residual=True)))
    numbers = page.locator(".panel-tree .node[data-node] .numbers")
    assert numbers.all_text_contents() == ["p .10  q .50  u .90", "r .30  q .25  u .13"]
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator(".panel-tree .tests tr").all()]
    assert rows[0] == ["draft token", "p", "residual", "q", "q without the rejected siblings", "draw", ""]
    assert rows[2][1:6] == ["", "0.3000", "0.2500", "0.5000", "0.1250"]
    assert "residual 0.300 q 0.250 q without the rejected siblings 0.500 draw 0.125" in card_of(page, 0)


def replaced(*tests: ev.Test, leftover: tuple[Candidate, ...] = ()) -> Trace:
    """A round whose only draft token is rejected; the target gives its own token 26 % and the draft token 8 %."""
    tree = Draft(0, [7], [" smallest"], [-1], [0.5], "draft_model")
    row = Step(0, 1.0, 1.0, 9, [Candidate(9, " first", 0.26, 0.26), Candidate(7, " smallest", 0.08, 0.08)])
    verdict = Verdict(0, [], list(tests), 9, " first", "redraw", list(leftover))
    commit = Commit(0, [9], [" first"], " first", [-1.35], ["redraw"])
    return run_of(lane(0, [(0.1, event) for event in [tree, Forward(tokens=2), row, verdict, commit, Done("end")]]))


ITS_OWN, OF_THE_TARGET = (Candidate(9, " first", 1.0, 1.0),), (Candidate(9, " first", 0.26, 0.26),)


@pytest.mark.journey
@pytest.mark.parametrize(
    "test, leftover, sentence, list_title",
    [
        (ev.Test(0, 0.0, 0.5, None, False), ITS_OWN,
         "The target chose first (26 %); the draft said smallest (8.0 %).", ""),
        (ev.Test(0, 0.08, 0.5, None, False), OF_THE_TARGET,
         "The target sampled first (26 %); the draft said smallest (8.0 %).",
         "The target's distribution, which it was sampled from:"),
        (ev.Test(0, 0.08, 0.5, 0.9, False), OF_THE_TARGET,
         "Resampled because the target rejected:", "Residual distribution:"),
    ],
    ids=["greedy matching", "matching a sample", "rejection"],
)
def test_the_card_of_a_replaced_token_says_what_its_verifier_did(page, feed, test, leftover, sentence, list_title):
    show(page, feed, replaced(test, leftover=leftover))
    card = card_of(page, 0)
    assert sentence in card and "p 0.000" not in card
    titles = ("Residual distribution:", "The target's distribution, which it was sampled from:")
    assert [title for title in titles if title in card] == [title for title in titles if title == list_title]


def test_a_bonus_token_and_a_replaced_one_look_different_without_any_hue(page, feed):
    show(page, feed, RUN)
    choose(page, 1)
    legend = page.locator(".panel-rounds .chart-key")
    looks = [
        legend.locator(f".key-node.{origin}").evaluate("node => getComputedStyle(node, '::before').borderTopStyle")
        for origin in ("bonus", "redraw")
    ]
    dashes = page.locator(".panel-rounds .bar").locator(".bonus, .redraw").evaluate_all(
        "all => all.map((one) => getComputedStyle(one).strokeDasharray)"
    )
    fills = page.locator(".panel-rounds .bar").locator(".bonus, .redraw").evaluate_all(
        "all => all.map((one) => getComputedStyle(one).fill)"
    )
    assert looks == ["solid", "dashed"] and dashes[0] == "none" != dashes[1] and len(set(fills)) == 2


# --- sequences ---

def two_beams(sums: bool) -> Trace:
    """Sequence 2 is dropped after one token with a better score than that of sequence 1, which becomes the text."""
    events = [
        Branches([(1, 0), (2, 0)]), *grown(1, 0, " a"), *grown(2, 0, " b"),
        Branches(scores={1: -0.5, 2: -0.25}, sums={1: -0.5, 2: -0.25} if sums else {}),
        Branches(dropped=[2]), *grown(1, 1, " c"),
        Branches(scores={1: -0.75}, ended=[1], sums={1: -1.5} if sums else {}),
        Commit(0, [ord("a"), ord("c")], [" a", " c"], " a c", [-0.5] * 2, ["sampled"] * 2, grown_on=1), Done("end"),
    ]
    return run_of(lane(0, [(0.1 * i, event) for i, event in enumerate(events, 1)]))


def test_a_dropped_sequence_with_a_better_score_than_the_text_is_explained_with_both_scores(page, feed):
    show(page, feed, two_beams(sums=True))
    expect(page.locator(".panel-branches .branch")).to_have_count(2)
    assert page.locator(".panel-branches .branch").evaluate_all(
        "all => all.map((one) => [...one.querySelectorAll('.num, .branch-state')].map((part) => part.textContent))"
    ) == [["#1", "-0.750", "from sum -1.500 over 2 tokens", "became the text"],
          ["#2", "-0.250", "from sum -0.250 over 1 token", "dropped"]]
    expect(page.locator(".panel-branches .why-dropped")).to_have_text(
        "#2 (after 1 token) has a better score than the text, but from before it was dropped; the search compares the "
        "scores of one step. Scores are sums of log-probabilities, normalised by length."
    )
    show(page, feed, BEAMS)
    expect(page.locator(".panel-branches .why-dropped")).to_be_empty()
    expect(page.locator(".panel-branches .sum").first).to_be_hidden()


# --- a projector ---

def test_in_projector_mode_every_number_stays_under_its_heading(page, feed):
    show(page, feed, RUN)
    choose(page, 1)
    page.add_style_tag(content=(ASSETS / "projector.css").read_text())
    page.evaluate("document.body.classList.add('projector')")
    places = page.evaluate("""() => [...document.querySelectorAll(".panel-cost .large .totals tr")].map((row) =>
        [...row.children].map((cell) => Math.round(cell.getBoundingClientRect().left)))""")
    shown = page.locator(".panel-tree .node .numbers").first.evaluate("node => getComputedStyle(node).display")
    page.evaluate("document.body.classList.remove('projector')")
    assert all(row == places[0] for row in places) and 0 not in places[0]
    assert shown != "none"


# --- forks ---

@pytest.mark.journey
def test_a_fork_with_several_words_names_the_token_that_changed(page, feed):
    fork = Header(strategy="greedy", title="Greedy", forced=list(range(10)), forked_at=6)
    events = [(0.1, event) for event in [*grown(0, 0, " a"), Done("end")]]
    show(page, feed, run_of((fork, events)))
    expect(page.locator(".lane .title").first).to_have_text("Greedy, forked at token 7")
    show(page, feed, run_of((replace(fork, forked_at=-1), events)))
    expect(page.locator(".lane .title").first).to_have_text("Greedy, begins with 10 given tokens")


# --- guarantees ---

def test_a_lane_that_failed_has_no_badge_of_being_the_same(page, feed):
    same = ["greedy_identical", "budget_respected"]
    failing = lane(1, [(0.2, Failed("Choose another model."))], guarantee=same)
    show(page, feed, run_of(lane(0, [(0.1, Done("end"))], guarantee=same), failing))
    badges = [page.locator(f".lane[data-lane='{i}'] .badge:visible").all_inner_texts() for i in (0, 1)]
    assert badges == [["same text as greedy with its cache", "within budget"], ["within budget"]]


def parts(*kinds: str) -> list[ev.Part]:
    return [ev.Part("greedy", "decoder"), *(ev.Part(f"some_{kind}", kind) for kind in kinds)]


@pytest.mark.parametrize(("kinds", "badge"), [
    ((), "same text as greedy"), (("constraint",), "same text as greedy with its constraint"),
    (("constraint", "sampler"), "same text as greedy with its constraint and processors"),
    (("cache_policy",), "same text as greedy with its cache"),
    (("compute_policy",), "same text as greedy with its compute policy")])
def test_a_badge_names_the_additions_that_the_comparison_includes(page, feed, kinds, badge):
    """Without them a lane under a grammar would read "same text as greedy" beside "differs at 1"."""
    show(page, feed, run_of(lane(0, [(0.1, Done("end"))], guarantee=["greedy_identical"], parts=parts(*kinds))))
    assert page.locator(".lane .badge").all_inner_texts() == [badge]


# --- rounds and the text after them ---

def test_the_root_of_a_tree_is_the_token_before_its_round_even_if_a_forward_without_a_draft_followed(page, feed):
    def written(at: int, piece: str, origin: str) -> list:
        return [Forward(), Commit(at, [at], [piece], piece, [-0.1], [origin])]
    draft = [Draft(1, [1], [" b"], [-1], [0.5]), Forward(tokens=2),
             Verdict(1, [0], [ev.Test(0, 0.9, 0.5, 0.1, True)], 2, " c", "bonus"),
             Commit(1, [1, 2], [" b", " c"], " b c", [-0.1, -0.1], ["draft", "bonus"])]
    events = [*written(0, " a", "sampled"), *draft, *written(3, " d", "sampled"), Done("length")]
    show(page, feed, run_of(lane(0, [(0.1 * i, event) for i, event in enumerate(events, 1)])))
    root = page.locator(".panel-tree .node").first
    expect(root).to_contain_text("a")
    expect(root).not_to_contain_text("d")


def test_a_rule_that_draws_nothing_has_no_column_of_draws(page, feed):
    verdict = Verdict(0, [0], [ev.Test(0, 0.9, 0.5, None, True)])
    events = [Draft(0, [7], [" x"], [-1], [0.5]), Forward(tokens=2), verdict]
    show(page, feed, run_of(lane(0, [(0.1, event) for event in [*events, Done("stopped")]])))
    assert page.locator(".panel-tree .tests th").all_inner_texts() == ["draft token", "p", "q", ""]
    expect(page.locator(".panel-tree .key-words")).to_have_text("p target, q draft")


def test_slots_that_another_lane_reserves_are_in_the_key_of_the_cache(page, feed):
    def held(scratch: int) -> ev.Cache:
        return ev.Cache("target", 4, 1, 1, [[[(0, 4)]]], scratch=scratch, bytes=64)
    plain = [(0.1, event) for event in [*grown(0, 0, " a"), held(0), Done("end")]]
    beams = [(0.1, event) for event in [*grown(0, 0, " a"), Branches([(1, 0)]), held(2), Done("end")]]
    show(page, feed, run_of(lane(0, plain), lane(1, beams)))
    expect(page.locator(".panel-cache .key-scratch")).to_have_text("reserved for branches at the last update")
