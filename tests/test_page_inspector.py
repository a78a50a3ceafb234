"""The page as a stage: lanes and one view beside each other, and knobs that do not cover the text."""
from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from app_page import address, expect, tokens, visit  # noqa: F401
from chromium import chromium, new_context

from playground.ui.components.settings import Settings
from playground.ui.models.model_sheet import proposal_button
from playground.ui.play.gallery import examples, free_prompt_note

ADDED = [[], ["h2o"], ["snapkv"], ["tova"]]
CACHES = [{"strategy": "greedy", "extras": [[name, {}] for name in added]} for added in ADDED]
CACHE_NAMES = ["Greedy", "Heavy hitters (H2O)", "Prompt snapshot (SnapKV)", "By the last token's attention (TOVA)"]
DEPTHS = [{"strategy": "speculative", "extras": [["draft_model", {"depth": depth}]]} for depth in (2, 5, 8, 12)]
SVG = "{http://www.w3.org/2000/svg}"
TWO = Settings(prompt="The red fox", length=12, lanes=[{"strategy": "greedy"}, {"strategy": "speculative"}])


@pytest.fixture(scope="module")
def browser():
    """A visitor with a wide window, without motion and with the page's own choice of views."""
    with chromium() as opened:
        size = {"width": 1440, "height": 900}
        yield new_context(opened, views="one", viewport=size, reduced_motion="reduce", accept_downloads=True)


@pytest.fixture
def page(browser, address):
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    visit(page, address, TWO)
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#live .live")).to_have_attribute("data-fused", "true")
    yield page
    page.close()
    assert not wrong


def box(page, part: str) -> dict[str, float]:
    return page.locator(part).first.bounding_box()


def test_each_lane_continues_its_card_and_nothing_has_to_be_scrolled(page):
    for lane in range(2):
        card, text = box(page, f".lane-card[data-lane='{lane}']"), box(page, f".live .lane[data-lane='{lane}'] .text")
        assert abs(card["y"] + card["height"] - text["y"]) < 12
        assert (card["x"], card["width"]) == (text["x"], text["width"])
    for part in (".live .lane >> nth=0", ".live .lane >> nth=1", ".live .inspector", ".live .player", "#run"):
        expect(page.locator(part)).to_be_in_viewport(ratio=0.98)
    lane, beside = box(page, ".live .lane"), box(page, ".live .inspector")
    assert beside["x"] >= lane["x"] + lane["width"]
    assert page.locator(".live .body").first.evaluate("node => parseFloat(getComputedStyle(node).fontSize)") >= 19


def test_an_open_card_takes_the_place_of_the_view_and_run_closes_it(page):
    text = box(page, ".live .lane .text")
    page.locator(".lane-card[data-lane='0'] .edit").click()
    card, beside = box(page, ".lane-card.open"), box(page, ".live .inspector")
    assert abs(card["x"] - beside["x"]) < 2 and card["height"] <= beside["height"] + 2
    moved = box(page, ".live .lane .text")
    assert (moved["x"], moved["width"]) == (text["x"], text["width"]), "the text stays where it is"
    expect(page.locator(".live .lane[data-lane='0'] .lane-name")).to_be_visible()
    page.locator(".lane-card[data-lane='1'] .edit").click()
    expect(page.locator(".lane-card.open"), "one at a time").to_have_attribute("data-lane", "1")
    page.click("#run")
    expect(page.locator(".lane-card.open")).to_have_count(0)


def test_the_prompt_is_in_its_field_and_in_the_lanes_only_on_demand(page):
    prompt = page.locator(".live .lane .prompt").first
    expect(prompt).to_be_hidden()
    page.click(".live .view-menu > button")
    page.locator(".live .prompts").check()
    expect(prompt).to_be_visible()
    page.locator(".live .prompts").uncheck()
    page.fill("#prompt textarea", "The blue fox")
    expect(page.locator(".live .caption"), "an earlier run says what it was asked").to_contain_text("“The red fox”")
    expect(prompt).to_be_hidden()


def test_a_saved_run_is_called_by_its_lanes_and_its_prompt(page):
    page.click(".live .view-menu > button")
    with page.expect_download() as download:
        page.click(".live .view-menu [data-do=csv]")
    assert re.fullmatch(r"greedy-vs-speculative[a-z-]*-the-red-fox\.csv", download.value.suggested_filename)


def test_the_link_is_beside_run(page):
    run, share = box(page, "#run"), box(page, "#share")
    assert abs(run["y"] - share["y"]) < 4 and 0 < share["x"] - run["x"] - run["width"] < 40


def test_the_entropy_of_the_chosen_lane_is_behind_the_slider(page):
    drawn = page.locator(".live .curve path").evaluate_all("all => all.map((one) => one.getAttribute('d')).join('')")
    assert len(re.findall("M", drawn)) == 12


def test_no_label_counts_lanes_from_nought(page):
    labels = page.locator("[aria-label]").evaluate_all("all => all.map((one) => one.ariaLabel)")
    assert [label for label in labels if "lane 0" in label.lower()] == []


def test_a_prompt_of_ones_own_to_a_toy_model_is_answered_with_what_it_knows():
    asked, real = Settings(prompt="What is the capital of France?"), proposal_button(None)
    own = free_prompt_note(asked, "pocket", real)
    assert "7-million-parameter toy" in own and real in own and "playground.openModels()" in real
    assert free_prompt_note(asked, "gpt2", real) == ""
    known = next(example["prompt"] for example in examples() if example.get("prompt"))
    for prompt in (known, " "):
        assert free_prompt_note(Settings(prompt=prompt), "pocket", real) == ""


@pytest.mark.parametrize("width", [1440, 1280])
@pytest.mark.parametrize("lanes, names", [
    (CACHES, CACHE_NAMES), (DEPTHS, ["Depth 2", "Depth 5", "Depth 8", "Depth 12"]),
], ids=["caches", "depths"])
def test_four_lanes_are_told_apart_by_whole_names(page, address, lanes, names, width):
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, address, Settings(prompt="The green bird", length=12, lanes=lanes))
    page.click("#run")
    tabs = page.locator(".live .chooser .title")
    expect(tabs).to_have_text(names)
    assert all(tabs.evaluate_all("all => all.map((tab) => tab.scrollWidth <= tab.clientWidth)"))
    heads = page.locator("#editor .lane-title")
    assert heads.all_inner_texts() == names
    assert heads.all_text_contents() == page.locator(".live .lane .lane-name .title").all_text_contents()


def test_a_lane_that_cannot_start_has_its_title_and_its_reason_below_it(page, address):
    visit(page, address, replace(TWO, lanes=[{"strategy": "greedy"}, {"strategy": "medusa"}]))
    page.click("#run")
    expect(page.locator(".live .chooser .title")).to_have_text(["Greedy", "Medusa"])
    expect(page.locator(".lane-card[data-lane='1'] .complaint")).to_contain_text("Medusa is a drafter")
    expect(page.locator(".lane-card[data-lane='1'] .complaint")).to_be_visible()
    # in one step: the end of the run draws the card anew
    page.wait_for_function("""() => {
        const [head, reason] = [" > .head", " .complaint"].map((part) =>
            document.querySelector(".lane-card[data-lane='1']" + part)?.getBoundingClientRect());
        return head && reason && reason.height > 0 && reason.top >= head.bottom;
    }""")


def test_the_choice_is_saved_with_its_candidates_and_their_probabilities(page, tmp_path):
    page.locator(".live .lane[data-lane='0'] .tokens > *").nth(2).click()
    panel = page.locator(".live .panel-choice")
    expect(panel.locator(".choice-row").first).to_be_visible()
    with page.expect_download() as saved:
        panel.locator(".as-svg").click()
    saved.value.save_as(tmp_path / "choice.svg")
    texts = list(ElementTree.parse(tmp_path / "choice.svg").getroot().iter(f"{SVG}text"))
    words = ["".join(text.itertext()).strip() for text in texts]
    assert words[0] == panel.get_attribute("aria-label")
    candidates = panel.locator(".choice-row .piece").all_inner_texts()
    assert len(candidates) > 2 and {piece.strip() for piece in candidates if piece.strip()} <= set(words)
    assert set(panel.locator(".choice-row .num").all_inner_texts()) <= set(words)
    assert not any(word.startswith("Choose another word") for word in words)  # an invitation, not a finding


def test_a_held_word_shows_the_choice_of_its_own_lane(page):
    expect(page.locator(".live .chooser .tab[data-lane='0']")).to_have_attribute("aria-pressed", "true")
    tokens(page, 1).nth(3).click()
    expect(page.locator(".live .chooser .tab[data-lane='1']")).to_have_attribute("aria-pressed", "true")
    word = tokens(page, 1).nth(3).text_content().strip()
    expect(page.locator(".live .panel-choice .gap")).to_have_text(word or "␣")
