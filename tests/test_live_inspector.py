"""The inspector of a wide page: one view beside the lanes, chosen by what happens or by a tab."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
from chromium import new_context
from live_page import address, browser, choose, drawn, feed, seek, wait_for  # noqa: F401
from playwright.sync_api import expect
from view_runs import GUESSING, PLAIN, WORDS, commit, evicting, in_rounds, one_by_one, run_of, show, side_by_side

from playground.events import Candidate, Done, Draft, Mask, Part, Step, Verdict
from playground.events import Test as Trial  # pytest would collect it

GRAMMAR = replace(PLAIN, parts=[*PLAIN.parts, Part("json_schema", "constraint")])
SMALL_CACHE = replace(PLAIN, parts=[*PLAIN.parts, Part("h2o", "cache_policy")])
MASKED = [(0.1, Mask(0, 3, 100, 0.6, [])), *one_by_one()]
TWO = run_of((PLAIN, one_by_one()), (GUESSING, in_rounds()))
WIDE = {"width": 1440, "height": 900}
BYTES = ("<0xE4>", "<0xBD>", "<0xA0>")  # 你


@pytest.fixture(scope="module")
def visitor(browser, address):
    """A visitor with a wide window and the page's own choice of views."""
    page = new_context(browser, views="one", viewport=WIDE, reduced_motion="reduce").new_page()
    page.broken = []
    page.on("pageerror", lambda error: page.broken.append(error))
    page.goto(address)
    page.wait_for_selector(".live .welcome")
    return page


@pytest.fixture
def page(visitor, feed):
    feed.heard.clear()
    visitor.set_viewport_size(WIDE)
    yield visitor
    assert not visitor.broken


def opened(page) -> list[str]:
    """The views that can be seen."""
    drawn(page)
    return page.locator(".live .panel:visible").evaluate_all("all => all.map((one) => one.className.split(' ')[1])")


def test_lanes_one_view_and_the_player_are_in_sight_together(page, feed):
    show(page, feed, TWO)
    assert opened(page) == ["panel-choice"]
    lane, panel = page.locator(".live .lane").first.bounding_box(), page.locator(".live .panel-choice").bounding_box()
    assert panel["x"] >= lane["x"] + lane["width"], "the view is beside the text"
    assert abs(panel["y"] - lane["y"]) < 120
    for part in (".live .lane >> nth=0", ".live .lane >> nth=1", ".live .panel-choice", ".live .player"):
        expect(page.locator(part)).to_be_in_viewport(ratio=0.98)


@pytest.mark.parametrize("lane, view", [
    ((PLAIN, one_by_one()), "choice"),
    ((GUESSING, in_rounds()), "tree"),
    ((GRAMMAR, MASKED), "mask"),
    ((SMALL_CACHE, evicting()), "cache"),
    ((PLAIN, side_by_side()), "branches"),
], ids=lambda given: given if isinstance(given, str) else "")
def test_what_happens_in_the_chosen_lane_decides_which_view_is_open(page, feed, lane, view):
    show(page, feed, run_of(lane))
    assert opened(page) == [f"panel-{view}"]
    expect(page.locator(f".live [data-view={view}]")).to_have_attribute("aria-selected", "true")


def test_another_lane_brings_its_own_view_until_a_tab_is_pressed(page, feed):
    show(page, feed, TWO)
    marked = "all => all.map((path) => path.getAttribute('class'))"
    assert page.locator(".live .course path").evaluate_all(marked) == [], "all its tokens were chosen"
    choose(page, 1)
    assert opened(page) == ["panel-tree"]
    assert page.locator(".live .course path").evaluate_all(marked) == ["draft", "redraw", "bonus"]
    page.click(".live [data-view=cost]")
    assert opened(page) == ["panel-cost"]
    expect(page.locator(".live .panel-cost table").first).to_be_visible()
    choose(page, 0)
    assert opened(page) == ["panel-cost"]
    page.locator(".live [data-view=cost]").press("ArrowRight")
    assert opened(page) == ["panel-difference"]
    expect(page.locator(".live [data-view=difference]")).to_be_focused()
    page.click(".live [data-view=choice]")


def test_a_tab_without_data_cannot_be_pressed_and_those_of_other_methods_are_away(page, feed):
    show(page, feed, run_of((PLAIN, one_by_one())))
    for view in ("tree", "rounds", "mask"):
        expect(page.locator(f".live [data-view={view}]")).to_be_disabled()
    for view in ("canvas", "branches", "inside", "attribution"):
        expect(page.locator(f".live [data-view={view}]")).to_be_hidden()


def choosing() -> list:
    """One step among seven candidates, of which the second is taken; the processors double what they leave."""
    shares = (0.3, 0.2, 0.1, 0.08, 0.06, 0.04, 0.02)
    top = [Candidate(50 + i, f" w{i}", share, 2 * share) for i, share in enumerate(shares)]
    taken = replace(commit(0, "sampled"), ids=[51], pieces=[" w1"], text=" w1")
    return [(0.1, Step(0, 2.0, 1.0, 51, top)), (0.1, taken), (0.1, Done("length"))]


def test_the_choice_shows_six_candidates_with_the_models_own_probability(page, feed):
    show(page, feed, run_of((PLAIN, choosing())))
    rows = page.locator(".live .choice-row")
    assert rows.locator(".piece").all_inner_texts() == [f"w{i}" for i in range(6)]
    assert rows.locator(".num").all_inner_texts() == ["30 %", "20 %", "10 %", "8.0 %", "6.0 %", "4.0 %"]
    assert rows.locator(".final").evaluate_all("bars => bars.map((bar) => bar.style.width)")[:2] == ["60%", "40%"]
    expect(page.locator(".live .choice-rest")).to_have_text("all other tokens together 22 %")
    expect(rows.nth(1)).to_have_attribute("aria-current", "true")
    expect(page.locator(".live .moment")).to_have_text("“w1” was chosen with 20 %, although “w0” had 30 %.")


def test_special_candidates_are_a_number_and_their_probability_until_they_are_asked_for(page, feed):
    top = [Candidate(50, " w0", 0.6, 0.6), Candidate(1, "<|user|>", 0.25, 0.25), Candidate(2, "<|end|>", 0.05, 0.05)]
    taken = replace(commit(0, "sampled"), ids=[50], pieces=[" w0"], text=" w0")
    show(page, feed, run_of((PLAIN, [(0.1, Step(0, 1.0, 1.0, 50, top)), (0.1, taken), (0.1, Done("length"))])))
    rows, rest = page.locator(".live .choice-row .piece"), page.locator(".live .choice-rest")
    assert rows.all_inner_texts() == ["w0", "the end"]
    expect(rest).to_have_text("1 special token 25 %, all other tokens together 10 %")
    page.locator(".live .lane .tokens > .t").first.hover()
    card = page.locator(".live .card")
    assert card.locator(".candidate .piece").all_inner_texts() == [" w0", "the end"]
    assert card.locator(".rest").all_inner_texts() == ["1 special token\n25 %", "all others\n10 %"]
    page.mouse.move(0, 0)
    page.locator(".live .prompts").evaluate("box => box.click()")
    expect(rows).to_have_text(["w0", "<|user|>", "the end"])
    expect(rest).to_have_text("all other tokens together 10 %")
    page.locator(".live .prompts").evaluate("box => box.click()")


def ending(chosen: int) -> list:
    """A step in which the end has 60 % and a word 30 %."""
    top = [Candidate(2, "<|end|>", 0.6, 0.6), Candidate(50, " w0", 0.3, 0.3)]
    piece = {2: "<|end|>", 50: " w0"}[chosen]
    taken = replace(commit(0, "sampled"), ids=[chosen], pieces=[piece], text="")
    return [(0.1, Step(0, 0.9, 0.9, chosen, top)), (0.1, taken)]


@pytest.mark.parametrize("chosen, said", [
    (2, "The model ended its text here; that was the most probable, with 60 %."),
    (50, "“w0” was chosen with 30 %, although the end of the text had 60 %."),
])
def test_the_end_of_a_text_is_said_in_words_and_not_as_a_token(page, feed, chosen, said):
    show(page, feed, run_of((PLAIN, ending(chosen))))
    expect(page.locator(".live .moment")).to_have_text(said)
    assert page.locator(".live .choice-row .piece").all_inner_texts() == ["the end", "w0"]
    expect(page.locator(".live .panel-choice")).not_to_contain_text("<|end|>")


def test_a_round_that_ends_the_text_says_so(page, feed):
    guessed = Draft(0, [7], [" w7"], [-1], [0.5], "draft_model")
    judged = Verdict(0, [0], [Trial(0, 0.9, 0.5, None, True)], 2, "<|end|>", "bonus")
    written = replace(commit(0, "draft"), ids=[7, 2], pieces=[" w7", "<|end|>"], text=" w7", origins=["draft", "bonus"],
                      logprobs=[-0.1, -0.1])
    show(page, feed, run_of((GUESSING, [(0.1, guessed), (0.1, judged), (0.1, written)])))
    said = "Drafted 1, kept 1. The same forward gave one more: the end of the text."
    expect(page.locator(".live .moment")).to_have_text(said)


def test_bytes_are_shown_as_the_characters_that_their_neighbours_make_of_them(page, feed):
    top = [Candidate(51, "<0xA0>", 0.6, 0.6), Candidate(52, "<0xA1>", 0.3, 0.3), Candidate(53, "<0xE4>", 0.05, 0.05)]
    first, second, third = (
        replace(commit(i, "sampled"), ids=[51], pieces=[byte], text="") for i, byte in enumerate(BYTES)
    )
    tree = Draft(0, [7, 8, 9], ["<0xE4>", "<0xBD>", "<0xA1>"], [-1, 0, 1], [0.5] * 3, "draft_model")
    written = [(0.1, one) for one in (first, second, Step(2, 1.0, 1.0, 51, top), third, tree)]
    show(page, feed, run_of((GUESSING, written)))
    page.click(".live [data-view=tree]")
    assert opened(page) == ["panel-tree"]
    assert page.locator(".live .panel-tree .name").all_text_contents() == ["你 A0", "佡 E4", "佡 BD", "佡 A1"]
    page.click(".live [data-view=choice]")
    assert opened(page) == ["panel-choice"]
    read = "all => all.map((one) => [one.querySelector('.composed')?.dataset.byte, one.textContent])"
    rows = page.locator(".live .choice-row .piece").evaluate_all(read)
    assert rows == [["A0", "你"], ["A1", "佡"], [None, "E4"]], "no character begins with a known end"
    expect(page.locator(".live .gap .composed")).to_have_text("你")
    expect(page.locator(".live .moment")).to_have_text("“你” was the most probable, with 60 %.")


def test_a_candidate_continues_the_text_in_a_fork(page, feed):
    show(page, feed, run_of((PLAIN, choosing())))
    run = page.get_attribute(".live", "data-run")
    row = page.locator(".live .choice-row").nth(3)
    row.hover()
    expect(row.locator(".onward")).to_be_visible()
    row.click()
    asked = wait_for(page, feed, "fork")
    assert (asked["run"], asked["lane"], asked["position"], asked["token"]) == (run, 0, 0, 53)


def test_the_moment_says_what_was_drafted_kept_and_preferred(page, feed):
    show(page, feed, run_of((GUESSING, in_rounds())))
    moment = page.locator(".live .moment")
    expect(moment).to_have_text("Drafted 2, kept 0. The large model drew “e”.")
    seek(page, 0.15 / 0.25)
    expect(moment).to_have_text(f"Drafted 2, kept 2. The same forward gave one more: “{WORDS[3].strip()}”.")


@pytest.fixture
def slow_choice(page):
    """Drawing the choices takes a while, as on a busy machine."""
    page.evaluate("""() => {
        const quick = window.quick = Element.prototype.replaceChildren;
        Element.prototype.replaceChildren = function (...nodes) {
            for (const end = performance.now() + 10; this.closest(".panel-choice") && performance.now() < end; );
            quick.apply(this, nodes);
        };
    }""")
    yield
    page.evaluate("() => { Element.prototype.replaceChildren = window.quick; }")


def test_words_and_view_are_of_one_moment_although_a_slow_view_rests_while_the_text_goes_on(page, feed, slow_choice):
    show(page, feed, run_of((PLAIN, one_by_one(0.25)[:-1])), state="running")
    page.select_option(".live .speed", "1", force=True)
    seek(page, 0)
    page.evaluate("""() => {
        const panel = document.querySelector(".live .panel-choice");
        const words = document.querySelector(".live .inspector .moment");
        window.together = new Set();
        const look = () => panel.querySelector(".gap").checkVisibility() &&
            together.add(JSON.stringify([panel.querySelector(".gap").textContent, words.textContent]));
        const all = { subtree: true, childList: true, characterData: true };
        new MutationObserver(look).observe(panel.closest(".live"), all);
    }""")
    page.click(".live [data-do='play']")
    expect(page.locator(".live .clock")).to_have_text("1.25 of 1.25 s")
    expect(page.locator(".live .panel-choice .gap")).to_have_text(WORDS[-1].strip())
    seen = [json.loads(pair) for pair in page.evaluate("[...window.together]")]
    assert len(seen) > 1
    assert not [(word, said) for word, said in seen if f"“{word}”" not in said]


def test_narrow_pages_and_paper_have_all_views_below_the_lanes(page, feed):
    show(page, feed, TWO)
    page.set_viewport_size({"width": 1000, "height": 900})
    below = ["panel-difference", "panel-entropy", "panel-tree", "panel-rounds", "panel-cost"]
    expect(page.locator(".live")).to_have_attribute("data-views", "all")
    assert opened(page) == below
    page.set_viewport_size(WIDE)
    expect(page.locator(".live")).to_have_attribute("data-views", "one")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened(page) == below
    expect(page.locator(".live .panel-tree svg[role=img]")).to_be_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(page.locator(".live")).to_have_attribute("data-views", "one")


def test_all_views_can_be_asked_for_and_the_wish_is_kept(page, feed):
    show(page, feed, TWO)
    page.click(".live .view-menu > button")
    page.click(".live .all-views")
    expect(page.locator(".live")).to_have_attribute("data-views", "all")
    assert len(opened(page)) == 5
    assert page.evaluate("JSON.parse(localStorage['decoding-playground.view']).views") == "all"
    page.click(".live .all-views")
    expect(page.locator(".live")).to_have_attribute("data-views", "one")
