"""The lane editor in a real browser: order, seeds per lane, and sweeps."""
from __future__ import annotations

import re

import pytest
from app_page import address, browser, expect, open_settings, page, running, share_link, status, visit  # noqa: F401

from playground.contract.lane_config import LaneConfig
from playground.ui.components.settings import Settings

GREEDY, SAMPLE, GUESSING = {"strategy": "greedy"}, {"strategy": "sample"}, {"strategy": "speculative"}
PROMPT = "The red fox"


def asked(page) -> list[LaneConfig]:
    """The lanes as the page remembers them."""
    page.wait_for_timeout(400)  # typed text is stored by the browser with a delay
    page.evaluate("history.replaceState(null, '', '/')")
    open_settings(page)
    share_link(page)
    page.wait_for_function("new URLSearchParams(location.search).has('s')")
    code = page.evaluate("new URLSearchParams(location.search).get('s')")
    return Settings.from_code(code).configs()


def names(page) -> list[str]:
    return [config.strategy for config in asked(page)]


def edit(page, lane: int):
    page.get_by_label(f"Edit lane {lane}").click()
    return page.locator(f".lane-card[data-lane='{lane - 1}']")


def test_lanes_are_reordered_by_mouse_and_by_keyboard(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[GREEDY, SAMPLE, GUESSING]))
    page.get_by_label("Move lane 1 after lane 2").click()
    assert names(page) == ["sample", "greedy", "speculative"]
    mover = page.get_by_label("Move lane 2 after lane 3")
    mover.focus()
    page.keyboard.press("Enter")
    assert names(page) == ["sample", "speculative", "greedy"]
    expect(page.get_by_label("Move lane 3 later")).to_be_disabled()
    visit(page, address, Settings(prompt=PROMPT, lanes=[GREEDY]))
    expect(page.locator(".move")).to_have_count(0)


def test_a_moved_lane_keeps_its_card_open_and_the_focus(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[GREEDY, SAMPLE, GUESSING]))
    edit(page, 3)
    page.get_by_label("Move lane 3 before lane 2").press("Enter")
    expect(page.locator(".lane-card[data-lane='1'].open .strategy")).to_have_text("Speculative decoding")
    expect(page.get_by_label("Move lane 2 before lane 1")).to_be_focused()
    page.keyboard.press("Enter")
    # it is the first lane, so it can only move down
    expect(page.get_by_label("Move lane 1 after lane 2")).to_be_focused()


def test_a_lane_with_its_own_seed_samples_differently_and_shows_it(page, address):
    visit(page, address, Settings(prompt=PROMPT, length=12, seed=3, lanes=[SAMPLE, SAMPLE, SAMPLE]))
    edit(page, 3).get_by_label("Own seed").fill("8")
    expect(page.locator(".lane-card[data-lane='2'] .lane-config")).to_contain_text("seed 8")
    page.click("#run")
    expect(page.locator("#run")).to_be_visible()
    for lane, seed in enumerate((3, 3, 8)):
        expect(status(page, lane)).to_have_text(re.compile("ended|limit"))
        expect(running(page, lane).locator(".setting")).to_contain_text(f"seed {seed}")
    texts = [running(page, lane).locator(".tokens").text_content() for lane in range(3)]
    assert texts[0] == texts[1] != texts[2]
    expect(running(page, 2).locator(".title")).to_contain_text("Seed 8")


def test_an_emptied_seed_is_shared_again(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[{**SAMPLE, "seed": 5}, SAMPLE]))
    assert [config.seed for config in asked(page)] == [5, None]
    edit(page, 1).get_by_label("Own seed").fill("")
    assert [config.seed for config in asked(page)] == [None, None]


def sweep(page, lane: int, number: str, values: str, low: str = "", high: str = ""):
    card = edit(page, lane)
    card.locator(".sweep summary").click()
    card.get_by_label("What to sweep").select_option(label=number)
    card.get_by_label("Number of values").select_option(label=values)
    for end, value in (("From", low), ("To", high)):
        if value:
            card.get_by_label(end, exact=True).fill(value)
    return card


def test_a_knob_sweep_creates_lanes_in_one_action(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[GREEDY, {**SAMPLE, "knobs": {"top_k": 7}}]))
    card = sweep(page, 2, "temperature", "3 values", "0.5", "1.5")
    expect(card.locator(".sweep .help")).to_have_text("0.5, 1, 1.5: one lane each.")
    card.get_by_role("button", name="Spread over lanes").click()
    lanes = asked(page)
    assert [lane.strategy for lane in lanes] == ["greedy", "sample", "sample", "sample"]
    assert [lane.knobs for lane in lanes[1:]] == [{"top_k": 7, "temperature": value} for value in (0.5, 1, 1.5)]
    expect(page.locator("#prompt textarea")).to_have_value(PROMPT)


def test_lanes_to_be_replaced_are_named_first(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[GREEDY, SAMPLE, GUESSING]))
    card = sweep(page, 2, "temperature", "4 values", "0.5", "2")
    expect(card.locator(".sweep .help")).to_contain_text("Lanes 1 and 3 will be removed.")
    card.get_by_role("button", name="Spread over lanes").click()
    assert names(page) == ["sample"] * 4


def test_a_number_of_a_part_and_the_seed_can_be_swept(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[{**GREEDY, "extras": [["repetition_penalty", {}]]}]))
    sweep(page, 1, "seed", "2 values", "4", "9").get_by_role("button", name="Spread over lanes").click()
    assert [lane.seed for lane in asked(page)] == [4, 9]
    label = next(
        text
        for text in edit(page, 1).get_by_label("What to sweep").locator("option").all_text_contents()
        if text.startswith("repetition")
    )
    edit(page, 1)
    sweep(page, 1, label, "2 values", "1", "1.5").get_by_role("button", name="Spread over lanes").click()
    penalties = [
        next(iter(knobs.values()), None)
        for lane in asked(page)
        for name, knobs in lane.extras
        if name == "repetition_penalty"
    ]
    assert penalties[:2] == [1, 1.5]


@pytest.mark.parametrize(
    "low, high, message",
    [
        ("0.5", "0.5", "Both ends are the same"),
        ("-1", "1", "at least 0 and at most"),
        ("", "99", "at least 0 and at most"),
    ],
)
def test_a_range_that_cannot_be_swept_says_why(page, address, low, high, message):
    visit(page, address, Settings(prompt=PROMPT, lanes=[SAMPLE]))
    card = sweep(page, 1, "temperature", "3 values", low, high)
    expect(card.locator(".sweep .help")).to_contain_text(message)
    expect(card.get_by_role("button", name="Spread over lanes")).to_be_disabled()


def test_integer_knobs_are_swept_over_integers(page, address):
    visit(page, address, Settings(prompt=PROMPT, lanes=[SAMPLE]))
    card = sweep(page, 1, "top k", "4 values", "1", "3")
    # a fourth would be the same as one of these
    expect(card.locator(".sweep .help")).to_contain_text("1, 2, 3: one lane each.")


def test_invalid_seeds_are_left_out_of_settings():
    for seed in (-1, True, 1.5, "3", None):
        assert Settings.read({"lanes": [{**SAMPLE, "seed": seed}]}).configs()[0].seed is None
    lanes = Settings.read({"lanes": [{**SAMPLE, "seed": 4}]}).lanes
    assert Settings.from_code(Settings(prompt=PROMPT, lanes=lanes).to_code()).configs()[0].seed == 4
