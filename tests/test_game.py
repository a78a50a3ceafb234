"""The guessing game: its data, and the rules with probabilities made by hand."""
from __future__ import annotations

import math

import gradio as gr
import pytest
from playwright.sync_api import Page, expect

from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Candidate, Commit, Done, Header, Stamped, Step
from playground.request_limits import Rules
from playground.trace import Trace
from playground.ui.components.settings import Settings
from playground.ui.game import game_page as game
from playground.ui.game import game_texts, typed_words
from playground.ui.server.gpu_work import prepare_run, score_prompt
from playground.ui.server.site import Site
from support.game_boards import HOSTILE, browser, models, options, page, token  # noqa: F401
from support.launched import launched


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
    with launched(demo.queue()) as address:
        yield address


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
