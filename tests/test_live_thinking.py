"""Thinking in a lane's text: set apart, counted apart, and folded once it has ended, live and recorded."""
from __future__ import annotations

from dataclasses import asdict

import pytest
from live_page import address, browser, feed, page, seek, send, visitor  # noqa: F401
from playwright.sync_api import expect

from playground.events import Commit, Done, Forward, Header, Stamped
from playground.player.frames import frame, new_name, recording

PIECES = ["<think>", *[" hm"] * 70, "</think>", " the", " answer"]
SHORT = ["6", " +", " 1", "####", " 7"]


def run_of(pieces: list[str], thinking: list[str], recorded: bool = False) -> dict:
    """A lane that writes these tokens, one in each tenth of a second."""
    events = [Forward(phase="prefill"), *(Commit(i, [i], [one], one, [-0.5], ["sampled"])
                                          for i, one in enumerate(pieces)), Done()]
    stamped = [Stamped(0, seq, seq / 10, one).to_json() for seq, one in enumerate(events)]
    head = asdict(Header(strategy="greedy", title="Greedy", prompt="why", prompt_ids=[1], prompt_pieces=["why"],
                         vocabulary=100, thinking=thinking))
    return recording([head], stamped) if recorded else frame(new_name(), 0, stamped, "done", [head])


def show(page, feed, run: dict, to: float = 1.0) -> None:
    send(page, feed, run)
    if page.locator(".live .play.playing").count():
        page.locator(".live .play").click()
    seek(page, to)


def number(page, name: str) -> str:
    return page.locator(f".lane [data-metric='{name}']").text_content()


@pytest.mark.parametrize("recorded", [False, True])
def test_thinking_is_open_while_it_lasts_and_folds_under_its_count_when_it_ends(page, feed, recorded):
    show(page, feed, run_of(PIECES, ["<think>", "</think>"], recorded), 0.5)
    fold, thought = page.locator(".lane .thinking"), page.locator(".lane .t.thinks")
    expect(fold).to_have_attribute("aria-expanded", "true")
    assert thought.count() > 20 and thought.count() == page.locator(".lane .tokens > .t").count()
    expect(fold).to_have_attribute("data-says", f"Thinking so far: {thought.count()} tokens")
    expect(thought.last).to_be_visible()
    seek(page, 1.0)
    expect(fold).to_have_attribute("data-says", "Thinking: 72 tokens")
    expect(fold).to_have_attribute("aria-expanded", "false")
    expect(thought.first).to_be_hidden()
    expect(page.locator(".lane .t:not(.thinks)")).to_have_text([" the", " answer"])
    expect(page.locator(".lane .t:not(.thinks)").first).to_be_visible()
    assert [number(page, name) for name in ("tokens", "thinking_tokens", "answer_tokens")] == ["74", "72", "2"]


def test_a_click_or_the_keyboard_unfolds_it_and_its_count_is_no_text(page, feed):
    show(page, feed, run_of(PIECES, ["<think>", "</think>"]))
    fold, thought = page.locator(".lane .thinking"), page.locator(".lane .t.thinks")
    fold.click()
    expect(thought.first).to_be_visible()
    assert page.locator(".lane .tokens").first.text_content() == "".join(PIECES)
    looks = [page.locator(".lane .t", has_text=text).first.evaluate("t => getComputedStyle(t).fontStyle")
             for text in ("hm", "answer")]
    assert looks == ["italic", "normal"]
    fold.click()
    expect(thought.first).to_be_hidden()
    page.locator(".lane .t", has_text="answer").click()
    page.keyboard.press("Escape")
    page.locator(".lane .text").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(thought.last).to_be_visible()


def test_short_steps_stay_open_and_a_text_without_a_sign_has_no_part(page, feed):
    show(page, feed, run_of(SHORT, ["", "####"]))
    expect(page.locator(".lane .thinking")).to_have_attribute("data-says", "Thinking: 4 tokens")
    expect(page.locator(".lane .t.thinks")).to_have_text(SHORT[:4])
    expect(page.locator(".lane .t.thinks").first).to_be_visible()
    seek(page, 0.4)
    expect(page.locator(".lane .thinking")).to_have_count(0)
    show(page, feed, run_of(SHORT, []))
    expect(page.locator(".lane .thinking")).to_have_count(0)
    assert page.locator(".lane [data-metric='thinking_tokens']").is_hidden()
