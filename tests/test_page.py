"""The page in a real browser, with the real app and small random models: runs, forks, refusals, options."""

import json
import subprocess
import sys

import gradio as gr
import pytest
from app_page import (  # noqa: F401
    ROOT,
    TWO_LANES,
    address,
    browser,
    choose_strategy,
    expect,
    page,
    running,
    status,
    tokens,
    visit,
)
from counting import committed

from playground.cli import main
from playground.events import Header, Stamped, Step
from playground.trace import Trace
from playground.trace.plot_style import COLOURS
from playground.ui.components.settings import Settings
from playground.ui.play import lane_editor as editor
from playground.ui.play.live_view import Lanes
from playground.ui.studies.run_figures import draw
from playground.ui.studies.studies_page import _hues


@pytest.mark.journey
def test_a_recording_greets_the_visitor(page, address):
    page.emulate_media(reduced_motion="no-preference")  # it plays
    visit(page, address)
    recorded = page.locator("#live [data-recorded='true'] .lane")
    expect(recorded).to_have_count(len(Trace.load(ROOT / "assets/traces/first_view.jsonl").headers))
    expect(recorded.first.locator(".tokens > *").nth(2)).to_be_attached()


def test_what_an_editor_knows_of_the_strategies_is_gathered_once(monkeypatch):
    editor.LaneEditor(render=False)
    monkeypatch.setattr(
        editor, "catalogue_of", lambda strategies: pytest.fail("gathered anew, as for each update of a run")
    )
    editor.LaneEditor(render=False)


def test_no_script_is_read_to_announce_a_component(monkeypatch):
    asked, search = [], gr.HTML.__getattr__
    monkeypatch.setattr(gr.HTML, "__getattr__", lambda part, name: asked.append(name) or search(part, name))
    live = Lanes()
    live.get_config()
    editor.LaneEditor(render=False).get_config()
    assert asked == []
    assert callable(live.fork) and asked == ["fork"]
    assert not hasattr(live, "something_else") and asked == ["fork"]


def test_what_a_run_reports_does_not_carry_its_script_along():
    for part in (Lanes(render=False), editor.LaneEditor(render=False)):
        assert len(part.get_config()["js_on_load"]) < 1000 < 100_000 < len(part.script(None))


@pytest.mark.journey
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


@pytest.mark.journey
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
    expect(status(page, 1)).to_have_text("reached the token limit")
    written = "".join(
        running(page, 1).locator(".tokens > .t").evaluate_all("spans => spans.map((span) => span.textContent)")
    )
    assert " <b>zebra</b>" in written
    assert running(page, 1).locator("b").count() == 0


@pytest.mark.parametrize("late", [0, 2])
def test_words_that_the_grammar_does_not_allow_are_refused_beside_the_new_lane(page, address, late):
    """Whether the server says before or after the run that the lane could be run."""
    answered = []
    page.route("**/component_server*", lambda route: (page.wait_for_timeout(1000 * late), route.continue_()))
    page.on("response", lambda response: answered.append(response) if "component_server" in response.url else None)
    visit(
        page,
        address,
        Settings(
            prompt="A number:",
            length=6,
            lanes=[{"strategy": "greedy", "extras": [["regex", {"pattern": "[0-9]{4,}"}]]}],
        ),
    )
    page.keyboard.press("Control+Enter")
    expect(tokens(page, 0).nth(3)).to_be_attached()
    expect(page.locator("#run")).to_be_visible()
    tokens(page, 0).nth(1).click()
    page.locator("#live .card .own-words input").fill("zebra")
    before = len(answered)
    page.locator("#live .card .own-words button").click()
    complaint = page.locator(".lane-card[data-lane='1'] .complaint")
    expect(complaint).to_contain_text("The grammar does not allow")
    expect(status(page, 0)).to_have_text("reached the token limit")
    while len(answered) == before:
        page.wait_for_timeout(100)
    page.wait_for_timeout(100)
    expect(complaint).to_contain_text("The grammar does not allow")
    choose_strategy(page, 1, "sample")
    expect(complaint).to_have_count(0)


def test_a_fork_of_an_active_run_stops_its_other_lanes_and_can_be_forked_in_its_turn(page, address):
    visit(page, address, Settings(prompt="The green bird", length=4000, lanes=[{"strategy": "greedy"}]))
    page.click("#run")
    for lanes in (2, 3):
        expect(tokens(page, 0).nth(5)).to_be_attached()
        page.locator("#live .play").click()
        running(page, 0).locator(".tokens > .t").nth(2).click()
        page.locator("#live .card .candidate[data-id]").nth(1).click()
        expect(page.locator("#live [data-recorded='false'] .lane")).to_have_count(lanes)
        expect(status(page, 1)).to_have_text("running")
        expect(page.locator("#stop")).to_be_visible()
    page.click("#stop")
    expect(page.locator("#run")).to_be_visible()
    before = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", before)
    page.click("#stop")


def test_a_wrong_lane_says_so_beside_its_knob_and_nothing_runs(page, address):
    lanes = [{"strategy": "sample", "knobs": {"temperature": 9}}]
    visit(page, address, Settings(prompt="The red fox", length=8, lanes=lanes))
    expect(page.locator(".lane-card[data-lane='0'] .complaint")).to_contain_text("Temperature must be between")
    page.click("#run")
    expect(page.locator("#lanes-notice")).to_contain_text("Lane 1 cannot start. Temperature must be between")
    expect(page.locator("[data-about='temperature'] input").first).to_be_focused()
    assert tokens(page, 0).count() == 0


@pytest.mark.journey
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


@pytest.mark.journey
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
    expect(page.locator(".lane-card[data-lane='1'] .lane-config")).to_contain_text("prompt_lookup")


def test_the_menu_of_a_run_leads_to_its_figures_and_studies(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=[{"strategy": "speculative"}]))
    page.click("#run")
    expect(status(page, 0)).to_have_text("reached the token limit")
    with page.expect_popup() as opened:
        page.locator(".live .studies").click()
    studies = opened.value
    drawn = studies.locator(".js-plotly-plot")
    expect(drawn.first).to_contain_text("Entropy of the model's distribution")
    expect(studies.locator(".study").first).to_contain_text("Predictions")
    expect(drawn.filter(has_text="Speculation")).not_to_have_count(0)
    studies.goto(f"{address}/studies?run=unknown")
    expect(studies.locator(".study").first).to_contain_text("no longer on the server")
    studies.close()


FIGURED = [{"strategy": "greedy"}, {"strategy": "speculative"}]
STROKES = """() => {
    const hues = [0, 1].map((lane) => getComputedStyle(document.body).getPropertyValue(`--pg-lane-${lane}`).trim());
    const probe = document.createElement("i");
    const drawn = [...document.querySelectorAll(".js-plotly-plot")][0].querySelectorAll(".scatterlayer .js-line");
    return [hues.map((hue) => { probe.style.color = hue; return probe.style.color; }),
            [...drawn].map((line) => getComputedStyle(line).stroke)];
}"""


def test_figures_have_the_hues_of_the_lanes_in_both_themes(page, address):
    visit(page, address, Settings(prompt="The red fox", length=12, lanes=FIGURED))
    page.click("#run")
    expect(status(page, 1)).to_have_text("reached the token limit")
    with page.expect_popup() as opened:
        page.locator(".live .studies").click()
    studies = opened.value
    expect(studies.locator(".js-plotly-plot .scatterlayer .js-line")).not_to_have_count(0)
    hues, lines = studies.evaluate(STROKES)
    assert lines == hues
    studies.goto(studies.url.replace("hues=0%2C1", "hues=1%2C0"))  # as after the lanes have changed places
    expect(studies.locator(".js-plotly-plot .scatterlayer .js-line")).not_to_have_count(0)
    assert studies.evaluate(STROKES)[1] == hues[::-1]
    studies.go_back()
    expect(studies.locator(".js-plotly-plot .scatterlayer .js-line")).not_to_have_count(0)
    studies.evaluate("playground.switchTheme()")
    in_dark, drawn_anew = studies.evaluate(STROKES)
    assert drawn_anew == in_dark != hues
    studies.evaluate("playground.switchTheme()")
    assert studies.evaluate(STROKES)[1] == lines
    studies.close()


@pytest.mark.journey
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

    job = Client(address, verbose=False).submit(
        "The red fox", [{"strategy": "greedy"}], length=1, context="A green bird.", api_name="/run"
    )
    job.result(30)
    header = json.loads(job.outputs()[0])["headers"][0]
    assert header["context"] == "A green bird." and header["prompt"] == "The red fox"
    assert "".join(header["prompt_pieces"]).startswith("A green bird.")


@pytest.mark.slow
def test_a_wrong_option_ends_the_program_with_one_line():
    ended = subprocess.run([sys.executable, "app.py", "--dtype", "float3"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "float3" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["--port", "many"], "many"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--device", "abacus"], "abacus"),
        (["--quantization", "int9"], "int9"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_every_wrong_option_is_reported(options, message, capsys):
    ended = main(["serve", *options])
    said = capsys.readouterr().err
    assert ended == 2 and said.startswith("error: ") and message in said and said.count("\n") == 1


def test_figures_are_made_from_what_there_is():
    assert draw(Trace([Header()])) == [None, None, None]


def test_figures_have_the_hues_that_the_lanes_kept():
    trace = Trace([Header(lane=0, strategy="greedy"), Header(lane=1, strategy="greedy")])
    for lane in (0, 1):
        trace.append(Stamped(lane, lane, 0.1, Step(0, 1.0, 1.0, 3, [])))

    def strokes(hues):
        return [curve["line"]["color"] for curve in json.loads(draw(trace, hues)[0].plot)["data"]]

    assert strokes([]) == [COLOURS[0], COLOURS[1]]
    assert strokes([2, 0]) == [COLOURS[2], COLOURS[0]]
    assert strokes([3]) == [COLOURS[3], COLOURS[1]], "a hue that is not given is that of the place"


@pytest.mark.parametrize("text, hues", [("0,2", [0, 2]), ("3", [3]), ("", []), ("4", []), ("0,1,2,3,0", []),
                                        ("-1", []), ("0,,1", []), ("\u0663", []), ("0,2\n", []), ("9" * 10_000, [])])
def test_hues_of_an_address_are_four_numbers_at_most(text, hues):
    assert _hues(text) == hues
