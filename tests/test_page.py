"""The page in a real browser, over the real app and small random models; and its parts by themselves."""
from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import pytest
import saved
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from playground.engine.load import DTYPES, QUANTIZATIONS
from playground.errors import Refusal
from playground.events import Commit, Done, Header, Stamped
from playground.questions import gallery
from playground.recipe import Recipe, assemble
from playground.strategy import Strategy, discover, find
from playground.trace import Trace
from playground.ui import editor, offers
from playground.ui.arrivals import Wish
from playground.ui.editor import check
from playground.ui.figures import draw
from playground.ui.gallery import TOPICS, brought_models, examples
from playground.ui.gpu import Borrowed, batches
from playground.ui.handlers import Acts
from playground.ui.look import dress
from playground.ui.pages import build
from playground.ui.settings import CHOICES, DEFAULT, Rules, Settings
from playground.ui.site import Site
from playground.ui.worker import Worker

ROOT = Path(__file__).parents[1]
LONG = 6000  # positions the models take, so that a run can be caught in the middle
expect.set_options(timeout=20_000)


# --- the app, as a person starts it ---

@pytest.fixture(scope="module")
def address(tmp_path_factory, monkeypatch_module):
    """Where `python app.py` answers, with random models."""
    monkeypatch_module.setattr(saved, "CONTEXT", LONG)
    models = saved.save_models(tmp_path_factory.mktemp("models"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = subprocess.Popen([sys.executable, "app.py", "--model", models.target, "--draft", models.draft, "--port", str(port)], cwd=ROOT,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while "Running on" not in (line := app.stdout.readline()):
        assert line, "the app ended before its page was up"
    threading.Thread(target=app.stdout.read, daemon=True).start()
    yield f"http://127.0.0.1:{port}"
    app.terminate()
    app.wait(20)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def browser():
    """One browser for all visitors, so that the page's own files are fetched once."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        yield browser.new_context(viewport={"width": 1280, "height": 900})
        browser.close()


@pytest.fixture
def page(browser: BrowserContext, address: str):
    """A visitor's empty tab; no script may break in it."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert not wrong


TWO_LANES = Settings(prompt="The green bird", length=4000, lanes=[{"strategy": "greedy"}, {"strategy": "sample"}])


def visit(page: Page, address: str, settings: Settings = TWO_LANES) -> None:
    page.goto(f"{address}?s={settings.to_code()}")
    expect(page.locator("#prompt textarea")).to_have_value(settings.prompt)
    expect(page.locator(".lane-card")).to_have_count(len(settings.lanes))
    expect(page.locator("#system")).to_be_hidden()  # from then on nothing moves under the mouse


def choose_strategy(page: Page, lane: int, name: str) -> None:
    page.locator(f".lane-card[data-lane='{lane}'] .strategy").click()
    page.locator(f".lane-card[data-lane='{lane}'] .option[data-name='{name}']").click()


def running(page: Page, lane: int):
    """A lane of a run that was started here, not of the recording that greets a visitor."""
    return page.locator(f"#live [data-recorded='false'] .lane[data-lane='{lane}']")


def tokens(page: Page, lane: int):
    return running(page, lane).locator(".tokens > *")


def status(page: Page, lane: int):
    return running(page, lane).locator(".status")


def test_a_recording_greets_the_visitor(page, address):
    visit(page, address)
    recorded = page.locator("#live [data-recorded='true'] .lane")
    expect(recorded).to_have_count(len(Trace.load(ROOT / "assets/traces/first_view.jsonl").headers))
    expect(recorded.first.locator(".tokens > *").nth(2)).to_be_attached()


def test_what_an_editor_knows_of_the_strategies_is_gathered_once(monkeypatch):
    editor.LaneEditor(render=False)
    monkeypatch.setattr(editor, "catalogue_of", lambda strategies: pytest.fail("gathered anew, as for each update of a run"))
    editor.LaneEditor(render=False)


def test_two_lanes_write_and_stop(page, address):
    visit(page, address)
    page.click("#run")
    for lane in (0, 1):
        expect(tokens(page, lane).nth(5)).to_be_attached()
    assert tokens(page, 0).nth(5).text_content()
    page.click("#stop")
    for lane in (0, 1):
        expect(status(page, lane)).to_have_text("stopped")
    expect(page.locator("#run")).to_be_visible()
    assert tokens(page, 0).count() < 4000


def test_one_lane_stops_and_the_other_goes_on(page, address):
    visit(page, address)
    page.click("#run")
    expect(tokens(page, 0).nth(2)).to_be_attached()
    page.locator("#live .lane[data-lane='0'] .stop").click()
    expect(status(page, 0)).to_have_text("stopped")
    before = tokens(page, 1).count()
    expect(tokens(page, 1).nth(before + 3)).to_be_attached()
    page.keyboard.press("Escape")
    expect(status(page, 1)).to_have_text("stopped")


def test_a_fork_is_one_more_lane_with_the_same_past(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[{"strategy": "greedy"}]))
    page.keyboard.press("Control+Enter")
    expect(page.locator("#run")).to_be_visible()
    expect(tokens(page, 0).nth(11)).to_be_attached()
    tokens(page, 0).nth(4).click()
    page.locator("#live .card .candidate:not([disabled])").first.click()
    expect(page.locator(".lane-card")).to_have_count(2)
    expect(tokens(page, 1).nth(6)).to_be_attached()
    texts = [[tokens(page, lane).nth(i).text_content() for i in range(5)] for lane in (0, 1)]
    assert texts[0][:4] == texts[1][:4] and texts[0][4] != texts[1][4]


def test_a_text_goes_on_with_words_that_no_model_proposed(page, address):
    visit(page, address, Settings(prompt="The red fox", length=30, lanes=[{"strategy": "greedy"}]))
    page.keyboard.press("Control+Enter")
    expect(tokens(page, 0).nth(29)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    tokens(page, 0).nth(4).click()
    page.locator("#live .card .own-words input").fill(" <b>zebra</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".lane-card")).to_have_count(2)
    expect(status(page, 1)).to_have_text("reached its length")
    written = "".join(running(page, 1).locator(".tokens > .t").evaluate_all("spans => spans.map((span) => span.textContent)"))
    assert " <b>zebra</b>" in written
    assert running(page, 1).locator("b").count() == 0


def test_words_that_the_grammar_does_not_allow_are_refused_beside_the_new_lane(page, address):
    visit(page, address, Settings(prompt="A number:", length=6, lanes=[{"strategy": "greedy", "extras": [["regex", {"pattern": "[0-9]{4,}"}]]}]))
    page.keyboard.press("Control+Enter")
    expect(tokens(page, 0).nth(3)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    tokens(page, 0).nth(1).click()
    page.locator("#live .card .own-words input").fill("zebra")
    page.locator("#live .card .own-words button").click()
    expect(page.locator(".lane-card[data-lane='1'] .complaint")).to_contain_text("The grammar does not allow")
    expect(status(page, 0)).to_have_text("reached its length")


def test_a_fork_ends_the_run_it_comes_from_and_can_be_forked_in_its_turn(page, address):
    visit(page, address, Settings(prompt="The green bird", length=4000, lanes=[{"strategy": "greedy"}]))
    page.click("#run")
    for lanes in (2, 3):
        expect(tokens(page, 0).nth(5)).to_be_attached()
        page.locator("#live .play").click()
        running(page, 0).locator(".tokens > .t").nth(2).click()
        page.locator("#live .card .candidate[data-id]").nth(1).click()
        expect(page.locator("#live [data-recorded='false'] .lane")).to_have_count(lanes)
        expect(status(page, lanes - 1)).to_have_text("running")
        expect(page.locator("#stop")).to_be_visible()
    page.click("#stop")
    expect(page.locator("#run")).to_be_visible()
    before = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", before)
    page.click("#stop")


def test_a_wrong_lane_says_so_beside_its_knob_and_the_other_writes(page, address):
    lanes = [{"strategy": "sample", "knobs": {"temperature": 9}}, {"strategy": "greedy"}]
    visit(page, address, Settings(prompt="The red fox", length=8, lanes=lanes))
    expect(page.locator(".lane-card[data-lane='0'] .complaint")).to_contain_text("temperature must lie between")
    page.click("#run")
    expect(tokens(page, 1).nth(7)).to_be_attached()
    expect(status(page, 0)).to_have_text("failed")


def test_a_bad_grammar_is_explained_before_anything_runs(page, address):
    lanes = [{"strategy": "greedy", "extras": [["regex", {"pattern": "(["}]]}]
    visit(page, address, Settings(prompt="The red fox", length=8, lanes=lanes))
    page.click("#run")
    expect(page.locator(".lane-card[data-lane='0'] .complaint")).to_contain_text("regex")
    assert tokens(page, 0).count() == 0


def test_an_empty_prompt_and_no_lane_get_a_sentence_beside_them(page, address):
    visit(page, address)
    page.fill("#prompt textarea", " ")
    page.click("#run")
    expect(page.locator("#prompt-notice")).to_contain_text("prompt is empty")
    page.fill("#prompt textarea", "The red fox")
    for _ in range(2):
        page.get_by_label("Remove lane 1").click()
    page.click("#run")
    expect(page.locator("#lanes-notice")).to_contain_text("no lane")
    expect(page.locator("#prompt-notice")).not_to_contain_text("prompt is empty")


def test_an_unknown_model_is_explained_beside_the_choice(page, address):
    visit(page, address, Settings(prompt="The red fox", model="/no/such/folder"))
    page.click("#run")
    expect(page.locator("#model-notice")).to_contain_text("no folder /no/such/folder")


def test_settings_survive_a_reload(page, address):
    visit(page, address)
    page.fill("#prompt textarea", "A mouse <b>ran</b>")
    choose_strategy(page, 1, "speculative")
    page.get_by_label("Edit lane 2").click()
    page.locator("[data-slot='drafter'] .opener").click()
    page.locator(".option[data-name='prompt_lookup']").click()
    expect(page.locator(".lane-card[data-lane='1'] .promise")).to_have_count(1)
    page.goto(address)
    expect(page.locator("#prompt textarea")).to_have_value("A mouse <b>ran</b>")
    expect(page.locator(".lane-card[data-lane='1'] .recipe")).to_contain_text("prompt_lookup")


def test_a_strategy_is_found_by_typing_and_taken_with_the_keyboard(page, address):
    visit(page, address)
    opener = page.get_by_label("Strategy of lane 2")
    opener.focus()
    page.keyboard.press("ArrowDown")
    everything = page.locator(".editor .option").count()
    assert page.locator(".editor .option[aria-selected='true']").get_attribute("data-name") == "sample"
    page.keyboard.type("guess ahead")
    assert 0 < page.locator(".editor .option").count() < everything
    assert page.locator(".editor .options .heading").first.text_content() == "Speculative"
    while page.locator(".editor .option[aria-selected='true']").get_attribute("data-name") != "speculative":
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(opener).to_have_text("Speculative decoding")
    expect(opener).to_be_focused()
    expect(page.locator(".editor .menu")).to_have_count(0)


def test_a_search_without_a_find_says_so_and_escape_leaves_things_as_they_are(page, address):
    visit(page, address)
    opener = page.get_by_label("Strategy of lane 1")
    opener.click()
    page.keyboard.type("zzz")
    expect(page.locator(".editor .menu .none")).to_contain_text("zzz")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator(".editor .menu")).to_have_count(0)
    expect(opener).to_have_text("Greedy")
    opener.click()
    page.locator("#prompt textarea").click()
    expect(page.locator(".editor .menu")).to_have_count(0)


def test_a_part_is_added_from_a_menu_that_is_grouped_by_kind(page, address):
    visit(page, address)
    page.get_by_label("Edit lane 1").click()
    page.locator(".lane-card[data-lane='0'] .adder").click()
    assert {"Sampler", "Constraint", "KV cache"} <= set(page.locator(".editor .options .heading").all_text_contents())
    page.keyboard.type("sink")
    page.keyboard.press("Enter")
    expect(page.locator(".lane-card[data-lane='0'] .recipe")).to_contain_text("sink_window")


def in_menu(page: Page, opener: str) -> dict[str, bool]:
    """Names in a menu, and whether each can be taken."""
    page.locator(opener).click()
    options = page.locator(".editor .option").evaluate_all("all => all.map((one) => [one.dataset.name, one.getAttribute('aria-disabled') !== 'true'])")
    page.keyboard.press("Escape")
    return dict(options)


def needed_by(main: type[Strategy]) -> list[tuple[str, dict]]:
    return [("choice", {})] if "constraint" in main.needs else []


def granted(recipe: Recipe) -> bool:
    try:
        return bool(assemble(recipe))
    except Refusal:
        return False


@pytest.mark.parametrize("kind", ["decoder", "canvas_decoder", "preset"])
def test_a_lane_is_offered_what_its_strategy_takes_and_nothing_else(page, address, kind):
    toggles = [cls for cls in discover().values() if cls.kind in ("sampler", "cache_policy", "compute_policy")]
    mains = [cls for cls in discover().values() if cls.kind == kind]
    for first in range(0, len(mains), 4):
        some = mains[first:first + 4]
        visit(page, address, Settings(prompt="The red fox", lanes=[{"strategy": main.name, "extras": needed_by(main)} for main in some]))
        for i, main in enumerate(some):
            page.get_by_label(f"Edit lane {i + 1}").click()
            adder = f".lane-card[data-lane='{i}'] .adder"
            offered = in_menu(page, adder) if page.locator(adder).count() else {}
            can_be_had = {cls.name for cls in toggles if granted(Recipe(main.name, extras=[*needed_by(main), (cls.name, {})]))}
            assert {name for name in offered if find(name).kind != "constraint"} == can_be_had, main.name
            page.get_by_label(f"Edit lane {i + 1}").click()


def test_a_lane_that_needs_a_constraint_is_offered_one_first(page, address):
    visit(page, address, Settings(prompt="The red fox", lanes=[{"strategy": "asap"}]))
    page.get_by_label("Edit lane 1").click()
    expect(page.locator(".adder")).to_have_text("+ Add the constraint it needs…")
    assert {find(name).kind for name in in_menu(page, ".adder")} == {"constraint"}
    page.locator(".adder").click()
    page.locator(".option[data-name='choice']").click()
    expect(page.locator(".lane-card .complaint")).to_have_count(0)
    assert "constraint" not in {find(name).kind for name in in_menu(page, ".adder")}


def verifying(drafter: str, verifier: str, *samplers: str) -> Settings:
    return Settings(prompt="The red fox", lanes=[{"strategy": "speculative", "extras": [[name, {}] for name in (drafter, verifier, *samplers)]}])


def test_a_verifier_that_is_not_exact_is_grey_and_says_why(page, address):
    visit(page, address, verifying("prompt_lookup", "rejection", "temperature"))
    page.get_by_label("Edit lane 1").click()
    assert in_menu(page, "[data-slot='verifier'] .opener") == {"greedy_match": False, "k_seq": False, "rejection": True, "sample_match": True}
    page.locator("[data-slot='verifier'] .opener").click()
    expect(page.locator(".option[data-name='k_seq']")).to_have_attribute("title", "Not exact for the guesses of prompt_lookup, which are deterministic.")
    expect(page.locator(".option[data-name='greedy_match']")).to_have_attribute("title", re.compile("take temperature away"))
    page.locator(".option[data-name='k_seq']").click(force=True)
    expect(page.locator(".editor .menu")).to_have_count(1)  # nothing was taken


def test_a_drafter_that_the_verifier_is_not_exact_for_brings_another_verifier(page, address):
    visit(page, address, verifying("spectr", "k_seq"))
    page.get_by_label("Edit lane 1").click()
    page.locator("[data-slot='drafter'] .opener").click()
    assert page.locator(".options .heading").all_text_contents() == ["From a draft model", "Without a draft model"]
    expect(page.locator(".option[data-name='prompt_lookup']")).to_have_attribute("title", re.compile("k_seq is not exact for its deterministic guesses"))
    page.locator(".option[data-name='prompt_lookup']").click()
    expect(page.locator("[data-slot='verifier'] .opener")).to_have_text("Rejection sampling")
    expect(page.locator("[data-slot='drafter'] .opener")).to_be_focused()
    expect(page.locator(".lane-card .promise")).to_have_text("lossless")


def test_samplers_that_draw_wait_for_a_verifier_that_stands_it(page, address):
    visit(page, address, verifying("prompt_lookup", "greedy_match"))
    page.get_by_label("Edit lane 1").click()
    offered = in_menu(page, ".adder")
    assert not offered["temperature"] and offered["repetition_penalty"] and offered["regex"]


def test_models_of_the_two_kinds_are_told_apart_before_and_after_a_run(page, address):
    lanes = [{"strategy": "masked_diffusion"}, {"strategy": "greedy"}]
    visit(page, address, Settings(prompt="one morning", length=16, lanes=lanes))
    mark = page.locator(".lane-card .mark")
    expect(mark).to_have_text("needs the oracle")
    page.click("#run")
    expect(running(page, 0).locator(".trouble")).to_contain_text("choose the oracle as the model")
    visit(page, address, Settings(prompt="one morning", length=16, model="oracle", lanes=lanes))
    expect(mark).to_have_text("needs a text model")
    page.locator(".models > button").click()
    expect(page.locator("#model")).to_contain_text("for masked diffusion")
    page.click("#run")
    expect(running(page, 1).locator(".trouble")).to_contain_text("does not continue text")
    expect(running(page, 0).locator(".tokens > *").nth(3)).to_be_attached()


def test_models_are_listed_by_where_they_come_from(monkeypatch, tmp_path):
    card = {"title": "Pocket, sharpened", "parameters": "7 M", "draft": "", "note": "Knows what it wants."}
    folder = tmp_path / "models" / "pocket-sharp"
    folder.mkdir(parents=True)
    (folder / "variant.json").write_text(json.dumps(card), encoding="utf-8")
    monkeypatch.setenv("PLAYGROUND_HOME", str(tmp_path))
    default, *others = offers.targets("mine")
    assert default == ("mine (default)", DEFAULT) and ("Pocket, sharpened · made here", "pocket-sharp") in others
    assert [place for place, _ in groupby(label.split(" · ")[-1] for label, _ in others)] == ["bundled", "made here", "from the hub"]
    assert offers.note("pocket-sharp") == card["note"] and offers.note("somebody/else") == ""
    assert "oracle" in {name for _, name in others} and "oracle" not in {name for _, name in offers.drafts()}


def test_a_study_is_there_for_runs_it_can_study_and_drawn_when_it_is_opened(page, address):
    fold = page.get_by_role("button", name="Study: Scaling laws of speculation")
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[{"strategy": "speculative"}]))
    page.click("#run")
    expect(fold).to_be_visible()
    assert page.locator(".told").count() == 0
    fold.click()
    expect(page.locator(".told").first).to_contain_text("Predictions")
    expect(page.locator(".figures .js-plotly-plot:visible").first).to_contain_text("Speculation")
    choose_strategy(page, 0, "greedy")
    page.click("#run")
    expect(fold).to_be_hidden()


def test_figures_are_drawn_when_they_are_opened_and_let_go_of_the_page_when_they_are_replaced(page, address):
    fold = page.get_by_role("button", name="Figures of the last run")
    drawn = page.locator(".figures .js-plotly-plot:visible")
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[{"strategy": "greedy"}]))
    page.click("#run")
    fold.click()
    expect(drawn).to_have_count(2)  # nothing was guessed
    page.evaluate("""() => {
        const { removeEventListener } = window;
        window.letGo = 0;
        window.removeEventListener = (name, heard) => { window.letGo += name === "resize" && Boolean(heard); removeEventListener.call(window, name, heard); };
    }""")
    page.click("#run")
    expect(drawn).to_have_count(0)
    fold.click()
    expect(drawn).to_have_count(2)
    page.wait_for_function("letGo > 0")  # the figure of the run before


def test_a_context_is_read_before_the_prompt_and_stays_folded_while_there_is_none(page, address):
    visit(page, address)
    expect(page.locator("#context")).to_be_hidden()
    visit(page, address, Settings(prompt="The red fox", context="A green bird sleeps.", length=4, lanes=[{"strategy": "greedy"}]))
    expect(page.locator("#context textarea")).to_have_value("A green bird sleeps.")
    page.click("#run")
    expect(tokens(page, 0).nth(3)).to_be_attached()
    assert running(page, 0).locator(".prompt").text_content().startswith("A green bird sleeps.")
    expect(running(page, 0).locator(".setting")).to_contain_text("context “A green bird sleeps.”")


def test_a_lane_that_cannot_do_without_a_context_opens_it_and_says_so_where_there_is_none(page, address):
    visit(page, address, Settings(prompt="The red fox", length=4, lanes=[{"strategy": "greedy"}]))
    page.get_by_label("Edit lane 1").click()
    page.locator(".lane-card .adder").click()
    page.keyboard.type("context-aware")
    page.keyboard.press("Enter")
    expect(page.locator("#context textarea")).to_be_visible()
    expect(page.locator(".lane-card .mark.need").first).to_have_text("reads a context")
    page.click("#run")
    expect(running(page, 0).locator(".trouble")).to_contain_text("give a passage as context")
    page.fill("#context textarea", "A green bird sleeps.")
    page.click("#run")
    expect(tokens(page, 0).nth(3)).to_be_attached()


def test_an_example_brings_its_context_and_the_next_one_takes_it_away(page, address):
    visit(page, address)
    index, example = next((i, e) for i, e in enumerate(examples()) if e.get("context"))
    page.get_by_text("All examples").click()
    page.click(f"[data-group='{example['topic']}']")
    page.click(f"details [data-part='examples'][data-index='{index}']")
    expect(page.locator("#context textarea")).to_have_value(example["context"])
    expect(page.locator("#context textarea")).to_be_visible()
    page.get_by_role("button", name="A fact", exact=True).click()
    expect(page.locator("#context")).to_be_hidden()


def test_an_example_sets_prompt_and_lanes(page, address):
    visit(page, address)
    example = next(e for e in examples() if e["title"] == "Copy and edit")
    page.get_by_role("button", name=example["title"], exact=True).click()
    expect(page.locator("#prompt textarea")).to_have_value(example["prompt"])
    expect(page.locator(".lane-card")).to_have_count(len(example["lanes"]))


def test_a_question_is_found_by_its_task_and_every_lane_says_whether_it_is_right(page, address):
    visit(page, address)
    page.get_by_text("Questions with known answers").click()
    page.press("[data-group='facts']", "Enter")
    page.click("[data-group='chat']")
    expect(page.locator("#list-facts")).to_be_hidden()
    page.click("#list-chat button >> nth=0")
    question = next(question for question in gallery() if question.task == "chat")
    expect(page.locator("#prompt textarea")).to_have_value(question.prompt)
    expect(page.locator(".turns .user .said").first).to_have_text(question.before[0][0])
    expect(page.locator("#known .look")).to_have_text(question.look)
    expect(page.locator("#known pre")).to_be_hidden()
    page.fill("#length input", "3")
    page.click("#run")
    expect(running(page, 0).locator(".verdict")).to_contain_text(f"expected: {question.answer}")
    expect(page.locator("#run")).to_be_visible()


def test_what_stands_beside_a_question_goes_with_its_earlier_turns_or_its_words(page, address):
    question = next(question for question in gallery() if question.task == "chat")
    asked = Settings(question.prompt, "chat", before=[[*turn] for turn in question.before])
    page.goto(f"{address}?s={asked.to_code()}")
    expect(page.locator("#known .look")).to_have_text(question.look)
    page.fill("#prompt textarea", question.prompt + " Please.")
    page.press("#prompt textarea", "Tab")
    expect(page.locator("#known")).to_be_hidden()
    page.fill("#prompt textarea", question.prompt)
    page.press("#prompt textarea", "Tab")
    expect(page.locator("#known .look")).to_be_visible()
    page.click(".turns button")
    expect(page.locator("#known")).to_be_hidden()
    expect(page.locator(".turns p")).to_have_count(0)


def test_an_example_takes_its_context_and_its_model_away_with_it():
    acts = Acts(Site(), None)
    shown = {}
    acts.page = SimpleNamespace(show=lambda settings, names: shown.update({name: getattr(settings, name) for name in names}) or {},
                                prompt_notice="p", model_notice="m", lanes_notice="l")
    plain = next(i for i, example in enumerate(examples()) if "model" not in example)
    acts.pick("my/own", SimpleNamespace(part="examples", index=plain))
    assert "model" not in shown and shown["context"] == examples()[plain].get("context", "")
    for brought in brought_models():
        acts.pick(brought, SimpleNamespace(part="examples", index=plain))
        assert shown["model"] == DEFAULT


def test_nothing_sticks_out_sideways(page, address):
    visit(page, address)
    page.get_by_label("Edit lane 2").click()
    expect(page.locator(".knob").first).to_be_visible()
    for width in (1440, 768, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_endpoint_for_programs_streams_frames(address):
    from gradio_client import Client
    client = Client(address, verbose=False)
    job = client.submit("The red fox", [{"strategy": "greedy"}, {"strategy": "speculative"}], 0, 30, api_name="/run")
    job.result(30)
    frames = [json.loads(text) for text in job.outputs()]
    assert frames[-1]["state"] == "done" and len(frames[0]["headers"]) == 2
    assert len(committed(frames)) == 60


def test_the_endpoint_for_programs_takes_a_context(address):
    from gradio_client import Client
    job = Client(address, verbose=False).submit("The red fox", [{"strategy": "greedy"}], length=1, context="A green bird.", api_name="/run")
    job.result(30)
    header = json.loads(job.outputs()[0])["headers"][0]
    assert header["context"] == "A green bird." and header["prompt"] == "The red fox"
    assert "".join(header["prompt_pieces"]).startswith("A green bird.")


def test_a_wrong_option_ends_the_program_with_one_line():
    ended = subprocess.run([sys.executable, "app.py", "--dtype", "float3"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "float3" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("options, told", [
    (["--port", "many"], "many"), (["--model", "/no/such/folder"], "/no/such/folder"), (["--device", "abacus"], "abacus"), (["--quantization", "int9"], "int9"),
    (["--colour", "red"], "--colour")])
def test_every_wrong_option_is_told(options, told, capsys):
    import app
    with pytest.raises(SystemExit) as ended:
        app.main(options)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and told in said and said.count("\n") == 1


# --- the worker, with sessions that only count ---

class Counting:
    """A session of one lane whose every request commits one token; it notes who was served in `log`."""

    def __init__(self, log: list, name: str = "", length: int = 10**9):
        self.headers, self.trace = [Header()], None
        self.log, self.name, self.length, self.count, self.finished = log, name, length, 0, False
        self.stopped = threading.Event()

    def advance(self):
        self.stopped.wait(0.001)  # what a forward takes
        self.log.append(self.name)
        self.count += 1
        self.finished = self.count >= self.length
        return [Stamped(0, self.count, 0.0, Commit(ids=[self.count], pieces=["x"]))]

    step = advance

    def stop(self, lane=None):
        self.finished = True
        self.stopped.set()
        return [Stamped(0, self.count + 1, 0.0, Done("stopped"))]


def committed(frames) -> list[int]:
    return [token for frame in frames if frame for event in frame["events"] if event["kind"] == "commit" for token in event["ids"]]


def test_runs_are_served_in_turn():
    log, worker = [], Worker()
    first = worker.take(Counting(log, "a", 400))
    second = worker.take(Counting(log, "b", 400))
    assert committed(first.frames()) == committed(second.frames()) == list(range(1, 401))
    both = log[log.index("b"):]
    shared = both[:2 * min(both.count("a"), both.count("b"))]
    assert all({*pair} == {"a", "b"} for pair in zip(shared[::2], shared[1::2]))


def test_stop_ends_a_run_within_one_request_and_says_so():
    session = Counting([])
    run = Worker().take(session)
    frames = run.frames()
    next(frames)
    run.stop()
    served = session.count
    last = list(frames)[-1]
    assert last["state"] == "done" and last["events"][-1] == {"lane": 0, "seq": session.count + 1, "at": 0.0, "kind": "done", "reason": "stopped"}
    assert session.count <= served + 1


def test_a_held_run_waits_takes_single_steps_and_goes_on():
    session = Counting([])
    worker = Worker()
    run = worker.take(session)
    frames = run.frames()
    run.hold()
    while next(frames) is not None:
        pass
    held = session.count
    run.step()
    assert committed([next(frames)]) == [held + 1]
    assert next(frames) is None and session.count == held + 1
    run.resume()
    assert next(filter(None, (committed([frame]) for frame in frames)))[0] == held + 2
    run.stop()


def test_a_run_that_breaks_ends_with_a_sentence_and_the_next_one_works():
    class Broken(Counting):
        def advance(self):
            raise RuntimeError("boom")

    worker = Worker()
    broken, sound = worker.take(Broken([])), worker.take(Counting([], length=3))
    assert list(broken.frames())[-1]["state"] == "done" and "boom" not in broken.error and broken.error
    assert committed(sound.frames()) == [1, 2, 3]


def test_a_borrowed_gpu_tells_the_same_story():
    run = Borrowed(batches(Counting([], length=50)))
    frames = list(run.frames())
    assert committed(frames) == list(range(1, 51)) and "headers" in frames[0] and frames[-1]["state"] == "done"
    endless = Borrowed(batches(Counting([])))
    frames = endless.frames()
    next(frames)
    endless.stop()
    assert [frame["state"] for frame in frames] == ["done"]


# --- visitors who come and go, over such sessions ---

def counting_site(prepare) -> Site:
    device = SimpleNamespace(type="cpu")
    models = SimpleNamespace(target=SimpleNamespace(name="counter", dtype="int", device=device), draft=None)
    return Site(load=lambda *names, **how: models, prepare=prepare)


@contextmanager
def open_page(prepare):
    """The page over sessions made by `prepare`; gives its address."""
    demo = build(counting_site(prepare))
    try:
        yield demo.launch(prevent_thread_lock=True, quiet=True, **dress())[1]
    finally:
        demo.close()


@pytest.fixture
def counted():
    """The page over sessions that count without end; gives its address and the sessions that were begun."""
    begun = []

    def prepare(models, settings, memory):
        begun.append(Counting([], settings.prompt))
        return begun[-1]

    with open_page(prepare) as address:
        yield address, begun


def test_a_visitor_who_leaves_stops_the_run_and_no_other(counted, browser):
    address, begun = counted
    pages = [browser.new_page(), browser.new_page()]
    for page, prompt in zip(pages, ("first", "second")):
        visit(page, address, Settings(prompt=prompt))
        page.click("#run")
        expect(tokens(page, 0).nth(2)).to_be_attached()
    first, second = begun
    pages[0].close()
    assert first.stopped.wait(20) and not second.finished
    pages[1].click("#stop")
    assert second.stopped.wait(20)
    expect(pages[1].locator("#run")).to_be_visible()
    pages[1].close()


class Seen:
    """Something to remember."""

    def digest(self) -> str:
        return "seen"


@pytest.fixture
def learning():
    """The page over short sessions that remember their prompt; gives its address and, for every run, what was remembered before it."""
    known = []

    def prepare(models, settings, memory):
        known.append(len(memory))
        memory.keep(settings.prompt, Seen())
        return Counting([], length=3)

    with open_page(prepare) as address:
        yield address, known


def ran(page: Page) -> None:
    """Run to the end, and wait until it is this run that the page shows."""
    shown = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", shown)
    expect(page.locator("#run")).to_be_visible()


def test_what_is_remembered_belongs_to_one_visitor_and_can_be_forgotten(learning, browser):
    address, known = learning
    first, second = browser.new_page(), browser.new_page()
    visit(first, address, Settings(prompt="one"))
    expect(first.locator("#forget")).to_be_hidden()
    ran(first)
    expect(first.locator("#remembered")).to_contain_text("remembers 1 thing from earlier runs")
    first.fill("#prompt textarea", "two")
    ran(first)
    expect(first.locator("#remembered")).to_contain_text("remembers 2 things from earlier runs")
    visit(second, address, Settings(prompt="one"))
    ran(second)
    first.click("#forget")
    expect(first.locator("#remembered")).to_be_hidden()
    ran(first)
    assert known == [0, 1, 0, 0]
    for page in (first, second):
        page.close()


def test_a_run_on_a_borrowed_gpu_begins_with_an_empty_memory():
    given = []
    site = counting_site(lambda models, settings, memory: given.append(len(memory)) or Counting([], length=2))
    assert list(site._batches(Settings(prompt="one")))[-1][2] == "done" and given == [0]


# --- settings, which come from strangers ---

FULL = Settings("Ünïcode ☃ <script>", "chat", "be kind", "Feadrad has a key.", 7, 33, "a\n\\n", "Qwen/Qwen3-0.6B", "none", "float32", "nf4", [
    {"strategy": "speculative", "knobs": {"budget": 3}, "extras": [["top_p", {"p": 0.5}]], "forced": [4, 5]}], [["Who?", "Me."]])


def test_a_link_carries_every_setting():
    assert Settings.from_code(FULL.to_code()) == FULL
    assert Settings.from_code(Settings().to_code()) == Settings()
    assert len(Settings(prompt="Hello").to_code()) < 40
    assert FULL.stops() == ("a", "\n")


@pytest.mark.parametrize("code", ["", "!!!", "AAAA", "bnVsbA", "W10", "eyJzZWVkIjo"])
def test_a_damaged_link_is_no_link(code):
    assert Settings.from_code(code) in (None, Settings())


def test_what_does_not_fit_is_left_at_its_default():
    lanes = [{"strategy": 1}, None, {"strategy": "greedy", "knobs": {"file": "/etc/passwd", "x": [1]}}]
    raw = {"prompt": 3, "seed": True, "length": "9", "dtype": "float3", "lanes": lanes, "other": 1}
    read = Settings.read(raw)
    assert (read.prompt, read.seed, read.length) == ("", 0, Settings().length)
    assert read.lanes == [{"strategy": "greedy", "knobs": {}, "extras": [], "forced": []}]
    assert len(Settings.read({"lanes": [{"strategy": "greedy"}] * 9}).lanes) == 4


@pytest.mark.parametrize("change, about", [
    ({"prompt": " "}, "prompt"), ({"prompt": "x" * 5000}, "prompt"), ({"context": "x" * 5000}, "prompt"),
    ({"seed": None}, "seed"), ({"seed": -1}, "seed"), ({"length": 0}, "length"),
    ({"length": 257}, "length"), ({"lanes": []}, "lanes")])
def test_what_cannot_be_run_is_refused_where_it_stands(change, about):
    settings = Settings(**{"prompt": "Hello", **change})
    with pytest.raises(Refusal) as refused:
        settings.check(Rules.for_visitors())
    assert refused.value.about == about


def test_a_public_page_opens_no_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("PLAYGROUND_PUBLIC", "1")
    site = Site.from_environment(Wish())
    with pytest.raises(Refusal, match="only the models in its list"):
        site.wish_of(Settings(model=str(tmp_path)))
    assert site.wish_of(Settings()) == Wish()


def test_the_page_offers_only_what_the_engine_knows():
    assert set(CHOICES["dtype"]) <= set(DTYPES) and CHOICES["quantization"] == QUANTIZATIONS


def test_examples_hold_only_lanes_that_can_run():
    for example in examples():
        assert Settings.read(example).prompt == example["prompt"] and example["note"] and example["topic"] in TOPICS
        assert [told["problem"] for told in check(example["lanes"])] == [""] * len(example["lanes"])


def test_figures_are_made_from_what_there_is():
    assert draw(Trace([Header()])) == [None, None, None]
