"""What a visitor sees first, in a real browser: few controls, large legible text, and what opens takes no text away."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
from app_page import address, expect, tokens, visit  # noqa: F401
from chromium import chromium, new_context

from playground.ui.components.settings import Settings

SIZES = {"wide": (1440, 900), "laptop": (1280, 800), "phone": (390, 844)}
MOST = 20
TWO = Settings(prompt="The red fox", length=12, lanes=[{"strategy": "greedy"}, {"strategy": "speculative"}])

CONTROLS = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
    .filter((node) => {
        const { left, top, right, bottom, width, height } = node.getBoundingClientRect();
        return node.tabIndex >= 0 && !node.disabled && node.checkVisibility({ visibilityProperty: true })
            && width && height && top < innerHeight && bottom > 0 && left < innerWidth && right > 0;
    }).map((node) => node.ariaLabel || node.textContent.trim().slice(0, 24) || node.className || node.tagName)"""

SHARE_OF_TEXT = """() => {
    const sheet = document.querySelector(".live .inspector"); // over the texts of a phone
    const end = getComputedStyle(sheet).position === "fixed" ? sheet.getBoundingClientRect().top : innerHeight;
    const clipped = (node) => {
        const { left, top, right, bottom } = node.getBoundingClientRect();
        const width = Math.min(right, innerWidth) - Math.max(left, 0);
        return Math.max(0, width) * Math.max(0, Math.min(bottom, end) - Math.max(top, 0));
    };
    const texts = [...document.querySelectorAll(".live .lane .text")].reduce((sum, node) => sum + clipped(node), 0);
    const { left, width, top } = document.querySelector(".live .scene").getBoundingClientRect();
    const timeline = document.querySelector(".live .player").getBoundingClientRect();
    return texts / (width * (timeline.top - top));
}"""

UNREADABLE = r"""() => {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    const known = new Map();
    const paint = (colour) => {
        if (known.has(colour)) return known.get(colour);
        pen.clearRect(0, 0, 1, 1);
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data;
        known.set(colour, [red, green, blue, alpha / 255]);
        return known.get(colour);
    };
    const over = ([...top], under) => under.map((level, i) => top[i] * top[3] + level * (1 - top[3]));
    const groundOf = (node) => {
        if (!node) return [255, 255, 255];
        return over(paint(getComputedStyle(node).backgroundColor), groundOf(node.parentElement));
    };
    const light = (levels) => {
        const [red, green, blue] = levels.map((level) => level / 255)
            .map((share) => (share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const contrast = (a, b) => {
        const [low, high] = [light(a), light(b)].sort((one, other) => one - other);
        return (high + 0.05) / (low + 0.05);
    };
    const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const poor = [];
    let seen = 0;
    while (words.nextNode()) {
        const { textContent, parentElement: node } = words.currentNode;
        if (!textContent.trim() || node.closest(":disabled, style, script, noscript")) continue;
        if (!node.checkVisibility({ visibilityProperty: true })) continue;
        const range = document.createRange();
        range.selectNodeContents(words.currentNode);
        if (range.getBoundingClientRect().width < 2) continue;
        const style = getComputedStyle(node);
        const ground = groundOf(node);
        const ink = over(paint(node.closest("svg") ? style.fill : style.color), ground);
        seen += 1;
        const size = parseFloat(style.fontSize);
        const ratio = contrast(ink, ground);
        const name = `${textContent.trim().slice(0, 30)} (${node.className.baseVal ?? node.className})`;
        if (size < 13 || ratio < 4.5) poor.push(`${name}: ${size} px, ${ratio.toFixed(2)}`);
    }
    return [seen, [...new Set(poor)]];
}"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        size = {"width": 1440, "height": 900}
        yield new_context(opened, views="one", align="forwards", reduced_motion="reduce", viewport=size)


@pytest.fixture
def page(browser, address):
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert not wrong


def arrive(page, address, width: int, height: int) -> None:
    """The page as a new visitor finds it, whatever was chosen before, with the recorded example at its end."""
    page.set_viewport_size({"width": width, "height": height})
    page.goto(f"{address}/health")  # of the same origin, without a script that keeps anything
    page.evaluate("localStorage.clear()")
    page.goto(address)
    expect(page.locator(".live .lane")).to_have_count(2)
    expect(page.locator("#settings .summary")).to_contain_text("tokens")
    page.locator(".live .lane .tokens > .t").nth(20).wait_for(state="attached")


@pytest.mark.journey
@pytest.mark.parametrize("size", SIZES)
def test_first_sight_has_at_most_twenty_controls_and_text_on_two_fifths_of_the_stage(page, address, size):
    arrive(page, address, *SIZES[size])
    controls = page.evaluate(CONTROLS)
    assert 8 < len(controls) <= MOST, controls
    for _ in range(2):  # light and dark
        assert page.evaluate(SHARE_OF_TEXT) >= 0.4
        expect(page.locator(".live .panel:visible"), "one explanation moves").to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("playground.switchTheme()")


@pytest.mark.journey
def test_every_text_has_thirteen_pixels_and_a_contrast_of_four_and_a_half_in_both_themes(page, address):
    arrive(page, address, 1440, 900)
    for _ in range(2):
        seen, poor = page.evaluate(UNREADABLE)
        assert seen > 100 and poor == []
        page.locator(".view-menu > button").click()
        page.locator("#settings .settings-open").focus()
        page.keyboard.press("Enter")
        page.locator(".live [data-view=cost]").evaluate("tab => tab.click()")
        seen, poor = page.evaluate(UNREADABLE)
        assert seen > 130 and poor == []
        page.locator("#settings .settings-open").click()
        page.evaluate("playground.switchTheme()")


@pytest.mark.parametrize("path", ["library", "benchmark", "game", "?lesson=guessing-ahead"])
def test_every_other_page_is_as_legible(page, address, path):
    page.goto(f"{address}/{path}")
    expect(page.locator(".strategies .entry, .lane-card, .game .options, .lesson-panel h3").first).to_be_visible()
    for details in page.locator(".strategies .entry details").all()[:4]:
        details.evaluate("fold => { fold.open = true; }")
    for _ in range(2):
        seen, poor = page.evaluate(UNREADABLE)
        assert seen > 20 and poor == []
        page.evaluate("playground.switchTheme()")


def test_settings_and_earlier_runs_take_the_place_of_the_view_and_not_of_the_text(page, address):
    visit(page, address, TWO)
    for _ in range(2):
        page.click("#run")
        expect(tokens(page, 1).nth(11)).to_be_attached()
        expect(page.locator("#run")).to_be_visible()
    expect(page.locator(".live .runs")).to_have_text("Runs 2")
    expect(page.locator("#run")).to_be_visible()
    text, beside = (page.locator(part).first.bounding_box() for part in (".live .lane .text", ".live .inspector"))
    for opener, opened in (("#settings .settings-open", "#drawer"), (".live .runs", ".live .visit")):
        page.locator(opener).click()
        box = page.locator(opened).bounding_box()
        assert abs(box["x"] - beside["x"]) < 2 and box["x"] + box["width"] <= beside["x"] + beside["width"] + 2
        assert beside["y"] - 2 <= box["y"] and box["y"] + box["height"] <= beside["y"] + beside["height"] + 2
        now = page.locator(".live .lane .text").first.bounding_box()
        assert [round(now[side] - text[side]) for side in now if abs(now[side] - text[side]) > 2] == [], "it moved"
        page.locator(opener).click()
        expect(page.locator(opened)).to_be_hidden()
    page.locator(".live .runs").click()
    page.locator(".live .visit-run").first.click()
    expect(page.locator(".live .message")).to_contain_text("Showing run 1 again")
    expect(page.locator(".live .visit")).to_be_hidden()


def test_the_open_card_of_any_lane_takes_the_place_of_the_view(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=3 * [{"strategy": "greedy"}]))
    page.click("#run")
    expect(tokens(page, 2).nth(11)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    view = page.locator(".live .inspector").bounding_box()
    for lane in (0, 1, 2):  # the last one is alone in its row
        page.locator(f".lane-card[data-lane='{lane}'] .edit").click()
        expect(page.locator(".lane-card.open")).to_have_attribute("data-lane", str(lane))
        card = page.locator(".lane-card.open").bounding_box()
        assert [round(card[side] - view[side]) for side in card if abs(card[side] - view[side]) > 2] == []


def test_four_lanes_of_a_projector_are_whole_above_the_player(page, address):
    page.set_viewport_size({"width": 1280, "height": 800})
    lanes = [{"strategy": name} for name in ("greedy", "sample", "speculative", "greedy")]
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=lanes))
    page.evaluate("playground.switchProjector()")
    page.click("#run")
    expect(tokens(page, 3).nth(11)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    player = page.locator(".live .player").bounding_box()
    foot = page.locator(".live .lanes").bounding_box()
    assert foot["y"] + foot["height"] <= player["y"] and player["y"] + player["height"] <= 800
    cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
    assert page.locator(".lane-card .lane-title").evaluate_all(cut) == []
    heads = page.locator(".lane-card").evaluate_all("all => all.map((one) => one.offsetHeight)")
    assert max(heads) < 45, "one line each"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("playground.switchProjector()")


def test_an_added_lane_stands_on_the_stage_at_once_and_nothing_else_moves(page, address):
    visit(page, address, TWO)
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    parts = ("#run", "#settings .summary", ".live .scene", ".live .inspector", ".live .player")
    before = [page.locator(part).bounding_box() for part in parts]
    text = tokens(page, 1).all_text_contents()
    page.locator(".lane-adder .add-lane").click()
    page.locator(".lane-adder .option[data-name='sample']").click()
    waiting = page.locator(".live .waiting")
    expect(waiting).to_have_text("Press Run: this lane has not run yet.")
    assert [page.locator(part).bounding_box() for part in parts] == before
    assert page.locator(".live .lanes > .lane").count() == page.locator(".lane-card").count() == 3
    head, place = (page.locator(part).bounding_box() for part in (".lane-card[data-lane='2']", ".live .waiting"))
    assert abs(head["x"] - place["x"]) < 3 and abs(head["y"] - place["y"]) < 8, "its card is its head"
    expect(page.locator(".live .caption"), "the others are still of what is chosen").to_be_hidden()
    expect(page.locator(".live .tab .number")).to_have_text(["1", "2", "3"])
    page.evaluate("document.querySelector(\".lane-card[data-lane='0'] .edit\").click()")
    page.locator(".lane-card[data-lane='0'] [aria-label='Remove lane 1']").click()
    expect(page.locator(".live .lanes > .lane:visible")).to_have_count(2)
    assert tokens(page, 1).all_text_contents() == text, "a lane keeps its text at another place"
    expect(page.locator(".live .caption")).to_contain_text("An earlier run")
    page.click("#run")
    expect(waiting).to_have_count(0)
    expect(tokens(page, 1).nth(11)).to_be_attached()


def test_a_word_that_is_pointed_at_shows_three_candidates_and_its_place_and_a_click_holds_the_rest(page, address):
    visit(page, address, TWO)
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    pointer, card = page.locator(".live .pointer"), page.locator(".live .card")
    expect(pointer).to_be_hidden()
    tokens(page, 0).nth(4).hover()
    assert card.locator(".candidate").count() in (3, 4), "the chosen one may be a fourth"
    expect(card.locator(".facts")).to_have_count(0)
    expect(pointer).to_be_visible()
    expect(tokens(page, 1).nth(4)).to_have_class(re.compile("level"))
    tokens(page, 0).nth(4).click()
    expect(card).to_be_hidden()
    choice = page.locator(".live .panel-choice")
    word = tokens(page, 0).nth(4).text_content().strip()
    expect(choice.locator(".gap")).to_have_text(word or "␣")
    for part in (".own-words", ".look", ".facts", ".back-to-now"):
        expect(choice.locator(part)).to_be_visible()
    tokens(page, 0).nth(7).hover()
    expect(choice.locator(".gap"), "a held word stays").to_have_text(word or "␣")
    choice.locator(".back-to-now").click()
    expect(choice.locator(".back-to-now")).to_have_count(0)
    expect(choice.locator(".gap")).not_to_have_text(word or "␣")


def test_a_line_cut_by_its_box_fades_and_the_place_that_is_pointed_at_comes_into_sight_in_the_other_lane(page, address):
    arrive(page, address, 1440, 900)
    lanes = [page.locator(f".live .lane[data-lane='{lane}']") for lane in (0, 1)]
    text, mask = lanes[0].locator(".text"), "node => getComputedStyle(node).maskImage"
    expect(text).to_have_class(re.compile("goes-on-above"))
    assert "gradient" in text.evaluate(mask)
    text.evaluate("node => node.scrollTo(0, 0)")
    expect(text).not_to_have_class(re.compile("goes-on-above"))
    assert text.evaluate(mask) == "none"
    level, frame = lanes[1].locator(".tokens > .t").nth(4), lanes[1].locator(".text")
    assert level.bounding_box()["y"] < frame.bounding_box()["y"], "the other lane shows the end of its text"
    lanes[0].locator(".tokens > .t").nth(4).hover()
    expect(level).to_have_class(re.compile("level"))
    assert frame.bounding_box()["y"] <= level.bounding_box()["y"] < frame.bounding_box()["y"] + 80


@pytest.mark.parametrize("size", SIZES)
def test_the_text_of_the_chosen_lane_is_two_keys_away(page, address, size):
    arrive(page, address, *SIZES[size])
    skip = page.locator(".skip")
    expect(skip).not_to_be_in_viewport()
    page.keyboard.press("Tab")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    text = page.locator(".live .lane[data-lane='0'] .text")
    expect(text).to_be_focused()
    expect(skip).not_to_be_in_viewport()
    page.keyboard.press("ArrowLeft")
    expect(text.locator(".t").last).to_be_focused()


@pytest.mark.parametrize("path, first", [("game", ".game .stage"), ("library", "main h2"), ("benchmark", "main h2")])
def test_the_first_stop_of_another_page_leads_to_its_contents(page, address, path, first):
    page.goto(f"{address}/{path}")
    contents = page.locator(first).first
    expect(contents).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(contents).to_be_focused()


@pytest.mark.parametrize("path", ["game", "library", "benchmark"])
def test_the_header_of_any_page_is_one_row_on_a_phone(page, address, path):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/{path}")
    expect(page.locator("main h2").first).to_be_visible()
    links, switch = page.locator(".places").bounding_box(), page.locator(".tools .theme").last.bounding_box()
    assert abs(links["y"] + links["height"] / 2 - switch["y"] - switch["height"] / 2) < 6


def test_up_and_down_lead_to_the_same_word_in_another_lane(page, address):
    visit(page, address, TWO)
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    texts = page.locator(".live .lane .text")
    assert texts.evaluate_all("all => all.map((one) => one.tabIndex)") == [0, -1], "one stop of the Tab key"
    texts.first.focus()
    for key in ("ArrowLeft", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    where = "[document.activeElement.closest('.lane').dataset.lane, document.activeElement.dataset.i]"
    assert page.evaluate(where) == ["1", "10"]


def test_a_phone_shows_one_lane_a_sheet_and_the_timeline(page, address):
    arrive(page, address, *SIZES["phone"])
    lanes, sheet = page.locator(".live .lanes"), page.locator(".live .inspector")
    for part in (".live .player", ".live .inspector", ".live .lane >> nth=0"):
        expect(page.locator(part)).to_be_in_viewport()
    expect(page.locator(".live .lane >> nth=1")).not_to_be_in_viewport()
    player = page.locator(".live .player").bounding_box()
    assert player["y"] + player["height"] >= 842
    lanes.evaluate("node => node.scrollTo({ left: node.clientWidth, behavior: 'instant' })")
    expect(page.locator(".live .tab[data-lane='1']")).to_have_attribute("aria-pressed", "true")
    page.locator(".live .tab[data-lane='0']").click()
    page.wait_for_function("document.querySelector('.live .lanes').scrollLeft === 0")
    low = sheet.bounding_box()["height"]
    page.locator(".live .sheet-handle").click()
    page.wait_for_function("(low) => document.querySelector('.live .inspector').offsetHeight > 2 * low", arg=low)
    expect(page.locator(".live .view-tabs")).to_be_visible()
    page.locator(".live .sheet-handle").click()
    page.locator(".live .edit-lane").click()
    card = page.locator(".lane-card.open")
    expect(card).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


SETS_SPEED = "(speed, wanted) => { speed.value = wanted; speed.dispatchEvent(new Event('change')); }"


def test_a_text_at_reading_speed_rests_where_the_run_is_stopped(page, address):
    """Nothing moves after Stop; what was written meanwhile is there to be played."""
    visit(page, address, Settings(prompt="The red fox", length=400, lanes=[{"strategy": "greedy"}]))
    page.locator(".live .speed").evaluate(SETS_SPEED, "reading")
    page.click("#run")
    expect(tokens(page, 0).nth(3)).to_be_attached()
    page.click("#stop")
    expect(page.locator(".live .player [data-do='play']")).to_have_attribute("aria-label", re.compile("^Play"))
    expect(page.locator("#run")).to_be_visible()
    resting = tokens(page, 0).count()
    page.wait_for_timeout(600)
    assert tokens(page, 0).count() == resting < 400
    page.locator(".live .player [data-do='play']").click()
    expect(tokens(page, 0).nth(resting)).to_be_attached()
    page.locator(".live .speed").evaluate(SETS_SPEED, "live")


def test_a_lower_stage_keeps_the_newest_line_in_sight(page, address):
    arrive(page, address, *SIZES["laptop"])
    below = """() => {
        const text = document.querySelector(".live .lane[data-lane='0'] .text");
        const last = [...text.querySelectorAll(".tokens > .t")].filter((one) => one.offsetHeight).at(-1);
        return last.getBoundingClientRect().bottom - text.getBoundingClientRect().bottom;
    }"""
    assert page.evaluate(below) <= 0
    page.evaluate("document.querySelector('.live .scene').style.height = '380px'")  # something was unfolded above it
    page.wait_for_timeout(500)
    assert page.evaluate(below) <= 0


def test_a_lane_added_on_a_phone_is_still_in_sight_after_run_and_its_tab_is_chosen(page, address):
    page.set_viewport_size(dict(zip(("width", "height"), SIZES["phone"])))
    visit(page, address, TWO)
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    page.locator(".lane-adder .add-lane").click()
    page.locator(".lane-adder .option[data-name='sample']").click()
    expect(page.locator(".live .waiting")).to_be_in_viewport()
    page.click("#run")
    expect(tokens(page, 2).nth(11)).to_be_attached()
    expect(page.locator(".live .tab[data-lane='2']")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".live .lane[data-lane='2'] .text")).to_be_in_viewport()
    visit(page, address, TWO)  # the browser keeps the lanes for the next visit


def test_a_checked_box_of_the_view_menu_can_be_seen(page, address):
    arrive(page, address, *SIZES["laptop"])
    page.locator(".live .view-menu > .quiet").click()
    box = page.locator(".live .prompts")
    looks = "box => { const look = getComputedStyle(box); return [look.appearance, look.accentColor, look.color]; }"
    box.check()
    appearance, accent, _ = box.evaluate(looks)
    assert (appearance, accent) == ("auto", page.evaluate("getComputedStyle(document.querySelector('.live')).color"))
    expect(page.locator(".live .lane[data-lane='0'] .prompt")).to_be_visible()


def test_a_sampler_that_draws_at_a_temperature_is_named_by_what_it_does(page, address):
    min_p = {"strategy": "greedy", "extras": [["temperature", {}], ["min_p", {}]]}
    visit(page, address, Settings(prompt="The red fox", length=4, lanes=[{"strategy": "greedy"}, min_p]))
    short = "all => all.map((one) => one.dataset.short)"
    assert page.locator(".lane-card .lane-title").evaluate_all(short) == ["Greedy", "Min-p"]
    hot = {"strategy": "greedy", "extras": [["temperature", {"t": 1.5}]]}
    visit(page, address, Settings(prompt="The red fox", length=4, lanes=[{"strategy": "greedy"}, hot]))
    assert page.locator(".lane-card .lane-title").evaluate_all(short) == ["Greedy", "Temperature"]
    visit(page, address, TWO)  # the browser keeps the lanes for the next visit


def test_a_saved_run_shows_its_prompt_without_special_tokens_until_they_are_asked_for(page):
    page.goto((Path(__file__).parents[1] / "docs/demo.html").as_uri())
    prompt = page.locator(".live .lane[data-lane='0'] .prompt")
    expect(prompt).to_be_visible()
    assert prompt.inner_text().strip() == "Tell me a story about Mia."
    page.locator(".live .view-menu > .quiet").click()
    page.locator(".live .prompts").check()
    assert prompt.inner_text().startswith("<|user|>")


# --- a newcomer ---

COUNTS_CLICKS = """window.clicks = 0;
addEventListener("click", ({ isTrusted }) => { window.clicks += isTrusted; }, true);"""


def clicks(page) -> int:
    """Since it was last asked."""
    return page.evaluate("[window.clicks, window.clicks = 0][0]")


@pytest.mark.journey
def test_each_act_of_a_newcomer_takes_at_most_two_clicks(page, address):
    page.add_init_script(COUNTS_CLICKS)
    arrive(page, address, *SIZES["laptop"])
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    assert clicks(page) == 1, "run"
    expect(page.locator("#stop")).to_be_hidden()

    choice = page.locator(".live .panel-choice")
    tokens(page, 0).nth(4).click()
    expect(choice.locator(".choice-row[aria-current]")).to_be_visible()
    assert clicks(page) == 1, "see why a word was chosen"
    choice.locator(".choice-row:enabled").first.click()
    expect(page.locator(".live .lane")).to_have_count(3)
    assert clicks(page) == 1, "try another word: the word and its rival are two"
    expect(page.locator("#stop")).to_be_hidden()

    page.locator(".lane-adder .add-lane").click()
    page.keyboard.type("json")
    page.locator(".lane-adder .option", has_text="Greedy + JSON Schema").first.click()
    expect(page.locator(".lane-card")).to_have_count(4)
    assert clicks(page) == 2, "add JSON Schema"

    page.locator(".model-chip").click()
    expect(page.locator(".model-sheet .models-load").first).to_be_visible()
    assert clicks(page) == 1, "the sheet of models; the second click is tested in test_model_sheet"
