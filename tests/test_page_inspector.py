"""The page as a stage: lanes and one view beside each other, and knobs that do not cover the text."""
from __future__ import annotations

import re

import pytest
from app_page import address, expect, tokens, visit  # noqa: F401
from chromium import chromium, new_context

from playground.ui.components.settings import Settings
from playground.ui.models.model_sheet import proposal_button
from playground.ui.play.gallery import examples, free_prompt_note

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
    expect(prompt, "an earlier run says what it was asked").to_be_visible()


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
    assert "7-million-parameter toy" in own and real in own and "openModels()" in real
    assert free_prompt_note(asked, "gpt2", real) == ""
    known = next(example["prompt"] for example in examples() if example.get("prompt"))
    for prompt in (known, " "):
        assert free_prompt_note(Settings(prompt=prompt), "pocket", real) == ""
