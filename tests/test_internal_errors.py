"""An error that no one expected, while a run starts: the page is free again, says so, and the next run works."""
from __future__ import annotations

from unittest.mock import MagicMock

import gradio as gr
import pytest
from app_page import browser, expect, new_tab, visit  # noqa: F401
from counting import Counting, counting_site, open_page

from playground.errors import Refusal
from playground.ui.benchmark.survey_handlers import CONTROLS, SurveyHandlers
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components import internal_errors
from playground.ui.components.settings import Settings
from playground.ui.game.game_page import Game
from playground.ui.play.run_handlers import RunHandlers
from playground.ui.sweeps.seed_sweep_panel import Repeats

ERRORS = (TypeError("unsupported operand"), ZeroDivisionError("division by zero"), RecursionError(), MemoryError())
FAILED = "failed with an internal error"


class Falters:
    """Makes sessions, once the errors it has to raise first are used up."""

    def __init__(self, *errors: Exception):
        self.errors = list(errors)

    def __call__(self, models, settings, memory):
        if self.errors:
            raise self.errors.pop(0)
        return Counting([], length=3)


def page_with(*methods: str) -> MagicMock:
    """A page whose method `name` changes the component "name"."""
    return MagicMock(**{f"{name}.return_value": {name: True} for name in methods})


def values(settings) -> list:
    return [getattr(settings, name) for name in type(settings).names()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_page_is_free_after_an_error_and_the_next_run_works(error, monkeypatch):
    monkeypatch.setattr(internal_errors, "log", MagicMock())
    page = page_with("idle", "busy", "stoppable", "show_memory")
    handlers = RunHandlers(counting_site(Falters(error)), page)
    *_, last = handlers.run(None, *values(Settings(prompt="one")))
    assert "idle" in last and FAILED in last[page.prompt_notice] and type(error).__name__ in last[page.prompt_notice]
    internal_errors.log.exception.assert_called_once()
    again = list(handlers.run(None, *values(Settings(prompt="one"))))
    assert "idle" in again[-1] and not any(FAILED in str(change.get(page.prompt_notice)) for change in again)


def test_the_seeds_panel_is_free_after_an_error():
    with gr.Blocks():
        panel = Repeats(counting_site(Falters(TypeError("no"))))
    *_, last = panel.run(None, 0, 2, *values(Settings(prompt="one", lanes=[{"strategy": "sample"}])))
    assert FAILED in last[panel.output] and last[panel.go]["visible"] and not last[panel.halt]["visible"]


def test_the_game_is_free_after_an_error(monkeypatch):
    site = counting_site(Falters(TypeError("no")))
    monkeypatch.setattr("playground.ui.game.game_page.settings_of", lambda *values: Settings(prompt="one"))
    with gr.Blocks():
        game = Game(site)
    *_, last = game.start(None)
    assert last[game.status] == "" and FAILED in last[game.notice]


def test_the_benchmark_page_is_free_after_an_error(monkeypatch):
    page, site = page_with("idle", "busy"), counting_site(Falters())
    monkeypatch.setattr(site.runs, "survey", Falters(ZeroDivisionError()).__call__)
    monkeypatch.setattr("playground.ui.benchmark.survey_handlers.facts_of", lambda choice, models: {}, raising=True)
    page.show_refusal.side_effect = lambda refusal: {"notice": str(refusal)}
    choice = SurveySettings()
    *_, last = SurveyHandlers(site, page).run(None, "", *(getattr(choice, name) for name in CONTROLS))
    assert "idle" in last and FAILED in last["notice"]


def test_an_error_that_is_meant_for_the_page_keeps_its_message():
    for meant in (Refusal("say this"), gr.Error("say this", print_exception=False)):
        with pytest.raises(type(meant)) as raised, internal_errors.as_refusals("This run"):
            raise meant
        assert raised.value is meant


def test_run_is_offered_again_in_the_browser_after_an_error(new_tab):  # noqa: F811
    page = new_tab()
    with open_page(Falters(TypeError("no"))) as address:
        visit(page, address, Settings(prompt="one"))
        page.click("#run")
        expect(page.locator("#prompt-notice")).to_contain_text(FAILED)
        expect(page.locator("#run")).to_be_visible()
        expect(page.locator("#stop")).to_be_hidden()
        page.click("#run")
        expect(page.locator("#prompt-notice")).to_be_hidden()
        expect(page.locator("#run")).to_be_visible()
