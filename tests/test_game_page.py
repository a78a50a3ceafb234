"""The guessing game on the real page over the bundled models."""
from __future__ import annotations

import math

import pytest
from playwright.sync_api import Page, expect

import playground
from playground.decoding.visitor_memory import Memory
from playground.trace import Trace
from playground.trace.transcript import sequences
from playground.ui.components.settings import Settings
from playground.ui.game import game_page as game
from playground.ui.game import game_texts, typed_words
from playground.ui.server.gpu_work import prepare_run
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.site import Site
from support.game_boards import HOSTILE, address, browser, models, options, page  # noqa: F401

TALE = Settings(prompt="Once upon a time there was a king who had three sons. The", length=12, seed=2,
                lanes=[{"strategy": "sample", "knobs": {"temperature": 1.0, "top_p": 1.0}, "extras": [], "forced": []}])


def start(page: Page, address: str, settings: Settings = TALE, choices: str = "rounds=every") -> None:
    """Open the link of a game, which begins by itself."""
    page.goto(f"{address}game?s={settings.to_code()}#{choices}")
    expect(page.locator("#prompt textarea")).to_have_value(settings.prompt)
    expect(page.locator(".game .options")).to_be_visible()


def test_the_page_opens_in_a_round_and_enter_goes_on_with_its_button_in_sight(page, address, models):
    page.goto(f"{address}game")
    for size in ({"width": 1440, "height": 900}, {"width": 390, "height": 844}):
        page.set_viewport_size(size)
        place = page.locator(".game .where").text_content()
        page.locator(".game .option").first.click()
        for label in ("Show probabilities", "Next"):
            button = page.locator(".game .acts .go")
            expect(button).to_contain_text(label)
            expect(button).to_be_in_viewport(ratio=1)
            page.keyboard.press("Enter")
        expect(page.locator(".game .where")).not_to_have_text(place)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("scrollY") == 0


@pytest.mark.slow
def test_the_recorded_text_is_what_the_model_writes(models):
    settings = game_texts.offers()[0][1]
    session = prepare_run(models, settings, Memory())
    for _ in session:
        pass
    written, kept = (game_texts.game_text(trace, False) for trace in (session.trace, Trace.load(game.RECORDED)))
    assert [token["id"] for token in kept["tokens"]] == [token["id"] for token in written["tokens"]]
    assert [token["entropy"] for token in kept["tokens"]] == pytest.approx(
        [token["entropy"] for token in written["tokens"]], abs=1e-4
    )


def test_a_page_with_another_model_opens_without_the_recording():
    another = ModelRequest("some/model")
    assert game.first_game(Site()) and not game.first_game(Site(another))


@pytest.mark.journey
def test_three_rounds_by_keyboard_show_the_probabilities_of_the_trace(page, address, models):
    result = playground.run(
        "sample", TALE.prompt, models=models, knobs=TALE.lanes[0]["knobs"], seed=TALE.seed, max_new_tokens=TALE.length
    )
    written = sequences(result.trace.events)[0]
    start(page, address)
    for place in range(3):
        expect(page.locator(".game .where")).to_contain_text(f"Token {place + 1} of")
        page.keyboard.press("1")
        page.keyboard.press("Enter")
        expect(page.locator(".game .scores")).to_be_visible()
        step = written.steps[place]
        shown = dict(
            zip(
                options(page),
                page.locator(".game .option .probability").evaluate_all(
                    "all => all.map((one) => Number(one.dataset.p))"
                ),
            )
        )
        rest = shown.pop("something else")
        assert shown == {candidate.piece: candidate.raw for candidate in step.top[:5]} and rest == pytest.approx(
            1 - sum(shown.values())
        )
        assert float(page.locator(".game .entropy").get_attribute("data-bits")) == pytest.approx(
            step.entropy / math.log(2), rel=1e-5
        )
        page.keyboard.press("ArrowRight")
    assert (
        page.locator(".game .text").text_content()
        == TALE.prompt + "".join(token.piece for token in written.tokens[:3]) + "?"
    )


def test_a_given_text_is_scored_and_its_own_tokens_are_played(page, address, models):
    text = "The red fox listens to the crow."
    reading = playground.score(text, models=models)[0]
    start(page, address, game_texts.settings_of("score", text, "raw", 12, 0))
    expect(page.locator("#mode")).to_be_hidden()
    page.keyboard.press("6")
    page.keyboard.press("Enter")
    expect(page.locator(".game .came")).to_have_text(models.target.tokens.piece(reading.token_ids[0]))


def test_a_word_beyond_the_ten_likeliest_gets_its_probability_from_the_model(address, models):
    ids = models.target.tokens.encode("The red fox listens to the")
    found = typed_words.probability_lookup(Site(load=lambda *names, **how: models))(
        {"ids": ids, "word": "zeppelin", "spaced": False}
    )
    longer = playground.score(models.target.tokens.decode([*ids, found["id"]]), models=models)[0]
    assert " zeppelin".startswith(found["piece"]) and found["p"] == pytest.approx(
        math.exp(longer.logprobs[-1]), abs=1e-6
    )


def test_a_refusal_is_shown_at_its_control_and_the_current_game_stays(page, address):
    start(page, address)
    page.click(".another")
    page.fill("#prompt textarea", " ")
    page.click("#run")
    expect(page.locator("#prompt-notice")).to_contain_text("The prompt is empty")
    expect(page.locator(".game .option")).to_have_count(6)
    page.fill("#length input", "0")
    page.fill("#prompt textarea", "The fox")
    page.click("#run")
    expect(page.locator("#numbers-notice")).to_contain_text("must be from 1 to")


@pytest.mark.security
def test_a_hostile_prompt_stays_text(page, address):
    start(page, address, Settings(prompt=HOSTILE, length=4))
    assert page.locator(".game .opening").text_content() == HOSTILE
    assert page.evaluate("window.struck") is None and page.locator(".game img").count() == 0


def test_an_example_fills_the_controls_and_a_link_keeps_the_rounds(page, address):
    start(page, address, choices="above=0&options=5")
    page.click(".another")
    assert page.locator(".game .bound").input_value() == "0"
    page.click("#example input")
    page.get_by_role("option", name="To score:").first.click()
    expect(page.locator("#prompt textarea")).to_have_value(game_texts.offers()[-game_texts.TALES_OFFERED][1].prompt)
    expect(page.locator("#length")).to_be_hidden()
    page.click("#share")
    expect(page).not_to_have_url(f"{address}game?s={TALE.to_code()}#above=0&options=5")
    assert "#above=0&options=5" in page.url and game_texts.offers()[-game_texts.TALES_OFFERED][1].to_code() in page.url


def test_what_the_model_writes_has_its_face_and_what_the_page_says_has_not(page, address):
    start(page, address)
    page.wait_for_function("[...document.fonts].some((one) => one.family.includes('Source Serif 4'))")
    face = "(node) => getComputedStyle(node).fontFamily.includes('Source Serif 4')"
    for model in (".game .text", ".game .option .token"):
        assert page.locator(model).first.evaluate(face)
    for said in (".game .where", ".game .option .else", ".game-lead h2"):
        assert not page.locator(said).first.evaluate(face)


def test_nothing_overflows_horizontally(page, address):
    start(page, address, choices="teams=4&above=0")
    for key in "1234":
        page.keyboard.press(key)
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator(".game *").evaluate_all(
            "all => all.every((one) => one.getBoundingClientRect().right <= innerWidth)"
        )
        if width == 1440:
            page.keyboard.press("Enter")
            expect(page.locator(".game .scores")).to_be_visible()
