"""Standalone pages of a run, and trace files that are opened; keys that lead through a run."""
from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path

import pytest
from chromium import new_context
from live_page import address, browser, feed, page, token_texts, visitor  # noqa: F401
from playwright.sync_api import expect

from playground import Result
from playground.events import Commit, Done, Header, Stamped
from playground.player.standalone import to_html
from playground.trace import Trace
from support.live_runs import EVENTS, HOSTILE, RUN
from support.live_sequences import lane
from support.saved_runs import FIRST, save_as, show

# --- standalone pages ---

def alone(browser, path: Path, **how):
    """A saved page in a window without a network."""
    window = new_context(browser, viewport={"width": 1440, "height": 2400}, offline=True, **how).new_page()
    window.broken, window.asked = [], []
    window.on("pageerror", lambda error: window.broken.append(error))
    window.on("request", lambda request: window.asked.append(request.url))
    window.goto(path.as_uri())
    window.wait_for_selector(".live .lane")
    return window


@pytest.mark.journey
def test_a_saved_page_plays_to_the_end_without_a_network_and_shows_the_same(page, feed, browser, tmp_path):
    show(page, feed)
    shown = [token_texts(page, lane) for lane in (0, 1)]
    window = alone(browser, save_as(page, tmp_path, "page"))
    expect(window.locator(".lane .status")).to_have_text(["ended", "reached the token limit", "failed"])
    assert [token_texts(window, lane) for lane in (0, 1)] == shown
    assert window.locator(".live img").count() == 0 and window.evaluate("window.hacked") is None
    window.locator(".lane[data-lane='1'] .tokens > .t").nth(1).click()
    assert "has no model" in window.locator(".live .card .candidate").nth(1).get_attribute("title")
    expect(window.locator(".live .card .look")).to_be_disabled()
    assert window.asked == [window.url] and not window.broken
    assert Trace.load(save_as(window, tmp_path, "export")).to_json() == RUN.to_json()
    window.context.close()


@pytest.mark.parametrize("lane, status", [(0, "ended"), (1, "reached the token limit")])
def test_a_notebook_plays_a_result_in_a_frame_and_stays_untouched(browser, tmp_path, lane, status):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset='utf-8'>{Result(RUN.lane(lane))._repr_html_()}")
    window = new_context(browser, viewport={"width": 1440, "height": 900}, offline=True).new_page()
    window.goto(notebook.as_uri())
    player = window.frame_locator("iframe")
    expect(player.locator(".lane .status")).to_have_text([status])
    assert player.locator(".lane .tokens > .t").count() == len(Result(RUN.lane(lane)).token_ids)
    assert window.evaluate("document.querySelector('iframe').contentDocument") is None
    window.context.close()


def without_data(text: str) -> str:
    """The page with its script unpacked, and without the trace."""
    unpacked = re.sub(r'(?<=id="source">)[^<]*', lambda found: gzip.decompress(b64decode(found[0])).decode(), text)
    return re.sub(r'(<script type="application/json" id="trace">).*?(</script>)', r"\1\2", unpacked)


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="trace">(.*?)</script>', text, re.S)[1])


def test_the_page_and_the_shell_write_the_same_page(page, feed, tmp_path):
    show(page, feed)
    by_page, by_shell = save_as(page, tmp_path, "page").read_text(), to_html(RUN)
    assert without_data(by_page) == without_data(by_shell) and "class Player" in without_data(by_shell)
    assert data_of(by_page) == data_of(by_shell)
    assert Trace.from_json(data_of(by_shell)).to_json() == RUN.to_json()


@pytest.mark.security
def test_hostile_words_stay_words_in_a_saved_page(browser, tmp_path):
    words = ["</script><script>window.hacked=1</script>", HOSTILE, "{{source}}", "<!--", "$&"]
    prompt = words[0] + words[2]
    events = [Commit(i, [i], [word], word, [None], ["sampled"]) for i, word in enumerate(words)]
    path = tmp_path / "hostile.html"
    path.write_text(to_html(Trace([Header(title=words[1], prompt=prompt, prompt_pieces=[prompt])],
                                  [Stamped(0, i, 0.0, event) for i, event in enumerate([*events, Done("end")])])))
    window = alone(browser, path, color_scheme="dark")
    assert token_texts(window, 0) == words
    assert window.evaluate("window.hacked") is None and window.locator(".live img").count() == 0
    assert window.evaluate("document.body.className") == "dark"
    assert not window.broken
    window.context.close()


# --- keys ---

def test_home_and_end_go_to_the_ends_of_a_run(page, feed):
    show(page, feed)
    page.keyboard.press("Home")
    expect(page.locator(".live .clock")).to_have_text("0.00 of 0.40 s")
    page.keyboard.press("End")
    expect(page.locator(".live .clock")).to_have_text("0.40 of 0.40 s")


def test_the_keys_are_listed_and_work_on_nothing_beneath_the_list(page, feed):
    show(page, feed)
    page.keyboard.press("?")
    dialog = page.locator(".live dialog.keys")
    expect(dialog).to_be_visible()
    assert {"Space", "Home", "End", "?", "Esc"} <= set(dialog.locator("kbd").all_inner_texts())
    page.keyboard.press("Home")
    expect(page.locator(".live .clock")).to_have_text("0.40 of 0.40 s")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.click(".live [data-do=keys]")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")


def test_escape_closes_the_menu_and_puts_the_focus_back(page, feed):
    show(page, feed)
    page.click(".live .save > button")
    page.keyboard.press("Escape")
    expect(page.locator(".live .save [role=dialog]")).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent") == "Save as"


# --- opening ---

def drop(page, name: str, text: str, on: str = ".live"):
    page.evaluate(
        """([name, text, on]) => {
        const carried = new DataTransfer();
        carried.items.add(new File([text], name));
        for (const act of ["dragover", "drop"]) {
            const how = { bubbles: true, cancelable: true, dataTransfer: carried };
            document.querySelector(on).dispatchEvent(new DragEvent(act, how));
        }
    }""",
        [name, text, on],
    )


def as_lines(head: dict, *events: dict) -> str:
    return "\n".join(json.dumps(line) for line in (head, *events)) + "\n"


def test_a_trace_is_opened_wherever_on_the_page_it_is_dropped(page, feed):
    show(page, feed, FIRST)
    whole = RUN.to_json()
    drop(page, "mine.jsonl", as_lines({**whole, "events": []}, *whole["events"]), on="body")
    expect(page.locator(".live .message")).to_have_text(f"Opened mine.jsonl: 3 lanes, {len(EVENTS)} events.")
    expect(page.locator(".lane")).to_have_count(3)
    expect(page.locator(".live")).not_to_have_class(re.compile("dropping"))


HEAD = {"format": "decoding-playground-trace", "version": 1, "lanes": [{"title": "x"}]}


@pytest.mark.parametrize("text, message", [
    ("", "This file is empty"),
    ("PK\x03\x04", "Line 1 of this file is not JSON"),
    (as_lines({"format": "list"}), "This is not a trace"),
    (as_lines({**HEAD, "version": 9}), "has format version 9"),
    (as_lines({**HEAD, "lanes": []}), "has no lanes"),
    (as_lines({**HEAD, "lanes": ["a"]}), "is not an object with fields"),
    (as_lines({**HEAD, "lanes": [{"forced": "none"}]}), "wrong value for forced"),
    (as_lines({**HEAD, "lanes": [{"parts": [None]}]}), "malformed"),
    (as_lines(HEAD, {"kind": "flight", "lane": 0, "seq": 0, "at": 0}), "unknown kind"),
    (as_lines(HEAD, {"kind": "done", "lane": 3, "seq": 0, "at": 0}), "refers to a lane"),
    (as_lines(HEAD, {"kind": "commit", "lane": 0, "seq": 0, "at": 0, "ids": 7}), "wrong value for ids"),
    (as_lines(HEAD)[:-1] + "\n{\"kind\": \"do", "Line 2 of this file is not JSON"),
])
def test_a_file_that_is_no_trace_is_refused_in_a_sentence_and_nothing_is_lost(page, feed, text, message):
    run = show(page, feed, FIRST)
    drop(page, "other.jsonl", text)
    expect(page.locator(".live .message.is-trouble")).to_contain_text(message)
    expect(page.locator(f".live[data-run='{run}'] .lane .tokens > .t")).to_have_count(3)
