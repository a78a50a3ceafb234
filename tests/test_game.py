"""The guessing game: hand-made probabilities with known costs, and the real page with the bundled models."""
from __future__ import annotations

import math

import gradio as gr
import pytest
from chromium import chromium, new_context
from playwright.sync_api import Page, expect

import playground
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Candidate, Commit, Done, Header, Stamped, Step
from playground.request_limits import Rules
from playground.trace import Trace
from playground.trace.transcript import sequences
from playground.ui.components.settings import Settings
from playground.ui.components.theme import theme_options
from playground.ui.game import game_page as game
from playground.ui.game import game_texts, typed_words
from playground.ui.server.gpu_work import prepare_run, score_prompt
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.site import Site

HOSTILE = "<img src=x onerror=\"window.struck = 1\"> & <b>Mia</b>"
PIECES = (" fox", " crow", " hen", " duck", " bee")
ODDS = (0.5, 0.25, 0.125, 0.0625, 0.0625)  # 1, 2, 3, 4 and 4 bits; 1.875 bits of entropy


def token(came: int = 0, entropy: float = 1.875, pieces=PIECES) -> dict:
    """A token of a game, among candidates with halving probabilities."""
    top = [{"id": i, "piece": piece, "p": p} for i, (piece, p) in enumerate(zip(pieces, ODDS))]
    return {"id": came, "piece": pieces[came], "p": ODDS[came], "entropy": entropy, "top": top}


def frame(*tokens: dict, name: str = "one", over: bool = True, seed: int = 3, opening: str = "The red") -> dict:
    return {
        "game": name,
        "seed": seed,
        "over": over,
        "lanes": "./?s=abc",
        "opening": [opening],
        "asked": False,
        "ids": [1, 2],
        "tokens": list(tokens),
    }


# --- the data of a run ---

def test_a_token_has_the_probabilities_and_the_entropy_of_its_step():
    step = Step(
        0,
        entropy=math.log(4),
        chosen=7,
        top=[Candidate(7, " fox", 0.25, 1.0), Candidate(8, " hen", 0.25, 0.0, "top_k")],
    )
    events = [step, Commit(0, [7], [" fox"], " fox", [math.log(0.25)], ["sampled"]), Done("length")]
    trace = Trace(
        [Header(prompt="The red", prompt_ids=[1, 2])], [Stamped(0, i, 0.0, event) for i, event in enumerate(events)]
    )
    described = game_texts.game_text(trace, reads=False)
    assert described["opening"] == ["The red"] and described["ids"] == [1, 2]
    (found,) = described["tokens"]
    assert found["entropy"] == pytest.approx(2) and found["p"] == pytest.approx(0.25)
    assert found["top"] == [{"id": 7, "piece": " fox", "p": 0.25}, {"id": 8, "piece": " hen", "p": 0.25}]


def test_a_text_that_is_read_begins_with_its_first_token():
    trace = Trace([Header(prompt="The red fox", prompt_ids=[1], prompt_pieces=["The"])])
    assert game_texts.game_text(trace, reads=True)["opening"] == ["The"]


@pytest.mark.parametrize("way", ["greedy", "sample", "score"])
def test_a_link_restores_the_text_its_seed_and_its_mode(way):
    opened = Settings.from_code(game_texts.settings_of(way, HOSTILE, "chat", 12, 5).to_code())
    assert (opened.prompt, opened.length, opened.seed, game_texts.way_of(opened)) == (HOSTILE, 12, 5, way)
    assert opened.mode == ("raw" if way == "score" else "chat")


@pytest.mark.parametrize("way, strategy", [("greedy", "greedy"), ("sample", "sample"), ("score", "greedy")])
def test_the_playground_opens_the_same_text_in_a_lane(way, strategy):
    link = game_texts.lanes_link(game_texts.settings_of(way, "The red fox", "raw", 12, 5))
    opened = Settings.from_code(link.removeprefix("./?s="))
    assert (opened.prompt, opened.seed, opened.lanes[0]["strategy"]) == ("The red fox", 5, strategy)


def test_every_example_can_be_played_on_a_public_page():
    names, offered = zip(*game_texts.offers())
    assert len(set(names)) == len(names) and {game_texts.way_of(settings) for settings in offered} == {
        "greedy",
        "sample",
        "score",
    }
    for settings in offered:
        settings.check(Rules.for_visitors())


def uncertain(models, settings: Settings) -> int:
    """The number of tokens of a game's text with an entropy above 1 bit, which the page plays by default."""
    reads = game_texts.way_of(settings) == "score"
    session = score_prompt(models, settings) if reads else prepare_run(models, settings, Memory())
    for _ in session:
        pass
    return sum(token["entropy"] > 1 for token in game_texts.game_text(session.trace, reads)["tokens"])


@pytest.mark.slow
def test_the_game_starts_with_a_text_of_several_uncertain_tokens(models):
    assert uncertain(models, game_texts.offers()[0][1]) >= 6


@pytest.mark.slow
def test_every_offered_text_has_rounds_to_play(models):
    assert [name for name, settings in game_texts.offers() if uncertain(models, settings) < 3] == []


@pytest.mark.parametrize(
    "asked",
    [
        None,
        [],
        {"word": "fox"},
        {"ids": ["1"], "word": "fox"},
        {"ids": [1], "word": " "},
        {"ids": [1], "word": "x" * 41},
    ],
)
def test_an_invalid_word_is_refused_in_a_sentence(asked):
    assert typed_words.probability_lookup(Site(load=never))(asked)["refused"].endswith(".")


def never(*names, **how):
    raise Refusal("No model is wanted here.")


# --- the rules, with hand-made probabilities ---

class Feed:
    frames: list[dict] = []

    def send(self):
        return game.packed(self.frames.pop(0))


@pytest.fixture(scope="module")
def feed():
    return Feed()


@pytest.fixture(scope="module")
def board(feed):
    """Address of a page with only the game and a button that sends it a frame."""
    def probability(asked: dict) -> dict:
        return {"id": 99, "piece": " wol", "p": 2.0 ** -10} if asked["ids"] == [1, 2] else {"refused": "Not there."}

    with gr.Blocks() as demo:
        sender, shown = gr.Button("send", elem_id="send"), game.board([probability])
        sender.click(feed.send, None, shown, show_progress="hidden")
    _, address, _ = demo.queue().launch(prevent_thread_lock=True, quiet=True, run_history=False)
    yield address
    demo.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield new_context(opened, viewport={"width": 1440, "height": 1000})


@pytest.fixture
def page(browser):
    """An empty tab; script errors fail the test."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert not wrong


def play(page: Page, board: str, feed: Feed, *frames: dict, choices: str = "options=4") -> None:
    page.goto("about:blank")  # navigating to the same address loads nothing
    page.goto(f"{board}#{choices}")
    page.locator(".game .setup select").first.wait_for()
    for one in frames:
        send(page, feed, one)
    expect(page.locator(".game .text")).to_be_visible()


def send(page: Page, feed: Feed, one: dict) -> None:
    feed.frames = [one]
    page.click("#send")


def options(page: Page) -> list[str]:
    """The offered options, in the order of the keys."""
    return page.locator(".game .option").evaluate_all(
        "all => all.map((one) => one.querySelector('.token, .else').textContent)"
    )


def choose(page: Page, piece: str) -> None:
    page.keyboard.press(str(options(page).index(piece) + 1))


def table(page: Page) -> list[float]:
    """Total costs: the teams, sampling from the model, a uniform guess."""
    return page.locator(".game .scores .total").evaluate_all("all => all.map((one) => Number(one.dataset.bits))")


@pytest.mark.journey
def test_points_are_the_bits_of_each_teams_choice(page, board, feed):
    play(page, board, feed, frame(token(), token(came=1), token()), choices="options=4&teams=2")
    expect(page.locator(".game .option")).to_have_count(4)
    assert set(options(page)) == {" fox", " crow", " hen", "something else"} and options(page)[-1] == "something else"
    choose(page, " fox")
    page.keyboard.press("Enter")
    expect(page.locator(".game .scores")).to_have_count(0)  # the second team made no choice
    choose(page, " hen")
    page.keyboard.press("Enter")
    expect(page.locator(".game .scores")).to_be_visible()
    assert table(page) == [1, 3, 1.875, (1 + 2 + 3 + 3) / 4]
    page.keyboard.press("ArrowRight")
    expect(page.locator(".game .where")).to_contain_text("Token 2 of 3")
    choose(page, " crow")
    choose(page, "something else")
    page.keyboard.press("Enter")
    expect(page.locator(".game .scores tbody td:last-child").first).to_have_text("2 of 2")
    assert table(page) == [3, 6, 3.75, 4.5]
    expect(page.locator(".game .is-right .token")).to_have_text(" crow")


def test_something_else_is_right_if_no_offered_option_is(page, board, feed):
    play(page, board, feed, frame(token(came=4)))
    choose(page, "something else")
    page.keyboard.press("Enter")
    expect(page.locator(".game .is-right")).to_contain_text("something else")
    expect(page.locator(".game .entropy")).to_contain_text("The token was “ bee”, probability 6.3 %")
    expect(page.locator(".game .scores tbody td:last-child").first).to_have_text("1 of 1")


def test_the_order_of_the_options_follows_the_seed(page, board, feed):
    found = {}
    for seed in (1, 1, 2, 3, 4, 5):
        play(page, board, feed, frame(token(), seed=seed, name=f"seed {seed}"))
        expect(page.locator(".game .option")).to_have_count(4)
        assert found.setdefault(seed, options(page)) == options(page)
    assert len({tuple(order) for order in found.values()}) > 1


def test_tokens_of_low_entropy_are_skipped_and_shown_in_the_text(page, board, feed):
    play(
        page,
        board,
        feed,
        frame(token(entropy=0.2), token(came=1, entropy=0.9), token(entropy=1.5)),
        choices="options=4&above=1",
    )
    expect(page.locator(".game .where")).to_contain_text("Token 3 of 3")
    assert page.locator(".game .text").text_content() == "The red fox crow?"


def test_every_token_is_played_if_the_settings_say_so(page, board, feed):
    play(page, board, feed, frame(token(entropy=0.2), token()), choices="rounds=every")
    expect(page.locator(".game .where")).to_contain_text("Token 1 of 2")
    page.select_option(".game .which", "above")
    expect(page.locator(".game .where")).to_contain_text("Token 2 of 2")
    assert "above=1" in page.url and "rounds" not in page.url


def test_a_text_without_a_round_says_what_to_do(page, board, feed):
    play(page, board, feed, frame(token(entropy=0.2)), choices="above=1")
    expect(page.locator(".game .stage")).to_contain_text(
        "above 1 bits; the highest is 0.20. Lower the bound, or play every token."
    )


def test_a_game_waits_for_the_model_and_continues_by_itself(page, board, feed):
    play(page, board, feed, frame(token(), over=False))
    choose(page, " fox")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".game .where")).to_contain_text("The model is generating")
    send(page, feed, frame(token(), token(came=2)))
    expect(page.locator(".game .where")).to_contain_text("Token 2 of 2")
    assert page.locator(".game .text").text_content() == "The red fox?"


def test_a_typed_word_costs_its_own_surprisal_whether_offered_or_not(page, board, feed):
    play(page, board, feed, frame(token()), choices="options=4&teams=3")
    for word, message in (
        ("fox", "“fox” is chosen."),
        ("duck", "“duck” is chosen."),
        ("wolf", "begins with the token “ wol”"),
    ):
        page.fill(".game .word", word)
        page.keyboard.press("Enter")
        expect(page.locator(".game .said")).to_contain_text(message)
    expect(page.locator(".game .option")).to_have_count(6)  # duck and wolf were not offered
    page.keyboard.press("Enter")
    expect(page.locator(".game .scores")).to_be_visible()
    assert table(page)[:3] == [1, 4, 10]


def test_the_end_names_the_hardest_tokens_and_leads_to_the_lanes(page, board, feed):
    play(page, board, feed, frame(token(), token(came=2), token(came=1)))
    for _ in range(3):
        choose(page, " fox")
        page.keyboard.press("Enter")
        expect(page.locator(".game .scores")).to_be_visible()
        page.keyboard.press("ArrowRight")
    expect(page.locator(".game h3").first).to_have_text("After 3 rounds")
    assert page.locator(".game .hardest .token").all_text_contents() == [" hen", " crow", " fox"]
    expect(page.locator(".game .hardest .facts").first).to_contain_text("13 %, 3.00 bits; guessed by no team")
    assert page.locator(".game a.quiet").get_attribute("href") == "./?s=abc"
    page.get_by_role("button", name="Play again").click()
    expect(page.locator(".game .where")).to_contain_text("Token 1 of 3")


@pytest.mark.security
def test_hostile_texts_and_names_stay_text(page, board, feed):
    pieces = (HOSTILE, "<script>window.struck = 1</script>", "&lt;", "\n", "<0xE2>")
    play(page, board, feed, frame(token(pieces=pieces), opening=HOSTILE))
    page.locator(".game .name").fill("<i>x</i>")
    page.locator(".game .name").press("Tab")
    page.locator(".game .stage").focus()
    choose(page, HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator(".game .scores .who").first).to_contain_text("<i>x</i>")
    assert page.locator(".game .opening").text_content() == HOSTILE
    assert page.evaluate("window.struck") is None and page.locator(".game :is(img, script)").count() == 0


# --- the real page over the bundled models ---

TALE = Settings(prompt="Once upon a time there was a king who had three sons. The", length=12, seed=2,
                lanes=[{"strategy": "sample", "knobs": {"temperature": 1.0, "top_p": 1.0}, "extras": [], "forced": []}])


@pytest.fixture(scope="module")
def models():
    return playground.load()


@pytest.fixture(scope="module")
def address(models):
    demo = build(Site(load=lambda *names, **how: models))
    _, address, _ = demo.launch(prevent_thread_lock=True, quiet=True, run_history=False, **theme_options())
    yield address
    demo.close()


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
