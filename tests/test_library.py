"""The library page: the declarations of all strategies, in a real browser; and its data."""
from __future__ import annotations

import re
from html import escape

import pytest
from chromium import chromium, new_context
from playwright.sync_api import Page, expect

from playground.contract import GUARANTEES, NEEDS, Decoder, discover, find, knob
from playground.contract.lane_config import MAIN_KINDS, SINGLE_KINDS
from playground.contract.metadata import citation, description, link
from playground.player.guarantee_labels import LIMIT, PROMISES, labelled
from playground.ui.components.settings import Settings
from playground.ui.components.theme import theme_options
from playground.ui.library import library_page as library
from playground.ui.library.demo_lanes import settings_for
from playground.ui.play.gallery import examples
from playground.ui.play.lane_editor import check
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.launched import launched

STRATEGIES = list(discover().values())
IN_A_LANE = (*MAIN_KINDS, *SINGLE_KINDS, "sampler", "overlay", "drafter", "verifier")
every_strategy = pytest.mark.parametrize("cls", STRATEGIES, ids=lambda cls: cls.name)


# --- entries ---

@every_strategy
def test_an_entry_shows_what_its_class_declares(cls):
    entry = library.entry(cls)
    knobs = [said for one in cls.knobs() for said in (one.name, one.help)]
    for said in (cls.title, cls.name, cls.summary(), *knobs, *labelled(cls.guarantee)):
        assert escape(said) in entry
    assert ("reconstruction" in entry) == cls.reconstruction
    assert escape(library.SURE[cls.sure]) in entry


@every_strategy
def test_a_paper_is_cited_with_its_authors_and_linked(cls):
    if not re.fullmatch(r"\d{4}\.\d+", cls.paper):
        assert link(cls) == "" and citation(cls) in ("", cls.paper)
        return
    assert re.fullmatch(rf"[A-Z].+ \d{{4}}, arXiv {cls.paper}", citation(cls))
    assert f"href='https://arxiv.org/abs/{cls.paper}' target='_blank' rel='noopener'" in library.entry(cls)


@every_strategy
def test_a_link_opens_a_lane_that_holds_the_strategy_and_can_run(cls):
    settings = settings_for(cls)
    if cls.kind not in IN_A_LANE:
        assert settings is None and cls.name in library.entry(cls).rpartition("python -m playground")[2]
        return
    carried = Settings.from_code(re.search(r"href='\./\?s=([\w-]+)&amp;run'", library.entry(cls))[1])
    # required, compressed, or used if there is one
    reads_one = "context" in cls.needs or getattr(cls, "replaces_prompt", False) or "passage" in [
        knob.name for knob in cls.knobs()]
    assert carried == settings and carried.prompt and bool(carried.context) == reads_one
    assert {said["problem"] for said in check(carried.lanes)} == {""}
    assert cls.name in [carried.lanes[-1]["strategy"], *(name for name, _ in carried.lanes[-1]["extras"])]


def test_a_canvas_strategy_is_opened_with_a_suitable_model():
    assert settings_for(find("masked_diffusion")).model == "oracle" and settings_for(find("greedy")).model == "default"


def test_a_sampling_drafter_is_opened_in_a_sampling_lane():
    plain, lane = settings_for(find("rsd_c")).lanes
    assert "temperature" in dict(lane["extras"])
    assert plain == {**plain, "strategy": "greedy", "extras": [["temperature", dict(lane["extras"])["temperature"]]]}


@pytest.mark.parametrize("name, plain", [
    ("eagle", "greedy"), ("h2o", "greedy"), ("json_schema", "greedy"), ("beam_search", "greedy"), ("cntp", "sample"),
    ("top_p", "sample"), ("best_of_n", "sample"),
])
def test_a_method_is_opened_beside_its_plain_lane(name, plain):
    beside, lane = settings_for(find(name)).lanes
    assert (beside["strategy"], beside["extras"]) == (plain, [])
    assert name in [lane["strategy"], *(extra[0] for extra in lane["extras"])]


@pytest.mark.parametrize("name", ["greedy", "sample", "masked_diffusion"])
def test_what_has_no_plainer_lane_is_opened_alone(name):
    assert len(settings_for(find(name)).lanes) == 1


@every_strategy
def test_a_method_is_opened_on_a_prompt_that_shows_its_kind(cls):
    """A cache policy needs a long prompt, a constraint one that asks for structure, a drafter one that drafts."""
    settings = settings_for(cls)
    if settings is None:
        return
    fitting = [example for example in examples() if bool(example.get("context")) == bool(settings.context)]
    kinds = kinds_of([example for example in fitting if example["prompt"] == settings.prompt])
    assert cls.kind in kinds or cls.kind not in kinds_of(fitting)


def kinds_of(shown: list[dict]) -> set[str]:
    lanes = [lane for example in shown for lane in example["lanes"]]
    names = {name for lane in lanes for name in (lane["strategy"], *(part for part, _ in lane.get("extras", [])))}
    return {find(name).kind for name in names}


def test_every_guarantee_and_every_need_has_words():
    assert set(PROMISES | LIMIT) == set(GUARANTEES) and set(library.NEEDS) == set(NEEDS)


def test_lossless_names_its_baseline():
    labels = labelled(["greedy_identical", "distribution_identical"])
    assert list(labels) == ["same text as greedy", "same distribution as sampling"]
    assert all("Lossless" in sentence for sentence in labels.values())


@pytest.mark.parametrize("name, refused", [
    ("adadec", ["samplers that draw at random"]),
    ("greedy_match", ["samplers that draw at random"]),
    ("k_seq", ["draft tokens that are drawn without replacement", "draft tokens that are not drawn at all"]),
    ("h2o", []),
    ("masked_diffusion", ["samplers", "cache policies", "compute policies", "overlays",
                          "constraints, unless it fills one position after the other"]),
    ("greedy", []),
])
def test_what_a_strategy_refuses_is_reported_in_words(name, refused):
    assert library.refuses(find(name)) == refused


class Written(Decoder):
    """Do <one> thing.

    And {another}, ${never} & more.
    """

    size: int = knob(3, 1, 9, help="how <many>")
    text: str = knob("a\nb" * 40, help="what")
    loud: bool = knob(True, help="whether")


def test_docstrings_are_shown_as_text_without_markup():
    assert "{another}, ${never} &amp; more." in library._how(Written) and description(Written) == [
        "And {another}, ${never} & more."
    ]


def test_knobs_are_reported_with_their_kind_their_limits_and_their_default():
    shown_knobs = library._knobs(library.facts(Written)["knobs"])
    assert "whole number, 1 to 9; default 3" in shown_knobs and "how &lt;many&gt;" in shown_knobs
    assert "yes or no; default yes" in shown_knobs and "a ba ba" in shown_knobs and "…" in shown_knobs


# --- the page ---

@pytest.fixture(scope="module")
def address():
    with launched(build(Site()), **theme_options()) as address:
        yield address


@pytest.fixture(scope="module")
def visitor():
    with chromium() as opened:
        yield new_context(opened, viewport={"width": 1440, "height": 900})


@pytest.fixture
def page(visitor, address):
    """The library as a visitor opens it; script errors fail the test."""
    page, wrong = visitor.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}library")
    expect(page.locator(".strategies .found")).to_contain_text(f"{len(STRATEGIES)} entries")
    yield page
    page.close()
    assert not wrong


def shown(page: Page) -> set[str]:
    return set(page.locator(".strategies .entry:visible").evaluate_all("entries => entries.map(({id}) => id)"))


def type_in(page: Page, text: str) -> set[str]:
    page.fill(".strategies input[type=search]", text)
    return shown(page)


def test_every_strategy_is_on_the_page_with_its_paper_and_its_knobs(page):
    assert shown(page) == {cls.name for cls in STRATEGIES}
    for cls in STRATEGIES:
        text = page.locator(f"[id='{cls.name}']").text_content()
        assert (citation(cls) or "A baseline") in text and all(one.name in text for one in cls.knobs())


FOUND_BY = {
    "top_p": "top_p",
    "nucleus": "top_p",
    "2402.02750": "kivi",
    "holtzman 2020": "sample",
    "dwell": "ead",
    "Attention SINKS": "sink_window",
    "min_p": "sample",
}


@pytest.mark.journey
def test_a_search_finds_by_name_title_paper_author_and_knob(page):
    for typed, name in FOUND_BY.items():
        found = type_in(page, typed)
        assert name in found and len(found) < len(STRATEGIES) / 2, typed


def order(page: Page) -> list[str]:
    return page.locator(".strategies .entry:visible").evaluate_all("entries => entries.map(({id}) => id)")


def test_names_that_begin_with_what_was_typed_come_first(page):
    whole = order(page)
    type_in(page, "eagle")
    found = order(page)
    assert found[:3] == ["eagle", "eagle_2", "eagle_3"] and {"flash", "rasd"} <= set(found[3:])
    type_in(page, "json")
    assert find(order(page)[0]).title.lower().startswith("json")
    type_in(page, "")
    assert order(page) == whole


def test_an_empty_search_result_says_so_and_can_be_reset(page):
    assert type_in(page, "zz <b>top</b>") == set()
    expect(page.locator(".strategies .none p")).to_have_text("No entry matches “zz <b>top</b>”.")
    page.locator(".strategies .clear").click()
    assert shown(page) == {cls.name for cls in STRATEGIES}
    expect(page.locator(".strategies input[type=search]")).to_be_focused()


def test_chips_filter_by_family_and_promise_and_count_what_they_would_leave(page):
    page.locator("[data-promise*='same text as greedy'].entry").first.wait_for()
    family = page.locator(".chips [data-family='sampling']")
    promise = page.locator(".chips [data-promise='same text as greedy']")
    lossless = {cls.name for cls in STRATEGIES if "same text as greedy" in labelled(cls.guarantee)}
    expect(promise.locator(".count")).to_have_text(str(len(lossless)))
    promise.click()
    assert shown(page) == lossless
    expect(page.locator(".strategies .found")).to_contain_text(PROMISES["greedy_identical"][1])
    sampling = {name for name in lossless if find(name).family() == "sampling"}
    expect(family.locator(".count")).to_have_text(str(len(sampling)))
    family.click()
    assert shown(page) == sampling and family.get_attribute("aria-pressed") == "true"
    expect(page.locator(".chips [data-promise='within budget']")).to_be_disabled()
    family.click()
    promise.click()
    assert shown(page) == {cls.name for cls in STRATEGIES}


def test_drafters_are_grouped_by_what_they_need(page):
    groups = {
        need: {cls.name for cls in STRATEGIES if library.drafts_with(cls) == need} for need in library.DRAFTS_WITH
    }
    assert set().union(*groups.values()) == {cls.name for cls in STRATEGIES if cls.kind == "drafter"}
    assert groups["nothing"] >= {"prompt_lookup", "token_recycling", "layer_skip_draft"}
    assert groups["a draft model"] >= {"draft_model", "omnidraft"}
    assert groups["a trained head"] >= {"medusa", "kangaroo"}
    for need, names in groups.items():
        chip = page.locator(f".chips [data-drafts='{need}']")
        expect(chip.locator(".count")).to_have_text(str(len(names)))
        chip.click()
        assert shown(page) == names
        chip.click()
    assert shown(page) == {cls.name for cls in STRATEGIES}


def test_what_is_new_in_a_year_is_grouped(page):
    new = {cls.name for cls in STRATEGIES if cls.new_in == "2026"}
    assert new >= {"adaptive_p", "p_less", "phrase_ban", "power_sampling", "deepconf"} and "top_p" not in new
    chip = page.locator(".chips [data-new='2026']")
    expect(chip.locator(".count")).to_have_text(str(len(new)))
    chip.click()
    assert shown(page) == new
    chip.click()
    assert shown(page) == {cls.name for cls in STRATEGIES}


def test_an_address_leads_to_one_entry_and_opens_it(visitor, address):
    page = visitor.new_page()
    page.goto(f"{address}library#mirostat")
    entry = page.locator("#mirostat")
    expect(entry).to_be_focused()
    expect(entry).to_be_in_viewport()
    expect(entry.locator(".knobs dl")).to_be_visible()
    type_in(page, "beam")
    page.evaluate("location.hash = '#top_k'")
    expect(page.locator("#top_k")).to_be_focused()
    page.close()


def test_a_strategy_is_run_beside_its_plain_lane_from_its_entry(page):
    page.locator("#sink_window .open-lane").click()
    expect(page.locator(".lane-card")).to_have_count(2)
    expect(page.locator(".lane-card .lane-config").last).to_contain_text("sink_window")
    expect(page.locator("#prompt textarea")).to_have_value(settings_for(find("sink_window")).prompt)
    expect(page.locator("#live [data-recorded='false'] .lane[data-lane='1'] .tokens > *").nth(2)).to_be_attached()
    expect(page.locator("#live .chooser .tab").last).to_have_attribute("aria-pressed", "true")
    assert "s=" in page.url and "run" not in page.url.partition("?")[2].split("&"), "a bookmark does not run"


def test_the_head_leads_there_and_marks_it(page):
    expect(page.locator(".places a[aria-current='page']")).to_have_text("Library")
    expect(page.locator(".nav-holder")).to_be_hidden()


def test_nothing_overflows_horizontally(page):
    folds = page.locator(".strategies details")
    assert folds.evaluate_all("all => { for (const fold of all) fold.open = true; return all.length; }") >= len(
        STRATEGIES
    )
    for width in (1440, 768, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
