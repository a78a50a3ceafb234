"""Tools on the page: checked while they are typed, described in the prompt, part of a link and of the API."""

import json

import pytest
import saved
from app_page import address, browser, expect, open_settings, page, running, share_link, status, visit  # noqa: F401
from pairs import pair
from toys import byte_tokenizer

from playground.decoding.prompt import Prompt
from playground.errors import Refusal
from playground.ui.components.settings import Settings
from playground.ui.server.model_loader import ModelLoad, ModelRequest
from playground.ui.server.pages import build
from playground.ui.server.site import Site

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
CHAT = Settings("Hi.", "chat", draft="none", length=4, lanes=[{"strategy": "greedy"}])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a model whose chat template describes tools."""
    folder = saved.save_models(tmp_path_factory.mktemp("tools")).target
    byte_tokenizer(template=TEMPLATE).save_pretrained(folder)
    return folder


def chat(**changes) -> Settings:
    return Settings(**{**vars(CHAT), **changes})


def copied_link(page) -> str:
    page.evaluate("window.copied = ''; navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    share_link(page)
    page.wait_for_function("window.copied")
    return page.evaluate("window.copied")


# --- without a browser ---

def test_tools_are_part_of_the_prompt_of_a_run_and_blank_ones_are_none():
    assert Prompt.of(chat(tools=f" {TOOLS}\n")).tools == TOOLS
    assert Prompt.of(chat(tools=" \n")).tools == ""


def test_a_loaded_model_is_asked_whether_it_has_a_place_for_tools_and_none_is_loaded_for_that(monkeypatch):
    site = Site(ModelRequest())
    site.chosen.check_tools(chat(tools=TOOLS))
    assert site.model_loader.names() == []
    monkeypatch.setitem(site.model_loader._sets, site.chosen.request(Settings()), ModelLoad(models=pair()))
    site.chosen.check_tools(CHAT)
    for draft in ("default", "none"):
        with pytest.raises(Refusal, match="no place for tools"):
            site.chosen.check_tools(chat(tools=TOOLS, draft=draft))


def test_an_answer_about_older_settings_cannot_come_last():
    """One event of Gradio sends the newest settings after the answer to older ones; two would overtake each other."""
    events = [(getattr(event.fn, "__qualname__", ""), event) for event in build(Site(load=None)).fns.values()]
    for handler in ("offer", "fit", "update_question_note"):
        modes = [event.trigger_mode for name, event in events if name == f"SettingsHandlers.{handler}"]
        assert modes == ["always_last"]


# --- on the page ---

def test_tools_are_described_in_the_prompt_and_restored_by_the_link(page, address, model):
    visit(page, address, chat(model=model))
    open_settings(page)
    page.fill("#tools textarea", TOOLS)
    expect(page.locator("#settings .summary")).to_contain_text("tools")
    page.click("#run")
    expect(running(page, 0).locator(".setting")).to_contain_text("tools add")
    expect(status(page, 0)).to_have_text("reached the token limit")
    expect(running(page, 0).locator(".prompt")).to_contain_text("[add]user: Hi.")
    page.goto(copied_link(page))
    open_settings(page)
    expect(page.locator("#tools textarea")).to_have_value(TOOLS)


def test_a_problem_is_said_below_the_tools_while_they_are_typed_and_run_opens_them(page, address, model):
    visit(page, address, chat(model=model))
    open_settings(page)
    said = page.locator("#tools-notice")
    page.fill("#tools textarea", "[")
    expect(said).to_contain_text("The tools are not valid JSON")
    page.fill("#tools textarea", "[{}]")
    expect(said).to_contain_text("Tool 1 is no JSON object with a name")
    page.locator("#settings .settings-open").click()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#tools textarea")).to_be_focused()
    expect(said).to_contain_text("Tool 1 is no JSON object with a name")
    page.fill("#tools textarea", TOOLS)
    expect(said).to_be_hidden()


def test_tools_are_there_in_a_chat_with_a_model_that_has_them_unless_there_are_some_to_remove(page, address, model):
    visit(page, address, chat(tools=TOOLS))  # for the page's own model, which has no place for them
    open_settings(page)
    expect(page.locator("#tools-notice")).to_contain_text("no place for tools")
    page.fill("#tools textarea", "")
    page.locator("#length input").focus()
    expect(page.locator("#tools")).to_be_hidden()
    visit(page, address, chat(mode="raw", model=model))
    open_settings(page)
    expect(page.locator("#tools")).to_be_hidden()
    page.get_by_label("Chat", exact=True).check(force=True)
    page.fill("#tools textarea", TOOLS)
    page.get_by_label("Raw text", exact=True).check(force=True)
    expect(page.locator("#tools-notice")).to_contain_text("Tools require a chat")
    page.fill("#tools textarea", "")
    expect(page.locator("#tools-notice")).to_be_hidden()
