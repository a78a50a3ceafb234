"""The stage of the page, in a real browser: what is in sight while lanes write, what lanes and earlier runs show."""

import re

import pytest
from app_page import TWO_LANES, address, browser, choose_strategy, expect, page, tokens, visit  # noqa: F401

from playground.trace import Trace
from playground.ui.components.settings import Settings
from playground.ui.components.theme import ASSETS
from playground.ui.server.site import FIRST_SETTINGS, first_view

PHONE = {"width": 390, "height": 844}
PALETTE = (ASSETS / "palette.css").read_text(encoding="utf-8").split(".dark {")
VIEW = (ASSETS / "live" / "live.css").read_text(encoding="utf-8").split(".dark .live {")
SURFACES = ("paper", "card", "sunk")
FOCUSED = """() => [document.activeElement, document.activeElement.closest(".wrap")].some((node) => {
    const { outlineStyle, outlineWidth, boxShadow } = node ? getComputedStyle(node) : {};
    return node && ((outlineStyle !== "none" && parseFloat(outlineWidth) >= 1) || boxShadow !== "none");
})"""  # the ring of a menu is around its field and its arrow


def short(*names: str, prompt: str = "The red fox") -> Settings:
    return Settings(prompt=prompt, length=12, lanes=[{"strategy": name} for name in names])


# --- in sight ---

@pytest.mark.journey
def test_lanes_player_and_a_view_are_in_sight_while_four_lanes_write(page, address):
    page.set_viewport_size({"width": 1440, "height": 900})
    visit(page, address, Settings(prompt="The green bird", length=4000, lanes=4 * [{"strategy": "sample"}]))
    page.click("#run")
    for lane in range(4):
        expect(tokens(page, lane).nth(80)).to_be_attached()
    parts = [f".live .lane[data-lane='{lane}'] .text" for lane in range(4)] + [".live .player", "#prompt", "#stop"]
    for part in parts:
        expect(page.locator(part)).to_be_in_viewport(ratio=0.98)
    expect(page.locator(".live .panel:visible").first).to_be_in_viewport()
    assert page.evaluate("scrollY") == 0
    page.click("#stop")


def test_at_200_percent_the_first_sight_has_text(page, address):
    page.set_viewport_size({"width": 720, "height": 450})  # a window of 1440 x 900
    page.goto(address)
    page.evaluate("localStorage.clear()")  # the lanes of another test
    page.goto(address)
    page.locator(".live[data-recorded='true'] .tokens > *").nth(20).wait_for()
    lines = page.locator(".live .lane[data-lane='0'] .tokens > *").evaluate_all(
        """all => new Set(all.map((one) => one.getBoundingClientRect())
            .filter(({ top, bottom, left, height }) => {
                const seen = document.elementFromPoint(left + 2, top + height / 2);
                return bottom <= innerHeight && seen?.closest(".text");
            }).map(({ top }) => top)).size"""
    )
    assert lines >= 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.journey
def test_run_scrolls_a_phone_to_the_lanes(page, address):
    page.set_viewport_size(PHONE)
    visit(page, address, short("greedy", "sample"))
    page.evaluate("scrollTo(0, 0)")
    page.click("#run")
    expect(tokens(page, 0).nth(3)).to_be_attached()
    page.wait_for_function("Math.abs(document.querySelector('.live .lanes').getBoundingClientRect().top) < 60")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [700, 1000, 1440])
def test_every_control_of_the_player_is_there_at_any_width(page, address, width):
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, address, short("greedy", "sample", "beam_search"))
    player = page.locator("#live .player")
    for control in (".speed", ".mode", ".save button >> nth=0", "[data-do=open]", "[data-do=keys]", ".scrub"):
        expect(player.locator(control)).to_be_visible()
    assert player.bounding_box()["height"] < 70  # one row
    cards = page.locator(".lane-card .opener.strategy").evaluate_all("all => all.map((one) => one.clientWidth)")
    assert min(cards) > 90  # the name of the strategy can be read


def test_a_menu_at_the_bottom_of_the_window_opens_upwards(page, address):
    page.set_viewport_size({"width": 1440, "height": 900})
    visit(page, address, short("greedy"))
    page.evaluate("""() => {
        const { bottom } = document.querySelector("#live .player").getBoundingClientRect();
        document.querySelector("#live").style.marginTop = `${Math.max(0, innerHeight - bottom)}px`;
    }""")
    page.locator("#live .save button").first.click()
    expect(page.locator("#live .save .menu-box button").last).to_be_in_viewport(ratio=1)


def test_a_closed_drawer_still_sets_the_run_and_says_what_it_holds(page, address):
    visit(page, address, Settings(prompt="The red fox", length=7, seed=3, stop="x", lanes=[{"strategy": "greedy"}]))
    expect(page.locator("#drawer")).to_be_hidden()
    expect(page.locator("#settings .summary")).to_contain_text("raw text · 7 tokens · seed 3")
    expect(page.locator("#settings .summary")).to_contain_text("stop strings")
    page.locator("#settings .settings-open").click()
    expect(page.locator("#length input")).to_have_value("7")
    page.fill("#length input", "5")
    expect(page.locator("#settings .summary")).to_contain_text("5 tokens")


# --- what is drawn and what is chosen ---

def test_the_recorded_example_is_of_the_settings_a_new_visitor_finds():
    headers = first_view()["headers"]
    assert {(header["prompt"], header["seed"], header["max_new_tokens"]) for header in headers} == {
        (FIRST_SETTINGS["prompt"], FIRST_SETTINGS["seed"], FIRST_SETTINGS["length"])
    }
    assert [header["strategy"] for header in headers] == [lane["strategy"] for lane in FIRST_SETTINGS["lanes"]]
    assert len(Trace.load(ASSETS / "traces" / "first_view.jsonl").headers) == len(headers)


def test_an_earlier_run_says_so_and_gives_its_colours_back(page, address):
    visit(page, address, short("greedy", "sample"))
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    live, caption = page.locator("#live .live"), page.locator(".live .caption")
    expect(live).to_have_attribute("data-fused", "true")
    expect(caption).to_be_hidden()
    colour = "getComputedStyle(document.querySelector(\".live .lane[data-lane='1'] .number\")).backgroundColor"
    own = page.evaluate(colour)
    page.fill("#prompt textarea", "The blue fox")
    expect(caption).to_contain_text("An earlier run. Its prompt was “The red fox”. Press Run for the prompt above.")
    expect(live).to_have_attribute("data-fused", "false")
    assert page.evaluate(colour) != own
    page.fill("#prompt textarea", "The red fox")
    expect(caption).to_be_hidden()
    assert page.evaluate(colour) == own
    edit = page.locator(".lane-card[data-lane='1'] .edit")
    edit.click()
    expect(live, "lanes do not continue a row of cards in which one is long").to_have_attribute("data-fused", "false")
    heights = page.locator(".lane-card").evaluate_all("cards => cards.map((card) => card.offsetHeight)")
    assert heights[1] > 2 * heights[0], "an open card does not stretch the one beside it"
    edit.click()
    expect(live).to_have_attribute("data-fused", "true")
    choose_strategy(page, 1, "speculative")
    expect(caption).to_contain_text("An earlier run")


# --- numbers ---

def test_a_lane_shows_four_numbers_and_the_others_on_demand_without_dashes(page, address):
    visit(page, address, short("greedy", "speculative"))
    page.click("#run")
    expect(tokens(page, 1).nth(11)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    second = page.locator(".live .lane[data-lane='1']")
    shown = second.locator(".headlines > div")
    expect(shown).to_have_count(4)
    names = shown.evaluate_all("all => all.map((one) => one.dataset.headline)")
    assert names == ["per-forward", "forwards", "likeness", "speed"], "what does not depend on this machine comes first"
    assert re.fullmatch(r"[\d.]+×", shown.nth(3).locator("dd").text_content())
    expect(shown.nth(2).locator("dd")).to_have_text("same text")
    sizes = shown.locator("dd").evaluate_all("all => all.map((one) => parseFloat(getComputedStyle(one).fontSize))")
    assert sizes[0] > max(sizes[1:]), "tokens per forward is the headline"
    expect(page.locator(".live .lane[data-lane='0'] .headlines > div")).to_have_count(3)
    expect(second.locator(".strip")).to_be_hidden()
    second.locator(".more > summary").click()
    expect(page.locator(".live .lane[data-lane='0'] .strip")).to_be_visible()
    assert "–" not in page.locator(".live .lane[data-lane='0'] .strip dd:visible").all_inner_texts()


# --- type, contrast, focus ---

def colours(part: str, prefix: str = "") -> dict[str, str]:
    return dict(re.findall(rf"--{prefix}([\w-]+): (#[0-9a-f]{{6}})", part))


def luminance(colour: str) -> float:
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def mixed(one: str, other: str, share: float) -> str:
    parts = (int(one[i:i + 2], 16) * share + int(other[i:i + 2], 16) * (1 - share) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part):02x}" for part in parts)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_all_text_has_a_contrast_of_four_and_a_half(theme):
    page, view = colours(PALETTE[theme], "pg-"), colours(VIEW[theme])
    share = int(re.search(r"--mute: color-mix\(in srgb, var\(--ink\) (\d+)%", VIEW[0])[1]) / 100
    mute = mixed(page["ink"], page["card"], share)
    pairs = [(page[name], page[surface]) for name in ("ink", "soft", "faint", "accent", "bad", "good", "warn")
             for surface in SURFACES]
    pairs += [(page[name], page[f"{name}-soft"]) for name in ("accent", "bad", "good", "warn")]
    pairs += [(page["on-accent"], page["accent"]), *((page["card"], page[f"lane-{lane}"]) for lane in range(4))]
    pairs += [(colour, page[surface]) for colour in (mute, view["accent"], view["trouble"])
              for surface in ("card", "sunk")]
    pairs += [(view[name], view[f"{name}-soft"]) for name in ("accent", "trouble")]
    pairs += [(view["on-heat"], view[f"h{level}"]) for level in range(1, 11)]
    assert [pair for pair in pairs if contrast(*pair) < 4.5] == []


def test_no_text_is_faded_below_its_contrast():
    """Only what cannot be used, or has no text, is translucent."""
    without_text = re.compile(r":disabled|%$|\bsvg\b|\.(stem|band|area\.raw|since|play:hover)$")
    for sheet in ASSETS.rglob("*.css"):
        rules = re.sub(r"/\*.*?\*/", "", sheet.read_text(encoding="utf-8"), flags=re.DOTALL)
        faded = re.findall(r"([^{}]+)\{[^{}]*\bopacity: 0?\.\d", rules)
        assert [rule for rule in map(str.strip, faded) if not without_text.search(rule)] == [], sheet.name


def test_every_text_has_one_of_seven_sizes():
    sizes = set(re.findall(r"--type-(\w+): \d+px", PALETTE[0]))
    assert len(sizes) == 7
    for sheet in [ASSETS / "page.css", *(ASSETS / "live").rglob("*.css")]:
        said = re.findall(r"font(?:-size)?: ([\d.]+px|var\(--type-(\w+)\))", sheet.read_text(encoding="utf-8"))
        assert [value for value, name in said if name not in sizes] == [], sheet.name


@pytest.mark.journey
def test_the_focus_is_visible_wherever_tab_leads(page, address):
    visit(page, address, short("greedy", "sample"))
    page.locator("#settings .settings-open").click()
    unseen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        if not page.evaluate(FOCUSED):
            unseen.append(page.evaluate("document.activeElement.outerHTML.slice(0, 90)"))
    assert [node for node in unseen if not node.startswith("<body")] == []
