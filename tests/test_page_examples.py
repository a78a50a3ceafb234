"""Contexts, examples and questions with known answers, as a visitor takes them."""

from types import SimpleNamespace

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

from playground.questions.questions import gallery
from playground.run_request import DEFAULT
from playground.ui.components.settings import Settings
from playground.ui.play.gallery import examples
from playground.ui.play.settings_handlers import SettingsHandlers
from playground.ui.server.site import Site


def test_a_context_is_read_before_the_prompt_and_stays_folded_while_there_is_none(page, address):
    visit(page, address)
    expect(page.locator("#context")).to_be_hidden()
    visit(
        page,
        address,
        Settings(prompt="The red fox", context="A green bird sleeps.", length=4, lanes=[{"strategy": "greedy"}]),
    )
    expect(page.locator("#context textarea")).to_have_value("A green bird sleeps.")
    expect(page.locator("#settings .summary")).to_contain_text("context of 4 words")
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
    expect(page.locator(".lane-card .mark.need").first).to_have_text("needs a context")
    page.click("#run")
    expect(page.locator(".lane-card .complaint")).to_contain_text("enter a passage as context")
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
    expect(page.locator("#settings .summary")).to_contain_text("context of")
    page.get_by_role("button", name="A fact", exact=True).click()
    expect(page.locator("#settings .summary")).not_to_contain_text("context of")


@pytest.mark.journey
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
    open_settings(page)
    page.fill("#length input", "3")
    page.click("#run")
    expect(running(page, 0).locator(".verdict")).to_contain_text(f"expected: {question.answer}")
    expect(page.locator("#run")).to_be_visible()


def test_the_answer_to_a_question_is_hidden_once_its_turns_or_words_change(page, address):
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
    open_settings(page)
    page.click(".turns button")
    expect(page.locator("#known")).to_be_hidden()
    expect(page.locator(".turns p")).to_have_count(0)


@pytest.mark.parametrize("control", ["model", "draft"])
def test_an_example_takes_its_context_and_its_model_or_draft_away_with_it(control):
    shown = {}
    page = SimpleNamespace(
        show=lambda settings, names: shown.update({name: getattr(settings, name) for name in names}) or {},
        prompt_notice="p",
        tools_notice="t",
        model_notice="m",
        lanes_notice="l",
        form_notice="f",
        show_remarks=lambda *_: {},
    )
    acts = SettingsHandlers(Site(), page)
    plain = next(i for i, example in enumerate(examples()) if not {"model", "draft"} & {*example})
    own = {"model": "my/own", "draft": "my/other"}
    acts.pick(*own.values(), SimpleNamespace(part="examples", index=plain))
    assert not shown.keys() & own.keys() and shown["context"] == examples()[plain].get("context", "")
    for example in (example for example in examples() if control in example):
        shown.clear()
        acts.pick(*(own | {control: example[control]}).values(), SimpleNamespace(part="examples", index=plain))
        assert shown.keys() & own.keys() == {control} and shown[control] == DEFAULT
