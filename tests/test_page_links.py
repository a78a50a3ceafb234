"""A link to a run opens at its position; a frame for another page; runs that outlast a reload."""

import re

import pytest
from app_page import address, browser, expect, page, running, share_link, status, tokens, visit  # noqa: F401

from playground.ui.components.settings import Settings

LANES = [{"strategy": "greedy"}, {"strategy": "sample"}]
SETTINGS = Settings(prompt="The green bird", length=8, lanes=LANES)
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
WATCH_COPIES = "navigator.clipboard.writeText = async (text) => { window.copied = text; }"


def ran(page) -> None:
    live = page.locator("#live .live")
    shown = live.get_attribute("data-run")
    page.click("#run")
    expect(live).not_to_have_attribute("data-run", shown or "")
    expect(status(page, 1)).to_have_text("reached the token limit")
    expect(page.locator("#run")).to_be_visible()


def copied(page, what: str) -> str:
    page.evaluate(f"window.copied = ''; {WATCH_COPIES}")
    page.click("#share .share-open")
    page.click(f"#share [data-share={what}]")
    page.wait_for_function("window.copied")
    return page.evaluate("window.copied")


@pytest.mark.journey
def test_a_link_opens_a_run_at_its_moment_with_its_token_and_the_run_outlasts_a_reload(page, address):
    visit(page, address, SETTINGS)
    ran(page)
    texts = page.locator("#live .lane .tokens").all_text_contents()
    page.reload()
    live = page.locator("#live .live")
    expect(page.locator("#live .visit-run, #live .lane .tokens").first).to_be_attached()
    expect(page.locator("#live .lane .tokens").first).to_have_text(texts[0])
    assert page.locator("#live .lane .tokens").all_text_contents() == texts
    ran(page)
    page.keyboard.press("2")
    for _ in range(40):
        if tokens(page, 1).count() <= 5:
            break
        page.locator("#live .live").press("ArrowLeft")
        page.evaluate(DRAWN)
    shown = tokens(page, 1).count()
    tokens(page, 1).nth(2).click()
    link = copied(page, "link")
    assert link.endswith(f"at=2.{shown}.3")
    page.goto(link)
    expect(live).to_have_attribute("data-recorded", "false")
    expect(page.locator("#live .card.pinned .where")).to_contain_text("token 3,")
    expect(tokens(page, 1)).to_have_count(shown)


def test_an_embed_code_frames_the_page_with_its_settings(page, address):
    visit(page, address, SETTINGS)
    code = copied(page, "embed")
    frame = re.fullmatch(r'<iframe src="([^"]+)" title="Decoding playground" .*></iframe>', code)
    assert frame and Settings.from_code(frame[1].split("?s=")[1]) == Settings.read(vars(SETTINGS))


def test_the_menu_of_share_says_what_a_link_opens_and_is_gone_through_with_the_keyboard_alone(page, address):
    visit(page, address, SETTINGS)
    ran(page)
    page.evaluate(f"window.copied = ''; {WATCH_COPIES}")
    opener, box = page.locator("#share .share-open"), page.locator("#share .share-box")
    opener.press("Enter")
    expect(box.locator(".share-moment")).to_have_text("with the moment: lane 1 after 8 tokens")
    focused = "document.activeElement.dataset.share ?? document.activeElement.className"
    order = [page.evaluate(focused)]
    for _ in range(4):
        page.keyboard.press("ArrowDown")
        order.append(page.evaluate(focused))
    assert order == ["link", "embed", "png", "svg", "link"]
    assert tokens(page, 0).count() == 8, "the keys of an open menu are not those of the player"
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    assert page.evaluate(focused) == "share-open"
    opener.press("Enter")
    page.keyboard.press("Enter")
    page.wait_for_function("window.copied")
    expect(opener).to_have_text("Copied")
    expect(box).to_be_hidden()
    opener.click()
    page.mouse.click(5, 400)
    expect(box).to_be_hidden()


def test_a_link_that_the_browser_does_not_copy_is_there_to_be_copied_by_hand(page, address):
    visit(page, address, SETTINGS)
    page.evaluate("() => { navigator.clipboard.writeText = async () => { throw new Error('no'); }; }")
    page.click("#share .share-open")
    page.click("#share [data-share=link]")
    field = page.locator("#share textarea")
    expect(field).to_be_visible()
    code = field.input_value().split("?s=")[1].split("&")[0]
    assert Settings.from_code(code) == Settings.read(vars(SETTINGS))
    assert page.evaluate("String(getSelection()) || document.activeElement.value") == field.input_value()
    page.keyboard.press("Escape")
    expect(field).to_be_hidden()


def test_share_saves_a_picture_of_the_view_that_is_open(page, address, tmp_path):
    visit(page, address, SETTINGS)
    ran(page)
    page.click("#share .share-open")
    expect(page.locator("#share .share-view")).to_have_text("of the view “Entropy per token”")
    with page.expect_download() as saved:
        page.click("#share [data-share=svg]")
    saved.value.save_as(tmp_path / "view.svg")
    assert saved.value.suggested_filename == "greedy-vs-sampling-the-green-bird-entropy.svg"
    assert "<title>Entropy per token, lane 1</title>" in (tmp_path / "view.svg").read_text(encoding="utf-8")
    page.click("#share .share-open")
    with page.expect_download() as saved:
        page.click("#share [data-share=png]")
    saved.value.save_as(tmp_path / "view.png")
    assert (tmp_path / "view.png").read_bytes()[:4] == b"\x89PNG"


def test_on_a_phone_the_menu_of_share_is_a_sheet_at_the_foot(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, address, SETTINGS)
    page.click("#share .share-open")
    box = page.locator("#share .share-box").bounding_box()
    assert box["x"] == 0 and box["width"] == 390 and abs(box["y"] + box["height"] - 844) < 2
    for choice in page.locator("#share .share-box button").all():
        assert choice.bounding_box()["height"] >= 44
        choice.click(trial=True)


def test_run_pressed_before_the_settings_of_a_link_are_there_waits_for_them(page, address):
    held, free = [], []
    page.route("**/queue/join*", lambda route: route.continue_() if free else held.append(route))
    page.goto(f"{address}?s={SETTINGS.to_code()}")
    page.click("#run")
    page.keyboard.press("Control+Enter")
    while not held:
        page.wait_for_timeout(50)
    free.append(True)
    for route in held:
        route.continue_()
    expect(status(page, 1)).to_have_text("reached the token limit")
    expect(tokens(page, 0)).to_have_count(SETTINGS.length)


CLICKS_WHEN_OPENED = """window.addEventListener("DOMContentLoaded", () => {
    let opened;
    Object.defineProperty(window.playground ??= {}, "linkOpened", {
        set: (own) => { opened = own; },
        get: () => () => { opened(); document.querySelector("#run").click(); },
    });
});"""


def test_run_pressed_just_as_the_settings_of_a_link_arrive_is_not_lost(page, address):
    page.add_init_script(CLICKS_WHEN_OPENED)
    page.goto(f"{address}?s={SETTINGS.to_code()}")
    expect(status(page, 1)).to_have_text("reached the token limit")
    expect(tokens(page, 0)).to_have_count(SETTINGS.length)


def test_a_prompt_typed_before_the_settings_of_a_link_arrive_stays_and_is_run(page, address):
    """The rest of the link is set around it."""
    held, holding = [], [True]
    page.route("**/queue/join*", lambda route: held.append(route) if holding else route.continue_())
    page.goto(f"{address}?s={SETTINGS.to_code()}")
    page.fill("#prompt textarea", "The red fox")
    page.click("#run")
    holding.clear()
    for request in held:
        request.continue_()
    expect(page.locator("#settings .summary")).to_contain_text(f"{SETTINGS.length} tokens")
    expect(status(page, 1)).to_have_text("reached the token limit")
    expect(page.locator("#prompt textarea")).to_have_value("The red fox")
    assert page.evaluate("playground.settingsNow().prompt") == "The red fox"
    assert page.locator("#live .prompt").first.text_content() == "The red fox"


def test_a_link_outlasts_a_reload_before_its_settings_arrive(page, address):
    """A page whose server was started again meanwhile loads itself again."""
    refusing = [True]
    page.route("**/queue/join*", lambda route: route.abort() if refusing else route.continue_())
    page.goto(f"{address}?s={SETTINGS.to_code()}")
    expect(page.locator("#settings .summary")).not_to_be_empty()  # of the settings that every page begins with
    refusing.clear()
    page.reload()
    expect(page.locator("#settings .summary")).to_contain_text(f"{SETTINGS.length} tokens")
    expect(page.locator("#prompt textarea")).to_have_value(SETTINGS.prompt)


def test_another_link_in_the_same_tab_outlasts_a_reload_before_its_settings_arrive(page, address):
    visit(page, address, Settings(prompt="The red fox"))
    held, holding = [], [True]
    page.route("**/queue/join*", lambda route: held.append(route) if holding else route.continue_())
    page.goto(f"{address}?s={SETTINGS.to_code()}")
    expect(page.locator("#settings .summary")).not_to_be_empty()
    holding.clear()
    page.reload()
    expect(page.locator("#prompt textarea")).to_have_value(SETTINGS.prompt)


def test_every_field_of_a_link_is_in_the_link_that_the_page_shares(page, address):
    lane = {
        "strategy": "speculative", "knobs": {"drafter": "prompt_lookup"}, "extras": [["top_p", {"p": 0.5}]],
        "forced": [5, 6, 7], "seed": 11, "forked_at": 2, "weights": "int8",
    }
    asked = Settings(
        "Once é🙂 {x}", "chat", "Be brief.", "Mia.", 5, 7, "a\\nb\nc", "pocket-moe", "none", "float32", "int8", [lane],
        [["Hi", "Hello"]], "{prompt} / {context}", '[{"name": "add"}]',
    )
    visit(page, address, asked)
    page.evaluate("history.replaceState(null, '', '/')")
    share_link(page)
    page.wait_for_function("new URLSearchParams(location.search).has('s')")
    assert Settings.from_code(page.evaluate("new URLSearchParams(location.search).get('s')")) == asked


OPENS_EARLY = """new MutationObserver((_, observer) => {
    const button = document.querySelector("#settings .settings-open");
    if (!button || !document.querySelector("#drawer")) return;
    observer.disconnect();
    button.click();
}).observe(document, { childList: true, subtree: true });"""


def test_settings_opened_in_the_first_moment_stay_open(page, address):
    page.add_init_script(OPENS_EARLY)
    visit(page, address, SETTINGS)
    expect(page.locator("#length")).to_be_visible()
    expect(page.locator("#settings .settings-open")).to_have_attribute("aria-expanded", "true")


def test_a_click_that_was_to_open_the_settings_does_not_close_what_has_just_opened_by_itself(page, address):
    visit(page, address, SETTINGS)
    click = "document.querySelector('#settings .settings-open').click()"
    page.evaluate(f"playground.showDrawer(true); {click}")
    expect(page.locator("#length")).to_be_visible()
    page.wait_for_timeout(1100)
    page.evaluate(click)
    expect(page.locator("#length")).to_be_hidden()
