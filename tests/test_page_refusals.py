"""What cannot be started is refused while it is edited, says what to add, and opens the place where it is mended."""

import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import gradio as gr
import pytest
from app_page import address, browser, expect, open_settings, page, tokens, visit  # noqa: F401

from playground.confined.child import Cancelled, ConfinedTask
from playground.contract import discover
from playground.contract.lane_config import LaneConfig
from playground.decoding.lane_checks import NewestChecks, Surroundings, check_ready
from playground.errors import Refusal
from playground.grammar.client import check_constraint
from playground.ui.components.settings import Settings
from playground.ui.play.gallery import example_passage
from playground.ui.play.lane_editor import check, judged
from playground.ui.play.run_handlers import RunHandlers
from playground.ui.play.visit import Visit
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.site import Site


def greedy_with(name: str, **knobs) -> dict:
    return {"strategy": "greedy", "extras": [[name, knobs]]}


def verdict(lane: dict, **around) -> tuple[str, str]:
    found, = check([lane], Surroundings(**around))
    return found["problem"], found["about"]


# --- what is missing ---

@pytest.mark.parametrize("lane, around, says, about", [
    ({"strategy": "greedy", "extras": [["cad", {}]]}, {}, "Context-aware decoding needs a context", "context"),
    ({"strategy": "speculative"}, {"drafted": False}, "needs a draft model", "draft"),
    ({"strategy": "pg_td", "knobs": {"tests": ""}}, {}, "The tests must all call the same function", "tests"),
    ({"strategy": "asap"}, {}, "ASAp: grammar-aligned sampling needs a constraint", "constraint"),
    ({"strategy": "masked_diffusion"}, {"attention": ""}, "cannot fill masked positions: choose pocket-diff", "model"),
    ({"strategy": "wedlm"}, {"attention": ""}, "choose a WeDLM checkpoint as the model", "model"),
])
def test_a_lane_without_what_it_needs_says_what_to_add(lane, around, says, about):
    problem, place = verdict(lane, **around)
    assert says in problem and place == about
    with pytest.raises(Refusal) as refused:
        check_ready(Settings(lanes=[{"strategy": "greedy"}, lane]).configs(), Surroundings(**around))
    assert refused.value.about == f"lane:1:{about}" and str(refused.value).startswith("Lane 2 cannot start.")


@pytest.mark.parametrize("strategy, says", [
    ("greedy", "choose Masked diffusion or another model"),
    ("wedlm", "WeDLM needs a model that reads known tokens before masks")])
def test_a_lane_that_a_denoiser_cannot_run_says_which_strategy_it_can(strategy, says):
    problem, place = verdict({"strategy": strategy}, attention="full")
    assert says in problem and "choose Masked diffusion" in problem and place == "model"


def test_a_lane_with_what_it_needs_can_start():
    assert verdict(greedy_with("cad"), context="A passage.") == ("", "")
    assert verdict({"strategy": "speculative"}) == ("", "")
    assert verdict({"strategy": "masked_diffusion"}, attention="full") == ("", "")
    assert verdict({"strategy": "masked_diffusion"}) == ("", ""), "the kind of the model is not known yet"
    assert check([greedy_with("cad")])[0]["problem"] == "", "where there is no context to be had, none is asked for"


@pytest.mark.parametrize("chosen, drafted", [
    ({}, True), ({"draft": "none"}, False), ({"model": "pocket-draft"}, False),
    ({"model": "pocket-draft", "draft": "nf4"}, True),
    ({"model": "somebody/unknown"}, False), ({"model": "Qwen/Qwen3-1.7B"}, True)])
def test_it_is_known_before_loading_whether_there_is_a_draft_model(chosen, drafted):
    assert Site(ModelRequest()).chosen.has_draft(Settings(**chosen)) == drafted


@pytest.mark.parametrize("model, attention", [
    ("default", ""), ("pocket-diffusion", "full"), ("oracle", "full"), ("Qwen/Qwen3-0.6B", ""),
    ("somebody/unknown", None)])
def test_it_is_known_before_loading_whether_a_listed_model_fills_masks(model, attention):
    assert Site(ModelRequest()).chosen.attention(Settings(model=model)) == attention


def test_of_a_model_from_elsewhere_it_is_known_once_it_is_loaded():
    denoiser = SimpleNamespace(target=SimpleNamespace(name="elsewhere", fills=True, attention="known_first"))
    site = Site(ModelRequest(), load=lambda *names, **how: denoiser)
    site.chosen.load(Settings(model="somebody/unknown")).result()
    assert site.chosen.attention(Settings(model="somebody/unknown")) == "known_first"


def test_refusals_name_strategies_and_knobs_as_the_page_does():
    """A name with an underscore is the registry's; the page shows titles and labels."""
    lanes = [LaneConfig(main, extras=[(extra, {})]) for main in ("greedy", "speculative", "beam", "sample", "asap")
             for extra in discover()]
    problems = [found["problem"] for found in check([vars(lane) for lane in lanes][:8])]
    for lane in lanes:
        problems += [found["problem"] for found in check([{"strategy": lane.strategy, "extras": lane.extras}])]
    assert len(set(problems)) > 100
    assert [problem for problem in problems if re.search(r"[a-z]_[a-z]", problem)] == []


# --- constraints ---

@pytest.mark.parametrize("name, knobs, about", [
    ("regex", {"pattern": "(["}, "pattern"), ("json_schema", {"source": "{"}, "source"),
    ("json_schema", {"source": '{"type": "nothing"}'}, "source"), ("lark", {"source": "start: nowhere"}, "source"),
    ("gbnf", {"source": "root ="}, "source"), ("choice", {"options": "a||b"}, "options"),
    ("regex", {"pattern": ""}, "pattern"), ("syncode", {"source": "start: A\nA: /a*/"}, "source")])
def test_a_constraint_that_cannot_be_used_is_refused_without_a_model(name, knobs, about):
    problem, place = verdict(greedy_with(name, **knobs))
    assert problem and place == about


def test_every_constraint_can_be_used_as_it_comes():
    names = [cls.name for cls in discover().values() if cls.kind == "constraint"]
    assert len(names) > 5
    assert [verdict(greedy_with(name)) for name in names] == [("", "")] * len(names)


def test_a_newer_check_of_the_same_editor_cancels_the_older_one():
    checks = NewestChecks()
    with checks.of("mine") as first, checks.of("another's") as other:
        with checks.of("mine") as second:
            assert (first.cancelled, other.cancelled, second.cancelled) == (True, False, False)
    assert judged({"lanes": [greedy_with("regex")], "editor": "mine"})[0]["problem"] == ""


def test_a_cancelled_check_is_not_asked_of_the_compiler():
    check = ConfinedTask()
    check.cancel()
    with pytest.raises(Cancelled):
        check_constraint("regex", "never compiled[0-9]", check)
    check_constraint("regex", "never compiled[0-9]", ConfinedTask())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a fork ends at its limit of time")
def test_a_fork_ends_when_the_one_who_asked_hangs_up():
    ours, theirs = socket.socketpair()
    waits = "import signal, socket; from playground.confined.server import _end_with as end; "
    waits += f"line = socket.socket(fileno={theirs.fileno()}); end(line); line.send(b'x'); signal.pause()"
    with theirs:
        fork = subprocess.Popen([sys.executable, "-c", waits], pass_fds=[theirs.fileno()])
    assert ours.recv(1) == b"x"
    ours.close()
    assert fork.wait(60) == -signal.SIGIO


# --- on the page ---

def complaint(page, lane: int = 0):
    return page.locator(f".lane-card[data-lane='{lane}'] .complaint")


def test_a_bad_pattern_says_so_while_it_is_typed_and_run_opens_it(page, address):
    visit(page, address, Settings(prompt="The red fox", length=8, lanes=[{"strategy": "greedy"}, greedy_with("regex")]))
    page.get_by_label("Edit lane 2").click()
    pattern = page.locator("[data-about='pattern'] input")
    pattern.fill("([")
    expect(complaint(page, 1)).to_contain_text("The regex cannot be used")
    expect(page.locator("[data-about='pattern'] .complaint")).to_be_visible()
    complaint(page, 1).get_by_text("Restore the example").click()
    expect(pattern).to_have_value("[0-9]{1,3}")
    expect(complaint(page, 1)).to_have_count(0)


def test_run_opens_what_keeps_the_only_lane_from_starting(page, address):
    visit(page, address, Settings(prompt="The red fox", length=8, lanes=[greedy_with("regex", pattern="([")]))
    page.keyboard.press("Control+Enter")
    expect(page.locator("#lanes-notice")).to_contain_text("Lane 1 cannot start. The regex cannot be used")
    expect(page.locator("[data-about='pattern'] input")).to_be_focused()
    assert tokens(page, 0).count() == 0


@pytest.mark.journey
def test_a_lane_that_cannot_start_says_why_in_its_place_and_the_others_run(page, address):
    visit(page, address, Settings(prompt="The red fox", length=8, draft="none",
                                  lanes=[{"strategy": "greedy"}, {"strategy": "speculative"}]))
    page.click("#run")
    expect(tokens(page, 0)).to_have_count(8)
    expect(page.locator("#live .lane[data-lane='1']")).to_contain_text("This strategy needs a draft model")
    assert tokens(page, 1).count() == 0


def test_a_missing_context_is_added_by_a_button_and_run_opens_its_field(page, address):
    visit(page, address, Settings(prompt="The red fox", length=4, lanes=[greedy_with("cad")]))
    expect(complaint(page)).to_contain_text("Context-aware decoding needs a context")
    page.click("#run")
    expect(page.locator("#prompt-notice")).to_contain_text("Lane 1 cannot start.")
    expect(page.locator("#context textarea")).to_be_focused()
    complaint(page).get_by_text("Add the example passage").click()
    expect(page.locator("#context textarea")).to_have_value(example_passage())
    expect(complaint(page)).to_have_count(0)
    page.click("#run")
    expect(tokens(page, 0).nth(3)).to_be_attached()


def test_a_form_without_both_places_says_so_while_it_is_typed_and_run_opens_it_before_models_load(page, address):
    visit(page, address, Settings(prompt="The red fox", length=4, context="A fox.", model="no/model"))
    open_settings(page)
    said = page.locator("#form-notice")
    page.fill("#form textarea", "{context} What now?")
    expect(said).to_contain_text("has to contain {context} and {prompt} once each")
    page.locator("#settings .settings-open").click()
    page.click("#run")
    expect(page.locator("#form textarea")).to_be_focused()
    expect(said).to_contain_text("has to contain {context} and {prompt} once each")
    expect(page.locator("#model-notice")).to_be_hidden()
    page.fill("#form textarea", "{context} What now? {prompt}")
    expect(said).to_be_hidden()


def test_a_missing_draft_is_added_by_a_button_and_too_many_stop_strings_open_the_drawer(page, address):
    visit(page, address, Settings(prompt="The red fox", length=4, draft="none", lanes=[{"strategy": "speculative"}]))
    expect(complaint(page)).to_contain_text("needs a draft model and there is none")
    complaint(page).get_by_text("Use its own draft").click()
    expect(page.locator("#settings .summary")).not_to_contain_text("draft none")
    open_settings(page)
    page.fill("#stop-strings textarea", "\n".join("abcdefghijklmnopq"))
    page.locator("#settings .settings-open").click()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#prompt-notice")).to_contain_text("There are 17 stop strings")
    expect(page.locator("#stop-strings textarea")).to_be_focused()


def test_a_strategy_for_a_denoiser_is_refused_before_the_run_and_mended_by_a_button(page, address):
    visit(page, address, Settings(prompt="one morning", length=8, lanes=[{"strategy": "masked_diffusion"}]))
    expect(complaint(page)).to_contain_text("The chosen model continues text")
    page.click("#run")
    expect(page.locator("#model-notice")).to_contain_text("Lane 1 cannot start.")
    expect(page.locator("#model-notice")).to_contain_text("choose pocket-diffusion or the oracle as the model")
    assert page.locator("#live [data-recorded='false']").count() == 0
    complaint(page).get_by_text("Use Pocket diffusion").click()
    expect(complaint(page)).to_have_count(0)
    page.click("#run")
    expect(tokens(page, 0).nth(7)).to_be_attached()


def test_where_lanes_need_models_of_both_kinds_another_strategy_is_offered(page, address):
    lanes = [{"strategy": "masked_diffusion"}, {"strategy": "greedy"}]
    visit(page, address, Settings(prompt="one morning", length=8, lanes=lanes))
    expect(complaint(page)).to_contain_text("The chosen model continues text")
    expect(complaint(page).get_by_text("Use Pocket diffusion")).to_have_count(0)
    complaint(page).get_by_text("Choose another strategy…").click()
    expect(page.locator(".option[data-name='greedy']").first).to_be_visible()
    expect(page.locator(".option[data-name='wedlm']")).to_contain_text("choose a WeDLM checkpoint as the target")


def test_what_cannot_be_chosen_is_not_reached_by_key(page, address):
    visit(page, address, Settings(prompt="The red fox", lanes=[{"strategy": "greedy"}]))
    opener = page.get_by_label("Strategy of lane 1")
    opener.click()
    page.keyboard.type("masked_diffusion")
    expect(page.locator(".option[data-name='masked_diffusion']")).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(opener).to_have_text("Greedy")


# --- clicks on Run ---

@pytest.fixture
def late(page):
    """Requests of the page to the queue, in order, while they are held."""
    held, holding = [], []
    page.route("**/queue/join*", lambda route: held.append(route) if holding else route.continue_())
    return SimpleNamespace(held=held, holding=holding)


def test_run_clicked_again_before_its_refusal_arrives_is_not_lost(page, address, late):
    visit(page, address, Settings(prompt="", length=4, lanes=[{"strategy": "greedy"}]))
    late.holding.append(True)
    page.click("#run")
    page.fill("#prompt textarea", "The red fox")
    page.click("#run")
    while len(late.held) < 2:
        page.wait_for_timeout(50)
    late.holding.clear()
    late.held[0].continue_()
    expect(page.locator("#prompt-notice")).to_contain_text("The prompt is empty")
    late.held[1].continue_()
    expect(tokens(page, 0).nth(3)).to_be_attached()
    expect(page.locator("#prompt-notice")).not_to_contain_text("The prompt is empty")


def test_a_double_click_and_a_held_key_begin_one_run(page, address, late):
    visit(page, address, Settings(prompt="The red fox", length=4, lanes=[{"strategy": "greedy"}]))
    page.wait_for_timeout(500)  # what opens the page is settled
    late.holding.append(True)
    page.dblclick("#run")
    page.focus("#run")
    for key in ("Control", "Enter", "Enter"):  # a key that is down repeats
        page.keyboard.down(key)
    page.wait_for_timeout(500)
    assert len(late.held) == 2, "one for the double click, one for the key"


def test_of_two_runs_begun_from_the_same_one_the_later_stays():
    last = Visit(Settings(prompt="a"), stopped=True)
    refused, begun = last.follow(Settings(prompt="")), last.follow(Settings(prompt="b"))
    assert refused.left and refused.stopped and not begun.left
    after = refused.follow(Settings(prompt="c"))
    assert begun.left and not after.left, "whichever of them the page knows"


def test_a_refusal_that_comes_after_the_next_run_has_begun_is_not_shown():
    handlers = RunHandlers(Site(ModelRequest()), None)
    refused = Visit(Settings(prompt=""), left=True)
    assert list(handlers._guarded(refused)) == [gr.skip()] * 2
