"""Nothing is covered, cut or out of sight on a visitor's page: an open drawer, a lesson, large type, paper."""
from __future__ import annotations

import re

import pytest
from app_page import address, expect, open_settings  # noqa: F401
from chromium import chromium, new_context

from playground.ui.components.settings import Settings

PHONE, WIDE = {"width": 390, "height": 844}, {"width": 1440, "height": 900}
READ = Settings(prompt="The red fox", length=12,
                lanes=[{"strategy": "greedy", "extras": [["attention_entropy", {}]]}])  # which has figures of its own
TWO = Settings(prompt="The red fox", length=12, lanes=[{"strategy": "greedy"}, {"strategy": "speculative"}])
ROWS = "all => new Set(all.filter((one) => one.checkVisibility()).map((one) => one.offsetTop)).size"


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield new_context(opened, views="one", reduced_motion="reduce")


@pytest.fixture
def page(browser):
    page = browser.new_page()
    yield page
    page.close()


def opened(page, address: str, size: dict[str, int], query: str = f"s={TWO.to_code()}"):
    page.set_viewport_size(size)
    page.goto(f"{address}?{query}")
    expect(page.locator(".lane-card")).to_have_count(2)
    expect(page.locator("#settings .summary")).to_contain_text("12 tokens" if "s=" in query else "96 tokens")
    expect(page.locator(".live[data-recorded='true'] .tokens > *").first).to_be_attached()
    return page


def test_on_a_phone_an_open_drawer_takes_the_place_of_the_view(page, address):
    opened(page, address, PHONE)
    expect(page.locator(".live .inspector")).to_be_visible()
    open_settings(page)
    expect(page.locator(".live .inspector")).to_be_hidden()
    page.locator("#stop-strings").scroll_into_view_if_needed()
    player = page.locator(".live .player").bounding_box()
    over = page.evaluate("([x, y]) => Boolean(document.elementFromPoint(x, y).closest('.player'))",
                         [player["x"] + 8, player["y"] + 8])
    assert over, "labels of the drawer pass below the timeline"
    page.locator("#settings .settings-open").click()
    expect(page.locator(".live .inspector")).to_be_visible()


def test_a_refused_field_comes_into_sight_in_the_drawer(page, address):
    opened(page, address, {"width": 1440, "height": 700})
    open_settings(page)
    page.fill("#length input", "-5")
    page.locator("#drawer").evaluate("drawer => { drawer.scrollTop = drawer.scrollHeight; }")
    expect(page.locator("#length input")).not_to_be_in_viewport()
    page.click("#run")
    expect(page.locator("#prompt-notice")).to_contain_text("not -5")
    expect(page.locator("#length input")).to_be_in_viewport(ratio=1)
    assert page.evaluate("scrollY") == 0


@pytest.mark.parametrize("large", [False, True])
def test_tabs_of_the_views_stay_one_row_in_a_lesson_and_in_large_type(page, address, large):
    opened(page, address, WIDE, f"s={TWO.to_code()}" if large else "lesson=guessing-ahead")
    if large:
        page.evaluate("playground.switchProjector()")
    expect(page.locator("body")).to_have_class(re.compile("projector" if large else "in-lesson"))
    assert page.locator(".live .view-tab").evaluate_all(ROWS) == 1
    assert page.locator(".live .chooser .tab").evaluate_all(ROWS) == 1
    expect(page.locator(".live .view-tab:enabled").first).to_be_attached()
    if large:
        page.evaluate("playground.switchProjector()")


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_only_lane_has_its_name_and_one_row_of_tabs_with_its_method(page, address, size):
    page.set_viewport_size(size)
    page.goto(f"{address}?s={READ.to_code()}")
    expect(page.locator("#settings .summary")).to_contain_text("12 tokens")
    page.click("#run")
    expect(page.locator(".live[data-recorded='false'] .view-tab[data-view='figures']")).to_be_enabled()
    if size is WIDE:
        assert page.locator(".live .view-tab").evaluate_all(ROWS) == 1
        expect(page.locator(".live .lane-name:visible, .lane-card:visible").first).to_contain_text("Greedy")
    else:
        expect(page.locator(".live .chooser .tab")).to_contain_text("Greedy")
        expect(page.locator(".live .chooser .tab")).to_be_in_viewport()


def test_a_long_name_of_a_model_lies_below_nothing_on_a_phone(page, address):
    opened(page, address, PHONE)
    chip = page.locator(".model-chip")
    chip.locator("b").evaluate("name => { name.textContent = 'Pocket block diffusion'; }")
    lessons = page.locator(".begin").get_by_text("Lessons").bounding_box()
    assert chip.bounding_box()["x"] + chip.bounding_box()["width"] <= lessons["x"]


def test_a_lesson_on_a_phone_shows_no_special_tokens(page, address):
    opened(page, address, PHONE, "lesson=guessing-ahead")
    page.get_by_text("Go on without a prediction").click()
    page.locator(".lesson-panel").get_by_text("Set up and run").click()
    text = page.locator(".live[data-recorded='false'] .lane[data-lane='0'] .text")
    expect(text).to_contain_text("def work(items)")
    assert text.locator(".chip:visible").count() == 0


def test_what_an_earlier_prompt_was_ends_in_one_mark(page, address):
    opened(page, address, WIDE)
    expect(page.locator(".live .caption-text")).to_contain_text("about Mia.” Press Run for the prompt above.")


def test_paper_has_the_prompt_and_the_names_of_the_lanes_but_no_links(page, address):
    opened(page, address, WIDE)
    page.emulate_media(media="print")
    expect(page.locator("#prompt textarea")).to_be_visible()
    for lane, name in enumerate(["Greedy", "Speculative"]):
        expect(page.locator(f".live .lane[data-lane='{lane}'] .lane-name")).to_contain_text(name)
        expect(page.locator(f".live .lane[data-lane='{lane}'] .lane-name")).to_be_visible()
    for part in ("#run", "#share", ".places", "footer", ".live .player"):
        expect(page.locator(part).first).to_be_hidden()


@pytest.mark.parametrize("width", [660, 900, 1024, 1280, 1440])
def test_the_sentence_leaves_room_for_the_buttons_beside_it(page, address, width):
    opened(page, address, {"width": width, "height": 900})
    said = page.evaluate("""() => {
        const words = document.createRange();
        words.selectNodeContents(document.querySelector('.hero h2'));
        return [...words.getClientRects()].map(({ right, bottom }) => [right, bottom]);
    }""")
    buttons = page.locator(".lessons-open").bounding_box()
    assert all(right <= buttons["x"] for right, bottom in said if bottom > buttons["y"])
    assert width < 1280 or len(said) == 1


def test_what_can_be_asked_at_a_token_is_in_sight_where_its_card_is_higher_than_its_room(page, address):
    opened(page, address, {"width": 900, "height": 700})
    page.locator(".live .tokens .t").nth(5).click()
    card = page.locator(".live .card.pinned")
    expect(card).to_be_visible()
    assert card.evaluate("one => one.scrollHeight > one.clientHeight"), "otherwise all of it is in sight"
    expect(card.get_by_role("button", name="Look inside")).to_be_in_viewport(ratio=1)
    over = card.get_by_role("button", name="Look inside").evaluate("""(one) => {
        const { x, y, width, height } = one.getBoundingClientRect();
        return one.contains(document.elementFromPoint(x + width / 2, y + height / 2));
    }""")
    assert over
