"""The glossary: every term of the page has a definition, which hover, keyboard and touch reach in the same way."""
from __future__ import annotations

import re
from itertools import chain

import pytest
from chromium import chromium, new_context
from playwright.sync_api import Page, expect

from playground.contract import discover
from playground.page_scripts import SCRIPTS
from playground.ui.components import glossary
from playground.ui.components.theme import page_script
from playground.ui.library.library_page import page as library
from playground.ui.play.lessons import lessons


def of_views() -> set[str]:
    """The headings of the views, the origins of tokens and the states of draft tokens."""
    views = "".join(path.read_text("utf-8") for path in SCRIPTS.glob("views/**/*.js"))
    headings = re.findall(r'title: "([^"]+)"', views)
    colours = (SCRIPTS / "lane/colour.js").read_text("utf-8")
    origins = re.search(r"^export const ORIGINS = {\n(.*?)^};", colours, re.M | re.S)[1]
    states = re.search(r"STATE_WORDS = {(.*?)};", views)[1]
    return set(headings) | set(re.findall(r'label: "([^"]+)"', origins)) | set(re.findall(r': "([^"]+)"', states))


def of_lessons() -> set[str]:
    paragraphs = chain.from_iterable(step.paragraphs for lesson in lessons().values() for step in lesson.steps)
    return set(re.findall(r"\*\*([^*]+)\*\*", " ".join(paragraphs)))


def of_library() -> set[str]:
    html = library(list(discover().values())).split("<section class='glossary'")[0]
    return set(re.findall(r"<dt>([^<]+)</dt>", html))


@pytest.mark.parametrize("terms", [of_views, of_lessons, of_library])
def test_every_term_of_the_page_is_in_the_glossary(terms):
    assert len(terms()) > 5 and [term for term in sorted(terms()) if not glossary.definition(term)] == []


def test_a_form_belongs_to_one_term_and_a_definition_is_a_sentence():
    forms = list(chain.from_iterable(map(glossary.forms, glossary.terms())))
    assert len(forms) == len(set(forms))
    assert all(entry["text"].endswith(".") for entry in glossary.terms())
    assert all(f"<dt>{entry['term']}</dt>" in glossary.section().replace("&#x27;", "'") for entry in glossary.terms())


MARKUP = """<body><p>A <span id='one' data-term='residual'>leftover</span>, an <em id='own' data-term>entropy</em>,
<span data-term='residual'>again</span> and <span id='none' data-term='juggling'>nothing</span>.</p>
<div class='live'><dl class='strip'><div title='Counted here.'><dt id='number'>tokens</dt></div></dl></div>
<div class='live'><section class='panel'><h3 id='heading'>Draft tree</h3></section></div><a href='#x'>end</a></body>"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser):
    page, wrong = new_context(browser, has_touch=True).new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_content(MARKUP)
    page.evaluate("(code) => new Function(code)()", page_script())
    yield page
    page.context.close()
    assert not wrong


def note(page: Page):
    return page.locator(".glossary-note")


def test_a_term_is_explained_on_hover_and_a_number_by_its_own_definition(page):
    page.hover("#one")
    expect(note(page)).to_contain_text(glossary.definition("residual"))
    page.hover("#number")
    expect(note(page)).to_contain_text("Counted here.")
    expect(page.locator(".strip [title]")).to_have_count(0)  # the browser's own tooltip would repeat it
    page.hover("#none")
    expect(note(page)).to_be_hidden()
    expect(page.locator(".strip [title]")).to_have_count(1)


def test_the_tab_key_reaches_each_term_once_and_escape_closes_its_note(page):
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["one", "own", "number", "heading", "A"]
    page.keyboard.press("Shift+Tab")
    expect(note(page)).to_contain_text(glossary.definition("draft tree"))
    assert page.locator("#heading").get_attribute("aria-describedby") == note(page).get_attribute("id")
    page.keyboard.press("Escape")
    expect(note(page)).to_be_hidden()
    expect(page.locator("#heading")).to_be_focused()


def test_a_tap_opens_the_note_and_another_closes_it(page):
    page.tap("#own")
    expect(note(page)).to_contain_text(glossary.definition("entropy"))
    page.tap("#own")
    expect(note(page)).to_be_hidden()
