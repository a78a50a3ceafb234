"""The sheet of models: one click loads a model and uses it, a load can be cancelled, and what fails changes nothing."""
from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from chromium import chromium, new_context
from counting import Counting, counting_site
from playwright.sync_api import expect
from toys import save

from playground.engine.checkpoint.catalogue import SUGGESTED
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.run_request import DEFAULT
from playground.ui.components.theme import theme_options
from playground.ui.models.model_sheet import CANCELLED, ModelChoices, counted
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.hub_standin import hub_standin
from support.launched import launched

TINY = SUGGESTED[0].name
PARTS = ("choice", "sheet", "status", "model", "draft", "dtype", "quantization", "model_notice", "known")


@pytest.fixture
def page():
    """Names in the place of the page's components."""
    return SimpleNamespace(**{name: name for name in PARTS})


def asked(name: object) -> SimpleNamespace:
    return SimpleNamespace(name=name)


def loading_site(load) -> Site:
    site = counting_site(lambda models, settings, memory: Counting([]))
    models = site.load()
    site.model_loader._load = lambda *names, **how: load(names, **how) or models
    return site


def test_one_click_loads_a_model_and_uses_it_with_its_own_draft(page):
    given = []
    site = loading_site(lambda names, progress, **how: given.append(names) or progress(0.5, "Fetching"))
    changes = list(ModelChoices(site, page).take("auto", "none", asked(SUGGESTED[1].name)))
    assert given == [(SUGGESTED[1].name, None)], "no draft named: its own"
    assert changes[0]["sheet"]["busy"]["name"] == SUGGESTED[1].name and changes[0]["choice"].request
    assert changes[-1]["sheet"] == {"taken": SUGGESTED[1].name}
    assert (changes[-1]["model"], changes[-1]["draft"]) == (SUGGESTED[1].name, DEFAULT)
    back = list(ModelChoices(site, page).take("auto", "none", asked("pocket")))[-1]
    assert back["model"] == DEFAULT, "the page's own model by its name"


def test_a_model_that_cannot_be_loaded_is_a_sentence_and_changes_nothing(page):
    def fail(names, **how):
        raise Refusal("It takes 9 GB, and 1 GB are free: choose a smaller model.", "model")

    changes = list(ModelChoices(loading_site(fail), page).take("auto", "none", asked(TINY)))
    assert changes[-1] == {"sheet": {"refused": "It takes 9 GB, and 1 GB are free: choose a smaller model."}}
    assert not any("model" in change for change in changes)
    malformed = list(ModelChoices(loading_site(fail), page).take("auto", "none", asked(["x" * 10**6])))
    assert len(malformed) == 1 and "refused" in malformed[0]["sheet"]


def test_a_cancelled_load_leaves_the_model_in_use(page):
    let = threading.Event()

    def wait(names, progress, **how):
        let.wait(30)
        progress(0.9, "Reading")

    choices = ModelChoices(loading_site(wait), page)
    changes = choices.take("auto", "none", asked(TINY))
    choice = next(changes)["choice"]
    next(changes)
    choices.cancel(choice)
    assert next(changes) == {"sheet": {"refused": CANCELLED}}
    let.set()
    with pytest.raises(Refusal, match="cancelled"):
        choices.site.model_loader._sets[choice.request].result()


def test_a_folder_is_loaded_by_its_path_where_the_page_is_one_s_own_and_refused_on_a_public_one(page, tmp_path):
    folder = str(save(tmp_path / "toy"))
    changes = list(ModelChoices(Site(), page).take("auto", "none", asked(f" {folder} ")))
    assert changes[-1]["sheet"] == {"taken": folder} and changes[-1]["model"] == folder
    missing = list(ModelChoices(Site(), page).take("auto", "none", asked(f"{folder}/nowhere")))
    assert missing[-1]["sheet"]["refused"].startswith(f"There is no folder {folder}/nowhere: check the path")
    public = list(ModelChoices(Site(rules=Rules.for_visitors()), page).take("auto", "none", asked(folder)))
    assert public[0]["sheet"]["refused"].startswith("This public page offers only the models in its list, not '/")
    assert len(public) == 1, "nothing was loaded"


@pytest.mark.parametrize("number, text", [(7_340_000, "7.3 M"), (134_515_008, "135 M"), (1_711_376_384, "1.7 B")])
def test_parameters_are_counted_as_in_the_names_of_models(number, text):
    assert counted(number) == text


def test_a_newcomer_loads_a_real_model_with_two_clicks(tmp_path, monkeypatch):
    folder = save(tmp_path / "toy")
    with hub_standin(monkeypatch, tmp_path / "cache", {entry.name: folder for entry in SUGGESTED}) as hub:
        site = Site()
        site.warm(wait=True)
        with launched(build(site), **theme_options()) as address, chromium() as opened:
            page = new_context(opened, viewport={"width": 1440, "height": 900}).new_page()
            page.goto(address)
            chip, sheet = page.locator(".model-chip"), page.locator(".model-sheet")
            expect(chip).to_contain_text("Pocket")
            expect(chip).to_contain_text(site_proposal := "real: ")
            hub.flows.clear()
            chip.click()
            row = sheet.locator(f"li[data-model='{TINY}']").first
            expect(row.locator(".models-facts")).to_contain_text("to download")
            expect(sheet.locator("li[data-model='pocket'] .models-used")).to_be_visible()
            row.locator(".models-load").click()
            expect(sheet.locator(".models-progress p")).to_contain_text("Fetching model.safetensors")
            sheet.locator(".models-cancel").click()
            expect(sheet.locator(".models-notice")).to_contain_text("has not changed")
            hub.flows.set()
            row.locator(".models-load").click()
            expect(sheet).to_be_hidden()
            expect(chip).to_contain_text("SmolLM2 135M")
            expect(chip).not_to_contain_text(site_proposal)
            assert page.evaluate("playground.settingsNow().model") == TINY
