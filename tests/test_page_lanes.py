"""The editor of the lanes: what it offers, what goes together, what it says where something does not."""

import json
import re
from itertools import groupby

import pytest
from app_page import (  # noqa: F401
    TWO_LANES,
    address,
    browser,
    choose_strategy,
    expect,
    open_settings,
    page,
    running,
    status,
    tokens,
    visit,
)
from playwright.sync_api import Page, expect
from registry import registered

from playground.contract import Strategy, discover, find
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from playground.run_request import DEFAULT
from playground.ui.components import model_menu as offers
from playground.ui.components.settings import Settings
from support.page_scripts import Evaluate, defining, evaluating


@pytest.mark.journey
def test_a_strategy_is_found_by_typing_and_taken_with_the_keyboard(page, address):
    visit(page, address)
    opener = page.get_by_label("Strategy of lane 2")
    opener.focus()
    page.keyboard.press("ArrowDown")
    everything = page.locator(".editor .option").count()
    assert page.locator(".editor .option[aria-selected='true']").get_attribute("data-name") == "sample"
    assert page.locator(".editor .options .heading").first.text_content() == "Recommended"
    page.keyboard.type("Speculative")
    assert 0 < page.locator(".editor .option").count() < everything
    assert page.locator(".editor .options .heading").first.text_content() == "Speculative"
    assert page.locator(".editor .option[aria-selected='true']").get_attribute("data-name") == "speculative"
    page.keyboard.press("Enter")
    expect(opener).to_have_text("Speculative decoding")
    expect(opener).to_be_focused()
    expect(page.locator(".editor .menu")).to_have_count(0)


def test_adding_a_lane_offers_what_is_instructive_beside_the_others(page, address):
    visit(page, address)
    page.locator(".editor .add-lane").click()
    assert page.locator(".editor .options .heading").first.text_content() == "Beside these lanes"
    offered = page.locator(".editor .options [role='group']").first.locator(".name")
    assert offered.first.text_content() == "Speculative decoding"  # beside greedy decoding and sampling
    page.keyboard.press("Enter")
    expect(page.get_by_label("Strategy of lane 3")).to_have_text("Speculative decoding")
    page.locator(".editor .add-lane").click()
    assert offered.all_text_contents()[:2] == [
        "Speculative decoding, Prompt lookup", "Speculative decoding, RSD-S: a stochastic beam",
    ]
    page.keyboard.type("sampling")  # every strategy can be found as well
    assert page.locator(".editor .option[data-name='sample']").count() == 1


GREEDY, SAMPLE = {"strategy": "greedy", "extras": []}, {"strategy": "sample", "extras": []}
ORDERS = [
    ([], ["greedy", "sample"]),
    ([GREEDY], ["sample", "speculative"]),
    ([GREEDY, SAMPLE], ["speculative", "beam_search"]),
    ([{"strategy": "speculative", "extras": []}], ["greedy", "speculative prompt_lookup"]),
    (
        [GREEDY, {"strategy": "speculative", "extras": [["prompt_lookup", {}]]}],
        ["speculative rsd_s", "speculative lookahead"],
    ),
    ([GREEDY, {"strategy": "sample", "extras": [["json_schema", {}]]}], ["sample", "speculative"]),
    ([GREEDY, {"strategy": "speculative", "extras": [["lookahead", {}]]}, SAMPLE],
     ["speculative prompt_lookup", "speculative rsd_s", "beam_search", "self_consistency"]),
]


@pytest.mark.parametrize("lanes, first", ORDERS)
def test_advice_names_a_baseline_then_what_differs_in_one_thing(advice, lanes, first):
    found = advised(advice, lanes)
    assert found[: len(first)] == first and len(found) == len(set(found)) <= 4


def test_advice_needs_no_draft_model_where_there_is_none_and_offers_a_canvas_its_own(advice):
    assert "ead" not in advised(advice, [GREEDY, SAMPLE], drafted=False)
    assert advised(advice, [], fills=True) == ["masked_diffusion"]


@pytest.fixture(scope="module")
def advice(browser):
    return evaluating(browser, defining("editor/advice.js"))


def advised(advice: Evaluate, lanes: list[dict], **models) -> list[str]:
    """The strategies with their parts that the editor recommends beside these lanes."""
    catalogue = {
        cls.name: {"kind": cls.kind, "needs": list(cls.needs), "title": cls.title} for cls in discover().values()
    }
    return advice(
        """([lanes, catalogue, models]) => adviceBeside(lanes.map((lane) => ({ knobs: {}, forced: [], ...lane })),
        { partOf: (name) => catalogue[name], ...models })
        .map(({ lane }) => [lane.strategy, ...lane.extras.map(([name]) => name)].join(" "))""",
        [lanes, catalogue, models],
    )


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


@pytest.mark.journey
def test_a_part_is_added_from_a_menu_that_is_grouped_by_kind(page, address):
    visit(page, address)
    page.get_by_label("Edit lane 1").click()
    page.locator(".lane-card[data-lane='0'] .adder").click()
    assert {"Sampler", "Constraint", "KV cache"} <= set(page.locator(".editor .options .heading").all_text_contents())
    page.keyboard.type("sink")
    page.keyboard.press("Enter")
    expect(page.locator(".lane-card[data-lane='0'] .lane-config")).to_contain_text("sink_window")


def in_menu(page: Page, opener: str) -> dict[str, bool]:
    """Names in a menu, and whether each can be taken."""
    page.locator(opener).click()
    options = page.locator(".editor .option").evaluate_all(
        "all => all.map((one) => [one.dataset.name, one.getAttribute('aria-disabled') !== 'true'])"
    )
    page.keyboard.press("Escape")
    return dict(options)


def needed_by(main: type[Strategy]) -> list[tuple[str, dict]]:
    return [("choice", {})] if "constraint" in main.needs else []


def granted(config: LaneConfig) -> bool:
    try:
        return bool(assemble(config))
    except Refusal:
        return False


ADDED = ("sampler", "cache_policy", "compute_policy", "overlay")
TOGGLES = [cls for cls in discover().values() if cls.kind in ADDED]


def toggles_of(main: type[Strategy]) -> frozenset[str]:
    """Names of the toggles that a lane of this strategy can have."""
    extras = needed_by(main)
    return frozenset(cls.name for cls in TOGGLES if granted(LaneConfig(main.name, extras=[*extras, (cls.name, {})])))


def mains_that_differ() -> list[type[Strategy]]:
    """One strategy of each kind for every set of toggles."""
    mains = [cls for cls in discover().values() if cls.kind in ("decoder", "canvas_decoder", "preset")]
    return list({(cls.kind, bool(needed_by(cls)), toggles_of(cls)): cls for cls in mains}.values())


def test_a_lane_is_offered_what_its_strategy_takes_and_nothing_else(page, address):
    mains = mains_that_differ()
    assert {main.kind for main in mains} == {"decoder", "canvas_decoder", "preset"}
    for first in range(0, len(mains), 4):
        some = mains[first:first + 4]
        visit(
            page,
            address,
            Settings(prompt="The red fox", lanes=[{"strategy": main.name, "extras": needed_by(main)} for main in some]),
        )
        for i, main in enumerate(some):
            page.get_by_label(f"Edit lane {i + 1}").click()
            adder = f".lane-card[data-lane='{i}'] .adder"
            offered = in_menu(page, adder) if page.locator(adder).count() else {}
            assert {name for name in offered if find(name).kind != "constraint"} == toggles_of(main), main.name
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
    return Settings(
        prompt="The red fox",
        lanes=[{"strategy": "speculative", "extras": [[name, {}] for name in (drafter, verifier, *samplers)]}],
    )


def test_a_verifier_that_is_not_exact_is_grey_and_says_why(page, address):
    visit(page, address, verifying("prompt_lookup", "rejection", "temperature"))
    page.get_by_label("Edit lane 1").click()
    assert in_menu(page, "[data-slot='verifier'] .opener") == {
        "block_verification": True,
        "exact_transport": True,
        "greedy_match": False,
        "k_seq": False,
        "rejection": True,
        "sample_match": True,
        "typical_acceptance": True,
    }
    page.locator("[data-slot='verifier'] .opener").click()
    expect(page.locator(".option[data-name='k_seq']")).to_have_attribute(
        "title", "Not exact for the draft tokens of prompt_lookup, which are deterministic."
    )
    expect(page.locator(".option[data-name='greedy_match']")).to_have_attribute(
        "title", re.compile("remove temperature first")
    )
    page.locator(".option[data-name='k_seq']").click(force=True)
    expect(page.locator(".editor .menu")).to_have_count(1)  # nothing was taken


def test_a_drafter_that_the_verifier_is_not_exact_for_brings_another_verifier(page, address):
    visit(page, address, verifying("spectr", "k_seq"))
    page.get_by_label("Edit lane 1").click()
    page.locator("[data-slot='drafter'] .opener").click()
    assert page.locator(".options .heading").all_text_contents() == ["From a draft model", "Without a draft model"]
    expect(page.locator(".option[data-name='prompt_lookup']")).to_have_attribute(
        "title", re.compile("k_seq is not exact for its deterministic draft tokens")
    )
    page.locator(".option[data-name='prompt_lookup']").click()
    expect(page.locator("[data-slot='verifier'] .opener")).to_have_text("Rejection sampling")
    expect(page.locator("[data-slot='drafter'] .opener")).to_be_focused()
    expect(page.locator(".lane-card .promise")).to_have_text("same text as greedy")


def test_samplers_need_a_verifier_that_is_exact_under_sampling(page, address):
    visit(page, address, verifying("prompt_lookup", "greedy_match"))
    page.get_by_label("Edit lane 1").click()
    offered = in_menu(page, ".adder")
    assert not offered["temperature"] and offered["repetition_penalty"] and offered["regex"]


def test_the_menu_of_additions_begins_with_samplers(page, address):
    """The order of the row: sampler, constraint, KV cache, compute, overlay."""
    visit(page, address, Settings(prompt="The red fox", length=7, lanes=[{"strategy": "greedy"}]))
    page.get_by_label("Edit lane 1").click()
    expect(page.locator(".adder")).to_have_text("+ Add sampler, constraint, KV cache, compute, overlay…")
    page.locator(".adder").click()
    headings = page.locator(".options .heading").all_inner_texts()
    assert headings == ["SAMPLER", "CONSTRAINT", "KV CACHE", "COMPUTE", "OVERLAY"]


def test_models_of_the_two_kinds_are_distinguished(page, address):
    """The app was started with a folder, whose kind is known once it is loaded."""
    lanes = [{"strategy": "masked_diffusion"}, {"strategy": "greedy"}]
    visit(page, address, Settings(prompt="one morning", length=16, lanes=lanes))
    mark = page.locator(".lane-card .mark")
    expect(mark).to_have_text("needs a denoiser")
    visit(page, address, Settings(prompt="one morning", length=16, model="oracle", lanes=lanes))
    expect(mark).to_have_text("needs a text model")
    open_settings(page)
    expect(page.locator("#model")).to_contain_text("for masked diffusion")


def test_models_are_listed_by_where_they_come_from(monkeypatch, tmp_path):
    card = {"title": "Pocket, sharpened", "parameters": "7 M", "draft": "", "note": "Knows what it wants."}
    folder = tmp_path / "models" / "pocket-sharp"
    folder.mkdir(parents=True)
    (folder / "variant.json").write_text(json.dumps(card), encoding="utf-8")
    monkeypatch.setenv("PLAYGROUND_HOME", str(tmp_path))
    default, *others = offers.targets("mine")
    assert default == ("mine · default", DEFAULT) and ("Pocket, sharpened · made here", "pocket-sharp") in others
    assert [place for place, _ in groupby(label.split(" · ")[-1] for label, _ in others)] == [
        "bundled",
        "made here",
        "from the hub",
    ]
    assert offers.note("pocket-sharp") == card["note"] and offers.note("somebody/else") == ""
    (first, _), *rest = offers.targets("pocket")  # the page's own model, listed once
    assert first == "Pocket · bundled · default" and "pocket" not in {name for _, name in rest}
    assert "oracle" in {name for _, name in others} and "oracle" not in {name for _, name in offers.drafts()}


# --- the search of the lane adder ---

@pytest.mark.journey
@pytest.mark.parametrize("typed, first, decoder, part", [
    ("json", "Greedy + JSON Schema", "greedy", "json_schema"),
    ("top-p", "Sampling + Top-p (nucleus)", "temperature", "top_p"),
    ("eagle", "Speculative + EAGLE", "speculative", "eagle"),
    ("h2o", "Greedy + Heavy hitters (H2O)", "greedy", "h2o"),
])
def test_adding_a_lane_finds_a_part_by_its_name_and_by_what_it_does(page, address, typed, first, decoder, part):
    visit(page, address, Settings(prompt="The red fox", lanes=[{"strategy": "greedy"}]))
    page.get_by_label("Add a lane").click()
    assert page.locator(".editor .menu .option[data-name^='with-']").count() == 0, "nothing is typed yet"
    page.keyboard.type(typed)
    expect(page.locator(".editor .menu .option .name").first).to_have_text(first)
    page.keyboard.press("Enter")
    expect(page.locator(".lane-card")).to_have_count(2)
    for name in (decoder, part):  # a part is in the config; a decoder is there unless it is the title
        expect(page.locator(".lane-card[data-lane='1']")).to_contain_text(re.compile(name, re.IGNORECASE))


def test_a_menu_stays_open_with_what_is_typed_while_a_late_answer_draws_the_cards(page, address):
    late, holding = [], [True]
    page.route("**/queue/join*", lambda request: late.append(request) if holding else request.continue_())
    page.goto(f"{address}?s={Settings(prompt='The red fox', lanes=[{'strategy': 'greedy'}]).to_code()}")
    page.get_by_label("Add a lane").click()
    page.keyboard.type("json")
    holding.clear()
    for request in late:
        request.continue_()
    expect(page.locator("#prompt textarea")).to_have_value("The red fox")
    expect(page.locator(".lane-card")).to_have_count(1)
    expect(page.locator(".editor .menu input")).to_have_value("json")
    expect(page.locator(".editor .menu input")).to_be_focused()


def test_every_strategy_is_found_by_its_name(page, address):
    visit(page, address, Settings(prompt="The red fox", lanes=[{"strategy": "greedy"}]))
    page.get_by_label("Add a lane").click()
    page.keyboard.type(" ")
    search = page.locator(".editor .menu input")
    for cls in registered("decoder", "preset", "canvas_decoder", "sampler", "drafter", "verifier", "constraint",
                          "cache_policy", "compute_policy"):
        search.fill(cls.name)
        names = page.locator(f".editor .menu .option:is([data-name='{cls.name}'], [data-name='with-{cls.name}'])")
        assert names.count() == 1, cls.name


def test_a_speculative_lane_is_named_by_its_drafter(page, address):
    lanes = [{"strategy": "speculative", "extras": [[name, {}]]} for name in ("draft_model", "eagle", "medusa")]
    visit(page, address, Settings(prompt="The red fox", length=8, lanes=lanes))
    titles = ["Speculative decoding", "EAGLE", "Medusa"]
    expect(page.locator(".lane-card .opener.strategy")).to_have_text(titles)
    assert [assemble(config).title() for config in Settings(lanes=lanes).configs()] == titles
